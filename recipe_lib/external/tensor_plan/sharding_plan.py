"""A tensor parallel plan as data: which parameter is cut along which axis, and where ranks exchange
what they have.

And what it comes to: layers that are alike taken together, what ranks send each other, and what
each one holds.
"""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from recipe_lib.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is held.

    role: `column` (the axis comes out of its product), `row` (its product sums over the axis),
    `vocabulary` (rows of tokens), `sharded` (carries the axis without a product: a bias, a value
    per head) or `replicated`. dim: the dimension that is cut, -1 for none. axis: number of the
    axis, -1 for none. segments: lengths along dim; each of them is cut into equal consecutive
    parts, one a rank. whole: numbers of the segments of which a rank holds its part but computes
    with all, gathered for each use. unit: elements of the whole dim that belong to one step of the
    axis. gradient: `sharded`; `full`, the same on each rank; `partial`, to be summed over ranks.
    after_reduction: a bias of a row product, to be added once, to the sum over ranks. reason: what
    keeps a replicated parameter whole.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    dim: int = -1
    axis: int = -1
    segments: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    unit: int = 0
    gradient: str = "full"
    after_reduction: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the model that is cut. size: its steps; tensor sizes that divide it are legal.

    vocabulary: an axis of tokens, which may be cut unevenly: rank r of t holds rows from r *
    ceil(size / t) on. output: the last dimension of what the model gives (logits) has the axis, so
    that a rank gives its part alone.
    """

    number: int
    size: int
    parameters: tuple[str, ...]
    vocabulary: bool = False
    output: bool = False


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Where a forward that runs on one rank's part does more than the whole model's forward.

    kind: `enter` (forward as it is; the gradient is summed over ranks), `leave` (what comes out is
    summed over ranks; a gradient passes as it is), `lookup` (a leave, of rows picked by token:
    tokens of other ranks give zeros), `cut` (a whole tensor of which the rank takes its part; its
    gradient is an enter's), `gather` (a rank's tokens become those of all; its gradient is the
    rank's part), `slice` (of all tokens the rank's; its gradient is gathered), `assemble` (of a
    parameter, its `whole` segments are gathered; their gradient is summed and scattered). A gather
    that enters has its gradient summed and scattered; what leaves and is sliced is summed and
    scattered. module, call: path of a module, and number of the torch function call in one forward
    of it (tracing.Calls counts). place: `output` or `output.1` of that call; or the argument, `0`,
    `1.2` or `weight` (`list_places` names them). axes: numbers. parameters: those of the product, or
    those that the activation enters. activation: entering calls with one number share one tensor,
    which has to enter once. bias: leave only: the argument that is to be added after the sum, empty
    for none. mean: leave only: what comes out is the mean over a rank's part, and the sum over
    ranks is divided by their number. taken, dim, segments: the argument that carries the axis
    (leave) or is cut, the dimension, and the lengths that are cut evenly; they repeat as often as
    the dimension has room for. Of an assemble the parameter's. whole: of an assemble or a cut, as a
    ParameterPlan's. function, source: the torch function, and the file and line that calls it; for
    people. width: numbers a token of what ranks sum there: leave and lookup in the forward, enter
    and cut in the backward; 0 where they sum nothing, or where the traced forward took no token
    ids. tokens_first: of a gather or a slice: with other things in dimension dim, the tokens of a
    row are the outermost there, instead of the innermost.
    """

    kind: str
    module: str
    call: int
    place: str
    axes: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    activation: int = -1
    bias: str = ""
    taken: str = ""
    dim: int = 0
    segments: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    function: str = ""
    source: str = ""
    width: int = 0
    tokens_first: bool = False
    mean: bool = False


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An integer attribute that has to be divided by the tensor size, because the forward makes
    shapes of it.

    module: path of the module. attribute: its name; `config.num_heads` for one of an object that
    the module holds. kept: how much of it each rank has; the rest is divided.
    """

    module: str
    attribute: str
    value: int
    axes: tuple[int, ...]
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """A plan for a whole model. refused: why axes that look possible stay whole. legal_sizes:
    tensor sizes above 1.

    shared_tokens: of the elements of activations that no axis cuts, the share of those of which a
    rank has its own tokens alone; 0: every rank has all tokens, and a plan with more takes rows
    that the ranks divide. local_outputs: of layers and of modules outside of them, those that give
    a rank's tokens alone.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[ParameterPlan, ...]
    boundaries: tuple[Boundary, ...]
    rewrites: tuple[Rewrite, ...]
    refused: tuple[str, ...]
    legal_sizes: tuple[int, ...]
    shared_tokens: float = 0.0
    local_outputs: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterPlan:
        """The plan of one parameter. Raises ConfigError for a name that the plan does not have."""
        for found in self.parameters:
            if found.name == name:
                return found
        raise ConfigError(
            f"tensor plan: no parameter {name}, expected one of the model's; make the plan anew"
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings, integers and booleans, for YAML or JSON."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found

    def hash(self) -> str:
        """16 hexadecimal digits that are the same for equal plans, on any machine; texts for people
        do not count.
        """
        held = self.to_dict()
        del (
            held["refused"],
            held["shared_tokens"],
            held["local_outputs"],
        )  # these follow from the rest
        for item in held["parameters"]:
            del item["reason"]
        for item in held["boundaries"]:
            del item["source"], item["function"], item["width"]
        text = json.dumps(held, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute_bounds(
    segments: tuple[int, ...], rank: int, size: int, whole: tuple[int, ...] = ()
) -> list[tuple[int, int]]:
    """Start and stop of a rank's part of each segment. Parts of a segment that `size` does not
    divide are uneven.

    whole: numbers of segments to take all of.
    """
    found = []
    offset = 0
    for number, length in enumerate(segments):
        part = -(-length // size)
        start, stop = (
            (0, length)
            if number in whole
            else (min(rank * part, length), min((rank + 1) * part, length))
        )
        found.append((offset + start, offset + stop))
        offset += length
    return found


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from list_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from list_tensors(item)


def list_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every argument with its place: `0`, `1.2` (third item of the second argument), `weight`."""
    for key, value in (*enumerate(args), *kwargs.items()):
        yield from _list_places_within(str(key), value)


def _list_places_within(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _list_places_within(f"{place}.{number}", item)
    else:
        yield place, value


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: str, value: Any
) -> tuple[Any, dict[str, Any]]:
    """Arguments with the one at a place (`list_places`) replaced."""
    first, *rest = place.split(".")
    if first.isdigit():
        changed = (
            _put(item, rest, value) if number == int(first) else item
            for number, item in enumerate(args)
        )
        return tuple(changed), kwargs
    return args, {**kwargs, first: _put(kwargs[first], rest, value)}


def _put(held: Any, path: list[str], value: Any) -> Any:
    """No function within `replace_argument`: one that calls itself is a cycle, and would keep the value for
    a while.
    """
    if not path:
        return value
    items = list(held)
    items[int(path[0])] = _put(items[int(path[0])], path[1:], value)
    return type(held)(items)


def get_output_values(output: Any) -> Any:
    """What a model gives, dataclasses as dicts."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (dict, type)):
        return vars(output)
    return output


BYTES = 2  # of a number in bf16
WIDE_BYTES = (
    4  # of a gradient that is summed over ranks after the backward, and of the loss's sums: fp32
)
# Numbers a token that a loss sums where each rank has a part of the logits: largest, sum of
# exponentials, the label's.
LOSS_NUMBERS = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.\s,;)]|$)")


def make_pattern(name: str) -> str:
    """A path or a sentence with `*` for each number in a path: `layers.3.mlp` becomes
    `layers.*.mlp`.
    """
    return _NUMBER.sub("*", name)


def group_parameters(plan: ShardingPlan) -> dict[ParameterPlan, list[str]]:
    """The plan's parameters in their order: those that are held alike by a plan with the pattern of
    their names.
    """
    groups: dict[ParameterPlan, list[str]] = {}
    for each in plan.parameters:
        alike = dataclasses.replace(
            each, name=make_pattern(each.name), axis=-1, reason=make_pattern(each.reason)
        )
        groups.setdefault(alike, []).append(each.name)
    return groups


def count_boundaries(plan: ShardingPlan) -> dict[Boundary, int]:
    """The plan's boundaries in the order of the forward: how many are like one, which has patterns
    for names.
    """
    patterns = (
        (each, tuple(dict.fromkeys(map(make_pattern, each.parameters)))) for each in plan.boundaries
    )
    return Counter(
        dataclasses.replace(
            each, module=make_pattern(each.module), axes=(), parameters=names, activation=-1
        )
        for each, names in patterns
    )


def list_collectives(plan: ShardingPlan) -> list[tuple[str, str, int]]:
    """List what ranks exchange in one forward and backward: the phase, the collective's name, and
    its numbers a token.

    An activation that enters, or is gathered, in several places does so once. A boundary counts as
    one run of its module.
    """
    found: list[tuple[str, str, int]] = []
    seen: set[tuple[str, int]] = set()
    places: dict[tuple[str, int, str], list[Boundary]] = {}
    for each in plan.boundaries:
        places.setdefault((each.module, each.call, each.place), []).append(each)
    for here in places.values():
        first = next((each for each in here if each.kind in ("gather", "slice")), here[0])
        way = (" ".join(sorted(each.kind for each in here)), first.activation)
        if not any(each.width for each in here) or (first.activation >= 0 and way in seen):
            continue
        seen.add(way)
        width = first.width or max(each.width for each in here)
        found += [
            (phase, name, width)
            for phase, name in _list_phases({each.kind for each in here if each.width})
        ]
    return found


def _list_phases(kinds: set[str]) -> list[tuple[str, str]]:
    """Return what one place exchanges, forward and backward, where tokens that entered are gathered
    again.
    """
    entering = bool(kinds & {"enter", "cut"})
    if kinds & {"leave", "lookup"}:
        scattered = [("forward", "reduce-scatter"), ("backward", "all-gather")]
        found = scattered if "slice" in kinds else [("forward", "all-reduce")]
        return found + ([("backward", "all-reduce")] if entering else [])
    if "gather" in kinds:
        again = [("backward", "reduce-scatter"), ("backward", "all-gather")]
        return [("forward", "all-gather"), *(again if entering else [])]
    return [("backward", "all-gather" if "slice" in kinds else "all-reduce")]


def count_sent_bytes(payload: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring's all-reduce of `payload` bytes: 2 (t - 1) /
    t of them.
    """
    return 2 * (size - 1) * payload // size


def count_step_bytes(plan: ShardingPlan, size: int, tokens: int) -> dict[str, int]:
    """Bytes that a rank sends for `tokens` tokens, by what they are for: forward, backward, loss,
    gradients.

    forward, backward: activations in bf16, without activation checkpointing, and the parts of cut
    parameters that all ranks use, gathered in both and their gradients scattered. loss: its sums,
    where logits stay cut. gradients: of parameters that ranks have whole and use in part, once a
    step. The last two in fp32.
    """
    found = {"forward": 0, "backward": 0}
    for phase, name, width in list_collectives(
        plan
    ):  # an all-reduce sends as much as a reduce-scatter and an all-gather
        found[phase] += count_sent_bytes(BYTES * tokens * width, size) // (
            1 if name == "all-reduce" else 2
        )
    gathered = sum(count_whole_elements(each) for each in plan.parameters)
    found["forward"] += count_sent_bytes(BYTES * gathered, size) // 2
    found["backward"] += count_sent_bytes(BYTES * gathered, size)
    loss = LOSS_NUMBERS * tokens if any(axis.output for axis in plan.axes) else 0
    partial = sum(prod(each.shape) for each in plan.parameters if each.gradient == "partial")
    return found | {
        "loss": count_sent_bytes(WIDE_BYTES * loss, size),
        "gradients": count_sent_bytes(WIDE_BYTES * partial, size),
    }


def count_whole_elements(parameter: ParameterPlan) -> int:
    """Elements of a cut parameter that every rank computes with."""
    if not parameter.whole:
        return 0
    across = prod(parameter.shape) // parameter.shape[parameter.dim]
    return across * sum(parameter.segments[number] for number in parameter.whole)


def count_held_elements(plan: ShardingPlan, size: int) -> int:
    """Elements of all parameters that rank 0 of `size` holds; no rank holds more."""
    found = 0
    for each in plan.parameters:
        elements = prod(each.shape)
        if each.dim >= 0:
            part = sum(stop - start for start, stop in compute_bounds(each.segments, 0, size))
            elements = elements // each.shape[each.dim] * part
        found += elements
    return found


def compute_cut_share(plan: ShardingPlan) -> float:
    """Share of the elements of all parameters that are cut."""
    sizes = [(prod(each.shape), each.dim >= 0) for each in plan.parameters]
    return sum(size for size, cut in sizes if cut) / max(sum(size for size, _ in sizes), 1)


def why_not(plan: ShardingPlan, size: int) -> str:
    """Why a plan does not allow `size` ranks, or empty if it does."""
    if size in plan.legal_sizes:
        return ""
    said = [each for each in plan.refused if each.startswith(f"{size} ranks: ")]
    if said:
        return said[0].partition(": ")[2]
    for axis in plan.axes:
        if not axis.vocabulary and axis.size % size:
            names = list(dict.fromkeys(map(make_pattern, axis.parameters)))
            shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
            return f"{size} ranks do not divide the {axis.size} units of {shown}"
    for each in plan.rewrites:
        if (each.value - each.kept) % size:
            return (
                f"{size} does not divide {each.value - each.kept}, of {each.attribute} of"
                f" {each.module or 'the model'}"
            )
    return "; ".join(plan.refused[:1]) or "no axis but that of the vocabulary can be cut"


def find_period(segments: list[int]) -> tuple[int, ...]:
    """The shortest list of lengths that gives the segments when it is repeated."""
    for length in range(1, len(segments) + 1):
        if len(segments) % length == 0 and segments == segments[:length] * (
            len(segments) // length
        ):
            return tuple(segments[:length])
    return tuple(segments)

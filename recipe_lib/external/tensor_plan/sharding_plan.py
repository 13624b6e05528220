"""A tensor parallel plan as data: which parameter is cut along which axis, and where ranks
exchange.

`infer.infer_plan` makes one, `plan_executor` runs it. And what it comes to, for reports: layers
that are alike taken together, what ranks send each other, and what each one holds.
"""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, cast

import torch

from recipe_lib.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """One parameter, as ranks hold it."""

    name: str
    shape: tuple[int, ...]  # of the whole
    # `column` (column-parallel: the axis comes out of its product), `row` (row-parallel: its
    # product sums over the axis), `vocabulary` (rows of tokens), `sharded` (has the axis without a
    # product: a bias, a value per head) or `replicated`.
    role: str
    # The dimension that is cut, and the number of the axis; -1 for none.
    dim: int = -1
    axis: int = -1
    # Lengths along dim; each of them is cut into equal consecutive parts, one a rank.
    segments: tuple[int, ...] = ()
    # Numbers of the segments of which a rank holds its part but computes with all, gathered for
    # each use.
    whole: tuple[int, ...] = ()
    # Elements of the whole dim that belong to one step of the axis.
    unit: int = 0
    # `sharded`; `full`, the same on each rank; `partial`, to be summed over ranks.
    gradient: str = "full"
    # A bias of a row-parallel product, to be added once, to the sum over ranks.
    after_reduction: bool = False
    # What keeps a replicated parameter whole.
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the model that is cut."""

    number: int
    # Its steps; tensor sizes that divide it are legal.
    size: int
    parameters: tuple[str, ...]
    # An axis of tokens, which may be cut unevenly: rank r of t holds rows from r * ceil(size / t)
    # on.
    vocabulary: bool = False
    # The last dimension of what the model gives (logits) has it: a rank gives its part alone.
    output: bool = False


@dataclasses.dataclass(frozen=True)
class Boundary:
    """One exchange between ranks: where a rank's forward does more than the whole model's.

    kind        forward                                      its gradient
    `enter`     passes as it is                              is summed over ranks
    `leave`     is summed over ranks                         passes as it is
    `lookup`    a leave, of rows picked by token: tokens of other ranks give zeros
    `cut`       of a whole tensor, the rank's part           is summed over ranks
    `gather`    a rank's tokens become those of all          the rank's part
    `slice`     of all tokens, the rank's                    is gathered
    `assemble`  of a parameter, `whole` segments gathered    is summed and scattered there

    A gather that enters has its gradient summed and scattered; what leaves and is sliced is summed
    and scattered. Fields that a kind does not need have their default.
    """

    kind: str
    # Path of a module, and number of the torch function call in one forward of it.
    module: str
    call: int
    # `output` or `output.1` of that call; or the argument, `0`, `1.2` or `weight` (`list_places`).
    place: str
    # Numbers of the plan's axes, and parameters: those of the product, or those that an activation
    # enters.
    axes: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    # Enter, gather, slice: those with one number share one tensor, which has to enter once.
    activation: int = -1
    # Leave: the argument that is to be added after the sum, empty for none.
    bias: str = ""
    # Leave: the argument that has the axis.
    taken: str = ""
    # The dimension of that, or of what is cut, gathered, sliced or assembled.
    dim: int = 0
    # Leave, cut, assemble: lengths along dim that are cut evenly; they repeat as often as there is
    # room.
    segments: tuple[int, ...] = ()
    # Cut, assemble: numbers of segments that stay whole, as a ParameterPlan's.
    whole: tuple[int, ...] = ()
    # The torch function, and the file and line that calls it; for people.
    function: str = ""
    source: str = ""
    # Numbers a token of what ranks exchange there, for a report: leave and lookup in the forward,
    # enter and cut in the backward; 0 where they sum nothing, or where the trace took no token ids.
    width: int = 0
    # Gather, slice: with other things in dim, the tokens of a row are the outermost there, instead
    # of the innermost.
    tokens_first: bool = False
    # Leave: it is the mean over a rank's part; the sum over ranks is divided by their number.
    mean: bool = False


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An integer attribute that is divided by the tensor size: the forward makes shapes of it."""

    module: str  # its path
    attribute: str  # `config.num_heads` for one of an object that the module holds
    value: int
    axes: tuple[int, ...]
    # How much of it each rank has; the rest is divided.
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """A plan for a whole model; `to_dict` is what `tune tp-plan` writes, so that fields keep their
    names.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[ParameterPlan, ...]
    boundaries: tuple[Boundary, ...]
    rewrites: tuple[Rewrite, ...]
    # Why axes that look possible stay whole, a line each.
    refused: tuple[str, ...]
    # Tensor sizes above 1 that can run it.
    legal_sizes: tuple[int, ...]
    # Of the elements of activations that no axis cuts, the share of those of which a rank has its
    # own tokens alone. 0: every rank has all tokens; a plan with more takes rows that ranks divide.
    shared_tokens: float = 0.0
    # Of layers and of modules outside of them, those that give a rank's tokens alone.
    local_outputs: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterPlan:
        """Return the plan of one parameter. Raises ConfigError for a name that the plan does not
        have.
        """
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise ConfigError(
            f"tensor plan: no parameter {name}, expected one of the model's; make the plan anew"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, strings, integers and booleans, for YAML or
        JSON.
        """
        return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))

    def hash(self) -> str:
        """Return 16 hexadecimal digits that are the same for equal plans, on any machine; texts for
        people do not count.
        """
        fields = self.to_dict()
        # These follow from the rest.
        del fields["refused"], fields["shared_tokens"], fields["local_outputs"]
        for parameter in fields["parameters"]:
            del parameter["reason"]
        for boundary in fields["boundaries"]:
            del boundary["source"], boundary["function"], boundary["width"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute_bounds(
    segments: tuple[int, ...], rank: int, size: int, whole: tuple[int, ...] = ()
) -> list[tuple[int, int]]:
    """Return start and stop of a rank's part of each segment; they are uneven where `size` does not
    divide one.

    whole: numbers of segments to take all of.
    """
    starts_and_stops = []
    offset = 0
    for number, length in enumerate(segments):
        part = -(-length // size)
        is_whole = number in whole
        first = 0 if is_whole else min(rank * part, length)
        last = length if is_whole else min((rank + 1) * part, length)
        starts_and_stops.append((offset + first, offset + last))
        offset += length
    return starts_and_stops


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from list_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from list_tensors(item)


def list_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every argument with its place: `0`, `1.2` (third item of the second argument),
    `weight`.
    """
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
    """Return the arguments with the one at a place (`list_places`) replaced."""
    first, *rest = place.split(".")
    if first.isdigit():
        changed = (
            _put(item, rest, value) if number == int(first) else item
            for number, item in enumerate(args)
        )
        return tuple(changed), kwargs
    return args, {**kwargs, first: _put(kwargs[first], rest, value)}


# No function within `replace_argument`: one that calls itself is a reference cycle, and would keep
# the value, which may be an activation, until the garbage collector runs.
def _put(argument: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    items = list(argument)
    items[int(path[0])] = _put(items[int(path[0])], path[1:], value)
    return type(argument)(items)


def get_output_values(output: Any) -> Any:
    """Return what a model gives, dataclasses as dicts."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (dict, type)):
        return vars(output)
    return output


BYTES = 2  # of a number in bf16
# Of a gradient that is summed over ranks after the backward, and of the loss's sums: fp32.
WIDE_BYTES = 4
# Numbers a token that a loss sums where each rank has a part of the logits: largest, sum of
# exponentials, the label's.
LOSS_NUMBERS = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.\s,;)]|$)")


def make_pattern(name: str) -> str:
    """Return a path or a sentence with `*` for each number in a path: `layers.3.mlp` becomes
    `layers.*.mlp`.
    """
    return _NUMBER.sub("*", name)


def group_parameters(plan: ShardingPlan) -> dict[ParameterPlan, list[str]]:
    """Return the plan's parameters in their order: those that are held alike by one plan with the
    pattern of their names.
    """
    groups: dict[ParameterPlan, list[str]] = {}
    for each in plan.parameters:
        alike = dataclasses.replace(
            each, name=make_pattern(each.name), axis=-1, reason=make_pattern(each.reason)
        )
        groups.setdefault(alike, []).append(each.name)
    return groups


def count_boundaries(plan: ShardingPlan) -> dict[Boundary, int]:
    """Count the boundaries that are like one, in the order of the forward; names become
    patterns.
    """
    counts: Counter[Boundary] = Counter()
    for boundary in plan.boundaries:
        names = tuple(dict.fromkeys(map(make_pattern, boundary.parameters)))
        alike = dataclasses.replace(
            boundary, module=make_pattern(boundary.module), axes=(), parameters=names, activation=-1
        )
        counts[alike] += 1
    return counts


def list_collectives(plan: ShardingPlan) -> list[tuple[str, str, int]]:
    """List what ranks exchange in one forward and backward: the phase, the collective's name, and
    its numbers a token.

    An activation that enters, or is gathered, in several places does so once. A boundary counts as
    one run of its module.
    """
    exchanges: list[tuple[str, str, int]] = []
    seen: set[tuple[str, int]] = set()
    by_place: dict[tuple[str, int, str], list[Boundary]] = {}
    for boundary in plan.boundaries:
        by_place.setdefault((boundary.module, boundary.call, boundary.place), []).append(boundary)
    for boundaries in by_place.values():
        first = next(
            (each for each in boundaries if each.kind in ("gather", "slice")), boundaries[0]
        )
        exchange = (" ".join(sorted(each.kind for each in boundaries)), first.activation)
        is_repeated = first.activation >= 0 and exchange in seen
        width = first.width or max(each.width for each in boundaries)
        if is_repeated or not width:
            continue
        seen.add(exchange)
        phases = _list_phases({each.kind for each in boundaries if each.width})
        exchanges += [(phase, name, width) for phase, name in phases]
    return exchanges


def _list_phases(kinds: set[str]) -> list[tuple[str, str]]:
    """Return what one place exchanges, forward and backward, where tokens that entered are gathered
    again.
    """
    entering = bool(kinds & {"enter", "cut"})
    if kinds & {"leave", "lookup"}:
        scattered = [("forward", "reduce-scatter"), ("backward", "all-gather")]
        leaving = scattered if "slice" in kinds else [("forward", "all-reduce")]
        return leaving + ([("backward", "all-reduce")] if entering else [])
    if "gather" in kinds:
        again = [("backward", "reduce-scatter"), ("backward", "all-gather")]
        return [("forward", "all-gather"), *(again if entering else [])]
    return [("backward", "all-gather" if "slice" in kinds else "all-reduce")]


def count_sent_bytes(payload: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends in a ring's all-reduce of `payload`
    bytes.
    """
    return 2 * (size - 1) * payload // size


def count_step_bytes(plan: ShardingPlan, size: int, tokens: int) -> dict[str, int]:
    """Return the bytes that a rank sends for `tokens` tokens, by what they are for: forward,
    backward, loss, gradients.

    forward, backward: activations in bf16, without activation checkpointing, and the parts of cut
    parameters that all ranks use, gathered in both and their gradients scattered. loss: its sums,
    where logits stay cut. gradients: of parameters that ranks have whole and use in part, once a
    step. The last two in fp32.
    """
    sent = {"forward": 0, "backward": 0}
    for phase, name, width in list_collectives(plan):
        # An all-reduce sends as much as a reduce-scatter and an all-gather.
        share = 1 if name == "all-reduce" else 2
        sent[phase] += count_sent_bytes(BYTES * tokens * width, size) // share
    gathered = sum(count_whole_elements(each) for each in plan.parameters)
    sent["forward"] += count_sent_bytes(BYTES * gathered, size) // 2
    sent["backward"] += count_sent_bytes(BYTES * gathered, size)
    loss = LOSS_NUMBERS * tokens if any(axis.output for axis in plan.axes) else 0
    partial = sum(prod(each.shape) for each in plan.parameters if each.gradient == "partial")
    sent["loss"] = count_sent_bytes(WIDE_BYTES * loss, size)
    sent["gradients"] = count_sent_bytes(WIDE_BYTES * partial, size)
    return sent


def count_whole_elements(parameter: ParameterPlan) -> int:
    """Return the elements of a cut parameter that every rank computes with."""
    length = sum(parameter.segments[number] for number in parameter.whole)
    return prod(parameter.shape) // parameter.shape[parameter.dim] * length if length else 0


def count_held_elements(plan: ShardingPlan, size: int) -> int:
    """Return the elements of all parameters that rank 0 of `size` holds; no rank holds more."""
    total = 0
    for parameter in plan.parameters:
        elements = prod(parameter.shape)
        if parameter.dim >= 0:
            part = sum(stop - start for start, stop in compute_bounds(parameter.segments, 0, size))
            elements = elements // parameter.shape[parameter.dim] * part
        total += elements
    return total


def compute_cut_share(plan: ShardingPlan) -> float:
    """Return the share of the elements of all parameters that are cut."""
    sizes = [(prod(each.shape), each.dim >= 0) for each in plan.parameters]
    return sum(size for size, cut in sizes if cut) / max(sum(size for size, _ in sizes), 1)


def why_not(plan: ShardingPlan, size: int) -> str:
    """Return why a plan does not allow `size` ranks, or empty if it does."""
    if size in plan.legal_sizes:
        return ""
    refusals = [line for line in plan.refused if line.startswith(f"{size} ranks: ")]
    if refusals:
        return refusals[0].partition(": ")[2]
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
    """Return the shortest list of lengths that gives the segments when it is repeated."""
    for length in range(1, len(segments) + 1):
        if len(segments) % length == 0 and segments == segments[:length] * (
            len(segments) // length
        ):
            return tuple(segments[:length])
    return tuple(segments)

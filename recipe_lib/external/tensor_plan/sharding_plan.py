"""Describe a tensor-parallel plan as data: how parameters are cut, where ranks exchange tensors.

`infer.infer_plan` makes a `ShardingPlan`, `plan_executor` runs it, `tune tp-plan` reports on it by
the second half of the file. An axis is a dimension, or a factor of one, that several tensors share,
such as attention heads; each rank has some of its steps (heads). A boundary is one exchange of the
ranks, at an argument or a result of one call of a torch function.
"""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import Any, cast

from recipe_lib.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """One parameter, as ranks hold it."""

    name: str  # as in `named_parameters()`
    shape: tuple[int, ...]  # of the whole parameter
    # `column` (column-parallel: the axis comes out of its product), `row` (row-parallel: its
    # product sums over the axis), `vocabulary` (rows of tokens), `sharded` (has the axis without a
    # product: a bias, a value per head) or `replicated`.
    role: str
    dim: int = -1  # the dimension that is cut; -1: none is
    axis: int = -1  # `Axis.number` of the axis along which it is cut; -1: none
    # Lengths along dim, such as those of queries, keys and values in a fused matrix. Each one is
    # cut into equal consecutive parts, one a rank.
    segments: tuple[int, ...] = ()
    # Indices of the segments of which a rank holds its part but computes with all, gathered for
    # each use.
    whole: tuple[int, ...] = ()
    # Elements along dim that belong to one step of the axis, such as the width of a head.
    unit: int = 0
    # What a rank's gradient is: `sharded`, of its part; `full`, the same on each rank; `partial`,
    # to be summed over ranks.
    gradient: str = "full"
    # A bias of a row-parallel product: it is added once, to the sum over ranks.
    after_reduction: bool = False
    reason: str = ""  # why a replicated parameter is not cut, in words


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the model that is cut."""

    number: int  # by which other parts of the plan refer to it
    size: int  # number of steps, such as heads; numbers of ranks that divide it are legal
    parameters: tuple[str, ...]  # names of those that are cut along it
    # The axis of the vocabulary, which may be cut unevenly: rank r of t holds rows from
    # r * ceil(size / t) on.
    vocabulary: bool = False
    # The last dimension of the logits has it: a rank's forward returns its part alone.
    output: bool = False


@dataclasses.dataclass(frozen=True)
class Boundary:
    """One exchange between ranks, at an argument or a result of one call of a torch function.

    kind        forward: the tensor                          backward: its gradient
    `enter`     passes as it is                              is summed over ranks
    `leave`     is summed over ranks                         passes as it is
    `lookup`    as leave; rows of an embedding, zeros for tokens of other ranks
    `cut`       is cut to the rank's part                    is summed over ranks
    `gather`    a rank's tokens become those of all          is cut to the rank's tokens
    `slice`     all tokens become the rank's                 is gathered
    `assemble`  a parameter: `whole` segments are gathered   is reduce-scattered there

    Two kinds at one place are one collective: of a tensor that is gathered and enters, the gradient
    is reduce-scattered; one that leaves and is sliced is reduce-scattered itself. Fields that a
    kind does not need have their default.
    """

    kind: str  # see above
    module: str  # path of the module in whose forward the call is; empty: the model itself
    call: int  # index of the torch function call in one forward of the module
    # `output` or `output.1` of that call; or the argument, `0`, `1.2` or `weight` (`list_places`).
    place: str
    axes: tuple[int, ...]  # numbers of the axes that make the exchange necessary
    # Names: of the parameters of a product that leaves, of the embedding of a lookup, of those that
    # an entering tensor meets, of the one that is assembled.
    parameters: tuple[str, ...] = ()
    # Enter, gather, slice: boundaries with the same number are of one tensor, which is exchanged
    # once for all of them; -1: other kinds.
    activation: int = -1
    # Leave: the argument (as `place`) that is added once, after the sum; empty: none.
    bias: str = ""
    # Leave: the argument (as `place`) that has the axis, of which a rank has its part.
    taken: str = ""
    # The dimension of `taken`, or of the tensor that is cut, gathered, sliced or assembled.
    dim: int = 0
    # Leave, cut, assemble: lengths along dim that are cut evenly. They repeat until dim ends.
    segments: tuple[int, ...] = ()
    # Cut: indices of segments that stay whole. Assemble: of those that are gathered.
    whole: tuple[int, ...] = ()
    # Name of the torch function. Another one at that call shows that the forward has changed.
    function: str = ""
    source: str = ""  # file and line of the call, for messages and reports
    # Elements a token that ranks exchange, for reports: leave and lookup in the forward, enter and
    # cut in the backward. 0 where nothing is summed, or where the trace had no token ids.
    width: int = 0
    # Gather, slice: where a view has put the tokens of a row into one dimension with others, they
    # are outermost there; False: innermost.
    tokens_first: bool = False
    # Leave: the call is a mean over a rank's part; the sum over ranks is divided by their number.
    mean: bool = False


# Functions that are not counted as calls: reads of an attribute or of a shape.
READS = ("__get__", "size")


@dataclasses.dataclass(eq=False)
class RunningForward:
    """A forward of one module that is running, with the count of its calls.

    `tracing` numbers calls by it, and `plan_executor` when it runs the plan. A call is one of a
    torch function but `READS` that returns a tensor, and that no torch function makes itself.
    """

    path: str  # of the module; empty: the model itself
    calls: int = 0  # how many it has made so far, and so the index of the next one
    reached: int = 0  # calls so far at which the plan has an exchange; `plan_executor` counts them


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An integer attribute, such as `num_heads`, of which a forward makes shapes.

    A rank runs with kept + (value - kept) / number of ranks.
    """

    module: str  # path of the module that has it
    attribute: str  # its name; `config.num_heads` for one of an object that the module holds
    value: int  # in the whole model
    axes: tuple[int, ...]  # numbers of the axes whose steps it counts
    kept: int = 0  # the part of it that every rank has whole


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """A tensor-parallel plan of a whole model.

    `tune tp-plan` writes `to_dict`: the names of fields are part of a file format.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[ParameterPlan, ...]  # all of the model, in its order; replicated ones too
    boundaries: tuple[Boundary, ...]  # those of axes, then those of tokens; each in forward order
    rewrites: tuple[Rewrite, ...]
    refused: tuple[str, ...]  # why axes that look possible stay whole, and more, a line each
    legal_sizes: tuple[int, ...]  # numbers of ranks above 1 that can run it
    # Share, 0 to 1, by elements, of the activations without a cut axis: of these a rank has its
    # own tokens alone. 0: every rank has all tokens; else ranks must divide the length of rows.
    shared_tokens: float = 0.0
    # Paths of layers, and of modules outside them, whose output has a rank's own tokens alone.
    local_outputs: tuple[str, ...] = ()

    @cached_property
    def _parameters_by_name(self) -> dict[str, ParameterPlan]:
        return {parameter.name: parameter for parameter in self.parameters}

    def parameter(self, name: str) -> ParameterPlan:
        """Return the plan of one parameter. Raises ConfigError for an unknown name."""
        if name not in self._parameters_by_name:
            raise ConfigError(
                f"tensor plan: no parameter {name}, expected one of the model's; make the plan anew"
            )
        return self._parameters_by_name[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings, numbers and booleans, for YAML or JSON."""
        return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))

    def hash(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal plans, on any machine."""
        fields = self.to_dict()
        # Texts for people do not count, nor what follows from the other fields.
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
    """Return (start, stop) of a rank's part of each segment of a dimension.

    segments: lengths of consecutive segments. size: number of ranks; where it does not divide a
    length, the last ranks have less. whole: indices of segments of which a rank takes all.
    """
    starts_and_stops = []
    offset = 0
    for index, length in enumerate(segments):
        part = -(-length // size)
        is_whole = index in whole
        first = 0 if is_whole else min(rank * part, length)
        last = length if is_whole else min((rank + 1) * part, length)
        starts_and_stops.append((offset + first, offset + last))
        offset += length
    return starts_and_stops


def list_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, argument) of a call's arguments, also of those within tuples and lists.

    A place is the argument's index or name: `0`, `weight`, `1.2` (third item of the second one).
    """
    for key, value in (*enumerate(args), *kwargs.items()):
        yield from _list_places_within(str(key), value)


def _list_places_within(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, item) of a nested value; a value that is no tuple or list is one item."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _list_places_within(f"{place}.{index}", item)
    else:
        yield place, value


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: str, value: Any
) -> tuple[Any, dict[str, Any]]:
    """Return (args, kwargs) with the argument at a place (`list_places`) replaced by `value`."""
    first, *rest = place.split(".")
    if first.isdigit():
        changed = (
            _put(item, rest, value) if index == int(first) else item
            for index, item in enumerate(args)
        )
        return tuple(changed), kwargs
    return args, {**kwargs, first: _put(kwargs[first], rest, value)}


# Not nested in `replace_argument`: a nested function that calls itself is a reference cycle, and
# would keep the value, which may be an activation, until the garbage collector runs.
def _put(argument: Any, path: list[str], value: Any) -> Any:
    """Return an argument with the item at a path of indices replaced; an empty path: all of it."""
    if not path:
        return value
    items = list(argument)
    items[int(path[0])] = _put(items[int(path[0])], path[1:], value)
    return type(argument)(items)


def get_output_values(output: Any) -> Any:
    """Return a model's output as it is, but of a dataclass its fields as a dict."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (dict, type)):
        return vars(output)
    return output


# Count what a plan sends and holds, for reports.


BYTES = 2  # of an element of an activation, or of a parameter, in bf16
# Bytes of an element, in fp32, of gradients that are summed over ranks after the backward, and of
# the sums of the loss.
WIDE_BYTES = 4
# Elements a token that ranks sum for the loss where each one has a part of the logits: the largest
# logit, the sum of exponentials, the label's logit.
LOSS_NUMBERS = 3
# A number behind a dot: a layer's index, in a path or in a path within a sentence.
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.\s,;)]|$)")


def make_pattern(name: str) -> str:
    """Return a path, or a sentence with paths, with `*` for layers' numbers: `layers.*.mlp`."""
    return _NUMBER.sub("*", name)


def group_parameters(plan: ShardingPlan) -> dict[ParameterPlan, list[str]]:
    """Group the plan's parameters whose plans are equal but for layer numbers.

    Returns (common plan, its name a pattern) -> the parameters' names, in the order of the model.
    """
    groups: dict[ParameterPlan, list[str]] = {}
    for parameter in plan.parameters:
        group_plan = dataclasses.replace(
            parameter,
            name=make_pattern(parameter.name),
            axis=-1,
            reason=make_pattern(parameter.reason),
        )
        groups.setdefault(group_plan, []).append(parameter.name)
    return groups


def count_boundaries(plan: ShardingPlan) -> dict[Boundary, int]:
    """Count the boundaries that are equal but for layer numbers, in the order of the forward.

    The keys have patterns in place of names, and no numbers of axes and activations.
    """
    counts: Counter[Boundary] = Counter()
    for boundary in plan.boundaries:
        names = tuple(dict.fromkeys(map(make_pattern, boundary.parameters)))
        group_boundary = dataclasses.replace(
            boundary, module=make_pattern(boundary.module), axes=(), parameters=names, activation=-1
        )
        counts[group_boundary] += 1
    return counts


def list_collectives(plan: ShardingPlan) -> list[tuple[str, str, int]]:
    """List the collectives of one forward and backward as (phase, name, elements a token).

    The phase is "forward" or "backward", the name "all-reduce", "all-gather" or "reduce-scatter".
    An activation that is exchanged for several places counts once, and each module as if it ran
    once.
    """
    exchanges: list[tuple[str, str, int]] = []
    seen: set[tuple[str, int]] = set()  # (kinds at a place, activation)
    by_place: dict[tuple[str, int, str], list[Boundary]] = {}
    for boundary in plan.boundaries:
        by_place.setdefault((boundary.module, boundary.call, boundary.place), []).append(boundary)
    for boundaries in by_place.values():
        first = next(
            (boundary for boundary in boundaries if boundary.kind in ("gather", "slice")),
            boundaries[0],
        )
        exchange = (
            " ".join(sorted(boundary.kind for boundary in boundaries)),
            first.activation,
        )
        is_repeated = first.activation >= 0 and exchange in seen
        width = first.width or max(boundary.width for boundary in boundaries)
        if is_repeated or not width:
            continue
        seen.add(exchange)
        phases = _list_phases({boundary.kind for boundary in boundaries if boundary.width})
        exchanges += [(phase, name, width) for phase, name in phases]
    return exchanges


def _list_phases(kinds: set[str]) -> list[tuple[str, str]]:
    """List (phase, collective) of the boundaries of these kinds at one place.

    Gathered tokens are not kept for backward: a product's backward gathers them again.
    """
    entering = bool(kinds & {"enter", "cut"})
    if kinds & {"leave", "lookup"}:
        scattered = [("forward", "reduce-scatter"), ("backward", "all-gather")]
        leaving = scattered if "slice" in kinds else [("forward", "all-reduce")]
        return leaving + ([("backward", "all-reduce")] if entering else [])
    if "gather" in kinds:
        backward = [("backward", "reduce-scatter"), ("backward", "all-gather")]
        return [("forward", "all-gather"), *(backward if entering else [])]
    return [("backward", "all-gather" if "slice" in kinds else "all-reduce")]


def count_sent_bytes(payload: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends in a ring all-reduce of `payload` bytes."""
    return 2 * (size - 1) * payload // size


def count_step_bytes(plan: ShardingPlan, size: int, tokens: int) -> dict[str, int]:
    """Return the bytes that a rank of `size` sends for `tokens` tokens, by purpose.

    "forward", "backward": activations in bf16, without activation checkpointing, and the segments
    of parameters that are assembled: they are gathered in both, and their gradients scattered.
    "loss": its sums in fp32, where each rank has a part of the logits. "gradients": partial ones of
    replicated parameters in fp32, once a step.
    """
    sent = {"forward": 0, "backward": 0}
    for phase, name, width in list_collectives(plan):
        # An all-reduce sends as much as a reduce-scatter and an all-gather.
        share = 1 if name == "all-reduce" else 2
        sent[phase] += count_sent_bytes(BYTES * tokens * width, size) // share
    num_gathered = sum(count_whole_elements(parameter) for parameter in plan.parameters)
    sent["forward"] += count_sent_bytes(BYTES * num_gathered, size) // 2
    sent["backward"] += count_sent_bytes(BYTES * num_gathered, size)
    num_loss_elements = LOSS_NUMBERS * tokens if any(axis.output for axis in plan.axes) else 0
    num_partial = sum(
        prod(parameter.shape) for parameter in plan.parameters if parameter.gradient == "partial"
    )
    sent["loss"] = count_sent_bytes(WIDE_BYTES * num_loss_elements, size)
    sent["gradients"] = count_sent_bytes(WIDE_BYTES * num_partial, size)
    return sent


def count_whole_elements(parameter: ParameterPlan) -> int:
    """Count the elements of a cut parameter in its `whole` segments, which all ranks compute with.

    0 for most parameters.
    """
    length = sum(parameter.segments[index] for index in parameter.whole)
    return prod(parameter.shape) // parameter.shape[parameter.dim] * length if length else 0


def count_held_elements(plan: ShardingPlan, size: int) -> int:
    """Count the elements of all parameters that rank 0 of `size` holds; no rank holds more."""
    total = 0
    for parameter in plan.parameters:
        num_elements = prod(parameter.shape)
        if parameter.dim >= 0:
            length = sum(
                stop - start
                for start, stop in compute_bounds(parameter.segments, rank=0, size=size)
            )
            num_elements = num_elements // parameter.shape[parameter.dim] * length
        total += num_elements
    return total


def compute_cut_share(plan: ShardingPlan) -> float:
    """Return the share of all parameters, by elements, that are cut: 0 to 1."""
    sizes = [(prod(parameter.shape), parameter.dim >= 0) for parameter in plan.parameters]
    return sum(size for size, is_cut in sizes if is_cut) / max(sum(size for size, _ in sizes), 1)


def why_not(plan: ShardingPlan, size: int) -> str:
    """Return why a plan does not allow `size` ranks, in words; empty if it does."""
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
    for rewrite in plan.rewrites:
        if (rewrite.value - rewrite.kept) % size:
            return (
                f"{size} does not divide {rewrite.value - rewrite.kept}, of {rewrite.attribute} of"
                f" {rewrite.module or 'the model'}"
            )
    return "; ".join(plan.refused[:1]) or "no axis but that of the vocabulary can be cut"


def find_period(segments: list[int]) -> tuple[int, ...]:
    """Return the shortest run of lengths whose repetition gives all the segments."""
    count = len(segments)
    lengths = (
        length
        for length in range(1, count + 1)
        if count % length == 0 and segments == segments[:length] * (count // length)
    )
    return tuple(segments[: next(lengths, 0)])

"""A forward as data: its tensors, its operators and calls, and an axis on its way through it.

`tracing` writes a trace, and everything else reads it: `propagation` follows an axis through it,
`attribute_rewrites` and `token_sharing` compute its integers for a rank (`LocalSizes`, `list_demands`).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    compute_local_size,
    list_factors,
    list_parts,
    unify,
)
from recipe_lib.external.tensor_plan.sharding_plan import list_tensors
from recipe_lib.external.tensor_plan.sourced_integers import Decision, Size

Dims = list[AxisNode]
Rule = Callable[["OperatorCall"], list[Dims] | None]
_SHAPES = frozenset(
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand randn".split()
)


@dataclasses.dataclass(eq=False)
class TracedTensor:
    """What is known of one tensor.

    parameters: names of those it comes from, if from parameters and constants alone. activation: it
    depends on an input. identifiers: it is the model's token ids, or made of them one by one. base:
    what it is a view of.
    """

    dims: list[AxisNode]
    parameters: frozenset[str] = frozenset()
    activation: bool = False
    identifiers: bool = False
    base: "TracedTensor | None" = None
    call: int = -1

    @property
    def root(self) -> "TracedTensor":
        """The tensor whose memory this is."""
        return self.base.root if self.base is not None else self


class OperatorCall:
    """One operator at work: its arguments by name, what is known of its tensors, and what its rule
    says of it.

    inputs, outputs: what is known of the tensors that go in and come out. results: those that come
    out. held: what is known of those that go in, by id. call: number of the torch function call
    that makes it, -1 for none. contractions: dimensions that it sums over, of which inputs.
    reductions: those of which it makes a sum or a mean, of which input. lookup: it picks rows by
    token. uniform: what comes out is the same everywhere, whatever its size. values: it differs
    from place to place, and no input has those places. ordered: it counts or sorts. added: what a
    product is added to. picked: the numbers within brackets, by place.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[torch.Tensor],
        place: str,
        known: Callable[[torch.Tensor], TracedTensor],
    ):
        self.function, self.place = function, place
        self.args, self.kwargs, self.results, self.known = args, kwargs, results, known
        self.name = get_short_name(function)
        self.reason = f"{self.name} in {place}"
        self.held = {id(tensor): known(tensor) for tensor in list_tensors((args, kwargs))}
        self.inputs = [self.held[id(tensor)] for tensor in list_tensors((args, kwargs))]
        self.outputs: list[TracedTensor] = []
        self.call = -1
        self.contractions: list[tuple[AxisNode, TracedTensor, TracedTensor]] = []
        self.reductions: list[tuple[AxisNode, TracedTensor]] = []
        self.lookup = self.uniform = self.values = self.ordered = False
        self.added: TracedTensor | None = None
        self.picked: dict[str, Any] = {}
        self.rule: Rule | None = None
        self._schema = function._schema.arguments

    def get_dims(self, tensor: torch.Tensor) -> Dims:
        """The dimensions of a tensor."""
        return self.known(tensor).dims

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by the name that the operator's schema gives it."""
        if name in self.kwargs:
            return self.kwargs[name]
        for number, argument in enumerate(self._schema):
            if argument.name == name:
                if number < len(self.args):
                    return self.args[number]
                return argument.default_value if argument.has_default_value() else default
        return default

    def get_first_tensor(self) -> torch.Tensor:
        """The first tensor argument."""
        return next(list_tensors((self.args, self.kwargs)))

    def get_shape(self) -> list[int]:
        """The sizes of the first output."""
        return list(self.results[0].shape)

    def contract(
        self, left: AxisNode, right: AxisNode, left_tensor: torch.Tensor, right_tensor: torch.Tensor
    ) -> None:
        """Sums over a dimension that both tensors have."""
        unify(left, right, self.reason)
        self.contractions.append((left, self.known(left_tensor), self.known(right_tensor)))

    def join(self, left: AxisNode, right: AxisNode) -> AxisNode:
        """The dimension that comes of two under broadcasting."""
        if left.size == 1:
            return right
        if right.size != 1:
            unify(left, right, self.reason)
        return left

    def make_dims(self, sizes: Sequence[int], blocked: bool = False) -> Dims:
        """New dimensions, of which nothing is known, or which cannot be cut."""
        return [AxisNode(size, blocked=self.reason if blocked else "") for size in sizes]


def get_short_name(function: Any) -> str:
    """An operator's name without namespace and overload."""
    return str(function._schema.name).removeprefix("aten::")


class CallKey(NamedTuple):
    """module: its path in the model, empty for the model itself. number: of the call within one
    forward, from 0.
    """

    module: str
    number: int


@dataclasses.dataclass(eq=False)
class FunctionCall:
    """One torch function call. arguments: (place, tensor, needs a gradient). source: file and line
    in the model.
    """

    key: CallKey
    function: str
    source: str
    arguments: list[tuple[str, TracedTensor, bool]] = dataclasses.field(default_factory=list)
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)
    records: list[OperatorCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class ForwardTrace:
    """What one forward did. unknown: operators without a rule, with the module. assumed: values
    that were made up.

    decisions: comparisons of attributes that the forward made; size_decisions: of sizes of tensors.
    tokens: how many ids it got, 0 for none. ids: what is known of them. given: by path, the first
    tensor that a module gave; of layers, and of what is outside of them.
    """

    calls: list[FunctionCall] = dataclasses.field(default_factory=list)
    records: list[OperatorCall] = dataclasses.field(default_factory=list)
    parameters: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    assumed: list[str] = dataclasses.field(default_factory=list)
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    size_decisions: list[Decision] = dataclasses.field(default_factory=list)
    tokens: int = 0
    ids: TracedTensor | None = None
    given: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)

    def find_differing_modules(self, other: "ForwardTrace") -> frozenset[str]:
        """Paths of the modules whose forwards make other calls in another trace."""
        ours, theirs = (
            Counter((call.key, call.function) for call in each.calls) for each in (self, other)
        )
        return frozenset(key.module for key, _ in (ours - theirs) + (theirs - ours))


@dataclasses.dataclass(eq=False)
class PendingBoundary:
    """A boundary before it gets its final form; fields as in sharding_plan.Boundary. tensor: what
    it acts on.
    """

    kind: str
    call: int
    place: str
    tensor: TracedTensor
    parameters: frozenset[str] = frozenset()
    bias: str = ""
    bias_parameters: frozenset[str] = frozenset()
    taken: str = ""
    dim: int = 0
    segments: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    mean: bool = False


@dataclasses.dataclass(eq=False)
class ShardedAxis:
    """An axis through the model. carriers: parameter to dimension. sharded: tensors of which a rank
    has a part.

    mixed: some of the carriers have segments without the axis. What comes of these is sharded, too:
    a rank has all of it, but uses it for its part of the axis alone, so that its gradient is a part
    of a sum.

    joins: where parameters that stay whole meet a tensor that is cut. output: what the model gives
    has the axis. reduced: sums or means are taken over it, as by norms.
    """

    node: AxisNode
    parameter_dims: dict[str, int]
    vocabulary: bool = False
    output: bool = False
    has_whole_segments: bool = False
    is_reduced: bool = False
    sharded: set[TracedTensor] = dataclasses.field(default_factory=set)
    boundaries: list[PendingBoundary] = dataclasses.field(default_factory=list)
    replicated_uses: list[PendingBoundary] = dataclasses.field(default_factory=list)
    row_parameters: set[str] = dataclasses.field(default_factory=set)


def get_shape(tensor: TracedTensor) -> list[int]:
    """The sizes of a tensor."""
    return [node.size for node in tensor.dims]


@dataclasses.dataclass(eq=False)
class AttributeDivision:
    """An attribute to divide. sharded_axes: the axes that ask for it. kept: how much of it each rank
    has.
    """

    sharded_axes: set[ShardedAxis]
    kept: int = 0


class LocalSizes:
    """Sizes on one rank: shares says into how many parts each axis is cut."""

    def __init__(self, sharded_axes: list[ShardedAxis], size: int = 0):
        """size: into how many parts; 0: the smallest number that each can be cut into."""
        self.shares = {
            sharded_axis: size or find_smallest_factor(sharded_axis.node.size)
            for sharded_axis in sharded_axes
        }
        self._of: dict[TracedTensor, list[ShardedAxis]] = {}
        for sharded_axis in sharded_axes:
            for tensor in sharded_axis.sharded:
                self._of.setdefault(tensor, []).append(sharded_axis)

    def list_axes(self, tensor: TracedTensor) -> list[ShardedAxis]:
        """The axes that a tensor is cut along."""
        return self._of.get(tensor, [])

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        """The size of a dimension of a tensor, or of a part of one."""
        return compute_local_size(
            node,
            {
                sharded_axis.node: self.shares[sharded_axis]
                for sharded_axis in self.list_axes(tensor)
            },
        )

    def read_size(self, size: Size) -> int:
        """What the model reads as the size of a dimension."""
        return self.compute_size(size.tensor, size.tensor.dims[size.dimension])

    def compute_offset(self, tensor: TracedTensor, node: AxisNode, start: int) -> int | None:
        """Where a place within a dimension lies on the rank; None where it does not lie between
        parts.
        """
        found = 0
        for part in list_parts(node):
            if start >= part.size:
                start -= part.size
                found += self.compute_size(tensor, part)
            elif not start:
                break
            else:
                first = list_factors(part)[0]
                rest = part.size // first.size
                within = (
                    self.compute_offset(tensor, first, start // rest)
                    if start % rest == 0 and first is not part
                    else None
                )
                return (
                    None
                    if within is None
                    else found
                    + within * (self.compute_size(tensor, part) // self.compute_size(tensor, first))
                )
        return found


@dataclasses.dataclass(eq=False)
class SizeDemand:
    """An integer that a call gets, and what it has to be on a rank. sharded_axes: the axes that make the
    difference.
    """

    call: FunctionCall
    value: int
    expected: int
    sharded_axes: list[ShardedAxis]


def list_demands(call: FunctionCall, ranks: LocalSizes) -> Iterator[SizeDemand]:
    """What the integers of a call have to be, where that is known."""
    if not call.outputs or not call.numbers:
        return
    if call.function == "__getitem__":
        yield from _list_slice_demands(call, ranks)
        return
    output = call.outputs[0]
    for place, dimension in _list_size_places(call):
        value = call.numbers.get(place)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= 0
            and dimension < len(output.dims)
        ):
            if call.function.startswith("split") and "." in place:
                output = call.outputs[min(int(place.split(".")[1]), len(call.outputs) - 1)]
            if int(value) == output.dims[dimension].size:
                sharded_axes = ranks.list_axes(output)
                expected = ranks.compute_size(output, output.dims[dimension])
                yield SizeDemand(
                    call, value, expected, sharded_axes if expected != int(value) else []
                )


def _list_size_places(call: FunctionCall) -> Iterator[tuple[str, int]]:
    """Places of integers that are sizes of what comes out, with the dimension."""
    output = call.outputs[0]
    numbers = call.numbers
    if call.function in _SHAPES:
        method = bool(call.arguments) and call.arguments[0][0] == "0"
        nested = any(place.startswith(("1." if method else "0.", "size.")) for place in numbers)
        for dimension in range(len(output.dims)):
            yield (f"{int(method)}.{dimension}" if nested else str(dimension + method)), dimension
            yield f"size.{dimension}", dimension
    elif call.function == "unflatten":
        dimension = int(numbers.get("1", numbers.get("dim", 0))) % max(len(output.dims), 1)
        count = sum(place.startswith(("2.", "sizes.")) for place in numbers)
        first = (
            dimension
            if int(numbers.get("1", numbers.get("dim", 0))) >= 0
            else dimension - count + 1
        )
        for number in range(count):
            yield f"2.{number}", first + number
            yield f"sizes.{number}", first + number
    elif call.function in ("split", "split_with_sizes", "narrow"):
        default = numbers.get("1", 0) if call.function == "narrow" else numbers.get("2", 0)
        dimension = int(numbers.get("dim", default)) % len(output.dims)
        names = (
            ("3", "length")
            if call.function == "narrow"
            else ("1", "split_size_or_sections", "split_size")
        )
        for place in numbers:
            if place.split(".")[0] in names and place != "1.dim":
                yield place, dimension
    elif call.function.startswith("conv"):
        yield "6", 1
        yield "groups", 1


def _list_slice_demands(call: FunctionCall, ranks: LocalSizes) -> Iterator[SizeDemand]:
    """Starts and stops of slices."""
    if not call.arguments or call.arguments[0][0] != "0":
        return
    tensor = call.arguments[0][1]
    items = [
        call.numbers.get(place, ...)
        for place in sorted(call.numbers, key=_split_place)
        if place != "0"
    ]
    others = [place for place, _, _ in call.arguments[1:]]
    if others:  # picked by number: those dimensions are blocked
        return
    count = len(tensor.dims)
    spent = sum(item is not None and item is not ... for item in items)
    dimension = 0
    for item in items:
        if item is ...:
            dimension += count - spent
        elif isinstance(item, slice):
            node = tensor.dims[dimension]
            for value in (item.start, item.stop):
                if isinstance(value, int) and 0 < value <= node.size:
                    expected = (
                        ranks.compute_offset(tensor, node, int(value))
                        if value < node.size
                        else ranks.compute_size(tensor, node)
                    )
                    sharded_axes = ranks.list_axes(tensor) if expected != int(value) else []
                    if expected is not None:
                        yield SizeDemand(call, value, expected, sharded_axes)
            dimension += 1
        elif item is not None:
            dimension += 1


def _split_place(place: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in place.split(".")]


def find_smallest_factor(number: int) -> int:
    """The smallest prime that divides a number above 1."""
    return next(
        (factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number
    )

"""A forward as data: its tensors, operators and calls; an axis that ranks share; sizes on a rank.

`tracing` writes a trace, and everything else reads it: `propagation` follows an axis through it
(`ShardedAxis`); `find_rewrites` and `token_sharing` compute what the integers of its calls have to
be on a rank (`LocalSizes`, `list_demands`). A forward says `view(b, s, self.num_heads,
self.head_dim)`: on a rank `num_heads` has to be divided (`AttributeDivision`).
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
from recipe_lib.external.tensor_plan.sourced_integers import (
    Attribute,
    Decision,
    Division,
    Size,
    evaluate,
    is_decided_alike,
    list_sources,
)

Dims = list[AxisNode]
Rule = Callable[["OperatorCall"], list[Dims] | None]
# Functions whose integers are the sizes of what comes out.
SHAPES = frozenset(
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand"
    " randn".split()
)


@dataclasses.dataclass(eq=False)
class TracedTensor:
    """One tensor of a traced forward, by what is known of it."""

    dims: list[AxisNode]
    # Names of the parameters it is made of; empty as soon as an input is among its sources.
    parameters: frozenset[str] = frozenset()
    # It depends on an input.
    activation: bool = False
    # It is the model's token ids, or made of them one by one.
    identifiers: bool = False
    # The tensor that it is a view of; None for one with memory of its own.
    base: "TracedTensor | None" = None
    # Number of the torch function call that makes it, -1 for none.
    call: int = -1

    @property
    def root(self) -> "TracedTensor":
        """The tensor whose memory this is."""
        return self.base.root if self.base is not None else self


class OperatorCall:
    """One operator at work: its arguments by name, and what its rule says of it."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        results: list[torch.Tensor],
        place: str,
        known: Callable[[torch.Tensor], TracedTensor],
    ):
        """results: the tensors that come out. place: path of the module, for people. known: returns
        what is known of a tensor.
        """
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.results = results
        self.place = place
        self.known = known
        self.name = get_short_name(function)
        self.reason = f"{self.name} in {place}"  # why what this operator blocks stays whole
        # What is known of the tensors that go in, by id and in order, and of those that come out.
        self.held = {id(tensor): known(tensor) for tensor in list_tensors((args, kwargs))}
        self.inputs = [self.held[id(tensor)] for tensor in list_tensors((args, kwargs))]
        self.outputs: list[TracedTensor] = []
        # Number of the torch function call that makes it, -1 for none.
        self.call = -1
        # Dimensions that it sums over, of which inputs: of a product, and of a sum or a mean.
        self.contractions: list[tuple[AxisNode, TracedTensor, TracedTensor]] = []
        self.reductions: list[tuple[AxisNode, TracedTensor]] = []
        # It picks rows by token.
        self.lookup = False
        # What comes out is the same everywhere, whatever its size.
        self.uniform = False
        # What comes out differs from place to place, and no input has those places.
        self.values = False
        # It counts or sorts.
        self.ordered = False
        # What a product is added to.
        self.added: TracedTensor | None = None
        # The numbers within brackets of an index, by place.
        self.picked: dict[str, Any] = {}
        # The rule that said all this; None for an operator without one.
        self.rule: Rule | None = None
        schema = function._schema.arguments
        defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
        given = zip([each.name for each in schema], args, strict=False)
        self._arguments: dict[str, Any] = defaults | dict(given) | kwargs

    def get_dims(self, tensor: torch.Tensor) -> Dims:
        """Return the dimensions of a tensor."""
        return self.known(tensor).dims

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument by the name that the operator's schema gives it."""
        return self._arguments.get(name, default)

    def get_first_tensor(self) -> torch.Tensor:
        """Return the first tensor argument."""
        return next(list_tensors((self.args, self.kwargs)))

    def get_shape(self) -> list[int]:
        """Return the sizes of the first output."""
        return list(self.results[0].shape)

    def contract(
        self, left: AxisNode, right: AxisNode, left_tensor: torch.Tensor, right_tensor: torch.Tensor
    ) -> None:
        """Sum over a dimension that both tensors have."""
        unify(left, right, self.reason)
        self.contractions.append((left, self.known(left_tensor), self.known(right_tensor)))

    def join(self, left: AxisNode, right: AxisNode) -> AxisNode:
        """Return the dimension that comes of two under broadcasting."""
        if left.size == 1:
            return right
        if right.size != 1:
            unify(left, right, self.reason)
        return left

    def make_dims(self, sizes: Sequence[int], blocked: bool = False) -> Dims:
        """Return new dimensions, of which nothing is known, or which cannot be cut."""
        return [AxisNode(size, blocked=self.reason if blocked else "") for size in sizes]


def get_short_name(function: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(function._schema.name).removeprefix("aten::")


class CallKey(NamedTuple):
    """One torch function call of a module's forward; of a module that runs twice, in both runs."""

    module: str  # its path in the model, empty for the model itself
    number: int  # of the call within one forward, from 0


@dataclasses.dataclass(eq=False)
class FunctionCall:
    """One torch function call that gives a tensor."""

    key: CallKey
    # The function's `__name__`.
    function: str
    # File and line in the model.
    source: str
    # (place, tensor, needs a gradient); places as `sharding_plan.list_places` names them.
    arguments: list[tuple[str, TracedTensor, bool]] = dataclasses.field(default_factory=list)
    # Integers, slices and texts among the arguments, by place.
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)
    # The operators that it runs.
    records: list[OperatorCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class ForwardTrace:
    """One forward: all that it did, in its order."""

    calls: list[FunctionCall] = dataclasses.field(default_factory=list)
    # The operators of all calls, and those that no call makes.
    records: list[OperatorCall] = dataclasses.field(default_factory=list)
    parameters: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)
    # What the model gives.
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)
    # Operators without a rule: name to the module of the first one.
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    # Values that were made up for the meta device, a line each.
    assumed: list[str] = dataclasses.field(default_factory=list)
    # Comparisons that the forward made: of attributes, and of sizes of tensors.
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    size_decisions: list[Decision] = dataclasses.field(default_factory=list)
    # How many token ids it got, 0 for none; and what is known of them, if they are `[b, s]`.
    tokens: int = 0
    ids: TracedTensor | None = None
    # By path, the first tensor that a module gave; of layers, and of what is outside of them.
    given: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)

    def find_differing_modules(self, other: "ForwardTrace") -> frozenset[str]:
        """Return paths of the modules whose forwards make other calls in another trace."""
        first = Counter((call.key, call.function) for call in self.calls)
        second = Counter((call.key, call.function) for call in other.calls)
        return frozenset(key.module for key, _ in (first - second) + (second - first))


@dataclasses.dataclass(eq=False)
class PendingBoundary:
    """A boundary before it gets its final form; fields as in `sharding_plan.Boundary`."""

    kind: str
    # Number of the call in the whole forward; not, as a Boundary's, in its module's.
    call: int
    place: str
    # The tensor that it acts on.
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
    """One axis that ranks share, and what that makes of a forward."""

    node: AxisNode
    # Each parameter that has the axis, with the dimension.
    parameter_dims: dict[str, int]
    # It is the axis of the tokens' rows.
    vocabulary: bool = False
    # What the model gives has it.
    output: bool = False
    # Some parameters have segments without the axis. What comes of these is sharded, too: a rank
    # has all of it, but uses it for its part of the axis alone, so that its gradient is a part of a
    # sum.
    has_whole_segments: bool = False
    # Sums or means are taken over it, as by norms.
    is_reduced: bool = False
    # Tensors of which a rank has a part.
    sharded: set[TracedTensor] = dataclasses.field(default_factory=set)
    boundaries: list[PendingBoundary] = dataclasses.field(default_factory=list)
    # Where parameters that stay whole meet a tensor that is cut: boundaries only if they are used
    # otherwise, too. Else their gradients as a whole are summed over ranks.
    replicated_uses: list[PendingBoundary] = dataclasses.field(default_factory=list)
    # Parameters of products that sum over it (row-parallel).
    row_parameters: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class AttributeDivision:
    """An integer attribute that has to be divided by the number of ranks."""

    # The axes that ask for it.
    sharded_axes: set[ShardedAxis]
    # How much of it each rank has; the rest is divided.
    kept: int = 0


def get_shape(tensor: TracedTensor) -> list[int]:
    """Return the sizes of a tensor."""
    return [node.size for node in tensor.dims]


class LocalSizes:
    """Sizes on one rank, where some axes are cut."""

    def __init__(self, sharded_axes: list[ShardedAxis], size: int = 0):
        """size: into how many parts; 0: the smallest number that each axis can be cut into."""
        self.shares = {axis: size or find_smallest_factor(axis.node.size) for axis in sharded_axes}
        self._axes: dict[TracedTensor, list[ShardedAxis]] = {}
        for axis in sharded_axes:
            for tensor in axis.sharded:
                self._axes.setdefault(tensor, []).append(axis)

    def list_axes(self, tensor: TracedTensor) -> list[ShardedAxis]:
        """Return the axes that a tensor is cut along."""
        return self._axes.get(tensor, [])

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        """Return the size of a dimension of a tensor, or of a part of one."""
        return compute_local_size(
            node, {axis.node: self.shares[axis] for axis in self.list_axes(tensor)}
        )

    def read_size(self, size: Size) -> int:
        """Return what the model reads as the size of a dimension."""
        return self.compute_size(size.tensor, size.tensor.dims[size.dimension])

    def compute_offset(self, tensor: TracedTensor, node: AxisNode, start: int) -> int | None:
        """Return where a place within a dimension lies on the rank; None where it does not lie
        between parts.
        """
        offset = 0
        for part in list_parts(node):
            if start >= part.size:
                start -= part.size
                offset += self.compute_size(tensor, part)
                continue
            if not start:
                break
            # Within a product: the place has to begin a step of its outermost factor.
            first = list_factors(part)[0]
            inner = part.size // first.size
            if start % inner or first is part:
                return None
            steps = self.compute_offset(tensor, first, start // inner)
            if steps is None:
                return None
            local_inner = self.compute_size(tensor, part) // self.compute_size(tensor, first)
            return offset + steps * local_inner
        return offset


@dataclasses.dataclass(eq=False)
class SizeDemand:
    """An integer that a call gets, and what it has to be on a rank."""

    call: FunctionCall
    value: int
    expected: int
    # The axes that make the difference; none if there is none.
    sharded_axes: list[ShardedAxis]


def list_demands(call: FunctionCall, ranks: LocalSizes) -> Iterator[SizeDemand]:
    """Yield what the integers of a call have to be, where that is known."""
    if not call.outputs or not call.numbers:
        return
    if call.function == "__getitem__":
        yield from _list_slice_demands(call, ranks)
        return
    output = call.outputs[0]
    for place, dimension in _list_size_places(call):
        value: Any = call.numbers.get(place)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_size or dimension >= len(output.dims):
            continue
        if call.function.startswith("split") and "." in place:
            output = call.outputs[min(int(place.split(".")[1]), len(call.outputs) - 1)]
        # Else it is not the size that comes out: broadcast, or rounded.
        if int(value) == output.dims[dimension].size:
            expected = ranks.compute_size(output, output.dims[dimension])
            yield SizeDemand(
                call,
                value=value,
                expected=expected,
                sharded_axes=ranks.list_axes(output) if expected != int(value) else [],
            )


def _list_size_places(call: FunctionCall) -> Iterator[tuple[str, int]]:
    """Yield places of integers that are sizes of what comes out, with the dimension."""
    dims = call.outputs[0].dims
    numbers = call.numbers
    if call.function in SHAPES:
        # `x.view(2, 3)`, `x.view((2, 3))`, `torch.zeros(2, 3)`, `torch.zeros((2, 3))`, `size=(2,
        # 3)`
        is_method = bool(call.arguments) and call.arguments[0][0] == "0"
        nested = f"{int(is_method)}."
        is_nested = any(place.startswith((nested, "size.")) for place in numbers)
        for dimension in range(len(dims)):
            yield f"{nested}{dimension}" if is_nested else str(dimension + is_method), dimension
            yield f"size.{dimension}", dimension
    elif call.function == "unflatten":
        given = int(numbers.get("1", numbers.get("dim", 0)))
        count = sum(place.startswith(("2.", "sizes.")) for place in numbers)
        first = given % max(len(dims), 1)
        if given < 0:  # counted from the end of what comes out, which has more dimensions
            first -= count - 1
        for number in range(count):
            yield f"2.{number}", first + number
            yield f"sizes.{number}", first + number
    elif call.function in ("split", "split_with_sizes", "narrow"):
        is_narrow = call.function == "narrow"
        names = {"3", "length"} if is_narrow else {"1", "split_size_or_sections", "split_size"}
        dimension = int(numbers.get("dim", numbers.get("1" if is_narrow else "2", 0))) % len(dims)
        for place in numbers:
            if place.split(".")[0] in names and place != "1.dim":
                yield place, dimension
    elif call.function.startswith("conv"):
        yield "6", 1
        yield "groups", 1


def _list_slice_demands(call: FunctionCall, ranks: LocalSizes) -> Iterator[SizeDemand]:
    """Yield what starts and stops of slices have to be."""
    # With more arguments it is picked by number: those dimensions are blocked.
    if len(call.arguments) != 1 or call.arguments[0][0] != "0":
        return
    tensor = call.arguments[0][1]
    items = [
        call.numbers[place] for place in sorted(call.numbers, key=_split_place) if place != "0"
    ]
    num_picked = sum(item is not None and item is not ... for item in items)
    dimension = 0
    for item in items:
        if item is ...:
            dimension += len(tensor.dims) - num_picked
            continue
        if isinstance(item, slice):
            node = tensor.dims[dimension]
            for value in (item.start, item.stop):
                expected = None
                if isinstance(value, int) and 0 < value < node.size:
                    expected = ranks.compute_offset(tensor, node, int(value))
                elif isinstance(value, int) and 0 < value == node.size:
                    expected = ranks.compute_size(tensor, node)
                if expected is not None:
                    yield SizeDemand(
                        call,
                        value=value,
                        expected=expected,
                        sharded_axes=ranks.list_axes(tensor) if expected != int(value) else [],
                    )
        dimension += item is not None  # None is a new dimension of what comes out


def _split_place(place: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in place.split(".")]


def find_smallest_factor(number: int) -> int:
    """Return the smallest prime that divides a number above 1."""
    return next(
        (factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number
    )


# The integers in a forward that are right for whole tensors only, and the attributes that make them
# right for a rank's.


def find_rewrites(
    trace: ForwardTrace, sharded_axes: list[ShardedAxis]
) -> tuple[dict[Attribute, AttributeDivision], dict[ShardedAxis, str]]:
    """Return the attributes that have to be divided, with the axes that ask for it; and axes that
    cannot be cut, with the reason.
    """
    ranks = LocalSizes(sharded_axes)
    demands = [demand for call in trace.calls for demand in list_demands(call, ranks)]
    # What some call gets right as it is must not be divided for another one.
    kept: set[Attribute] = set()
    for demand in demands:
        is_same = demand.expected == int(demand.value) and not demand.sharded_axes
        if is_same and _is_right(demand, ranks, {}):
            kept.update(list_sources(demand.value, Attribute))
    divisions: dict[Attribute, Division] = {}
    rewrites: dict[Attribute, AttributeDivision] = {}
    for demand in demands:
        attributes = dict.fromkeys(list_sources(demand.value, Attribute))
        if _is_right(demand, ranks, divisions):
            for attribute in divisions.keys() & attributes.keys():
                rewrites[attribute].sharded_axes.update(demand.sharded_axes)
            continue
        shares = {ranks.shares[axis] for axis in demand.sharded_axes}
        if len(shares) != 1 or int(demand.value) < 2:
            continue
        for attribute in [each for each in attributes if each not in kept | divisions.keys()]:
            division = next(
                (
                    division
                    for division in _list_divisions(demand, *shares)
                    if _is_right(demand, ranks, {**divisions, attribute: division})
                ),
                None,
            )
            if division is not None:
                divisions[attribute] = division
                rewrites[attribute] = AttributeDivision(set(demand.sharded_axes), division.kept)
                break
    refused: dict[ShardedAxis, str] = {}
    for demand in [each for each in demands if not _is_right(each, ranks, divisions)]:
        guilty = list(demand.sharded_axes)
        if not guilty:  # a whole tensor, whose size an attribute gave that others have divided
            for attribute in list_sources(demand.value, Attribute):
                guilty += rewrites[attribute].sharded_axes if attribute in rewrites else ()
        reason = (
            f"{demand.call.function} at {demand.call.source} in"
            f" {demand.call.key.module or 'the model itself'} takes the size"
            f" {int(demand.value)}, which no attribute of its own gives for a part"
        )
        refused |= dict.fromkeys(guilty, reason)
    return rewrites, refused


def _list_divisions(demand: SizeDemand, ranks: int) -> Iterator[Division]:
    """Yield how an attribute may be divided: all of it, or as much of one that is the very size as
    is needed.
    """
    yield Division(ranks)
    value = int(demand.value)
    kept = (ranks * demand.expected - value) // (ranks - 1)
    if isinstance(getattr(demand.value, "source", None), Attribute) and 0 < kept < value:
        yield Division(ranks, kept)


def is_control_flow_same(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    *,
    size: int,
    last: dict[str, int],
) -> bool:
    """Return True if the forward goes as far as its last boundaries on each of `size` ranks as it
    does on the whole.

    last: by module, the number of the last call that has a boundary. A comparison of sizes that
    comes after it may come out otherwise: `if groups == 1: return keys`.
    """
    # The vocabulary is cut unevenly, and no size in a layer depends on it.
    ranks = LocalSizes([axis for axis in sharded_axes if not axis.vocabulary], size)
    divisions = {attribute: Division(size, rewrite.kept) for attribute, rewrite in rewrites.items()}
    return all(
        is_decided_alike(decision, ranks.read_size, divisions)
        for decision in trace.decisions
        if decision.call <= last.get(decision.module, -1)
    )


def _is_right(demand: SizeDemand, ranks: LocalSizes, divisions: dict[Attribute, Division]) -> bool:
    return evaluate(demand.value, ranks.read_size, divisions) == demand.expected

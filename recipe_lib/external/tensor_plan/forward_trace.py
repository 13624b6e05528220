"""Hold one traced forward as data, and compute the sizes that its tensors have on a rank.

`tracing` writes a `ForwardTrace`: torch function calls, the ATen operators (records) that they run,
tensors with their dimensions. `propagation` follows an axis, a dimension that ranks share, through
it. A forward says `view(b, s, self.num_heads, self.head_dim)`, and on a rank `num_heads` has to be
divided: `infer` asks `find_rewrites` for such attributes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    compute_local_size,
    list_factors,
    list_parts,
    unify,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Attribute,
    Decision,
    Division,
    Size,
    evaluate,
    is_decided_alike,
    list_sources,
)
from recipe_lib.ops.kept_tensors import list_tensors

Dims = list[AxisNode]  # of one tensor, one node a dimension
# Gets the call of an operator, writes what it finds into its fields, and returns the dimensions of
# each result; None: it does not know this case.
Rule = Callable[["OperatorCall"], list[Dims] | None]
# Functions whose integer arguments are the sizes of the result.
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
    is_activation: bool = False  # it depends on an input of the model
    is_token_ids: bool = False  # it is the model's token ids, or made of them one by one
    # The tensor that it is a view of; None for one with memory of its own.
    base: "TracedTensor | None" = None
    call_index: int = -1  # in the trace, of the torch function call that makes it; -1: none does

    @property
    def root(self) -> "TracedTensor":
        """Return the tensor that owns the memory, which may be this one."""
        return self.base.root if self.base is not None else self


class OperatorCall:
    """One run of an ATen operator: its arguments by name, and what its rule says of it later."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        results: list[torch.Tensor],
        module_path: str,
        get_traced: Callable[[torch.Tensor], TracedTensor],
    ):
        self.function = function  # an `OpOverload`
        self.args = args
        self.kwargs = kwargs
        self.results = results  # the tensors that come out
        self.module_path = module_path  # for messages
        self.get_traced = get_traced  # returns what is known of a tensor
        self.name = get_short_name(function)
        self.reason = f"{self.name} in {module_path}"  # why what this operator blocks stays whole
        # What is known of the tensors that go in, by id and in order, and of those that come out.
        self.traced_by_id = {
            id(tensor): get_traced(tensor) for tensor in list_tensors((args, kwargs))
        }
        self.inputs = [self.traced_by_id[id(tensor)] for tensor in list_tensors((args, kwargs))]
        self.outputs: list[TracedTensor] = []  # filled in after the rule has run
        self.call_index = -1  # in the trace, of the torch function call that runs it; -1: none does
        # (dimension that a product sums over, left operand, right operand)
        self.contractions: list[tuple[AxisNode, TracedTensor, TracedTensor]] = []
        # (dimension that a sum or a mean goes over, its input)
        self.reductions: list[tuple[AxisNode, TracedTensor]] = []
        self.is_lookup = False  # it picks rows of a matrix by number, as an embedding
        self.is_uniform = False  # all elements of the result are equal, whatever its size
        # Elements of the result belong to no elements of an input (`arange`).
        self.makes_values = False
        # An element of the result depends on several ones of a dimension (`sort`).
        self.mixes_elements = False
        self.added: TracedTensor | None = None  # what a product is added to
        # Of `x[...]`: what is within the brackets, by place (`sharding_plan.list_places`).
        self.picked: dict[str, Any] = {}
        self.rule: Rule | None = None  # None: the operator has none
        schema = function._schema.arguments
        defaults = {
            argument.name: argument.default_value
            for argument in schema
            if argument.has_default_value()
        }
        given = zip([argument.name for argument in schema], args, strict=False)
        self._arguments: dict[str, Any] = defaults | dict(given) | kwargs

    def get_dims(self, tensor: torch.Tensor) -> Dims:
        return self.get_traced(tensor).dims

    def get_arg(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operator's schema, with the schema's default."""
        return self._arguments.get(name, default)

    def get_first_tensor(self) -> torch.Tensor:
        return list_tensors((self.args, self.kwargs))[0]

    def get_shape(self) -> list[int]:
        """Return the sizes of the first output."""
        return list(self.results[0].shape)

    def add_contraction(
        self, left: AxisNode, right: AxisNode, left_tensor: torch.Tensor, right_tensor: torch.Tensor
    ) -> None:
        """Add that a product sums over a dimension of each operand; unite the two."""
        unify(left, right, self.reason)
        self.contractions.append(
            (left, self.get_traced(left_tensor), self.get_traced(right_tensor))
        )

    def join(self, left: AxisNode, right: AxisNode) -> AxisNode:
        """Unite two dimensions as broadcasting does, and return the result's."""
        if left.size == 1:
            return right
        if right.size != 1:
            unify(left, right, self.reason)
        return left

    def make_dims(self, sizes: Sequence[int], blocked: bool = False) -> Dims:
        """Return new dimensions, of which nothing is known; blocked: that cannot be cut."""
        return [AxisNode(size, blocked=self.reason if blocked else "") for size in sizes]


def get_short_name(function: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(function._schema.name).removeprefix("aten::")


class CallKey(NamedTuple):
    """The name of a torch function call in a plan; of a module that runs twice, for both runs."""

    module: str  # path of the module whose forward makes it; empty: the model itself
    number: int  # index among the calls of one forward of the module that return a tensor


class Argument(NamedTuple):
    """A tensor among the arguments of a torch function call."""

    # Index or name of the argument: `0`, `weight`, `1.2` (third item of the second one).
    place: str
    tensor: TracedTensor
    needs_gradient: bool


@dataclasses.dataclass(eq=False)
class FunctionCall:
    """One torch function call of the traced forward."""

    key: CallKey
    function: str  # the function's `__name__`
    source: str  # file and line in the model
    arguments: list[Argument] = dataclasses.field(default_factory=list)  # those that are tensors
    # Other arguments, by place: integers, slices, `...`, None and texts.
    non_tensor_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)
    records: list[OperatorCall] = dataclasses.field(default_factory=list)  # operators that it runs

    @property
    def tensors(self) -> list[TracedTensor]:
        return [argument.tensor for argument in self.arguments]


@dataclasses.dataclass(eq=False)
class ForwardTrace:
    """All that one forward did, in its order."""

    calls: list[FunctionCall] = dataclasses.field(default_factory=list)
    # The operators of all calls, and those that no call makes.
    records: list[OperatorCall] = dataclasses.field(default_factory=list)
    parameters: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)  # by name
    outputs: list[TracedTensor] = dataclasses.field(default_factory=list)  # of the model
    # Operators without a rule: name -> a module that runs it.
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    # "OPERATOR in MODULE" for each result that was made up, as the meta device has no values.
    assumed: list[str] = dataclasses.field(default_factory=list)
    # Comparisons that the forward made: of attributes, and of sizes of tensors.
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    size_decisions: list[Decision] = dataclasses.field(default_factory=list)
    num_tokens: int = 0  # of token ids; 0: the model takes none
    ids: TracedTensor | None = None  # the token ids, if they are `[b, s]`
    # Path -> first tensor of the output, of layers and of modules outside the layers.
    module_outputs: dict[str, TracedTensor] = dataclasses.field(default_factory=dict)

    def find_differing_modules(self, other_trace: "ForwardTrace") -> frozenset[str]:
        """Return paths of the modules whose forwards make other calls in another trace."""
        first = Counter((call.key, call.function) for call in self.calls)
        second = Counter((call.key, call.function) for call in other_trace.calls)
        return frozenset(key.module for key, _ in (first - second) + (second - first))


@dataclasses.dataclass(eq=False)
class PendingBoundary:
    """An exchange between ranks before it becomes a `Boundary` of a plan.

    Fields are named as that class', which says for each kind what ranks exchange.
    """

    kind: str  # enter, leave, lookup, cut or assemble
    call: int  # number of the call in the trace; in a Boundary, in its module's forward
    place: str  # the argument of the call, or `output`
    tensor: TracedTensor  # the tensor that is exchanged
    parameters: frozenset[str] = frozenset()  # names of those that the tensor meets or is
    bias: str = ""  # leave: the argument that is added once, after the sum
    bias_parameters: frozenset[str] = frozenset()  # names of the parameters of which `bias` is made
    taken: str = ""  # leave: the argument that has the axis
    dim: int = 0  # of `taken`, or of the tensor that is cut or assembled
    segments: tuple[int, ...] = ()  # lengths along dim that are cut evenly, and repeat
    whole: tuple[int, ...] = ()  # indices of segments that are not cut, or are gathered
    mean: bool = False  # leave: the sum over ranks is divided by their number


@dataclasses.dataclass(eq=False)
class ShardedAxis:
    """One axis that ranks share, and what follows from that for the forward."""

    node: AxisNode
    parameter_dims: dict[str, int]  # name of a parameter that has the axis -> its dimension
    vocabulary: bool = False  # it is the axis of the vocabulary
    output: bool = False  # the model's output has it
    # Some parameters have segments without the axis, such as the shared keys in a fused matrix. All
    # that is made of these counts as sharded: a rank has all of it, but uses it for its part of the
    # axis alone, so that its gradient is a part of a sum.
    has_whole_segments: bool = False
    is_reduced: bool = False  # sums or means are taken over it, as by norms
    sharded: set[TracedTensor] = dataclasses.field(default_factory=set)  # a rank has a part of them
    boundaries: list[PendingBoundary] = dataclasses.field(default_factory=list)
    # Uses of replicated parameters with a tensor that is cut: there the gradient on a rank is a
    # part of a sum. A parameter with such uses alone has its gradient summed once a step. One with
    # others, too, gets a boundary at each such use.
    replicated_uses: list[PendingBoundary] = dataclasses.field(default_factory=list)
    # Parameters of products that sum over it (row-parallel).
    row_parameters: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class AttributeDivision:
    """A division of an integer attribute by the number of ranks."""

    sharded_axes: set[ShardedAxis]  # the axes whose steps it counts
    kept: int = 0  # how much of it every rank has; the rest is divided


def get_shape(tensor: TracedTensor) -> list[int]:
    """Return the sizes of a tensor."""
    return [node.size for node in tensor.dims]


class LocalSizes:
    """The sizes of tensors on one of `size` ranks, where some axes are cut.

    size 0: each axis is shared by the fewest ranks that can share it.
    """

    def __init__(self, sharded_axes: list[ShardedAxis], size: int = 0):
        # Axis -> the number of ranks that share it.
        self.shares = {axis: size or find_smallest_factor(axis.node.size) for axis in sharded_axes}
        self._axes: dict[TracedTensor, list[ShardedAxis]] = {}
        for axis in sharded_axes:
            for tensor in axis.sharded:
                self._axes.setdefault(tensor, []).append(axis)

    def list_axes(self, tensor: TracedTensor) -> list[ShardedAxis]:
        return self._axes.get(tensor, [])

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        """Return the size on the rank of a dimension of a tensor, or of a part of a dimension."""
        return compute_local_size(
            node, {axis.node: self.shares[axis] for axis in self.list_axes(tensor)}
        )

    def read_size(self, size: Size) -> int:
        """Return what the forward on the rank reads as `tensor.shape[dimension]`."""
        return self.compute_size(size.tensor, size.tensor.dims[size.dimension])

    def compute_offset(self, tensor: TracedTensor, node: AxisNode, start: int) -> int | None:
        """Return where an offset within a dimension lies on the rank.

        start: in the whole dimension `node`. None: it is in the middle of what a rank has one part
        of.
        """
        offset = 0
        # A dimension is a concatenation of parts, each of them a product of factors (`axes`).
        for part in list_parts(node):
            if start >= part.size:
                start -= part.size
                offset += self.compute_size(tensor, part)
                continue
            if not start:
                break
            # Within a product: the offset has to begin a step of its outermost factor.
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
    """An integer argument of a call, and what it has to be on a rank."""

    call: FunctionCall
    value: int  # in the whole model; it knows of what it was computed (`Sourced`)
    expected: int  # on the rank
    sharded_axes: list[ShardedAxis]  # the axes that make them differ; empty: they are equal


def list_demands(call: FunctionCall, local_sizes: LocalSizes) -> Iterator[SizeDemand]:
    """Yield what the integer arguments of a call have to be on a rank, where that is known."""
    if not call.outputs or not call.non_tensor_args:
        return
    if call.function == "__getitem__":
        yield from _list_slice_demands(call, local_sizes)
        return
    output = call.outputs[0]
    for place, dimension in _list_size_places(call):
        value: Any = call.non_tensor_args.get(place)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_size or dimension >= len(output.dims):
            continue
        if call.function.startswith("split") and "." in place:
            output = call.outputs[min(int(place.split(".")[1]), len(call.outputs) - 1)]
        # If they differ, the argument is not that size: it is broadcast, or rounded.
        if int(value) == output.dims[dimension].size:
            expected = local_sizes.compute_size(output, output.dims[dimension])
            yield SizeDemand(
                call=call,
                value=value,
                expected=expected,
                sharded_axes=local_sizes.list_axes(output) if expected != int(value) else [],
            )


def _list_size_places(call: FunctionCall) -> Iterator[tuple[str, int]]:
    """Yield (place of an integer argument, dimension of the output of which it is the size)."""
    dims = call.outputs[0].dims
    numbers = call.non_tensor_args
    if call.function in SHAPES:
        # Spellings: `x.view(2, 3)`, `x.view((2, 3))`, `torch.zeros(2, 3)`, `torch.zeros((2, 3))`,
        # `size=(2, 3)`.
        is_method = bool(call.arguments) and call.arguments[0].place == "0"
        nested = f"{int(is_method)}."
        is_nested = any(place.startswith((nested, "size.")) for place in numbers)
        for dimension in range(len(dims)):
            yield f"{nested}{dimension}" if is_nested else str(dimension + is_method), dimension
            yield f"size.{dimension}", dimension
    elif call.function == "unflatten":
        given_dim = int(numbers.get("1", numbers.get("dim", 0)))
        count = sum(place.startswith(("2.", "sizes.")) for place in numbers)
        first = given_dim % max(len(dims), 1)
        if given_dim < 0:  # counted from the end of the input, which has fewer dimensions
            first -= count - 1
        for number in range(count):
            yield f"2.{number}", first + number
            yield f"sizes.{number}", first + number
    elif call.function in ("split", "split_with_sizes", "narrow"):
        is_narrow = call.function == "narrow"
        names = {"3", "length"} if is_narrow else {"1", "split_size_or_sections", "split_size"}
        dimension = int(numbers.get("dim", numbers.get("1" if is_narrow else "2", 0))) % len(dims)
        for place in numbers:
            if place.split(".")[0] in names:
                yield place, dimension
    elif call.function.startswith("conv"):  # the number of groups is that of channels, if depthwise
        yield "6", 1
        yield "groups", 1


def _list_slice_demands(call: FunctionCall, local_sizes: LocalSizes) -> Iterator[SizeDemand]:
    """Yield what starts and stops of the slices in `x[...]` have to be on a rank."""
    # With tensors in the brackets elements are picked by number: their dimensions are blocked.
    if len(call.arguments) != 1 or call.arguments[0].place != "0":
        return
    tensor = call.arguments[0].tensor
    items = [
        call.non_tensor_args[place] for place in sorted(call.non_tensor_args, key=_split_place)
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
                    expected = local_sizes.compute_offset(tensor, node, int(value))
                elif isinstance(value, int) and 0 < value == node.size:
                    expected = local_sizes.compute_size(tensor, node)
                if expected is not None:
                    yield SizeDemand(
                        call=call,
                        value=value,
                        expected=expected,
                        sharded_axes=local_sizes.list_axes(tensor)
                        if expected != int(value)
                        else [],
                    )
        dimension += item is not None  # None is a new dimension of the output


def _split_place(place: str) -> list[int]:
    """Return a place as numbers, to sort by: `1.10` comes after `1.9`."""
    return [int(part) if part.isdigit() else 0 for part in place.split(".")]


def find_smallest_factor(number: int) -> int:
    """Return the smallest prime that divides a number above 1."""
    return next(
        (factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number
    )


# Find the integers in a forward that are right for whole tensors only, and the attributes that have
# to be divided so that they are right for a rank's part.


def find_rewrites(
    trace: ForwardTrace, sharded_axes: list[ShardedAxis]
) -> tuple[dict[Attribute, AttributeDivision], dict[ShardedAxis, str]]:
    """Return how attributes have to be divided, and the axes that cannot be cut, with the reason.

    Each call's integers are computed anew for a rank. Where one comes out wrong, a division of one
    of the attributes that it was computed from is tried.
    """
    local_sizes = LocalSizes(sharded_axes)
    demands = list(chain.from_iterable(list_demands(call, local_sizes) for call in trace.calls))
    # An attribute that is right as it is for some call must not be divided for another one.
    kept: set[Attribute] = set()
    for demand in demands:
        is_same = demand.expected == int(demand.value) and not demand.sharded_axes
        if is_same and _is_right(demand, local_sizes, {}):
            kept.update(list_sources(demand.value, Attribute))
    divisions: dict[Attribute, Division] = {}
    rewrites: dict[Attribute, AttributeDivision] = {}
    for demand in demands:
        attributes = dict.fromkeys(list_sources(demand.value, Attribute))
        if _is_right(demand, local_sizes, divisions):
            for attribute in divisions.keys() & attributes.keys():
                rewrites[attribute].sharded_axes.update(demand.sharded_axes)
            continue
        # An attribute is divided by one number of ranks, and 1 cannot be divided.
        shares = {local_sizes.shares[axis] for axis in demand.sharded_axes}
        if len(shares) != 1 or int(demand.value) < 2:
            continue
        for attribute in [key for key in attributes if key not in kept | divisions.keys()]:
            division = next(
                (
                    division
                    for division in _list_divisions(demand, *shares)
                    if _is_right(demand, local_sizes, {**divisions, attribute: division})
                ),
                None,
            )
            if division is not None:
                divisions[attribute] = division
                rewrites[attribute] = AttributeDivision(set(demand.sharded_axes), division.kept)
                break
    refused: dict[ShardedAxis, str] = {}
    for demand in [demand for demand in demands if not _is_right(demand, local_sizes, divisions)]:
        failed_axes = list(demand.sharded_axes)
        if not failed_axes:  # the tensor is whole, but other axes have divided its attribute
            for attribute in list_sources(demand.value, Attribute):
                failed_axes += rewrites[attribute].sharded_axes if attribute in rewrites else ()
        reason = (
            f"{demand.call.function} at {demand.call.source} in"
            f" {demand.call.key.module or 'the model itself'} takes the size"
            f" {int(demand.value)}, which no attribute of its own gives for a part"
        )
        refused |= dict.fromkeys(failed_axes, reason)
    return rewrites, refused


def _list_divisions(demand: SizeDemand, num_ranks: int) -> Iterator[Division]:
    """Yield the ways to divide an attribute: all of it, or as much as the demand needs.

    The second is possible where the integer is the attribute itself, not computed from it.
    """
    yield Division(num_ranks)
    value = int(demand.value)
    # Solves kept + (value - kept) / num_ranks = expected, which is `Division.divide`.
    kept = (num_ranks * demand.expected - value) // (num_ranks - 1)
    if isinstance(getattr(demand.value, "source", None), Attribute) and 0 < kept < value:
        yield Division(num_ranks, kept)


def is_control_flow_same(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    *,
    size: int,
    last_boundary_calls: dict[str, int],
) -> bool:
    """Return True if comparisons of sizes come out on each of `size` ranks as in the whole model.

    last_boundary_calls: module -> the index of its last call with a boundary. A comparison after
    that call may come out otherwise, since no exchange depends on it: `if groups == 1: return
    keys`.
    """
    # The vocabulary is cut unevenly, and no size in a layer depends on it.
    local_sizes = LocalSizes([axis for axis in sharded_axes if not axis.vocabulary], size)
    divisions = {attribute: Division(size, rewrite.kept) for attribute, rewrite in rewrites.items()}
    return all(
        is_decided_alike(decision, local_sizes.read_size, divisions)
        for decision in trace.decisions
        if decision.call <= last_boundary_calls.get(decision.module, -1)
    )


def _is_right(
    demand: SizeDemand, local_sizes: LocalSizes, divisions: dict[Attribute, Division]
) -> bool:
    """Return True if a call's integer, computed anew with these divisions, is right on a rank."""
    return evaluate(demand.value, local_sizes.read_size, divisions) == demand.expected

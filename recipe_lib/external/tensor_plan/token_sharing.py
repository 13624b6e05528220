"""Which tensors of a forward a rank needs its own tokens of alone (sequence parallel), and where ranks exchange them.

Between the products that are cut, every rank would do the same to all tokens. What works on each token by itself is
done by each rank for its part of every row: a tensor that is summed over ranks leaves as a rank's tokens, and what
needs the others' is gathered. Whatever looks at several tokens (attention, scans, sizes of whole rows) has whole rows.
Where the sizes that a forward computes would not be right, the tensors that they come from stay whole, until all are.
"""

import dataclasses

from recipe_lib.external.tensor_plan.attribute_rewrites import LocalSizes, Wanted, demands_of
from recipe_lib.external.tensor_plan.axes import AxisNode
from recipe_lib.external.tensor_plan.propagation import Course
from recipe_lib.external.tensor_plan.sourced_integers import (
    Arithmetic,
    Attribute,
    Division,
    Size,
    decided_alike,
    evaluate,
)
from recipe_lib.external.tensor_plan.token_flow import Place, TokenFlow
from recipe_lib.external.tensor_plan.token_rules import TokenDim, elements
from recipe_lib.external.tensor_plan.tracing import ForwardTrace, FunctionCall, Traced

_ROUNDS = 40  # in each of which tensors whose sizes come out wrong are made whole; a model needs one or two
_RANKS = 2  # of which sizes are computed


@dataclasses.dataclass(eq=False)
class SharedTokens:
    """Where tokens are cut (`slices`) and put together again (`gathers`), by place; uses: arguments that whole
    parameters are, where a rank's tokens meet them. share: of the elements that no axis cuts, those of which a rank has
    its tokens alone. local: paths of the modules that give a rank's tokens alone (`ForwardTrace.given`)."""

    gathers: dict[Place, tuple[Traced, TokenDim]] = dataclasses.field(default_factory=dict)
    slices: dict[Place, tuple[Traced, TokenDim]] = dataclasses.field(default_factory=dict)
    uses: set[Place] = dataclasses.field(default_factory=set)
    share: float = 0.0
    local: tuple[str, ...] = ()


def share_tokens(
    trace: ForwardTrace,
    courses: list[Course],
    rewrites: dict[Attribute, Wanted],
    unsteady: frozenset[str] = frozenset(),
) -> SharedTokens:
    """The tokens that can be shared out in a forward; nothing where the model takes no ids, or where it would not work.

    courses: the axes that are cut. rewrites: attributes that are divided. unsteady:
    paths of modules whose forwards make other calls for other inputs, so that none of theirs can be told by its number.
    """
    flow = TokenFlow(trace, courses, rewrites, unsteady)
    if trace.ids is None:
        return SharedTokens()
    for _ in range(_ROUNDS):
        flow.spread()
        if not _correct(flow):
            return _found(flow)
    return SharedTokens()


def _correct(flow: TokenFlow) -> bool:
    """Makes whole what sizes come out wrong for. True if there was anything."""
    before = (len(flow.whole), len(flow.stopped))
    sizes = _SharedSizes(flow)
    for record in flow.trace.records:
        if record.call < 0:  # of no call that could be given other tensors
            flow.whole.update(each for each in (*record.inputs, *record.outputs) if flow.is_local(each))
    for (number, _), (tensor, _) in [*flow.slices.items(), *flow.gathers.items()]:
        call = flow.trace.calls[number]
        if tensor.call != number and any(
            tensor in record.inputs and tensor in record.outputs for record in call.records
        ):  # it is written into, which a copy would not show
            flow.whole.add(tensor)
            flow.stopped.add(number)
    for number, call in enumerate(flow.trace.calls):
        sizes.at = number
        for value in call.numbers.values():
            _check_unseen(flow, call, value)
        for demand in demands_of(call, sizes):
            right = evaluate(demand.value, sizes.size, sizes.divisions)
            if right != demand.expected:
                _repair(flow, number, call, demand.value)
    for decision in flow.trace.size_decisions:
        if not decided_alike(decision, sizes.size, sizes.divisions):
            sides = _sizes_in(decision.left) + _sizes_in(decision.right)
            flow.whole.update(each.tensor for each in sides if flow.is_seen_cut(each.tensor, each.dimension))
    _alike(flow)
    return (len(flow.whole), len(flow.stopped)) != before


def _check_unseen(flow: TokenFlow, call: FunctionCall, value: object) -> None:
    """A size of a rank's tokens that goes where nothing says what it has to be."""
    sources = [each for each in _sizes_in(value) if flow.is_seen_cut(each.tensor, each.dimension)]
    if sources and call.function not in _CHECKED:
        flow.whole.update(each.tensor for each in sources)


def _repair(flow: TokenFlow, number: int, call: FunctionCall, value: int) -> None:
    sources = [each.tensor for each in _sizes_in(value) if flow.is_seen_cut(each.tensor, each.dimension)]
    fresh = [each for each in sources if each not in flow.whole]
    if fresh:
        flow.whole.update(fresh)
    else:
        flow.stopped.add(number)
        flow.whole.update(each for each in call.outputs if each in flow.made)


def _alike(flow: TokenFlow) -> None:
    """A call that is made more than once has the same exchanges each time."""
    places: dict[int, set[tuple[str, str, TokenDim]]] = {}
    for kind, found in (("gather", flow.gathers), ("slice", flow.slices)):
        for (number, place), (_, layout) in found.items():
            places.setdefault(number, set()).add((kind, place, layout))
    runs: dict[object, list[int]] = {}
    for number, call in enumerate(flow.trace.calls):
        runs.setdefault(call.key, []).append(number)
    for numbers in runs.values():
        first = places.get(numbers[0], set())
        if any(places.get(number, set()) != first for number in numbers[1:]):
            for number in numbers:
                call = flow.trace.calls[number]
                flow.whole.update(call.outputs)
                if number in flow.stopped:
                    flow.whole.update(tensor for _, tensor, _ in call.arguments if tensor in flow.made)
                flow.stopped.add(number)


def _found(flow: TokenFlow) -> SharedTokens:
    """The places, once everything is right."""
    uses = set()
    for number in flow.local:
        for place, tensor, grad in flow.trace.calls[number].arguments:
            if grad and tensor.parameters and (number, place) not in flow.slices:
                uses.add((number, place))
    for number, point in flow.leaving.items():
        if point.bias and (number, "output") in flow.slices:
            uses.add((number, point.bias))
    outputs = {each for call in flow.trace.calls for each in call.outputs if each.activation}
    plain = [each for each in outputs if each not in flow.sharded]
    shared = sum(elements(each) for each in plain if each in flow.made)
    share = shared / max(sum(map(elements, plain)), 1)
    local = tuple(path for path, tensor in flow.trace.given.items() if flow.is_local(tensor))
    return SharedTokens(flow.gathers, flow.slices, uses, share if flow.gathers or flow.slices else 0.0, local)


class _SharedSizes(LocalSizes):
    """Sizes on one rank, where axes and tokens are shared out: what a call makes, and what is read of it later."""

    def __init__(self, flow: TokenFlow):
        super().__init__(flow.courses)
        self.flow, self.at = flow, 0
        self.divisions = {
            attribute: Division(self.shares[next(iter(each.courses))], each.kept)
            for attribute, each in flow.rewrites.items()
            if each.courses
        }

    def of(self, tensor: Traced, node: AxisNode) -> int:
        """The size of a dimension of a tensor as the call `at` has it."""
        size = super().of(tensor, node)
        layout = self.flow.layout_at(self.at, tensor)
        return size // _RANKS if layout is not None and tensor.dims[layout.dim] is node else size

    def size(self, size: Size) -> int:
        """What the model reads as the size of a dimension."""
        found = super().of(size.tensor, size.tensor.dims[size.dimension])
        return found // _RANKS if self.flow.is_seen_cut(size.tensor, size.dimension) else found


# Functions of whose numbers `demands_of` says what they have to be.
_CHECKED = frozenset(
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand randn unflatten split"
    " split_with_sizes narrow __getitem__".split()
)


def _sizes_in(value: object) -> list[Size]:
    source = getattr(value, "source", None)
    if isinstance(source, Size):
        return [source]
    if isinstance(source, Arithmetic):
        return _sizes_in(source.left) + _sizes_in(source.right)
    if isinstance(value, slice):
        return [each for bound in (value.start, value.stop) for each in _sizes_in(bound)]
    return []

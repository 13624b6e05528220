"""Which tensors of a forward a rank needs its own tokens of alone (sequence parallel), and where
ranks exchange them.

Between the products that are cut, every rank would do the same to all tokens. What works on each
token by itself is done by each rank for its part of every row: a tensor that is summed over ranks
leaves as a rank's tokens, and what needs the others' is gathered. Whatever looks at several tokens
(attention, scans, sizes of whole rows) has whole rows. Where the sizes that a forward computes
would not be right, the tensors that they come from stay whole, until all are.

Whether an operator can work on a rank's tokens alone, its rule says, once more, with the tokens of
its inputs marked: all dimensions of its inputs are new, and the tokens of those that are shared out
are one axis. If that axis is neither blocked, summed over nor taken apart, and comes out once, what
a rank makes of its tokens is its tokens of what the whole would be; and whatever else has the axis
has to be cut.
"""

import dataclasses
from math import prod
from typing import NamedTuple

import torch

from recipe_lib.external.tensor_plan.axes import AxisNode, carries, factors, find, leaves, product
from recipe_lib.external.tensor_plan.forward_trace import (
    Course,
    ForwardTrace,
    FunctionCall,
    LocalSizes,
    OperatorCall,
    Traced,
    Wanted,
    demands_of,
    shape_of,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Arithmetic,
    Attribute,
    Division,
    Size,
    decided_alike,
    evaluate,
)


class TokenDim(NamedTuple):
    """Where a tensor has its tokens. dim: the dimension; with others in it, the tokens are last
    there, or `first`.
    """

    dim: int
    first: bool = False


Layouts = dict[Traced, TokenDim]
OF_ANOTHER_TYPE = frozenset(("type_as", "to"))  # an argument says no more than a type


class TokenWise(NamedTuple):
    """outputs: where what comes out has tokens. demands: inputs of which all have to be cut, and
    where.
    """

    outputs: Layouts
    demands: Layouts


def candidates(tensor: Traced, length: int) -> list[TokenDim]:
    """Where a tensor could have rows of `length` tokens."""
    found = []
    for number, size in enumerate(shape_of(tensor)):
        if size % length == 0:
            found.append(TokenDim(number))
            if size > length:
                found.append(TokenDim(number, True))
    return found


def call_on_tokens(call: FunctionCall, layouts: Layouts, length: int) -> TokenWise | None:
    """A call whose arguments in `layouts` are a rank's tokens; None if it cannot work on these
    alone.
    """
    here = dict(layouts)
    demands: Layouts = {}
    given = {tensor for _, tensor, _ in call.arguments}
    read = {each for record in call.records for each in record.inputs} | set(call.outputs)
    if call.function not in OF_ANOTHER_TYPE and any(
        each not in read for each in given & layouts.keys()
    ):
        return None  # its shape is read, within the call
    for record in call.records:
        if not any(each in here for each in (*record.inputs, *record.outputs)):
            continue
        # What is written into has to be a rank's tokens already, and no view of another tensor.
        written = [each for each in record.outputs if each in record.inputs]
        if any(each not in here or each.root.call != each.call for each in written):
            return None
        found = _record_on_tokens(record, here, length)
        if found is None:
            return None
        for tensor, layout in found.demands.items():
            if tensor not in given or demands.get(tensor, layout) != layout:
                return None
            demands[tensor] = here[tensor] = layout
        here.update(found.outputs)
    return TokenWise({each: here[each] for each in call.outputs if each in here}, demands)


def _record_on_tokens(record: OperatorCall, layouts: Layouts, length: int) -> TokenWise | None:
    if record.rule is None or record.values:
        return None
    tokens = AxisNode(length)
    fresh = {
        known: Traced(_fresh(shape_of(known), layouts.get(known), tokens, length))
        for known in record.inputs
    }

    def known_again(tensor: torch.Tensor) -> Traced:
        return fresh[record.held[id(tensor)]]

    again = OperatorCall(
        record.function, record.args, record.kwargs, record.results, record.place, known_again
    )
    made = record.rule(again)
    if made is None or find(tokens).kind != "leaf" or find(tokens).blocked:
        return None
    summed = [node for node, _, _ in again.contractions] + [node for node, _ in again.reductions]
    if _has(summed, tokens):
        return None
    outputs: Layouts = {}
    for traced, nodes in zip(record.outputs, made, strict=True):
        where = _place_of(nodes, tokens)
        if where is not None:
            outputs[traced] = where
        elif _has(nodes, tokens) or not record.uniform:
            return None
    demands: Layouts = {}
    for known in record.inputs:
        if known in layouts:
            if _place_of(fresh[known].dims, tokens) != layouts[known]:
                return None
        elif _has(fresh[known].dims, tokens):
            where = _place_of(fresh[known].dims, tokens)
            if where is None:
                return None
            demands[known] = where
    return TokenWise(outputs, demands)


def _fresh(
    shape: list[int], layout: TokenDim | None, tokens: AxisNode, length: int
) -> list[AxisNode]:
    found = [AxisNode(size) for size in shape]
    if layout is not None:
        others = AxisNode(shape[layout.dim] // length)
        found[layout.dim] = product([tokens, others] if layout.first else [others, tokens])
    return found


def _has(nodes: list[AxisNode], tokens: AxisNode) -> bool:
    return any(carries(node, tokens) for node in nodes)


def _place_of(nodes: list[AxisNode], tokens: AxisNode) -> TokenDim | None:
    """Where the tokens lie, if they do so once and at the end or the beginning of a dimension."""
    root = find(tokens)
    if sum(leaf is root for node in nodes for leaf in leaves(node)) != 1:
        return None
    number, node = next(
        (number, node) for number, node in enumerate(nodes) if carries(node, tokens)
    )
    within = factors(node)
    if within and within[-1] is root:
        return TokenDim(number)
    return TokenDim(number, True) if within and within[0] is root else None


Place = tuple[int, str]  # number of a call, and an argument, `output` or `output.1`


class TokenFlow:
    """The tokens on their way through a forward.

    whole: tensors that every rank has to have whole where they are made. stopped: calls that get
    whole ones.
    """

    def __init__(
        self,
        trace: ForwardTrace,
        courses: list[Course],
        rewrites: dict[Attribute, Wanted],
        unsteady: frozenset[str] = frozenset(),
    ):
        self.trace, self.courses, self.rewrites = trace, courses, rewrites
        self.length = trace.ids.dims[1].size if trace.ids is not None else 0
        self.sharded = set[Traced]().union(*(course.sharded for course in courses))
        points = [point for course in courses for point in course.points]
        self.leaving = {point.call: point for point in points if point.kind == "leave"}
        self.looking = {point.call: point for point in points if point.kind == "lookup"}
        self.cut = {number for number, call in enumerate(trace.calls) if self._is_cut(call)} | {
            p.call for p in points
        }
        self.whole: set[Traced] = set(trace.outputs)
        self.stopped: set[int] = set()
        self._known: dict[tuple[int, frozenset[tuple[Traced, TokenDim]]], TokenWise | None] = {}
        for number, call in enumerate(trace.calls):
            if call.key.module in unsteady:
                self.stopped.add(number)
                self.whole.update(tensor for _, tensor, _ in call.arguments if tensor.activation)
                self.whole.update(call.outputs)
        self._head()
        self._note_users()

    def _is_cut(self, call: FunctionCall) -> bool:
        tensors = [tensor for _, tensor, _ in call.arguments] + call.outputs
        tensors += [each for record in call.records for each in (*record.inputs, *record.outputs)]
        return any(each in self.sharded for each in tensors)

    def _head(self) -> None:
        """What the model gives, and all that leads to it from the last product on, is whole."""
        queue = [each for each in self.trace.outputs if each.call >= 0]
        seen = set(queue)
        while queue:
            call = self.trace.calls[queue.pop().call]
            product = any(record.contractions for record in call.records)
            for _, tensor, _ in call.arguments:
                if tensor.activation and tensor not in seen:
                    seen.add(tensor)
                    self.whole.add(tensor)
                    if not product and tensor.call >= 0:
                        queue.append(tensor)

    def _on_tokens(self, number: int, layouts: Layouts) -> TokenWise | None:
        key = (number, frozenset(layouts.items()))
        if key not in self._known:
            self._known[key] = call_on_tokens(self.trace.calls[number], layouts, self.length)
        return self._known[key]

    def spread(self) -> None:
        """Follows the tokens through the calls, then back from where whole tensors have to be
        cut.
        """
        assert self.trace.ids is not None
        self.made: Layouts = {}  # tensors of which the call that makes them gives a rank's tokens
        self.aligned: Layouts = {
            self.trace.ids: TokenDim(1)
        }  # whole ones, of which it is known where the tokens are
        self.slices: dict[Place, tuple[Traced, TokenDim]] = {}
        self.gathers: dict[Place, tuple[Traced, TokenDim]] = {}
        self.early: set[Traced] = set()  # whole from the call on that makes them
        self.fresh: set[Traced] = set()  # embeddings that no layer has read yet
        self.local: set[int] = set()  # calls that work on a rank's tokens
        for number, call in enumerate(self.trace.calls):
            (self._cut_call if number in self.cut else self._call)(number, call)
        for number in range(len(self.trace.calls) - 1, -1, -1):
            for output in self.trace.calls[number].outputs:
                self._back(number, output)
        self._late_gathers()

    def _cut_call(self, number: int, call: FunctionCall) -> None:
        self._gather_arguments(number, call)
        if number in self.looking:
            ids = {
                tensor: self.aligned[tensor]
                for _, tensor, _ in call.arguments
                if tensor in self.aligned
            }
            found = self._on_tokens(number, ids) if ids else None
            for output in call.outputs if found is not None else ():
                if found is not None and output in found.outputs:
                    self._give(number, call, output, found.outputs[output])

    def _give(self, number: int, call: FunctionCall, output: Traced, layout: TokenDim) -> None:
        """A whole tensor that a call makes becomes a rank's tokens there, unless it has to be
        whole.
        """
        if output in self.whole:
            self.aligned[output] = layout
            return
        self.slices[number, output_of(call, output)] = (output, layout)
        self.made[output] = layout
        if number in self.looking:
            self.fresh.add(output)

    def _is_fresh(self, call: FunctionCall) -> bool:
        """True where a call makes embeddings of embeddings, without parameters: scaled ones."""
        given = [tensor for _, tensor, _ in call.arguments]
        return any(each in self.fresh for each in given) and not any(
            each.parameters for each in given
        )

    def _gather_arguments(self, number: int, call: FunctionCall) -> None:
        for place, tensor, _ in call.arguments:
            if self.is_local(tensor):
                self.gathers[number, place] = (tensor, self.made[tensor])

    def is_local(self, tensor: Traced) -> bool:
        """True for one of which the forward gets a rank's tokens alone."""
        return tensor in self.made and tensor not in self.early

    def _giver(self, tensor: Traced) -> int:
        """The last call that makes a tensor or hands it on, one right after the other in one
        module.
        """
        number = tensor.call
        calls = self.trace.calls
        while (
            number + 1 in self._handed.get(tensor, ())
            and calls[number + 1].key.module == calls[number].key.module
        ):
            number += 1
        return number

    def _call(self, number: int, call: FunctionCall) -> None:
        layouts = {
            tensor: self.made[tensor] for _, tensor, _ in call.arguments if self.is_local(tensor)
        }
        aligned = {
            tensor: self.aligned[tensor]
            for _, tensor, _ in call.arguments
            if tensor in self.aligned
        }
        cuts: Layouts = {}
        if (
            not layouts
            and not hands_on(call)
            and any(
                grad and tensor in aligned and tensor.activation
                for _, tensor, grad in call.arguments
            )
        ):
            layouts = cuts = aligned  # a whole one is cut as early as it can be
        found = self._on_tokens(number, layouts) if layouts and number not in self.stopped else None
        if found is not None:
            self._local(number, call, found, {**cuts, **found.demands})
            return
        self._gather_arguments(number, call)
        whole = self._on_tokens(number, aligned) if aligned else None
        if whole is not None:
            self.aligned.update(whole.outputs)

    def _local(self, number: int, call: FunctionCall, found: TokenWise, cuts: Layouts) -> None:
        self.local.add(number)
        for place, tensor, _ in call.arguments:
            if tensor in cuts and not self.is_local(tensor):
                self.slices[number, place] = (tensor, cuts[tensor])
        for output, layout in found.outputs.items():
            if output in self.early:
                continue
            self.made[output] = layout
            if self._is_fresh(call):
                self.fresh.add(output)
            if output in self.whole and number == self._giver(output):
                self.gathers[number, output_of(call, output)] = (output, layout)
                self.early.add(output)
                if self._is_fresh(call):
                    self.aligned[output] = layout

    def _note_users(self) -> None:
        self._users: dict[Traced, list[Place]] = {}
        self._handed: dict[Traced, set[int]] = {}
        for number, call in enumerate(self.trace.calls):
            for place, each, _ in call.arguments:
                if call.function in OF_ANOTHER_TYPE and place != "0":
                    continue
                if each in call.outputs and hands_on(call):
                    self._handed.setdefault(each, set()).add(number)
                else:
                    self._users.setdefault(each, []).append((number, place))

    def _back(self, number: int, output: Traced) -> None:
        """A whole tensor that is cut wherever it is used is cut where it is made, or made of cut
        ones.
        """
        uses = self._users.get(output, [])
        if output in self.made or output.call != number or output in self.whole or not uses:
            return
        if (
            any(place not in self.slices for place in uses)
            or len({self.slices[place][1] for place in uses}) > 1
        ):
            return
        layout = self.slices[uses[0]][1]
        call = self.trace.calls[number]
        is_cut = number in self.cut
        is_made = not is_cut and self._made_of_tokens(number, call, output, layout)
        is_given = (number in self.leaving or number in self.looking) if is_cut else len(uses) > 1
        if not is_made and not is_given:
            return
        for place in uses:
            self.slices.pop(place)
        if not is_made:
            self._give(number, call, output, layout)

    def _made_of_tokens(
        self, number: int, call: FunctionCall, output: Traced, layout: TokenDim
    ) -> bool:
        if number in self.stopped or number in self.local or len(call.outputs) != 1:
            return False
        if any(self.is_local(tensor) for _, tensor, _ in call.arguments):
            return False
        whole = [tensor for _, tensor, grad in call.arguments if tensor.activation and grad]
        for tensor in whole[:1]:
            for candidate in candidates(tensor, self.length):
                found = self._on_tokens(number, {tensor: candidate})
                if found is not None and found.outputs.get(output) == layout:
                    self._local(number, call, found, {tensor: candidate, **found.demands})
                    return True
        return False

    def _late_gathers(self) -> None:
        """A tensor that is gathered wherever it is used is gathered where it is made."""
        for tensor, layout in list(self.made.items()):
            uses = self._users.get(tensor, [])
            if (
                tensor in self.early
                or tensor.call < 0
                or not uses
                or any(use not in self.gathers for use in uses)
            ):
                continue
            for use in uses:
                self.gathers.pop(use)
            place = (tensor.call, output_of(self.trace.calls[tensor.call], tensor))
            if self.slices.pop(place, None) is not None:  # it is whole before it would be cut
                del self.made[tensor]
            else:
                giver = self._giver(tensor)
                self.gathers[giver, output_of(self.trace.calls[giver], tensor)] = (tensor, layout)
                self.early.add(tensor)

    def is_seen_cut(self, tensor: Traced, dimension: int) -> bool:
        """True for a dimension of which the forward reads the size of a rank's tokens."""
        return self.is_local(tensor) and self.made[tensor].dim == dimension

    def layout_at(self, number: int, tensor: Traced) -> TokenDim | None:
        """Where a call's tensor has a rank's tokens, as the call gets or makes it; None where it is
        whole there.
        """
        call = self.trace.calls[number]
        if tensor in call.outputs:
            return (
                None if (number, output_of(call, tensor)) in self.slices else self.made.get(tensor)
            )
        places = [(number, place) for place, each, _ in call.arguments if each is tensor]
        sliced = [self.slices[place][1] for place in places if place in self.slices]
        if sliced:
            return self.made.get(tensor, sliced[0])
        return (
            self.made[tensor]
            if self.is_local(tensor) and self.gathers.keys().isdisjoint(places)
            else None
        )


def hands_on(call: FunctionCall) -> bool:
    """True for a call that gives its argument as it is, such as a conversion to the type that it
    has.
    """
    return not call.records and any(tensor in call.outputs for _, tensor, _ in call.arguments)


def output_of(call: FunctionCall, output: Traced) -> str:
    """The place of one of a call's outputs."""
    return "output" if len(call.outputs) == 1 else f"output.{call.outputs.index(output)}"


# In each of which tensors whose sizes come out wrong are made whole; a model needs one or two
_ROUNDS = 40
_RANKS = 2  # of which sizes are computed


@dataclasses.dataclass(eq=False)
class SharedTokens:
    """Where tokens are cut (`slices`) and put together again (`gathers`), by place; uses: arguments
    that whole parameters are, where a rank's tokens meet them. share: of the elements that no axis
    cuts, those of which a rank has its tokens alone. local: paths of the modules that give a rank's
    tokens alone (`ForwardTrace.given`).
    """

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
    """The tokens that can be shared out in a forward; nothing where the model takes no ids, or
    where it would not work.

    courses: the axes that are cut. rewrites: attributes that are divided. unsteady: paths of
    modules whose forwards make other calls for other inputs, so that none of theirs can be told by
    its number.
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
            flow.whole.update(
                each for each in (*record.inputs, *record.outputs) if flow.is_local(each)
            )
    for (number, _), (tensor, _) in [*flow.slices.items(), *flow.gathers.items()]:
        call = flow.trace.calls[number]
        if tensor.call != number and any(
            tensor in record.inputs and tensor in record.outputs for record in call.records
        ):  # it is written into, which a copy would not show
            flow.whole.add(tensor)
            flow.stopped.add(number)
    for number, call in enumerate(flow.trace.calls):
        sizes.at = number
        for value in call.numbers.values() if call.function not in _CHECKED else ():
            # A size of a rank's tokens that goes where nothing says what it has to be.
            seen = [
                each for each in _sizes_in(value) if flow.is_seen_cut(each.tensor, each.dimension)
            ]
            flow.whole.update(each.tensor for each in seen)
        for demand in demands_of(call, sizes):
            right = evaluate(demand.value, sizes.size, sizes.divisions)
            if right != demand.expected:
                _repair(flow, number, call, demand.value)
    for decision in flow.trace.size_decisions:
        if not decided_alike(decision, sizes.size, sizes.divisions):
            sides = _sizes_in(decision.left) + _sizes_in(decision.right)
            flow.whole.update(
                each.tensor for each in sides if flow.is_seen_cut(each.tensor, each.dimension)
            )
    _alike(flow)
    return (len(flow.whole), len(flow.stopped)) != before


def _repair(flow: TokenFlow, number: int, call: FunctionCall, value: int) -> None:
    sources = [
        each.tensor for each in _sizes_in(value) if flow.is_seen_cut(each.tensor, each.dimension)
    ]
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
                    flow.whole.update(
                        tensor for _, tensor, _ in call.arguments if tensor in flow.made
                    )
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
    sizes = {each: prod(shape_of(each)) for each in outputs if each not in flow.sharded}
    share = sum(size for each, size in sizes.items() if each in flow.made) / max(
        sum(sizes.values()), 1
    )
    local = tuple(path for path, tensor in flow.trace.given.items() if flow.is_local(tensor))
    return SharedTokens(
        flow.gathers, flow.slices, uses, share if flow.gathers or flow.slices else 0.0, local
    )


class _SharedSizes(LocalSizes):
    """Sizes on one rank, where axes and tokens are shared out: what a call makes, and what is read
    of it later.
    """

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
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand randn"
    " unflatten split split_with_sizes narrow __getitem__".split()
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

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

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    find,
    has_axis,
    list_factors,
    list_leaves,
    make_product,
)
from recipe_lib.external.tensor_plan.forward_trace import (
    AttributeDivision,
    ForwardTrace,
    FunctionCall,
    LocalSizes,
    OperatorCall,
    ShardedAxis,
    TracedTensor,
    get_shape,
    list_demands,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Arithmetic,
    Attribute,
    Division,
    Size,
    evaluate,
    is_decided_alike,
)


class TokenDim(NamedTuple):
    """Where a tensor has its tokens. dim: the dimension; with others in it, the tokens are last
    there, or `first`.
    """

    dim: int
    first: bool = False


Layouts = dict[TracedTensor, TokenDim]
OF_ANOTHER_TYPE = frozenset(("type_as", "to"))  # an argument says no more than a type


class TokenWise(NamedTuple):
    """outputs: where what comes out has tokens. demands: inputs of which all have to be cut, and
    where.
    """

    outputs: Layouts
    demands: Layouts


def list_candidates(tensor: TracedTensor, length: int) -> list[TokenDim]:
    """Where a tensor could have rows of `length` tokens."""
    found = []
    for number, size in enumerate(get_shape(tensor)):
        if size % length == 0:
            found.append(TokenDim(number))
            if size > length:
                found.append(TokenDim(number, True))
    return found


def run_call_on_tokens(call: FunctionCall, layouts: Layouts, length: int) -> TokenWise | None:
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
        found = _run_record_on_tokens(record, here, length)
        if found is None:
            return None
        for tensor, layout in found.demands.items():
            if tensor not in given or demands.get(tensor, layout) != layout:
                return None
            demands[tensor] = here[tensor] = layout
        here.update(found.outputs)
    return TokenWise({each: here[each] for each in call.outputs if each in here}, demands)


def _run_record_on_tokens(record: OperatorCall, layouts: Layouts, length: int) -> TokenWise | None:
    if record.rule is None or record.values:
        return None
    tokens = AxisNode(length)
    fresh = {
        known: TracedTensor(_make_dims(get_shape(known), layouts.get(known), tokens, length))
        for known in record.inputs
    }

    def get_marked(tensor: torch.Tensor) -> TracedTensor:
        return fresh[record.held[id(tensor)]]

    again = OperatorCall(
        record.function,
        record.args,
        record.kwargs,
        results=record.results,
        place=record.place,
        known=get_marked,
    )
    made = record.rule(again)
    if made is None or find(tokens).kind != "leaf" or find(tokens).blocked:
        return None
    summed = [node for node, _, _ in again.contractions] + [node for node, _ in again.reductions]
    if _has_tokens(summed, tokens):
        return None
    outputs: Layouts = {}
    for traced, nodes in zip(record.outputs, made, strict=True):
        where = _find_token_dim(nodes, tokens)
        if where is not None:
            outputs[traced] = where
        elif _has_tokens(nodes, tokens) or not record.uniform:
            return None
    demands: Layouts = {}
    for known in record.inputs:
        if known in layouts:
            if _find_token_dim(fresh[known].dims, tokens) != layouts[known]:
                return None
        elif _has_tokens(fresh[known].dims, tokens):
            where = _find_token_dim(fresh[known].dims, tokens)
            if where is None:
                return None
            demands[known] = where
    return TokenWise(outputs, demands)


def _make_dims(
    shape: list[int], layout: TokenDim | None, tokens: AxisNode, length: int
) -> list[AxisNode]:
    found = [AxisNode(size) for size in shape]
    if layout is not None:
        others = AxisNode(shape[layout.dim] // length)
        found[layout.dim] = make_product([tokens, others] if layout.first else [others, tokens])
    return found


def _has_tokens(nodes: list[AxisNode], tokens: AxisNode) -> bool:
    return any(has_axis(node, tokens) for node in nodes)


def _find_token_dim(nodes: list[AxisNode], tokens: AxisNode) -> TokenDim | None:
    """Where the tokens lie, if they do so once and at the end or the beginning of a dimension."""
    root = find(tokens)
    if sum(leaf is root for node in nodes for leaf in list_leaves(node)) != 1:
        return None
    number, node = next(
        (number, node) for number, node in enumerate(nodes) if has_axis(node, tokens)
    )
    within = list_factors(node)
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
        sharded_axes: list[ShardedAxis],
        rewrites: dict[Attribute, AttributeDivision],
        unsteady: frozenset[str] = frozenset(),
    ):
        self.trace, self.sharded_axes, self.rewrites = trace, sharded_axes, rewrites
        self.length = trace.ids.dims[1].size if trace.ids is not None else 0
        self.sharded = set[TracedTensor]().union(
            *(sharded_axis.sharded for sharded_axis in sharded_axes)
        )
        points = [point for sharded_axis in sharded_axes for point in sharded_axis.boundaries]
        self.leaving = {point.call: point for point in points if point.kind == "leave"}
        self.looking = {point.call: point for point in points if point.kind == "lookup"}
        self.cut = {number for number, call in enumerate(trace.calls) if self._is_cut(call)} | {
            p.call for p in points
        }
        self.whole: set[TracedTensor] = set(trace.outputs)
        self.stopped: set[int] = set()
        self._known: dict[
            tuple[int, frozenset[tuple[TracedTensor, TokenDim]]], TokenWise | None
        ] = {}
        for number, call in enumerate(trace.calls):
            if call.key.module in unsteady:
                self.stopped.add(number)
                self.whole.update(tensor for _, tensor, _ in call.arguments if tensor.activation)
                self.whole.update(call.outputs)
        self._keep_head_whole()
        self._note_users()

    def _is_cut(self, call: FunctionCall) -> bool:
        tensors = [tensor for _, tensor, _ in call.arguments] + call.outputs
        tensors += [each for record in call.records for each in (*record.inputs, *record.outputs)]
        return any(each in self.sharded for each in tensors)

    def _keep_head_whole(self) -> None:
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

    def _try_on_tokens(self, number: int, layouts: Layouts) -> TokenWise | None:
        key = (number, frozenset(layouts.items()))
        if key not in self._known:
            self._known[key] = run_call_on_tokens(self.trace.calls[number], layouts, self.length)
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
        self.slices: dict[Place, tuple[TracedTensor, TokenDim]] = {}
        self.gathers: dict[Place, tuple[TracedTensor, TokenDim]] = {}
        self.early: set[TracedTensor] = set()  # whole from the call on that makes them
        self.fresh: set[TracedTensor] = set()  # embeddings that no layer has read yet
        self.local: set[int] = set()  # calls that work on a rank's tokens
        for number, call in enumerate(self.trace.calls):
            (self._cut_call if number in self.cut else self._call)(number, call)
        for number in range(len(self.trace.calls) - 1, -1, -1):
            for output in self.trace.calls[number].outputs:
                self._move_slice_back(number, output)
        self._merge_gathers()

    def _cut_call(self, number: int, call: FunctionCall) -> None:
        self._gather_arguments(number, call)
        if number in self.looking:
            ids = {
                tensor: self.aligned[tensor]
                for _, tensor, _ in call.arguments
                if tensor in self.aligned
            }
            found = self._try_on_tokens(number, ids) if ids else None
            for output in call.outputs if found is not None else ():
                if found is not None and output in found.outputs:
                    self._give(number, call, output, found.outputs[output])

    def _give(
        self, number: int, call: FunctionCall, output: TracedTensor, layout: TokenDim
    ) -> None:
        """A whole tensor that a call makes becomes a rank's tokens there, unless it has to be
        whole.
        """
        if output in self.whole:
            self.aligned[output] = layout
            return
        self.slices[number, name_output(call, output)] = (output, layout)
        self.made[output] = layout
        if number in self.looking:
            self.fresh.add(output)

    def _is_scaled_embedding(self, call: FunctionCall) -> bool:
        """True where a call makes embeddings of embeddings, without parameters: scaled ones."""
        given = [tensor for _, tensor, _ in call.arguments]
        return any(each in self.fresh for each in given) and not any(
            each.parameters for each in given
        )

    def _gather_arguments(self, number: int, call: FunctionCall) -> None:
        for place, tensor, _ in call.arguments:
            if self.is_local(tensor):
                self.gathers[number, place] = (tensor, self.made[tensor])

    def is_local(self, tensor: TracedTensor) -> bool:
        """True for one of which the forward gets a rank's tokens alone."""
        return tensor in self.made and tensor not in self.early

    def _find_giver(self, tensor: TracedTensor) -> int:
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
            and not is_handing_on(call)
            and any(
                grad and tensor in aligned and tensor.activation
                for _, tensor, grad in call.arguments
            )
        ):
            layouts = cuts = aligned  # a whole one is cut as early as it can be
        found = (
            self._try_on_tokens(number, layouts) if layouts and number not in self.stopped else None
        )
        if found is not None:
            self._note_local_call(number, call, found, {**cuts, **found.demands})
            return
        self._gather_arguments(number, call)
        whole = self._try_on_tokens(number, aligned) if aligned else None
        if whole is not None:
            self.aligned.update(whole.outputs)

    def _note_local_call(
        self, number: int, call: FunctionCall, found: TokenWise, cuts: Layouts
    ) -> None:
        self.local.add(number)
        for place, tensor, _ in call.arguments:
            if tensor in cuts and not self.is_local(tensor):
                self.slices[number, place] = (tensor, cuts[tensor])
        for output, layout in found.outputs.items():
            if output in self.early:
                continue
            self.made[output] = layout
            if self._is_scaled_embedding(call):
                self.fresh.add(output)
            if output in self.whole and number == self._find_giver(output):
                self.gathers[number, name_output(call, output)] = (output, layout)
                self.early.add(output)
                if self._is_scaled_embedding(call):
                    self.aligned[output] = layout

    def _note_users(self) -> None:
        self._users: dict[TracedTensor, list[Place]] = {}
        self._handed: dict[TracedTensor, set[int]] = {}
        for number, call in enumerate(self.trace.calls):
            for place, each, _ in call.arguments:
                if call.function in OF_ANOTHER_TYPE and place != "0":
                    continue
                if each in call.outputs and is_handing_on(call):
                    self._handed.setdefault(each, set()).add(number)
                else:
                    self._users.setdefault(each, []).append((number, place))

    def _move_slice_back(self, number: int, output: TracedTensor) -> None:
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
        is_made = not is_cut and self._try_made_of_tokens(number, call, output, layout)
        is_given = (number in self.leaving or number in self.looking) if is_cut else len(uses) > 1
        if not is_made and not is_given:
            return
        for place in uses:
            self.slices.pop(place)
        if not is_made:
            self._give(number, call, output, layout)

    def _try_made_of_tokens(
        self, number: int, call: FunctionCall, output: TracedTensor, layout: TokenDim
    ) -> bool:
        if number in self.stopped or number in self.local or len(call.outputs) != 1:
            return False
        if any(self.is_local(tensor) for _, tensor, _ in call.arguments):
            return False
        whole = [tensor for _, tensor, grad in call.arguments if tensor.activation and grad]
        for tensor in whole[:1]:
            for candidate in list_candidates(tensor, self.length):
                found = self._try_on_tokens(number, {tensor: candidate})
                if found is not None and found.outputs.get(output) == layout:
                    self._note_local_call(number, call, found, {tensor: candidate, **found.demands})
                    return True
        return False

    def _merge_gathers(self) -> None:
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
            place = (tensor.call, name_output(self.trace.calls[tensor.call], tensor))
            if self.slices.pop(place, None) is not None:  # it is whole before it would be cut
                del self.made[tensor]
            else:
                giver = self._find_giver(tensor)
                self.gathers[giver, name_output(self.trace.calls[giver], tensor)] = (tensor, layout)
                self.early.add(tensor)

    def is_seen_cut(self, tensor: TracedTensor, dimension: int) -> bool:
        """True for a dimension of which the forward reads the size of a rank's tokens."""
        return self.is_local(tensor) and self.made[tensor].dim == dimension

    def get_layout(self, number: int, tensor: TracedTensor) -> TokenDim | None:
        """Where a call's tensor has a rank's tokens, as the call gets or makes it; None where it is
        whole there.
        """
        call = self.trace.calls[number]
        if tensor in call.outputs:
            return (
                None
                if (number, name_output(call, tensor)) in self.slices
                else self.made.get(tensor)
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


def is_handing_on(call: FunctionCall) -> bool:
    """True for a call that gives its argument as it is, such as a conversion to the type that it
    has.
    """
    return not call.records and any(tensor in call.outputs for _, tensor, _ in call.arguments)


def name_output(call: FunctionCall, output: TracedTensor) -> str:
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

    gathers: dict[Place, tuple[TracedTensor, TokenDim]] = dataclasses.field(default_factory=dict)
    slices: dict[Place, tuple[TracedTensor, TokenDim]] = dataclasses.field(default_factory=dict)
    uses: set[Place] = dataclasses.field(default_factory=set)
    share: float = 0.0
    local: tuple[str, ...] = ()


def share_tokens(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    unsteady: frozenset[str] = frozenset(),
) -> SharedTokens:
    """The tokens that can be shared out in a forward; nothing where the model takes no ids, or
    where it would not work.

    sharded_axes: the axes that are cut. rewrites: attributes that are divided. unsteady: paths of
    modules whose forwards make other calls for other inputs, so that none of theirs can be told by
    its number.
    """
    flow = TokenFlow(trace, sharded_axes, rewrites, unsteady)
    if trace.ids is None:
        return SharedTokens()
    for _ in range(_ROUNDS):
        flow.spread()
        if not _correct(flow):
            return _collect_shared(flow)
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
                each for each in _list_sizes(value) if flow.is_seen_cut(each.tensor, each.dimension)
            ]
            flow.whole.update(each.tensor for each in seen)
        for demand in list_demands(call, sizes):
            right = evaluate(demand.value, sizes.read_size, sizes.divisions)
            if right != demand.expected:
                _repair(flow, number, call, demand.value)
    for decision in flow.trace.size_decisions:
        if not is_decided_alike(decision, sizes.read_size, sizes.divisions):
            sides = _list_sizes(decision.left) + _list_sizes(decision.right)
            flow.whole.update(
                each.tensor for each in sides if flow.is_seen_cut(each.tensor, each.dimension)
            )
    _keep_runs_alike(flow)
    return (len(flow.whole), len(flow.stopped)) != before


def _repair(flow: TokenFlow, number: int, call: FunctionCall, value: int) -> None:
    sources = [
        each.tensor for each in _list_sizes(value) if flow.is_seen_cut(each.tensor, each.dimension)
    ]
    fresh = [each for each in sources if each not in flow.whole]
    if fresh:
        flow.whole.update(fresh)
    else:
        flow.stopped.add(number)
        flow.whole.update(each for each in call.outputs if each in flow.made)


def _keep_runs_alike(flow: TokenFlow) -> None:
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


def _collect_shared(flow: TokenFlow) -> SharedTokens:
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
    sizes = {each: prod(get_shape(each)) for each in outputs if each not in flow.sharded}
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
        super().__init__(flow.sharded_axes)
        self.flow, self.at = flow, 0
        self.divisions = {
            attribute: Division(self.shares[next(iter(each.sharded_axes))], each.kept)
            for attribute, each in flow.rewrites.items()
            if each.sharded_axes
        }

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        """The size of a dimension of a tensor as the call `at` has it."""
        size = super().compute_size(tensor, node)
        layout = self.flow.get_layout(self.at, tensor)
        return size // _RANKS if layout is not None and tensor.dims[layout.dim] is node else size

    def read_size(self, size: Size) -> int:
        """What the model reads as the size of a dimension."""
        found = super().compute_size(size.tensor, size.tensor.dims[size.dimension])
        return found // _RANKS if self.flow.is_seen_cut(size.tensor, size.dimension) else found


# Functions of whose numbers `list_demands` says what they have to be.
_CHECKED = frozenset(
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand randn"
    " unflatten split split_with_sizes narrow __getitem__".split()
)


def _list_sizes(value: object) -> list[Size]:
    source = getattr(value, "source", None)
    if isinstance(source, Size):
        return [source]
    if isinstance(source, Arithmetic):
        return _list_sizes(source.left) + _list_sizes(source.right)
    if isinstance(value, slice):
        return [each for bound in (value.start, value.stop) for each in _list_sizes(bound)]
    return []

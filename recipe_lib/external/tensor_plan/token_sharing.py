"""Find which tensors of a forward a rank needs its own tokens of alone (sequence parallel), and
where ranks exchange them.

Between the products that are cut, every rank would do the same to all tokens. What works on each
token by itself is done by each rank for its part of every row: a tensor that is summed over ranks
leaves as a rank's tokens, and what needs the others' is gathered. Whatever looks at several tokens
(attention, scans, sizes of whole rows) has whole rows.

`share_tokens` spreads tokens through the calls (`TokenFlow`), then computes the sizes that the
forward reads and asks for; tensors whose sizes come out wrong stay whole, until none is wrong.
"""

import dataclasses
from math import prod
from typing import NamedTuple

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    find,
    has_axis,
    have_axis,
    list_factors,
    list_leaves,
    make_product,
)
from recipe_lib.external.tensor_plan.forward_trace import (
    SHAPES,
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
    Attribute,
    Division,
    Size,
    evaluate,
    is_decided_alike,
    list_sources,
)


class TokenDim(NamedTuple):
    """The dimension in which a tensor has its tokens."""

    dim: int
    # With other things in the dimension, the tokens are the outermost there, not the innermost.
    first: bool = False


Layouts = dict[TracedTensor, TokenDim]
Place = tuple[int, str]  # number of a call, and an argument, `output` or `output.1`
TokenExchanges = dict[Place, tuple[TracedTensor, TokenDim]]
OF_ANOTHER_TYPE = frozenset(("type_as", "to"))  # an argument says no more than a type


class TokenWise(NamedTuple):
    """A call that gets a rank's tokens alone."""

    outputs: Layouts  # where what comes out has a rank's tokens
    demands: Layouts  # further inputs, of which all tokens have to be cut, and where


def list_candidates(tensor: TracedTensor, length: int) -> list[TokenDim]:
    """Return where a tensor could have rows of `length` tokens."""
    layouts = []
    for number, size in enumerate(get_shape(tensor)):
        if size % length == 0:
            layouts.append(TokenDim(number))
            if size > length:
                layouts.append(TokenDim(number, True))
    return layouts


def run_call_on_tokens(call: FunctionCall, layouts: Layouts, length: int) -> TokenWise | None:
    """Run a call whose arguments in `layouts` are a rank's tokens, by the rules of its operators.

    Returns None if it cannot work on these alone.
    """
    local = dict(layouts)
    demands: Layouts = {}
    arguments = {tensor for _, tensor, _ in call.arguments}
    read = {tensor for record in call.records for tensor in record.inputs} | set(call.outputs)
    if call.function not in OF_ANOTHER_TYPE and not arguments & layouts.keys() <= read:
        return None  # its shape is read, within the call
    for record in call.records:
        if local.keys().isdisjoint((*record.inputs, *record.outputs)):
            continue
        # What is written into has to be a rank's tokens already, and no view of another tensor.
        written = [tensor for tensor in record.outputs if tensor in record.inputs]
        if any(tensor not in local or tensor.root.call != tensor.call for tensor in written):
            return None
        token_wise = _run_record_on_tokens(record, local, length)
        if token_wise is None:
            return None
        if any(
            tensor not in arguments or demands.get(tensor, layout) != layout
            for tensor, layout in token_wise.demands.items()
        ):
            return None
        demands |= token_wise.demands
        local |= token_wise.demands | token_wise.outputs
    return TokenWise({each: local[each] for each in call.outputs if each in local}, demands)


def _run_record_on_tokens(record: OperatorCall, layouts: Layouts, length: int) -> TokenWise | None:
    """Run an operator's rule once more, with the tokens of its inputs marked.

    All dimensions of its inputs are new, and the tokens of those that are shared out are one axis.
    If that axis is neither blocked, summed over nor taken apart, and comes out once, what a rank
    makes of its tokens is its tokens of what the whole would be; and whatever else has the axis has
    to be cut.
    """
    if record.rule is None or record.values:
        return None
    tokens = AxisNode(length)
    marked = {}
    for tensor in record.inputs:
        dims = [AxisNode(size) for size in get_shape(tensor)]
        layout = layouts.get(tensor)
        if layout is not None:
            rest = AxisNode(dims[layout.dim].size // length)
            dims[layout.dim] = make_product([tokens, rest] if layout.first else [rest, tokens])
        marked[tensor] = TracedTensor(dims)
    again = OperatorCall(
        record.function,
        record.args,
        record.kwargs,
        results=record.results,
        place=record.place,
        known=lambda tensor: marked[record.held[id(tensor)]],
    )
    output_dims = record.rule(again)
    if output_dims is None or find(tokens).kind != "leaf" or find(tokens).blocked:
        return None
    summed = [node for node, _, _ in again.contractions] + [node for node, _ in again.reductions]
    if have_axis(summed, tokens):
        return None
    outputs: Layouts = {}
    for tensor, dims in zip(record.outputs, output_dims, strict=True):
        layout = _find_token_dim(dims, tokens)
        if layout is not None:
            outputs[tensor] = layout
        elif have_axis(dims, tokens) or not record.uniform:
            return None
    demands: Layouts = {}
    for tensor in record.inputs:
        layout = _find_token_dim(marked[tensor].dims, tokens)
        if tensor in layouts:
            if layout != layouts[tensor]:
                return None
        elif layout is not None:
            demands[tensor] = layout
        elif have_axis(marked[tensor].dims, tokens):
            return None
    return TokenWise(outputs, demands)


def _find_token_dim(dims: list[AxisNode], tokens: AxisNode) -> TokenDim | None:
    """Return where the tokens lie, if once and at the end or the beginning of a dimension."""
    root = find(tokens)
    if sum(leaf is root for node in dims for leaf in list_leaves(node)) != 1:
        return None
    number = next(number for number, node in enumerate(dims) if has_axis(node, tokens))
    factors = list_factors(dims[number])
    if factors and factors[-1] is root:
        return TokenDim(number)
    return TokenDim(number, True) if factors and factors[0] is root else None


class TokenFlow:
    """The tokens on their way through a forward."""

    def __init__(
        self,
        trace: ForwardTrace,
        sharded_axes: list[ShardedAxis],
        rewrites: dict[Attribute, AttributeDivision],
        unsteady: frozenset[str] = frozenset(),
    ):
        self.trace = trace
        self.sharded_axes = sharded_axes
        self.rewrites = rewrites
        self.length = trace.ids.dims[1].size if trace.ids is not None else 0
        self.sharded = {tensor for axis in sharded_axes for tensor in axis.sharded}
        boundaries = [boundary for axis in sharded_axes for boundary in axis.boundaries]
        self.leaving = {each.call: each for each in boundaries if each.kind == "leave"}
        self.looking = {each.call: each for each in boundaries if each.kind == "lookup"}
        # Numbers of the calls that work on a rank's part of an axis: these have whole rows.
        self.cut = {each.call for each in boundaries}
        self.cut |= {number for number, call in enumerate(trace.calls) if self._is_cut(call)}
        # Tensors that every rank has to have whole where they are made; calls that get whole ones.
        self.whole: set[TracedTensor] = set(trace.outputs)
        self.stopped: set[int] = set()
        self._run: dict[tuple[int, frozenset[tuple[TracedTensor, TokenDim]]], TokenWise | None] = {}
        for number, call in enumerate(trace.calls):
            if call.key.module in unsteady:
                self.stopped.add(number)
                self.whole.update(tensor for _, tensor, _ in call.arguments if tensor.activation)
                self.whole.update(call.outputs)
        self._keep_head_whole()
        # Of each tensor: the arguments that it is, and the calls that hand it on as it is.
        self._users: dict[TracedTensor, list[Place]] = {}
        self._handed: dict[TracedTensor, set[int]] = {}
        for number, call in enumerate(trace.calls):
            for place, tensor, _ in call.arguments:
                if call.function in OF_ANOTHER_TYPE and place != "0":
                    continue
                if tensor in call.outputs and is_handing_on(call):
                    self._handed.setdefault(tensor, set()).add(number)
                else:
                    self._users.setdefault(tensor, []).append((number, place))

    def _is_cut(self, call: FunctionCall) -> bool:
        tensors = [tensor for _, tensor, _ in call.arguments] + call.outputs
        tensors += [each for record in call.records for each in (*record.inputs, *record.outputs)]
        return not self.sharded.isdisjoint(tensors)

    def _keep_head_whole(self) -> None:
        """Keep whole what the model gives, and all that leads to it from the last product on."""
        queue = [output for output in self.trace.outputs if output.call >= 0]
        seen = set(queue)
        while queue:
            call = self.trace.calls[queue.pop().call]
            is_product = any(record.contractions for record in call.records)
            for _, tensor, _ in call.arguments:
                if tensor.activation and tensor not in seen:
                    seen.add(tensor)
                    self.whole.add(tensor)
                    if not is_product and tensor.call >= 0:
                        queue.append(tensor)

    def _try_on_tokens(self, number: int, layouts: Layouts) -> TokenWise | None:
        key = (number, frozenset(layouts.items()))
        if key not in self._run:
            self._run[key] = run_call_on_tokens(self.trace.calls[number], layouts, self.length)
        return self._run[key]

    def spread(self) -> None:
        """Follow the tokens through the calls, then back from where whole tensors are cut."""
        assert self.trace.ids is not None
        self.made: Layouts = {}  # tensors of which the call that makes them gives a rank's tokens
        # Whole ones, of which it is known where the tokens are.
        self.aligned: Layouts = {self.trace.ids: TokenDim(1)}
        self.slices: TokenExchanges = {}
        self.gathers: TokenExchanges = {}
        self.early: set[TracedTensor] = set()  # whole from the call on that makes them
        self.fresh: set[TracedTensor] = set()  # embeddings that no layer has read yet
        self.local: set[int] = set()  # calls that work on a rank's tokens
        for number, call in enumerate(self.trace.calls):
            if number in self.cut:
                self._spread_cut_call(number, call)
            else:
                self._spread_call(number, call)
        for number in range(len(self.trace.calls) - 1, -1, -1):
            for output in self.trace.calls[number].outputs:
                self._move_slice_back(number, output)
        self._merge_gathers()

    def _spread_cut_call(self, number: int, call: FunctionCall) -> None:
        self._gather_arguments(number, call)
        ids = {each: self.aligned[each] for _, each, _ in call.arguments if each in self.aligned}
        token_wise = self._try_on_tokens(number, ids) if number in self.looking and ids else None
        for output in call.outputs if token_wise is not None else ():
            if token_wise is not None and output in token_wise.outputs:
                self._slice_output(number, output, token_wise.outputs[output])

    def _slice_output(self, number: int, output: TracedTensor, layout: TokenDim) -> None:
        """Make a call's whole output a rank's tokens there, unless it has to be whole."""
        if output in self.whole:
            self.aligned[output] = layout
            return
        self.slices[number, name_output(self.trace.calls[number], output)] = (output, layout)
        self.made[output] = layout
        if number in self.looking:
            self.fresh.add(output)

    def _is_scaling_embedding(self, call: FunctionCall) -> bool:
        """Return True if a call makes embeddings of embeddings, without parameters."""
        arguments = [tensor for _, tensor, _ in call.arguments]
        is_fresh = not self.fresh.isdisjoint(arguments)
        return is_fresh and not any(tensor.parameters for tensor in arguments)

    def _gather_arguments(self, number: int, call: FunctionCall) -> None:
        for place, tensor, _ in call.arguments:
            if self.is_local(tensor):
                self.gathers[number, place] = (tensor, self.made[tensor])

    def is_local(self, tensor: TracedTensor) -> bool:
        """Return True if the forward gets a rank's tokens of it alone."""
        return tensor in self.made and tensor not in self.early

    def _find_giver(self, tensor: TracedTensor) -> int:
        """Return the last of the calls in a row, in one module, that make or hand on a tensor."""
        number = tensor.call
        module = self.trace.calls[number].key.module
        handed = self._handed.get(tensor, ())
        while number + 1 in handed and self.trace.calls[number + 1].key.module == module:
            number += 1
        return number

    def _spread_call(self, number: int, call: FunctionCall) -> None:
        arguments = [tensor for _, tensor, _ in call.arguments]
        layouts = {tensor: self.made[tensor] for tensor in arguments if self.is_local(tensor)}
        aligned = {tensor: self.aligned[tensor] for tensor in arguments if tensor in self.aligned}
        cuts: Layouts = {}
        if not layouts and not is_handing_on(call):
            # A whole activation is cut as early as it can be.
            for _, tensor, needs_gradient in call.arguments:
                if needs_gradient and tensor in aligned and tensor.activation:
                    layouts = aligned
                    cuts = aligned
        can_try = layouts and number not in self.stopped
        token_wise = self._try_on_tokens(number, layouts) if can_try else None
        if token_wise is not None:
            self._note_local_call(number, token_wise, {**cuts, **token_wise.demands})
            return
        self._gather_arguments(number, call)
        aligned_call = self._try_on_tokens(number, aligned) if aligned else None
        if aligned_call is not None:
            self.aligned.update(aligned_call.outputs)

    def _note_local_call(self, number: int, token_wise: TokenWise, cuts: Layouts) -> None:
        """Note a call that works on a rank's tokens. cuts: arguments that are whole till then."""
        call = self.trace.calls[number]
        self.local.add(number)
        for place, tensor, _ in call.arguments:
            if tensor in cuts and not self.is_local(tensor):
                self.slices[number, place] = (tensor, cuts[tensor])
        for output, layout in token_wise.outputs.items():
            if output in self.early:
                continue
            self.made[output] = layout
            if self._is_scaling_embedding(call):
                self.fresh.add(output)
            if output in self.whole and number == self._find_giver(output):
                self.gathers[number, name_output(call, output)] = (output, layout)
                self.early.add(output)
                if self._is_scaling_embedding(call):
                    self.aligned[output] = layout

    def _move_slice_back(self, number: int, output: TracedTensor) -> None:
        """Slice a whole tensor that is sliced wherever it is used where it is made, or make it of
        sliced ones.
        """
        uses = self._users.get(output, [])
        if output in self.made or output.call != number or output in self.whole or not uses:
            return
        if not self.slices.keys() >= set(uses) or len({self.slices[use][1] for use in uses}) > 1:
            return
        layout = self.slices[uses[0]][1]
        is_cut = number in self.cut
        is_made = not is_cut and self._try_made_of_tokens(number, output, layout)
        is_given = (number in self.leaving or number in self.looking) if is_cut else len(uses) > 1
        if not is_made and not is_given:
            return
        for use in uses:
            self.slices.pop(use)
        if not is_made:
            self._slice_output(number, output, layout)

    def _try_made_of_tokens(self, number: int, output: TracedTensor, layout: TokenDim) -> bool:
        """Let a call work on a rank's tokens of its first activation. False if it cannot."""
        call = self.trace.calls[number]
        if number in self.stopped or number in self.local or len(call.outputs) != 1:
            return False
        if any(self.is_local(tensor) for _, tensor, _ in call.arguments):
            return False
        activations = [tensor for _, tensor, grad in call.arguments if tensor.activation and grad]
        for tensor in activations[:1]:
            for candidate in list_candidates(tensor, self.length):
                token_wise = self._try_on_tokens(number, {tensor: candidate})
                if token_wise is not None and token_wise.outputs.get(output) == layout:
                    self._note_local_call(
                        number, token_wise, {tensor: candidate, **token_wise.demands}
                    )
                    return True
        return False

    def _merge_gathers(self) -> None:
        """Gather a tensor that is gathered wherever it is used where it is made."""
        for tensor, layout in list(self.made.items()):
            uses = self._users.get(tensor, [])
            is_gathered = bool(uses) and self.gathers.keys() >= set(uses)
            if tensor in self.early or tensor.call < 0 or not is_gathered:
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
        """Return True if the forward reads the size of a rank's tokens as that of the dimension."""
        return self.is_local(tensor) and self.made[tensor].dim == dimension

    def get_layout(self, number: int, tensor: TracedTensor) -> TokenDim | None:
        """Return where a call's tensor has a rank's tokens, as the call gets or makes it; None
        where it is whole there.
        """
        call = self.trace.calls[number]
        if tensor in call.outputs:
            is_sliced_after = (number, name_output(call, tensor)) in self.slices
            return None if is_sliced_after else self.made.get(tensor)
        uses = [(number, place) for place, each, _ in call.arguments if each is tensor]
        for use in uses:
            if use in self.slices:
                return self.made.get(tensor, self.slices[use][1])
        is_gathered = not self.gathers.keys().isdisjoint(uses)
        return self.made[tensor] if self.is_local(tensor) and not is_gathered else None


def is_handing_on(call: FunctionCall) -> bool:
    """Return True if a call gives its argument as it is, as a conversion to its own type does."""
    return not call.records and any(tensor in call.outputs for _, tensor, _ in call.arguments)


def name_output(call: FunctionCall, output: TracedTensor) -> str:
    """Return the place of one of a call's outputs."""
    return "output" if len(call.outputs) == 1 else f"output.{call.outputs.index(output)}"


# In each of which tensors whose sizes come out wrong are made whole; a model needs one or two
_ROUNDS = 40
_RANKS = 2  # of which sizes are computed


@dataclasses.dataclass(eq=False)
class SharedTokens:
    """The exchanges of tokens, and what ranks have of them in between."""

    # Where tokens are put together again, and where they are cut.
    gathers: TokenExchanges = dataclasses.field(default_factory=dict)
    slices: TokenExchanges = dataclasses.field(default_factory=dict)
    # Arguments that whole parameters are, where a rank's tokens meet them.
    uses: set[Place] = dataclasses.field(default_factory=set)
    # Of the elements that no axis cuts, those of which a rank has its tokens alone; 0 to 1.
    share: float = 0.0
    # Paths of the modules that give a rank's tokens alone (`ForwardTrace.given`).
    local: tuple[str, ...] = ()


def share_tokens(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    unsteady: frozenset[str] = frozenset(),
) -> SharedTokens:
    """Return where tokens can be shared out in a forward; nothing where the model takes no ids, or
    where it would not work.

    sharded_axes: the axes that are cut. rewrites: attributes that are divided. unsteady: paths of
    modules whose forwards make other calls for other inputs, so that none of theirs can be told by
    its number.
    """
    flow = TokenFlow(trace, sharded_axes=sharded_axes, rewrites=rewrites, unsteady=unsteady)
    if trace.ids is None:
        return SharedTokens()
    for _ in range(_ROUNDS):
        flow.spread()
        if not _make_wrong_whole(flow):
            return _collect_shared(flow)
    return SharedTokens()


def _make_wrong_whole(flow: TokenFlow) -> bool:
    """Make whole what sizes come out wrong for. Returns True if there was anything."""
    before = (len(flow.whole), len(flow.stopped))
    sizes = _SharedSizes(flow)
    for record in flow.trace.records:
        if record.call < 0:  # of no call that could be given other tensors
            flow.whole.update(filter(flow.is_local, (*record.inputs, *record.outputs)))
    for (number, _), (tensor, _) in [*flow.slices.items(), *flow.gathers.items()]:
        is_written = any(
            tensor in each.inputs and tensor in each.outputs
            for each in flow.trace.calls[number].records
        )
        if tensor.call != number and is_written:  # which a copy would not show
            flow.whole.add(tensor)
            flow.stopped.add(number)
    for number, call in enumerate(flow.trace.calls):
        sizes.at = number
        # A size of a rank's tokens that goes where nothing says what it has to be.
        for value in call.numbers.values() if call.function not in _CHECKED else ():
            flow.whole.update(_list_cut_tensors(flow, value))
        for demand in list_demands(call, sizes):
            if evaluate(demand.value, sizes.read_size, sizes.divisions) == demand.expected:
                continue
            partly_read = [
                each for each in _list_cut_tensors(flow, demand.value) if each not in flow.whole
            ]
            flow.whole.update(partly_read)
            if not partly_read:  # what it reads is whole already: so is what it makes
                flow.stopped.add(number)
                flow.whole.update(each for each in call.outputs if each in flow.made)
    for decision in flow.trace.size_decisions:
        if not is_decided_alike(decision, sizes.read_size, sizes.divisions):
            flow.whole.update(_list_cut_tensors(flow, decision.left))
            flow.whole.update(_list_cut_tensors(flow, decision.right))
    _keep_runs_alike(flow)
    return (len(flow.whole), len(flow.stopped)) != before


def _list_cut_tensors(flow: TokenFlow, value: object) -> list[TracedTensor]:
    """Return the tensors of whose rank's tokens a value was computed from the size."""
    return [
        size.tensor
        for size in list_sources(value, Size)
        if flow.is_seen_cut(size.tensor, size.dimension)
    ]


def _keep_runs_alike(flow: TokenFlow) -> None:
    """Make whole what a call that is made more than once would exchange otherwise each time."""
    exchanges: dict[int, set[tuple[str, str, TokenDim]]] = {}
    for kind, places in (("gather", flow.gathers), ("slice", flow.slices)):
        for (number, place), (_, layout) in places.items():
            exchanges.setdefault(number, set()).add((kind, place, layout))
    runs: dict[object, list[int]] = {}
    for number, call in enumerate(flow.trace.calls):
        runs.setdefault(call.key, []).append(number)
    for numbers in runs.values():
        first = exchanges.get(numbers[0], set())
        is_alike = all(exchanges.get(number, set()) == first for number in numbers)
        for number in () if is_alike else numbers:
            call = flow.trace.calls[number]
            flow.whole.update(call.outputs)
            if number in flow.stopped:
                flow.whole.update(each for _, each, _ in call.arguments if each in flow.made)
            flow.stopped.add(number)


def _collect_shared(flow: TokenFlow) -> SharedTokens:
    """Return the places, once everything is right."""
    uses = set()
    for number in flow.local:
        for place, tensor, needs_gradient in flow.trace.calls[number].arguments:
            is_parameter = needs_gradient and tensor.parameters
            if is_parameter and (number, place) not in flow.slices:
                uses.add((number, place))
    for number, leaving in flow.leaving.items():
        if leaving.bias and (number, "output") in flow.slices:
            uses.add((number, leaving.bias))
    sizes: dict[TracedTensor, int] = {}
    for call in flow.trace.calls:
        for output in call.outputs:
            if output.activation and output not in flow.sharded:
                sizes[output] = prod(get_shape(output))
    shared = sum(size for tensor, size in sizes.items() if tensor in flow.made)
    share = shared / max(sum(sizes.values()), 1) if flow.gathers or flow.slices else 0.0
    return SharedTokens(
        flow.gathers,
        flow.slices,
        uses=uses,
        share=share,
        local=tuple(path for path, tensor in flow.trace.given.items() if flow.is_local(tensor)),
    )


class _SharedSizes(LocalSizes):
    """Sizes on one rank, where axes and tokens are shared out: what a call makes, and what is read
    of it later.
    """

    def __init__(self, flow: TokenFlow):
        super().__init__(flow.sharded_axes)
        self.flow = flow
        self.at = 0  # number of the call whose tensors are asked for
        self.divisions = {
            attribute: Division(self.shares[next(iter(rewrite.sharded_axes))], rewrite.kept)
            for attribute, rewrite in flow.rewrites.items()
            if rewrite.sharded_axes
        }

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        """Return the size of a dimension of a tensor as the call `at` has it."""
        size = super().compute_size(tensor, node)
        layout = self.flow.get_layout(self.at, tensor)
        return size // _RANKS if layout is not None and tensor.dims[layout.dim] is node else size

    def read_size(self, size: Size) -> int:
        """Return what the model reads as the size of a dimension."""
        axis_size = super().compute_size(size.tensor, size.tensor.dims[size.dimension])
        return axis_size // (_RANKS if self.flow.is_seen_cut(size.tensor, size.dimension) else 1)


# Functions of whose numbers `list_demands` says what they have to be.
_CHECKED = SHAPES.union("unflatten split split_with_sizes narrow __getitem__".split())

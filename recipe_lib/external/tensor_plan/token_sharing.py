"""Find the tensors of a traced forward of which a rank needs its own tokens alone.

This is sequence parallelism without names: between the products that ranks divide, a rank works on
its tokens of every row, where each token is computed by itself. What looks at several tokens, such
as attention, gets whole rows: tokens are gathered before it and sliced after it. `infer` calls
`share_tokens`. A call is one of a torch function in the trace; a record, an operator within it.
"""

import dataclasses
from itertools import chain
from math import prod
from typing import Any, NamedTuple

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
    # A view has put the tokens into one dimension with others, and they are outermost there, as
    # in `[tokens * heads, width]`. False: innermost, as in `[batch * tokens, width]`.
    first: bool = False


Layouts = dict[TracedTensor, TokenDim]  # a tensor -> where it has its tokens
# (number of a call in the trace, one of its tensors): the place of an argument, such as `0` or
# `weight`, or `output`, or `output.1` of several.
Place = tuple[int, str]
# Where a tensor is gathered or sliced -> the tensor, and where it has its tokens.
TokenExchanges = dict[Place, tuple[TracedTensor, TokenDim]]
# Functions of whose arguments all but the first give no more than a type.
OF_ANOTHER_TYPE = frozenset(("type_as", "to"))


class TokenWise(NamedTuple):
    """The result of following a rank's tokens through one call."""

    outputs: Layouts  # the outputs that are a rank's tokens; others are the same on all ranks
    demands: Layouts  # further inputs that have to be sliced to a rank's tokens for that


def list_candidates(tensor: TracedTensor, length: int) -> list[TokenDim]:
    """Return all the ways in which a tensor could have rows of `length` tokens, by its sizes."""
    layouts = []
    for dim, size in enumerate(get_shape(tensor)):
        if size % length == 0:
            layouts.append(TokenDim(dim))
            if size > length:
                layouts.append(TokenDim(dim, True))
    return layouts


def run_call_on_tokens(call: FunctionCall, layouts: Layouts, length: int) -> TokenWise | None:
    """Follow a rank's tokens through one call, by the rules of its operators; nothing is computed.

    layouts: the arguments that are a rank's tokens. length: tokens in a row. Returns None if the
    call needs other ranks' tokens as well.
    """
    local = dict(layouts)
    demands: Layouts = {}
    arguments = set(call.tensors)
    read = {tensor for record in call.records for tensor in record.inputs} | set(call.outputs)
    if call.function not in OF_ANOTHER_TYPE and not arguments & layouts.keys() <= read:
        return None  # an argument that no operator reads: the call reads its shape
    for record in call.records:
        if local.keys().isdisjoint((*record.inputs, *record.outputs)):
            continue
        # What is written into has to be a rank's tokens already, and no view of another tensor.
        written = [tensor for tensor in record.outputs if tensor in record.inputs]
        if any(
            tensor not in local or tensor.root.call_index != tensor.call_index for tensor in written
        ):
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
    return TokenWise({output: local[output] for output in call.outputs if output in local}, demands)


def _run_record_on_tokens(record: OperatorCall, layouts: Layouts, length: int) -> TokenWise | None:
    """Run an operator's rule once more, on inputs whose tokens are one axis of their own.

    All other dimensions are new. A rank can work on its tokens alone if the rule neither blocks
    that axis, sums over it nor takes it apart, and each output has it once or not at all. Inputs
    that get the axis by the rule are the `demands`.
    """
    if record.rule is None or record.makes_values:
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
    rerun = OperatorCall(
        record.function,
        record.args,
        record.kwargs,
        results=record.results,
        module_path=record.module_path,
        get_traced=lambda tensor: marked[record.traced_by_id[id(tensor)]],
    )
    output_dims = record.rule(rerun)
    if output_dims is None or find(tokens).kind != "leaf" or find(tokens).blocked:
        return None
    summed = [node for node, _, _ in rerun.contractions] + [node for node, _ in rerun.reductions]
    if have_axis(summed, tokens):
        return None
    outputs: Layouts = {}
    for tensor, dims in zip(record.outputs, output_dims, strict=True):
        layout = _find_token_dim(dims, tokens)
        if layout is not None:
            outputs[tensor] = layout
        elif have_axis(dims, tokens) or not record.is_uniform:
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
    """Return where the axis `tokens` lies in a tensor's dimensions.

    None where it is not there, or more than once, or in the middle of a dimension's factors.
    """
    root = find(tokens)
    if sum(leaf is root for node in dims for leaf in list_leaves(node)) != 1:
        return None
    dim = next(dim for dim, node in enumerate(dims) if has_axis(node, tokens))
    factors = list_factors(dims[dim])
    if factors and factors[-1] is root:
        return TokenDim(dim)
    return TokenDim(dim, True) if factors and factors[0] is root else None


@dataclasses.dataclass(eq=False)
class SharedTokens:
    """The places where a forward exchanges tokens, and what that saves; by default none."""

    # Where a rank's tokens become all tokens, and where all become a rank's.
    gathers: TokenExchanges = dataclasses.field(default_factory=dict)
    slices: TokenExchanges = dataclasses.field(default_factory=dict)
    # Arguments that are replicated parameters and meet a rank's tokens: the gradients that come
    # of these uses have to be summed over ranks.
    uses: set[Place] = dataclasses.field(default_factory=set)
    # Share of the elements of activations without a cut axis that is a rank's tokens; 0 to 1.
    share: float = 0.0
    # Paths of layers, and of modules outside them, whose output is a rank's tokens alone.
    local: tuple[str, ...] = ()


class TokenFlow:
    """The state of one search: which tensors and calls have a rank's tokens alone.

    `spread` computes it from `whole` and `stopped`, which `keep_wrong_whole` enlarges after it. The
    arguments are those of `share_tokens`.
    """

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
        self.length = trace.ids.dims[1].size if trace.ids is not None else 0  # tokens in a row
        self.sharded = {tensor for axis in sharded_axes for tensor in axis.sharded}
        boundaries = [boundary for axis in sharded_axes for boundary in axis.boundaries]
        # Number of a call -> its boundary: products whose results are summed over ranks, and
        # look-ups in embeddings whose rows ranks share.
        self.leaving = {item.call: item for item in boundaries if item.kind == "leave"}
        self.looking = {item.call: item for item in boundaries if item.kind == "lookup"}
        # Numbers of the calls that work on a rank's part of an axis: these have whole rows.
        self.cut = {item.call for item in boundaries}
        self.cut |= {number for number, call in enumerate(trace.calls) if self._is_cut(call)}
        # Tensors of which every rank needs all tokens at once where they are made.
        self.whole: set[TracedTensor] = set(trace.outputs)
        # Numbers of the calls whose arguments are gathered, whatever the call does.
        self.stopped: set[int] = set()
        # What `spread` finds in one round.
        # Tensors that are a rank's tokens as the call that makes them returns them.
        self.made: Layouts = {}
        # Tensors of all tokens, where it is known in which dimension these are.
        self.aligned: Layouts = {}
        self.slices: TokenExchanges = {}
        self.gathers: TokenExchanges = {}
        # Tensors of `made` that are gathered where they are made: all later calls get them whole.
        self.early: set[TracedTensor] = set()
        self.fresh: set[TracedTensor] = set()  # embeddings that no layer has read yet
        self.local: set[int] = set()  # numbers of the calls that work on a rank's tokens
        # Results of `run_call_on_tokens`: many calls are tried again in each round.
        self._run: dict[tuple[int, frozenset[tuple[TracedTensor, TokenDim]]], TokenWise | None] = {}
        for number, call in enumerate(trace.calls):
            if call.key.module in unsteady:
                self.stopped.add(number)
                self.whole.update(tensor for tensor in call.tensors if tensor.is_activation)
                self.whole.update(call.outputs)
        self._keep_head_whole()
        # Tensor -> the arguments that it is, and the calls that return it as it is.
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
        tensors = call.tensors + call.outputs
        tensors += [item for record in call.records for item in (*record.inputs, *record.outputs)]
        return not self.sharded.isdisjoint(tensors)

    def _keep_head_whole(self) -> None:
        """Keep whole the model's outputs, and all between them and the last product's input.

        The last product is the output projection: its input is gathered.
        """
        queue = [output for output in self.trace.outputs if output.call_index >= 0]
        seen = set(queue)
        while queue:
            call = self.trace.calls[queue.pop().call_index]
            is_product = any(record.contractions for record in call.records)
            for tensor in call.tensors:
                if tensor.is_activation and tensor not in seen:
                    seen.add(tensor)
                    self.whole.add(tensor)
                    if not is_product and tensor.call_index >= 0:
                        queue.append(tensor)

    def _try_on_tokens(self, number: int, layouts: Layouts) -> TokenWise | None:
        key = (number, frozenset(layouts.items()))
        if key not in self._run:
            self._run[key] = run_call_on_tokens(self.trace.calls[number], layouts, self.length)
        return self._run[key]

    def spread(self) -> None:
        """Follow the tokens through the calls, then move slices and gathers to earlier calls."""
        assert self.trace.ids is not None
        exchanges: list[Any] = [self.slices, self.gathers]
        for result in [*exchanges, self.made, self.aligned, self.early, self.fresh, self.local]:
            result.clear()
        self.aligned[self.trace.ids] = TokenDim(1)  # ids are `[b, s]`
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
        """Give a call that works on a rank's part of an axis whole rows; slice what it looks up."""
        self._gather_arguments(number, call)
        ids = {tensor: self.aligned[tensor] for tensor in call.tensors if tensor in self.aligned}
        token_wise = self._try_on_tokens(number, ids) if number in self.looking and ids else None
        for output, layout in token_wise.outputs.items() if token_wise is not None else ():
            self._slice_output(number, output, layout)

    def _slice_output(self, number: int, output: TracedTensor, layout: TokenDim) -> None:
        if output in self.whole:
            self.aligned[output] = layout
            return
        self.slices[number, name_output(self.trace.calls[number], output)] = (output, layout)
        self.made[output] = layout
        if number in self.looking:
            self.fresh.add(output)

    def _is_scaling_embedding(self, call: FunctionCall) -> bool:
        """Return True if a call computes with embeddings and no parameters, such as a scale."""
        is_fresh = not self.fresh.isdisjoint(call.tensors)
        return is_fresh and not any(tensor.parameters for tensor in call.tensors)

    def _gather_arguments(self, number: int, call: FunctionCall) -> None:
        local = [(place, tensor) for place, tensor, _ in call.arguments if self.is_local(tensor)]
        self.gathers |= {(number, place): (tensor, self.made[tensor]) for place, tensor in local}

    def is_local(self, tensor: TracedTensor) -> bool:
        """Return True if calls after the one that makes the tensor get a rank's tokens of it."""
        return tensor in self.made and tensor not in self.early

    def _find_giver(self, tensor: TracedTensor) -> int:
        """Return the number of the last call that returns a tensor just made.

        Calls that return their argument as it is (`x.to(x.dtype)`) count, as long as they follow
        one another in one module.
        """
        number = tensor.call_index
        module = self.trace.calls[number].key.module
        handed = self._handed.get(tensor, ())
        while number + 1 in handed and self.trace.calls[number + 1].key.module == module:
            number += 1
        return number

    def _spread_call(self, number: int, call: FunctionCall) -> None:
        """Let a call work on a rank's tokens if it can; else gather its arguments."""
        layouts = {tensor: self.made[tensor] for tensor in call.tensors if self.is_local(tensor)}
        aligned = {
            tensor: self.aligned[tensor] for tensor in call.tensors if tensor in self.aligned
        }
        sliced: Layouts = {}
        if not layouts and not is_handing_on(call):
            # A whole activation is sliced as early as it can be.
            for _, tensor, needs_gradient in call.arguments:
                if needs_gradient and tensor in aligned and tensor.is_activation:
                    layouts = aligned
                    sliced = aligned
        can_try = layouts and number not in self.stopped
        token_wise = self._try_on_tokens(number, layouts) if can_try else None
        if token_wise is not None:
            self._note_local_call(number, token_wise, {**sliced, **token_wise.demands})
            return
        self._gather_arguments(number, call)
        aligned_call = self._try_on_tokens(number, aligned) if aligned else None
        if aligned_call is not None:
            self.aligned.update(aligned_call.outputs)

    def _note_local_call(self, number: int, token_wise: TokenWise, cuts: Layouts) -> None:
        """Note a call that works on a rank's tokens. cuts: arguments that are sliced for it."""
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
        """Replace slices at all uses of a tensor by one slice, where the tensor is made or before.

        output: of the call `number`. If that call can work on tokens, its inputs are sliced.
        """
        uses = self._users.get(output, [])
        if output in self.made or output.call_index != number or output in self.whole or not uses:
            return
        if not self.slices.keys() >= set(uses) or len({self.slices[use][1] for use in uses}) > 1:
            return
        layout = self.slices[uses[0]][1]
        is_cut = number in self.cut
        runs_on_tokens = not is_cut and self._try_made_of_tokens(number, output, layout)
        # At a sum over ranks a slice makes the all-reduce a reduce-scatter; elsewhere one slice
        # has to take the place of several.
        is_worth = (number in self.leaving or number in self.looking) if is_cut else len(uses) > 1
        if not runs_on_tokens and not is_worth:
            return
        for use in uses:
            self.slices.pop(use)
        if not runs_on_tokens:
            self._slice_output(number, output, layout)

    def _try_made_of_tokens(self, number: int, output: TracedTensor, layout: TokenDim) -> bool:
        """Let a call make `output` of tokens of its first activation; False if it cannot."""
        call = self.trace.calls[number]
        if number in self.stopped or number in self.local or len(call.outputs) != 1:
            return False
        if any(map(self.is_local, call.tensors)):
            return False
        inputs = [tensor for _, tensor, grad in call.arguments if tensor.is_activation and grad]
        for tensor in inputs[:1]:
            for candidate in list_candidates(tensor, self.length):
                token_wise = self._try_on_tokens(number, {tensor: candidate})
                if token_wise is not None and token_wise.outputs.get(output) == layout:
                    self._note_local_call(
                        number, token_wise, {tensor: candidate, **token_wise.demands}
                    )
                    return True
        return False

    def _merge_gathers(self) -> None:
        """Replace gathers at all uses of a tensor by one gather where the tensor is made."""
        for tensor, layout in list(self.made.items()):
            uses = self._users.get(tensor, [])
            is_gathered = bool(uses) and self.gathers.keys() >= set(uses)
            if tensor in self.early or tensor.call_index < 0 or not is_gathered:
                continue
            for use in uses:
                self.gathers.pop(use)
            place = (tensor.call_index, name_output(self.trace.calls[tensor.call_index], tensor))
            if self.slices.pop(place, None) is not None:  # it is whole before the slice
                del self.made[tensor]
            else:
                giver = self._find_giver(tensor)
                self.gathers[giver, name_output(self.trace.calls[giver], tensor)] = (tensor, layout)
                self.early.add(tensor)

    def is_seen_cut(self, tensor: TracedTensor, dimension: int) -> bool:
        """Return True if the forward reads a rank's tokens alone as `tensor.shape[dimension]`."""
        return self.is_local(tensor) and self.made[tensor].dim == dimension

    def get_layout(self, number: int, tensor: TracedTensor) -> TokenDim | None:
        """Return where an argument or output of a call has a rank's tokens; None: it has all.

        Arguments are looked at after their gather or slice, outputs before it.
        """
        call = self.trace.calls[number]
        if tensor in call.outputs:
            is_sliced_after = (number, name_output(call, tensor)) in self.slices
            return None if is_sliced_after else self.made.get(tensor)
        uses = [(number, place) for place, argument, _ in call.arguments if argument is tensor]
        for use in uses:
            if use in self.slices:
                return self.made.get(tensor, self.slices[use][1])
        is_gathered = not self.gathers.keys().isdisjoint(uses)
        return self.made[tensor] if self.is_local(tensor) and not is_gathered else None

    def keep_wrong_whole(self) -> bool:
        """Keep whole, from the next round on, what has wrong sizes; return False if nothing has."""
        counts_before = (len(self.whole), len(self.stopped))
        sizes = _SharedSizes(self)
        for record in self.trace.records:
            # An operator without a torch function call, where ranks can exchange.
            if record.call_index < 0:
                self.whole.update(filter(self.is_local, (*record.inputs, *record.outputs)))
        for (number, _), (tensor, _) in [*self.slices.items(), *self.gathers.items()]:
            is_written = any(
                tensor in record.inputs and tensor in record.outputs
                for record in self.trace.calls[number].records
            )
            # Written in place: the write would go into the gathered or sliced copy.
            if tensor.call_index != number and is_written:
                self.whole.add(tensor)
                self.stopped.add(number)
        for number, call in enumerate(self.trace.calls):
            sizes.at = number
            # A size of a rank's tokens that is passed where nothing says what it has to be.
            for value in call.non_tensor_args.values() if call.function not in _CHECKED else ():
                self.whole.update(self._list_cut_tensors(value))
            for demand in list_demands(call, sizes):
                if evaluate(demand.value, sizes.read_size, sizes.divisions) == demand.expected:
                    continue
                partly_read = [
                    tensor
                    for tensor in self._list_cut_tensors(demand.value)
                    if tensor not in self.whole
                ]
                self.whole.update(partly_read)
                if not partly_read:  # the number is right for whole tensors: make the outputs whole
                    self.stopped.add(number)
                    self.whole.update(output for output in call.outputs if output in self.made)
        for decision in self.trace.size_decisions:
            if not is_decided_alike(decision, sizes.read_size, sizes.divisions):
                self.whole.update(self._list_cut_tensors(decision.left))
                self.whole.update(self._list_cut_tensors(decision.right))
        self._keep_runs_alike()
        return (len(self.whole), len(self.stopped)) != counts_before

    def _list_cut_tensors(self, value: object) -> list[TracedTensor]:
        """Return the tensors that are a rank's tokens and from whose sizes a value was computed."""
        return [
            size.tensor
            for size in list_sources(value, Size)
            if self.is_seen_cut(size.tensor, size.dimension)
        ]

    def _keep_runs_alike(self) -> None:
        """Make whole the tensors of calls that run more than once, and not with equal exchanges.

        A module may run twice. A plan names its calls once, for all runs.
        """
        exchanges: dict[int, set[tuple[str, str, TokenDim]]] = {}
        for kind, places in (("gather", self.gathers), ("slice", self.slices)):
            for (number, place), (_, layout) in places.items():
                exchanges.setdefault(number, set()).add((kind, place, layout))
        runs: dict[object, list[int]] = {}
        for number, call in enumerate(self.trace.calls):
            runs.setdefault(call.key, []).append(number)
        for numbers in runs.values():
            first_run = exchanges.get(numbers[0], set())
            is_alike = all(exchanges.get(number, set()) == first_run for number in numbers)
            for number in () if is_alike else numbers:
                call = self.trace.calls[number]
                self.whole.update(call.outputs)
                if number in self.stopped:
                    self.whole.update(tensor for tensor in call.tensors if tensor in self.made)
                self.stopped.add(number)

    def collect_shared(self) -> SharedTokens:
        """Return where tokens are exchanged, once a round has found no wrong size."""
        uses = set()
        for number in self.local:
            for place, tensor, needs_gradient in self.trace.calls[number].arguments:
                is_parameter = needs_gradient and tensor.parameters
                if is_parameter and (number, place) not in self.slices:
                    uses.add((number, place))
        # The bias of a row-parallel product is added after the sum, which may be sliced.
        for number, leaving in self.leaving.items():
            if leaving.bias and (number, "output") in self.slices:
                uses.add((number, leaving.bias))
        outputs = chain.from_iterable(call.outputs for call in self.trace.calls)
        sizes = {
            output: prod(get_shape(output))
            for output in outputs
            if output.is_activation and output not in self.sharded
        }
        num_shared = sum(size for tensor, size in sizes.items() if tensor in self.made)
        share = num_shared / max(sum(sizes.values()), 1) if self.gathers or self.slices else 0.0
        return SharedTokens(
            self.gathers,
            self.slices,
            uses=uses,
            share=share,
            local=tuple(
                path for path, tensor in self.trace.module_outputs.items() if self.is_local(tensor)
            ),
        )


def is_handing_on(call: FunctionCall) -> bool:
    """Return True if a call returns its argument itself, as a conversion to its own type does."""
    return not call.records and any(tensor in call.outputs for tensor in call.tensors)


def name_output(call: FunctionCall, output: TracedTensor) -> str:
    """Return the place of one of a call's outputs: `output`, or `output.1` of several."""
    return "output" if len(call.outputs) == 1 else f"output.{call.outputs.index(output)}"


# Rounds of `share_tokens`, each with more whole tensors than the last. A model needs one or two.
_ROUNDS = 40
_RANKS = 2  # the number of ranks for which sizes are computed


def share_tokens(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    unsteady: frozenset[str] = frozenset(),
) -> SharedTokens:
    """Return where ranks can share tokens in a forward.

    Each round spreads tokens through the calls, then computes for two ranks the sizes that the
    forward reads and passes on. Tensors with wrong sizes are kept whole in the next round, until
    none is wrong. An empty result: the model takes no token ids, or `_ROUNDS` were not enough.

    sharded_axes: the axes that are cut. rewrites: integer attributes of modules that are divided.
    unsteady: paths of modules whose forwards make other calls for other inputs. Calls in a plan are
    numbered, so that no exchange of tokens can be put there.
    """
    flow = TokenFlow(trace, sharded_axes=sharded_axes, rewrites=rewrites, unsteady=unsteady)
    if trace.ids is None:
        return SharedTokens()
    for _ in range(_ROUNDS):
        flow.spread()
        if not flow.keep_wrong_whole():
            return flow.collect_shared()
    return SharedTokens()


class _SharedSizes(LocalSizes):
    """Sizes of tensors on one rank, where ranks share axes and tokens.

    `compute_size` returns that of a tensor as the call `at` gets or makes it.
    """

    def __init__(self, flow: TokenFlow):
        super().__init__(flow.sharded_axes)
        self.flow = flow
        self.at = 0  # number of the call whose tensors are asked for; the caller sets it
        # How attributes that the forward makes shapes of are divided.
        self.divisions = {
            attribute: Division(self.shares[next(iter(rewrite.sharded_axes))], rewrite.kept)
            for attribute, rewrite in flow.rewrites.items()
            if rewrite.sharded_axes
        }

    def compute_size(self, tensor: TracedTensor, node: AxisNode) -> int:
        size = super().compute_size(tensor, node)
        layout = self.flow.get_layout(self.at, tensor)
        return size // _RANKS if layout is not None and tensor.dims[layout.dim] is node else size

    def read_size(self, size: Size) -> int:
        axis_size = super().compute_size(size.tensor, size.tensor.dims[size.dimension])
        return axis_size // (_RANKS if self.flow.is_seen_cut(size.tensor, size.dimension) else 1)


# Functions for whose integers `list_demands` says what they have to be on a rank.
_CHECKED = SHAPES.union("unflatten split split_with_sizes narrow __getitem__".split())

"""Follow one axis through a traced forward, to find the exchanges that ranks need to share it.

An axis is a dimension, or a factor of one, that several tensors have, such as attention heads.
`infer` calls `follow_axis` for each axis that a parameter has. It returns the axis with its
boundaries (exchanges between ranks at a call), or raises `Refusal`, whose text says why not. A
record is one ATen operator of the trace, a call one torch function call, which runs operators.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from recipe_lib.external.tensor_plan.axes import AxisNode, find_segments, has_axis, have_axis
from recipe_lib.external.tensor_plan.forward_trace import (
    Argument,
    CallKey,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    PendingBoundary,
    ShardedAxis,
    TracedTensor,
)
from recipe_lib.external.tensor_plan.sharding_plan import find_period

# Operators that move elements, or change their type. They may follow a product within its call,
# between it and the sum over ranks: a sum gives the same before and after them.
MOVES = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t clone alias detach _to_copy squeeze"
    " unsqueeze".split()
)

# Others that may, as they are linear in their first argument.
_LINEAR = frozenset(("sum", "index_select", "mul"))
# Operators that take parts of a dimension that was put together of several.
_TAKES = frozenset("slice narrow split split_with_sizes chunk index".split())


class Refusal(Exception):  # noqa: N818  (an answer, not an error)
    """An axis cannot be cut; str() says why."""


def follow_axis(
    trace: ForwardTrace,
    node: AxisNode,
    parameter_dims: dict[str, int],
    records: Iterable[OperatorCall],
) -> ShardedAxis:
    """Follow an axis through the records that have to do with it, and return what was found.

    node: the axis, a leaf that is not blocked. parameter_dims: name of a parameter that has it ->
    its dimension. records: those that read or make a tensor with the axis, in order. Raises Refusal
    where a rank could not compute its part.
    """
    follower = _AxisFollower(
        trace,
        ShardedAxis(
            node, parameter_dims, sharded={trace.parameters[name] for name in parameter_dims}
        ),
    )
    follower.follow(records)
    return follower.axis


@dataclass(eq=False)
class _AxisFollower:
    """Follows one axis through one trace; there is a method for each kind of operator it meets."""

    trace: ForwardTrace
    axis: ShardedAxis  # what is found is noted in it

    def follow(self, records: Iterable[OperatorCall]) -> None:
        """Note all tensors that are sharded, and all boundaries, in `self.axis`.

        Raises Refusal where ranks cannot share the axis, or where it would not be worth it.
        """
        axis = self.axis
        in_outputs = [self._is_in(output) for output in self.trace.outputs]
        axis.vocabulary = axis.output = any(in_outputs)
        self._gather_whole_segments()
        for record in self._select_reached(records):
            if any(has_axis(node, axis.node) for node, _, _ in record.contractions):
                self._sum_product(record)
            elif any(has_axis(node, axis.node) for node, _ in record.reductions):
                self._reduce(record)
            elif (
                record.is_lookup
                and record.inputs[0] in axis.sharded
                and has_axis(record.inputs[0].dims[0], axis.node)
            ):
                self._look_up(record)
            else:
                self._pass(record)
        for output, has_it in zip(self.trace.outputs, in_outputs, strict=True):
            is_sharded = output in axis.sharded
            if is_sharded and not has_it:
                raise Refusal("what every rank uses in part is in what the model gives")
            # Logits may stay cut along their last dimension, which is the vocabulary's.
            is_cut_last = is_sharded and has_axis(output.dims[-1], axis.node)
            if has_it and (axis.row_parameters or not is_cut_last):
                raise Refusal("the axis is in what the model gives")
        if not axis.vocabulary and not axis.row_parameters:
            raise Refusal("no product sums over the axis")
        if not axis.vocabulary and len(axis.parameter_dims) < 2:
            raise Refusal("a single parameter has the axis")
        if axis.vocabulary and (axis.row_parameters or axis.is_reduced):
            raise Refusal("a product, a sum or a mean is over tokens")
        if axis.is_reduced:
            # The axis of hidden states' channels: every norm would cost a sum over ranks.
            for record in self.trace.records:
                if record.is_lookup and have_axis(record.inputs[0].dims[1:], axis.node):
                    raise Refusal("hidden states have it, and norms take means over it")
        self._check_runs_alike()

    def _is_in(self, tensor: TracedTensor) -> bool:
        return have_axis(tensor.dims, self.axis.node)

    def _gather_whole_segments(self) -> None:
        """Note an `assemble` boundary at each use of a parameter with segments without the axis.

        A rank holds its part of these segments, too, and gathers them there. Raises Refusal where
        they are most of a parameter.
        """
        for name, dim in self.axis.parameter_dims.items():
            parameter = self.trace.parameters[name]
            segments = find_segments(parameter.dims[dim], self.axis.node) or []
            whole_numbers = tuple(
                number for number, (_, is_whole) in enumerate(segments) if is_whole
            )
            if not whole_numbers:
                continue
            self.axis.has_whole_segments = True
            if 2 * sum(segments[number][0] for number in whole_numbers) > parameter.dims[dim].size:
                raise Refusal(f"most of {name} does not have the axis")
            views = self._find_stored_views(parameter)
            for number, call in enumerate(self.trace.calls):
                for place, tensor, _ in call.arguments:
                    if tensor not in views:
                        continue
                    dims = [
                        at for at, node in enumerate(tensor.dims) if has_axis(node, self.axis.node)
                    ]
                    boundary = PendingBoundary(
                        "assemble",
                        call=number,
                        place=place,
                        tensor=tensor,
                        parameters=frozenset([name]),
                        dim=dims[0],
                        segments=tuple(length for length, _ in segments),
                        whole=whole_numbers,
                    )
                    if find_segments(tensor.dims[dims[0]], self.axis.node) != segments:
                        raise Refusal(
                            f"{name} is put in another form before {call.function} at {call.source}"
                        )
                    self.axis.boundaries.append(boundary)

    def _find_stored_views(self, parameter: TracedTensor) -> set[TracedTensor]:
        """Return the parameter, and views of it that no call makes, such as `weight.T`.

        Raises Refusal for another operator on it outside of calls, where ranks cannot exchange.
        """
        views = {parameter}
        for record in self.trace.records:
            if views.isdisjoint(record.inputs):
                continue
            if record.call_index < 0 and record.name in MOVES:
                views.update(record.outputs)
            elif record.call_index < 0 or views.isdisjoint(
                self.trace.calls[record.call_index].tensors
            ):
                raise Refusal(
                    f"no torch function call uses {', '.join(parameter.parameters)} in"
                    f" {self._describe(record)}"
                )
        return views

    def _select_reached(self, records: Iterable[OperatorCall]) -> Iterable[OperatorCall]:
        """Yield the records that read or make a tensor with the axis, or a sharded one.

        The second are tensors that a rank has whole, but uses for its part of the axis alone.
        """
        if not self.axis.has_whole_segments:
            yield from records
            return
        with_axis = set(records)
        # While it is iterated, `sharded` grows by what the records before have made.
        for record in self.trace.records:
            if record in with_axis or not self.axis.sharded.isdisjoint(record.inputs):
                yield record

    def _pass(self, record: OperatorCall) -> None:
        """Pass an operator that does not sum over the axis: its outputs are sharded if inputs are.

        A whole input that meets a sharded one gets a boundary. Raises Refusal where only some of
        the outputs have the axis.
        """
        sharded = self.axis.sharded
        sharded_inputs = [tensor for tensor in record.inputs if tensor in sharded]
        sharded_outputs = [tensor for tensor in record.outputs if self._is_in(tensor)]
        if sharded_inputs and self.axis.has_whole_segments and not record.is_uniform:
            calls = self.trace.calls
            is_even = record.call_index >= 0 and calls[record.call_index].function in (
                "chunk",
                "tensor_split",
            )
            # All inputs lack the axis and are used in part, or a part of a fused tensor is taken.
            if not any(map(self._is_in, sharded_inputs)) or (record.name in _TAKES and not is_even):
                sharded_outputs = record.outputs
        if not sharded_outputs:
            if sharded_inputs and not record.is_uniform:
                raise Refusal(
                    f"a part of a tensor does not have the axis in {self._describe(record)}"
                )
            return
        if record.makes_values:
            return
        if record.is_uniform and not sharded_inputs:
            sharded.update(sharded_outputs)
            return
        if not sharded_inputs:
            if not record.inputs or any(map(self._is_in, record.inputs)):
                return  # whole on each rank, until it meets a tensor that is cut
        elif len(sharded_outputs) < len(record.outputs):
            raise Refusal(
                f"a part of what comes out does not have the axis in {self._describe(record)}"
            )
        for tensor in sharded_outputs:
            sharded.add(tensor)
            if tensor in record.inputs:  # written in place, and so into what it is a view of
                sharded.add(tensor.root)
        for tensor in record.inputs:
            if tensor not in sharded:
                self._meet_whole(record, tensor)

    def _meet_whole(self, record: OperatorCall, whole: TracedTensor) -> None:
        """Note where a tensor that each rank has whole meets one of which it has a part.

        One with the axis is cut there. One without it that needs a gradient enters: its gradient is
        summed over ranks in backward.
        """
        if record.call_index < 0:
            if self._is_in(whole) or whole.is_activation or whole.parameters:
                raise Refusal("the axis goes through an operator that no torch function call makes")
            return
        for place, tensor, needs_gradient in _find_arguments(
            self.trace.calls[record.call_index], whole
        ):
            if self._is_in(whole):
                dim, segments = self._find_only_dim(tensor)
                if segments is None:
                    raise Refusal(
                        "a whole tensor that is to be cut does not have the axis in"
                        f" {self._describe(record)}"
                    )
                lengths = [length for length, _ in segments]
                whole_numbers = tuple(at for at, (_, is_whole) in enumerate(segments) if is_whole)
                cutting = PendingBoundary(
                    "cut",
                    call=record.call_index,
                    place=place,
                    tensor=tensor,
                    dim=dim,
                    whole=whole_numbers,
                    # `whole` are indices over all segments, so these are not shortened then.
                    segments=tuple(lengths) if whole_numbers else find_period(lengths),
                )
                self.axis.boundaries.append(cutting)
            elif needs_gradient and tensor not in self.axis.sharded:
                uses = self.axis.replicated_uses if tensor.parameters else self.axis.boundaries
                uses.append(
                    PendingBoundary(
                        "enter",
                        call=record.call_index,
                        place=place,
                        tensor=tensor,
                        parameters=tensor.parameters,
                    )
                )

    def _sum_product(self, record: OperatorCall) -> None:
        """Note a product that sums over the axis (row-parallel): each rank has a part of the sum.

        Raises Refusal unless one operand is a parameter, the other an activation, and both are cut.
        """
        where = self._describe(record)
        left, right = next(
            (left, right)
            for node, left, right in record.contractions
            if has_axis(node, self.axis.node)
        )
        if any(map(self._is_in, record.outputs)):
            raise Refusal(f"the axis is summed over and comes out in {where}")
        if bool(left.parameters) == bool(right.parameters):
            kind = "parameters" if left.parameters else "activations"
            raise Refusal(f"two {kind} are multiplied along it by {where}")
        weight, hidden = (left, right) if left.parameters else (right, left)
        if weight not in self.axis.sharded or hidden not in self.axis.sharded:
            raise Refusal(f"a tensor that is whole on each rank is multiplied along it by {where}")
        self.axis.row_parameters |= weight.parameters
        leaving = self._make_leaving("leave", record, weight.parameters)
        self._note_taken(record, leaving, hidden)
        if record.added is not None:
            self._note_bias(record, leaving, record.added)
        self.axis.boundaries.append(leaving)

    def _reduce(self, record: OperatorCall) -> None:
        """Note a sum or a mean over the axis: each rank takes that of its part, and ranks sum."""
        reduced = record.reductions[0][1]
        if reduced not in self.axis.sharded:
            return
        if any(map(self._is_in, record.outputs)):
            raise Refusal(f"the axis is summed over and comes out in {self._describe(record)}")
        leaving = self._make_leaving("leave", record, frozenset())
        self._note_taken(record, leaving, reduced)
        leaving.mean = record.name == "mean"
        self.axis.is_reduced = True
        self.axis.boundaries.append(leaving)

    def _look_up(self, record: OperatorCall) -> None:
        """Note an embedding whose rows ranks share: the axis is that of the vocabulary."""
        if not any(tensor.is_token_ids for tensor in record.inputs[1:]):
            raise Refusal(f"rows are picked by number, not by token, in {self._describe(record)}")
        self.axis.vocabulary = True
        self.axis.boundaries.append(
            self._make_leaving("lookup", record, record.inputs[0].parameters)
        )

    def _note_taken(
        self, record: OperatorCall, leaving: PendingBoundary, taken: TracedTensor
    ) -> None:
        """Note in a boundary which argument of the call is summed, and where it has the axis.

        taken: the tensor that the operator sums over, which is made of that argument.
        """
        for place, tensor, _ in _find_arguments(self.trace.calls[record.call_index], taken):
            dim, segments = self._find_only_dim(tensor)
            if segments is None or any(is_whole for _, is_whole in segments):
                raise Refusal(
                    f"the axis cannot be separated in what goes into {self._describe(record)}"
                )
            leaving.taken = place
            leaving.dim = dim
            leaving.segments = find_period([length for length, _ in segments])

    def _find_only_dim(self, tensor: TracedTensor) -> tuple[int, list[tuple[int, bool]] | None]:
        """Return the dimension that has the axis, and its segments.

        (-1, None) if several dimensions have it or none. Segments are (length, is whole).
        """
        dims = [at for at, node in enumerate(tensor.dims) if has_axis(node, self.axis.node)]
        if len(dims) != 1:
            return -1, None
        return dims[0], find_segments(tensor.dims[dims[0]], self.axis.node)

    def _make_leaving(
        self, kind: str, record: OperatorCall, parameters: frozenset[str]
    ) -> PendingBoundary:
        """Make the boundary that sums the result of the operator's call over ranks.

        A call may run further operators after this one. Raises Refusal unless the sum of ranks'
        results passes through them, or they add a bias, and the call returns this result alone.
        """
        where = self._describe(record)
        if record.call_index < 0:
            raise Refusal(f"no torch function call makes {where}")
        call = self.trace.calls[record.call_index]
        if len(call.outputs) != 1:
            raise Refusal(f"{where} is one of several results of {call.function} at {call.source}")
        leaving = PendingBoundary(
            kind,
            call=record.call_index,
            place="output",
            tensor=call.outputs[0],
            parameters=parameters,
        )
        after = set(record.outputs)
        for later in call.records:
            if any(has_axis(node, self.axis.node) for node, _, _ in later.contractions):
                after.update(later.outputs)  # the product, or another one, such as an adapter's
            if not after.intersection(later.inputs):
                continue
            others = [tensor for tensor in later.inputs if tensor not in after]
            if later.name in ("add", "add_") and all(tensor.parameters for tensor in others):
                for tensor in others:
                    self._note_bias(later, leaving, tensor)
            elif later.contractions and all(tensor.parameters for tensor in others[:1]):
                self._meet_whole(later, others[0])  # ranks have parts of its gradient
            elif later.name not in MOVES | _LINEAR or (
                later.name == "mul" and len(later.inputs) > 1
            ):
                raise Refusal(
                    f"{later.name} follows {where} within {call.function} at {call.source}"
                )
            after.update(later.outputs)
        if call.outputs[0] not in after:
            raise Refusal(f"{call.function} at {call.source} keeps the result of {where} to itself")
        return leaving

    def _note_bias(
        self, record: OperatorCall, leaving: PendingBoundary, added: TracedTensor
    ) -> None:
        """Note what is added to a product within its call: it is added once, after the sum."""
        if not added.parameters:
            if not added.is_activation:
                return  # made of no input and no parameter: an addend that is multiplied by zero
            raise Refusal(f"an activation is added within the call of {self._describe(record)}")
        for place, tensor, _ in _find_arguments(self.trace.calls[record.call_index], added):
            leaving.bias = place
            leaving.bias_parameters = tensor.parameters

    def _check_runs_alike(self) -> None:
        """Raise Refusal for a module that runs more than once with other boundaries each time.

        A plan names a call by its module and its index there, for all runs. An `enter` where no
        gradient passes does nothing, and may be there in one run alone.
        """
        by_call: dict[int, set[tuple[str, str]]] = {}
        by_key: dict[CallKey, set[tuple[str, str]]] = {}
        for boundary in self.axis.boundaries:
            exchange = (boundary.kind, boundary.place)
            by_call.setdefault(boundary.call, set()).add(exchange)
            by_key.setdefault(self.trace.calls[boundary.call].key, set()).add(exchange)
        for number, call in enumerate(self.trace.calls):
            for kind, place in by_key.get(call.key, set()) - by_call.get(number, set()):
                needs_gradient = any(
                    argument.needs_gradient
                    for argument in call.arguments
                    if argument.place == place
                )
                if kind != "enter" or needs_gradient:
                    raise Refusal(
                        f"{call.key.module} runs more than once, and not alike, at {call.source}"
                    )

    def _describe(self, record: OperatorCall) -> str:
        if record.call_index < 0:
            return record.name
        call = self.trace.calls[record.call_index]
        return f"{record.name} in {call.key.module or 'the model itself'} ({call.source})"


def _find_arguments(call: FunctionCall, tensor: TracedTensor) -> list[Argument]:
    """Return the arguments of a call that a tensor within the call is made of.

    A tensor that is an argument is returned alone.
    """
    for argument in call.arguments:
        if argument.tensor is tensor:
            return [argument]
    made_of: list[Argument] = []
    seen = {tensor}
    queue = [tensor]
    while queue:
        made_tensor = queue.pop()
        for record in call.records:
            for source in record.inputs if made_tensor in record.outputs else ():
                if source not in seen:
                    seen.add(source)
                    queue.append(source)
                    made_of += [entry for entry in call.arguments if entry.tensor is source][:1]
    return made_of

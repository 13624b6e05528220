"""Follows one axis through a trace: which tensors a rank has a part of, and where that begins and
ends.
"""

from collections.abc import Iterable

from recipe_lib.external.tensor_plan.axes import AxisNode, find_segments, has_axis
from recipe_lib.external.tensor_plan.forward_trace import (
    CallKey,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    PendingBoundary,
    ShardedAxis,
    TracedTensor,
)
from recipe_lib.external.tensor_plan.sharding_plan import find_period

# What may follow a product within its call: nothing of it depends on values.
MOVES = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t clone alias detach _to_copy squeeze"
    " unsqueeze".split()
)

# What takes parts of a dimension that was put together of several.
_TAKES = frozenset("slice narrow split split_with_sizes chunk index".split())


class Refusal(Exception):  # noqa: N818  (an answer, not an error)
    """An axis cannot be cut; str() says why."""


def follow_axis(
    trace: ForwardTrace, axis: AxisNode, carriers: dict[str, int], records: Iterable[OperatorCall]
) -> ShardedAxis:
    """Follows an axis (a leaf that nothing blocks) through the records that have to do with it.

    Raises Refusal where a rank could not compute its part.
    """
    sharded_axis = ShardedAxis(
        axis, carriers, sharded={trace.parameters[name] for name in carriers}
    )
    held = [_has_axis(output.dims, axis) for output in trace.outputs]
    sharded_axis.vocabulary = sharded_axis.output = any(held)
    _assemble(trace, sharded_axis)
    for record in _select_reached(trace, sharded_axis, records):
        if any(has_axis(node, axis) for node, _, _ in record.contractions):
            _leave(trace, sharded_axis, record)
        elif any(has_axis(node, axis) for node, _ in record.reductions):
            _reduce(trace, sharded_axis, record)
        elif (
            record.lookup
            and record.inputs[0] in sharded_axis.sharded
            and has_axis(record.inputs[0].dims[0], axis)
        ):
            if not any(each.identifiers for each in record.inputs[1:]):
                raise Refusal(
                    f"rows are picked by number, not by token, in {_describe_place(trace, record)}"
                )
            sharded_axis.vocabulary = True
            point = PendingBoundary(
                "lookup", record.call, "output", record.outputs[0], record.inputs[0].parameters
            )
            sharded_axis.boundaries.append(_move_to_call_output(trace, record, point))
        else:
            _pass(trace, sharded_axis, record)
    for output, has in zip(trace.outputs, held, strict=True):
        if not has and output in sharded_axis.sharded:
            raise Refusal("what every rank uses in part is in what the model gives")
        if has and (
            sharded_axis.row_parameters
            or output not in sharded_axis.sharded
            or not has_axis(output.dims[-1], axis)
        ):
            raise Refusal("the axis is in what the model gives")
    if not sharded_axis.vocabulary and (len(carriers) < 2 or not sharded_axis.row_parameters):
        raise Refusal(
            "no product sums over the axis"
            if not sharded_axis.row_parameters
            else "a single parameter has the axis"
        )
    if sharded_axis.vocabulary and (sharded_axis.row_parameters or sharded_axis.is_reduced):
        raise Refusal("a product, a sum or a mean is over tokens")
    if sharded_axis.is_reduced and any(
        record.lookup and _has_axis(record.inputs[0].dims[1:], axis) for record in trace.records
    ):
        raise Refusal("hidden states have it, and norms take means over it")
    _check_runs_alike(trace, sharded_axis)
    return sharded_axis


def _assemble(trace: ForwardTrace, sharded_axis: ShardedAxis) -> None:
    """Parameters of which some segments have the axis and others not: these are gathered wherever
    they are used.
    """
    for name, dim in sharded_axis.parameter_dims.items():
        segments = find_segments(trace.parameters[name].dims[dim], sharded_axis.node) or []
        whole = tuple(number for number, (_, every) in enumerate(segments) if every)
        if not whole:
            continue
        sharded_axis.has_whole_segments = True
        if 2 * sum(segments[number][0] for number in whole) > trace.parameters[name].dims[dim].size:
            raise Refusal(f"most of {name} does not have the axis")
        held = _find_stored_views(trace, trace.parameters[name])
        for number, call in enumerate(trace.calls):
            for place, tensor, _ in call.arguments:
                if tensor in held:
                    point = PendingBoundary("assemble", number, place, tensor, frozenset([name]))
                    point.dim = next(
                        at
                        for at, node in enumerate(tensor.dims)
                        if has_axis(node, sharded_axis.node)
                    )
                    point.segments, point.whole = tuple(length for length, _ in segments), whole
                    if find_segments(tensor.dims[point.dim], sharded_axis.node) != segments:
                        raise Refusal(
                            f"{name} is put in another form before {call.function} at {call.source}"
                        )
                    sharded_axis.boundaries.append(point)


def _find_stored_views(trace: ForwardTrace, parameter: TracedTensor) -> set[TracedTensor]:
    """The parameter, and views of it that no call makes, such as `weight.T`; raises Refusal for any
    other such use.
    """
    held = {parameter}
    for record in trace.records:
        if held.isdisjoint(record.inputs):
            continue
        if record.call < 0 and record.name in MOVES:
            held.update(record.outputs)
        elif record.call < 0 or held.isdisjoint(
            each for _, each, _ in trace.calls[record.call].arguments
        ):
            raise Refusal(
                f"no torch function call uses {', '.join(parameter.parameters)} in"
                f" {_describe_place(trace, record)}"
            )
    return held


def _select_reached(
    trace: ForwardTrace, sharded_axis: ShardedAxis, records: Iterable[OperatorCall]
) -> Iterable[OperatorCall]:
    """The records that have to do with the axis, or with what every rank uses in part."""
    if not sharded_axis.has_whole_segments:
        yield from records
        return
    having = set(records)
    for record in trace.records:
        if record in having or not sharded_axis.sharded.isdisjoint(record.inputs):
            yield record


def _pass(trace: ForwardTrace, sharded_axis: ShardedAxis, record: OperatorCall) -> None:
    """An operator that sums over no part of the axis: what comes out is cut if something that goes
    in is.
    """
    axis, sharded = sharded_axis.node, sharded_axis.sharded
    going_in = [each for each in record.inputs if each in sharded]
    coming_out = [each for each in record.outputs if _has_axis(each.dims, axis)]
    if going_in and sharded_axis.has_whole_segments and not record.uniform:
        having = [each for each in going_in if _has_axis(each.dims, axis)]
        even = record.call >= 0 and trace.calls[record.call].function in ("chunk", "tensor_split")
        if not having or (
            record.name in _TAKES and not even
        ):  # what every rank uses in part, or is taken from it
            coming_out = record.outputs
    if not coming_out:
        if going_in and not record.uniform:
            raise Refusal(
                f"a part of a tensor does not have the axis in {_describe_place(trace, record)}"
            )
        return
    if record.values:
        return
    if record.uniform and not going_in:
        sharded.update(coming_out)
        return
    if not going_in:
        if any(_has_axis(each.dims, axis) for each in record.inputs) or not record.inputs:
            return  # whole on each rank, until it meets a tensor that is cut
    elif len(coming_out) < len(record.outputs):
        raise Refusal(
            f"a part of what comes out does not have the axis in {_describe_place(trace, record)}"
        )
    for each in coming_out:
        sharded.add(each)
        if each in record.inputs:  # written in place, and so into what it is a view of
            sharded.add(each.root)
    for each in record.inputs:
        if each not in sharded:
            _join(trace, sharded_axis, record, each)


def _join(
    trace: ForwardTrace, sharded_axis: ShardedAxis, record: OperatorCall, tensor: TracedTensor
) -> None:
    """A tensor that each rank has whole meets one of which it has a part."""
    having = [
        number for number, node in enumerate(tensor.dims) if has_axis(node, sharded_axis.node)
    ]
    if record.call < 0:
        if having or tensor.activation or tensor.parameters:
            raise Refusal("the axis goes through an operator that no torch function call makes")
        return
    call = trace.calls[record.call]
    for place, each, gradient in _find_arguments(call, tensor):
        if having:
            numbers = [
                number for number, node in enumerate(each.dims) if has_axis(node, sharded_axis.node)
            ]
            segments = (
                find_segments(each.dims[numbers[0]], sharded_axis.node)
                if len(numbers) == 1
                else None
            )
            if segments is None:
                raise Refusal(
                    "a whole tensor that is to be cut does not have the axis in"
                    f" {_describe_place(trace, record)}"
                )
            lengths = [length for length, _ in segments]
            point = PendingBoundary("cut", record.call, place, each, dim=numbers[0])
            point.whole = tuple(number for number, (_, every) in enumerate(segments) if every)
            point.segments = tuple(lengths) if point.whole else find_period(lengths)
            sharded_axis.boundaries.append(point)
        elif gradient and each not in sharded_axis.sharded:
            point = PendingBoundary("enter", record.call, place, each, each.parameters)
            (sharded_axis.replicated_uses if each.parameters else sharded_axis.boundaries).append(
                point
            )


def _leave(trace: ForwardTrace, sharded_axis: ShardedAxis, record: OperatorCall) -> None:
    """A product that sums over the axis: each rank has a part of the sum."""
    axis = sharded_axis.node
    where = _describe_place(trace, record)
    node, left, right = next(each for each in record.contractions if has_axis(each[0], axis))
    if any(_has_axis(each.dims, axis) for each in record.outputs):
        raise Refusal(f"the axis is summed over and comes out in {where}")
    if not (left.parameters or right.parameters) or (left.parameters and right.parameters):
        kind = "parameters" if left.parameters else "activations"
        raise Refusal(f"two {kind} are multiplied along it by {where}")
    weight, other = (left, right) if left.parameters else (right, left)
    if weight not in sharded_axis.sharded or other not in sharded_axis.sharded:
        raise Refusal(f"a tensor that is whole on each rank is multiplied along it by {where}")
    sharded_axis.row_parameters |= weight.parameters
    point = _move_to_call_output(
        trace,
        record,
        PendingBoundary("leave", record.call, "output", record.outputs[0], weight.parameters),
    )
    _take(trace, sharded_axis, record, point, other)
    if record.added is not None:
        _note_bias(trace, record, point, record.added)
    sharded_axis.boundaries.append(point)


def _reduce(trace: ForwardTrace, sharded_axis: ShardedAxis, record: OperatorCall) -> None:
    """A sum or a mean over the axis: that of each rank's part, put together; whole on each rank
    from there on.
    """
    tensor = record.reductions[0][1]
    if tensor not in sharded_axis.sharded:
        return
    axis, where = sharded_axis.node, _describe_place(trace, record)
    if any(_has_axis(each.dims, axis) for each in record.outputs):
        raise Refusal(f"the axis is summed over and comes out in {where}")
    point = _move_to_call_output(
        trace, record, PendingBoundary("leave", record.call, "output", record.outputs[0])
    )
    _take(trace, sharded_axis, record, point, tensor)
    point.mean, sharded_axis.is_reduced = record.name == "mean", True
    sharded_axis.boundaries.append(point)


def _take(
    trace: ForwardTrace,
    sharded_axis: ShardedAxis,
    record: OperatorCall,
    point: PendingBoundary,
    tensor: TracedTensor,
) -> None:
    """Notes which argument of its call a product, a sum or a mean over the axis takes, and where
    that has the axis.
    """
    for place, each, _ in _find_arguments(trace.calls[record.call], tensor):
        numbers = [
            number for number, found in enumerate(each.dims) if has_axis(found, sharded_axis.node)
        ]
        segments = (
            find_segments(each.dims[numbers[0]], sharded_axis.node) if len(numbers) == 1 else None
        )
        if segments is None or any(whole for _, whole in segments):
            raise Refusal(
                f"the axis cannot be separated in what goes into {_describe_place(trace, record)}"
            )
        point.taken = place
        point.dim = numbers[0]
        point.segments = find_period([length for length, _ in segments])


def _has_axis(dims: Iterable[AxisNode], axis: AxisNode) -> bool:
    return any(has_axis(node, axis) for node in dims)


def _move_to_call_output(
    trace: ForwardTrace, record: OperatorCall, point: PendingBoundary
) -> PendingBoundary:
    """Makes a sum over ranks act on what its call gives; what else happens within the call must
    allow that.
    """
    where = _describe_place(trace, record)
    if record.call < 0:
        raise Refusal(f"no torch function call makes {where}")
    call = trace.calls[record.call]
    if len(call.outputs) != 1:
        raise Refusal(f"{where} is one of several results of {call.function} at {call.source}")
    after = set(record.outputs)
    for later in call.records[call.records.index(record) + 1 :]:
        if not after.intersection(later.inputs):
            continue
        others = [each for each in later.inputs if each not in after]
        if later.name in ("add", "add_") and all(each.parameters for each in others):
            for each in others:
                _note_bias(trace, later, point, each)
        elif later.name not in MOVES:
            raise Refusal(f"{later.name} follows {where} within {call.function} at {call.source}")
        after.update(later.outputs)
    if call.outputs[0] not in after:
        raise Refusal(f"{call.function} at {call.source} keeps the result of {where} to itself")
    point.tensor = call.outputs[0]
    return point


def _note_bias(
    trace: ForwardTrace, record: OperatorCall, point: PendingBoundary, tensor: TracedTensor
) -> None:
    """What is added to a product that sums over the axis, within its call, is added once, after the
    sum over ranks.
    """
    if not tensor.parameters:
        if not tensor.activation:
            return  # an addend that is multiplied by zero
        raise Refusal(f"an activation is added within the call of {_describe_place(trace, record)}")
    for place, each, _ in _find_arguments(trace.calls[record.call], tensor):
        point.bias, point.bias_parameters = place, each.parameters


def _find_arguments(
    call: FunctionCall, tensor: TracedTensor
) -> list[tuple[str, TracedTensor, bool]]:
    """The arguments of a call that a tensor within it is made of: the tensor itself if it is one of
    them.
    """
    found = [each for each in call.arguments if each[1] is tensor]
    if found:
        return found[:1]
    seen = {tensor}
    queue = [tensor]
    while queue:
        made = queue.pop()
        for record in call.records:
            if made in record.outputs:
                for each in record.inputs:
                    if each not in seen:
                        seen.add(each)
                        queue.append(each)
                        found += [argument for argument in call.arguments if argument[1] is each][
                            :1
                        ]
    return found


def _check_runs_alike(trace: ForwardTrace, sharded_axis: ShardedAxis) -> None:
    """A module that runs more than once must need the same boundaries each time, but where no
    gradient passes.
    """
    found: dict[int, set[tuple[str, str]]] = {}
    for point in sharded_axis.boundaries:
        found.setdefault(point.call, set()).add((point.kind, point.place))
    wanted: dict[CallKey, set[tuple[str, str]]] = {}
    for number, here in found.items():
        wanted.setdefault(trace.calls[number].key, set()).update(here)
    for number, call in enumerate(trace.calls):
        for kind, place in wanted.get(call.key, set()) - found.get(number, set()):
            gradient = any(needs for at, _, needs in call.arguments if at == place)
            if kind != "enter" or gradient:
                raise Refusal(
                    f"{call.key.module} runs more than once, and not alike, at {call.source}"
                )


def _describe_place(trace: ForwardTrace, record: OperatorCall) -> str:
    if record.call < 0:
        return record.name
    call = trace.calls[record.call]
    return f"{record.name} in {call.key.module or 'the model itself'} ({call.source})"

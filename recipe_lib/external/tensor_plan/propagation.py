"""Follows one axis through a trace: which tensors a rank has a part of, and where that begins and
ends.
"""

from collections.abc import Iterable

from recipe_lib.external.tensor_plan.axes import AxisNode, carries, segments_of
from recipe_lib.external.tensor_plan.forward_trace import (
    CallKey,
    Course,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    PendingBoundary,
    Traced,
)
from recipe_lib.external.tensor_plan.sharding_plan import period

# What may follow a product within its call: nothing of it depends on values.
MOVES = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t clone alias detach _to_copy squeeze"
    " unsqueeze".split()
)

# What takes parts of a dimension that was put together of several.
_TAKES = frozenset("slice narrow split split_with_sizes chunk index".split())


class Refusal(Exception):  # noqa: N818  (an answer, not an error)
    """An axis cannot be cut; str() says why."""


def follow(
    trace: ForwardTrace, axis: AxisNode, carriers: dict[str, int], records: Iterable[OperatorCall]
) -> Course:
    """Follows an axis (a leaf that nothing blocks) through the records that have to do with it.

    Raises Refusal where a rank could not compute its part.
    """
    course = Course(axis, carriers, sharded={trace.parameters[name] for name in carriers})
    held = [_carry(output.dims, axis) for output in trace.outputs]
    course.vocabulary = course.output = any(held)
    _assemble(trace, course)
    for record in _reached(trace, course, records):
        if any(carries(node, axis) for node, _, _ in record.contractions):
            _leave(trace, course, record)
        elif any(carries(node, axis) for node, _ in record.reductions):
            _reduce(trace, course, record)
        elif (
            record.lookup
            and record.inputs[0] in course.sharded
            and carries(record.inputs[0].dims[0], axis)
        ):
            if not any(each.identifiers for each in record.inputs[1:]):
                raise Refusal(
                    f"rows are picked by number, not by token, in {_where(trace, record)}"
                )
            course.vocabulary = True
            point = PendingBoundary(
                "lookup", record.call, "output", record.outputs[0], record.inputs[0].parameters
            )
            course.points.append(_located(trace, record, point))
        else:
            _pass(trace, course, record)
    for output, has in zip(trace.outputs, held, strict=True):
        if not has and output in course.sharded:
            raise Refusal("what every rank uses in part is in what the model gives")
        if has and (
            course.rows or output not in course.sharded or not carries(output.dims[-1], axis)
        ):
            raise Refusal("the axis is in what the model gives")
    if not course.vocabulary and (len(carriers) < 2 or not course.rows):
        raise Refusal(
            "no product sums over the axis"
            if not course.rows
            else "a single parameter has the axis"
        )
    if course.vocabulary and (course.rows or course.reduced):
        raise Refusal("a product, a sum or a mean is over tokens")
    if course.reduced and any(
        record.lookup and _carry(record.inputs[0].dims[1:], axis) for record in trace.records
    ):
        raise Refusal("hidden states have it, and norms take means over it")
    _alike(trace, course)
    return course


def _assemble(trace: ForwardTrace, course: Course) -> None:
    """Parameters of which some segments have the axis and others not: these are gathered wherever
    they are used.
    """
    for name, dim in course.carriers.items():
        segments = segments_of(trace.parameters[name].dims[dim], course.axis) or []
        whole = tuple(number for number, (_, every) in enumerate(segments) if every)
        if not whole:
            continue
        course.mixed = True
        if 2 * sum(segments[number][0] for number in whole) > trace.parameters[name].dims[dim].size:
            raise Refusal(f"most of {name} does not have the axis")
        held = _as_stored(trace, trace.parameters[name])
        for number, call in enumerate(trace.calls):
            for place, tensor, _ in call.arguments:
                if tensor in held:
                    point = PendingBoundary("assemble", number, place, tensor, frozenset([name]))
                    point.dim = next(
                        at for at, node in enumerate(tensor.dims) if carries(node, course.axis)
                    )
                    point.segments, point.whole = tuple(length for length, _ in segments), whole
                    if segments_of(tensor.dims[point.dim], course.axis) != segments:
                        raise Refusal(
                            f"{name} is put in another form before {call.function} at {call.source}"
                        )
                    course.points.append(point)


def _as_stored(trace: ForwardTrace, parameter: Traced) -> set[Traced]:
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
                f" {_where(trace, record)}"
            )
    return held


def _reached(
    trace: ForwardTrace, course: Course, records: Iterable[OperatorCall]
) -> Iterable[OperatorCall]:
    """The records that have to do with the axis, or with what every rank uses in part."""
    if not course.mixed:
        yield from records
        return
    having = set(records)
    for record in trace.records:
        if record in having or not course.sharded.isdisjoint(record.inputs):
            yield record


def _pass(trace: ForwardTrace, course: Course, record: OperatorCall) -> None:
    """An operator that sums over no part of the axis: what comes out is cut if something that goes
    in is.
    """
    axis, sharded = course.axis, course.sharded
    going_in = [each for each in record.inputs if each in sharded]
    coming_out = [each for each in record.outputs if _carry(each.dims, axis)]
    if going_in and course.mixed and not record.uniform:
        having = [each for each in going_in if _carry(each.dims, axis)]
        even = record.call >= 0 and trace.calls[record.call].function in ("chunk", "tensor_split")
        if not having or (
            record.name in _TAKES and not even
        ):  # what every rank uses in part, or is taken from it
            coming_out = record.outputs
    if not coming_out:
        if going_in and not record.uniform:
            raise Refusal(f"a part of a tensor does not have the axis in {_where(trace, record)}")
        return
    if record.values:
        return
    if record.uniform and not going_in:
        sharded.update(coming_out)
        return
    if not going_in:
        if any(_carry(each.dims, axis) for each in record.inputs) or not record.inputs:
            return  # whole on each rank, until it meets a tensor that is cut
    elif len(coming_out) < len(record.outputs):
        raise Refusal(f"a part of what comes out does not have the axis in {_where(trace, record)}")
    for each in coming_out:
        sharded.add(each)
        if each in record.inputs:  # written in place, and so into what it is a view of
            sharded.add(each.root)
    for each in record.inputs:
        if each not in sharded:
            _join(trace, course, record, each)


def _join(trace: ForwardTrace, course: Course, record: OperatorCall, tensor: Traced) -> None:
    """A tensor that each rank has whole meets one of which it has a part."""
    having = [number for number, node in enumerate(tensor.dims) if carries(node, course.axis)]
    if record.call < 0:
        if having or tensor.activation or tensor.parameters:
            raise Refusal("the axis goes through an operator that no torch function call makes")
        return
    call = trace.calls[record.call]
    for place, each, gradient in _arguments(call, tensor):
        if having:
            numbers = [
                number for number, node in enumerate(each.dims) if carries(node, course.axis)
            ]
            segments = (
                segments_of(each.dims[numbers[0]], course.axis) if len(numbers) == 1 else None
            )
            if segments is None:
                raise Refusal(
                    "a whole tensor that is to be cut does not have the axis in"
                    f" {_where(trace, record)}"
                )
            lengths = [length for length, _ in segments]
            point = PendingBoundary("cut", record.call, place, each, dim=numbers[0])
            point.whole = tuple(number for number, (_, every) in enumerate(segments) if every)
            point.segments = tuple(lengths) if point.whole else period(lengths)
            course.points.append(point)
        elif gradient and each not in course.sharded:
            point = PendingBoundary("enter", record.call, place, each, each.parameters)
            (course.joins if each.parameters else course.points).append(point)


def _leave(trace: ForwardTrace, course: Course, record: OperatorCall) -> None:
    """A product that sums over the axis: each rank has a part of the sum."""
    axis = course.axis
    where = _where(trace, record)
    node, left, right = next(each for each in record.contractions if carries(each[0], axis))
    if any(_carry(each.dims, axis) for each in record.outputs):
        raise Refusal(f"the axis is summed over and comes out in {where}")
    if not (left.parameters or right.parameters) or (left.parameters and right.parameters):
        kind = "parameters" if left.parameters else "activations"
        raise Refusal(f"two {kind} are multiplied along it by {where}")
    weight, other = (left, right) if left.parameters else (right, left)
    if weight not in course.sharded or other not in course.sharded:
        raise Refusal(f"a tensor that is whole on each rank is multiplied along it by {where}")
    course.rows |= weight.parameters
    point = _located(
        trace,
        record,
        PendingBoundary("leave", record.call, "output", record.outputs[0], weight.parameters),
    )
    _take(trace, course, record, point, other)
    if record.added is not None:
        _bias(trace, record, point, record.added)
    course.points.append(point)


def _reduce(trace: ForwardTrace, course: Course, record: OperatorCall) -> None:
    """A sum or a mean over the axis: that of each rank's part, put together; whole on each rank
    from there on.
    """
    tensor = record.reductions[0][1]
    if tensor not in course.sharded:
        return
    axis, where = course.axis, _where(trace, record)
    if any(_carry(each.dims, axis) for each in record.outputs):
        raise Refusal(f"the axis is summed over and comes out in {where}")
    point = _located(
        trace, record, PendingBoundary("leave", record.call, "output", record.outputs[0])
    )
    _take(trace, course, record, point, tensor)
    point.mean, course.reduced = record.name == "mean", True
    course.points.append(point)


def _take(
    trace: ForwardTrace,
    course: Course,
    record: OperatorCall,
    point: PendingBoundary,
    tensor: Traced,
) -> None:
    """Notes which argument of its call a product, a sum or a mean over the axis takes, and where
    that has the axis.
    """
    for place, each, _ in _arguments(trace.calls[record.call], tensor):
        numbers = [number for number, found in enumerate(each.dims) if carries(found, course.axis)]
        segments = segments_of(each.dims[numbers[0]], course.axis) if len(numbers) == 1 else None
        if segments is None or any(whole for _, whole in segments):
            raise Refusal(f"the axis cannot be separated in what goes into {_where(trace, record)}")
        point.taken = place
        point.dim = numbers[0]
        point.segments = period([length for length, _ in segments])


def _carry(dims: Iterable[AxisNode], axis: AxisNode) -> bool:
    return any(carries(node, axis) for node in dims)


def _located(trace: ForwardTrace, record: OperatorCall, point: PendingBoundary) -> PendingBoundary:
    """Makes a sum over ranks act on what its call gives; what else happens within the call must
    allow that.
    """
    where = _where(trace, record)
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
                _bias(trace, later, point, each)
        elif later.name not in MOVES:
            raise Refusal(f"{later.name} follows {where} within {call.function} at {call.source}")
        after.update(later.outputs)
    if call.outputs[0] not in after:
        raise Refusal(f"{call.function} at {call.source} keeps the result of {where} to itself")
    point.tensor = call.outputs[0]
    return point


def _bias(
    trace: ForwardTrace, record: OperatorCall, point: PendingBoundary, tensor: Traced
) -> None:
    """What is added to a product that sums over the axis, within its call, is added once, after the
    sum over ranks.
    """
    if not tensor.parameters:
        if not tensor.activation:
            return  # an addend that is multiplied by zero
        raise Refusal(f"an activation is added within the call of {_where(trace, record)}")
    for place, each, _ in _arguments(trace.calls[record.call], tensor):
        point.bias, point.bias_parameters = place, each.parameters


def _arguments(call: FunctionCall, tensor: Traced) -> list[tuple[str, Traced, bool]]:
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


def _alike(trace: ForwardTrace, course: Course) -> None:
    """A module that runs more than once must need the same boundaries each time, but where no
    gradient passes.
    """
    found: dict[int, set[tuple[str, str]]] = {}
    for point in course.points:
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


def _where(trace: ForwardTrace, record: OperatorCall) -> str:
    if record.call < 0:
        return record.name
    call = trace.calls[record.call]
    return f"{record.name} in {call.key.module or 'the model itself'} ({call.source})"

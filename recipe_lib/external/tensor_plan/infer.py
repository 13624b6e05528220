"""Makes a tensor parallel plan of a model from what one forward does; names decide nothing."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.attribute_rewrites import goes_the_same_way, rewrites_for
from recipe_lib.external.tensor_plan.axes import AxisNode, carries, find, leaves, segments_of
from recipe_lib.external.tensor_plan.forward_trace import (
    Course,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    PendingBoundary,
    Traced,
    Wanted,
)
from recipe_lib.external.tensor_plan.operator_rules import rule_of
from recipe_lib.external.tensor_plan.propagation import MOVES, Refusal, follow
from recipe_lib.external.tensor_plan.sharding_plan import (
    Axis,
    Boundary,
    ParameterPlan,
    Rewrite,
    ShardingPlan,
)
from recipe_lib.external.tensor_plan.sourced_integers import Attribute
from recipe_lib.external.tensor_plan.token_sharing import Place, SharedTokens, share_tokens
from recipe_lib.external.tensor_plan.tracing import trace


def infer_plan(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    size: int = 0,
    tokens: bool = True,
    others: Iterable[dict[str, Any]] = (),
) -> ShardingPlan:
    """The tensor parallel plan of a model.

    model: any language model, on the meta device or another one; it is not changed. inputs: keyword
    arguments of its forward, on the same device, token ids first (external.example_inputs makes
    those of transformers). size: takes only axes that this many ranks can share; 0 takes all.
    tokens: shares out tokens, too, where the forward allows it. others: what the forward may be
    called with, too, and may make other calls for. Raises SetupError where the forward cannot be
    traced.
    """
    found = trace(model, inputs, rule_of)
    unsteady: frozenset[str] = frozenset()
    if tokens:
        for each in others:
            with contextlib.suppress(SetupError):
                unsteady |= found.differences(trace(model, each, rule_of))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    courses, reasons = _courses(found, shapes, size)
    courses.sort(
        key=lambda each: (
            each.reduced,
            each.mixed,
            -sum(math.prod(shapes[name]) for name in each.carriers),
        )
    )
    while True:
        chosen = _apart(courses)
        wanted, refused = rewrites_for(found, chosen)
        if not refused:
            break
        reasons.update({course.axis: reason for course, reason in refused.items()})
        courses = [course for course in courses if course not in refused]
    reasons.update(
        {
            each.axis: "its parameters are cut along a larger axis"
            for each in courses
            if each not in chosen
        }
    )
    order = {name: number for number, name in enumerate(shapes)}
    chosen.sort(key=lambda each: min(order[name] for name in each.carriers))
    shared = share_tokens(found, chosen, wanted, unsteady) if tokens and chosen else SharedTokens()
    return _assemble(found, shapes, chosen, wanted, reasons, shared)


def _apart(courses: list[Course]) -> list[Course]:
    """The first of the axes that would cut the same parameters."""
    chosen: list[Course] = []
    taken: set[str] = set()
    for course in courses:
        if not taken & set(course.carriers):
            chosen.append(course)
            taken |= set(course.carriers)
    return chosen


def _courses(
    found: ForwardTrace, shapes: dict[str, tuple[int, ...]], size: int
) -> tuple[list[Course], dict[AxisNode, str]]:
    """Every axis that could be cut, followed through the trace; and for the others, why not."""
    reasons: dict[AxisNode, str] = {}
    carriers: dict[AxisNode, dict[str, list[int]]] = {}
    for name in shapes:
        for number, node in enumerate(found.parameters[name].dims):
            for leaf in dict.fromkeys(leaves(node)):
                carriers.setdefault(leaf, {}).setdefault(name, []).append(number)
    records = _records_of(found, {axis for axis in carriers if not axis.blocked})
    courses = []
    for axis, held in carriers.items():
        if axis.blocked:
            continue
        try:
            for name, numbers in held.items():
                if len(numbers) > 1:
                    raise Refusal(f"two dimensions of {name} have the axis")
                if segments_of(found.parameters[name].dims[numbers[0]], axis) is None:
                    raise Refusal(f"a part of {name} does not have the axis")
            lengths = [
                length
                for name, numbers in held.items()
                for length, every in (
                    segments_of(found.parameters[name].dims[numbers[0]], axis) or []
                )
                if every
            ]
            if size and any(length % size for length in lengths):
                raise Refusal(
                    f"{size} ranks cannot share parts of {', '.join(held)} that all of them need"
                )
            if (
                size
                and axis.size % size
                and not any(axis in map(find, each.dims) for each in found.outputs)
            ):
                raise Refusal(f"{size} ranks cannot share its {axis.size} steps")
            dims = {name: numbers[0] for name, numbers in held.items()}
            courses.append(follow(found, axis, dims, records.get(axis, [])))
        except Refusal as refusal:
            reasons[axis] = str(refusal)
    return courses, reasons


def _records_of(found: ForwardTrace, wanted: set[AxisNode]) -> dict[AxisNode, list[OperatorCall]]:
    held: dict[int, set[AxisNode]] = {}
    records: dict[AxisNode, list[OperatorCall]] = {}
    for record in found.records:
        here: set[AxisNode] = set()
        for tensor in (*record.inputs, *record.outputs):
            if id(tensor) not in held:
                held[id(tensor)] = wanted.intersection(
                    leaf for node in tensor.dims for leaf in leaves(node)
                )
            here |= held[id(tensor)]
        for axis in here:
            records.setdefault(axis, []).append(record)
    return records


def _assemble(
    found: ForwardTrace,
    shapes: dict[str, tuple[int, ...]],
    chosen: list[Course],
    wanted: dict[Attribute, Wanted],
    reasons: dict[AxisNode, str],
    shared: SharedTokens,
) -> ShardingPlan:
    axes = tuple(
        Axis(
            number,
            each.axis.size,
            tuple(filter(each.carriers.__contains__, shapes)),
            each.vocabulary,
            each.output,
        )
        for number, each in enumerate(chosen)
    )
    partial, mixed = _partial(found, chosen, shared.uses)
    points = [(number, point) for number, course in enumerate(chosen) for point in course.points]
    points += [
        (number, point)
        for number, course in enumerate(chosen)
        for point in course.joins
        if point.parameters & mixed
    ]
    # Where a parameter whose gradient is the whole one elsewhere meets a rank's tokens it enters.
    for number, argument in sorted(shared.uses):
        for at, tensor, _ in found.calls[number].arguments:
            if at == argument and tensor.parameters & mixed:
                points.append(
                    (-1, PendingBoundary("enter", number, argument, tensor, tensor.parameters))
                )
    late = {name for _, point in points for name in point.bias_parameters}
    multiplied = {
        name
        for record in found.records
        for each in record.contractions
        for name in _names(each[1:])
    }
    used = {
        name
        for call in found.calls
        for _, tensor, _ in call.arguments
        for name in tensor.parameters
    }
    numbers = {name: number for number, course in enumerate(chosen) for name in course.carriers}
    parameters = []
    for name, shape in shapes.items():
        if name not in numbers:
            gradient = "partial" if name in partial else "full"
            reason = (
                _reason(found.parameters[name], reasons)
                if name in used
                else "the forward does not use it"
            )
            parameters.append(
                ParameterPlan(
                    name,
                    shape,
                    "replicated",
                    gradient=gradient,
                    reason=reason,
                    after_reduction=name in late,
                )
            )
            continue
        course = chosen[numbers[name]]
        dim = course.carriers[name]
        pieces = segments_of(found.parameters[name].dims[dim], course.axis) or []
        segments = tuple(length for length, _ in pieces)
        whole_segments = tuple(number for number, (_, every) in enumerate(pieces) if every)
        role = "row" if name in course.rows else "column" if name in multiplied else "sharded"
        role = "vocabulary" if course.vocabulary else role
        unit = sum(length for length, every in pieces if not every) // course.axis.size
        parameters.append(
            ParameterPlan(
                name, shape, role, dim, numbers[name], segments, whole_segments, unit, "sharded"
            )
        )
    place = {course: number for number, course in enumerate(chosen)}
    rewrites = tuple(
        Rewrite(
            *attribute, axes=tuple(sorted(place[course] for course in each.courses)), kept=each.kept
        )
        for attribute, each in wanted.items()
    )
    gathered = [each.segments[number] for each in parameters for number in each.whole]
    common = math.gcd(
        *(axis.size for axis in axes if not axis.vocabulary),
        *(each.value - each.kept for each in rewrites),
    )
    common = math.gcd(common, *gathered)
    sizes = [size for size in range(2, common + 1) if common % size == 0]
    boundaries = (*_boundaries(found, points, shared), *_token_boundaries(found, shared))
    last: dict[str, int] = {}
    for each in boundaries:
        last[each.module] = max(each.call, last.get(each.module, 0))
    legal = tuple(size for size in sizes if goes_the_same_way(found, chosen, wanted, size, last))
    whole = [
        name for name, shape in shapes.items() if name in used - set(numbers) and len(shape) > 1
    ]
    other = [size for size in sizes if size not in legal]
    refused = [
        f"{size} ranks: a comparison of sizes would send the forward another way" for size in other
    ]
    refused += dict.fromkeys(_refusals(found, reasons, whole))
    held = (axes, tuple(parameters), boundaries, rewrites, tuple(refused), legal)
    return ShardingPlan(*held, shared_tokens=round(shared.share, 4), local_outputs=shared.local)


def _names(tensors: Iterable[Any]) -> set[str]:
    return {name for tensor in tensors for name in tensor.parameters}


def _partial(
    found: ForwardTrace, chosen: list[Course], tokens: set[Place]
) -> tuple[set[str], set[str]]:
    """Whole parameters whose gradients are sums over ranks: everywhere, or (second) at some of
    their uses only.

    tokens: where they meet a rank's tokens alone.
    """
    joined = {(point.call, point.place) for course in chosen for point in course.joins} | tokens
    partial = {name for course in chosen for point in course.joins for name in point.parameters}
    partial |= {
        name
        for number, place in tokens
        for at, tensor, _ in found.calls[number].arguments
        for name in tensor.parameters
        if at == place
    }
    elsewhere: set[str] = set()
    for number, call in enumerate(found.calls):
        for place, tensor, gradient in call.arguments:
            made = any(output.activation for output in call.outputs)
            if gradient and made and not tensor.activation and (number, place) not in joined:
                elsewhere |= tensor.parameters
    return partial - elsewhere, partial & elsewhere


def _token_boundaries(found: ForwardTrace, shared: SharedTokens) -> tuple[Boundary, ...]:
    """Where tokens are gathered and cut, in the order of the forward."""
    numbers: dict[Traced, int] = {}
    made_of: dict[tuple[str, str, int, str], Boundary] = {}  # of modules that run twice, once
    places = [("slice", each) for each in shared.slices.items()] + [
        ("gather", each) for each in shared.gathers.items()
    ]
    for kind, ((number, place), (tensor, where)) in sorted(places, key=lambda item: item[1][0]):
        call = found.calls[number]
        made_of.setdefault(
            (kind, call.key.module, call.key.number, place),
            Boundary(
                *(kind, call.key.module, call.key.number, place, ()),
                activation=numbers.setdefault(tensor, len(numbers)),
                dim=where.dim,
                tokens_first=where.first,
                function=call.function,
                source=call.source,
                width=math.prod(node.size for node in tensor.dims) // found.tokens,
            ),
        )
    return tuple(made_of.values())


def _boundaries(
    found: ForwardTrace, points: list[tuple[int, PendingBoundary]], shared: SharedTokens
) -> tuple[Boundary, ...]:
    """Boundaries in the order of the forward; a tensor that enters wherever it is used does so
    where it is made.
    """
    places = [*shared.gathers.items(), *shared.slices.items()]
    exchanged = {each for (number, _), (tensor, _) in places for each in (number, tensor)}
    entering: Uses = {}
    for _, point in points:
        if point.kind == "enter":
            entering.setdefault(point.tensor, set()).add((point.call, point.place))
    users: Uses = {}
    for number, call in enumerate(found.calls):
        for place, tensor, gradient in call.arguments:
            if gradient:
                users.setdefault(tensor, set()).add((number, place))
    outputs = set(found.outputs)
    merged: dict[tuple[str, int, str], tuple[set[int], set[str], PendingBoundary]] = {}
    numbers = {tensor: number for number, tensor in enumerate(entering)}
    runs = Counter(call.key for call in found.calls)
    for axis, point in points:
        tensor, number, place = point.tensor, point.call, point.place
        names = set(point.parameters)
        if point.kind == "enter":
            names |= _names(each for _, each, _ in found.calls[number].arguments)
            while tensor not in outputs:
                giving = _giving(found, tensor, users, entering)
                if giving is None or runs[found.calls[giving].key] != 1:
                    break
                if (
                    number != point.call
                    and found.calls[giving].key.module != found.calls[number].key.module
                ):
                    break
                number = giving
                held = found.calls[number].outputs
                place = "output" if len(held) == 1 else f"output.{held.index(tensor)}"
                moved = _moved(found.calls[number], users)
                if moved is None or {number, tensor, moved} & exchanged:
                    break
                tensor, entering = moved, entering | {moved: users[moved]}
        entry = merged.setdefault((point.kind, number, place), (set(), set(), point))
        entry[0].update((axis,) if axis >= 0 else ())
        entry[1].update(names)
    made_of = []
    for (kind, number, place), (axes, parameters, point) in sorted(
        merged.items(), key=lambda item: item[0][1]
    ):
        call = found.calls[number]
        # A tensor that is cut is summed over if it needs a gradient.
        is_summed = kind != "assemble" and (
            kind != "cut" or any(needs for at, _, needs in call.arguments if at == place)
        )
        numbers_of_token = math.prod(node.size for node in point.tensor.dims) // max(
            found.tokens, 1
        )
        made_of.append(
            Boundary(
                *(
                    kind,
                    call.key.module,
                    call.key.number,
                    place,
                    tuple(sorted(axes)),
                    tuple(sorted(parameters)),
                ),
                activation=numbers[point.tensor] if kind == "enter" else -1,
                bias=point.bias,
                taken=point.taken,
                dim=point.dim,
                segments=point.segments,
                whole=point.whole,
                mean=point.mean,
                function=call.function,
                source=call.source,
                width=numbers_of_token if is_summed and found.tokens else 0,
            )
        )
    unique = {
        (each.kind, each.module, each.call, each.place): each for each in made_of
    }  # of modules that run twice
    return tuple(unique.values())


Uses = dict[Traced, set[tuple[int, str]]]


def _moved(call: FunctionCall, users: Uses) -> Traced | None:
    """What a call only moves, if nothing else uses that: a sum over ranks may as well be one of its
    gradient.

    The fewer calls come before it, the fewer ways there are to the same place: with a mask, or
    without.
    """
    if (
        any(record.name not in MOVES for record in call.records)
        or not call.records
        or len(call.outputs) != 1
    ):
        return None
    given = [tensor for _, tensor, gradient in call.arguments if gradient]
    if len(given) != 1 or len(call.arguments) != 1 or not given[0].activation:
        return None
    return given[0] if len(users[given[0]]) == 1 else None


def _giving(found: ForwardTrace, tensor: Traced, used: Uses, needed: Uses) -> int | None:
    """The last call that gives a tensor or hands it on, if all who use it from there on need it to
    enter.
    """
    users, entering = used[tensor], needed[tensor]
    giving = [
        number
        for number in range(max(tensor.call, 0), max(users)[0] + 1)
        if tensor in found.calls[number].outputs
    ]
    if not giving or {user for user in users if user[0] > giving[-1]} != entering:
        return None
    if any(user[0] not in giving for user in users - entering):
        return None  # used as it is by another call, before it is handed on
    return giving[-1]


def _reason(tensor: Traced, reasons: dict[AxisNode, str]) -> str:
    """What keeps a parameter whole: dimension by dimension, the first reason of each."""
    said = []
    for number, node in enumerate(tensor.dims):
        for leaf in leaves(node):
            why = leaf.blocked or reasons.get(leaf)
            if why:
                said.append(f"dimension {number}: {why}")
                break
    return "; ".join(said) or "no dimension of more than one element"


def _refusals(found: ForwardTrace, reasons: dict[AxisNode, str], whole: list[str]) -> Iterable[str]:
    """Lines for a user; only axes of matrices that stay whole are worth one."""
    for name, place in found.unknown.items():
        yield f"no rule for the operator {name} (first in {place}): what it touches stays whole"
    for note in dict.fromkeys(found.assumed):
        yield (
            f"values were made up for {note}: a branch that depends on them may not have been seen"
        )
    for axis, reason in reasons.items():
        names = [
            name
            for name in whole
            if any(carries(node, axis) for node in found.parameters[name].dims)
        ]
        if names:
            yield (
                f"an axis of {axis.size} in"
                f" {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: {reason}"
            )

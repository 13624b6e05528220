"""Makes a tensor parallel plan of a model from what one forward does; names decide nothing."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.attribute_rewrites import find_rewrites, is_control_flow_same
from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    find,
    find_segments,
    has_axis,
    list_leaves,
)
from recipe_lib.external.tensor_plan.forward_trace import (
    AttributeDivision,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    PendingBoundary,
    ShardedAxis,
    TracedTensor,
)
from recipe_lib.external.tensor_plan.operator_rules import find_rule
from recipe_lib.external.tensor_plan.propagation import MOVES, Refusal, follow_axis
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
    found = trace(model, inputs, find_rule)
    unsteady: frozenset[str] = frozenset()
    if tokens:
        for each in others:
            with contextlib.suppress(SetupError):
                unsteady |= found.find_differing_modules(trace(model, each, find_rule))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sharded_axes, reasons = _follow_axes(found, shapes, size)
    sharded_axes.sort(
        key=lambda each: (
            each.reduced,
            each.mixed,
            -sum(math.prod(shapes[name]) for name in each.parameter_dims),
        )
    )
    while True:
        chosen = _choose_disjoint(sharded_axes)
        wanted, refused = find_rewrites(found, chosen)
        if not refused:
            break
        reasons.update({sharded_axis.node: reason for sharded_axis, reason in refused.items()})
        sharded_axes = [
            sharded_axis for sharded_axis in sharded_axes if sharded_axis not in refused
        ]
    reasons.update(
        {
            each.axis: "its parameters are cut along a larger axis"
            for each in sharded_axes
            if each not in chosen
        }
    )
    order = {name: number for number, name in enumerate(shapes)}
    chosen.sort(key=lambda each: min(order[name] for name in each.parameter_dims))
    shared = share_tokens(found, chosen, wanted, unsteady) if tokens and chosen else SharedTokens()
    return _assemble(found, shapes, chosen, wanted, reasons, shared)


def _choose_disjoint(sharded_axes: list[ShardedAxis]) -> list[ShardedAxis]:
    """The first of the axes that would cut the same parameters."""
    chosen: list[ShardedAxis] = []
    taken: set[str] = set()
    for sharded_axis in sharded_axes:
        if not taken & set(sharded_axis.parameter_dims):
            chosen.append(sharded_axis)
            taken |= set(sharded_axis.parameter_dims)
    return chosen


def _follow_axes(
    found: ForwardTrace, shapes: dict[str, tuple[int, ...]], size: int
) -> tuple[list[ShardedAxis], dict[AxisNode, str]]:
    """Every axis that could be cut, followed through the trace; and for the others, why not."""
    reasons: dict[AxisNode, str] = {}
    carriers: dict[AxisNode, dict[str, list[int]]] = {}
    for name in shapes:
        for number, node in enumerate(found.parameters[name].dims):
            for leaf in dict.fromkeys(list_leaves(node)):
                carriers.setdefault(leaf, {}).setdefault(name, []).append(number)
    records = _group_records(found, {axis for axis in carriers if not axis.blocked})
    sharded_axes = []
    for axis, held in carriers.items():
        if axis.blocked:
            continue
        try:
            for name, numbers in held.items():
                if len(numbers) > 1:
                    raise Refusal(f"two dimensions of {name} have the axis")
                if find_segments(found.parameters[name].dims[numbers[0]], axis) is None:
                    raise Refusal(f"a part of {name} does not have the axis")
            lengths = [
                length
                for name, numbers in held.items()
                for length, every in (
                    find_segments(found.parameters[name].dims[numbers[0]], axis) or []
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
            sharded_axes.append(follow_axis(found, axis, dims, records.get(axis, [])))
        except Refusal as refusal:
            reasons[axis] = str(refusal)
    return sharded_axes, reasons


def _group_records(
    found: ForwardTrace, wanted: set[AxisNode]
) -> dict[AxisNode, list[OperatorCall]]:
    held: dict[int, set[AxisNode]] = {}
    records: dict[AxisNode, list[OperatorCall]] = {}
    for record in found.records:
        here: set[AxisNode] = set()
        for tensor in (*record.inputs, *record.outputs):
            if id(tensor) not in held:
                held[id(tensor)] = wanted.intersection(
                    leaf for node in tensor.dims for leaf in list_leaves(node)
                )
            here |= held[id(tensor)]
        for axis in here:
            records.setdefault(axis, []).append(record)
    return records


def _assemble(
    found: ForwardTrace,
    shapes: dict[str, tuple[int, ...]],
    chosen: list[ShardedAxis],
    wanted: dict[Attribute, AttributeDivision],
    reasons: dict[AxisNode, str],
    shared: SharedTokens,
) -> ShardingPlan:
    axes = tuple(
        Axis(
            number,
            each.axis.size,
            tuple(filter(each.parameter_dims.__contains__, shapes)),
            each.vocabulary,
            each.output,
        )
        for number, each in enumerate(chosen)
    )
    partial, mixed = _find_partial_parameters(found, chosen, shared.uses)
    points = [
        (number, point)
        for number, sharded_axis in enumerate(chosen)
        for point in sharded_axis.boundaries
    ]
    points += [
        (number, point)
        for number, sharded_axis in enumerate(chosen)
        for point in sharded_axis.replicated_uses
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
        for name in _list_names(each[1:])
    }
    used = {
        name
        for call in found.calls
        for _, tensor, _ in call.arguments
        for name in tensor.parameters
    }
    numbers = {
        name: number
        for number, sharded_axis in enumerate(chosen)
        for name in sharded_axis.parameter_dims
    }
    parameters = []
    for name, shape in shapes.items():
        if name not in numbers:
            gradient = "partial" if name in partial else "full"
            reason = (
                _explain_replicated(found.parameters[name], reasons)
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
        sharded_axis = chosen[numbers[name]]
        dim = sharded_axis.parameter_dims[name]
        pieces = find_segments(found.parameters[name].dims[dim], sharded_axis.node) or []
        segments = tuple(length for length, _ in pieces)
        whole_segments = tuple(number for number, (_, every) in enumerate(pieces) if every)
        role = (
            "row"
            if name in sharded_axis.row_parameters
            else "column"
            if name in multiplied
            else "sharded"
        )
        role = "vocabulary" if sharded_axis.vocabulary else role
        unit = sum(length for length, every in pieces if not every) // sharded_axis.node.size
        parameters.append(
            ParameterPlan(
                name, shape, role, dim, numbers[name], segments, whole_segments, unit, "sharded"
            )
        )
    place = {sharded_axis: number for number, sharded_axis in enumerate(chosen)}
    rewrites = tuple(
        Rewrite(
            *attribute,
            axes=tuple(sorted(place[sharded_axis] for sharded_axis in each.sharded_axes)),
            kept=each.kept,
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
    boundaries = (
        *_build_boundaries(found, points, shared),
        *_build_token_boundaries(found, shared),
    )
    last: dict[str, int] = {}
    for each in boundaries:
        last[each.module] = max(each.call, last.get(each.module, 0))
    legal = tuple(size for size in sizes if is_control_flow_same(found, chosen, wanted, size, last))
    whole = [
        name for name, shape in shapes.items() if name in used - set(numbers) and len(shape) > 1
    ]
    other = [size for size in sizes if size not in legal]
    refused = [
        f"{size} ranks: a comparison of sizes would send the forward another way" for size in other
    ]
    refused += dict.fromkeys(_list_refusals(found, reasons, whole))
    held = (axes, tuple(parameters), boundaries, rewrites, tuple(refused), legal)
    return ShardingPlan(*held, shared_tokens=round(shared.share, 4), local_outputs=shared.local)


def _list_names(tensors: Iterable[Any]) -> set[str]:
    return {name for tensor in tensors for name in tensor.parameters}


def _find_partial_parameters(
    found: ForwardTrace, chosen: list[ShardedAxis], tokens: set[Place]
) -> tuple[set[str], set[str]]:
    """Whole parameters whose gradients are sums over ranks: everywhere, or (second) at some of
    their uses only.

    tokens: where they meet a rank's tokens alone.
    """
    joined = {
        (point.call, point.place)
        for sharded_axis in chosen
        for point in sharded_axis.replicated_uses
    } | tokens
    partial = {
        name
        for sharded_axis in chosen
        for point in sharded_axis.replicated_uses
        for name in point.parameters
    }
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


def _build_token_boundaries(found: ForwardTrace, shared: SharedTokens) -> tuple[Boundary, ...]:
    """Where tokens are gathered and cut, in the order of the forward."""
    numbers: dict[TracedTensor, int] = {}
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


def _build_boundaries(
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
            names |= _list_names(each for _, each, _ in found.calls[number].arguments)
            while tensor not in outputs:
                giving = _find_giving_call(found, tensor, users, entering)
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
                moved = _find_moved(found.calls[number], users)
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


Uses = dict[TracedTensor, set[tuple[int, str]]]


def _find_moved(call: FunctionCall, users: Uses) -> TracedTensor | None:
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


def _find_giving_call(
    found: ForwardTrace, tensor: TracedTensor, used: Uses, needed: Uses
) -> int | None:
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


def _explain_replicated(tensor: TracedTensor, reasons: dict[AxisNode, str]) -> str:
    """What keeps a parameter whole: dimension by dimension, the first reason of each."""
    said = []
    for number, node in enumerate(tensor.dims):
        for leaf in list_leaves(node):
            why = leaf.blocked or reasons.get(leaf)
            if why:
                said.append(f"dimension {number}: {why}")
                break
    return "; ".join(said) or "no dimension of more than one element"


def _list_refusals(
    found: ForwardTrace, reasons: dict[AxisNode, str], whole: list[str]
) -> Iterable[str]:
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
            if any(has_axis(node, axis) for node in found.parameters[name].dims)
        ]
        if names:
            yield (
                f"an axis of {axis.size} in"
                f" {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: {reason}"
            )

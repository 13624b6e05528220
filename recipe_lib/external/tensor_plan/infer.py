"""Infer a tensor parallel plan of a model from what one forward does; names decide nothing.

`infer_plan` traces a forward, follows every axis that parameters have, keeps those that ranks can
share, and makes a `ShardingPlan` of them. It is called for a model as it is (apply_plan), for one
with adapters (proven_plan), and for a config alone (transformers_models).
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    find,
    find_segments,
    have_axis,
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
    find_rewrites,
    is_control_flow_same,
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
from recipe_lib.external.tensor_plan.token_sharing import (
    Place,
    SharedTokens,
    name_output,
    share_tokens,
)
from recipe_lib.external.tensor_plan.tracing import trace


def infer_plan(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    size: int = 0,
    tokens: bool = True,
    others: Iterable[dict[str, Any]] = (),
) -> ShardingPlan:
    """Return the tensor parallel plan of a model, which is not changed.

    model: any language model, on the meta device or another one. inputs: keyword arguments of its
    forward, on the same device, token ids first (`build_example_inputs` makes those of
    transformers). size: takes only axes that this many ranks can share; 0 takes all. tokens: shares
    out tokens, too, where the forward allows it. others: what the forward may be called with, too,
    and may make other calls for. Raises SetupError where the forward cannot be traced.
    """
    forward = trace(model, inputs, find_rule)
    unsteady: frozenset[str] = frozenset()
    if tokens:
        for other_inputs in others:
            # Another form of inputs may be one that the class does not take at all.
            with contextlib.suppress(SetupError):
                unsteady |= forward.find_differing_modules(trace(model, other_inputs, find_rule))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    candidates, reasons = _follow_axes(forward, shapes, size)
    # The first of two axes that would cut the same parameters is taken: rather one without
    # collectives inside of norms, then one without segments to gather, then the one with more
    # elements.
    candidates.sort(
        key=lambda candidate: (
            candidate.is_reduced,
            candidate.has_whole_segments,
            -sum(math.prod(shapes[name]) for name in candidate.parameter_dims),
        )
    )
    while True:
        chosen = _choose_disjoint(candidates)
        divisions, refused = find_rewrites(forward, chosen)
        if not refused:
            break
        # An axis that is gone may make room for one that cuts the same parameters: once more.
        reasons.update({candidate.node: reason for candidate, reason in refused.items()})
        candidates = [candidate for candidate in candidates if candidate not in refused]
    passed_over = [candidate.node for candidate in candidates if candidate not in chosen]
    reasons |= dict.fromkeys(passed_over, "its parameters are cut along a larger axis")
    order = {name: number for number, name in enumerate(shapes)}
    chosen.sort(key=lambda axis: min(order[name] for name in axis.parameter_dims))
    shared = (
        share_tokens(forward, sharded_axes=chosen, rewrites=divisions, unsteady=unsteady)
        if tokens and chosen
        else SharedTokens()
    )
    return _build_plan(forward, shapes, chosen, divisions=divisions, reasons=reasons, shared=shared)


def _choose_disjoint(candidates: list[ShardedAxis]) -> list[ShardedAxis]:
    """Return the first of the axes that would cut the same parameters."""
    chosen: list[ShardedAxis] = []
    taken: set[str] = set()
    for candidate in candidates:
        if not taken & set(candidate.parameter_dims):
            chosen.append(candidate)
            taken |= set(candidate.parameter_dims)
    return chosen


def _follow_axes(
    forward: ForwardTrace, shapes: dict[str, tuple[int, ...]], size: int
) -> tuple[list[ShardedAxis], dict[AxisNode, str]]:
    """Follow every axis that could be cut through the trace; for the others return why not."""
    reasons: dict[AxisNode, str] = {}
    dims_by_axis: dict[AxisNode, dict[str, list[int]]] = {}
    for name in shapes:
        for number, node in enumerate(forward.parameters[name].dims):
            for leaf in dict.fromkeys(list_leaves(node)):
                dims_by_axis.setdefault(leaf, {}).setdefault(name, []).append(number)
    unblocked = {axis: dims for axis, dims in dims_by_axis.items() if not axis.blocked}
    records = _group_records(forward, set(unblocked))
    followed = []
    for axis, dims_by_name in unblocked.items():
        try:
            parameter_dims = _find_parameter_dims(
                forward, axis=axis, dims_by_name=dims_by_name, size=size
            )
            followed.append(
                follow_axis(
                    forward, node=axis, parameter_dims=parameter_dims, records=records.get(axis, [])
                )
            )
        except Refusal as refusal:
            reasons[axis] = str(refusal)
    return followed, reasons


def _find_parameter_dims(
    forward: ForwardTrace, axis: AxisNode, dims_by_name: dict[str, list[int]], size: int
) -> dict[str, int]:
    """Return the dimension of each parameter that has the axis. Raises Refusal if `size` ranks
    cannot share it.
    """
    whole_lengths: list[int] = []
    for name, numbers in dims_by_name.items():
        if len(numbers) > 1:
            raise Refusal(f"two dimensions of {name} have the axis")
        segments = find_segments(forward.parameters[name].dims[numbers[0]], axis)
        if segments is None:
            raise Refusal(f"a part of {name} does not have the axis")
        whole_lengths += [length for length, is_whole in segments if is_whole]
    # A rank holds its part of what all of them need, and gathers the rest: it has to be even.
    if size and any(length % size for length in whole_lengths):
        raise Refusal(
            f"{size} ranks cannot share parts of {', '.join(dims_by_name)} that all of them need"
        )
    # Logits alone may be cut unevenly: the vocabulary is a table of rows, the last ones fewer.
    is_output = any(axis in map(find, output.dims) for output in forward.outputs)
    if size and axis.size % size and not is_output:
        raise Refusal(f"{size} ranks cannot share its {axis.size} steps")
    return {name: numbers[0] for name, numbers in dims_by_name.items()}


def _group_records(
    forward: ForwardTrace, axes: set[AxisNode]
) -> dict[AxisNode, list[OperatorCall]]:
    """Return for each axis the operators that get or give a tensor with it, in their order."""
    axes_of_tensor: dict[int, set[AxisNode]] = {}
    records: dict[AxisNode, list[OperatorCall]] = {}
    for record in forward.records:
        record_axes: set[AxisNode] = set()
        for tensor in (*record.inputs, *record.outputs):
            if id(tensor) not in axes_of_tensor:
                leaves = [leaf for node in tensor.dims for leaf in list_leaves(node)]
                axes_of_tensor[id(tensor)] = axes.intersection(leaves)
            record_axes |= axes_of_tensor[id(tensor)]
        for axis in record_axes:
            records.setdefault(axis, []).append(record)
    return records


def _build_plan(
    forward: ForwardTrace,
    shapes: dict[str, tuple[int, ...]],
    chosen: list[ShardedAxis],
    *,
    divisions: dict[Attribute, AttributeDivision],
    reasons: dict[AxisNode, str],
    shared: SharedTokens,
) -> ShardingPlan:
    """Make the plan of the axes that ranks share. reasons: why the others stay whole."""
    axes = tuple(
        Axis(
            number,
            sharded.node.size,
            parameters=tuple(name for name in shapes if name in sharded.parameter_dims),
            vocabulary=sharded.vocabulary,
            output=sharded.output,
        )
        for number, sharded in enumerate(chosen)
    )
    partial, mixed = _find_partial_parameters(forward, chosen, shared.uses)
    pending = _list_pending(forward, chosen=chosen, token_uses=shared.uses, mixed=mixed)
    late_biases = {name for _, boundary in pending for name in boundary.bias_parameters}
    arguments = chain.from_iterable(call.arguments for call in forward.calls)
    used = set[str]().union(*(tensor.parameters for _, tensor, _ in arguments))
    sharded_plans = _plan_sharded_parameters(forward, shapes, chosen)
    unused = dict.fromkeys(shapes.keys() - used, "the forward does not use it")
    parameters = [
        sharded_plans.get(name)
        or ParameterPlan(
            name,
            shape,
            "replicated",
            gradient="partial" if name in partial else "full",
            reason=unused.get(name) or _explain_replicated(forward.parameters[name], reasons),
            after_reduction=name in late_biases,
        )
        for name, shape in shapes.items()
    ]
    axis_numbers = {sharded: number for number, sharded in enumerate(chosen)}
    rewrites = tuple(
        Rewrite(
            *attribute,
            axes=tuple(sorted(axis_numbers[axis] for axis in division.sharded_axes)),
            kept=division.kept,
        )
        for attribute, division in divisions.items()
    )
    common = math.gcd(
        *(axis.size for axis in axes if not axis.vocabulary),
        *(rewrite.value - rewrite.kept for rewrite in rewrites),
        *(plan.segments[number] for plan in parameters for number in plan.whole),
    )
    sizes = [size for size in range(2, common + 1) if common % size == 0]
    boundaries = (
        *_build_boundaries(forward, pending, shared),
        *_build_token_boundaries(forward, shared),
    )
    legal = _find_legal_sizes(forward, chosen, divisions, sizes=sizes, boundaries=boundaries)
    replicated_matrices = [
        name
        for name, shape in shapes.items()
        if name in used and name not in sharded_plans and len(shape) > 1
    ]
    refused = [
        f"{size} ranks: a comparison of sizes would send the forward another way"
        for size in sizes
        if size not in legal
    ]
    refused += dict.fromkeys(_list_refusals(forward, reasons, replicated_matrices))
    return ShardingPlan(
        axes,
        parameters=tuple(parameters),
        boundaries=boundaries,
        rewrites=rewrites,
        refused=tuple(refused),
        legal_sizes=legal,
        shared_tokens=round(shared.share, 4),
        local_outputs=shared.local,
    )


def _find_legal_sizes(
    forward: ForwardTrace,
    chosen: list[ShardedAxis],
    divisions: dict[Attribute, AttributeDivision],
    *,
    sizes: list[int],
    boundaries: tuple[Boundary, ...],
) -> tuple[int, ...]:
    """Return those of the sizes with which the forward goes the same way on a rank."""
    # Of each module the last one stays.
    last_calls = {each.module: each.call for each in sorted(boundaries, key=lambda each: each.call)}
    return tuple(
        size
        for size in sizes
        if is_control_flow_same(forward, chosen, divisions, size=size, last=last_calls)
    )


def _plan_sharded_parameters(
    forward: ForwardTrace, shapes: dict[str, tuple[int, ...]], chosen: list[ShardedAxis]
) -> dict[str, ParameterPlan]:
    """Return by name how each parameter that has one of the axes is cut along it."""
    multiplied: set[str] = set()
    for record in forward.records:
        for _, left, right in record.contractions:
            multiplied |= left.parameters | right.parameters
    plans = {}
    for number, sharded in enumerate(chosen):
        for name, dim in sharded.parameter_dims.items():
            segments = find_segments(forward.parameters[name].dims[dim], sharded.node) or []
            role = "column" if name in multiplied else "sharded"
            if sharded.vocabulary:
                role = "vocabulary"
            elif name in sharded.row_parameters:
                role = "row"
            evenly_cut = sum(length for length, is_whole in segments if not is_whole)
            plans[name] = ParameterPlan(
                name,
                shapes[name],
                role,
                dim=dim,
                axis=number,
                segments=tuple(length for length, _ in segments),
                whole=tuple(at for at, (_, is_whole) in enumerate(segments) if is_whole),
                unit=evenly_cut // sharded.node.size,
                gradient="sharded",
            )
    return plans


def _find_partial_parameters(
    forward: ForwardTrace, chosen: list[ShardedAxis], token_uses: set[Place]
) -> tuple[set[str], set[str]]:
    """Return the whole parameters whose gradients are sums over ranks: at all of their uses, and
    (second) at some of them only.

    token_uses: where they meet a rank's tokens alone.
    """
    boundaries = [boundary for sharded in chosen for boundary in sharded.replicated_uses]
    partial_uses = {(boundary.call, boundary.place) for boundary in boundaries} | token_uses
    partial = {name for boundary in boundaries for name in boundary.parameters}
    full: set[str] = set()
    for number, call in enumerate(forward.calls):
        makes_activation = any(output.activation for output in call.outputs)
        for place, tensor, needs_gradient in call.arguments:
            if (number, place) in token_uses:
                partial |= tensor.parameters
            is_parameter = needs_gradient and makes_activation and not tensor.activation
            if is_parameter and (number, place) not in partial_uses:
                full |= tensor.parameters
    return partial - full, partial & full


def _list_pending(
    forward: ForwardTrace, chosen: list[ShardedAxis], token_uses: set[Place], mixed: set[str]
) -> list[tuple[int, PendingBoundary]]:
    """Return the boundaries of the axes, each with the number of its axis, -1 for none.

    token_uses, mixed: see `_find_partial_parameters`.
    """
    pending: list[tuple[int, PendingBoundary]] = []
    for number, sharded in enumerate(chosen):
        pending += [(number, boundary) for boundary in sharded.boundaries]
    for number, sharded in enumerate(chosen):
        pending += [
            (number, boundary)
            for boundary in sharded.replicated_uses
            if boundary.parameters & mixed
        ]
    # Where a parameter whose gradient is the whole one elsewhere meets a rank's tokens it enters.
    for number, argument in sorted(token_uses):
        for place, tensor, _ in forward.calls[number].arguments:
            if place == argument and tensor.parameters & mixed:
                pending.append(
                    (
                        -1,
                        PendingBoundary(
                            "enter",
                            call=number,
                            place=argument,
                            tensor=tensor,
                            parameters=tensor.parameters,
                        ),
                    )
                )
    return pending


def _build_token_boundaries(forward: ForwardTrace, shared: SharedTokens) -> tuple[Boundary, ...]:
    """Return where tokens are gathered and sliced, in the order of the forward."""
    activations: dict[TracedTensor, int] = {}
    boundaries: dict[tuple[str, str, int, str], Boundary] = {}  # of modules that run twice, once
    exchanges = [("slice", item) for item in shared.slices.items()]
    exchanges += [("gather", item) for item in shared.gathers.items()]
    for kind, ((number, place), (tensor, layout)) in sorted(exchanges, key=lambda it: it[1][0]):
        call = forward.calls[number]
        boundaries.setdefault(
            (kind, *call.key, place),
            Boundary(
                kind,
                module=call.key.module,
                call=call.key.number,
                place=place,
                axes=(),
                activation=activations.setdefault(tensor, len(activations)),
                dim=layout.dim,
                tokens_first=layout.first,
                function=call.function,
                source=call.source,
                width=math.prod(node.size for node in tensor.dims) // forward.tokens,
            ),
        )
    return tuple(boundaries.values())


def _build_boundaries(
    forward: ForwardTrace, pending: list[tuple[int, PendingBoundary]], shared: SharedTokens
) -> tuple[Boundary, ...]:
    """Return the boundaries of axes in the order of the forward; a tensor that enters wherever it
    is used does so where it is made.

    pending: with the number of their axis, -1 for none.
    """
    exchanges = {**shared.gathers, **shared.slices}
    exchanged = {number for number, _ in exchanges} | {tensor for tensor, _ in exchanges.values()}
    entering: Uses = {}
    for _, boundary in pending:
        if boundary.kind == "enter":
            entering.setdefault(boundary.tensor, set()).add((boundary.call, boundary.place))
    users: Uses = {}
    for number, call in enumerate(forward.calls):
        for place, tensor, needs_gradient in call.arguments:
            if needs_gradient:
                users.setdefault(tensor, set()).add((number, place))
    merged: dict[tuple[str, int, str], tuple[set[int], set[str], PendingBoundary]] = {}
    activations = {tensor: number for number, tensor in enumerate(entering)}
    runs = Counter(call.key for call in forward.calls)
    for axis, boundary in pending:
        number = boundary.call
        place = boundary.place
        names = set(boundary.parameters)
        if boundary.kind == "enter":
            tensor = boundary.tensor
            for _, argument, _ in forward.calls[number].arguments:
                names |= argument.parameters
            # Earlier, where all who use the tensor from there on need it to enter: once for all.
            while tensor not in forward.outputs:
                giving = _find_giving_call(forward, tensor=tensor, users=users, entering=entering)
                if giving is None or runs[forward.calls[giving].key] != 1:
                    break
                module = forward.calls[number].key.module
                if number != boundary.call and forward.calls[giving].key.module != module:
                    break
                number = giving
                place = name_output(forward.calls[number], tensor)
                moved = _find_moved(forward.calls[number], users)
                if moved is None or {number, tensor, moved} & exchanged:
                    break
                tensor = moved
                entering = entering | {moved: users[moved]}
        axes, parameters, _ = merged.setdefault(
            (boundary.kind, number, place), (set(), set(), boundary)
        )
        axes.update((axis,) if axis >= 0 else ())
        parameters.update(names)
    boundaries: dict[tuple[str, str, int, str], Boundary] = {}  # of modules that run twice, once
    for (kind, number, place), (axes, parameters, boundary) in sorted(
        merged.items(), key=lambda item: item[0][1]
    ):
        call = forward.calls[number]
        # A tensor that is cut is summed over if it needs a gradient.
        needs_gradient = any(needs for at, _, needs in call.arguments if at == place)
        is_summed = kind != "assemble" and (kind != "cut" or needs_gradient)
        elements = math.prod(node.size for node in boundary.tensor.dims)
        boundaries[(kind, *call.key, place)] = Boundary(
            kind,
            module=call.key.module,
            call=call.key.number,
            place=place,
            axes=tuple(sorted(axes)),
            parameters=tuple(sorted(parameters)),
            activation=activations[boundary.tensor] if kind == "enter" else -1,
            bias=boundary.bias,
            taken=boundary.taken,
            dim=boundary.dim,
            segments=boundary.segments,
            whole=boundary.whole,
            mean=boundary.mean,
            function=call.function,
            source=call.source,
            width=elements // forward.tokens if is_summed and forward.tokens else 0,
        )
    return tuple(boundaries.values())


Uses = dict[TracedTensor, set[Place]]


def _find_moved(call: FunctionCall, users: Uses) -> TracedTensor | None:
    """Return what a call only moves, if nothing else uses that: a sum over ranks may as well be one
    of its gradient.

    The fewer calls come before it, the fewer ways there are to the same place: with a mask, or
    without.
    """
    if not call.records or any(record.name not in MOVES for record in call.records):
        return None
    moved = [tensor for _, tensor, needs_gradient in call.arguments if needs_gradient]
    if not len(call.outputs) == len(call.arguments) == len(moved) == 1:
        return None
    return moved[0] if moved[0].activation and len(users[moved[0]]) == 1 else None


def _find_giving_call(
    forward: ForwardTrace, tensor: TracedTensor, users: Uses, entering: Uses
) -> int | None:
    """Return the last call that gives a tensor or hands it on, if all who use it from there on need
    it to enter.
    """
    calls = range(max(tensor.call, 0), max(users[tensor])[0] + 1)
    giving = [number for number in calls if tensor in forward.calls[number].outputs]
    if not giving or {user for user in users[tensor] if user[0] > giving[-1]} != entering[tensor]:
        return None
    if any(number not in giving for number, _ in users[tensor] - entering[tensor]):
        return None  # used as it is by another call, before it is handed on
    return giving[-1]


def _explain_replicated(tensor: TracedTensor, reasons: dict[AxisNode, str]) -> str:
    """Return what keeps a parameter whole: dimension by dimension, the first reason of each."""
    explained = []
    for number, node in enumerate(tensor.dims):
        of_leaves = [leaf.blocked or reasons.get(leaf) for leaf in list_leaves(node)]
        explained += [f"dimension {number}: {reason}" for reason in of_leaves if reason][:1]
    return "; ".join(explained) or "no dimension of more than one element"


def _list_refusals(
    forward: ForwardTrace, reasons: dict[AxisNode, str], matrices: list[str]
) -> Iterable[str]:
    """Yield lines for a user; only axes of matrices that stay whole are worth one."""
    for name, place in forward.unknown.items():
        yield f"no rule for the operator {name} (first in {place}): what it touches stays whole"
    for note in dict.fromkeys(forward.assumed):
        yield (
            f"values were made up for {note}: a branch that depends on them may not have been seen"
        )
    for axis, reason in reasons.items():
        names = [name for name in matrices if have_axis(forward.parameters[name].dims, axis)]
        if names:
            shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
            yield f"an axis of {axis.size} in {shown}: {reason}"

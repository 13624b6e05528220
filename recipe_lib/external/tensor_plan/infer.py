"""Infer a tensor-parallel plan of a model from the operators of one forward, not from names.

`infer_plan` is called by `apply_plan`, `proven_plan` and `transformers_models`. An axis is a
dimension, or a factor of one, that several tensors share, such as the heads of an attention. A
boundary is an exchange between ranks at one argument or result of a torch function call: `enter`
(the gradient is summed), `leave` (the result is summed) and others. A plan has both as data.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable
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
    make_pattern,
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
    other_inputs: Iterable[dict[str, Any]] = (),
    unsteady: Collection[str] = (),
    uncut: Collection[str] = (),
) -> ShardingPlan:
    """Return the tensor-parallel plan of a model, which is not changed.

    model: any language model, on the meta device or another one. inputs: keyword arguments of its
    forward, on the same device, token ids `[b, s]` first. size: number of ranks; only axes that
    they can share are cut; 0: all axes that some number of ranks can share. tokens: ranks share
    tokens as well (sequence parallel), in modules where that is possible. other_inputs: further
    sets of keyword arguments that training uses, such as for packed rows; modules whose calls
    differ for these share no tokens. unsteady: paths of modules that share none either. uncut:
    parameters that stay whole, as names with `*` for numbers. Raises SetupError where the forward
    cannot be traced.
    """
    forward = trace(model, inputs, find_rule)
    # And modules whose calls differ between the inputs.
    unsteady = frozenset(unsteady)
    if tokens:
        for further_inputs in other_inputs:
            # The class may not take these inputs at all.
            with contextlib.suppress(SetupError):
                unsteady |= forward.find_differing_modules(trace(model, further_inputs, find_rule))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    candidates, reasons = _follow_axes(forward, shapes, size, uncut)
    # Where two axes would cut the same parameters, the first is taken: rather one without
    # collectives inside norms, then one without segments to gather, then the one with more elements
    # in its parameters.
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
        # Without a refused axis another one may cut the same parameters: choose again.
        reasons.update({candidate.node: reason for candidate, reason in refused.items()})
        candidates = [candidate for candidate in candidates if candidate not in refused]
    passed_over = [candidate.node for candidate in candidates if candidate not in chosen]
    reasons |= dict.fromkeys(passed_over, "its parameters are cut along a larger axis")
    order = {name: index for index, name in enumerate(shapes)}
    chosen.sort(key=lambda axis: min(order[name] for name in axis.parameter_dims))
    shared = (
        share_tokens(forward, sharded_axes=chosen, rewrites=divisions, unsteady=unsteady)
        if tokens and chosen
        else SharedTokens()
    )
    return _build_plan(forward, shapes, chosen, divisions=divisions, reasons=reasons, shared=shared)


def _choose_disjoint(candidates: list[ShardedAxis]) -> list[ShardedAxis]:
    """Return the axes that cut no parameter of an earlier one, in their order."""
    chosen: list[ShardedAxis] = []
    cut_parameters: set[str] = set()
    for candidate in candidates:
        if not cut_parameters & set(candidate.parameter_dims):
            chosen.append(candidate)
            cut_parameters |= set(candidate.parameter_dims)
    return chosen


def _follow_axes(
    forward: ForwardTrace, shapes: dict[str, tuple[int, ...]], size: int, uncut: Collection[str]
) -> tuple[list[ShardedAxis], dict[AxisNode, str]]:
    """Follow every axis of a parameter through the trace.

    shapes: of the parameters, by name. Returns the axes that can be cut, and for others the reason
    why not. Axes that an operator has blocked are in neither: their nodes have the reason. size,
    uncut: as of `infer_plan`.
    """
    reasons: dict[AxisNode, str] = {}
    dims_by_axis: dict[AxisNode, dict[str, list[int]]] = {}
    for name in shapes:
        for dim, node in enumerate(forward.parameters[name].dims):
            for leaf in dict.fromkeys(list_leaves(node)):
                dims_by_axis.setdefault(leaf, {}).setdefault(name, []).append(dim)
    unblocked = {axis: dims for axis, dims in dims_by_axis.items() if not axis.blocked}
    records = _group_records(forward, set(unblocked))
    followed = []
    for axis, dims_by_name in unblocked.items():
        try:
            if whole := [name for name in dims_by_name if make_pattern(name) in uncut]:
                raise Refusal(f"ranks could not share {whole[0]} as it is stored")
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
    """Return by name the one dimension of each parameter that has the axis.

    Raises Refusal if `size` ranks cannot share it, or a parameter has it in two dimensions.
    """
    whole_lengths: list[int] = []
    for name, dims in dims_by_name.items():
        if len(dims) > 1:
            raise Refusal(f"two dimensions of {name} have the axis")
        segments = find_segments(forward.parameters[name].dims[dims[0]], axis)
        if segments is None:
            raise Refusal(f"a part of {name} does not have the axis")
        whole_lengths += [length for length, is_whole in segments if is_whole]
    # Segments that all ranks compute with are held in parts and gathered: the parts must be equal.
    if size and any(length % size for length in whole_lengths):
        raise Refusal(
            f"{size} ranks cannot share parts of {', '.join(dims_by_name)} that all of them need"
        )
    # Only the axis of the logits may be cut unevenly: the last rank has fewer rows of vocabulary.
    is_output = any(axis in map(find, output.dims) for output in forward.outputs)
    if size and axis.size % size and not is_output:
        raise Refusal(f"{size} ranks cannot share its {axis.size} steps")
    return {name: dims[0] for name, dims in dims_by_name.items()}


def _group_records(
    forward: ForwardTrace, axes: set[AxisNode]
) -> dict[AxisNode, list[OperatorCall]]:
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
    """Build the plan of the axes that ranks share.

    shapes: of the parameters, by name. chosen: the axes. divisions: the integer attributes that
    ranks divide, such as `num_heads`. reasons: why other axes stay whole. shared: where ranks share
    tokens.
    """
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
    partial_parameters, mixed_parameters = _find_partial_parameters(forward, chosen, shared.uses)
    pending = _list_pending(forward, chosen=chosen, token_uses=shared.uses, mixed=mixed_parameters)
    # Biases that are added once, after the sum of their product over ranks.
    late_biases = {name for _, boundary in pending for name in boundary.bias_parameters}
    argument_tensors = chain.from_iterable(call.tensors for call in forward.calls)
    used_parameters = set[str]().union(*(tensor.parameters for tensor in argument_tensors))
    sharded_plans = _plan_sharded_parameters(forward, shapes, chosen)
    unused = dict.fromkeys(shapes.keys() - used_parameters, "the forward does not use it")
    parameters = [
        sharded_plans.get(name)
        or ParameterPlan(
            name,
            shape,
            "replicated",
            gradient="partial" if name in partial_parameters else "full",
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
    # Sizes that divide this divide everything that ranks cut evenly.
    common_divisor = math.gcd(
        *(axis.size for axis in axes if not axis.vocabulary),
        *(rewrite.value - rewrite.kept for rewrite in rewrites),
        *(plan.segments[index] for plan in parameters for index in plan.whole),
    )
    sizes = [size for size in range(2, common_divisor + 1) if common_divisor % size == 0]
    boundaries = (
        *_build_boundaries(forward, pending, shared),
        *_build_token_boundaries(forward, shared),
    )
    legal = _find_legal_sizes(forward, chosen, divisions, sizes=sizes, boundaries=boundaries)
    replicated_matrices = [
        name
        for name, shape in shapes.items()
        if name in used_parameters and name not in sharded_plans and len(shape) > 1
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
    """Return the numbers of ranks for which comparisons in the forward come out as in the trace.

    sizes: the numbers to try. A comparison after the last exchange of its module may differ.
    """
    # Module -> its last call with an exchange: later entries of the dict replace earlier ones.
    last_calls = {
        boundary.module: boundary.call
        for boundary in sorted(boundaries, key=lambda boundary: boundary.call)
    }
    return tuple(
        size
        for size in sizes
        if is_control_flow_same(
            forward, chosen, divisions, size=size, last_boundary_calls=last_calls
        )
    )


def _plan_sharded_parameters(
    forward: ForwardTrace, shapes: dict[str, tuple[int, ...]], chosen: list[ShardedAxis]
) -> dict[str, ParameterPlan]:
    contractions = chain.from_iterable(record.contractions for record in forward.records)
    product_parameters = set[str]().union(
        *(left.parameters | right.parameters for _, left, right in contractions)
    )
    plans = {}
    for number, sharded in enumerate(chosen):
        for name, dim in sharded.parameter_dims.items():
            segments = find_segments(forward.parameters[name].dims[dim], sharded.node) or []
            role = "column" if name in product_parameters else "sharded"
            if sharded.vocabulary:
                role = "vocabulary"
            elif name in sharded.row_parameters:
                role = "row"
            cut_length = sum(length for length, is_whole in segments if not is_whole)
            plans[name] = ParameterPlan(
                name,
                shapes[name],
                role,
                dim=dim,
                axis=number,
                segments=tuple(length for length, _ in segments),
                whole=tuple(index for index, (_, is_whole) in enumerate(segments) if is_whole),
                unit=cut_length // sharded.node.size,
                gradient="sharded",
            )
    return plans


def _find_partial_parameters(
    forward: ForwardTrace, chosen: list[ShardedAxis], token_uses: set[Place]
) -> tuple[set[str], set[str]]:
    """Find the replicated parameters whose gradient on a rank is a part of a sum over ranks.

    Returns two sets of names: those whose uses are all of that kind, and those with other uses too.
    token_uses: arguments that meet a rank's tokens alone, which is such a use.
    """
    boundaries = [boundary for sharded in chosen for boundary in sharded.replicated_uses]
    partial_uses = {(boundary.call, boundary.place) for boundary in boundaries} | token_uses
    partial = {name for boundary in boundaries for name in boundary.parameters}
    full: set[str] = set()
    for index, call in enumerate(forward.calls):
        makes_activation = any(output.is_activation for output in call.outputs)
        for place, tensor, needs_gradient in call.arguments:
            if (index, place) in token_uses:
                partial |= tensor.parameters
            is_parameter_use = needs_gradient and makes_activation and not tensor.is_activation
            if is_parameter_use and (index, place) not in partial_uses:
                full |= tensor.parameters
    return partial - full, partial & full


def _list_pending(
    forward: ForwardTrace, chosen: list[ShardedAxis], token_uses: set[Place], mixed: set[str]
) -> list[tuple[int, PendingBoundary]]:
    """Return (number of the axis, boundary) of all exchanges but those of tokens; -1: no axis.

    token_uses, mixed: an argument and the second result of `_find_partial_parameters`.
    """
    axes = list(enumerate(chosen))
    pending = [(number, boundary) for number, sharded in axes for boundary in sharded.boundaries]
    pending += [
        (number, boundary)
        for number, sharded in axes
        for boundary in sharded.replicated_uses
        if boundary.parameters & mixed
    ]
    # A parameter with a full gradient at other uses: at these its partial gradient is summed.
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
    activations: dict[TracedTensor, int] = {}
    # By (kind, module, call, place), so that a module that runs twice has them once.
    boundaries: dict[tuple[str, str, int, str], Boundary] = {}
    exchanges = [("slice", item) for item in shared.slices.items()]
    exchanges += [("gather", item) for item in shared.gathers.items()]
    for kind, ((index, place), (tensor, layout)) in sorted(
        exchanges, key=lambda exchange: exchange[1][0]
    ):
        call = forward.calls[index]
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
                width=math.prod(node.size for node in tensor.dims) // forward.num_tokens,
            ),
        )
    return tuple(boundaries.values())


def _build_boundaries(
    forward: ForwardTrace, pending: list[tuple[int, PendingBoundary]], shared: SharedTokens
) -> tuple[Boundary, ...]:
    """Build the boundaries of the axes, in the order of the forward.

    A tensor that enters at all its uses enters once, where it is made, so that its gradient is
    summed once. pending: from `_list_pending`.
    """
    exchanges = {**shared.gathers, **shared.slices}
    # Calls and tensors with an exchange of tokens: an `enter` is not moved past one.
    exchanged = {index for index, _ in exchanges} | {tensor for tensor, _ in exchanges.values()}
    entering: Uses = {}
    for _, boundary in pending:
        if boundary.kind == "enter":
            entering.setdefault(boundary.tensor, set()).add((boundary.call, boundary.place))
    users: Uses = {}
    for index, call in enumerate(forward.calls):
        for place, tensor, needs_gradient in call.arguments:
            if needs_gradient:
                users.setdefault(tensor, set()).add((index, place))
    # (kind, call, place) -> axes, parameters, and the first boundary there.
    merged: dict[tuple[str, int, str], tuple[set[int], set[str], PendingBoundary]] = {}
    activations = {tensor: index for index, tensor in enumerate(entering)}
    runs = Counter(call.key for call in forward.calls)
    for axis, boundary in pending:
        index = boundary.call
        place = boundary.place
        names = set(boundary.parameters)
        if boundary.kind == "enter":
            tensor = boundary.tensor
            names.update(*(argument.parameters for argument in forward.calls[index].tensors))
            # Move it to an earlier call, as long as all later uses of the tensor need it to enter.
            while tensor not in forward.outputs:
                giving_index = _find_giving_call(
                    forward, tensor=tensor, users=users, entering=entering
                )
                if giving_index is None or runs[forward.calls[giving_index].key] != 1:
                    break
                module = forward.calls[index].key.module
                if index != boundary.call and forward.calls[giving_index].key.module != module:
                    break
                index = giving_index
                place = name_output(forward.calls[index], tensor)
                moved = _find_moved(forward.calls[index], users)
                if moved is None or {index, tensor, moved} & exchanged:
                    break
                tensor = moved
                entering = entering | {moved: users[moved]}
        axes, parameters, _ = merged.setdefault(
            (boundary.kind, index, place), (set(), set(), boundary)
        )
        axes.update((axis,) if axis >= 0 else ())
        parameters.update(names)
    # By (kind, module, call, place), so that a module that runs twice has them once.
    boundaries: dict[tuple[str, str, int, str], Boundary] = {}
    for (kind, index, place), (axes, parameters, boundary) in sorted(
        merged.items(), key=lambda item: item[0][1]
    ):
        call = forward.calls[index]
        # A `cut` sums gradients alone, so it sums nothing where its tensor needs none.
        needs_gradient = any(
            argument.needs_gradient for argument in call.arguments if argument.place == place
        )
        is_summed = kind != "assemble" and (kind != "cut" or needs_gradient)
        num_elements = math.prod(node.size for node in boundary.tensor.dims)
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
            width=num_elements // forward.num_tokens if is_summed and forward.num_tokens else 0,
        )
    return tuple(boundaries.values())


Uses = dict[TracedTensor, set[Place]]  # a tensor -> (index of a call, argument) that reads it


def _find_moved(call: FunctionCall, users: Uses) -> TracedTensor | None:
    """Return the input of a call that only moves elements (views, copies); None for other calls.

    The gradient of the input can then be summed over ranks in place of the output's. An exchange
    early in a module is better: calls before it are counted, and their number may differ with and
    without a mask. None also where another call uses the input.
    """
    if not call.records or any(record.name not in MOVES for record in call.records):
        return None
    inputs = [argument.tensor for argument in call.arguments if argument.needs_gradient]
    if not len(call.outputs) == len(call.arguments) == len(inputs) == 1:
        return None
    return inputs[0] if inputs[0].is_activation and len(users[inputs[0]]) == 1 else None


def _find_giving_call(
    forward: ForwardTrace, tensor: TracedTensor, users: Uses, entering: Uses
) -> int | None:
    """Return the index of the last call that returns a tensor, if all later uses need it to enter.

    Calls that return their input count too. None if a later use does not need that, or an earlier
    call reads the tensor.
    """
    calls = range(max(tensor.call_index, 0), max(users[tensor])[0] + 1)
    giving_calls = [index for index in calls if tensor in forward.calls[index].outputs]
    if (
        not giving_calls
        or {user for user in users[tensor] if user[0] > giving_calls[-1]} != entering[tensor]
    ):
        return None
    if any(index not in giving_calls for index, _ in users[tensor] - entering[tensor]):
        return None
    return giving_calls[-1]


def _explain_replicated(tensor: TracedTensor, reasons: dict[AxisNode, str]) -> str:
    """Explain why a parameter stays whole, by the first reason of each of its dimensions."""
    explained = []
    for dim, node in enumerate(tensor.dims):
        leaf_reasons = [leaf.blocked or reasons.get(leaf) for leaf in list_leaves(node)]
        explained += [f"dimension {dim}: {reason}" for reason in leaf_reasons if reason][:1]
    return "; ".join(explained) or "no dimension of more than one element"


def _list_refusals(
    forward: ForwardTrace, reasons: dict[AxisNode, str], matrices: list[str]
) -> Iterable[str]:
    """Yield lines for a user that say what stays whole, and why.

    reasons: of axes that are not cut; a line is made for those that one of `matrices` has.
    matrices: names of the replicated parameters of two and more dimensions.
    """
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

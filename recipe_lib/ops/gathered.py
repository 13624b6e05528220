"""Compute linears over tokens that are divided among the ranks of a tensor-parallel group.

`parallel.tensor_forwards` calls these in place of `F.linear`: `gather_linears` for column-parallel
linears of one input (q, k, v, or gate and up), which need all tokens; `gated_linear` for the
row-parallel down projection, whose partial sums `scatter` adds up. No gathered tokens and no
products are kept for backward. Other modules use the collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import make_operator, should_fuse
from recipe_lib.ops.mlp import (
    ACTIVATIONS,
    compute_gated_product,
    compute_gated_product_gradients,
)
from recipe_lib.ops.norm import offset_rms_norm, rms_norm

# Shapes: hidden states are `[n, d]`, this rank's n of the N = n t tokens of a micro-batch on t
# ranks, in their order. A linear i of several has o_i output channels on this rank; a gated MLP has
# f inner channels on this rank.
#
# Eager, each function is an autograd.Function. Under torch.compile it is an opaque operator with a
# backward of its own, as the partitioner would keep every gathered tensor that it sees.

# torch's collectives that return a tensor to wait for; the compiler knows them as operators.
_FUNCTIONAL = torch.ops._c10d_functional
# kind -> function. By name, as the schema of an operator can hold a text but no function.
NORMS = {"rms": rms_norm, "offset": offset_rms_norm}


@dataclass(frozen=True)
class Group:
    """The ranks among which a model's matrices, or a sequence's tokens, are divided."""

    name: str  # of the process group, as torch's functional collectives take it
    size: int  # number of ranks
    rank: int  # of this process in the group
    # Entries of the vocabulary, columns of the logits, on each rank but the last ones, which may
    # have fewer; 0: all ranks have the same number.
    columns: int = 0


@dataclass(frozen=True)
class NormedFrom:
    """The source of normed tokens: they are `NORMS[kind](stream, weight, eps)`."""

    stream: Tensor  # hidden states before the norm (the residual stream), [n, d]
    weight: Tensor  # of the norm, [d]
    eps: float  # of the norm, added to the mean of squares
    kind: str  # a key of `NORMS`


# Which gradients of several linears are needed: (of their input, of each weight, of each bias).
_NeededGradients = tuple[bool, Sequence[bool], Sequence[bool]]
# (`NormedFrom.kind`, `NormedFrom.eps`)
_Norm = tuple[str, float]


def start_gather(shard: Tensor, group: Group) -> Tensor:
    """Start to gather `[n, ...]` of each rank to `[N, ...]` on all; pass the result to `wait`."""
    return cast(
        Tensor, _FUNCTIONAL.all_gather_into_tensor(shard.contiguous(), group.size, group.name)
    )


def start_scatter(partial: Tensor, group: Group) -> Tensor:
    """Start a reduce-scatter of all ranks' `[N, ...]` to `[n, ...]`; pass the result to `wait`."""
    return cast(
        Tensor,
        _FUNCTIONAL.reduce_scatter_tensor(partial.contiguous(), "sum", group.size, group.name),
    )


def all_reduce(tensor: Tensor, operation: str, group: Group) -> Tensor:
    """Return the reduction of a tensor over the group, in new memory.

    operation: `sum` or `max`.
    """
    return wait(_FUNCTIONAL.all_reduce(tensor.contiguous(), operation, group.name))


def wait(tensor: Tensor) -> Tensor:
    """Wait for a collective that was started, and return its result."""
    return cast(Tensor, _FUNCTIONAL.wait_tensor(tensor))


def gather(shard: Tensor, group: Group) -> Tensor:
    """Gather `[n, ...]` of each rank to `[N, ...]` on all; nothing is saved for backward.

    Its backward is a reduce-scatter.
    """
    return cast(Tensor, _Exchange.apply(shard, group, True))


def scatter(partial: Tensor, group: Group) -> Tensor:
    """Reduce-scatter all ranks' `[N, ...]` to `[n, ...]`; nothing is saved for backward.

    Its backward is a gather. It is an autograd node of its own: the recomputation of a checkpointed
    layer ends at the last tensor that backward needs, and so can end before this collective.
    """
    return cast(Tensor, _Exchange.apply(partial, group, False))


def gather_linears(
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    *,
    keep_gathered: bool = False,
    normed: NormedFrom | None = None,
) -> list[Tensor]:
    """Gather tokens `[n, d]` once, and return the results `[N, o_i]` of several linears of them.

    shard: this rank's tokens `[n, d]`. weights: `[o_i, d]`. biases: `[o_i]`, None for a linear
    without one. keep_gathered: True: save the gathered tokens for backward; False: save `shard` and
    gather again. normed: what `shard` was computed from, if a norm has made it; it is saved in
    place of `shard`, and costs no memory, since the norm saves it anyway.

    If no weight needs a gradient, no tokens are saved. Otherwise the weights' gradients may be
    deferred, see `ops.deferred`: a pipeline's schedule computes them after backward.
    """
    if torch.compiler.is_compiling():
        source = [normed.stream, normed.weight] if normed else []
        norm = (normed.kind, normed.eps) if normed else ("", 0.0)
        settings = (*norm, keep_gathered, group.name, group.size, group.rank)
        # Operators take no lists with None, and no objects of Python: `_run_gather_linears` has
        # their parameters.
        present_biases = [bias for bias in biases if bias is not None]
        has_bias = [bias is not None for bias in biases]
        tensors = (shard, list(weights), present_biases, has_bias, source)
        return list(_GATHER(*tensors, *settings)[:-1])
    options = (group, keep_gathered, normed, len(weights))
    return list(_GatherLinears.apply(shard, *options, *weights, *biases))


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Return `(activation(gate) * up) @ weight.T`, `[N, d]`; no product is saved for backward.

    gate, up: `[N, f]`. weight: `[d, f]`. activation: a key of `recipe_lib.ops.mlp.ACTIVATIONS`.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, _GATED(gate, up, weight, activation))
    return cast(Tensor, _GatedLinear.apply(gate, up, weight, activation))


def _gather(shard: Tensor, group: Group) -> Tensor:
    """Gather as `gather` does, inside an autograd node."""
    return wait(start_gather(shard, group))


def _scatter(partial: Tensor, group: Group) -> Tensor:
    """Reduce-scatter as `scatter` does, inside an autograd node."""
    return wait(start_scatter(partial, group))


# Not a `GradientNode`, the autograd.Function that `ops.fused_kernels` has for all other nodes:
# compiled, with selective checkpointing, that one makes another view in the second forward than in
# the first one (torch 2.13).
class _Exchange(torch.autograd.Function):
    """A gather whose backward scatters, or a scatter whose backward gathers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group = group
        ctx.gathers = gathers
        return _gather(tensor, group) if gathers else _scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exchange = _scatter if ctx.gathers else _gather
        return exchange(gradients[0], ctx.group), None, None


# The eager node of `gather_linears`. `tensors` are `num_linears` weights, then as many biases, so
# that they are inputs 5 and following.
class _GatherLinears(torch.autograd.Function):
    """Gather tokens and multiply them by several weights; backward gathers them again."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        group: Group,
        keep_gathered: bool,
        normed: NormedFrom | None,
        num_linears: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = cast(tuple[Tensor, ...], tensors[:num_linears])
        biases = tensors[num_linears:]
        tokens = wait(start_gather(shard, group))
        norm: _Norm | None = None
        source: tuple[Tensor, ...] = ()  # what backward computes the gathered tokens from
        if any(ctx.needs_input_grad[5 : 5 + num_linears]):
            source = (tokens,) if keep_gathered else (shard,)
            if normed and not keep_gathered:
                source = (normed.stream, normed.weight)
                norm = (normed.kind, normed.eps)
        ctx.save_for_backward(*weights, *source)
        ctx.settings = (num_linears, group, keep_gathered, norm)
        # Held besides: what checkpointing gives back for a saved tensor is not the parameter, to
        # which a deferred gradient is added.
        ctx.parameters = weights if deferred.is_split_backward_enabled() else ()
        return tuple(
            F.linear(tokens, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_linears, group, is_gathered, norm = ctx.settings
        saved = list(ctx.saved_tensors)
        weights, source = saved[:num_linears], saved[num_linears:]
        del saved  # else the gathered tokens would live as long as this function
        wants_input = ctx.needs_input_grad[0]
        wants_weights = ctx.needs_input_grad[5 : 5 + num_linears]
        wants_biases = ctx.needs_input_grad[5 + num_linears :]
        compute = partial(
            compute_linear_gradients,
            gradients,
            weights,
            norm=norm,
            is_gathered=is_gathered,
            group=group,
        )
        if deferred.is_deferring() and source:
            no_gradients = [False] * num_linears
            # Detached: until the deferred part, their graph would keep tensors of earlier layers.
            source = [tensor.detach() for tensor in source]
            if norm is not None:
                # FSDP frees the norm's weight with the layer, before the deferred part reads it.
                source[1] = source[1].clone()

            def compute_weight_gradients() -> list[Tensor | None]:
                return compute(source=source, needed=(False, wants_weights, no_gradients))[1]

            deferred.defer_gradients(ctx.parameters, compute_weight_gradients)
            computed = compute(source=[], needed=(wants_input, no_gradients, wants_biases))
        else:
            computed = compute(source=source, needed=(wants_input, wants_weights, wants_biases))
        shard_grad, weight_grads, bias_grads = computed
        return (shard_grad, None, None, None, None, *weight_grads, *bias_grads)


def compute_linear_gradients(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    source: list[Tensor],
    norm: _Norm | None,
    is_gathered: bool,
    group: Group,
    needed: _NeededGradients,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of `gather_linears`' shard, weights and biases; None: not needed.

    gradients: of the linears' results `[N, o_i]`. source: what forward saved of the tokens, empty
    if no weight needs a gradient. With `is_gathered` it is [gathered tokens], which are taken out
    of the list, so that they are freed here; with `norm` [stream, the norm's weight]; else [shard].
    needed: (of the shard, of each weight, of each bias).
    """
    wants_input, wants_weights, wants_biases = needed
    # The gather overlaps with the matmuls for the input's gradient, whose reduce-scatter overlaps
    # with the matmuls for the weights'.
    tokens: Tensor | None = None
    if source and is_gathered:
        tokens = source.pop()
    elif source:
        tokens = start_gather(
            NORMS[norm[0]](source[0], source[1], norm[1]) if norm else source[0], group
        )
    shard_grad: Tensor | None = None
    if wants_input:
        # Summed as autograd would, the last linear first, so that its bits are the same.
        total: Tensor | None = None
        for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
            linear_grad = gradient @ weight
            total = linear_grad if total is None else total.add_(linear_grad)
            del linear_grad  # else two of `[N, d]` would be alive while the next one is computed
        assert total is not None
        shard_grad = start_scatter(total, group)
        del total
    if tokens is not None and not is_gathered:
        tokens = wait(tokens)
    weight_grads = [
        gradient.t() @ tokens if is_needed and tokens is not None else None
        for gradient, is_needed in zip(gradients, wants_weights, strict=True)
    ]
    del tokens
    bias_grads = [
        gradient.sum(dim=0) if is_needed else None
        for gradient, is_needed in zip(gradients, wants_biases, strict=True)
    ]
    return None if shard_grad is None else wait(shard_grad), weight_grads, bias_grads


# The eager node of `gated_linear`.
class _GatedLinear(torch.autograd.Function):
    """Multiply a gated product by a weight, and compute the product again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        ctx.parameter = weight if deferred.is_split_backward_enabled() else None
        return compute_gated_linear(gate, up=up, weight=weight, activation=activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        compute = partial(compute_gated_linear_gradients, activation=ctx.activation)
        wants_input = any(ctx.needs_input_grad[:2])
        wants_weight = ctx.needs_input_grad[2]
        if wants_weight and deferred.is_deferring():
            wants_weight = False
            # Detached: until the deferred part, their graph would keep tensors of earlier layers.
            gate, up = map(torch.detach, (gate, up))
            deferred.defer_gradients(
                [ctx.parameter],
                lambda: compute(out_grad, gate, up, weight, wants_input=False, wants_weight=True)[
                    2:
                ],
            )
        computed = compute(
            out_grad, gate, up, weight, wants_input=wants_input, wants_weight=wants_weight
        )
        return (*computed, None)


def compute_gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Return the result of `gated_linear`; differentiated by autograd it would save the product."""
    return F.linear(compute_gated_product(gate, up, activation), weight)


def compute_gated_linear_gradients(
    out_grad: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    *,
    activation: str,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of gate, up and weight, None where not needed.

    The product `activation(gate) * up` is computed again. wants_input: gate and up need gradients.
    """
    weight_grad: Tensor | None = None
    if should_fuse(out_grad.device):
        if wants_weight:
            weight_grad = out_grad.t() @ compute_gated_product(gate, up, activation)
        if not wants_input:
            return None, None, weight_grad
        gate_grad, up_grad = compute_gated_product_gradients(
            out_grad @ weight, gate, up, activation
        )
        return gate_grad, up_grad, weight_grad
    # Not fused: the activation is computed once for both gradients, and tensors are overwritten.
    activate, activate_backward = ACTIVATIONS[activation]
    activated = activate(gate)
    if wants_weight:
        weight_grad = out_grad.t() @ (activated * up)
    if not wants_input:
        return None, None, weight_grad
    product_grad = out_grad @ weight
    up_grad = product_grad * activated
    del activated
    return activate_backward(product_grad.mul_(up), gate), up_grad, weight_grad


# The same functions as operators that torch.compile does not look into.
#
# If the compiler saw inside, it would take backward's gather of the shard for forward's, whose
# result the partitioner would then keep for backward; and it would keep what backward computes
# again. As operators with a backward operator of their own, they save what the eager nodes save.
# Their parameters are of the types that torch.library can write as a schema: `kind` and `eps` are
# a `_Norm` (kind "" for None), `name`, `size` and `rank` a `Group`.


def _run_gather_linears(
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_biases: Sequence[bool],
    source: Sequence[Tensor],
    kind: str,
    eps: float,
    keep_gathered: bool,
    name: str,
    size: int,
    rank: int,
) -> list[Tensor]:
    """Return the linears' results, then the gathered tokens (without `keep_gathered` `[0]`).

    biases: of the linears for which `has_biases` is True. source, kind, eps: for backward alone.
    """
    tokens = wait(start_gather(shard, Group(name, size, rank)))
    remaining_biases = iter(biases)
    outputs = [
        F.linear(tokens, weight, next(remaining_biases) if has_bias else None)
        for weight, has_bias in zip(weights, has_biases, strict=True)
    ]
    # A tensor without elements, as an operator always returns as many.
    return [*outputs, tokens if keep_gathered else tokens.new_empty(0)]


def _run_gather_linears_backward(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    source: Sequence[Tensor],
    kind: str,
    eps: float,
    is_gathered: bool,
    wants_input: bool,
    wants_weight: Sequence[bool],
    wants_bias: Sequence[bool],
    name: str,
    size: int,
    rank: int,
) -> list[Tensor]:
    """Return the gradients that are needed, in this order: of the shard, the weights, the biases.

    source: see `compute_linear_gradients`.
    """
    shard_grad, weight_grads, bias_grads = compute_linear_gradients(
        gradients,
        weights,
        source=list(source),
        norm=(kind, eps) if kind else None,
        is_gathered=is_gathered,
        group=Group(name, size, rank),
        needed=(wants_input, wants_weight, wants_bias),
    )
    return [grad for grad in (shard_grad, *weight_grads, *bias_grads) if grad is not None]


def _set_up_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shard, weights, biases, has_biases, source, kind, eps, keep_gathered, *group = inputs
    trained_biases = iter([bias.requires_grad for bias in biases])
    wants_weights = [weight.requires_grad for weight in weights]
    wants_biases = [has_bias and next(trained_biases) for has_bias in has_biases]
    ctx.needed = (shard.requires_grad, wants_weights, wants_biases)
    saved_source: list[Tensor] = []
    if any(wants_weights):
        saved_source = [output[-1]] if keep_gathered else list(source) or [shard]
    ctx.save_for_backward(*weights, *saved_source)
    ctx.inputs = (len(weights), has_biases, len(source))
    ctx.group = group  # [name, size, rank]
    # Kind "" where what was saved needs no norm in backward.
    ctx.settings = (
        kind if saved_source and source and not keep_gathered else "",
        eps,
        keep_gathered,
    )


def _differentiate_gather(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)  # once: a checkpoint that recomputes them gives them once
    num_linears, has_biases, num_sources = ctx.inputs
    weights, source = saved[:num_linears], saved[num_linears:]
    wants_input, wants_weights, wants_biases = ctx.needed
    # The last output is the gathered tokens, which nobody else reads.
    tensors = (list(gradients[:-1]), weights, source)
    returned = iter(_GATHER_BACKWARD(*tensors, *ctx.settings, *ctx.needed, *ctx.group))
    shard_grad = next(returned) if wants_input else None
    weight_grads = [next(returned) if is_needed else None for is_needed in wants_weights]
    bias_grads = [
        next(returned) if is_needed else None
        for is_needed, has_bias in zip(wants_biases, has_biases, strict=True)
        if has_bias
    ]
    return (shard_grad, weight_grads, bias_grads, None, [None] * num_sources, *[None] * 6)


_GATHER: Any = make_operator("gather_linears", _run_gather_linears)
_GATHER_BACKWARD = make_operator("gather_linears_backward", _run_gather_linears_backward)
_GATHER.register_autograd(_differentiate_gather, setup_context=_set_up_gather)


def _run_gated_linear_backward(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    activation: str,
    wants_input: bool,
    wants_weight: bool,
) -> list[Tensor]:
    """Return the gradients that are needed: those of gate and up together, that of the weight."""
    gradients = compute_gated_linear_gradients(
        gradient,
        gate=gate,
        up=up,
        weight=weight,
        activation=activation,
        wants_input=wants_input,
        wants_weight=wants_weight,
    )
    return [grad for grad in gradients if grad is not None]


def _set_up_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, ctx.activation = inputs
    ctx.wants = (gate.requires_grad or up.requires_grad, weight.requires_grad)
    ctx.save_for_backward(gate, up, weight)


def _differentiate_gated(ctx: Any, out_grad: Tensor) -> tuple[Any, ...]:
    wants_input, wants_weight = ctx.wants
    returned = iter(_GATED_BACKWARD(out_grad, *ctx.saved_tensors, ctx.activation, *ctx.wants))
    input_grads = (next(returned), next(returned)) if wants_input else (None, None)
    return (*input_grads, next(returned) if wants_weight else None, None)


_GATED: Any = make_operator("gated_linear", compute_gated_linear)
_GATED_BACKWARD = make_operator("gated_linear_backward", _run_gated_linear_backward)
_GATED.register_autograd(_differentiate_gated, setup_context=_set_up_gated)

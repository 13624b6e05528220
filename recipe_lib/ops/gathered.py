"""Compute linears over tokens that are divided among the ranks of a tensor-parallel group.

`parallel.tensor_forwards` calls these in place of `F.linear`: `gather_linears` for column-parallel
linears of one input (q, k, v, or gate and up), which need all tokens, and keep none that they
gather for backward; `scatter` adds up the partial sums of row-parallel linears. Other modules use
the collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import make_operator

# Shapes: hidden states are `[n, d]`, this rank's n of the N = n t tokens of a micro-batch on t
# ranks, in their order. A linear i of several has o_i output channels on this rank.
#
# Eager, each function is an autograd.Function. Under torch.compile it is an opaque operator with a
# backward of its own, as the partitioner would keep every gathered tensor that it sees.

# torch's collectives that return a tensor to wait for; the compiler knows them as operators.
_FUNCTIONAL = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks among which a model's matrices, or a sequence's tokens, are divided."""

    name: str  # of the process group, as torch's functional collectives take it
    size: int  # number of ranks
    rank: int  # of this process in the group
    # Entries of the vocabulary, columns of the logits, on each rank but the last ones, which may
    # have fewer; 0: all ranks have the same number.
    columns: int = 0


# Which gradients of several linears are needed: (of their input, of each weight, of each bias).
_NeededGradients = tuple[bool, Sequence[bool], Sequence[bool]]


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
) -> list[Tensor]:
    """Gather tokens `[n, d]` once, and return the results `[N, o_i]` of several linears of them.

    shard: this rank's tokens `[n, d]`. weights: `[o_i, d]`. biases: `[o_i]`, None for a linear
    without one. keep_gathered: True: save the gathered tokens for backward; False: save `shard` and
    gather again.

    If no weight needs a gradient, no tokens are saved. Otherwise the weights' gradients may be
    deferred, see `ops.deferred`: a pipeline's schedule computes them after backward.
    """
    if torch.compiler.is_compiling():
        settings = (keep_gathered, group.name, group.size, group.rank)
        # Operators take no lists with None, and no objects of Python: `_run_gather_linears` has
        # their parameters.
        present_biases = [bias for bias in biases if bias is not None]
        has_bias = [bias is not None for bias in biases]
        tensors = (shard, list(weights), present_biases, has_bias)
        return list(_GATHER(*tensors, *settings)[:-1])
    options = (group, keep_gathered, len(weights))
    return list(_GatherLinears.apply(shard, *options, *weights, *biases))


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
# that they are inputs 4 and following.
class _GatherLinears(torch.autograd.Function):
    """Gather tokens and multiply them by several weights; backward gathers them again."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        group: Group,
        keep_gathered: bool,
        num_linears: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = cast(tuple[Tensor, ...], tensors[:num_linears])
        biases = tensors[num_linears:]
        tokens = wait(start_gather(shard, group))
        source: tuple[Tensor, ...] = ()  # what backward takes the gathered tokens from
        if any(ctx.needs_input_grad[4 : 4 + num_linears]):
            source = (tokens,) if keep_gathered else (shard,)
        ctx.save_for_backward(*weights, *source)
        ctx.settings = (num_linears, group, keep_gathered)
        # Held besides: what checkpointing gives back for a saved tensor is not the parameter, to
        # which a deferred gradient is added.
        ctx.parameters = weights if deferred.is_split_backward_enabled() else ()
        return tuple(
            F.linear(tokens, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_linears, group, is_gathered = ctx.settings
        saved = list(ctx.saved_tensors)
        weights, source = saved[:num_linears], saved[num_linears:]
        del saved  # else the gathered tokens would live as long as this function
        wants_input = ctx.needs_input_grad[0]
        wants_weights = ctx.needs_input_grad[4 : 4 + num_linears]
        wants_biases = ctx.needs_input_grad[4 + num_linears :]
        compute = partial(
            compute_linear_gradients,
            gradients,
            weights,
            is_gathered=is_gathered,
            group=group,
        )
        if deferred.is_deferring() and source:
            no_gradients = [False] * num_linears
            # Detached: until the deferred part, their graph would keep tensors of earlier layers.
            source = [tensor.detach() for tensor in source]

            def compute_weight_gradients() -> list[Tensor | None]:
                return compute(source=source, needed=(False, wants_weights, no_gradients))[1]

            deferred.defer_gradients(ctx.parameters, compute_weight_gradients)
            computed = compute(source=[], needed=(wants_input, no_gradients, wants_biases))
        else:
            computed = compute(source=source, needed=(wants_input, wants_weights, wants_biases))
        shard_grad, weight_grads, bias_grads = computed
        return (shard_grad, None, None, None, *weight_grads, *bias_grads)


def compute_linear_gradients(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    source: list[Tensor],
    is_gathered: bool,
    group: Group,
    needed: _NeededGradients,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of `gather_linears`' shard, weights and biases; None: not needed.

    gradients: of the linears' results `[N, o_i]`. source: what forward saved of the tokens, empty
    if no weight needs a gradient. With `is_gathered` it is [gathered tokens], which are taken out
    of the list, so that they are freed here; else [shard].
    needed: (of the shard, of each weight, of each bias).
    """
    wants_input, wants_weights, wants_biases = needed
    # The gather overlaps with the matmuls for the input's gradient, whose reduce-scatter overlaps
    # with the matmuls for the weights'.
    tokens: Tensor | None = None
    if source and is_gathered:
        tokens = source.pop()
    elif source:
        tokens = start_gather(source[0], group)
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


# The same functions as operators that torch.compile does not look into.
#
# If the compiler saw inside, it would take backward's gather of the shard for forward's, whose
# result the partitioner would then keep for backward. As operators with a backward operator of
# their own, they save what the eager nodes save. Their parameters are of the types that
# torch.library can write as a schema: `name`, `size` and `rank` are a `Group`.


def _run_gather_linears(
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_biases: Sequence[bool],
    keep_gathered: bool,
    name: str,
    size: int,
    rank: int,
) -> list[Tensor]:
    """Return the linears' results, then the gathered tokens (without `keep_gathered` `[0]`).

    biases: of the linears for which `has_biases` is True.
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
        is_gathered=is_gathered,
        group=Group(name, size, rank),
        needed=(wants_input, wants_weight, wants_bias),
    )
    return [grad for grad in (shard_grad, *weight_grads, *bias_grads) if grad is not None]


def _set_up_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shard, weights, biases, has_biases, keep_gathered, *group = inputs
    trained_biases = iter([bias.requires_grad for bias in biases])
    wants_weights = [weight.requires_grad for weight in weights]
    wants_biases = [has_bias and next(trained_biases) for has_bias in has_biases]
    ctx.needed = (shard.requires_grad, wants_weights, wants_biases)
    saved_source: list[Tensor] = []
    if any(wants_weights):
        saved_source = [output[-1]] if keep_gathered else [shard]
    ctx.save_for_backward(*weights, *saved_source)
    ctx.inputs = (len(weights), has_biases)
    ctx.group = group  # [name, size, rank]
    ctx.is_gathered = keep_gathered


def _differentiate_gather(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)  # once: a checkpoint that recomputes them gives them once
    num_linears, has_biases = ctx.inputs
    weights, source = saved[:num_linears], saved[num_linears:]
    wants_input, wants_weights, wants_biases = ctx.needed
    # The last output is the gathered tokens, which nobody else reads.
    tensors = (list(gradients[:-1]), weights, source)
    returned = iter(_GATHER_BACKWARD(*tensors, ctx.is_gathered, *ctx.needed, *ctx.group))
    shard_grad = next(returned) if wants_input else None
    weight_grads = [next(returned) if is_needed else None for is_needed in wants_weights]
    bias_grads = [
        next(returned) if is_needed else None
        for is_needed, has_bias in zip(wants_biases, has_biases, strict=True)
        if has_bias
    ]
    return (shard_grad, weight_grads, bias_grads, *[None] * 5)


_GATHER: Any = make_operator("gather_linears", _run_gather_linears)
_GATHER_BACKWARD = make_operator("gather_linears_backward", _run_gather_linears_backward)
_GATHER.register_autograd(_differentiate_gather, setup_context=_set_up_gather)

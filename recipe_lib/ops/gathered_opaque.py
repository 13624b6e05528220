"""The functions of `recipe_lib.ops.gathered` as operators that torch.compile does not look into.

Inlined, the second gather of the same shard would be taken for the first, whose result the partitioner then keeps for
backward; and what backward makes again would be kept too. As operators with a backward operator of their own, they keep
what the eager nodes keep.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.gathered import Group, gated_backward, gated_forward, linears_backward, start_gather, wait


@torch.library.custom_op("tune_recipes::gather_linears", mutates_args=())
def gather_linears(
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[bool],
    source: Sequence[Tensor],
    kind: str,
    eps: float,
    keep_gathered: bool,
    name: str,
    size: int,
    rank: int,
) -> list[Tensor]:
    """What the linears give, and the gathered tokens, if they are to be kept (else nothing `[0]`).

    biases: of those linears that are `biased`.
    """
    whole = wait(start_gather(shard, Group(name, size, rank)))
    bias = iter(biases)
    found = [F.linear(whole, weight, next(bias) if has else None) for weight, has in zip(weights, biased, strict=True)]
    return [*found, whole if keep_gathered else whole.new_empty(0)]


@gather_linears.register_fake
def _(shard: Tensor, weights: Any, biases: Any, biased: Any, source: Any, kind: str, eps: float, keep_gathered: bool,
      name: str, size: int, rank: int) -> list[Tensor]:  # fmt: skip
    rows = shard.shape[0] * size
    found = [shard.new_empty(rows, weight.shape[0]) for weight in weights]
    return [*found, shard.new_empty(rows, shard.shape[1]) if keep_gathered else shard.new_empty(0)]


@torch.library.custom_op("tune_recipes::gather_linears_backward", mutates_args=())
def gather_linears_backward(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    source: Sequence[Tensor],
    kind: str,
    eps: float,
    whole_kept: bool,
    wants_input: bool,
    wants_weight: Sequence[bool],
    wants_bias: Sequence[bool],
    name: str,
    size: int,
    rank: int,
) -> list[Tensor]:
    """The gradients that are wanted: of the shard, the weights, the biases."""
    norm = (kind, eps) if kind else None
    wants = (wants_input, wants_weight, wants_bias)
    shard, *others = linears_backward(
        gradients, weights, list(source), norm, whole_kept, Group(name, size, rank), wants
    )
    return [grad for grad in (shard, *others[0], *others[1]) if grad is not None]


@gather_linears_backward.register_fake
def _(gradients: Any, weights: Any, source: Any, kind: str, eps: float, whole_kept: bool, wants_input: bool,
      wants_weight: Any, wants_bias: Any, name: str, size: int, rank: int) -> list[Tensor]:  # fmt: skip
    first = gradients[0]
    found = [first.new_empty(first.shape[0] // size, weights[0].shape[1])] if wants_input else []
    found += [torch.empty_like(weight) for weight, wanted in zip(weights, wants_weight, strict=True) if wanted]
    return found + [grad.new_empty(grad.shape[1]) for grad, wanted in zip(gradients, wants_bias, strict=True) if wanted]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shard, weights, biases, biased, source, kind, eps, keep_gathered, *group = inputs
    wanted = iter([bias.requires_grad for bias in biases])
    wants_bias = [has and next(wanted) for has in biased]
    ctx.wants, ctx.biased = (shard.requires_grad, [weight.requires_grad for weight in weights], wants_bias), biased
    kept: list[Tensor] = []
    if any(ctx.wants[1]):
        kept = [output[-1]] if keep_gathered else list(source) or [shard]
    ctx.save_for_backward(*weights, *kept)
    ctx.count, ctx.sources, ctx.group = len(weights), len(source), group
    ctx.settings = (kind if kept and source and not keep_gathered else "", eps, keep_gathered)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    count, (wants_input, wants_weight, wants_bias) = ctx.count, ctx.wants
    saved = list(ctx.saved_tensors)  # once: a checkpoint that recomputes them gives them once
    weights, source = saved[:count], saved[count:]
    found = iter(
        torch.ops.tune_recipes.gather_linears_backward(
            list(gradients[:-1]), weights, source, *ctx.settings, wants_input, wants_weight, wants_bias, *ctx.group
        )
    )
    shard = next(found) if wants_input else None
    weight_grads = [next(found) if wanted else None for wanted in wants_weight]
    bias_grads = [next(found) if wanted else None for wanted, has in zip(wants_bias, ctx.biased, strict=True) if has]
    return (shard, weight_grads, bias_grads, None, [None] * ctx.sources, *[None] * 6)


gather_linears.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("tune_recipes::gated_linear", mutates_args=())
def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """`(activation(gate) * up) @ weight.T`."""
    return gated_forward(gate, up, weight, activation)


@gated_linear.register_fake
def _(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape[0], weight.shape[0])


@torch.library.custom_op("tune_recipes::gated_linear_backward", mutates_args=())
def gated_linear_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, weight: Tensor, activation: str, wants_input: bool, wants_weight: bool
) -> list[Tensor]:
    """The gradients that are wanted: of gate and up, of the weight."""
    found = gated_backward(gradient, gate, up, weight, activation, wants_input, wants_weight)
    return [grad for grad in found if grad is not None]


@gated_linear_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor, weight: Tensor, activation: str, wants_input: bool,
      wants_weight: bool) -> list[Tensor]:  # fmt: skip
    found = [torch.empty_like(gate), torch.empty_like(up)] if wants_input else []
    return found + ([torch.empty_like(weight)] if wants_weight else [])


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, ctx.activation = inputs
    ctx.wants = (gate.requires_grad or up.requires_grad, weight.requires_grad)
    ctx.save_for_backward(gate, up, weight)


def _gated_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    wants_input, wants_weight = ctx.wants
    found = iter(
        torch.ops.tune_recipes.gated_linear_backward(
            gradient, *ctx.saved_tensors, ctx.activation, wants_input, wants_weight
        )
    )
    inputs = (next(found), next(found)) if wants_input else (None, None)
    return (*inputs, next(found) if wants_weight else None, None)


gated_linear.register_autograd(_gated_backward, setup_context=_keep_gated)

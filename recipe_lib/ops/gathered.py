"""Linears over tokens that are shared out among the ranks of a tensor-parallel group, and what goes
with them.

Hidden states are `[n, d]`: this rank's n of the N = n t tokens of a micro-batch, in their order. A
group of linears that is cut by its outputs (q, k, v, or gate and up) needs all N of them: they are
gathered once, and what is kept for backward is this rank's n, or what they are made of, which
backward gathers again. A linear that is cut by its inputs leaves partial sums for all N tokens; a
reduce-scatter gives each rank its n.

Eager, each function is an autograd node, whose memory lives as long as autograd says. Under
torch.compile it is an opaque operator with a backward of its own: the partitioner would keep every
gathered tensor that it sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import GradientNode, make_operator, should_fuse
from recipe_lib.ops.gated import ACTIVATIONS, compute_gated_product, compute_gated_product_gradients
from recipe_lib.ops.norm import offset_rms_norm, rms_norm

_FUNCTIONAL = torch.ops._c10d_functional
NORMS = {"rms": rms_norm, "offset": offset_rms_norm}


@dataclass(frozen=True)
class Group:
    """The ranks that share a model's matrices. name: of the process group. rank: this one's place
    among `size`.

    columns: tokens of the vocabulary on each rank but the last ones, which may have fewer; 0: as
    many on all.
    """

    name: str
    size: int
    rank: int
    columns: int = 0


@dataclass(frozen=True)
class NormedFrom:
    """What normed tokens are made of: `NORMS[kind](stream [n, d], weight [d], eps)`."""

    stream: Tensor
    weight: Tensor
    eps: float
    kind: str


def start_gather(shard: Tensor, group: Group) -> Tensor:
    """`[n, ...]` of each rank to `[N, ...]` on all, to be waited for."""
    return cast(
        Tensor, _FUNCTIONAL.all_gather_into_tensor(shard.contiguous(), group.size, group.name)
    )


def start_scatter(partial: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `[N, ...]`, to each its `[n, ...]` of it, to be waited for."""
    return cast(
        Tensor,
        _FUNCTIONAL.reduce_scatter_tensor(partial.contiguous(), "sum", group.size, group.name),
    )


def all_reduce(tensor: Tensor, operation: str, group: Group) -> Tensor:
    """The `sum` or `max` over the group, in new memory."""
    return wait(_FUNCTIONAL.all_reduce(tensor.contiguous(), operation, group.name))


def wait(tensor: Tensor) -> Tensor:
    """The tensor, when it is there."""
    return cast(Tensor, _FUNCTIONAL.wait_tensor(tensor))


def gather(shard: Tensor, group: Group) -> Tensor:
    """`[n, ...]` of each rank to `[N, ...]` on all; its backward sums, and gives each rank its
    part. Keeps nothing.
    """
    return cast(Tensor, _Exchange.apply(shard, group, True))


def scatter(partial: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `[N, ...]`, to each its `[n, ...]`; its backward gathers. Keeps
    nothing.

    A separate autograd node, so that a checkpointed layer's second forward can end before it.
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
    """Tokens `[n, d]` of each rank, gathered once, through several linears `[o_i, d]`: `[N, o_i]`
    each.

    Kept for backward is nothing where no weight wants a gradient; else the gathered tokens
    (`keep_gathered`), or what is gathered again: the shard, or, with `normed`, what it was normed
    from, which others keep anyway.
    """
    if torch.compiler.is_compiling():
        source = (normed.stream, normed.weight) if normed else ()
        norm = (normed.kind, normed.eps) if normed else ("", 0.0)
        settings = (*norm, keep_gathered, group.name, group.size, group.rank)
        there, biased = (
            [bias for bias in biases if bias is not None],
            [bias is not None for bias in biases],
        )
        found = _GATHER(shard, list(weights), there, biased, list(source), *settings)
        return list(found[:-1])
    return list(
        _GatherLinears.apply(shard, group, keep_gathered, normed, len(weights), *weights, *biases)
    )


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """`(activation(gate) * up) @ weight.T` of gate and up `[N, f]` and weight `[d, f]`; keeps no
    more than these.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, _GATED(gate, up, weight, activation))
    return cast(Tensor, _GatedLinear.apply(gate, up, weight, activation))


def _gather(shard: Tensor, group: Group) -> Tensor:
    return wait(start_gather(shard, group))


def _scatter(partial: Tensor, group: Group) -> Tensor:
    return wait(start_scatter(partial, group))


# Not a `GradientNode`: compiled, with selective checkpointing, that one makes another view in the
# second forward than in the first one (torch 2.13).
class _Exchange(torch.autograd.Function):
    """A gather whose backward scatters, or a scatter whose backward gathers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group = group
        ctx.gathers = gathers
        return _gather(tensor, group) if gathers else _scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = _scatter if ctx.gathers else _gather
        return back(gradients[0], ctx.group), None, None


class _GatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        group: Group,
        keep_gathered: bool,
        normed: NormedFrom | None,
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = cast(tuple[Tensor, ...], tensors[:count]), tensors[count:]
        whole = wait(start_gather(shard, group))
        ctx.group, ctx.count, ctx.whole_kept, ctx.norm = group, count, keep_gathered, None
        source: tuple[Tensor, ...] = ()
        if any(ctx.needs_input_grad[5 : 5 + count]):
            source = (whole,) if keep_gathered else (shard,)
            if normed and not keep_gathered:
                source, ctx.norm = (normed.stream, normed.weight), (normed.kind, normed.eps)
        ctx.save_for_backward(*weights, *source)
        ctx.parameters = weights if deferred.is_split_backward_enabled() else ()
        return tuple(
            F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count, wanted = ctx.count, ctx.needs_input_grad
        saved = list(ctx.saved_tensors)
        weights, source = saved[:count], saved[count:]
        del saved
        wants = (wanted[0], wanted[5 : 5 + count], wanted[5 + count :])
        if deferred.is_deferring() and source:
            source = [
                one.detach() for one in source
            ]  # their graph would keep what came before until then
            if (
                ctx.norm is not None
            ):  # FSDP frees the norm's weight with the layer, before that is read
                source[1] = source[1].clone()
            settings = (ctx.norm, ctx.whole_kept, ctx.group)
            none = [False] * count

            def weight_gradients() -> list[Tensor | None]:
                return compute_linear_gradients(
                    gradients, weights, source, *settings, (False, wants[1], none)
                )[1]

            deferred.defer_gradients(ctx.parameters, weight_gradients)
            found = compute_linear_gradients(
                gradients, weights, [], *settings, (wants[0], none, wants[2])
            )
        else:
            found = compute_linear_gradients(
                gradients, weights, source, ctx.norm, ctx.whole_kept, ctx.group, wants
            )
        return (found[0], None, None, None, None, *found[1], *found[2])


def compute_linear_gradients(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    source: list[Tensor],
    norm: tuple[str, float] | None,
    whole_kept: bool,
    group: Group,
    wants: tuple[bool, Sequence[bool], Sequence[bool]],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Gradients of shard, weights and biases, as `wants` asks for. source: what was kept, if any
    weight wants one.

    The gather overlaps with the products for the input's gradient, its reduce-scatter with those
    for the weights'. The input's gradient is summed as autograd would, the last linear first, so
    that its bits are the same.
    """
    wants_input, wants_weight, wants_bias = wants
    whole: Tensor | None = None
    if source and whole_kept:
        whole = source.pop()
    elif source:
        whole = start_gather(
            NORMS[norm[0]](source[0], source[1], norm[1]) if norm else source[0], group
        )
    shard_grad: Tensor | None = None
    if wants_input:
        total: Tensor | None = None
        for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
            part = gradient @ weight
            total = part if total is None else total.add_(part)
            del part
        assert total is not None
        shard_grad = start_scatter(total, group)
        del total
    if whole is not None and not whole_kept:
        whole = wait(whole)
    weight_grads: list[Tensor | None] = []
    for gradient, wanted in zip(gradients, wants_weight, strict=True):
        weight_grads.append(gradient.t() @ whole if wanted and whole is not None else None)
    del whole
    bias_grads = [
        g.sum(dim=0) if wanted else None for g, wanted in zip(gradients, wants_bias, strict=True)
    ]
    return None if shard_grad is None else wait(shard_grad), weight_grads, bias_grads


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        ctx.parameter = weight if deferred.is_split_backward_enabled() else None
        return compute_gated_linear(gate, up, weight, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wants_input, wants_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        gate, up, weight = ctx.saved_tensors
        activation = ctx.activation
        if wants_weight and deferred.is_deferring():
            wants_weight = False
            gate, up = (
                gate.detach(),
                up.detach(),
            )  # their graph would keep what came before until then
            deferred.defer_gradients(
                [ctx.parameter],
                lambda: compute_gated_linear_gradients(
                    gradients[0], gate, up, weight, activation, False, True
                )[2:],
            )
        return (
            *compute_gated_linear_gradients(
                gradients[0], gate, up, weight, activation, wants_input, wants_weight
            ),
            None,
        )


def compute_gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """As `gated_linear`, whose forward it is."""
    return F.linear(compute_gated_product(gate, up, activation), weight)


def compute_gated_linear_gradients(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    activation: str,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of gate, up and weight; the product is made again."""
    if should_fuse(gradient.device):
        weight_grad = (
            gradient.t() @ compute_gated_product(gate, up, activation) if wants_weight else None
        )
        if not wants_input:
            return None, None, weight_grad
        return (
            *compute_gated_product_gradients(gradient @ weight, gate, up, activation),
            weight_grad,
        )
    activate, activate_backward = ACTIVATIONS[activation]
    activated = activate(gate)
    weight_grad = gradient.t() @ (activated * up) if wants_weight else None
    if not wants_input:
        return None, None, weight_grad
    product_grad = gradient @ weight
    up_grad = product_grad * activated
    del activated
    return activate_backward(product_grad.mul_(up), gate), up_grad, weight_grad


# The same as operators that torch.compile does not look into.
#
# Inlined, the second gather of the same shard would be taken for the first, whose result the
# partitioner then keeps for backward; and what backward makes again would be kept too. As operators
# with a backward operator of their own, they keep what the eager nodes keep.


def _gather_linears(
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
    found = [
        F.linear(whole, weight, next(bias) if has else None)
        for weight, has in zip(weights, biased, strict=True)
    ]
    return [*found, whole if keep_gathered else whole.new_empty(0)]


def _gather_linears_backward(
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
    shard, *others = compute_linear_gradients(
        gradients, weights, list(source), norm, whole_kept, Group(name, size, rank), wants
    )
    return [grad for grad in (shard, *others[0], *others[1]) if grad is not None]


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shard, weights, biases, biased, source, kind, eps, keep_gathered, *group = inputs
    wanted = iter([bias.requires_grad for bias in biases])
    wants_bias = [has and next(wanted) for has in biased]
    ctx.wants, ctx.biased = (
        (shard.requires_grad, [weight.requires_grad for weight in weights], wants_bias),
        biased,
    )
    kept: list[Tensor] = []
    if any(ctx.wants[1]):
        kept = [output[-1]] if keep_gathered else list(source) or [shard]
    ctx.save_for_backward(*weights, *kept)
    ctx.count, ctx.sources, ctx.group = len(weights), len(source), group
    ctx.settings = (kind if kept and source and not keep_gathered else "", eps, keep_gathered)


def _differentiate_gather(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    count, (wants_input, wants_weight, wants_bias) = ctx.count, ctx.wants
    saved = list(ctx.saved_tensors)  # once: a checkpoint that recomputes them gives them once
    weights, source = saved[:count], saved[count:]
    found = iter(
        _GATHER_BACKWARD(
            list(gradients[:-1]),
            weights,
            source,
            *ctx.settings,
            wants_input,
            wants_weight,
            wants_bias,
            *ctx.group,
        )
    )
    shard = next(found) if wants_input else None
    weight_grads = [next(found) if wanted else None for wanted in wants_weight]
    bias_grads = [
        next(found) if wanted else None
        for wanted, has in zip(wants_bias, ctx.biased, strict=True)
        if has
    ]
    return (shard, weight_grads, bias_grads, None, [None] * ctx.sources, *[None] * 6)


_GATHER: Any = make_operator("gather_linears", _gather_linears)
_GATHER_BACKWARD = make_operator("gather_linears_backward", _gather_linears_backward)
_GATHER.register_autograd(_differentiate_gather, setup_context=_keep_gather)


def _gated_linear_backward(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    activation: str,
    wants_input: bool,
    wants_weight: bool,
) -> list[Tensor]:
    """The gradients that are wanted: of gate and up, of the weight."""
    found = compute_gated_linear_gradients(
        gradient, gate, up, weight, activation, wants_input, wants_weight
    )
    return [grad for grad in found if grad is not None]


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, ctx.activation = inputs
    ctx.wants = (gate.requires_grad or up.requires_grad, weight.requires_grad)
    ctx.save_for_backward(gate, up, weight)


def _differentiate_gated(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    wants_input, wants_weight = ctx.wants
    found = iter(
        _GATED_BACKWARD(gradient, *ctx.saved_tensors, ctx.activation, wants_input, wants_weight)
    )
    inputs = (next(found), next(found)) if wants_input else (None, None)
    return (*inputs, next(found) if wants_weight else None, None)


_GATED: Any = make_operator("gated_linear", compute_gated_linear)
_GATED_BACKWARD = make_operator("gated_linear_backward", _gated_linear_backward)
_GATED.register_autograd(_differentiate_gated, setup_context=_keep_gated)


# Sequences that ranks share: all heads of some tokens for all tokens of some heads, and back (arXiv
# 2309.14509).
#
# b rows, c ranks; n of the s = n c tokens of each row are this rank's, in their order. Between
# layers a rank has its n tokens. Attention wants all of them, but no head wants another: one all-
# to-all gives each rank the s tokens of 1/c of the heads, one more gives it all heads of its n
# tokens again. Backward is the same the other way round. Nothing is kept.


def shard_tokens(values: Tensor, group: Group) -> Tensor:
    """This rank's `[b, n, ...]` of `[b, s, ...]`. ValueError for rows that cannot be divided
    evenly.
    """
    if values.shape[1] % group.size:
        raise ValueError(
            f"rows of {values.shape[1]} tokens cannot be shared evenly among {group.size} ranks"
        )
    count = values.shape[1] // group.size
    return values.narrow(1, group.rank * count, count)


def exchange_for_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q `[b, h, n, e]`, k and v `[b, k, n, e]` and sinks `[h]` of all heads: of this rank's heads,
    `[b, h / c, s, e]`.

    Where ranks are more than kv heads, several have the same one.
    """
    heads = k.shape[1]
    if heads % group.size:
        k, v = (tensor.repeat_interleave(group.size // heads, dim=1) for tensor in (k, v))
    q, k, v = cast(
        tuple[Tensor, Tensor, Tensor],
        GradientNode.apply(_send_heads, _send_tokens, (3,), q, k, v, group),
    )
    return q, k, v, None if sinks is None else sinks.chunk(group.size)[group.rank]


def exchange_for_tokens(attended: Tensor, *, group: Group) -> Tensor:
    """`[b, h / c, s, e]` of this rank's heads: `[b, h, n, e]` of its tokens."""
    (found,) = cast(
        tuple[Tensor], GradientNode.apply(_send_tokens, _send_heads, (1,), attended, group)
    )
    return found


def sum_over_ranks(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `[]`, which all have then. Backward is that of one sum, to which each
    rank gave its part: the gradient as it is, whatever number of ranks goes backward from it.
    """
    return cast(
        Tensor, GradientNode.apply(_sum_over_group, lambda gradient: gradient, (), part, group)
    )


def gather_tokens(part: Tensor, group: Group) -> Tensor:
    """`[b, n, ...]` of each rank as `[b, s, ...]` on all; backward gives each rank its part of the
    gradient.
    """
    return cast(Tensor, GradientNode.apply(_gather_rows, _shard_gradient, (1,), part, group))


def _send_blocks(blocks: Tensor, group: Group) -> Tensor:
    """Block i of `[c, ...]` to rank i, and what the ranks sent here in their order."""
    splits = [1] * group.size
    return wait(torch.ops._c10d_functional.all_to_all_single(blocks, splits, splits, group.name))


def _sum_over_group(part: Tensor, group: Group) -> Tensor:
    return all_reduce(part, "sum", group)


def _gather_rows(part: Tensor, group: Group) -> Tensor:
    return _gather(part.unsqueeze(0), group).transpose(0, 1).flatten(1, 2)


def _shard_gradient(gradient: Tensor, group: Group) -> Tensor:
    return shard_tokens(gradient, group).contiguous()


def _send_heads(*parts_and_group: Any) -> tuple[Tensor, ...]:
    """`[b, h_i, n, e]` each to `[b, h_i / c, s, e]`, in one exchange."""
    *parts, group = parts_and_group
    blocks = torch.cat(
        [part.unflatten(1, (group.size, -1)).permute(1, 0, 3, 2, 4) for part in parts], dim=3
    )
    found = _send_blocks(blocks, group)  # [c, b, n, the heads of all parts, e]
    del blocks
    split = found.split([part.shape[1] // group.size for part in parts], dim=3)
    return tuple(part.transpose(0, 1).flatten(1, 2).transpose(1, 2) for part in split)


def _send_tokens(*parts_and_group: Any) -> tuple[Tensor, ...]:
    """`[b, h_i / c, s, e]` each to `[b, h_i, n, e]`, in one exchange."""
    *parts, group = parts_and_group
    blocks = torch.cat(
        [part.unflatten(2, (group.size, -1)).permute(2, 0, 3, 1, 4) for part in parts], dim=3
    )
    found = _send_blocks(blocks, group)  # [c, b, n, heads of rank 0 .. c - 1 of all parts, e]
    del blocks
    split = found.split([part.shape[1] for part in parts], dim=3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in split)

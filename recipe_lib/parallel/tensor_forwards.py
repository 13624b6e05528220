"""The forwards of a decoder on the ranks of a tensor-parallel group, in place of its modules' own.

A layer takes and gives this rank's tokens `[n, d]`. Attention, MLP and mixture get the stream and
the norm before them, so that the stream is what is kept for backward, and not the normed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters.layers import (
    AdaptedExpertModule,
    AdaptedMatrix,
    AdaptedRouter,
    QuantizedExperts,
    cast_linear,
)
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.models.decoder import (
    MLP,
    Attention,
    DecoderLayer,
    Norm,
    OutputHead,
    SandwichLayer,
    ScoreHead,
    WidthNorm,
)
from recipe_lib.models.mixture import (
    ExpertLinear,
    Experts,
    Mixture,
    compute_scored_bias,
    gather_row_biases,
    wide_linear,
)
from recipe_lib.ops.attention import AttentionInfo, RealTokens
from recipe_lib.ops.deferred import linear as linear_of
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.gathered import (
    Group,
    NormedFrom,
    gated_linear,
    gather,
    gather_linears,
    scatter,
    start_gather,
    wait,
)
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss
from recipe_lib.ops.mlp import (
    Groups,
    gated_activation,
    group_tokens,
    grouped_linear,
    order_by_expert,
    scored_product,
    sum_choices,
)
from recipe_lib.ops.norm import offset_rms_norm
from recipe_lib.ops.rope import apply_rotation
from recipe_lib.ops.sequence_shards import gather_tokens

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sharing:
    """The settings by which the ranks of a group share attention and MLP."""

    group: Group
    keep_gathered: bool  # gathered tokens stay for backward
    kv_head: int | None  # the only one this rank computes; None: its share


def run_norm(module: Norm, hidden: Tensor) -> Tensor:
    """Return hidden `[n, d]`, normed, by this rank's weight of those that all ranks have."""
    return module.norm(hidden, get_local(module.weight), module.eps)


def run_width_norm(norm: WidthNorm, group: Group, heads: Tensor) -> Tensor:
    """Return heads `[..., h / t, e]` normed over the channels of all heads, of all ranks."""
    flat = heads.flatten(-2)
    weight = get_local(norm.weight)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    rows = wide.square().sum(dim=-1, keepdim=True).flatten(0, -2)
    # An all-reduce, in backward too.
    total = gather(scatter(rows, group), group).view(*flat.shape[:-1], 1)
    width = flat.shape[-1]
    part = weight[group.rank * width : (group.rank + 1) * width]
    normed = (wide * torch.rsqrt(total / weight.shape[0] + norm.eps)).to(flat.dtype)
    return (normed * part).view_as(heads)


def run_layer(
    layer: DecoderLayer, hidden: Tensor, rotation: Rotation, info: AttentionInfo, cache: None = None
) -> Tensor:
    """Return the stream `[n, d]` after this layer."""
    hidden = hidden + layer.self_attn(hidden, rotation, info, layer.input_layernorm)
    return hidden + layer.mlp(hidden, layer.post_attention_layernorm, info.real)


def run_sandwich_layer(
    layer: SandwichLayer,
    hidden: Tensor,
    rotation: Rotation,
    info: AttentionInfo,
    cache: None = None,
) -> Tensor:
    """Return the stream `[n, d]` after this layer, whose outputs are normed too."""
    attended = layer.self_attn(hidden, rotation, info, layer.input_layernorm)
    hidden = hidden + layer.post_attention_layernorm(attended)
    return hidden + layer.post_feedforward_layernorm(
        layer.mlp(hidden, layer.pre_feedforward_layernorm, info.real)
    )


def run_attention(
    module: Attention,
    sharing: Sharing,
    hidden: Tensor,
    rotation: Rotation,
    info: AttentionInfo,
    norm: Norm,
) -> Tensor:
    """Return what this rank's tokens attend to, `[n, d]`, of some heads on each rank."""
    rows, length = rotation[0].shape[:2]
    projected = _run_column_parallel(
        [module.q_proj, module.k_proj, module.v_proj],
        hidden=hidden,
        norm=norm,
        sharing=sharing,
        head_width=module.head_width,
    )
    # The number of heads from it, since for -1 a compiled layer of dynamic lengths has no number.
    width = module.head_width
    q, k, v = (part.view(rows, length, part.shape[1] // width, width) for part in projected)
    q = apply_rotation(module.clamp(module.q_norm(q)), *rotation).transpose(1, 2)
    k = apply_rotation(module.clamp(module.k_norm(k)), *rotation).transpose(1, 2)
    v = module.clamp(v).transpose(1, 2)
    q, k, v, sinks = module.to_heads(q, k, v, get_local(module.sinks))
    attended = module.to_tokens(module.attend(q, k, v, info, sinks=sinks))
    return _run_row_parallel(
        module.o_proj, attended.transpose(1, 2).reshape(rows * length, -1), sharing.group
    )


def run_mlp(
    module: MLP,
    sharing: Sharing,
    activation: str,
    hidden: Tensor,
    norm: Norm,
    real: RealTokens | None = None,
) -> Tensor:
    """Return the MLP of this rank's tokens, `[n, d]`, of some channels on each rank."""
    gate, up = _run_column_parallel(
        [module.gate_proj, module.up_proj], hidden=hidden, norm=norm, sharing=sharing
    )
    down = module.down_proj
    if isinstance(down, QuantizedLinear):
        plain = scatter(down.product(gated_activation(gate, up, activation)), sharing.group)
    else:
        plain = scatter(
            gated_linear(gate, up=up, weight=get_local(down.weight), activation=activation),
            sharing.group,
        )
    plain = plain if down.bias is None else plain + get_local(down.bias)
    if not _is_adapted(down):
        return plain
    rate = down.settings.dropout if down.training else 0.0
    if rate or down.settings.dtype != gate.dtype:
        narrow = cast_linear(
            F.dropout(gated_activation(gate, up, activation), rate), get_local(down.lora_A.weight)
        )
    else:
        narrow = gated_linear(
            gate, up=up, weight=get_local(down.lora_A.weight), activation=activation
        )
    return _add_lora_up(down, plain, scatter(narrow, sharing.group))


def _run_column_parallel(
    linears: list[Any], hidden: Tensor, norm: Norm, sharing: Sharing, head_width: int = 0
) -> list[Tensor]:
    """Return normed tokens through column-parallel linears: `[N, o / t]` each.

    head_width: of kv heads that all ranks have.
    """
    group = sharing.group
    shard = norm(hidden)
    take_rows = [_choose_rows(linear, sharing, head_width) for linear in linears]
    if not any(_is_adapted(linear) or isinstance(linear, QuantizedLinear) for linear in linears):
        kind = "offset" if norm.norm is offset_rms_norm else "rms"
        normed = NormedFrom(
            hidden.detach(), weight=get_local(norm.weight).detach(), eps=norm.eps, kind=kind
        )
        weights = [rows(linear.weight) for linear, rows in zip(linears, take_rows, strict=True)]
        biases = [rows(linear.bias) for linear, rows in zip(linears, take_rows, strict=True)]
        return gather_linears(
            shard,
            weights=weights,
            biases=biases,
            group=group,
            keep_gathered=sharing.keep_gathered,
            normed=normed,
        )
    gathered = gather(shard, group)
    plain = [
        _run_frozen(linear, gathered, rows) for linear, rows in zip(linears, take_rows, strict=True)
    ]
    adapted = [linear for linear in linears if _is_adapted(linear)]
    if not adapted:
        return plain
    # The adapters' A work on the n tokens, and their narrow outputs are gathered together.
    narrow = torch.cat([_apply_lora_down(linear, shard) for linear in adapted], dim=-1)
    parts = iter(gather(narrow, group).split([linear.settings.rank for linear in adapted], dim=-1))
    return [
        _add_lora_up(linear, plain=out, narrow=next(parts), rows=rows)
        if _is_adapted(linear)
        else out
        for linear, out, rows in zip(linears, plain, take_rows, strict=True)
    ]


def _run_row_parallel(linear: Any, inputs: Tensor, group: Group) -> Tensor:
    """Return `[N, i / t]` through a row-parallel linear, summed over the group: `[n, d]`."""
    if isinstance(linear, QuantizedLinear):
        plain = scatter(linear.product(inputs), group)
    else:
        plain = scatter(linear_of(inputs, get_local(linear.weight)), group)
    plain = plain if linear.bias is None else plain + get_local(linear.bias)
    if not _is_adapted(linear):
        return plain
    return _add_lora_up(linear, plain, scatter(_apply_lora_down(linear, inputs), group))


def _choose_rows(linear: Any, sharing: Sharing, head_width: int) -> Callable[[Tensor | None], Any]:
    """Return what takes a rank's rows of a parameter.

    They are its part, or, of kv heads that all ranks have, the one that it computes.
    """
    head = sharing.kv_head
    quantized = isinstance(linear, QuantizedLinear)
    num_rows = linear.count_local_rows() if quantized else get_local(linear.weight).shape[0]
    if head is None or num_rows != linear.out_features:
        return get_local
    rows = slice(head * head_width, (head + 1) * head_width)
    return lambda parameter: None if parameter is None else get_local(parameter)[rows]


def _run_frozen(linear: Any, tokens: Tensor, rows: Callable[[Tensor | None], Any]) -> Tensor:
    """Return all tokens through a column-parallel linear, without its adapter."""
    if isinstance(linear, QuantizedLinear):
        return linear.product(tokens, rows(linear.bias))
    return F.linear(tokens, rows(linear.weight), rows(linear.bias))


def _is_adapted(linear: nn.Module) -> bool:
    return isinstance(linear, AdaptedMatrix) and not linear.is_off


def _apply_lora_down(linear: AdaptedMatrix, hidden: Tensor) -> Tensor:
    """Return hidden `[..., in]` through the adapter's A: `[..., r]`."""
    rate = linear.settings.dropout
    dropped = F.dropout(hidden, rate) if rate and linear.training else hidden
    return cast_linear(dropped, get_local(linear.lora_A.weight))


def _add_lora_up(
    linear: AdaptedMatrix,
    plain: Tensor,
    narrow: Tensor,
    rows: Callable[[Tensor | None], Any] = get_local,
) -> Tensor:
    """Return what the frozen part gave plus what the adapter's B makes of `narrow`."""
    update = F.linear(narrow * linear.settings.scaling, rows(linear.lora_B.weight))
    return (plain + update).to(plain.dtype)


def run_embedding(module: Any, group: Group, tokens: Tensor) -> Tensor:
    """Return this rank's part `[n, d]` of the embeddings of tokens `[b, s]`.

    Each rank looks up the tokens whose rows it has, and all of them are summed.
    """
    weight = get_local(module.weight)
    if tokens.numel() % group.size:
        raise ValueError(
            f"{tokens.numel()} tokens cannot be shared evenly among {group.size} ranks"
        )
    rows = tokens.flatten() - group.rank * weight.shape[0]
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    looked_up = F.embedding(rows.masked_fill_(elsewhere, 0), weight)
    hidden = scatter(looked_up.masked_fill(elsewhere.unsqueeze(1), 0), group)
    scale = getattr(module, "scale", None)
    return hidden if scale is None else hidden * hidden.new_full((), scale)


def run_head(
    head: OutputHead,
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """Run `OutputHead.forward` on `[n, d]`.

    Without labels all ranks get all logits `[N, v]`: for short texts.
    """
    weight = get_local(head.weight)
    if labels is None:
        logits = F.linear(gather(hidden, group), weight)
        return head.finish(gather(logits.t(), group).t())
    return run_head_loss(
        head_loss, hidden=hidden, weight=weight, labels=labels, softcap=head.softcap, group=group
    )


def run_score_head(
    head: ScoreHead,
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: object = None,
) -> Tensor:
    """Run `ScoreHead.forward` on `[n, d]`: return the scores of all N tokens, in labels' rows.

    Each rank computes those of its own tokens.
    """
    weight = get_local(head.weight)
    scores = gather_tokens(F.linear(hidden.to(weight.dtype), weight).unsqueeze(0), group).squeeze(0)
    return scores if labels is None else scores.view(*labels.shape, -1)


def restore_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward that gives logits `[N, v]` as `[b, s, v]`."""

    def run(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(tokens, *args, **kwargs)
        is_flat = output.dim() == 2 and output.shape[0] == tokens.numel()
        return output.view(*tokens.shape, -1) if is_flat else output

    return run


def run_mixture(
    module: Mixture, group: Group, hidden: Tensor, norm: nn.Module, real: RealTokens | None = None
) -> Tensor:
    """Return what the experts add to this rank's tokens of the stream `[n, d]`, `[n, d]`.

    real: of all N tokens.
    """
    shard = norm(hidden)
    logits = _compute_router_logits(module.router, shard)
    scores, chosen = module.choose(logits)
    groups = group_tokens(wait(start_gather(chosen, group)), logits.shape[1])
    own_real = None
    if real is not None:
        count = shard.shape[0]
        own_real = real.take(slice(group.rank * count, (group.rank + 1) * count), real.count)
    scores = module.record_choices(logits, scores, groups, real=real, own_real=own_real)
    tokens = gather(shard, group)
    all_scores = gather(scores, group)
    partial, bias = module.experts(tokens, all_scores, groups, scores, chosen)
    summed = scatter(partial, group)
    return summed if bias is None else summed + bias


def _compute_router_logits(router: Any, tokens: Tensor) -> Tensor:
    logits = wide_linear(tokens, get_local(router.weight), get_local(router.bias))
    if not isinstance(router, AdaptedRouter) or router.is_off:
        return logits
    narrow = cast_linear(tokens, get_local(router.lora_A.weight)) * router.settings.scaling
    return (logits + F.linear(narrow, get_local(router.lora_B.weight))).to(logits.dtype)


def run_experts(
    experts: Experts,
    tokens: Tensor,
    scores: Tensor,
    groups: Groups,
    own_scores: Tensor,
    own_chosen: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return what this rank's channels of the experts make of all tokens, `[N, d]`.

    Also what the biases of down add to the rank's own tokens, `[n, d]`. scores: of all tokens.
    own_scores, own_chosen: of the rank's. A call of the module, so that FSDP gathers its weights.
    """
    inner = _run_expert_matrix(experts.gate_up_proj, tokens, groups, of_tokens=True)
    if experts.gate_up_proj.bias is not None:
        inner = inner + gather_row_biases(get_local(experts.gate_up_proj.bias), groups)
    product = scored_product(inner, order_by_expert(scores, groups), experts.gate)
    del inner
    summed = sum_choices(
        _run_expert_matrix(experts.down_proj, product, groups, of_tokens=False), groups
    )
    if experts.down_proj.bias is None:
        return summed, None
    return summed, compute_scored_bias(get_local(experts.down_proj.bias), own_scores, own_chosen)


def _run_expert_matrix(module: Any, rows: Tensor, groups: Groups, *, of_tokens: bool) -> Tensor:
    """Return rows through a rank's part of the experts' matrices, with their adapters."""
    if isinstance(module, QuantizedExperts):
        plain = module.grouped_product(rows, groups, of_tokens)
    else:
        plain = grouped_linear(
            rows, get_local(cast(ExpertLinear, module).weight), groups, of_tokens=of_tokens
        )
    if not isinstance(module, AdaptedExpertModule):
        return plain
    return module.add_update(
        plain,
        rows=rows,
        groups=groups,
        of_tokens=of_tokens,
        lora_a=get_local(module.lora_A.weight),
        lora_b=get_local(module.lora_B.weight),
    )

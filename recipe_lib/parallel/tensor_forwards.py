"""Run a decoder's modules on the ranks of a tensor-parallel group.

`tensor.shard_tensors` puts these functions in place of the modules' own forwards; each takes the
module first. Sizes here: t ranks, N tokens `[b, s]` of a micro-batch, n = N / t of a rank, d the
model's width, o outputs of a linear, r an adapter's rank, h heads of width e, E experts. `gather`
makes `[n, ...]` of each rank `[N, ...]` on all. `scatter` sums `[N, ...]` over ranks to `[n, ...]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters.adapted_product import cast_linear
from recipe_lib.adapters.layers import (
    AdaptedMatrix,
    AdaptedRouter,
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
    gather,
    gather_linears,
    scatter,
    start_gather,
    wait,
)
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss
from recipe_lib.ops.kept_tensors import drop_out, run_cheap
from recipe_lib.ops.mlp import (
    Groups,
    gated_activation,
    group_tokens,
    order_by_expert,
    scored_product,
    sum_choices,
)
from recipe_lib.ops.sequence_shards import gather_tokens

# A layer takes and returns this rank's tokens of the residual stream, `[n, d]`. Attention, MLP and
# mixture get the stream and the norm before them.

Rotation = tuple[Tensor, Tensor]  # cosine and sine, each fp32 [b, s, 1, rotated channels / 2]


@dataclass(frozen=True)
class Sharing:
    """The settings by which the ranks of a group share attention and MLP."""

    group: Group  # name, size and this rank's index
    keep_gathered: bool  # keep gathered tokens for backward; False: gather them again there
    kv_head: int | None  # index of the only kv head of this rank; None: its even share of them


def run_norm(module: Norm, hidden: Tensor) -> Tensor:
    """Return hidden `[n, d]`, normed. All ranks have the whole weight."""
    return run_cheap(module.norm, hidden, get_local(module.weight), module.eps)


def run_width_norm(norm: WidthNorm, group: Group, heads: Tensor) -> Tensor:
    """Return heads `[..., h / t, e]` normed over the channels of the heads of all ranks.

    All ranks have the whole weight `[h e]`, and use the part of their heads.
    """
    flat = heads.flatten(-2)
    weight = get_local(norm.weight)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    square_sums = wide.square().sum(dim=-1, keepdim=True).flatten(0, -2)
    # An all-reduce, in backward too.
    total = gather(scatter(square_sums, group), group).view(*flat.shape[:-1], 1)
    width = flat.shape[-1]
    local_weight = weight[group.rank * width : (group.rank + 1) * width]
    normed = (wide * torch.rsqrt(total / weight.shape[0] + norm.eps)).to(flat.dtype)
    return (normed * local_weight).view_as(heads)


def run_layer(
    layer: DecoderLayer, hidden: Tensor, rotation: Rotation, info: AttentionInfo, cache: None = None
) -> Tensor:
    """Return the stream `[n, d]` after this layer.

    hidden: the stream before it. info: masks and documents of all tokens, and in `info.real` which
    of them are no padding. cache: always None, as in training.
    """
    hidden = hidden.add(
        layer.self_attn(hidden, rotation, info, layer.input_layernorm), alpha=layer.residual_scale
    )
    return hidden.add(
        layer.mlp(hidden, layer.post_attention_layernorm, info.real), alpha=layer.residual_scale
    )


def run_sandwich_layer(
    layer: SandwichLayer,
    hidden: Tensor,
    rotation: Rotation,
    info: AttentionInfo,
    cache: None = None,
) -> Tensor:
    """Return the stream `[n, d]` after a layer that norms attention's and MLP's outputs too.

    The arguments are those of `run_layer`.
    """
    attended = layer.self_attn(hidden, rotation, info, layer.input_layernorm)
    hidden = run_cheap(torch.add, hidden, layer.post_attention_layernorm(attended))
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
    """Return attention's output for this rank's tokens, `[n, d]`.

    Each rank computes some of the heads for all tokens. hidden: the stream `[n, d]` before `norm`.
    info: masks and documents of all tokens.
    """
    rows, length = rotation[0].shape[:2]
    projected = _run_column_parallel(
        [module.q_proj, module.k_proj, module.v_proj],
        hidden=hidden,
        norm=norm,
        sharing=sharing,
        head_width=module.head_width,
    )
    # The number of heads is computed from the width: for a -1 in view(), a layer compiled for
    # dynamic lengths would not know it as a number.
    width = module.head_width
    q, k, v = (part.view(rows, length, part.shape[1] // width, width) for part in projected)
    q = module.rotate(q, module.q_norm, rotation)
    k = module.rotate(k, module.k_norm, rotation)
    v = module.clamp(v).transpose(1, 2)
    # `to_heads` and `to_tokens` exchange tokens for heads under context parallelism.
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
    """Return the MLP's output for this rank's tokens, `[n, d]`.

    Each rank computes some of the channels for all tokens. hidden: the stream `[n, d]` before
    `norm`. real: not read; it is here as in `run_mixture`.
    """
    gate, up = _run_column_parallel(
        [module.gate_proj, module.up_proj], hidden=hidden, norm=norm, sharing=sharing
    )
    down = module.down_proj
    return _run_row_parallel(down, gated_activation(gate, up, activation), sharing.group)


def _run_column_parallel(
    linears: list[Any], hidden: Tensor, norm: Norm, sharing: Sharing, head_width: int = 0
) -> list[Tensor]:
    """Return the outputs of column-parallel linears for all tokens: `[N, o / t]` each.

    hidden: the stream `[n, d]` before `norm`. head_width: channels of a kv head, where linears may
    be k and v projections that every rank has whole; else 0.
    """
    group = sharing.group
    normed_tokens = norm(hidden)  # this rank's, [n, d]
    # By linear, a function that returns this rank's rows of a parameter of it.
    take_rows = [_choose_rows(linear, sharing, head_width) for linear in linears]
    if not any(_is_adapted(linear) or isinstance(linear, QuantizedLinear) for linear in linears):
        weights = [rows(linear.weight) for linear, rows in zip(linears, take_rows, strict=True)]
        biases = [rows(linear.bias) for linear, rows in zip(linears, take_rows, strict=True)]
        return gather_linears(
            normed_tokens,
            weights=weights,
            biases=biases,
            group=group,
            keep_gathered=sharing.keep_gathered,
        )
    gathered = gather(normed_tokens, group)
    # The outputs of the linears without their adapters.
    plain = [
        _run_frozen(linear, gathered, rows) for linear, rows in zip(linears, take_rows, strict=True)
    ]
    adapted = [linear for linear in linears if _is_adapted(linear)]
    if not adapted:
        return plain
    # The adapters' A work on the n tokens, and their outputs `[n, r]` are gathered in one call.
    narrow = torch.cat([_apply_lora_down(linear, normed_tokens) for linear in adapted], dim=-1)
    narrow_parts = iter(
        gather(narrow, group).split([linear.settings.rank for linear in adapted], dim=-1)
    )
    return [
        _add_lora_up(linear, plain=out, narrow=next(narrow_parts), rows=rows)
        if _is_adapted(linear)
        else out
        for linear, out, rows in zip(linears, plain, take_rows, strict=True)
    ]


def _run_row_parallel(linear: Any, inputs: Tensor, group: Group) -> Tensor:
    """Return a row-parallel linear's output for this rank's tokens, `[n, d]`.

    inputs: this rank's channels of all tokens, `[N, i / t]` of i in all.
    """
    if isinstance(linear, QuantizedLinear):
        plain = scatter(linear.product(inputs), group)
    else:
        plain = scatter(linear_of(inputs, get_local(linear.weight)), group)
    # After the sum over the ranks, which would count the bias t times.
    plain = plain if linear.bias is None else plain + get_local(linear.bias)
    if not _is_adapted(linear):
        return plain
    return _add_lora_up(linear, plain, scatter(_apply_lora_down(linear, inputs), group))


def _choose_rows(linear: Any, sharing: Sharing, head_width: int) -> Callable[[Tensor | None], Any]:
    """Return a function that takes this rank's rows of a linear's parameter, or None for None.

    The rows are the rank's shard. Of a k or v projection that every rank has whole, they are those
    of the one head that it computes, of `head_width` rows.
    """
    head = sharing.kv_head
    is_quantized = isinstance(linear, QuantizedLinear)
    num_rows = linear.count_local_rows() if is_quantized else get_local(linear.weight).shape[0]
    if head is None or num_rows != linear.out_features:
        return get_local
    rows = slice(head * head_width, (head + 1) * head_width)
    return lambda parameter: None if parameter is None else get_local(parameter)[rows]


def _run_frozen(linear: Any, tokens: Tensor, rows: Callable[[Tensor | None], Any]) -> Tensor:
    """Return a column-parallel linear's output for all tokens `[N, d]`, without its adapter.

    rows: takes this rank's rows of a parameter, as `_choose_rows` returns it.
    """
    if isinstance(linear, QuantizedLinear):
        return linear.product(tokens, rows(linear.bias))
    return F.linear(tokens, rows(linear.weight), rows(linear.bias))


# is_off: the adapter is switched off, as for a reference model.
def _is_adapted(linear: nn.Module) -> bool:
    return isinstance(linear, AdaptedMatrix) and not linear.is_off


def _apply_lora_down(linear: AdaptedMatrix, hidden: Tensor) -> Tensor:
    """Return the output `[..., r]` of the adapter's A, with dropout before it in training.

    hidden: `[..., i]`, the inputs of the linear that this rank has.
    """
    rate = linear.settings.dropout
    dropped = drop_out(hidden, rate) if rate and linear.training else hidden
    return cast_linear(dropped, get_local(linear.lora_A.weight))


def _add_lora_up(
    linear: AdaptedMatrix,
    plain: Tensor,
    narrow: Tensor,
    rows: Callable[[Tensor | None], Any] = get_local,
) -> Tensor:
    """Return `plain + scaling * narrow B^T`, in the dtype of `plain`.

    plain: the linear's output without its adapter. narrow: the output of the adapter's A,
    `[..., r]`. rows: takes this rank's rows of B, as `_choose_rows` returns it.
    """
    update = F.linear(narrow * linear.settings.scaling, rows(linear.lora_B.weight))
    return (plain + update).to(plain.dtype)


def run_embedding(module: Any, group: Group, tokens: Tensor) -> Tensor:
    """Return the embeddings `[n, d]` of this rank's part of the tokens `[b, s]`.

    A rank has some rows of the matrix. It looks up the tokens of these rows, with zeros for the
    rest, and the ranks' results are summed. Raise ValueError for a number of tokens that the
    group's size does not divide.
    """
    weight = get_local(module.weight)
    if tokens.numel() % group.size:
        raise ValueError(
            f"{tokens.numel()} tokens cannot be shared evenly among {group.size} ranks"
        )
    rows = tokens.flatten() - group.rank * weight.shape[0]
    is_elsewhere = (rows < 0) | (rows >= weight.shape[0])  # the row is another rank's
    looked_up = F.embedding(rows.masked_fill_(is_elsewhere, 0), weight)
    hidden = scatter(looked_up.masked_fill(is_elsewhere.unsqueeze(1), 0), group)
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
    """Run `OutputHead.forward` on this rank's hidden states `[n, d]`; the vocabulary is divided.

    Without labels return the logits `[N, v]` of all tokens and v entries of the vocabulary, on
    every rank: for short texts only. With labels `[b, s]` of all tokens return the loss that
    `head_loss` computes of them.
    """
    weight = get_local(head.weight)
    if labels is None:
        logits = F.linear(gather(hidden, group), weight)
        # `gather` joins the first dimension, and the ranks divide the vocabulary.
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
    """Run `ScoreHead.forward` on this rank's hidden states `[n, d]`.

    Each rank computes the scores of its own tokens. Return those of all tokens, `[N, scores]`, on
    every rank. labels: `[b, s]`, whose values are not read; with them return `[b, s, scores]`.
    head_loss: not read.
    """
    weight = get_local(head.weight)
    scores = gather_tokens(F.linear(hidden.to(weight.dtype), weight).unsqueeze(0), group).squeeze(0)
    return scores if labels is None else scores.view(*labels.shape, -1)


def restore_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a model's forward of tokens `[b, s]` to return its logits `[N, v]` as `[b, s, v]`.

    Other outputs are returned as they are, and with labels all: the output is a loss then.
    """

    def run(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(tokens, *args, **kwargs)
        has_labels = kwargs.get("labels") is not None
        is_flat = output.dim() == 2 and output.shape[0] == tokens.numel()
        return output.view(*tokens.shape, -1) if is_flat and not has_labels else output

    return run


def run_mixture(
    module: Mixture, group: Group, hidden: Tensor, norm: nn.Module, real: RealTokens | None = None
) -> Tensor:
    """Return the experts' output for this rank's tokens, `[n, d]`.

    Each rank computes some channels of every expert, for all tokens. hidden: the stream `[n, d]`
    before `norm`. real: which of all N tokens are no padding; None: all.
    """
    normed_tokens = norm(hidden)
    logits = _compute_router_logits(module.router, normed_tokens)
    scores, chosen = module.choose(logits)  # of the k experts of each of the n tokens, [n, k]
    # By the choices of all tokens, the tokens of each expert. Indices have no gradient, so they are
    # gathered without autograd.
    groups = group_tokens(wait(start_gather(chosen, group)), logits.shape[1])
    own_real = None  # as `real`, of this rank's tokens
    if real is not None:
        num_tokens = normed_tokens.shape[0]
        own_real = real.take(
            slice(group.rank * num_tokens, (group.rank + 1) * num_tokens), real.count
        )
    scores = module.record_choices(logits, scores, groups, real=real, own_real=own_real)
    tokens = gather(normed_tokens, group)
    all_scores = gather(scores, group)
    partial, bias = module.experts(tokens, all_scores, groups, scores, chosen)
    summed = scatter(partial, group)
    return summed if bias is None else summed + bias


def _compute_router_logits(router: Any, tokens: Tensor) -> Tensor:
    """Return the router's logits `[n, E]` of normed tokens `[n, d]`, with its adapter if any."""
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
    """Return (this rank's summand of the experts' output, the scored biases of `down_proj`).

    The summand is for all tokens, `[N, d]`. The biases, times the scores, are for the rank's own
    tokens, `[n, d]`; None without biases. They are apart, as the sum over the ranks would count
    them t times.

    tokens: `[N, d]`, normed. scores: `[N, k]` of their k choices. groups: the tokens of each
    expert. own_scores, own_chosen: scores and expert indices of the rank's own tokens, `[n, k]`.
    The function replaces the forward of `Experts`, and is called through the module, so that FSDP
    gathers its weights.
    """
    inner = experts.gate_up_proj(tokens, groups, of_tokens=True)
    if experts.gate_up_proj.bias is not None:
        inner = inner + gather_row_biases(get_local(experts.gate_up_proj.bias), groups)
    # The scores are applied before `down_proj`, which is linear.
    product = scored_product(inner, order_by_expert(scores, groups), experts.gate)
    del inner  # freed before the next product, unless autograd keeps it
    summed = sum_choices(experts.down_proj(product, groups), groups)
    if experts.down_proj.bias is None:
        return summed, None
    return summed, compute_scored_bias(get_local(experts.down_proj.bias), own_scores, own_chosen)

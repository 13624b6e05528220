"""Attention with sinks: each head has a score of its own that takes part in the softmax, and attends to nothing.

(gpt-oss; arXiv 2309.17453 for where sinks come from.) With L the log-sum-exp of a query's scores and L' that of scores
and sink, the result is what attention without it gives times exp(L - L'); and backward is a kernel's own, given that
result and L', since a share of the softmax is exp(score - L'). So kernels that know of no sink serve.
"""

from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.ops.capped_attention import pieces_of_queries, products, stacked, visible
from recipe_lib.ops.device import kernels_of

# (documents' ends, the longest one), a mask, or neither: what `prepare_attention` has settled.
Settled = tuple[Tensor | None, int, Tensor | None, Tensor | None]


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, settled: Settled, window: int | None, scale: float
) -> Tensor:
    """Causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]` with a sink `[h]`; returns `[b, h, s, e]`.

    settled: (boundaries of flattened documents or None, the longest, mask or None, documents or None), see
    `AttentionInfo`.
    """
    return cast(Tensor, _SinkAttention.apply(q, k, v, sinks, *settled, window, scale))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        ends, longest, mask, documents, window, scale = settings
        if ends is not None:
            out, sums, random = _flattened(q, k, v, ends, longest, window, scale)
        elif kernels_of(q.device) == "cpu":
            out, sums = _cpu(q, k, v, mask, scale)
            random = None
        else:
            out, sums = _in_pieces(q, k, v, documents, window, scale)
            random = None
        own = sinks.to(sums.dtype).view(1, -1, 1)
        with_sink = torch.logaddexp(sums, own)
        out = (out * torch.exp(sums - with_sink).unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, with_sink, ends, mask, documents, random)
        ctx.settings = (longest, window, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (longest, window, scale) = gradients, ctx.settings
        q, k, v, sinks, out, sums, ends, mask, documents, random = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3]:
            shares = torch.exp(sinks.to(sums.dtype).view(1, -1, 1) - sums)
            of_sinks = -(shares * (gradient * out).sum(dim=-1, dtype=sums.dtype)).sum(dim=(0, 2)).to(sinks.dtype)
        if ends is not None:
            found = _flattened_gradients(gradient, q, k, v, out, sums, ends, longest, random, window, scale)
        elif kernels_of(q.device) == "cpu":
            found = _cpu_gradients(gradient, q, k, v, out, sums, mask, scale)
        else:
            found = _gradients_in_pieces(gradient, q, k, v, out, sums, documents, window, scale)
        return (*found, of_sinks, *(None,) * 6)


# Each kernel: results `[b, h, s, e]` and log-sum-exps `[b, h, s]`; and the gradients of q, k and v.


def _flat(tensor: Tensor) -> Tensor:
    """`[b, h, s, e]` as `[b s, h, e]`."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _rows(flat: Tensor, like: Tensor) -> Tensor:
    """`[b s, h, e]` as `[b, h, s, e]`."""
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _left(window: int | None) -> int:
    return -1 if window is None else window - 1  # the kernel counts the tokens to the left of its own


def _flattened(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Also the state that its backward wants, of random numbers that there are none of."""
    out, sums, random, _, _ = torch.ops.aten._flash_attention_forward(
        _flat(q), _flat(k), _flat(v), ends, ends, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=_left(window), window_size_right=0,
    )  # fmt: skip
    heads = sums.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)  # [h, b s] to [b, h, s]
    return _rows(out, q), heads, random


def _flattened_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    ends: Tensor,
    longest: int,
    random: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    flat = [_flat(tensor) for tensor in (gradient, q, k, v, out)]
    unused = random.new_empty(0)
    found = torch.ops.aten._flash_attention_backward(
        *flat, sums.transpose(0, 1).flatten(1).contiguous(), ends, ends, longest, longest, 0.0, True, random,
        unused, scale=scale, window_size_left=_left(window), window_size_right=0,
    )  # fmt: skip
    return tuple(_rows(each, like) for each, like in zip(found, (q, k, v), strict=True))


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    causal = mask is None and q.shape[2] > 1
    return cast(
        tuple[Tensor, Tensor],
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale),
    )


def _cpu_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    causal = mask is None and q.shape[2] > 1
    return tuple(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
        )
    )


def _in_pieces(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Some queries at a time, by matmuls: for what no kernel takes, as fp32 and masks on a GPU."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for part, seen, reach in pieces_of_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        scores = _scores(q[:, :, part], k, keys, reach, scale, wide)
        sums[:, :, part] = scores.logsumexp(dim=-1)
        shares = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, part] = torch.bmm(stacked(shares, k), values).view(out[:, :, part].shape)
    return out, sums


def _gradients_in_pieces(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    of_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    of_k, of_v = (torch.zeros(tensor.shape, dtype=sums.dtype, device=k.device) for tensor in (k, v))
    kept = (gradient * out).sum(dim=-1, keepdim=True, dtype=sums.dtype)
    for part, seen, reach in pieces_of_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stacked(tensor[:, :, part], k) for tensor in (q, gradient))
        shares = torch.exp(_scores(q[:, :, part], k, keys, reach, scale, sums.dtype) - sums[:, :, part].unsqueeze(-1))
        of_v[:, :, seen] += torch.bmm(stacked(shares.to(q.dtype), k).transpose(1, 2), slopes).view_as(v[:, :, seen])
        of_shares = products(slopes, values, reach, q.shape[1])
        of_scores = stacked((shares * (of_shares - kept[:, :, part]) * scale).to(q.dtype), k)
        of_q[:, :, part] = torch.bmm(of_scores, keys).view(of_q[:, :, part].shape)
        of_k[:, :, seen] += torch.bmm(of_scores.transpose(1, 2), queries).view_as(k[:, :, seen])
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, keys: Tensor, reach: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    """Scores `[b, h, m, n]` of some queries, -inf where nothing is seen."""
    scores = products(stacked(q, k), keys, reach, q.shape[1]).to(wide) * scale
    return scores.masked_fill(~visible(reach, keys.shape[1]), float("-inf"))

"""Causal attention of single families, with a soft cap or with sinks, which torch does not compute.

`capped_attention` is that of Gemma 2, whose scores are soft-capped (arXiv 2408.00118): two matmuls,
some queries at a time (`split_queries`), and between them a chain that is one kernel where chains
are fused. No scores are kept for backward, which makes them again, piece by piece.

`attend_with_sinks` is that of gpt-oss: each head has a score that takes part in its softmax and
attends to none (arXiv 2309.17453). With L the log-sum-exp of a query's scores and L' that of scores
and sink, the result is what attention without a sink gives, times exp(L - L'). Backward is a
kernel's own, given that result and L', since a share of the softmax is exp(score - L'). So kernels
that know of no sink serve: torch's varlen kernel, that of the CPU, and elsewhere matmuls over some
queries at a time.

Shapes: q `[b, h, s, e]`, keys and values `[b, k, t, e]` with h a multiple of k; a piece has m of
the s queries and sees n of the t keys. Log-sum-exps are `[b, h, s]`, sinks `[h]`.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.ops.device import get_kernel_type
from recipe_lib.ops.fused_kernels import (
    call_with_gradient,
    register_fused,
    register_shaped_work,
    should_fuse,
)

# Scores that exist at a time: 64 MiB in fp32, in which a chain that is not fused has them.
MAX_SCORES_AT_ONCE = 2**24


def compute_reach(
    documents: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Return how many keys each of the last `queries` of a row sees, int32 `[b or 1, queries]`.

    They are counted back from the query's own key, which is one of them.

    documents: int32 `[b, keys]`, rising from one to the next; None: a row is one document.
    window: the most keys that a token sees, its own included; None: all.
    """
    reach = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)[None]
    if documents is not None:
        query_documents = documents[:, keys - queries :].contiguous()
        # The numbers rise, so that a search finds the first key of each query's document.
        reach = reach - torch.searchsorted(documents, query_documents, out_int32=True)
    return reach if window is None else reach.clamp(max=window)


def make_visible_mask(reach: Tensor, keys: int) -> Tensor:
    """Return which keys m queries see, bool `[b or 1, 1, m, keys]`.

    reach: int32 `[b or 1, m]`, of `compute_reach`. The last query is as far as the last key.
    """
    query_positions = torch.arange(
        keys - reach.shape[1], keys, dtype=torch.int32, device=reach.device
    )
    key_positions = torch.arange(keys, dtype=torch.int32, device=reach.device)
    is_past = key_positions <= query_positions[:, None]
    return is_past & (key_positions > (query_positions - reach)[:, None, :, None])


def split_queries(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, window: int | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield pieces of the queries, so that few scores exist at a time.

    Each is (the piece's queries, the keys up to its last one that they can see, reach of each
    query, these keys and their values `[b k, n, e]`).
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    reach = compute_reach(documents, queries=queries, keys=keys, window=window, device=q.device)
    # Fused, scores are not wider than q: as many bytes are twice as many of them.
    halves = 2 if should_fuse(q.device) and q.dtype.itemsize == 2 else 1
    count = _count_pieces(batch * heads * keys // halves, queries)
    for piece in range(count):
        start = queries * piece // count
        stop = queries * (piece + 1) // count
        first_key = 0 if window is None else max(0, start + offset - window + 1)
        seen = slice(first_key, stop + offset)
        # Made as they are yielded: under a name here they would live on while the next are made.
        yield (
            slice(start, stop),
            seen,
            reach[:, start:stop],
            k[:, :, seen].flatten(0, 1),
            v[:, :, seen].flatten(0, 1),
        )


def _count_pieces(scores: int, queries: int) -> int:
    """Return how many pieces the queries are taken in.

    scores: those of one query, over all rows and heads.
    """
    # A power of two: code that is compiled for rows of any length is made anew for each number of
    # pieces, so that there should be few of them.
    count = 1
    while count < queries and scores * queries > count * MAX_SCORES_AT_ONCE:
        count *= 2
    return min(count, queries)


def stack_heads(part: Tensor, k: Tensor) -> Tensor:
    """Return `[b, h, m, n]` as `[b k, h/k m, n]`, ready for a batched matmul with the k key heads.

    Heads that share a key head are more rows of it, so that keys need not be expanded.
    """
    return part.reshape(part.shape[0] * k.shape[1], -1, part.shape[3])


def multiply_heads(stacked: Tensor, keys: Tensor, reach: Tensor, heads: int) -> Tensor:
    """Return the products `[b, h, m, n]` of m stacked rows of each head with n of `[b k, n, e]`."""
    return torch.bmm(stacked, keys.transpose(1, 2)).view(-1, heads, reach.shape[1], keys.shape[1])


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> Tensor:
    """Return causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`: `[b, h, s, e]`.

    Scores are `softcap * tanh(scores * scale / softcap)`. documents: int32 `[b, t]`, see
    `compute_reach`.
    """
    arguments = (q, k, v, documents, window, softcap, scale)
    return call_with_gradient(
        _compute_attention,
        *arguments,
        differentiate=_compute_attention_gradients,
        kept=range(len(arguments)),
    )


@register_shaped_work()
def _compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for part, _, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        scores = multiply_heads(
            stack_heads(q[:, :, part], k), keys=keys, reach=reach, heads=q.shape[1]
        )
        shares = capped_shares(scores, reach, softcap, scale)
        del scores  # each is as large as MAX_SCORES_AT_ONCE says; two would be at a time
        out[:, :, part] = torch.bmm(stack_heads(shares, k), values).view(out[:, :, part].shape)
        del shares
    return out


@register_shaped_work()
def _compute_attention_gradients(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Every piece adds to the gradients of keys and values: in bf16 the sum would lose bits.
    k_grad, v_grad = (torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v))
    for part, seen, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, out_grad))
        scores = multiply_heads(queries, keys=keys, reach=reach, heads=q.shape[1])
        shares = stack_heads(capped_shares(scores, reach, softcap, scale), k)
        v_grad[:, :, seen] += torch.bmm(shares.transpose(1, 2), slopes).view_as(v[:, :, seen])
        # Freed as soon as may be: without it, three tensors of scores would exist at a time.
        del shares
        share_grads = multiply_heads(slopes, keys=values, reach=reach, heads=q.shape[1])
        score_grads = stack_heads(
            capped_score_gradients(share_grads, scores, reach, softcap, scale), k
        )
        del scores, share_grads
        q_grad[:, :, part] = torch.bmm(score_grads, keys).view(q_grad[:, :, part].shape)
        k_grad[:, :, seen] += torch.bmm(score_grads.transpose(1, 2), queries).view_as(k[:, :, seen])
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


@register_fused(
    "capped_shares(Tensor scores, Tensor reach, float softcap, float scale) -> Tensor",
    lambda scores, *_: torch.empty_like(scores),
)
def capped_shares(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> Tensor:
    """Return the softmax of capped scores over the keys that are visible, in their dtype.

    scores: products of queries and keys `[b, h, m, n]`. reach: int32 `[b or 1, m]`.
    """
    return _compute_softmax(scores, reach=reach, softcap=softcap, scale=scale)[0].to(scores.dtype)


@register_fused(
    "capped_score_gradients(Tensor of_shares, Tensor scores, Tensor reach, float softcap, float"
    " scale) -> Tensor",
    lambda of_shares, *_: torch.empty_like(of_shares),
    repeats=True,
)
def capped_score_gradients(
    share_grads: Tensor, scores: Tensor, reach: Tensor, softcap: float, scale: float
) -> Tensor:
    """Return the gradient of the scores that `capped_shares` takes, by that of its result."""
    shares, tangents = _compute_softmax(scores, reach=reach, softcap=softcap, scale=scale)
    wide_grads = share_grads.to(shares.dtype)
    grad = shares * (wide_grads - (wide_grads * shares).sum(dim=-1, keepdim=True))
    # d cap*tanh(x/cap) / dx = 1 - tanh^2; shares are 0 where nothing is visible.
    return (grad * (1 - tangents.square())).to(scores.dtype) * scale


def _compute_softmax(
    scores: Tensor, reach: Tensor, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (shares of the keys, tanh of the scores over the cap), both `[b, h, m, n]` in fp32.

    Scores in fp64 stay in fp64.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    # In one expression each: a name would hold another tensor of scores up to the end.
    tangents = torch.tanh((scores * scale).to(wide) / softcap)
    capped = (softcap * tangents).masked_fill(
        ~make_visible_mask(reach, scores.shape[3]), float("-inf")
    )
    return capped.softmax(dim=-1), tangents


# Attention with sinks.


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    boundaries: Tensor | None,
    longest: int,
    mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return causal attention with sinks, `[b, h, s, e]`.

    boundaries, longest, mask, documents: see `AttentionInfo`; boundaries None: no varlen kernel.
    window: the most keys that a token sees, its own included. scale: multiplies the scores.
    """
    settings = (boundaries, longest, mask, documents, window, scale)
    return cast(Tensor, _SinkAttention.apply(q, k, v, sinks, *settings))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        boundaries, longest, mask, documents, window, scale = settings
        rng_state = None
        if boundaries is not None:
            out, log_sums, rng_state = _run_varlen(
                q, k, v, boundaries=boundaries, longest=longest, window=window, scale=scale
            )
        elif get_kernel_type(q.device) == "cpu":
            out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q,
                k,
                v,
                dropout_p=0.0,
                is_causal=_is_plain_causal(q, mask),
                attn_mask=mask,
                scale=scale,
            )
        else:
            out, log_sums = _run_in_pieces(
                q, k=k, v=v, documents=documents, window=window, scale=scale
            )
        sink_scores = sinks.to(log_sums.dtype).view(1, -1, 1)
        with_sink = torch.logaddexp(log_sums, sink_scores)
        out = (out * torch.exp(log_sums - with_sink).unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(
            q, k, v, sinks, out, with_sink, boundaries, mask, documents, rng_state
        )
        ctx.settings = (longest, window, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        longest, window, scale = ctx.settings
        q, k, v, sinks, out, log_sums, boundaries, mask, documents, rng_state = ctx.saved_tensors
        sink_grad = None
        if ctx.needs_input_grad[3]:
            # A sink's share of the softmax takes from every key's, in proportion to the result.
            shares = torch.exp(sinks.to(log_sums.dtype).view(1, -1, 1) - log_sums)
            sink_grad = (
                -(shares * (out_grad * out).sum(dim=-1, dtype=log_sums.dtype))
                .sum(dim=(0, 2))
                .to(sinks.dtype)
            )
        tensors = (out_grad, q, k, v, out, log_sums)
        if boundaries is not None:
            input_grads = _run_varlen_backward(
                *tensors,
                boundaries=boundaries,
                longest=longest,
                rng_state=rng_state,
                window=window,
                scale=scale,
            )
        elif get_kernel_type(q.device) == "cpu":
            # By position: torch.compile takes a keyword `out` for a tensor to write to.
            input_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors,
                dropout_p=0.0,
                is_causal=_is_plain_causal(q, mask),
                attn_mask=mask,
                scale=scale,
            )
        else:
            input_grads = _run_backward_in_pieces(
                *tensors, documents=documents, window=window, scale=scale
            )
        return (*input_grads, sink_grad, *(None,) * 6)


# Each kernel, forward: results `[b, h, s, e]` and log-sum-exps `[b, h, s]`; backward: the gradients
# of q, k and v.


def flatten_tokens(tensor: Tensor) -> Tensor:
    """Return `[b, h, s, e]` as `[b s, h, e]`, the layout of the varlen kernel."""
    return tensor.transpose(1, 2).flatten(0, 1)


def unflatten_tokens(flat: Tensor, like: Tensor) -> Tensor:
    """Return `[b s, h, e]` as `[b, h, s, e]`, with b and s those of `like`."""
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def get_left_window(window: int | None) -> int:
    """Return a window as the varlen kernel takes it, which counts the tokens left of its own."""
    return -1 if window is None else window - 1


def _run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    boundaries: Tensor,
    longest: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator below `varlen_attn`, for its random state: there is no dropout, but the kernel's
    # backward asks for it.
    flat_out, flat_log_sums, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
        flatten_tokens(q),
        flatten_tokens(k),
        flatten_tokens(v),
        cum_seq_q=boundaries,
        cum_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=get_left_window(window),
        window_size_right=0,
    )
    # [h, b s] to [b, h, s]
    log_sums = flat_log_sums.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
    return unflatten_tokens(flat_out, q), log_sums, rng_state


def _run_varlen_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    boundaries: Tensor,
    longest: int,
    rng_state: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    flat_grads = torch.ops.aten._flash_attention_backward(
        flatten_tokens(out_grad),
        flatten_tokens(q),
        flatten_tokens(k),
        flatten_tokens(v),
        flatten_tokens(out),
        logsumexp=log_sums.transpose(0, 1).flatten(1).contiguous(),
        cum_seq_q=boundaries,
        cum_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        rng_state=rng_state,
        unused=rng_state.new_empty(0),
        scale=scale,
        window_size_left=get_left_window(window),
        window_size_right=0,
    )
    return tuple(
        unflatten_tokens(grad, like) for grad, like in zip(flat_grads, (q, k, v), strict=True)
    )


def _is_plain_causal(q: Tensor, mask: Tensor | None) -> bool:
    # A single query, as in decoding, sees all keys.
    return mask is None and q.shape[2] > 1


def _run_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by matmuls, some queries at a time: for what no kernel takes, as fp32 on a GPU."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for part, _, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        scores = _compute_scores(q[:, :, part], k, keys, reach=reach, scale=scale, wide=wide)
        log_sums[:, :, part] = scores.logsumexp(dim=-1)
        shares = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, part] = torch.bmm(stack_heads(shares, k), values).view(out[:, :, part].shape)
    return out, log_sums


def _run_backward_in_pieces(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    wide = log_sums.dtype
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Every piece adds to the gradients of keys and values: in bf16 the sum would lose bits.
    k_grad, v_grad = (torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v))
    # The sum over the keys of share x its gradient, which softmax's backward subtracts.
    row_sums = (out_grad * out).sum(dim=-1, keepdim=True, dtype=wide)
    for part, seen, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, out_grad))
        # Nested: a name for the scores would hold one more tensor of their size.
        shares = torch.exp(
            _compute_scores(q[:, :, part], k, keys, reach=reach, scale=scale, wide=wide)
            - log_sums[:, :, part].unsqueeze(-1)
        )
        v_grad[:, :, seen] += torch.bmm(
            stack_heads(shares.to(q.dtype), k).transpose(1, 2), slopes
        ).view_as(v[:, :, seen])
        share_grads = multiply_heads(slopes, keys=values, reach=reach, heads=q.shape[1])
        score_grads = stack_heads(
            (shares * (share_grads - row_sums[:, :, part]) * scale).to(q.dtype), k
        )
        q_grad[:, :, part] = torch.bmm(score_grads, keys).view(q_grad[:, :, part].shape)
        k_grad[:, :, seen] += torch.bmm(score_grads.transpose(1, 2), queries).view_as(k[:, :, seen])
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


def _compute_scores(
    q: Tensor, k: Tensor, keys: Tensor, *, reach: Tensor, scale: float, wide: torch.dtype
) -> Tensor:
    scores = (
        multiply_heads(stack_heads(q, k), keys=keys, reach=reach, heads=q.shape[1]).to(wide) * scale
    )
    return scores.masked_fill(~make_visible_mask(reach, keys.shape[1]), float("-inf"))

"""Compute causal attention with a soft cap or with sinks, which torch's own attention does not.

`ops.attention.attention` calls `capped_attention` for Gemma 2 (arXiv 2408.00118), whose scores are
soft-capped, and `attend_with_sinks` for gpt-oss, where each head has a sink: a score that takes
part in the softmax but has no value (arXiv 2309.17453). Both can compute in pieces, for some
queries at a time, so that the scores of all queries never exist. Softmax's results are "shares".
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

# Shapes: b rows, h heads, k heads of keys and values with h a multiple of k, s queries, t keys
# (s and those of a cache), e channels of a head. q is `[b, h, s, e]`, keys and values
# `[b, k, t, e]`. A piece has m of the s queries and sees n of the t keys.

# Elements of a tensor of scores: 64 MiB in fp32, the dtype of scores where chains are not fused.
MAX_SCORES_AT_ONCE = 2**24


def compute_reach(
    documents: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Return how many keys each query sees: its own and those before it, int32 `[b or 1, queries]`.

    queries, keys: the number of each in a row; the queries belong to the last keys. documents: the
    id of each key's document, int32 `[b, keys]`, rising along a row; a token sees keys of its own
    document only. None: a row is one document. window: the most keys that a token sees, its own
    included; None: no limit.
    """
    reach = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)[None]
    if documents is not None:
        query_documents = documents[:, keys - queries :].contiguous()
        # The ids rise, so that a binary search finds the first key of each query's document.
        reach = reach - torch.searchsorted(documents, query_documents, out_int32=True)
    return reach if window is None else reach.clamp(max=window)


def make_visible_mask(reach: Tensor, keys: int) -> Tensor:
    """Return True where a query sees a key, bool `[b or 1, 1, m, keys]`.

    reach: of m queries, int32 `[b or 1, m]`, from `compute_reach`. keys: the number of keys; the
    last one belongs to the last query.
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
    """Yield the queries in pieces, so that few scores exist at a time.

    A piece is (slice of its queries among s, slice among t of the keys that any of them may see,
    reach of its queries `[b or 1, m]`, these keys `[b k, n, e]`, their values `[b k, n, e]`).
    documents, window: see `compute_reach`.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    reach = compute_reach(documents, queries=queries, keys=keys, window=window, device=q.device)
    # Fused, scores are not wider than q: in bf16, two take the bytes of one in fp32.
    scores_per_fp32 = 2 if should_fuse(q.device) and q.dtype.itemsize == 2 else 1
    num_pieces = _count_pieces(batch * heads * keys // scores_per_fp32, queries)
    for piece in range(num_pieces):
        start = queries * piece // num_pieces
        stop = queries * (piece + 1) // num_pieces
        first_key = 0 if window is None else max(0, start + offset - window + 1)
        key_slice = slice(first_key, stop + offset)
        # Copied in the yield: under names here the copies would live on while the next are made.
        yield (
            slice(start, stop),
            key_slice,
            reach[:, start:stop],
            k[:, :, key_slice].flatten(0, 1),
            v[:, :, key_slice].flatten(0, 1),
        )


def _count_pieces(scores_per_query: int, queries: int) -> int:
    """Return the number of pieces that the queries are cut into.

    scores_per_query: over all rows and heads, counted as fp32 numbers.
    """
    # A power of two: the loop over pieces is compiled anew for each number of them, so few numbers
    # should occur.
    num_pieces = 1
    while num_pieces < queries and scores_per_query * queries > num_pieces * MAX_SCORES_AT_ONCE:
        num_pieces *= 2
    return min(num_pieces, queries)


def stack_heads(tensor: Tensor, k: Tensor) -> Tensor:
    """Return `[b, h, m, n]` as `[b k, h/k m, n]`, ready for a batched matmul with the k key heads.

    Query heads that share a key head become more rows of it, so that keys need not be expanded.
    k: only its number of heads is read.
    """
    return tensor.reshape(tensor.shape[0] * k.shape[1], -1, tensor.shape[3])


def multiply_heads(stacked: Tensor, keys: Tensor, reach: Tensor, heads: int) -> Tensor:
    """Return the products of queries with keys, or of output gradients with values: `[b, h, m, n]`.

    stacked: `[b k, h/k m, e]`, from `stack_heads`. keys: keys or values, `[b k, n, e]`. reach: only
    its number of queries, m, is read. heads: h.
    """
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

    Scores are `softcap * tanh(scores * scale / softcap)`. No scores are kept for backward, which
    computes them again. documents, window: see `compute_reach`.
    """
    # kept: the indices of the arguments that are saved for backward.
    arguments = (q, k, v, documents, window, softcap, scale)
    return call_with_gradient(
        _compute_attention,
        *arguments,
        differentiate=_compute_attention_gradients,
        kept=range(len(arguments)),
    )


# Shaped work, here and below: its operators follow from the shapes of the arguments, so that
# `tune plan` simulates one call for all calls of the same shapes.
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
    for query_slice, _, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        scores = multiply_heads(
            stack_heads(q[:, :, query_slice], k), keys=keys, reach=reach, heads=q.shape[1]
        )
        shares = capped_shares(scores, reach, softcap, scale)
        del scores  # as large as the shares: else both would be alive below
        out[:, :, query_slice] = torch.bmm(stack_heads(shares, k), values).view(
            out[:, :, query_slice].shape
        )
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
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Every piece adds to the gradients of keys and values: in bf16 the sum would lose bits.
    k_grad, v_grad = (
        torch.zeros(tensor.shape, dtype=wide_dtype, device=k.device) for tensor in (k, v)
    )
    for query_slice, key_slice, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        queries, out_grads = (stack_heads(tensor[:, :, query_slice], k) for tensor in (q, out_grad))
        scores = multiply_heads(queries, keys=keys, reach=reach, heads=q.shape[1])
        shares = stack_heads(capped_shares(scores, reach, softcap, scale), k)
        v_grad[:, :, key_slice] += torch.bmm(shares.transpose(1, 2), out_grads).view_as(
            v[:, :, key_slice]
        )
        # Freed as soon as may be: without it, three tensors of scores would exist at a time.
        del shares
        share_grads = multiply_heads(out_grads, keys=values, reach=reach, heads=q.shape[1])
        score_grads = stack_heads(
            capped_score_gradients(share_grads, scores, reach, softcap, scale), k
        )
        del scores, share_grads
        q_grad[:, :, query_slice] = torch.bmm(score_grads, keys).view(
            q_grad[:, :, query_slice].shape
        )
        k_grad[:, :, key_slice] += torch.bmm(score_grads.transpose(1, 2), queries).view_as(
            k[:, :, key_slice]
        )
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


# `register_fused`: one kernel, by torch.compile, on a GPU with Triton; it is given the schema of an
# operator and a function that makes empty tensors like the results. repeats: the kernel computes
# the shares again where it needs them, rather than write them to memory.


@register_fused(
    "capped_shares(Tensor scores, Tensor reach, float softcap, float scale) -> Tensor",
    lambda scores, *_: torch.empty_like(scores),
)
def capped_shares(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> Tensor:
    """Return the softmax of capped scores over the keys that are visible, in the scores' dtype.

    scores: products of queries and keys `[b, h, m, n]`. reach: int32 `[b or 1, m]`, from
    `compute_reach`.
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
    """Return the gradient of the scores that `capped_shares` takes, `[b, h, m, n]`.

    share_grads: the gradient of its result. The shares are computed again.
    """
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
    wide_dtype = torch.promote_types(scores.dtype, torch.float32)
    # In one expression each: a name would hold a further tensor `[b, h, m, n]` up to the end.
    tangents = torch.tanh((scores * scale).to(wide_dtype) / softcap)
    capped = (softcap * tangents).masked_fill(
        ~make_visible_mask(reach, scores.shape[3]), float("-inf")
    )
    return capped.softmax(dim=-1), tangents


# Attention with sinks.
#
# With L the log-sum-exp of a query's scores and L' that of scores and sink, the result is that of
# attention without a sink, times exp(L - L'). A probability is exp(score - L'), so that a kernel's
# own backward, given this result and L', gives the gradients. So kernels without sinks serve:
# torch's varlen kernel, that of the CPU, and elsewhere matmuls for some queries at a time.


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

    q, k, v: `[b, h, s, e]` and twice `[b, k, t, e]`. sinks: a score for each head, `[h]`.
    boundaries: the cu_seqlens of the varlen kernel, int32; None: another kernel is used. longest:
    the most tokens between two boundaries. mask: added to the scores, `[b or 1, 1, s, t]`, for the
    CPU's kernel; None: causal. documents, window: see `compute_reach`. scale: multiplies q k.
    """
    settings = (boundaries, longest, mask, documents, window, scale)
    return cast(Tensor, _SinkAttention.apply(q, k, v, sinks, *settings))


class _SinkAttention(torch.autograd.Function):
    """The autograd node of `attend_with_sinks`: a kernel without sinks, times exp(L - L')."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        boundaries, longest, mask, documents, window, scale = settings
        rng_state = None  # of the varlen kernel, for its backward
        if boundaries is not None:
            out, log_sums, rng_state = _run_varlen(
                q, k, v, boundaries=boundaries, longest=longest, window=window, scale=scale
            )
        elif get_kernel_type(q.device) == "cpu":
            # The operator below torch's SDPA, which does not return the log-sum-exps.
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
            # d out / d sink = -(the sink's share) * out: the sink takes its share from the keys'.
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


# The kernels of `_SinkAttention`. A forward returns results `[b, h, s, e]` and log-sum-exps
# `[b, h, s]`, a backward the gradients of q, k and v.


def flatten_tokens(tensor: Tensor) -> Tensor:
    """Return `[b, h, s, e]` as `[b s, h, e]`, the layout of the varlen kernel."""
    return tensor.transpose(1, 2).flatten(0, 1)


def unflatten_tokens(flat: Tensor, like: Tensor) -> Tensor:
    """Return `[b s, h, e]` as `[b, h, s, e]`, with b and s those of `like`."""
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def get_left_window(window: int | None) -> int:
    """Return a window as the varlen kernel takes it: the number of keys left of the token's own.

    -1: all, for window None.
    """
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
    """Attend by torch's varlen kernel; return (results, log-sum-exps, random state)."""
    # The operator below torch's `varlen_attn`, for the random state that it returns: there is no
    # dropout, but the kernel's backward asks for it.
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
    """Return the gradients of q, k and v; log_sums: with the sinks."""
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
    # A single query, as in decoding, sees all keys; `is_causal` would let it see the first alone.
    return mask is None and q.shape[2] > 1


def _run_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by matmuls, some queries at a time, where no kernel serves, as for fp32 on a GPU.

    Return (results, log-sum-exps).
    """
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = torch.empty(q.shape[:3], dtype=wide_dtype, device=q.device)
    for query_slice, _, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        scores = _compute_scores(
            q[:, :, query_slice], k, keys, reach=reach, scale=scale, wide_dtype=wide_dtype
        )
        log_sums[:, :, query_slice] = scores.logsumexp(dim=-1)
        shares = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, query_slice] = torch.bmm(stack_heads(shares, k), values).view(
            out[:, :, query_slice].shape
        )
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
    """Return the gradients of q, k and v, by matmuls; log_sums: with the sinks."""
    wide_dtype = log_sums.dtype
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Every piece adds to the gradients of keys and values: in bf16 the sum would lose bits.
    k_grad, v_grad = (
        torch.zeros(tensor.shape, dtype=wide_dtype, device=k.device) for tensor in (k, v)
    )
    # By query, the sum over the keys of share times share's gradient: softmax's backward subtracts
    # it. It equals out_grad times out.
    row_sums = (out_grad * out).sum(dim=-1, keepdim=True, dtype=wide_dtype)
    for query_slice, key_slice, reach, keys, values in split_queries(
        q, k=k, v=v, documents=documents, window=window
    ):
        queries, out_grads = (stack_heads(tensor[:, :, query_slice], k) for tensor in (q, out_grad))
        # In one expression: a name for the scores would hold one more tensor of their size.
        shares = torch.exp(
            _compute_scores(
                q[:, :, query_slice], k, keys, reach=reach, scale=scale, wide_dtype=wide_dtype
            )
            - log_sums[:, :, query_slice].unsqueeze(-1)
        )
        v_grad[:, :, key_slice] += torch.bmm(
            stack_heads(shares.to(q.dtype), k).transpose(1, 2), out_grads
        ).view_as(v[:, :, key_slice])
        share_grads = multiply_heads(out_grads, keys=values, reach=reach, heads=q.shape[1])
        score_grads = stack_heads(
            (shares * (share_grads - row_sums[:, :, query_slice]) * scale).to(q.dtype), k
        )
        q_grad[:, :, query_slice] = torch.bmm(score_grads, keys).view(
            q_grad[:, :, query_slice].shape
        )
        k_grad[:, :, key_slice] += torch.bmm(score_grads.transpose(1, 2), queries).view_as(
            k[:, :, key_slice]
        )
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


def _compute_scores(
    q: Tensor, k: Tensor, keys: Tensor, *, reach: Tensor, scale: float, wide_dtype: torch.dtype
) -> Tensor:
    """Return a piece's scores `[b, h, m, n]`, -inf where a key is not visible.

    q: `[b, h, m, e]`. k: all keys, for their number of heads alone. keys: those of the piece.
    """
    scores = (
        multiply_heads(stack_heads(q, k), keys=keys, reach=reach, heads=q.shape[1]).to(wide_dtype)
        * scale
    )
    return scores.masked_fill(~make_visible_mask(reach, keys.shape[1]), float("-inf"))

"""Causal attention by matmuls, some queries at a time, for what no kernel of torch computes.

`capped_attention` is the attention of Gemma 2, whose scores are soft-capped (arXiv 2408.00118): two
matmuls, and between them a chain that is one kernel where chains are fused. No scores are kept for
backward, which makes them again, piece by piece. `split_queries` and the functions around it serve
attention with sinks too (`recipe_lib.ops.attention_sinks`).

Shapes: q `[b, h, s, e]`, keys and values `[b, k, t, e]` with h a multiple of k; a piece has m of
the s queries and sees n of the t keys.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

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
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield pieces of the queries, so that few scores exist at a time.

    Each is (the piece's queries, the keys up to its last one that they can see, reach of each).
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    reach = compute_reach(documents, queries, keys, window, q.device)
    # Fused, scores are not wider than q: as many bytes are twice as many of them.
    halves = 2 if should_fuse(q.device) and q.dtype.itemsize == 2 else 1
    count = _count_pieces(batch * heads * keys // halves, queries)
    for piece in range(count):
        start, stop = queries * piece // count, queries * (piece + 1) // count
        first_key = 0 if window is None else max(0, start + offset - window + 1)
        yield slice(start, stop), slice(first_key, stop + offset), reach[:, start:stop]


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
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        scores = multiply_heads(stack_heads(q[:, :, part], k), keys, reach, q.shape[1])
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
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, out_grad))
        scores = multiply_heads(queries, keys, reach, q.shape[1])
        shares = stack_heads(capped_shares(scores, reach, softcap, scale), k)
        v_grad[:, :, seen] += torch.bmm(shares.transpose(1, 2), slopes).view_as(v[:, :, seen])
        # Freed as soon as may be: without it, three tensors of scores would exist at a time.
        del shares
        share_grads = multiply_heads(slopes, values, reach, q.shape[1])
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
    return _compute_softmax(scores, reach, softcap, scale)[0].to(scores.dtype)


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
    shares, tangents = _compute_softmax(scores, reach, softcap, scale)
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

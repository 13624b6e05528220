"""Attention whose scores are soft-capped (Gemma 2, arXiv 2408.00118), some queries at a time.

No kernel of torch caps scores, so they are made in the open: two matmuls, and between them a chain that is one kernel
where chains are fused. The pieces keep the scores that exist at a time small; nothing of them is kept for backward,
which makes each piece's again. Sums over pieces of the gradients of keys and values are in fp32.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import fused, fuses
from recipe_lib.ops.shaped_work import follows_from_shapes

CAPPED_SCORES = 2**24  # scores that exist at a time: 64 MiB in fp32, in which a chain that is not fused has them


def reaches(documents: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Int32 `[b or 1, queries]`: how many keys each of the last `queries` of a row sees, back from its own.

    documents: int32 `[b, keys]`, rising from one to the next; None: a row is one. window: a token sees so many, its
    own included.
    """
    found = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device).unsqueeze(0)
    if documents is not None:
        own = documents[:, keys - queries :].contiguous()
        found = found - torch.searchsorted(documents, own, out_int32=True)  # where its document starts
    return found if window is None else found.clamp(max=window)


def visible(reach: Tensor, keys: int) -> Tensor:
    """Bool `[b or 1, 1, m, keys]`: which keys m queries see, the last one of which is as far as the last key."""
    own = torch.arange(keys - reach.shape[1], keys, dtype=torch.int32, device=reach.device)
    places = torch.arange(keys, dtype=torch.int32, device=reach.device)
    return (places <= own[:, None]) & (places > (own - reach)[:, None, :, None])


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, softcap: float, scale: float
) -> Tensor:
    """Causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`; returns `[b, h, s, e]`.

    Scores are `softcap * tanh(scores * scale / softcap)`. documents: int32 `[b, t]`, see `reaches`.
    """
    return cast(Tensor, _CappedAttention.apply(q, k, v, documents, window, softcap, scale))


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int | None,
        softcap: float,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, documents)
        ctx.settings = (window, softcap, scale)
        return _attended(q, k, v, documents, *ctx.settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(gradients[0], *ctx.saved_tensors, *ctx.settings), None, None, None, None)


@follows_from_shapes()
def _attended(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, softcap: float, scale: float
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for part, seen, reach in pieces_of_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        scores = products(stacked(q[:, :, part], k), keys, reach, q.shape[1])
        shares = capped_shares(scores, reach, softcap, scale)
        del scores
        out[:, :, part] = torch.bmm(stacked(shares, k), values).view(out[:, :, part].shape)
        del shares
    return out


@follows_from_shapes()
def _gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, by that of the result."""
    wide = torch.promote_types(q.dtype, torch.float32)
    of_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    of_k, of_v = (torch.zeros(tensor.shape, dtype=wide, device=tensor.device) for tensor in (k, v))
    for part, seen, reach in pieces_of_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stacked(tensor[:, :, part], k) for tensor in (q, gradient))
        scores = products(queries, keys, reach, q.shape[1])
        shares = stacked(capped_shares(scores, reach, softcap, scale), k)
        of_v[:, :, seen] += torch.bmm(shares.transpose(1, 2), slopes).view_as(v[:, :, seen])
        del shares
        of_shares = products(slopes, values, reach, q.shape[1])
        of_scores = stacked(capped_score_gradients(of_shares, scores, reach, softcap, scale), k)
        del scores, of_shares
        of_q[:, :, part] = torch.bmm(of_scores, keys).view(of_q[:, :, part].shape)
        of_k[:, :, seen] += torch.bmm(of_scores.transpose(1, 2), queries).view_as(k[:, :, seen])
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def pieces_of_queries(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries of a piece, the keys up to its last one that they can see, how many of these each of them sees)."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    reach = reaches(documents, queries, keys, window, q.device)
    # Fused, scores are not wider than q: as many bytes are twice as many of them.
    count = _count(batch * heads * keys // (2 if fuses(q.device) and q.dtype.itemsize == 2 else 1), queries)
    for piece in range(count):
        start, stop = queries * piece // count, queries * (piece + 1) // count
        first = 0 if window is None else max(0, start + offset - window + 1)
        yield slice(start, stop), slice(first, stop + offset), reach[:, start:stop]


def _count(scores: int, queries: int) -> int:
    """Pieces that the queries are taken in; scores: of one of them, over all rows and heads.

    A power of two, so that code that is compiled for rows of any length is made anew for few of these numbers.
    """
    count = 1
    while count < queries and scores * queries > count * CAPPED_SCORES:
        count *= 2
    return min(count, queries)


def stacked(part: Tensor, k: Tensor) -> Tensor:
    """`[b, h, m, n]` as `[b k, h/k m, n]`: heads that share a key head are more rows of it; keys are not expanded."""
    return part.reshape(part.shape[0] * k.shape[1], -1, part.shape[3])


def products(stacked: Tensor, others: Tensor, reach: Tensor, heads: int) -> Tensor:
    """`[b, h, m, n]`: of m stacked rows of each head, and n of `[b k, n, e]`."""
    return torch.bmm(stacked, others.transpose(1, 2)).view(-1, heads, reach.shape[1], others.shape[1])


def _like_scores(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


@fused("capped_shares(Tensor scores, Tensor reach, float softcap, float scale) -> Tensor", _like_scores)
def capped_shares(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> Tensor:
    """Capped scores' softmax over the keys that are visible, of products of queries and keys `[b, h, m, n]`, in their
    type. reach: int32 `[b or 1, m]`, see `reaches`."""
    return _softmax(scores, reach, softcap, scale)[0].to(scores.dtype)


@fused(
    "capped_score_gradients(Tensor of_shares, Tensor scores, Tensor reach, float softcap, float scale) -> Tensor",
    _like_scores,
    repeats=True,
)
def capped_score_gradients(of_shares: Tensor, scores: Tensor, reach: Tensor, softcap: float, scale: float) -> Tensor:
    """The gradient of the products that `capped_shares` takes, by that of its result."""
    shares, tangents = _softmax(scores, reach, softcap, scale)
    wide = of_shares.to(shares.dtype)
    grad = shares * (wide - (wide * shares).sum(dim=-1, keepdim=True))
    # d cap*tanh(x/cap) / dx = 1 - tanh^2; shares are 0 where nothing is visible.
    return (grad * (1 - tangents.square())).to(scores.dtype) * scale


def _softmax(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
    """(shares of the keys, tanh of the scores over the cap), both `[b, h, m, n]` in fp32 (fp64 for fp64)."""
    tangents = torch.tanh((scores * scale).to(torch.promote_types(scores.dtype, torch.float32)) / softcap)
    capped = (softcap * tangents).masked_fill(~visible(reach, scores.shape[3]), float("-inf"))
    return capped.softmax(dim=-1), tangents

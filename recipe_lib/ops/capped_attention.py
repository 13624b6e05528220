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

CAPPED_SCORES = 2**24  # scores that exist at a time: 64 MiB in fp32, in which a chain that is not fused has them


def visible(
    queries: Tensor, keys: Tensor, query_documents: Tensor | None, key_documents: Tensor | None, window: int | None
) -> Tensor:
    """Bool `[b or 1, 1, m, n]`: which keys, by their positions `[n]`, the queries `[m]` see.

    documents: `[b, m]` and `[b, n]`, None: a row is one. window: a token sees so many, its own included.
    """
    seen = keys <= queries[:, None]
    if window is not None:
        seen = seen & (keys > queries[:, None] - window)
    if query_documents is None or key_documents is None:
        return seen[None, None]
    return seen & (query_documents[:, None, :, None] == key_documents[:, None, None, :])


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, softcap: float, scale: float
) -> Tensor:
    """Causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`; returns `[b, h, s, e]`.

    Scores are `softcap * tanh(scores * scale / softcap)`. documents: int32 `[b, s]`, see `visible`.
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


def _attended(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, softcap: float, scale: float
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for part, seen, how in _pieces(q, k, documents, window, softcap, scale):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        shares = capped_shares(torch.bmm(_stacked(q[:, :, part], k), keys.transpose(1, 2)), *how)
        out[:, :, part] = torch.bmm(shares, values).view(out[:, :, part].shape)
    return out


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
    for part, seen, how in _pieces(q, k, documents, window, softcap, scale):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (_stacked(tensor[:, :, part], k) for tensor in (q, gradient))
        scores = torch.bmm(queries, keys.transpose(1, 2))
        of_v[:, :, seen] += torch.bmm(capped_shares(scores, *how).transpose(1, 2), slopes).view_as(v[:, :, seen])
        of_scores = capped_score_gradients(torch.bmm(slopes, values.transpose(1, 2)), scores, *how)
        del scores
        of_q[:, :, part] = torch.bmm(of_scores, keys).view(of_q[:, :, part].shape)
        of_k[:, :, seen] += torch.bmm(of_scores.transpose(1, 2), queries).view_as(k[:, :, seen])
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


_How = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None, float, float]


def _pieces(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None, softcap: float, scale: float
) -> Iterator[tuple[slice, slice, _How]]:
    """(queries of a piece, the keys that they can see, what else its scores depend on)."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    positions = torch.arange(keys, device=q.device)
    # Fused, scores are not wider than q: as many bytes are twice as many of them.
    count = _count(batch * heads * keys // (2 if fuses(q.device) and q.dtype.itemsize == 2 else 1), queries)
    for piece in range(count):
        start, stop = queries * piece // count, queries * (piece + 1) // count
        seen = slice(0 if window is None else max(0, start + offset - window + 1), stop + offset)
        part = slice(start, stop)
        places = positions[start + offset : stop + offset], positions[seen]
        of_documents = (None, None) if documents is None else (documents[:, part], documents[:, seen])
        yield part, seen, (*places, *of_documents, window, softcap, scale)


def _count(scores: int, queries: int) -> int:
    """Pieces that the queries are taken in; scores: of one of them, over all rows and heads.

    A power of two, so that code that is compiled for rows of any length is made anew for few of these numbers.
    """
    count = 1
    while count < queries and scores * queries > count * CAPPED_SCORES:
        count *= 2
    return min(count, queries)


def _stacked(part: Tensor, k: Tensor) -> Tensor:
    """Queries `[b, h, m, e]` as `[b k, h/k m, e]`: the heads that share a key head are more rows of it, so that keys
    are not expanded."""
    return part.reshape(part.shape[0] * k.shape[1], -1, part.shape[3])


def _like_scores(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


def _like_second(of_shares: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


_OF_PIECE = (
    "Tensor queries, Tensor keys, Tensor? query_documents, Tensor? key_documents, int? window, float softcap, float "
    "scale"
)


@fused(f"capped_shares(Tensor scores, {_OF_PIECE}) -> Tensor", _like_scores)
def capped_shares(
    scores: Tensor,
    queries: Tensor,
    keys: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> Tensor:
    """Capped scores' softmax over the keys that are visible, of products of queries and keys `[b k, h/k m, n]`, in
    their type."""
    seen = visible(queries, keys, query_documents, key_documents, window)
    return _softmax(scores, seen, softcap, scale)[0].to(scores.dtype)


@fused(f"capped_score_gradients(Tensor of_shares, Tensor scores, {_OF_PIECE}) -> Tensor", _like_second)
def capped_score_gradients(
    of_shares: Tensor,
    scores: Tensor,
    queries: Tensor,
    keys: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> Tensor:
    """The gradient of the products that `capped_shares` takes, by that of its result."""
    seen = visible(queries, keys, query_documents, key_documents, window)
    shares, tangents = _softmax(scores, seen, softcap, scale)
    wide = of_shares.to(shares.dtype)
    grad = shares * (wide - (wide * shares).sum(dim=-1, keepdim=True))
    # d cap*tanh(x/cap) / dx = 1 - tanh^2; shares are 0 where nothing is visible.
    return (grad * (1 - tangents.square())).to(scores.dtype) * scale


def _softmax(scores: Tensor, seen: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
    """(shares of the keys, tanh of the scores over the cap), both `[b k, h/k m, n]` in fp32 (fp64 for fp64)."""
    tangents = torch.tanh((scores * scale).to(torch.promote_types(scores.dtype, torch.float32)) / softcap)
    rows, columns = seen.shape[2:]
    by_rows = (softcap * tangents).view(seen.shape[0], -1, rows, columns)
    shares = by_rows.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return shares.view_as(scores), tangents

"""Causal attention: one function for training and decoding, with documents, windows and soft caps.

Shapes: q `[b, h, s, e]`, keys and values `[b, k, t, e]` with h a multiple of k; t is s, or what a
cache holds plus s. What depends on the batch alone (masks, document boundaries, which kernel) is
settled once, by `prepare_attention`.

Rows are right-padded, so a plain causal mask is enough for them: no token looks at the padding
after it.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from recipe_lib.config.compute_capability import VARLEN_CAPABILITY
from recipe_lib.ops.device import get_compute_capability, get_kernel_type
from recipe_lib.ops.fused_kernels import (
    GradientNode,
    register_fused,
    register_shaped_work,
    should_fuse,
)
from recipe_lib.ops.real_tokens import RealTokens

_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass(frozen=True)
class AttentionInfo:
    """Which tokens of a batch may see which, as tensors.

    documents: int32 `[b, t]`, the document of each key within its row (padding is one of its own);
    None: a row is one document. boundaries: int32 `[n + 1]`, where documents start and end in the
    flattened `[b * s]` tokens. longest: tokens of the longest document, rounded up. masks: per
    window, what is added to the scores; None: nothing beyond causality. flattened: documents and
    windows go through the varlen kernel, there are no masks. real: which tokens are no padding;
    None: all.
    """

    documents: Tensor | None = None
    boundaries: Tensor | None = None
    longest: int = 0
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    flattened: bool = False
    real: RealTokens | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AttentionInfo":
        """The same on another device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in (("documents", self.documents), ("boundaries", self.boundaries))
            if value is not None
        }
        return replace(self, **moved)


def make_attention_info(lengths: Sequence[Sequence[int]], row_length: int) -> AttentionInfo:
    """The info of rows that hold several documents each, from host numbers (no device is touched).

    lengths: for each row, the tokens of its documents in order; what is left of `row_length` is
    padding.
    """
    documents = torch.zeros(len(lengths), row_length, dtype=torch.int32)
    boundaries, longest = [0], 1
    real = RealTokens.from_lengths([sum(parts) for parts in lengths], row_length)
    for row, parts in enumerate(lengths):
        padded = [*parts, row_length - sum(parts)] if sum(parts) < row_length else list(parts)
        if sum(padded) != row_length or min(padded) < 1:
            raise ValueError(
                f"row {row}: document lengths {list(parts)} do not fit a row of {row_length} tokens"
            )
        sizes = torch.tensor(padded)
        documents[row] = torch.repeat_interleave(
            torch.arange(len(padded), dtype=torch.int32), sizes
        )
        boundaries += (sizes.cumsum(0) + row * row_length).tolist()
        longest = max(longest, *padded)
    # A multiple of 128, because compiled code is specialized for this number.
    longest = -(-longest // 128) * 128
    return AttentionInfo(documents, torch.tensor(boundaries, dtype=torch.int32), longest, real=real)


def compute_document_positions(lengths: Sequence[Sequence[int]], row_length: int) -> Tensor:
    """Positions int64 `[b, s]` that start from 0 with each document; 0 in the padding after the
    last.
    """
    positions = torch.arange(row_length).repeat(len(lengths), 1)
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            positions[row, start : start + length] -= start
            start += length
        positions[row, start:] = 0
    return positions


def prepare_attention(
    info: AttentionInfo | None,
    *,
    rows: int,
    queries: int,
    keys: int,
    windows: Sequence[int | None],
    head_width: int,
    capped: bool,
    dtype: torch.dtype,
    device: torch.device,
    sinks: bool = False,
) -> AttentionInfo:
    """Settles, once per batch, how each window of the model is attended: causal kernel, varlen
    kernel or mask.

    rows, queries, keys: b, s, t of the tensors to come. windows: those of the model's layers, None
    among them if some layer has none. capped: scores are soft-capped, which makes its masks piece
    by piece instead. sinks: heads have one; without the varlen kernel, and but for a CPU, masks are
    made piece by piece too.
    """
    info = info or AttentionInfo()
    if info.documents is not None and info.documents.shape[1] != keys:
        raise ValueError(
            f"documents are of every key, found those of {info.documents.shape[1]} and {keys} keys"
        )
    if capped:
        return info
    needs_mask = {
        window: (
            info.documents is not None
            or (window is not None and keys > window)
            or (queries > 1 and keys > queries)
        )
        for window in set(windows)
    }
    flattens = keys == queries and has_varlen(device, dtype, head_width)
    if sinks and not flattens and get_kernel_type(device) != "cpu":
        return info
    if (sinks or any(needs_mask.values())) and flattens:
        if info.boundaries is None:
            boundaries = torch.arange(
                0, rows * queries + 1, queries, dtype=torch.int32, device=device
            )
            info = replace(info, boundaries=boundaries, longest=queries)
        return replace(info, flattened=True)
    masks: dict[int | None, Tensor | None] = dict.fromkeys(windows)
    for window in (window for window, needed in needs_mask.items() if needed):
        seen = make_visible_mask(compute_reach(info.documents, queries, keys, window, device), keys)
        # What kernels would otherwise make of a bool mask again in every layer.
        masks[window] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(
            ~seen, float("-inf")
        )
    return replace(info, masks=masks)


def has_varlen(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether torch's kernel for flattened documents can run: CUDA from Ampere on, half precision,
    head widths it was built for.
    """
    capability = get_compute_capability(device)
    if capability is None or capability < VARLEN_CAPABILITY or "window_size" not in _VARLEN_OPTIONS:
        return False
    return dtype in (torch.float16, torch.bfloat16) and head_width % 8 == 0 and head_width <= 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    info: AttentionInfo | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`; returns `[b, h, s, e]`.

    info: from `prepare_attention`, the same for every layer; None: rows of one document each,
    prepared here. window: a token sees so many tokens, its own included. softcap: scores become
    softcap * tanh(scores / softcap). scale: multiplies the scores first. sinks: `[h]`, see
    `recipe_lib.ops.attention`.
    """
    if softcap is not None:
        return capped_attention(q, k, v, info.documents if info else None, window, softcap, scale)
    if info is None:
        shape = {
            "rows": q.shape[0],
            "queries": q.shape[2],
            "keys": k.shape[2],
            "head_width": q.shape[3],
        }
        options: dict[str, Any] = {
            "capped": False,
            "sinks": sinks is not None,
            "dtype": q.dtype,
            "device": q.device,
        }
        info = prepare_attention(None, windows=(window,), **options, **shape)
    if sinks is not None:
        mask = info.masks.get(window) if info.masks else None
        ends = info.boundaries if info.flattened else None
        settings = (ends, info.longest, mask, info.documents, window, scale)
        return cast(Tensor, _SinkAttention.apply(q, k, v, sinks, *settings))
    if info.flattened:  # all rows as one list of documents: no mask, nothing of size s x s
        grouped: dict[str, Any] = (
            {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _VARLEN_OPTIONS else {}
        )
        ends = (info.boundaries, info.boundaries, info.longest, info.longest)
        window_size = (_left(window), 0)
        out = varlen_attn(
            _flat(q), _flat(k), _flat(v), *ends, scale=scale, window_size=window_size, **grouped
        )
        return _rows(out, q)
    return scaled_dot_product(q, k, v, info.masks[window], scale)


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The only call of torch's SDPA: causal without a mask (one query sees all keys), else as the
    mask says.

    Keys are not expanded to the number of query heads where the kernel takes them as they are: the
    CPU kernel always, the CUDA ones without a mask in half precision. Elsewhere grouped keys would
    fall to the path that holds s x s.
    """
    grouped = q.shape[1] != k.shape[1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    if grouped and get_kernel_type(q.device) == "cuda" and (mask is not None or not half):
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = False
    causal = mask is None
    if (
        q.shape[2] == 1
        # A branch: torch.compile makes no bool, which SDPA wants, of a comparison of dynamic
        # lengths
    ):
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


# Attention with sinks: each head has a score of its own that takes part in the softmax, and attends
# to nothing.
#
# (gpt-oss; arXiv 2309.17453 for where sinks come from.) With L the log-sum-exp of a query's scores
# and L' that of scores and sink, the result is what attention without it gives times exp(L - L');
# and backward is a kernel's own, given that result and L', since a share of the softmax is
# exp(score - L'). So kernels that know of no sink serve.


class _SinkAttention(torch.autograd.Function):
    """settings: ends of flattened documents or None, tokens of the longest, mask or None, documents
    or None (see `AttentionInfo`), window, scale.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        ends, longest, mask, documents, window, scale = settings
        if ends is not None:
            out, sums, random = _flattened(q, k, v, ends, longest, window, scale)
        elif get_kernel_type(q.device) == "cpu":
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
            of_sinks = (
                -(shares * (gradient * out).sum(dim=-1, dtype=sums.dtype))
                .sum(dim=(0, 2))
                .to(sinks.dtype)
            )
        if ends is not None:
            found = _flattened_gradients(
                gradient, q, k, v, out, sums, ends, longest, random, window, scale
            )
        elif get_kernel_type(q.device) == "cpu":
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
    return (
        -1 if window is None else window - 1
    )  # the kernel counts the tokens to the left of its own


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


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    causal = mask is None and q.shape[2] > 1
    return cast(
        tuple[Tensor, Tensor],
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        ),
    )


def _cpu_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    scale: float,
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
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        scores = _scores(q[:, :, part], k, keys, reach, scale, wide)
        sums[:, :, part] = scores.logsumexp(dim=-1)
        shares = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, part] = torch.bmm(stack_heads(shares, k), values).view(out[:, :, part].shape)
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
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, gradient))
        shares = torch.exp(
            _scores(q[:, :, part], k, keys, reach, scale, sums.dtype)
            - sums[:, :, part].unsqueeze(-1)
        )
        of_v[:, :, seen] += torch.bmm(
            stack_heads(shares.to(q.dtype), k).transpose(1, 2), slopes
        ).view_as(v[:, :, seen])
        of_shares = multiply_heads(slopes, values, reach, q.shape[1])
        of_scores = stack_heads((shares * (of_shares - kept[:, :, part]) * scale).to(q.dtype), k)
        of_q[:, :, part] = torch.bmm(of_scores, keys).view(of_q[:, :, part].shape)
        of_k[:, :, seen] += torch.bmm(of_scores.transpose(1, 2), queries).view_as(k[:, :, seen])
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _scores(
    q: Tensor, k: Tensor, keys: Tensor, reach: Tensor, scale: float, wide: torch.dtype
) -> Tensor:
    """Scores `[b, h, m, n]` of some queries, -inf where nothing is seen."""
    scores = multiply_heads(stack_heads(q, k), keys, reach, q.shape[1]).to(wide) * scale
    return scores.masked_fill(~make_visible_mask(reach, keys.shape[1]), float("-inf"))


# Attention whose scores are soft-capped (Gemma 2, arXiv 2408.00118), some queries at a time.
#
# No kernel of torch caps scores, so they are made in the open: two matmuls, and between them a
# chain that is one kernel where chains are fused. The pieces keep the scores that exist at a time
# small; nothing of them is kept for backward, which makes each piece's again. Sums over pieces of
# the gradients of keys and values are in fp32.


MAX_SCORES_AT_ONCE = (
    2**24
)  # scores that exist at a time: 64 MiB in fp32, in which a chain that is not fused has them


def compute_reach(
    documents: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Int32 `[b or 1, queries]`: how many keys each of the last `queries` of a row sees, back from
    its own.

    documents: int32 `[b, keys]`, rising from one to the next; None: a row is one. window: a token
    sees so many, its own included.
    """
    found = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device).unsqueeze(
        0
    )
    if documents is not None:
        own = documents[:, keys - queries :].contiguous()
        found = found - torch.searchsorted(
            documents, own, out_int32=True
        )  # where its document starts
    return found if window is None else found.clamp(max=window)


def make_visible_mask(reach: Tensor, keys: int) -> Tensor:
    """Bool `[b or 1, 1, m, keys]`: which keys m queries see, the last one of which is as far as the
    last key.
    """
    own = torch.arange(keys - reach.shape[1], keys, dtype=torch.int32, device=reach.device)
    places = torch.arange(keys, dtype=torch.int32, device=reach.device)
    return (places <= own[:, None]) & (places > (own - reach)[:, None, :, None])


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    softcap: float,
    scale: float,
) -> Tensor:
    """Causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`; returns `[b, h, s, e]`.

    Scores are `softcap * tanh(scores * scale / softcap)`. documents: int32 `[b, t]`, see `reaches`.
    """
    settings = (documents, window, softcap, scale)
    return cast(Tensor, GradientNode.apply(_attended, _gradients, range(7), q, k, v, *settings))


@register_shaped_work()
def _attended(
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
        del scores
        out[:, :, part] = torch.bmm(stack_heads(shares, k), values).view(out[:, :, part].shape)
        del shares
    return out


@register_shaped_work()
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
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, gradient))
        scores = multiply_heads(queries, keys, reach, q.shape[1])
        shares = stack_heads(capped_shares(scores, reach, softcap, scale), k)
        of_v[:, :, seen] += torch.bmm(shares.transpose(1, 2), slopes).view_as(v[:, :, seen])
        del shares
        of_shares = multiply_heads(slopes, values, reach, q.shape[1])
        of_scores = stack_heads(capped_score_gradients(of_shares, scores, reach, softcap, scale), k)
        del scores, of_shares
        of_q[:, :, part] = torch.bmm(of_scores, keys).view(of_q[:, :, part].shape)
        of_k[:, :, seen] += torch.bmm(of_scores.transpose(1, 2), queries).view_as(k[:, :, seen])
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def split_queries(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries of a piece, the keys up to its last one that they can see, how many of these each of
    them sees).
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    offset = keys - queries  # the position of query 0 among the keys: what a cache held before
    reach = compute_reach(documents, queries, keys, window, q.device)
    # Fused, scores are not wider than q: as many bytes are twice as many of them.
    count = _count_pieces(
        batch * heads * keys // (2 if should_fuse(q.device) and q.dtype.itemsize == 2 else 1),
        queries,
    )
    for piece in range(count):
        start, stop = queries * piece // count, queries * (piece + 1) // count
        first = 0 if window is None else max(0, start + offset - window + 1)
        yield slice(start, stop), slice(first, stop + offset), reach[:, start:stop]


def _count_pieces(scores: int, queries: int) -> int:
    """Pieces that the queries are taken in; scores: of one of them, over all rows and heads.

    A power of two, so that code that is compiled for rows of any length is made anew for few of
    these numbers.
    """
    count = 1
    while count < queries and scores * queries > count * MAX_SCORES_AT_ONCE:
        count *= 2
    return min(count, queries)


def stack_heads(part: Tensor, k: Tensor) -> Tensor:
    """`[b, h, m, n]` as `[b k, h/k m, n]`: heads that share a key head are more rows of it; keys
    are not expanded.
    """
    return part.reshape(part.shape[0] * k.shape[1], -1, part.shape[3])


def multiply_heads(stacked: Tensor, others: Tensor, reach: Tensor, heads: int) -> Tensor:
    """`[b, h, m, n]`: of m stacked rows of each head, and n of `[b k, n, e]`."""
    return torch.bmm(stacked, others.transpose(1, 2)).view(
        -1, heads, reach.shape[1], others.shape[1]
    )


@register_fused(
    "capped_shares(Tensor scores, Tensor reach, float softcap, float scale) -> Tensor",
    lambda scores, *_: torch.empty_like(scores),
)
def capped_shares(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> Tensor:
    """Capped scores' softmax over the keys that are visible, of products of queries and keys `[b,
    h, m, n]`, in their type. reach: int32 `[b or 1, m]`, see `reaches`.
    """
    return _softmax(scores, reach, softcap, scale)[0].to(scores.dtype)


@register_fused(
    "capped_score_gradients(Tensor of_shares, Tensor scores, Tensor reach, float softcap, float"
    " scale) -> Tensor",
    lambda of_shares, *_: torch.empty_like(of_shares),
    repeats=True,
)
def capped_score_gradients(
    of_shares: Tensor, scores: Tensor, reach: Tensor, softcap: float, scale: float
) -> Tensor:
    """The gradient of the products that `capped_shares` takes, by that of its result."""
    shares, tangents = _softmax(scores, reach, softcap, scale)
    wide = of_shares.to(shares.dtype)
    grad = shares * (wide - (wide * shares).sum(dim=-1, keepdim=True))
    # d cap*tanh(x/cap) / dx = 1 - tanh^2; shares are 0 where nothing is visible.
    return (grad * (1 - tangents.square())).to(scores.dtype) * scale


def _softmax(scores: Tensor, reach: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
    """(shares of the keys, tanh of the scores over the cap), both `[b, h, m, n]` in fp32 (fp64 for
    fp64).
    """
    tangents = torch.tanh(
        (scores * scale).to(torch.promote_types(scores.dtype, torch.float32)) / softcap
    )
    capped = (softcap * tangents).masked_fill(
        ~make_visible_mask(reach, scores.shape[3]), float("-inf")
    )
    return capped.softmax(dim=-1), tangents

"""Causal attention: one function for training and decoding, with documents, windows and soft caps.

Shapes: q `[b, h, s, e]`, keys and values `[b, k, t, e]` with h a multiple of k; t is s, or what a cache holds plus s.
What depends on the batch alone (masks, document boundaries, which kernel) is settled once, by `prepare_attention`.

Rows are right-padded, so a plain causal mask is enough for them: no token looks at the padding after it.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.config.card_limits import VARLEN_CAPABILITY
from recipe_lib.ops.capped_attention import capped_attention, reaches, visible
from recipe_lib.ops.device import capability_of, kernels_of
from recipe_lib.ops.real_tokens import RealTokens
from recipe_lib.ops.sink_attention import sink_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch: masks do the same with more memory
    varlen_attn = None

_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()


@dataclass(frozen=True)
class AttentionInfo:
    """Which tokens of a batch may see which, as tensors.

    documents: int32 `[b, t]`, the document of each key within its row (padding is one of its own); None: a row is
    one document. boundaries: int32 `[n + 1]`, where documents start and end in the flattened `[b * s]` tokens.
    longest: tokens of the longest document, rounded up. masks: per window, what is added to the scores; None: nothing
    beyond causality. flattened: documents and windows go through the varlen kernel, there are no masks. real: which
    tokens are no padding; None: all.
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

    lengths: for each row, the tokens of its documents in order; what is left of `row_length` is padding.
    """
    documents = torch.zeros(len(lengths), row_length, dtype=torch.int32)
    boundaries, longest = [0], 1
    real = RealTokens.from_lengths([sum(parts) for parts in lengths], row_length)
    for row, parts in enumerate(lengths):
        padded = [*parts, row_length - sum(parts)] if sum(parts) < row_length else list(parts)
        if sum(padded) != row_length or min(padded) < 1:
            raise ValueError(f"row {row}: document lengths {list(parts)} do not fit a row of {row_length} tokens")
        sizes = torch.tensor(padded)
        documents[row] = torch.repeat_interleave(torch.arange(len(padded), dtype=torch.int32), sizes)
        boundaries += (sizes.cumsum(0) + row * row_length).tolist()
        longest = max(longest, *padded)
    # A multiple of 128, because compiled code is specialized for this number.
    longest = -(-longest // 128) * 128
    return AttentionInfo(documents, torch.tensor(boundaries, dtype=torch.int32), longest, real=real)


def document_positions(lengths: Sequence[Sequence[int]], row_length: int) -> Tensor:
    """Positions int64 `[b, s]` that start from 0 with each document; 0 in the padding after the last."""
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
    """Settles, once per batch, how each window of the model is attended: causal kernel, varlen kernel or mask.

    rows, queries, keys: b, s, t of the tensors to come. windows: those of the model's layers, None among them if some
    layer has none. capped: scores are soft-capped, which makes its masks piece by piece instead. sinks: heads have
    one; without the varlen kernel, and but for a CPU, masks are made piece by piece too.
    """
    info = info or AttentionInfo()
    if info.documents is not None and info.documents.shape[1] != keys:
        raise ValueError(f"documents are of every key, found those of {info.documents.shape[1]} and {keys} keys")
    if capped:
        return info
    needs_mask = {
        window: info.documents is not None or (window is not None and keys > window) or (queries > 1 and keys > queries)
        for window in set(windows)
    }
    flattens = keys == queries and has_varlen(device, dtype, head_width)
    if sinks and not flattens and kernels_of(device) != "cpu":
        return info
    if (sinks or any(needs_mask.values())) and flattens:
        if info.boundaries is None:
            boundaries = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32, device=device)
            info = replace(info, boundaries=boundaries, longest=queries)
        return replace(info, flattened=True)
    masks: dict[int | None, Tensor | None] = dict.fromkeys(windows)
    for window in (window for window, needed in needs_mask.items() if needed):
        masks[window] = _additive(visible(reaches(info.documents, queries, keys, window, device), keys), dtype)
    return replace(info, masks=masks)


def has_varlen(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether torch's kernel for flattened documents can run: CUDA from Ampere on, half precision, head widths it was
    built for."""
    capability = capability_of(device)
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

    info: from `prepare_attention`, the same for every layer; None: rows of one document each, prepared here.
    window: a token sees so many tokens, its own included. softcap: scores become softcap * tanh(scores / softcap).
    scale: multiplies the scores first. sinks: `[h]`, see `recipe_lib.ops.sink_attention`.
    """
    if softcap is not None:
        return capped_attention(q, k, v, info.documents if info else None, window, softcap, scale)
    if info is None:
        shape = {"rows": q.shape[0], "queries": q.shape[2], "keys": k.shape[2], "head_width": q.shape[3]}
        options: dict[str, Any] = {"capped": False, "sinks": sinks is not None, "dtype": q.dtype, "device": q.device}
        info = prepare_attention(None, windows=(window,), **options, **shape)
    if sinks is not None:
        mask = info.masks.get(window) if info.masks else None
        ends = info.boundaries if info.flattened else None
        return sink_attention(q, k, v, sinks, (ends, info.longest, mask, info.documents), window, scale)
    if info.flattened:
        return _flattened_attention(q, k, v, info, window, scale)
    return scaled_dot_product(q, k, v, info.masks[window], scale)


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The only call of torch's SDPA: causal without a mask (one query sees all keys), else as the mask says.

    Keys are not expanded to the number of query heads where the kernel takes them as they are: the CPU kernel always,
    the CUDA ones without a mask in half precision. Elsewhere grouped keys would fall to the path that holds s x s.
    """
    grouped = q.shape[1] != k.shape[1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    if grouped and kernels_of(q.device) == "cuda" and (mask is not None or not half):
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = False
    causal = mask is None
    if q.shape[2] == 1:  # a branch: torch.compile makes no bool, which SDPA wants, of a comparison of dynamic lengths
        causal = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _flattened_attention(
    q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo, window: int | None, scale: float
) -> Tensor:
    """All rows as one list of documents through the varlen flash kernel: no mask, nothing of size s x s."""
    flat_q, flat_k, flat_v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _VARLEN_OPTIONS else {}
    left = -1 if window is None else window - 1  # the kernel counts the tokens to the left of its own
    ends, longest = info.boundaries, info.longest
    out = varlen_attn(
        flat_q, flat_k, flat_v, ends, ends, longest, longest, scale=scale, window_size=(left, 0), **options
    )
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere: what kernels would otherwise make of a bool mask again in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))

"""Compute causal attention, for training and decoding, with documents, windows and soft caps.

A batch's loader calls `make_attention_info`. The decoder calls `prepare_attention`, once for a
batch, which decides what depends on the batch alone (masks, document boundaries, which kernel).
Then every layer calls `attention`. A document is one of several sequences packed into a row, whose
tokens see one another only. The varlen kernel is torch's `varlen_attn`, for packed documents.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from recipe_lib.config.precision import VARLEN_CAPABILITY
from recipe_lib.ops.device import get_compute_capability, get_kernel_type
from recipe_lib.ops.special_attention import (
    attend_with_sinks,
    capped_attention,
    compute_reach,
    flatten_tokens,
    get_left_window,
    make_visible_mask,
    unflatten_tokens,
)

# Shapes: b rows, h heads, k heads of keys and values with h a multiple of k, s queries, t keys (s
# and those of a cache), e channels of a head. q is `[b, h, s, e]`, keys and values `[b, k, t, e]`.


class RealTokens:
    """The tokens of a micro-batch that are no padding: means over tokens leave padding out.

    Rows are padded on the right, so that two Python numbers describe a row. A mask on the device
    would be one more tensor that lives from forward to backward; `make_mask` makes it where it is
    read.
    """

    # No dataclass: torch.compile would look into a frozen one, and compile anew for every length.
    def __init__(self, spans: Sequence[tuple[int, int]], count: int) -> None:
        """Note spans of real tokens among `count` tokens: those of a micro-batch, row after row.

        spans: (index of the first real token, one after the last), for each row.
        """
        self.spans = tuple(spans)
        self.count = count
        # Tokens of each packed document, row after row, the padding being one; (): rows are not
        # packed.
        self.documents: tuple[int, ...] = ()

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], row_length: int) -> "RealTokens":
        """Return the real tokens of rows of `row_length`, of which the first `lengths` are real."""
        starts = [row * row_length for row in range(len(lengths))]
        spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return cls(spans, row_length * len(lengths))

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest span, at least 1."""
        return max([1, *(last - first for first, last in self.spans)])

    @property
    def total(self) -> int:
        return sum(last - first for first, last in self.spans)

    def take(self, part: slice, every: int) -> "RealTokens":
        """Return the real tokens of a part of the micro-batch: slice `part` of each block.

        every: the number of tokens of a block; blocks follow one another. The result has the spans
        of all rows for each block, most of them empty.
        """
        length = part.stop - part.start
        spans = []
        for block in range(self.count // every):
            begin = block * every + part.start
            for span in self.spans:
                # Within the part; a span that lies outside of it becomes an empty one.
                first, last = (min(max(token - begin, 0), length) for token in span)
                spans.append((block * length + first, block * length + last))
        return RealTokens(spans, length * (self.count // every))

    def shard_rows(self, rank: int, ranks: int) -> "RealTokens":
        """Return the real tokens of a rank's part of each row; all ranks' parts have one length.

        There has to be one span a row, so not after `take` or this method.
        """
        row_length = self.count // len(self.spans)
        length = row_length // ranks
        return self.take(slice(rank * length, (rank + 1) * length), row_length)

    def make_mask(self, device: torch.device) -> Tensor:
        """Return bool `[count]`, True for real tokens. Nothing is copied from the host."""
        mask = torch.zeros(self.count, dtype=torch.bool, device=device)
        for first, last in self.spans:
            mask[first:last].fill_(True)  # an assignment would make a tensor of the number
        return mask


# The parameters of the varlen kernel in this release of torch: some releases lack `window_size` or
# `enable_gqa`.
_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass(frozen=True)
class AttentionInfo:
    """The tokens of a batch that may see one another, and how layers compute attention."""

    # int32 [b, t], for each key the index of its document in the row (padding is one more
    # document); None: a row is one document.
    documents: Tensor | None = None
    # int32 [n + 1], the cu_seqlens of the n documents in the flattened [b * s] tokens; None: not
    # computed, as a row is one document.
    boundaries: Tensor | None = None
    # Number of tokens of the longest document, rounded up; 0: without boundaries.
    longest: int = 0
    # Window of a layer -> [b or 1, 1, s, t], added to its scores; value None: causal, no mask.
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    # True: layers use the varlen kernel by `boundaries`, and there are no masks.
    flattened: bool = False
    # The tokens that are no padding; None: all.
    real: RealTokens | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AttentionInfo":
        """Return a copy with documents and boundaries on another device.

        Call it before `prepare_attention`: the masks stay where they are.
        """
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in (("documents", self.documents), ("boundaries", self.boundaries))
            if value is not None
        }
        return replace(self, **moved)


def make_attention_info(lengths: Sequence[Sequence[int]], row_length: int) -> AttentionInfo:
    """Return the AttentionInfo, on the host, of rows that hold several documents each.

    lengths: for each row, the number of tokens of each of its documents, in order. row_length:
    number of tokens of a row; those after its documents are padding. Raises ValueError for
    documents that are longer than their row, or empty.
    """
    documents = torch.zeros(len(lengths), row_length, dtype=torch.int32)
    boundaries = [0]
    all_lengths = list[int]()
    for row, row_lengths in enumerate(lengths):
        # The padding is a document of its own, so that boundaries cover every token.
        padding = row_length - sum(row_lengths)
        padded = [*row_lengths, padding] if padding > 0 else list(row_lengths)
        if sum(padded) != row_length or min(padded) < 1:
            raise ValueError(
                f"row {row}: document lengths {list(row_lengths)} do not fit a row of {row_length}"
                " tokens"
            )
        sizes = torch.tensor(padded)
        documents[row] = torch.arange(len(padded), dtype=torch.int32).repeat_interleave(sizes)
        boundaries += (sizes.cumsum(0) + row * row_length).tolist()
        all_lengths += padded
    longest = max([1, *all_lengths])
    real = RealTokens.from_lengths([sum(row_lengths) for row_lengths in lengths], row_length)
    real.documents = tuple(all_lengths)
    return AttentionInfo(
        documents=documents,
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        # A multiple of 128, so that few numbers occur: code is compiled anew for each.
        longest=-(-longest // 128) * 128,
        real=real,
    )


def compute_document_positions(lengths: Sequence[Sequence[int]], row_length: int) -> Tensor:
    """Return positions int64 `[b, s]` that start at 0 in each document, and are 0 in the padding.

    lengths, row_length: see `make_attention_info`.
    """
    positions = torch.arange(row_length).repeat(len(lengths), 1)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
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
    """Choose, once for a batch, how layers attend: causal kernel, varlen kernel or masks.

    info: the documents of the batch, on `device`; None: each row is one. rows, queries, keys: b, s
    and t of the tensors to come. windows: those of all layers, None for a layer without one.
    head_width: e. capped: True if scores are soft-capped. dtype: of q, k and v. sinks: True if
    heads have sinks, scores that take part in the softmax but have no value. Raises ValueError if
    `info.documents` are not of `keys` keys.
    """
    info = info or AttentionInfo()
    if info.documents is not None and info.documents.shape[1] != keys:
        raise ValueError(
            f"documents are of every key, found those of {info.documents.shape[1]} and {keys} keys"
        )
    if capped:
        return info  # `capped_attention` makes its masks itself, piece by piece
    # Windows for which causality is not enough: there are documents, the window is shorter than the
    # row, or queries come after cached keys. Padding needs no mask: it is on the right, so that no
    # token before it sees it.
    masked_windows = [
        window
        for window in set(windows)
        if info.documents is not None
        or (window is not None and keys > window)
        or (queries > 1 and keys > queries)
    ]
    flattens = keys == queries and has_varlen(device, dtype, head_width)
    if sinks and not flattens and get_kernel_type(device) != "cpu":
        return info  # `attend_with_sinks` makes its masks itself, piece by piece
    if (sinks or masked_windows) and flattens:
        if info.boundaries is None:
            info = replace(
                info,
                boundaries=torch.arange(
                    0, rows * queries + 1, queries, dtype=torch.int32, device=device
                ),
                longest=queries,
            )
        return replace(info, flattened=True)
    masks: dict[int | None, Tensor | None] = dict.fromkeys(windows)
    for window in masked_windows:
        is_visible = make_visible_mask(
            compute_reach(info.documents, queries=queries, keys=keys, window=window, device=device),
            keys,
        )
        # In the scores' dtype: kernels would convert a bool mask to it again in every layer.
        masks[window] = torch.zeros(is_visible.shape, dtype=dtype, device=device).masked_fill(
            ~is_visible, float("-inf")
        )
    return replace(info, masks=masks)


def has_varlen(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return True if torch's varlen kernel can run.

    It needs a GPU from Ampere on, half precision, and a head width that is a multiple of 8 up to
    256.
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
    """Return causal attention of q `[b, h, s, e]` over k, v `[b, k, t, e]`: `[b, h, s, e]`.

    info: from `prepare_attention`, the same for every layer; None: rows of one document each,
    prepared here. window: the most tokens that a token sees, its own included; None: no limit.
    softcap: scores become softcap * tanh(scores / softcap); None: no cap. scale: multiplies the
    scores first. sinks: for each head a score `[h]` that takes part in the softmax but has no
    value; None: none.
    """
    if softcap is not None:
        return capped_attention(
            q,
            k,
            v,
            documents=info.documents if info else None,
            window=window,
            softcap=softcap,
            scale=scale,
        )
    if info is None:
        info = prepare_attention(
            None,
            rows=q.shape[0],
            queries=q.shape[2],
            keys=k.shape[2],
            windows=(window,),
            head_width=q.shape[3],
            capped=False,
            dtype=q.dtype,
            device=q.device,
            sinks=sinks is not None,
        )
    if sinks is not None:
        return attend_with_sinks(
            q,
            k=k,
            v=v,
            sinks=sinks,
            boundaries=info.boundaries if info.flattened else None,
            longest=info.longest,
            mask=info.masks.get(window) if info.masks else None,
            documents=info.documents,
            window=window,
            scale=scale,
        )
    if info.flattened:
        return _run_varlen(q, k=k, v=v, info=info, window=window, scale=scale)
    return scaled_dot_product(q, k=k, v=v, mask=info.masks[window], scale=scale)


def _run_varlen(
    q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo, *, window: int | None, scale: float
) -> Tensor:
    """Return attention by the varlen kernel, `[b, h, s, e]`; see `attention`."""
    # All rows are flattened to one list of documents, so that there is no mask of size s x s.
    is_grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {"enable_gqa": is_grouped} if "enable_gqa" in _VARLEN_OPTIONS else {}
    return unflatten_tokens(
        varlen_attn(
            flatten_tokens(q),
            flatten_tokens(k),
            flatten_tokens(v),
            cu_seq_q=info.boundaries,
            cu_seq_k=info.boundaries,
            max_q=info.longest,
            max_k=info.longest,
            scale=scale,
            window_size=(get_left_window(window), 0),
            **options,
        ),
        q,
    )


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return attention by torch's SDPA, `[b, h, s, e]`.

    mask: `[b or 1, 1, s, t]`, added to the scores; None: causal, but a single query sees all keys.
    """
    is_grouped = q.shape[1] != k.shape[1]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    # The CPU kernel takes keys with fewer heads as they are, CUDA's kernels only without a mask and
    # in half precision. Otherwise SDPA would take the path that holds s x s scores, so that keys
    # and values are expanded to h heads.
    if is_grouped and get_kernel_type(q.device) == "cuda" and (mask is not None or not is_half):
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        is_grouped = False
    is_causal = mask is None
    # A branch, no expression: SDPA wants a bool, and torch.compile makes none of a comparison of
    # dynamic lengths.
    if q.shape[2] == 1:
        is_causal = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )

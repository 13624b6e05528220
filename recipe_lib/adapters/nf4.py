"""Quantize to NF4 and back: 64 elements are 4-bit codes and one scale (QLoRA, arXiv 2305.14314).

The scales are themselves kept in 8 bits. `adapters.quantized` calls `quantize_blocks` and
`quantize_scales`, which give what `dequantize` takes. Quantizing is torchao's, element for element.
Dequantizing is ours, to the same bits: it runs in every step, and for 112 MiB of bf16 takes 146 MiB
where torchao's takes 786 MiB (docs/measurements/torchao.md).
"""

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recipe_lib.logs import silence_torchao
from recipe_lib.ops.fused_kernels import register_fused, should_fuse

BLOCK = 64  # elements that share a scale
SCALES_PER_FACTOR = 256  # the most consecutive scales that share a factor (a group of scales)
# The value, over its block's scale, of each code: quantiles of the normal distribution, as torchao
# rounds them; zero is one of them.
LEVELS = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
_PIECE_BLOCKS = 2**17  # blocks dequantized at a time: indices of 16 MiB
# dtype -> the integer that is as wide as two of its elements
_PAIRS = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
DTYPES = frozenset(_PAIRS)  # of weights that can be quantized, and of their arithmetic

# False while `tune plan` simulates a run, on tensors without values.
_has_values: ContextVar[bool] = ContextVar("has_values", default=True)


@contextmanager
def make_tables_anew(*, has_values: bool = True) -> Iterator[None]:
    """Clear the cached tables at the beginning and the end of the block.

    The block is a simulation of `tune plan`, whose tables must not be used outside of it.
    has_values: False: quantizing looks at no values, and torchao is not imported.
    """
    tables = (_make_pair_table, _make_levels)
    for table in tables:
        table.cache_clear()
    before = _has_values.set(has_values)
    try:
        yield
    finally:
        _has_values.reset(before)
        for table in tables:
            table.cache_clear()


def count_factors(blocks: int) -> int:
    """Return the length of `factors` for so many blocks: one a group of scales, and their mean."""
    return blocks // _get_group_size(blocks) + 1


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and largest magnitudes `[n]` of blocks of elements `[n, 64]`.

    Codes are uint8 `[n, 32]`, the first of two elements in the high bits. A block's codes depend on
    that block alone. values: in one of DTYPES.
    """
    largest = values.abs().amax(dim=1)
    # A block of zeros stays zeros: torchao takes 0 / 0 for the lowest level.
    shares = (values / largest.unsqueeze(1)).nan_to_num_(nan=0.0)
    borders = (
        _find_borders(values.dtype)
        if _has_values.get()
        else torch.empty(len(LEVELS) - 1, dtype=values.dtype)
    ).to(values.device)
    codes = torch.bucketize(shares, borders, right=True, out_int32=True).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], largest


def quantize_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 scales `[n]` and fp32 factors `[n / group + 1]`, of which the last is the mean.

    A block's scale is `scales / factor of its group + mean`. largest: largest magnitudes of all
    blocks of the matrix `[n]`.
    """
    if not _has_values.get():
        factors = largest.new_empty(count_factors(len(largest)), dtype=torch.float32)
        return torch.empty_like(largest, dtype=torch.int8), factors
    scales, factors, mean = _import_nf4_tensor().double_quantize_scalers(
        largest, 1, _get_group_size(len(largest))
    )
    # Scales that are all the same equal the mean: they are zeros, in place of what torchao makes of
    # 0 / 0.
    scales = scales.masked_fill(factors.isinf().repeat_interleave(_get_group_size(len(largest))), 0)
    return scales, torch.cat([factors, mean.unsqueeze(0)]).float()


def dequantize(
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    dtype: torch.dtype,
    first: int,
    last: int,
    place: Sequence[int] = (),
) -> Tensor:
    """Return the elements of blocks `first` to `last` (exclusive), `[last - first, 64]`.

    codes: uint8 `[n, 32]`. scales: int8 `[n]`. factors: fp32, of the whole matrix. dtype: that the
    blocks were quantized from. first, last: among the n blocks. place: which of the matrix's blocks
    the n are, see `compute_block_numbers`; empty: all.
    """
    if should_fuse(codes.device):
        count = last - first
        begin_run_stride = place[:3] if place else (0, count, count)
        return _dequantize(
            codes[first:last],
            scales[first:last],
            factors,
            _make_levels(dtype, codes.device),
            [first, *begin_run_stride],
            _get_group_size(place[3] if place else len(scales)),
        )
    if place:
        group = _get_group_size(place[3])
        numbers = compute_block_numbers(first, last=last, place=place, device=codes.device)
        wide = scales[first:last] / factors.to(dtype).index_select(0, numbers // group)
        wide = (wide + factors[-1].to(dtype)).unsqueeze(1)
    else:
        group = _get_group_size(len(scales))
        # Whole groups of scales, so that their factors are broadcast, not repeated.
        start = first // group
        stop = -(-last // group)
        wide = scales[start * group : stop * group].view(-1, group) / factors[start:stop].to(
            dtype
        ).unsqueeze(1)
        wide = wide.flatten() + factors[-1].to(dtype)
        wide = wide[first - start * group : last - start * group].unsqueeze(1)
    pairs = _make_pair_table(dtype, codes.device)
    elements = torch.empty((last - first, BLOCK), dtype=dtype, device=codes.device)
    for at in range(0, last - first, _PIECE_BLOCKS):
        piece = elements[at : at + _PIECE_BLOCKS]
        index = codes[first + at : first + at + len(piece)].flatten().int()
        piece.copy_(pairs.index_select(0, index).view(dtype).view(-1, BLOCK))
        piece.mul_(wide[at : at + len(piece)])
    return elements


@register_fused(
    "dequantize_nf4(Tensor codes, Tensor scales, Tensor factors, Tensor levels, SymInt[] place,"
    " SymInt group) -> Tensor",
    lambda codes, scales, factors, levels, *_: levels.new_empty(codes.shape[0], BLOCK),
)
def _dequantize(
    codes: Tensor, scales: Tensor, factors: Tensor, levels: Tensor, place: Sequence[int], group: int
) -> Tensor:
    """Return the elements of all given blocks `[n, 64]`, by one expression that can be fused.

    levels: LEVELS `[16]`, in the dtype of the result. place: (number of the first block in the
    part, begin, run, stride), the last three of `compute_block_numbers`. group: number of scales
    that share a factor.
    """
    first, begin, run, stride = place
    numbers = compute_block_numbers(
        first, last=first + codes.shape[0], place=(begin, run, stride), device=codes.device
    )
    narrow = factors.to(levels.dtype)
    wide = scales / narrow[numbers // group] + narrow[-1]
    # The first of two elements is in the high bits.
    shifts = 4 - 4 * torch.arange(2, device=codes.device)
    index = (codes.unsqueeze(-1).int() >> shifts) & 15
    return (levels[index] * wide[:, None, None]).flatten(1)


def compute_block_numbers(
    first: int, last: int, place: Sequence[int], device: torch.device
) -> Tensor:
    """Return the numbers in the whole matrix of blocks `first` to `last` (exclusive) of a part.

    place: (begin, run, stride, total). The part has `run` blocks from number `begin` on, then as
    many from `begin + stride` on, and so forth; the matrix has `total`, which is not read here.
    (0, 2, 8, 16) are the first two blocks of each of two rows of eight.
    """
    begin, run, stride = place[:3]
    numbers = torch.arange(first, last, device=device)
    return begin + numbers // run * stride + numbers % run


def _get_group_size(blocks: int) -> int:
    """Return the number of scales that share a factor, which divides the number of blocks."""
    return math.gcd(blocks, SCALES_PER_FACTOR)


@cache
def _make_pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return for each byte the two elements that it codes for, as one integer `[256]`."""
    # Cached: the host waits for the copy to the device, and each dequantizing needs the table.
    levels = torch.tensor(LEVELS, dtype=dtype)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return both.view(_PAIRS[dtype]).flatten().to(device)


@cache
def _make_levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, dtype=dtype).to(device)


@cache
def _find_borders(dtype: torch.dtype) -> Tensor:
    """Return for each level but the first the least value that torchao rounds to it, `[15]`.

    torchao compares every element with all 16 levels; comparing with borders takes a tenth of the
    time, and of the memory.
    """
    nearest = _import_nf4_tensor().quantize_tensor_nearest
    levels = torch.tensor(LEVELS, dtype=dtype)
    below = levels[:-1]
    above = levels[1:]
    level = torch.arange(1, len(LEVELS))
    # Bisection, until no value of dtype lies between.
    while True:
        middle = (below + above) / 2
        is_between = (middle > below) & (middle < above)
        if not is_between.any():
            return above
        is_reached = nearest(middle, levels) >= level
        above = torch.where(is_between & is_reached, middle, above)
        below = torch.where(is_between & ~is_reached, middle, below)


@cache
def _import_nf4_tensor() -> Any:
    """Import torchao's class of NF4 tensors, which moved from one version to the next."""
    silence_torchao()
    try:
        module = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    except ModuleNotFoundError:  # where older versions have it
        module = importlib.import_module("torchao.dtypes.nf4tensor")
    return module.NF4Tensor

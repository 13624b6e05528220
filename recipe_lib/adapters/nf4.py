"""NF4: 64 numbers as 4-bit codes and one scale, the scales in 8 bits themselves (QLoRA, arXiv
2305.14314).

Quantizing is torchao's, number for number; this is the only module that knows where torchao keeps
it. Dequantizing is ours, because it runs in every step: for 112 MiB of bf16 (4096 x 14336)
torchao's has 786 MiB alive, 8-byte indices of the whole matrix among them, this, which works in
pieces, 146 MiB, and both give the same bits (docs/measurements/ torchao.md). Fused it is one kernel
for the numbers, and a small one before it for the scales of blocks.
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

BLOCK = 64  # numbers that share a scale
SCALES_PER_FACTOR = 256  # scales that share a factor, at most
# Where the normal distribution's quantiles lie, as torchao rounds them; zero is one of them.
LEVELS = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
_PIECE_BLOCKS = 2**17  # blocks dequantized at a time: indices of 16 MiB
_PAIRS = {
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
    torch.float32: torch.int64,
}  # as wide as two
DTYPES = frozenset(_PAIRS)  # what arithmetic can be done in; factors are kept in fp32
_TORCHAO_HOME = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
_OLDER_HOME = "torchao.dtypes.nf4tensor"


# Whether tensors have numbers; in a simulation they have sizes alone.
_has_values: ContextVar[bool] = ContextVar("has_values", default=True)


@contextmanager
def make_tables_anew(*, has_values: bool = True) -> Iterator[None]:
    """Inside, tables are made where they are first needed, as in a new process.

    has_values: False in a simulation: quantizing then looks at no numbers, and torchao is not
    imported.
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
    """Length of `factors` for so many blocks: one for each group of scales, and the mean of all
    scales.
    """
    return blocks // _get_group_size(blocks) + 1


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 `[n, 32]`, the first of two numbers in the high bits; and each block's largest
    magnitude `[n]`.

    values: `[n, 64]`, of the type that arithmetic is done in (bf16 or fp32). A block's codes depend
    on that block alone. A block of zeros stays zeros, where torchao takes 0 / 0 for the lowest
    level.
    """
    largest = values.abs().amax(dim=1)
    # Numbers of a zero block are 0 / 0 = NaN, which no comparison places.
    shares = (values / largest.unsqueeze(1)).nan_to_num_(nan=0.0)
    borders = (
        _find_borders(values.dtype)
        if _has_values.get()
        else torch.empty(len(LEVELS) - 1, dtype=values.dtype)
    )
    codes = torch.bucketize(shares, borders.to(values.device), right=True, out_int32=True).to(
        torch.uint8
    )
    return codes[:, ::2] << 4 | codes[:, 1::2], largest


def quantize_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, int8 `[n]`, and fp32 factors `[n / group + 1]`, the last of which is the mean of all
    scales.

    largest: of every block of the matrix `[n]`. Scales that are all the same need nothing beyond
    the mean: they are zero, as is what torchao makes of them.
    """
    if not _has_values.get():
        factors = largest.new_empty(count_factors(len(largest)), dtype=torch.float32)
        return torch.empty_like(largest, dtype=torch.int8), factors
    scales, factors, mean = _import_nf4_tensor().double_quantize_scalers(
        largest, 1, _get_group_size(len(largest))
    )
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
    """The numbers of blocks `first` to `last` (exclusive), `[last - first, 64]` of `dtype`, which
    they were made in.

    codes: uint8 `[n, 32]`; scales: int8 `[n]`; factors: fp32, of the whole matrix. place: which of
    its blocks the n are, if not all: see `block_numbers`.
    """
    if should_fuse(codes.device):
        count = last - first
        of, group = (
            (place[:3], _get_group_size(place[3]))
            if place
            else ((0, count, count), _get_group_size(len(scales)))
        )
        levels = _make_levels(dtype, codes.device)
        return _dequantize(
            codes[first:last], scales[first:last], factors, levels, [first, *of], group
        )
    if place:
        group = _get_group_size(place[3])
        numbers_of = compute_block_numbers(first, last, place, codes.device)
        wide = scales[first:last] / factors.to(dtype).index_select(0, numbers_of // group)
        wide = (wide + factors[-1].to(dtype)).unsqueeze(1)
    else:
        group = _get_group_size(len(scales))
        start, stop = first // group, -(-last // group)  # groups of scales that the blocks lie in
        wide = scales[start * group : stop * group].view(-1, group) / factors[start:stop].to(
            dtype
        ).unsqueeze(1)
        wide = (wide.flatten() + factors[-1].to(dtype))[
            first - start * group : last - start * group
        ].unsqueeze(1)
    pairs = _make_pair_table(dtype, codes.device)
    numbers = torch.empty((last - first, BLOCK), dtype=dtype, device=codes.device)
    for at in range(0, last - first, _PIECE_BLOCKS):
        piece = numbers[at : at + _PIECE_BLOCKS]
        index = codes[first + at : first + at + len(piece)].flatten().int()
        piece.copy_(pairs.index_select(0, index).view(dtype).view(-1, BLOCK))
        piece.mul_(wide[at : at + len(piece)])
    return numbers


@register_fused(
    "dequantize_nf4(Tensor codes, Tensor scales, Tensor factors, Tensor levels, SymInt[] place,"
    " SymInt group) -> Tensor",
    lambda codes, scales, factors, levels, *_: levels.new_empty(codes.shape[0], BLOCK),
)
def _dequantize(
    codes: Tensor, scales: Tensor, factors: Tensor, levels: Tensor, place: Sequence[int], group: int
) -> Tensor:
    """The numbers of all given blocks `[n, 64]`, in the type of `levels` `[16]`, as one expression.

    place: the first one's number here, then `block_numbers`' place. group: scales that share a
    factor.
    """
    first, begin, run, stride = place
    numbers_of = compute_block_numbers(
        first, first + codes.shape[0], (begin, run, stride), codes.device
    )
    narrow = factors.to(levels.dtype)
    wide = scales / narrow[numbers_of // group] + narrow[-1]
    shifts = 4 - 4 * torch.arange(
        2, device=codes.device
    )  # the first of two numbers is in the high bits
    index = (codes.unsqueeze(-1).int() >> shifts) & 15
    return (levels[index] * wide[:, None, None]).flatten(1)


def compute_block_numbers(
    first: int, last: int, place: Sequence[int], device: torch.device
) -> Tensor:
    """Which blocks of the whole matrix blocks `first` to `last` of a part of it are, `[last -
    first]`.

    place: (number of the first, how many follow each other, from the first of these to the next
    first, how many the whole matrix has): (0, 2, 8, 16) are the first two blocks of two rows of
    eight.
    """
    begin, run, stride = place[:3]
    at = torch.arange(first, last, device=device)
    return begin + at // run * stride + at % run


def _get_group_size(blocks: int) -> int:
    return math.gcd(blocks, SCALES_PER_FACTOR)


@cache
def _make_pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte the two numbers that it codes for, as one number twice as wide `[256]`.

    Made once: the copy to the device is one that the host waits for, and each dequantizing needs
    the table.
    """
    levels = torch.tensor(LEVELS, dtype=dtype)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return both.view(_PAIRS[dtype]).flatten().to(device)


@cache
def _make_levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    """LEVELS `[16]`, made once, as `_pairs`."""
    return torch.tensor(LEVELS, dtype=dtype).to(device)


@cache
def _find_borders(dtype: torch.dtype) -> Tensor:
    """The least number of `dtype` that torchao gives to each level but the first `[15]`, found by
    bisection.

    torchao compares every number with all 16 levels; against borders it takes a tenth of the time,
    and of the memory.
    """
    nearest = _import_nf4_tensor().quantize_tensor_nearest
    levels = torch.tensor(LEVELS, dtype=dtype)
    below, above, level = levels[:-1], levels[1:], torch.arange(1, len(LEVELS))
    while True:
        middle = (below + above) / 2
        between = (middle > below) & (middle < above)
        if not between.any():
            return above
        reached = nearest(middle, levels) >= level
        above, below = (
            torch.where(between & reached, middle, above),
            torch.where(between & ~reached, middle, below),
        )


@cache
def _import_nf4_tensor() -> Any:
    """Import torchao's class of NF4 tensors, which moved from one version to the next."""
    silence_torchao()
    try:
        return importlib.import_module(_TORCHAO_HOME).NF4Tensor
    except ModuleNotFoundError:
        return importlib.import_module(_OLDER_HOME).NF4Tensor

"""Numbers in 8 or 4 bits, in blocks with a scale each; and rounding to bf16 by chance that every rank agrees on.

A block of consecutive numbers is divided by its largest absolute value, and each becomes the index of the nearest of
2^bits levels between -1 (or 0) and 1. The levels are the dynamic ones of Dettmers (arXiv:1511.04561, arXiv:2110.02861),
whose spacing grows with the number; unsigned 4-bit levels are evenly spaced without a zero (Li, Chen and Zhu,
arXiv:2309.01507), since a second moment of zero would make a step of any size. For the same reason a positive number
never becomes the zero of the unsigned 8-bit levels, but the level above it. Levels, the longest blocks and all other
rounding are torchao's, bit for bit, which tests hold. Its functions are not called: importing them takes a start 2 s of
CPU more, as much again as torch, and its levels are made of tensors, which have no numbers on a simulated device.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

BLOCKS = {8: 256, 4: 128}  # numbers that share a scale, at most
_SMALLEST_SCALE = 1e-12
_EXPONENTS = {8: 7, 4: 3}  # of signed levels, and of unsigned ones of 8 bits: powers of ten
_WORD = 2**32


@dataclass(frozen=True)
class Code:
    """How numbers become codes on one device. levels: `[2^bits]` fp32, rising; borders: `[2^bits - 1]` fp32."""

    bits: int
    levels: Tensor
    borders: Tensor

    def encode(self, numbers: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Codes, uint8 `[.., n]` (4 bits: `[.., n / 2]`, the first of two in the upper half), and scales
        `[.., n / block]` fp32, of numbers `[.., n]` fp32, of which each `block` share a scale."""
        blocks = numbers.unflatten(-1, (-1, block))
        scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
        scaled = (blocks / scales.unsqueeze(-1)).flatten(-2)
        codes = torch.bucketize(scaled, self.borders, out_int32=True, right=True)
        del scaled
        codes = codes.to(torch.uint8)
        if self.bits == 4:
            pairs = codes.unflatten(-1, (-1, 2))
            codes = (pairs[..., 0] << 4) | pairs[..., 1]
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers `[.., n]`, fp32, that codes and scales stand for."""
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        numbers = self.levels.index_select(0, codes.int().flatten()).view(codes.shape)
        numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
        return numbers


def make_code(bits: int, *, signed: bool, device: torch.device) -> Code:
    """The code of 8 or 4 bits, for numbers of both signs or for those from 0 on; its tables take at most 2 KiB."""
    levels, borders = _tables(bits, signed)
    return Code(bits, torch.tensor(levels).to(device, copy=True), torch.tensor(borders).to(device, copy=True))


@lru_cache
def _tables(bits: int, signed: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Levels, and from which fp32 number on each next one is the nearer; numbers, which no simulation can take."""
    if bits == 4 and not signed:
        levels = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    else:
        levels = _dynamic_levels(bits, signed)
    borders = _borders(levels)
    if not signed and levels[0] == 0:
        borders[0] = np.nextafter(np.float32(0), np.float32(1))  # whatever is more than zero has the next level
    return tuple(levels.tolist()), tuple(borders.tolist())


def _dynamic_levels(bits: int, signed: bool) -> np.ndarray:
    """For each power of ten up to 1 the middles of equal parts of [0.1, 1], twice as many as for the power below it."""
    found: list[np.ndarray] = [np.array([0, 1], dtype=np.float32)]
    exponents = _EXPONENTS[bits]
    for exponent in range(exponents):
        parts = 2 ** (exponent + bits - 1 - exponents + (0 if signed else 1))
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(parts))
        at = np.arange(parts + 1)  # rounded once, from the nearer end, as torch.linspace does it
        ends = np.where(at < (parts + 1) // 2, np.float64(np.float32(0.1)) + step * at, 1 - step * (parts - at))
        ends = ends.astype(np.float32)
        middles = np.float32(10.0 ** (exponent - exponents + 1)) * ((ends[1:] + ends[:-1]) / np.float32(2))
        found += [middles, -middles] if signed else [middles]
    return np.sort(np.concatenate(found))


def _borders(levels: np.ndarray) -> np.ndarray:
    """The first fp32 number between each two levels whose distance to the lower one is half of theirs or more.

    In fp32 arithmetic that is next to the middle, on one side or the other.
    """
    lower, half = levels[:-1], (levels[1:] - levels[:-1]) * np.float32(0.5)
    border = lower + half
    down, up = np.float32(-np.inf), np.float32(np.inf)
    for _ in range(4):
        before = np.nextafter(border, down)
        border = np.where(before - lower >= half, before, border)
        border = np.where(border - lower >= half, border, np.nextafter(border, up))
    return border


def round_by_chance(numbers: Tensor, places: Tensor, key: tuple[int, int]) -> Tensor:
    """bf16 of fp32 numbers: up or down, each with a probability by which the mean over keys is the number itself.

    places: int32 of the same shape, by which each draws its own, used up; key: two words for all of them
    (`chance_key`). Numbers that are not finite stay what they are.
    """
    drawn = _mix(places.bitwise_xor_(_signed(key[0]))).bitwise_xor_(_signed(key[1]))
    bits = (
        _mix(drawn).bitwise_and_(0xFFFF).add_(numbers.view(torch.int32)).bitwise_and_(-65536)
    )  # what fp32 has beyond bf16 is 0 now
    rounded = bits.view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers, out=rounded).to(torch.bfloat16)


def chance_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two words of 32 bits that no other seed, step or name has."""
    digest = sha256(f"{seed}\0{step}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def element_places(
    shape: tuple[int, ...], start: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> Tensor:
    """Row-major numbers, modulo 2^32 as int32, of a part's elements in the whole tensor.

    shape: of the part; start: where it begins in the tensor of shape `whole`. So a number that is drawn for an element
    does not depend on how many ranks the tensor is cut among.
    """
    places = torch.zeros((), dtype=torch.int32, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(start[dim], start[dim] + shape[dim], device=device)
        words = (along * stride).bitwise_and_(_WORD - 1)
        words = torch.where(words >= _WORD // 2, words - _WORD, words).to(torch.int32)
        places = places + words.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride = stride * whole[dim] % _WORD
    return places


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _mix(words: Tensor) -> Tensor:
    """Scrambles int32 words in place, each to another one: the last mixing of MurmurHash3 (Appleby, public domain).

    Shifts of int32 fill with the sign, which is masked away; products wrap.
    """
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _signed(0x85EBCA6B)
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _signed(0xC2B2AE35)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words

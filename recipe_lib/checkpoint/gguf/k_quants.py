"""The block formats q4_K, q5_K and q6_K of GGUF, which the package `gguf` reads and does not write.

A row is cut into blocks of 256 weights. A block has one or two numbers in fp16, and for each 32 (q6_K: 16) of its
weights a small integer that these are multiplied by: the scale of that part and, in q4_K and q5_K, how far below zero
its smallest weight may be. What is chosen is, for each part, the scale and minimum with the least weighted squared
error among the best fits to some roundings of its weights.
"""

import math

import torch
from torch import Tensor

BLOCK = 256
_LEVELS = {"q4_K": 15, "q5_K": 31}  # the largest code of a weight
_SCALE_LEVELS = 63  # scales and minimums of parts have 6 bits
# Roundings that are tried: the range of the part is divided into so many levels more than there are.
_STRETCHES = {
    "q4_K": [round(-1 + 0.1 * step, 1) for step in range(21)],
    "q5_K": [round(-0.5 + 0.1 * step, 1) for step in range(16)],
    "q6_K": [round(0.1 * step, 1) for step in range(-9, 10)],
}
_PIECE = 2**18  # weights that are worked on together: as many as stay in a processor's cache


def encode_blocks(values: Tensor, kind: str) -> Tensor:
    """The bytes `[rows, bytes of a row]` of weights `[rows, columns]`, columns a multiple of 256.

    kind: `q4_K`, `q5_K` or `q6_K`.
    """
    rows, columns = values.shape
    if columns % BLOCK:
        raise ValueError(f"{kind} takes rows of a multiple of {BLOCK} weights, found {columns}")
    blocks = values.reshape(-1, BLOCK)
    encode = _symmetric_blocks if kind == "q6_K" else lambda part: _shifted_blocks(part, kind)
    pieces = [encode(part.float()) for part in blocks.split(max(1, _PIECE // BLOCK))]
    return torch.cat(pieces).view(rows, -1)


def _shifted_blocks(blocks: Tensor, kind: str) -> Tensor:
    """q4_K and q5_K: a weight is scale * code - minimum."""
    levels, parts = _LEVELS[kind], blocks.unflatten(1, (8, 32))
    scales, minimums = _fit_shifted(parts, levels, _STRETCHES[kind])
    block_scale, scale_codes = _in_six_bits(scales)
    block_minimum, minimum_codes = _in_six_bits(minimums)
    step = block_scale.float() * scale_codes
    shift = block_minimum.float() * minimum_codes
    codes = ((parts + shift[..., None]) * _inverse(step)[..., None]).round().clamp(0, levels).to(torch.uint8)
    head = torch.cat([block_scale, block_minimum], 1).view(torch.uint8)
    packed = [head, _pack_six_bits(scale_codes.to(torch.uint8), minimum_codes.to(torch.uint8))]
    if kind == "q5_K":
        # the fifth bit of the weights at one place of all eight parts is one byte
        places = torch.arange(8, dtype=torch.uint8)[:, None]
        packed.append(((codes >> 4) << places).sum(1, dtype=torch.uint8))
    low = (codes & 15).unflatten(1, (4, 2))
    packed.append((low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1))
    return torch.cat(packed, 1)


def _fit_shifted(parts: Tensor, levels: int, stretches: list[float]) -> tuple[Tensor, Tensor]:
    """Scale and minimum (both >= 0) of each part `[n, 8, 32]`, by least squares; larger weights count for more."""
    importance = parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    total, moment = importance.sum(-1), (importance * parts).sum(-1)
    best_low, highest = parts.amin(-1).clamp(max=0), parts.amax(-1)
    best_scale = (highest - best_low) / levels
    best_error = torch.full_like(best_scale, math.inf)
    for stretch in (None, *stretches):
        inverse = _inverse(highest - best_low) * (levels + (stretch or 0.0))
        codes = ((parts - best_low[..., None]) * inverse[..., None]).round().clamp(0, levels)
        if stretch is None:
            scale, low = best_scale, best_low
        else:
            weighted = importance * codes
            first, second = weighted.sum(-1), (weighted * codes).sum(-1)
            product = (weighted * parts).sum(-1)
            determinant = total * second - first * first
            scale = (total * product - moment * first) / determinant
            low = (second * moment - first * product) / determinant
            only_scale = product / second
            scale, low = torch.where(low > 0, only_scale, scale), low.clamp(max=0)
        error = (importance * (scale[..., None] * codes + low[..., None] - parts).square()).sum(-1)
        better = error < best_error  # never where the fit has no solution
        best_error = torch.where(better, error, best_error)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, low, best_low)
    return best_scale.clamp(min=0), -best_low


def _in_six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers `[n, 8]` >= 0 as one in fp16 `[n, 1]` times codes `[n, 8]` from 0 to 63."""
    largest = numbers.amax(-1, keepdim=True)
    codes = (numbers * (_inverse(largest) * _SCALE_LEVELS)).round().clamp(0, _SCALE_LEVELS)
    return (largest / _SCALE_LEVELS).half(), codes


def _pack_six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Twice eight codes `[n, 8]` of 6 bits in 12 bytes: those of the first four parts have the upper bits of the last
    four above them."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minimums[:, :4] | ((minimums[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4)], 1)


def _symmetric_blocks(blocks: Tensor) -> Tensor:
    """q6_K: a weight is scale * (code - 32), with codes from 0 to 63 and scales of 8 bits with a sign."""
    parts = blocks.unflatten(1, (16, 16))
    scales = _fit_symmetric(parts)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    block_scale = (largest / -128).half()
    codes_of_scales = (scales * (_inverse(largest) * -128)).round().clamp(-128, 127)
    step = block_scale.float() * codes_of_scales
    codes = (parts * _inverse(step)[..., None]).round().clamp(-32, 31) + 32
    halves = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low, high = halves & 15, halves >> 4
    lows = torch.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], 2)
    highs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    packed = [lows.flatten(1), highs.flatten(1), codes_of_scales.to(torch.int8).view(torch.uint8)]
    return torch.cat([*packed, block_scale.view(torch.uint8)], 1)


def _fit_symmetric(parts: Tensor) -> Tensor:
    """The scale of each part `[n, 16, 16]`, by least squares weighted with the weights' squares."""
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1)
    importance = parts.square()
    best_scale, best_gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for stretch in _STRETCHES["q6_K"]:
        inverse = _inverse(extreme) * -(32 + stretch)
        codes = (parts * inverse[..., None]).round().clamp(-32, 31)
        product = (importance * parts * codes).sum(-1)
        second = (importance * codes.square()).sum(-1)
        gain = product.square() * _inverse(second)  # by how much the squared error is smaller than with zeros
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, product * _inverse(second), best_scale)
    return best_scale


def _inverse(numbers: Tensor) -> Tensor:
    """1 / numbers, and 0 for 0."""
    return torch.where(numbers == 0, 0.0, 1 / numbers)

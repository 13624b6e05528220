"""Rotary position embedding (arXiv 2104.09864): channels i and i + e/2 of a head turn by position x
frequency i.

Frequencies are made anew in each forward, on the device and in fp32, from plain numbers: a buffer
would not survive materializing a model from the meta device, and the few vectors of length e/2 cost
nothing.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import GradientNode, register_fused, should_fuse


def compute_default_frequencies(width: int, base: float, positions: Tensor) -> Tensor:
    """Radians per position of each pair of channels, fp32 `[width / 2]`, on the device of
    `positions`.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (base ** (steps / width))


def compute_linear_frequencies(
    width: int, base: float, positions: Tensor, *, factor: float
) -> Tensor:
    """Positions are squeezed: every frequency is divided by `factor` (arXiv 2306.15595)."""
    return compute_default_frequencies(width, base, positions) / factor


def compute_llama3_frequencies(
    width: int,
    base: float,
    positions: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: float,
) -> Tensor:
    """Llama 3.1: slow pairs are divided by `factor`, fast ones kept, those between blended."""
    frequencies = compute_default_frequencies(width, base, positions)
    wavelengths = 2 * math.pi / frequencies
    share = (original_positions / wavelengths - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - share) * frequencies / factor + share * frequencies
    slow = torch.where(
        wavelengths > original_positions / low_freq_factor, frequencies / factor, blended
    )
    return torch.where(wavelengths < original_positions / high_freq_factor, frequencies, slow)


def compute_yarn_frequencies(
    width: int,
    base: float,
    positions: Tensor,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_positions: float,
    whole_channels: bool,
) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn less than `beta_slow` times in the original context
    are divided by `factor`, those over `beta_fast` kept, with a ramp over the pairs between (its
    ends rounded if `whole_channels`).
    """

    def pair_that_turns(times: float) -> float:
        return width * math.log(original_positions / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if whole_channels:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(width // 2, dtype=torch.float32, device=positions.device)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    frequencies = compute_default_frequencies(width, base, positions)
    return frequencies / factor * (1 - kept) + frequencies * kept


def compute_longrope_frequencies(
    width: int,
    base: float,
    positions: Tensor,
    *,
    short_factor: tuple[float, ...],
    long_factor: tuple[float, ...],
    original_positions: float,
) -> Tensor:
    """LongRoPE (arXiv 2402.13753): one divisor per pair; `long_factor` once any position is beyond
    the original ones.

    The choice is made on the device, from the positions: no synchronization, nothing that depends
    on data in Python.
    """
    is_long = positions.max() >= original_positions
    factors = torch.tensor(
        (short_factor, long_factor), dtype=torch.float32, device=positions.device
    )
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (torch.where(is_long, factors[1], factors[0]) * base ** (steps / width))


FREQUENCIES: dict[str, Callable[..., Tensor]] = {
    "default": compute_default_frequencies,
    "linear": compute_linear_frequencies,
    "llama3": compute_llama3_frequencies,
    "yarn": compute_yarn_frequencies,
    "longrope": compute_longrope_frequencies,
}


def compute_rotation(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `[b, s]`, each fp32 `[b, s, 1, width / 2]` and multiplied by
    `factor`.
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_rotation(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`heads [b, s, h, e]` with their first `width` channels turned, computed in fp32, returned in
    their own dtype.

    Cosines and sines get no gradient.
    """
    if should_fuse(heads.device):
        return cast(
            Tensor, GradientNode.apply(_rotate, _rotate_back, (1, 2), heads, cosines, sines, False)
        )
    if torch.compiler.is_compiling():
        return _rotate(heads, cosines, sines, False)
    half = cosines.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    turned = torch.cat(
        (first * cosines - second * sines, second * cosines + first * sines), dim=-1
    ).to(heads.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _rotate_back(gradient: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return _rotate(gradient, cosines, sines, True)


@register_fused(
    "rotate(Tensor heads, Tensor cosines, Tensor sines, bool back) -> Tensor",
    lambda heads, *_: torch.empty_like(heads, memory_format=torch.contiguous_format),
)
def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """`apply_rotation`, or the other way round, as one expression of each channel and its partner.

    Of channels that are put together from two tensors a compiler would make those in memory, in
    fp32.
    """
    half = cosines.shape[-1]
    turned, rest = heads.split((2 * half, heads.shape[-1] - 2 * half), dim=-1)
    pairs = turned.unflatten(-1, (2, half))
    signs = (2 * torch.arange(2, device=heads.device, dtype=cosines.dtype) - 1).unsqueeze(-1) * (
        -1 if back else 1
    )
    turned = pairs * cosines.unsqueeze(-2) + signs * pairs.flip(-2) * sines.unsqueeze(-2)
    turned = turned.to(heads.dtype).flatten(-2).contiguous()
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

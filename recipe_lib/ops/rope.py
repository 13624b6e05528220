"""Rotary position embedding (arXiv 2104.09864).

Channels i and i + e/2 of a head turn by position x frequency i. `FREQUENCIES` has the kinds of
frequencies that models stretch their context by; `compute_rotation` makes cosines and sines of
them, once for all layers, and `apply_rotation` turns the heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import call_with_gradient, register_fused, should_fuse

# Frequencies are made anew in each forward, on the device and in fp32, from plain numbers: a buffer
# would not survive materializing a model from the meta device, and the few vectors of length e/2
# cost nothing.


def compute_default_frequencies(width: int, base: float, positions: Tensor) -> Tensor:
    """Return radians per position of each pair of channels, fp32 `[width / 2]`."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (base ** (steps / width))


def compute_linear_frequencies(
    width: int, base: float, positions: Tensor, *, factor: float
) -> Tensor:
    """Return frequencies of squeezed positions: each is divided by `factor` (arXiv 2306.15595)."""
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
    """Return those of Llama 3.1: slow pairs are divided by `factor`, fast ones kept.

    Those between are blended.
    """
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
    """Return those of YaRN (arXiv 2309.00071).

    Pairs that turn less than `beta_slow` times in the original context are divided by `factor`,
    those over `beta_fast` kept, with a ramp over the pairs between (its ends rounded if
    `whole_channels`).
    """

    def find_pair(turns: float) -> float:
        """Return the pair of channels, perhaps between two, that turns so often."""
        return width * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = find_pair(beta_fast)
    high = find_pair(beta_slow)
    if whole_channels:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(width // 2, dtype=torch.float32, device=positions.device)
    kept_share = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    frequencies = compute_default_frequencies(width, base, positions)
    return frequencies / factor * (1 - kept_share) + frequencies * kept_share


def compute_longrope_frequencies(
    width: int,
    base: float,
    positions: Tensor,
    *,
    short_factor: tuple[float, ...],
    long_factor: tuple[float, ...],
    original_positions: float,
) -> Tensor:
    """Return those of LongRoPE (arXiv 2402.13753): one divisor per pair of channels.

    It is that of `long_factor` once any position is beyond the original ones.
    """
    # Chosen on the device, from the positions: no synchronization, nothing that depends on data in
    # Python.
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
    """Return cosines and sines of positions `[b, s]`, each fp32 `[b, s, 1, width / 2]`.

    factor: what both are multiplied by (yarn, longrope).
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_rotation(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `heads [b, s, h, e]` with their first `width` channels turned, in their own dtype.

    It is computed in fp32. Cosines and sines get no gradient.
    """
    if should_fuse(heads.device):
        return call_with_gradient(
            _rotate,
            heads,
            cosines,
            sines,
            False,
            differentiate=lambda gradient, *rotation: _rotate(gradient, *rotation, True),
            kept=(1, 2),
        )
    if torch.compiler.is_compiling():
        return _rotate(heads, cosines, sines, False)
    half = cosines.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    turned = torch.cat(
        (first * cosines - second * sines, second * cosines + first * sines), dim=-1
    ).to(heads.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@register_fused(
    "rotate(Tensor heads, Tensor cosines, Tensor sines, bool back) -> Tensor",
    lambda heads, *_: torch.empty_like(heads, memory_format=torch.contiguous_format),
)
def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """Return `apply_rotation`, or with `back` its inverse."""
    # As one expression of each channel and its partner: of channels that are put together from two
    # tensors a compiler would make those in memory, in fp32.
    half = cosines.shape[-1]
    turned, rest = heads.split((2 * half, heads.shape[-1] - 2 * half), dim=-1)
    pairs = turned.unflatten(-1, (2, half))
    signs = (2 * torch.arange(2, device=heads.device, dtype=cosines.dtype) - 1).unsqueeze(-1)
    signs = signs * (-1 if back else 1)
    turned = pairs * cosines.unsqueeze(-2) + signs * pairs.flip(-2) * sines.unsqueeze(-2)
    turned = turned.to(heads.dtype).flatten(-2).contiguous()
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

"""Compute and apply rotary position embeddings (arXiv 2104.09864).

The first `width` channels of a head are rotated: the pair of channels i and i + width / 2 by the
angle position x frequency i. The decoder calls a function of `FREQUENCIES`, one for each way to
stretch a model's context, and `compute_rotation`, once for all layers; each layer's attention calls
`apply_rotation` with its cosines and sines.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import call_with_gradient, register_fused, should_fuse

# Frequencies are computed anew in each forward, on the device and in fp32, from plain numbers: a
# buffer would not survive materializing a model from the meta device, and these few vectors cost
# nothing. They take `width`; `base`, the number whose powers the default frequencies are; and
# `positions`, for their device and, with longrope, the highest position. `original_positions` is
# the context, in tokens, of the model before it was stretched; `factor` is by how much it was.


def compute_default_frequencies(width: int, base: float, positions: Tensor) -> Tensor:
    """Return the frequency of each pair of channels in radians a position, fp32 `[width / 2]`."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (base ** (steps / width))


def compute_linear_frequencies(
    width: int, base: float, positions: Tensor, *, factor: float
) -> Tensor:
    """Return the default frequencies divided by `factor` (position interpolation, 2306.15595)."""
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
    """Return the frequencies of Llama 3.1: low ones divided by `factor`, high ones as by default.

    Frequencies are low with less than `low_freq_factor` turns in `original_positions`, and high
    with more than `high_freq_factor`; those between are blended.
    """
    frequencies = compute_default_frequencies(width, base, positions)
    wavelengths = 2 * math.pi / frequencies
    kept_share = (original_positions / wavelengths - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - kept_share) * frequencies / factor + kept_share * frequencies
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
    """Return the frequencies of YaRN (arXiv 2309.00071).

    Those with less than `beta_slow` turns in `original_positions` are divided by `factor`, those
    with more than `beta_fast` are as by default, with a ramp over the pairs between.
    whole_channels: the ends of the ramp are rounded to whole pairs.
    """

    def find_pair(turns: float) -> float:
        """Return the index of the pair, as a fraction, that has so many turns."""
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
    """Return the frequencies of LongRoPE (arXiv 2402.13753): each pair has a divisor of its own.

    The divisors `[width / 2]` are `long_factor` if any position is `original_positions` or more,
    else `short_factor`.
    """
    # Chosen on the device: in Python the host would wait for the positions.
    is_long = positions.max() >= original_positions
    factors = torch.tensor(
        (short_factor, long_factor), dtype=torch.float32, device=positions.device
    )
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (torch.where(is_long, factors[1], factors[0]) * base ** (steps / width))


# `RopeSpec.kind`, of a model's spec -> `fn(width, base, positions, **RopeSpec.numbers)`.
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

    frequencies: `[width / 2]`. factor: multiplies cosines and sines (yarn, longrope).
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_rotation(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `heads [b, s, h, e]` with their first `width` channels rotated, in their own dtype.

    The rotation is computed in fp32. cosines, sines: fp32 `[b, s, 1, width / 2]`, from
    `compute_rotation`; they get no gradient.
    """
    if should_fuse(heads.device):
        # The gradient of a rotation is the rotation back: heads need not be saved.
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
    """Return the result of `apply_rotation`; with `back` rotate by the negative angle."""
    # One expression for all channels, each with its partner (`flip`): a concatenation of two halves
    # would make a compiler write both to memory, in fp32.
    half = cosines.shape[-1]
    turned, rest = heads.split((2 * half, heads.shape[-1] - 2 * half), dim=-1)
    pairs = turned.unflatten(-1, (2, half))
    signs = (2 * torch.arange(2, device=heads.device, dtype=cosines.dtype) - 1).unsqueeze(-1)
    signs = signs * (-1 if back else 1)
    turned = pairs * cosines.unsqueeze(-2) + signs * pairs.flip(-2) * sines.unsqueeze(-2)
    turned = turned.to(heads.dtype).flatten(-2).contiguous()
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

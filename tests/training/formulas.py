"""Optimizers written out from their papers, a tensor at a time in fp64, with the roundings that the
docs speak of.

Nothing here is torch.optim's or ours: what tests find in a run is compared with this.
"""

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipe_lib.config.schema import OptimizerConfig

LEAST_IN_BLOCKS = 4096  # elements of a matrix whose states are kept in 8 or 4 bits
LONGEST_BLOCK = {8: 256, 4: 128}


def compute_dynamic_levels(bits: int, signed: bool) -> Tensor:
    """The 2^bits numbers that codes stand for, fp64, rising (Dettmers, arXiv:1511.04561; of
    unsigned 4 bits: Li, Chen and Zhu, arXiv:2309.01507).
    """
    if bits == 4 and not signed:
        return torch.arange(1, 17, dtype=torch.float64) / 16
    decades = {8: 7, 4: 3}[bits]
    found = [0.0, 1.0]
    for decade in range(decades):
        parts = 2 ** (decade + bits - decades - (1 if signed else 0))
        ends = [0.1 + 0.9 * part / parts for part in range(parts + 1)]
        for low, high in zip(ends, ends[1:], strict=False):
            middle = 10.0 ** (decade - decades + 1) * (low + high) / 2
            found += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(found), dtype=torch.float64)


def split_into_blocks(numbers: Tensor, bits: int, block: int, signed: bool) -> Tensor:
    """Numbers of which each block shares its largest absolute value as scale, each rounded to the
    nearest level.

    Unsigned ones that are more than zero never become zero.
    """
    blocks = numbers.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    levels = compute_dynamic_levels(bits, signed)
    scaled = (blocks / scales).contiguous()
    upper = torch.searchsorted(levels, scaled).clamp(1, len(levels) - 1)
    low, high = levels[upper - 1], levels[upper]
    nearest = torch.where(
        (scaled - low < high - scaled) & (signed | (low > 0) | (scaled == 0)), low, high
    )
    return (nearest * scales).reshape(numbers.shape)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration (Jordan 2024) on a matrix divided by its
    Frobenius norm.
    """
    found = matrix / max(float(matrix.norm()), 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        found = found.T
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found - 4.7750 * square @ found + 2.0315 * square @ square @ found
    return found.T if matrix.shape[0] > matrix.shape[1] else found


@dataclass
class Formula:
    """One parameter and its states. at: the weights as they are stored, in fp64; exact: where they
    would be if weights were never rounded (those of the same gradients). by_chance: each step's
    rounding goes up or down at random, so that `at` is not known: compare with `exact`, on average.
    """

    cfg: OptimizerConfig
    name: str
    start: Tensor
    steps: int = 0
    states: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = self.start.dtype
        self.start = self.start.detach().double().clone()
        self.at, self.exact = self.start.clone(), self.start.clone()

    @property
    def is_matrix_of_a_layer(self) -> bool:
        return self.start.dim() == 2 and re.search(r"\.\d+\.", f".{self.name}") is not None

    @property
    def by_chance(self) -> bool:
        return self.cfg.stochastic_rounding and self.dtype == torch.bfloat16

    def kept(self, state: str, value: Tensor, signed: bool) -> Tensor:
        """The state as it is stored until the next step; computing goes on with the value before
        that.
        """
        bits = (
            32 if self.cfg.state_bits is None and self.cfg.master_weights else self.cfg.state_bits
        )
        if bits in LONGEST_BLOCK:
            block = math.gcd(value.shape[-1], LONGEST_BLOCK[bits]) if value.dim() else 1
            if value.dim() >= 2 and value.numel() >= LEAST_IN_BLOCKS and block >= 16:
                self.states[state] = split_into_blocks(value, bits, block, signed)
                return value
            bits = 32
        dtype = {None: self.dtype, 16: torch.bfloat16, 32: torch.float32}[bits]
        by_chance = (
            self.by_chance and dtype == torch.bfloat16
        )  # right on average: as if it was not rounded
        self.states[state] = value if by_chance else value.to(dtype).double()
        return value

    def before(self, state: str) -> Tensor:
        return self.states.get(state, torch.zeros_like(self.start))

    def step(self, gradient: Tensor, rate: float) -> None:
        """gradient: as it comes to the optimizer, clipped, in the type that it is kept in."""
        self.steps += 1
        gradient = gradient.detach().double()
        if self.cfg.name == "sgd":
            change = self.sgd(gradient)
        elif self.cfg.name == "muon" and self.is_matrix_of_a_layer:
            change = self.muon(gradient)
        else:
            change = self.adamw(gradient)
        decay = 1 - rate * self.cfg.weight_decay
        self.exact = decay * self.exact - rate * change
        moved = decay * self.at - rate * change
        is_stored_exactly = self.cfg.master_weights or self.by_chance
        self.at = moved if is_stored_exactly else moved.to(self.dtype).double()

    def sgd(self, gradient: Tensor) -> Tensor:
        momentum = self.cfg.momentum or 0.0
        return (
            self.kept("momentum", momentum * self.before("momentum") + gradient, True)
            if momentum
            else gradient
        )

    def adamw(self, gradient: Tensor) -> Tensor:
        """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2."""
        beta1, beta2 = self.cfg.betas
        mean = self.kept("mean", beta1 * self.before("mean") + (1 - beta1) * gradient, True)
        square = self.kept(
            "square", beta2 * self.before("square") + (1 - beta2) * gradient**2, False
        )
        mean, square = mean / (1 - beta1**self.steps), square / (1 - beta2**self.steps)
        return mean / (square.sqrt() + self.cfg.eps)

    def muon(self, gradient: Tensor) -> Tensor:
        """Jordan 2024 with Nesterov's look ahead; the size of AdamW's steps, as in Liu et al.,
        arXiv:2502.16982.
        """
        momentum = 0.95 if self.cfg.momentum is None else self.cfg.momentum
        mean = self.kept(
            "momentum", momentum * self.before("momentum") + (1 - momentum) * gradient, True
        )
        ahead = (1 - momentum) * gradient + momentum * mean
        return 0.2 * math.sqrt(max(ahead.shape)) * orthogonalize(ahead)

    def stored(self) -> Tensor:
        """`at`, in the parameter's type and back."""
        return self.at.to(self.dtype).double()

    def error(self, found: Tensor) -> float:
        """How far weights are from the formula's, in parts of the length of the way that it goes.

        Where at most one weight, or one of a hundred, is the next number, and no other differs, it
        is nothing: those lay between two numbers, and a way of less than one number's distance
        would be a part of such a difference.

        Of weights that are rounded by chance: how far the mean is, along that way, beyond five
        standard deviations of such roundings, each of which has a variance of at most a quarter of
        the square of the distance of two numbers.
        """
        way = self.exact - self.start
        length = float(way.norm())
        if length == 0:
            return 0.0 if torch.equal(found.double(), self.start) else math.inf
        size = torch.maximum(self.start.abs(), self.exact.abs())
        apart = 2.0 ** (torch.floor(torch.log2(size.clamp(min=1e-30))) - 7)
        if not self.by_chance:
            off = (found.double() - self.stored()).abs()
            is_next = self.dtype == torch.bfloat16 and bool((off <= apart).all())
            ties = is_next and int((off > 0).sum()) <= max(1, off.numel() // 100)
            return 0.0 if ties else float(off.norm()) / length
        along = abs(float(((found.double() - self.exact) * way).sum())) / length**2
        spread = math.sqrt(self.steps * float((way**2 * apart**2).sum()) / 4) / length**2
        return max(0.0, along - 5 * spread)


def clip_gradients(
    gradients: dict[str, Tensor], most: float | None
) -> tuple[dict[str, Tensor], float]:
    """The gradients scaled so that the norm of all of them is at most `most`, each in its type; and
    the norm before.
    """
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
    factor = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
    return {
        name: (gradient.double() * factor).to(gradient.dtype)
        for name, gradient in gradients.items()
    }, norm

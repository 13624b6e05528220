"""Compute optimizers by their papers' formulas, in fp64, with the roundings that the docs document.

One `Formula` follows one parameter: `step(gradient, rate)`, then compare with `measure_error`.
Nothing here uses torch.optim or the library's optimizers, so that tests can compare a run with it.
"""

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipe_lib.config.schema import OptimizerConfig

LEAST_IN_BLOCKS = 4096  # elements from which on a matrix's states are kept in 8 or 4 bits
LONGEST_BLOCK = {8: 256, 4: 128}  # bits -> most elements that share a scale


def compute_dynamic_levels(bits: int, signed: bool) -> Tensor:
    """Return the values of all codes, ascending, fp64 `[2^bits]`, between -1 or 0 and 1.

    They are those of Dettmers, arXiv:1511.04561, and of unsigned 4 bits those of Li, Chen and Zhu,
    arXiv:2309.01507. bits: 8 or 4.
    """
    if bits == 4 and not signed:
        return torch.arange(1, 17, dtype=torch.float64) / 16
    decades = {8: 7, 4: 3}[bits]  # powers of ten; the nearer to 1, the more levels has one
    levels = [0.0, 1.0]
    for decade in range(decades):
        parts = 2 ** (decade + bits - decades - (1 if signed else 0))
        ends = [0.1 + 0.9 * part / parts for part in range(parts + 1)]
        for low, high in zip(ends, ends[1:], strict=False):
            middle = 10.0 ** (decade - decades + 1) * (low + high) / 2
            levels += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(levels), dtype=torch.float64)


def round_in_blocks(values: Tensor, bits: int, block: int, signed: bool) -> Tensor:
    """Return the values rounded to `bits` bits, in blocks of `block` consecutive elements.

    A block's scale is its largest absolute value; each value is rounded to the nearest level times
    the scale. Unsigned values above zero never become zero: AdamW divides by them.
    """
    blocks = values.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    levels = compute_dynamic_levels(bits, signed)
    scaled = (blocks / scales).contiguous()
    upper = torch.searchsorted(levels, scaled).clamp(1, len(levels) - 1)
    low = levels[upper - 1]
    high = levels[upper]
    may_be_low = signed | (low > 0) | (scaled == 0)
    nearest = torch.where((scaled - low < high - scaled) & may_be_low, low, high)
    return (nearest * scales).reshape(values.shape)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix, scaled to norm 1, after five quintic Newton-Schulz steps (Jordan 2024)."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@dataclass
class Formula:
    """One parameter, its optimizer states, and the formula that steps them."""

    cfg: OptimizerConfig  # the section `optimizer` of the run's config
    name: str  # of the parameter in the model
    start: Tensor  # the weights before the first step, in the run's dtype; here a copy in fp64
    steps: int = 0  # done so far
    states: dict[str, Tensor] = field(default_factory=dict)  # as stored between steps, fp64

    def __post_init__(self) -> None:
        self.dtype = self.start.dtype  # of the run's parameter
        self.start = self.start.detach().double().clone()
        self.weights = self.start.clone()  # values as the run stores them, in fp64
        # What the same gradients would give if weights were never rounded, in fp64.
        self.exact = self.start.clone()

    @property
    def is_matrix_of_a_layer(self) -> bool:
        """Return True for the parameters that Muon orthogonalizes; AdamW steps the others."""
        return self.start.dim() == 2 and re.search(r"\.\d+\.", f".{self.name}") is not None

    @property
    def rounds_stochastically(self) -> bool:
        """Return True if a step rounds weights up or down at random.

        `weights` are not the run's then; `exact` is their expectation.
        """
        return self.cfg.stochastic_rounding and self.dtype == torch.bfloat16

    def store(self, state: str, value: Tensor, signed: bool) -> Tensor:
        """Store a state, rounded, until the next step; return the value that this step uses.

        state: its name. signed: whether it may be below zero.
        """
        bits = self.cfg.state_bits
        if bits is None and self.cfg.master_weights:
            bits = 32
        if bits in LONGEST_BLOCK:
            block = math.gcd(value.shape[-1], LONGEST_BLOCK[bits]) if value.dim() else 1
            # A block lies in one row: a state with rows that blocks of 16 do not fit stays in fp32.
            if value.dim() >= 2 and value.numel() >= LEAST_IN_BLOCKS and block >= 16:
                self.states[state] = round_in_blocks(value, bits, block, signed)
                return value
            bits = 32
        dtype = {None: self.dtype, 16: torch.bfloat16, 32: torch.float32}[bits]
        if self.rounds_stochastically and dtype == torch.bfloat16:
            self.states[state] = value  # stochastic rounding is right on average
        else:
            self.states[state] = value.to(dtype).double()
        return value

    def load(self, state: str) -> Tensor:
        """Return the state of this name as the last step has stored it, zeros before the first."""
        return self.states.get(state, torch.zeros_like(self.start))

    def step(self, gradient: Tensor, rate: float) -> None:
        """Step weights and states.

        gradient: clipped, in the dtype that the optimizer gets. rate: the step's learning rate.
        """
        self.steps += 1
        gradient = gradient.detach().double()
        if self.cfg.name == "sgd":
            update = self.compute_sgd_update(gradient)
        elif self.cfg.name == "muon" and self.is_matrix_of_a_layer:
            update = self.compute_muon_update(gradient)
        else:
            update = self.compute_adamw_update(gradient)
        decay = 1 - rate * self.cfg.weight_decay
        self.exact = decay * self.exact - rate * update
        weights = decay * self.weights - rate * update
        is_stored_exactly = self.cfg.master_weights or self.rounds_stochastically
        self.weights = weights if is_stored_exactly else weights.to(self.dtype).double()

    def compute_sgd_update(self, gradient: Tensor) -> Tensor:
        """Return the update of SGD, with momentum where the config has one."""
        momentum = self.cfg.momentum or 0.0
        if not momentum:
            return gradient
        return self.store("momentum", momentum * self.load("momentum") + gradient, signed=True)

    def compute_adamw_update(self, gradient: Tensor) -> Tensor:
        """Return AdamW's update (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
        beta1, beta2 = self.cfg.betas
        mean = beta1 * self.load("mean") + (1 - beta1) * gradient
        mean = self.store("mean", mean, signed=True)
        square = beta2 * self.load("square") + (1 - beta2) * gradient**2
        square = self.store("square", square, signed=False)
        unbiased_mean = mean / (1 - beta1**self.steps)
        unbiased_square = square / (1 - beta2**self.steps)
        return unbiased_mean / (unbiased_square.sqrt() + self.cfg.eps)

    def compute_muon_update(self, gradient: Tensor) -> Tensor:
        """Return Muon's update (Jordan 2024) with Nesterov momentum.

        It is scaled to the size of AdamW's updates, as in Liu et al., arXiv:2502.16982.
        """
        momentum = 0.95 if self.cfg.momentum is None else self.cfg.momentum
        mean = momentum * self.load("momentum") + (1 - momentum) * gradient
        mean = self.store("momentum", mean, signed=True)
        ahead = (1 - momentum) * gradient + momentum * mean
        return 0.2 * math.sqrt(max(ahead.shape)) * orthogonalize(ahead)

    def round_weights(self) -> Tensor:
        """Return the weights rounded to the parameter's dtype, in fp64."""
        return self.weights.to(self.dtype).double()

    def measure_error(self, weights: Tensor) -> float:
        """Return the L2 distance of weights from the formula's, relative to the formula's change.

        Of stochastically rounded weights, return their distance along that change, beyond what
        their rounding explains. Where the formula changes nothing, return 0 or infinity.
        """
        change = self.exact - self.start
        length = float(change.norm())
        if length == 0:
            return 0.0 if torch.equal(weights.double(), self.start) else math.inf
        size = torch.maximum(self.start.abs(), self.exact.abs())
        # The distance of two bf16 numbers of this size.
        spacing = 2.0 ** (torch.floor(torch.log2(size.clamp(min=1e-30))) - 7)
        if not self.rounds_stochastically:
            difference = (weights.double() - self.round_weights()).abs()
            # Weights that lie in the middle of two bf16 numbers may be rounded the other way: one,
            # or one in a hundred, is no error. Where the whole change is shorter than that
            # distance, the difference would be larger than the change.
            is_neighbor = self.dtype == torch.bfloat16 and bool((difference <= spacing).all())
            num_different = int((difference > 0).sum())
            are_ties = is_neighbor and num_different <= max(1, difference.numel() // 100)
            return 0.0 if are_ties else float(difference.norm()) / length
        along = abs(float(((weights.double() - self.exact) * change).sum())) / length**2
        # A rounding's variance is at most a quarter of the squared distance of two numbers; five
        # standard deviations are explained by it.
        spread = math.sqrt(self.steps * float((change**2 * spacing**2).sum()) / 4) / length**2
        return max(0.0, along - 5 * spread)


def clip_gradients(
    gradients: dict[str, Tensor], max_norm: float | None
) -> tuple[dict[str, Tensor], float]:
    """Return the gradients scaled to a norm of at most `max_norm`, and their norm before that.

    The norm is the L2 norm of all gradients together; each keeps its dtype. max_norm: None leaves
    them as they are.
    """
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    clipped = {
        name: (gradient.double() * factor).to(gradient.dtype)
        for name, gradient in gradients.items()
    }
    return clipped, norm

"""Measure what AdamW's states in fewer bits lose against torch's AdamW in fp64, on a CPU.

Run `python -m benchmarks.optimizer_states --output docs/measurements/optimizer_states.md`. One
matrix stands for a model: each band of its rows gets gradients of one pattern. States of 8 and 4
bits share a scale in each block, here a row. Weights are set to 0 before each step, so that they
are the step afterwards.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.config.optimizer_facts import BYTES, compute_state_bytes
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.optim.low_bit_adamw import MASTER, make_code
from recipe_lib.optim.optimizers import build_optimizer

COLUMNS = 128  # the longest block of 4 bits
ROWS = 8  # of a pattern
STEPS = 3000
EVERY = 100  # steps, of which the last is looked at
# A power of two: dividing a step by it rounds nothing.
BASE = OptimizerConfig(lr=2.0**-6, weight_decay=0.0, eps=1e-12)
BETAS = ([0.9, 0.95], [0.9, 0.999])
OUTLIERS = (1e-2, 1e-3, 3e-4, 1e-4)  # gradients beside one of 1
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# Largest relative rounding errors. bf16: half of the distance 2^-7 of two numbers above 1. 8 bits:
# the largest levels are 0.9/128 of a block's largest number apart; half of that, of a number that
# is half of the largest.
BF16 = 1 / 256
BLOCK = 0.9 / 128


def compute_resting_range(decay: float, half_distance: float = BF16) -> tuple[float, float]:
    """Return (lowest, highest) value that a moving average may be given without changing at all.

    Both are multiples of the average. Its update, (1 - decay) (value - 1), is lost where it is at
    most `half_distance`, half the relative distance of two numbers.
    """
    tolerance = half_distance / (1 - decay)
    return max(0.0, 1 - tolerance), 1 + tolerance


@dataclass(frozen=True)
class StateKind:
    """Hold a kind of optimizer states."""

    dtype: str  # of the weights, a key of DTYPES
    settings: dict[str, Any]  # keys of the config's section `optimizer`

    def format_label(self) -> str:
        """Return the settings as they are typed, in backticks."""
        words = [f"dtype={self.dtype}"]
        words += [f"optimizer.{key}={str(value).lower()}" for key, value in self.settings.items()]
        return f"`{' '.join(words)}`"

    def count_bytes_per_parameter(self) -> float:
        """Return the bytes of states and master weights for each weight of a layer's matrix."""
        return compute_state_bytes(replace(BASE, **self.settings), BYTES[self.dtype], in_layer=True)


KINDS = (
    StateKind("fp32", {}),
    StateKind("bf16", {"state_bits": 32}),
    StateKind("bf16", {"master_weights": True}),
    StateKind("bf16", {"master_weights": True, "state_bits": 16}),
    StateKind("bf16", {"implementation": "fused"}),
    StateKind("bf16", {"implementation": "foreach"}),
    StateKind("fp32", {"state_bits": 16}),
    StateKind("bf16", {"stochastic_rounding": True}),
    StateKind("bf16", {"state_bits": 8}),
    StateKind("bf16", {"state_bits": 4}),
)
# Returns gradients `[r, c]` for a step's number and normally distributed numbers `[r, c]`.
Pattern = Callable[[int, Tensor], Tensor]


def put_outlier(small: float) -> Pattern:
    """Return the pattern of one gradient of 1 among others of `small` in each row."""

    def make_gradient(step: int, drawn: Tensor) -> Tensor:
        gradient = torch.full_like(drawn, small)
        gradient[:, 0] = 1.0
        return gradient

    return make_gradient


def spread_decades(step: int, drawn: Tensor) -> Tensor:
    """Return 0.001 to 1 in each row, evenly in the exponent."""
    return 10.0 ** torch.linspace(-3, 0, drawn.shape[-1]).expand_as(drawn)


def change_together(step: int, drawn: Tensor) -> Tensor:
    """Return 1 everywhere, in every second thousand of the steps 0.01."""
    return torch.full_like(drawn, 0.01 if step // 1000 % 2 else 1.0)


def change_apart(step: int, drawn: Tensor) -> Tensor:
    """Return `change_together` for three quarters of each row, and always 1 for the others."""
    gradient = change_together(step, drawn)
    gradient[:, ::4] = 1.0
    return gradient


def change_in_turn(step: int, drawn: Tensor) -> Tensor:
    """Return 1 and 0.01 as in `change_together`, each number 16 steps after its right neighbor.

    With 128 columns, some number of a row is always 1.
    """
    leads = 16 * torch.arange(drawn.shape[-1])  # steps
    is_small = (step + leads) // 1000 % 2 == 1
    return torch.where(is_small, 0.01, 1.0).expand_as(drawn)


PATTERNS: dict[str, Pattern] = {
    "constant": lambda step, drawn: torch.ones_like(drawn),
    **{f"outlier, others {small:g}": put_outlier(small) for small in OUTLIERS},
    "three decades": spread_decades,
    "100 x, together": change_together,
    "100 x, apart": change_apart,
    "100 x, in turn": change_in_turn,
    "noise": lambda step, drawn: spread_decades(step, drawn) * (1 + 0.5 * drawn),
}


@cache
def make_gradients(step: int) -> Tensor:
    """Return the gradients of a step in bf16, a band of ROWS rows for each pattern.

    The cache of all steps takes 55 MB; every kind of states gets the same gradients.
    """
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
    bands = [make_gradient(step, drawn) for make_gradient in PATTERNS.values()]
    return torch.cat(bands).bfloat16()


def read_state(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> Tensor:
    """Return a state as the next step will read it, fp64 `[r, c]`.

    name: `exp_avg` or `exp_avg_sq`, AdamW's first and second moments.
    """
    state = optimizer.state[parameter]
    if name in state:
        return state[name].double().clone()  # the next step changes it
    # Coded in blocks; a byte has two codes of 4 bits.
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    bits = 8 * codes.shape[-1] // parameter.shape[-1]
    code = make_code(bits, signed=name == "exp_avg", device=codes.device)
    return code.decode(codes, scales).double()


@dataclass(frozen=True)
class Observed:
    """Hold the weights' change and the states after a step."""

    step: int  # from 0
    update: Tensor  # the change of the weights in units of the learning rate, fp64 `[r, c]`
    exp_avg: Tensor  # fp64 `[r, c]`
    exp_avg_sq: Tensor  # fp64 `[r, c]`

    def select_band(self, pattern: str) -> "Observed":
        """Return the rows of a pattern, without the outlier's column where it has one."""
        start = list(PATTERNS).index(pattern) * ROWS
        first_column = 1 if pattern.startswith("outlier") else 0
        band = slice(start, start + ROWS), slice(first_column, None)
        return Observed(
            step=self.step,
            update=self.update[band],
            exp_avg=self.exp_avg[band],
            exp_avg_sq=self.exp_avg_sq[band],
        )


def run_steps(
    cfg: OptimizerConfig, dtype: torch.dtype, steps: int, every: int
) -> Iterator[Observed]:
    """Run the optimizer on all patterns at once; yield what is observed every `every` steps.

    dtype: of the weights; fp64: torch's AdamW, to which others are compared.
    """
    parameter = nn.Parameter(torch.zeros(ROWS * len(PATTERNS), COLUMNS, dtype=dtype))
    if dtype == torch.float64:
        optimizer: Optimizer = torch.optim.AdamW(
            [parameter],
            lr=cfg.lr,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            weight_decay=0.0,
        )
    else:
        optimizer = build_optimizer(
            cfg, [("layers.0.weight", parameter)], torch.device("cpu"), seed=1
        )
    for step in range(steps):
        parameter.data.zero_()  # afterwards it is the step itself
        if MASTER in optimizer.state.get(parameter, {}):  # fp32 master weights, once they exist
            optimizer.state[parameter][MASTER].zero_()
        parameter.grad = make_gradients(step).to(dtype)
        optimizer.step()
        if (step + 1) % every == 0:
            yield Observed(
                step=step,
                update=parameter.detach().double() / -cfg.lr,
                exp_avg=read_state(optimizer, parameter, "exp_avg"),
                exp_avg_sq=read_state(optimizer, parameter, "exp_avg_sq"),
            )


def describe_ratios(rounded: Tensor, exact: Tensor) -> str:
    """Return `median (worst)` of the ratios of rounded to exact numbers."""
    ratios = (rounded / exact).flatten()
    # 0.5 is as bad as 2. A ratio of 0 is clamped, since it has no logarithm.
    worst_ratio = ratios[ratios.abs().clamp(min=1e-30).log().abs().argmax()]
    return f"{float(ratios.median()):.3g} ({float(worst_ratio):.3g})"


def build_tables(betas: list[float], steps: int, every: int) -> list[list[str]]:
    """Return the cells of both tables for a pair of betas, a list for each of KINDS.

    First the kind and its bytes, then a cell for the steps of each pattern, then a cell for the
    second moments of each.
    """
    exact_run = list(
        run_steps(replace(BASE, betas=betas), dtype=torch.float64, steps=steps, every=every)
    )
    rows = []
    for kind in KINDS:
        cfg = replace(BASE, betas=betas, **kind.settings)
        rounded_run = list(run_steps(cfg, dtype=DTYPES[kind.dtype], steps=steps, every=every))
        cells = [kind.format_label(), f"{kind.count_bytes_per_parameter():.3g}"]
        for name in ("update", "exp_avg_sq"):
            for pattern in PATTERNS:
                rounded_values = _stack_band(rounded_run, pattern, name)
                exact_values = _stack_band(exact_run, pattern, name)
                cells.append(describe_ratios(rounded_values, exact_values))
        rows.append(cells)
    return rows


def _stack_band(run: list[Observed], pattern: str, name: str) -> Tensor:
    """Return a field of a pattern's band over the observed steps of a run, `[steps, r, c]`."""
    return torch.stack([getattr(observed.select_band(pattern), name) for observed in run])


PAGE = """# What optimizer states lose

For those who choose `optimizer.state_bits`, `master_weights` and `stochastic_rounding`. Made on a \
CPU with torch
{torch} by

    python -m benchmarks.optimizer_states --output docs/measurements/optimizer_states.md

Each kind of state takes {steps:,} steps over the same bf16 gradients, and torch's AdamW in fp64 \
does too. A cell is the
median, and in brackets the worst, of what ours is in multiples of the exact one, over all numbers \
of a pattern and
every {every}th step. 1 is right; a step of 2 is twice too long. `bytes` are those of a \
parameter's states, with master
weights. No weight decay, eps {eps:g}; weights in bf16 add a rounding of 0.4 % to each step.

Patterns, in blocks of {columns} numbers: `constant` 1; one `outlier` of 1 among others, which \
alone are looked at;
`three decades` from 0.001 to 1; `100 x` changes from 1 to 0.01 and back each thousand steps, all \
`together`, or three
quarters of a block `apart` from the rest, or each number 16 steps after its neighbor, `in turn`; \
`noise` over three
decades, its deviation half of its mean.

{tables}
## Why

- bf16 has 8 bits: a change of a mean by less than half the distance of two numbers, 1/512 to \
1/256 of it, is lost. A
  mean with decay d rests where what it averages is within 1 +- 1 / (256 (1 - d)) of it. With 0.95 \
that is {low_95:.2f}
  to {high_95:.2f}: a step is off by 4 % at most, by 5 % while gradients change, since the first \
moment is off too.
  With 0.999 it is anything up to {high_999:.1f}: a step is up to {long_999:.1f} times too long, \
and the second moment
  never comes down. torch's kernels that are not fused round it twice a step, and `foreach` on a \
CPU takes d itself in
  bf16, where 0.999 is 1. `tune validate`, `plan`, `run` and `import` say so where a mean may stay \
at half or twice of
  what it should be where it is rounded once: a decay of 1 - 1/128 or more.
- Rounded by chance, a mean is right on average over a parameter's numbers and over steps. A \
number of a second moment
  has a deviation of 1 / (256 sqrt(1 - d^2)) of itself at most: {deviation_95:.1f} % with 0.95, \
{deviation_999:.1f} %
  with 0.999.
- 8 bits keep a block's largest number exactly, others down to a tenth of it to 4 %, and twice as \
roughly with each
  power of ten below. A second moment of less than 1 / 3,000,000 of the largest is taken for that, \
so that the steps of
  the smallest gradients are too short. Levels below the largest are no finer than bf16, so that a \
number which
  changes among others that stay is not followed either: of half of the largest a second moment \
rests where what it
  averages is {low_block_95:.2f} to {high_block_95:.2f} of it with 0.95, anything up to \
{high_block_999:.1f} with 0.999.
  The same line tells of a second moment's decay over 1 - 0.9/64, of other means' over 1 - 0.9/32.
- 4 bits have no level of a second moment under 1/16 of a block's largest. A gradient of a \
hundredth of the largest
  takes a fortieth of its step, smaller ones next to none. A mean that shrinks beside others which \
do not, as in
  `100 x, apart`, does not come down, so that its weight goes on as before.
"""


def make_page(steps: int, every: int) -> str:
    """Measure everything and return the page."""
    parts = []
    # Of each table; `row[2:]` has the cells of both tables of a pair of betas.
    header = f"| states | bytes | {' | '.join(PATTERNS)} |\n|---|---:|{'---|' * len(PATTERNS)}"
    for betas in BETAS:
        rows = build_tables(betas, steps, every)
        for first_cell, title in ((2, "Steps"), (2 + len(PATTERNS), "Second moments")):
            parts += [f"## {title}, betas {betas}\n", header]
            for row in rows:
                cells = row[:2] + row[first_cell : first_cell + len(PATTERNS)]
                parts.append(f"| {' | '.join(cells)} |")
            parts.append("")
    low_95, high_95 = compute_resting_range(0.95)
    high_999 = compute_resting_range(0.999)[1]
    low_block_95, high_block_95 = compute_resting_range(0.95, BLOCK)
    return PAGE.format(
        torch=torch.__version__,
        steps=steps,
        every=every,
        eps=BASE.eps,
        columns=COLUMNS,
        tables="\n".join(parts),
        low_95=low_95,
        high_95=high_95,
        high_999=high_999,
        low_block_95=low_block_95,
        high_block_95=high_block_95,
        high_block_999=compute_resting_range(0.999, BLOCK)[1],
        long_999=high_999**0.5,
        deviation_95=100 / (256 * (1 - 0.95**2) ** 0.5),
        deviation_999=100 / (256 * (1 - 0.999**2) ** 0.5),
    )


def main(argv: list[str] | None = None) -> int:
    """Write the page, or print it without `--output`."""
    parser = argparse.ArgumentParser(
        description="Measure what AdamW's states in fewer bits lose against fp64.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    page = make_page(arguments.steps, EVERY)
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every kind of optimizer state against torch's AdamW in fp64: how far rounding may take it, by
closed forms.

The gradients are those of `benchmarks/optimizer_states.py`: constant, outliers in a block, decades
apart, changing by 100 x, noise. Where a state is a mean m of decay d, and each step rounds it by at
most a share u of itself, its error e is at most (d e + u |m|) / (1 - u) after a step.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.optimizer_states import (
    BASE,
    BETAS,
    COLUMNS,
    DTYPES,
    KINDS,
    OUTLIERS,
    PATTERNS,
    ROWS,
    Observed,
    StateKind,
    make_gradients,
    run_steps,
)
from tests.training.formulas import compute_dynamic_levels

FEW = 50  # steps
MANY = 1100  # in which a gradient of `100 x` has changed
HALF, WHOLE = (
    2.0**-8,
    2.0**-7,
)  # of a number in bf16: half the distance to the next one, at most, and all of it
STATES = ("exp_avg", "exp_avg_sq")
BLOCKED = [kind for kind in KINDS if kind.settings.get("state_bits") in (4, 8)]
BY_CHANCE = [kind for kind in KINDS if kind.settings.get("stochastic_rounding")]
TO_THE_NEAREST = [kind for kind in KINDS if kind not in BLOCKED + BY_CHANCE]


def parametrize_runs(kinds: list[StateKind], many: list[StateKind]) -> pytest.MarkDecorator:
    """Each of the kinds with few steps, some of them with many, too."""
    cases = [(kind, betas, FEW) for betas in BETAS for kind in kinds]
    slow = [pytest.param(kind, BETAS[1], MANY, marks=pytest.mark.slow) for kind in many]
    return pytest.mark.parametrize(("kind", "betas", "steps"), [*cases, *slow], ids=name_value)


def name_value(value: Any) -> str:
    return value.format_label() if isinstance(value, StateKind) else str(value)


def rounding_unit(kind: StateKind, state: str) -> float:
    """Return the largest share of itself by which a step's rounding may change a state."""
    bits = kind.settings.get("state_bits", 32 if kind.settings.get("master_weights") else None)
    if bits == 32 or (bits is None and kind.dtype == "fp32"):
        return 2.0**-22  # of three operations in fp32
    return HALF * (
        2 if kind.settings.get("implementation") == "foreach" and state == "exp_avg_sq" else 1
    )


@dataclass
class Errors:
    """The largest errors that a kind's states may have by now."""

    units: dict[str, float]
    betas: list[float]
    bounds: dict[str, Tensor] = field(default_factory=dict)

    def add(self, exact: Observed) -> None:
        """Take the next step's."""
        for state, beta in zip(STATES, self.betas, strict=True):
            before = self.bounds.get(state, torch.zeros(()))
            unit = self.units[state]
            self.bounds[state] = (beta * before + unit * getattr(exact, state).abs()) / (1 - unit)


def in_bounds(found: Tensor, low: Tensor, high: Tensor, slack: float) -> bool:
    return bool(((found >= low - slack * low.abs()) & (found <= high + slack * high.abs())).all())


@parametrize_runs(TO_THE_NEAREST, many=TO_THE_NEAREST[3:])
def test_states_are_no_further_off_than_their_rounding(
    kind: StateKind, betas: list[float], steps: int
) -> None:
    """States and steps. What is promised to be fp32 is so to 0.03 %, master weights' states among
    it.
    """
    cfg = replace(BASE, betas=betas, **kind.settings)
    errors = Errors({state: rounding_unit(kind, state) for state in STATES}, betas)
    weights = 2.0**-7 if kind.dtype == "bf16" else 1e-5  # the step, as weights have it
    exact_run = run_steps(cfg, torch.float64, steps, 1)
    for found, exact in zip(run_steps(cfg, DTYPES[kind.dtype], steps, 1), exact_run, strict=True):
        errors.add(exact)
        mean, square = exact.exp_avg, exact.exp_avg_sq
        mean_error, square_error = (errors.bounds[state] for state in STATES)
        assert ((found.exp_avg - mean).abs() <= mean_error).all(), found.step
        assert ((found.exp_avg_sq - square).abs() <= square_error).all(), found.step
        high = 1 / (1 - square_error / square).clamp(min=0).sqrt()  # infinite where all may be lost
        low = 1 / (1 + square_error / square).sqrt()
        relative = mean_error / mean.abs()
        ratio, is_sure = (
            found.update / exact.update,
            relative < 1,
        )  # elsewhere its sign may be another
        assert in_bounds(
            ratio[is_sure],
            ((1 - relative) * low)[is_sure],
            ((1 + relative) * high)[is_sure],
            weights,
        )
        if errors.units["exp_avg_sq"] < HALF:
            assert (
                (found.exp_avg_sq - square).abs() <= 3e-4 * square
            ).all() and is_sure.double().mean() > 0.999


@parametrize_runs(BY_CHANCE, many=BY_CHANCE)
def test_states_rounded_by_chance_are_right_on_average(
    kind: StateKind, betas: list[float], steps: int
) -> None:
    """The mean over numbers with one gradient within 6 deviations, each number within Azuma's
    inequality for one of 10^12 to be outside: a step's rounding is at most a whole distance of two
    numbers, with a variance of a quarter.
    """
    cfg = replace(BASE, betas=betas, **kind.settings)
    alike = [
        name
        for name in PATTERNS
        if name in ("constant", "100 x, together") or name.startswith("outlier")
    ]
    spans = dict.fromkeys(
        STATES, torch.zeros(())
    )  # sums of the squares of all distances, as they decay
    exact_run = run_steps(cfg, torch.float64, steps, 1)
    for found, exact in zip(run_steps(cfg, DTYPES[kind.dtype], steps, 1), exact_run, strict=True):
        for state, beta in zip(STATES, betas, strict=True):
            mine, right = getattr(found, state), getattr(exact, state)
            most = math.sqrt(math.log(2e12) / 2) * spans[state].sqrt()
            spans[state] = beta**2 * spans[state] + (WHOLE * (right.abs() + most)) ** 2
            most = math.sqrt(math.log(2e12) / 2) * spans[state].sqrt()
            assert ((mine - right).abs() <= most).all(), (found.step, state)
            if found.step % 25 == 0:
                span = Observed(0, spans[state], spans[state], spans[state])
                for name in alike:
                    off = (
                        getattr(found.select_band(name), state)
                        - getattr(exact.select_band(name), state)
                    ).flatten()
                    deviation = math.sqrt(float(span.select_band(name).update.max()) / 4 / len(off))
                    assert abs(float(off.mean())) <= 6 * deviation, (found.step, state, name)


@parametrize_runs(BLOCKED, many=BLOCKED)
def test_small_gradients_beside_an_outlier_take_the_steps_of_their_levels(
    kind: StateKind, betas: list[float], steps: int
) -> None:
    """A gradient s beside 1 has the states s and s^2 of the block's scale, whose nearest levels p
    and q > 0 are kept.

    After t steps an update is made of p + a (s - p) and q + b (s^2 - q), where a and b are (1 -
    beta) / (1 - beta^t). So in 8 bits no step is longer than right by more than a level is off, and
    in 4 bits, without a level under 1/16, there are next to none.
    """
    cfg, bits = replace(BASE, betas=betas, **kind.settings), kind.settings["state_bits"]
    signed, unsigned = compute_dynamic_levels(bits, True), compute_dynamic_levels(bits, False)
    unsigned = unsigned[unsigned > 0]
    for found in run_steps(cfg, DTYPES[kind.dtype], steps, 25):
        first, second = ((1 - beta) / (1 - beta ** (found.step + 1)) for beta in betas)
        for small in OUTLIERS:
            band = found.select_band(f"outlier, others {small:g}")
            s = float(torch.tensor(small).bfloat16())
            p = float(signed[(signed - s).abs().argmin()])
            q = float(unsigned[(unsigned - s**2).abs().argmin()])
            ratio = (p + first * (s - p)) / math.sqrt(q + second * (s**2 - q))
            assert float(band.update.min()) == pytest.approx(ratio, rel=0.01)
            assert float(band.update.max()) == pytest.approx(ratio, rel=0.01)
            assert ratio < 1.1 if bits == 8 else ratio < 4.5 * s
        assert (found.exp_avg_sq > 0).all()  # every gradient is more than zero


def test_the_patterns_are_what_the_page_says() -> None:
    assert make_gradients(0).shape == (ROWS * len(PATTERNS), COLUMNS)
    last = list(PATTERNS).index("100 x, apart") * ROWS
    before, after = make_gradients(999)[last], make_gradients(1000)[last]
    assert (
        (before == 1).all()
        and (after[::4] == 1).all()
        and after[1] == torch.tensor(0.01).bfloat16()
    )
    start = list(PATTERNS).index("100 x, in turn") * ROWS
    in_turn: Any = torch.stack([make_gradients(step)[start] for step in range(0, 2000, 8)])
    assert (
        in_turn.max(1).values == 1
    ).all()  # the block's largest never changes, each of its numbers does
    assert (in_turn.min(0).values < 0.02).all() and (
        (in_turn[1:] != in_turn[:-1]).sum(1) <= 2
    ).all()
    noise: Any = torch.stack([make_gradients(step)[-ROWS:] for step in range(50)])
    assert float((noise.float().std(0) / noise.float().mean(0)).median()) == pytest.approx(
        0.5, rel=0.05
    )


PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "optimizer_states.md"


def read_page(title: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return by kind and pattern the median and the worst of one of the page's tables."""
    header, _, *rows = (
        PAGE.read_text().partition(f"## {title}\n")[2].partition("\n##")[0].strip().splitlines()
    )
    found = {}
    for row in [line for line in rows if line.startswith("|")]:
        label, _, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        pairs = [cell.rstrip(")").split(" (") for cell in cells]
        found[label] = {
            name: (float(a), float(b)) for name, (a, b) in zip(PATTERNS, pairs, strict=True)
        }
    assert header.startswith("| states")
    return found


STEADY = ["constant", *(name for name in PATTERNS if name.startswith("outlier"))]


@pytest.mark.parametrize("kind", KINDS, ids=StateKind.format_label)
def test_the_page_is_what_fewer_steps_show(kind: StateKind) -> None:
    """With betas[1] of 0.95 a constant gradient's steps are after 100 what they are after 3,000;
    and the bytes.
    """
    label = kind.format_label()
    betas = BETAS[0]
    (exact,) = run_steps(replace(BASE, betas=betas), torch.float64, 100, 100)
    (found,) = run_steps(replace(BASE, betas=betas, **kind.settings), DTYPES[kind.dtype], 100, 100)
    page = read_page(f"Steps, betas {betas}")[label]
    for name in STEADY:
        median = float((found.select_band(name).update / exact.select_band(name).update).median())
        assert median == pytest.approx(page[name][0], rel=0.02), name
    assert f"| {label} | {kind.count_bytes_per_parameter():.3g} |" in PAGE.read_text()


def test_the_page_says_what_docs_say() -> None:
    """Each claim of docs/memory_levers.md, by the page's figures."""
    by_chance, in_8, in_4 = (kind.format_label() for kind in (*BY_CHANCE, *BLOCKED))
    exact = [
        kind.format_label() for kind in TO_THE_NEAREST if rounding_unit(kind, "exp_avg_sq") < HALF
    ]
    fused = "`dtype=bf16 optimizer.implementation=fused`"
    for betas in BETAS:
        page = read_page(f"Steps, betas {betas}")
        assert all(
            abs(math.log(worst)) < 0.005 for label in exact for _, worst in page[label].values()
        )
        assert all(abs(median - 1) < 0.01 for median, _ in page[by_chance].values())
        small = [page[in_8][f"outlier, others {one:g}"][0] for one in OUTLIERS]
        assert small == pytest.approx([1, 1, 1 / 2, 1 / 6], rel=0.1)
        assert page[in_4]["outlier, others 0.01"][0] == pytest.approx(1 / 40, rel=0.05)
        assert page[in_4]["100 x, apart"][1] > 5
    slow, fast = (read_page(f"Steps, betas {betas}")[fused] for betas in BETAS)
    assert all(abs(math.log(worst)) < 0.055 for _, worst in slow.values())
    assert max(worst for _, worst in fast.values()) == pytest.approx(
        math.sqrt(1 + 1 / 0.256), rel=0.05
    )

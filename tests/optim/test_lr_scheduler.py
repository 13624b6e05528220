"""Learning rates against closed formulas."""

import math

import pytest

from recipe_lib.config.schema import LrSchedulerConfig
from recipe_lib.optim.optimizers import compute_learning_rate


def rates(total: int, peak: float = 2.0, **keys: object) -> list[float]:
    cfg = LrSchedulerConfig(**keys)
    return [compute_learning_rate(cfg, peak, step, total) for step in range(total)]


def test_warmup_rises_linearly_and_reaches_the_peak_at_its_last_step() -> None:
    assert rates(8, type="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_share_of_the_steps_warms_up_rounded_up() -> None:
    """As transformers' warmup_ratio: of 9 steps a quarter are 2.25, so 3."""
    assert rates(9, type="constant", warmup_ratio=0.25) == rates(9, type="constant", warmup_steps=3)
    assert rates(8, type="linear", warmup_ratio=0.0) == rates(8, type="linear")


def test_linear_falls_by_equal_steps_and_the_last_step_still_trains() -> None:
    assert rates(6, type="linear", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])
    assert rates(4, type="linear", min_lr_ratio=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25])


def test_cosine_equals_the_formula() -> None:
    ours = rates(100, type="cosine", warmup_steps=10, min_lr_ratio=0.1)
    for step in range(10, 100):
        expected = 0.2 + 1.8 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert ours[step] == pytest.approx(expected, rel=1e-12)
    assert ours[55] == pytest.approx(1.1)  # half way: the middle of peak and final
    assert ours[10:] == sorted(ours[10:], reverse=True)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_past_the_end_it_stays_at_the_final_share(kind: str) -> None:
    cfg = LrSchedulerConfig(type=kind, min_lr_ratio=0.25)
    assert compute_learning_rate(cfg, 2.0, 10, 10) == pytest.approx(0.5)
    assert compute_learning_rate(cfg, 2.0, 99, 10) == pytest.approx(0.5)


def test_a_run_of_one_step_trains_at_the_peak() -> None:
    for kind in ("cosine", "linear", "constant"):
        assert rates(1, type=kind) == [2.0]


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    assert rates(3, type="cosine", warmup_steps=10) == pytest.approx([0.2, 0.4, 0.6])
    assert rates(3, type="cosine", warmup_steps=3) == pytest.approx([2 / 3, 4 / 3, 2.0])

"""A curve under tensor parallel is that of one process, and with a buffer that autograd still needs
it is not.

And what benchmarks/tp_trace.py says that a layer of others' ways keeps is what one keeps.
"""

from functools import cache

import pytest
import torch

from benchmarks import tp_curve
from benchmarks.tp_curve import WRONG, Run
from benchmarks.tp_trace import LIMIT

pytestmark = pytest.mark.benchmark

RUNS = (Run(), WRONG)


@cache
def differences() -> dict[Run, float]:
    """How far each curve is from that of one process."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, tp_curve.BYTES, (10, 65), generator=generator)
    (alone,) = tp_curve.train_losses(rows, 4, 1)
    found = tp_curve.train_losses(rows, 4, tp_curve.RANKS, RUNS)
    return {
        run: tp_curve.find_largest_difference(curve, alone)
        for run, curve in zip(RUNS, found, strict=True)
    }


@pytest.mark.parametrize("run", [run for run in RUNS if run != WRONG])
def test_the_curve_is_that_of_one_process(run: Run) -> None:
    assert differences()[run] < LIMIT


def test_a_wrong_buffer_is_caught() -> None:
    assert differences()[WRONG] > LIMIT

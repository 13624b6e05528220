"""A curve under tensor parallel is that of one process, and with a buffer that autograd still needs it is not.

And what benchmarks/tp_trace.py says that a layer of others' ways keeps is what one keeps.
"""

from functools import cache

import pytest
import torch

from benchmarks import tp_curve
from benchmarks.tp_curve import WRONG, Run
from benchmarks.tp_memory import OURS as AS_IT_IS
from benchmarks.tp_memory import STOCK, layers_of, measure
from benchmarks.tp_trace import LIMIT, PRESET, TENSOR, TOKENS, layer_bytes
from benchmarks.tp_ways import KEPT, MEGATRON, NANOTRON, OURS, STYLES, WAYS, Way, taken
from tests.plan.apart import apart

pytestmark = pytest.mark.benchmark

RUNS = (Run(), Run("false"), WRONG, Run(one_buffer=True))


@cache
def differences() -> dict[Run, float]:
    """How far each curve is from that of one process."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, tp_curve.BYTES, (10, 65), generator=generator)
    (alone,) = tp_curve.losses(rows, 4, 1)
    found = tp_curve.losses(rows, 4, tp_curve.RANKS, RUNS)
    return {run: tp_curve.difference(curve, alone) for run, curve in zip(RUNS, found, strict=True)}


@pytest.mark.parametrize("run", [run for run in RUNS if run != WRONG])
def test_the_curve_is_that_of_one_process(run: Run) -> None:
    assert differences()[run] < LIMIT


def test_a_wrong_buffer_is_caught() -> None:
    assert differences()[WRONG] > LIMIT


def kept(way: Way) -> int:
    with taken(way):
        return measure(layers_of(PRESET, 2), TENSOR, STOCK if way.styles else AS_IT_IS, length=TOKENS).kept


def test_kept_bytes_of_others_ways_are_traced_as_written() -> None:
    h, q, k, f, heads, t = 8192, 8192, 1024, 28672, 64, 8  # of a 70B
    elements = {
        STYLES: 2 * h + 2 * h * t + 2 * q + 2 * k + 4 * f,
        NANOTRON: 4 * h + 2 * q + 2 * k + 4 * f,
        MEGATRON: 4 * h + 2 * q + 2 * k + 3 * f,
        KEPT: 2 * h + 2 * h * t + 2 * q + 2 * k + 2 * f,
        OURS: 2 * h + 2 * q + 2 * k + 2 * f,
    }
    # In bf16; 4 bytes for each head and both norms, and 24 of the random state of attention.
    expected = {way: 8192 * (2 * elements[way] + 4 * (heads + 2)) // t + 24 for way in WAYS}
    assert {way.name: layer_bytes(way) for way in WAYS} == {way.name: size for way, size in expected.items()}
    for way in (STYLES, NANOTRON, MEGATRON, OURS):
        assert apart(kept, way) == expected[way], way.name

"""Planned memory of runs that are not compiled against what torch's profiler counts in real ones on
a CPU.

Of a tied embedding and a wide vocabulary, whose two gradients are most of what is there when they
are summed: autograd adds one to the other in place, which it does not do under a tracer.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.plan.profiled_runs import profile_peak
from tests.plan.test_real_runs import CASES as CASES_TRACED
from tests.plan.test_real_runs import TIED, config_of
from tests.recipes.runs import FULL
from tests.selection import mark_slow_except

SMALL = ("batch_size=1", "max_seq_len=16", "memory.loss_chunks=1", "optimizer.name=sgd")
CASES: dict[str, tuple[int, *tuple[str, ...]]] = {
    "one rank, micro-batches": (1, "gradient_accumulation_steps=3", "fused_kernels=false"),
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp": (2, "parallel.strategy=fsdp", "memory.activation_checkpointing=full"),
}
BATCHES = 1024  # bytes of a step's tokens, labels and positions, which a device gets by a copy
RANDOM_STATES = (
    2 * 5056
)  # bytes that a CPU keeps of two layers to compute them again; torch 2.15 has its peak there


def wide(case: tuple[int, *tuple[str, ...]], folder: Path) -> tuple[Any, ...]:
    """A case as those of tests/plan/test_real_runs.py, of a model with the wide vocabulary."""
    preset = folder / "wide.json"
    preset.write_text(json.dumps(json.loads(Path(TIED).read_text()) | {"vocab_size": 4096}))
    return (case[0], FULL, str(preset), *SMALL, *case[1:])


def planned_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The most bytes of a later step on rank 0, as planned."""
    found = simulate(*config_of(case, folder), ranks=case[0], phases=(), like_cpu=True)
    return found.trace.find_active_peaks()[STEADY]


def measured_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The same as torch's profiler counts it in a real run on this rank."""
    return profile_peak(*config_of(case, folder))


def both_peaks(case: tuple[Any, ...], folder: Path) -> tuple[int, int]:
    """(planned, measured) bytes."""
    planned = run_ranks(planned_peak, 1, case, folder, process_group=False, timeout=300)[0]
    return planned, run_ranks(measured_peak, case[0], case, folder, timeout=300)[0]


@pytest.mark.parametrize("name", mark_slow_except(CASES, ["fsdp"]))
def test_gradients_are_summed_as_a_run_sums_them(name: str, tmp_path: Path) -> None:
    planned, measured = both_peaks(wide(CASES[name], tmp_path), tmp_path)
    recomputes = "memory.activation_checkpointing=full" in CASES[name]
    assert -RANDOM_STATES * recomputes <= planned - measured < BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4"])
def test_no_tracer_is_in_the_way(name: str, tmp_path: Path) -> None:
    """A CPU keeps its state of random numbers for what is computed again, 5,056 bytes; a device
    gets its batches.
    """
    planned, measured = both_peaks(CASES_TRACED[name], tmp_path)
    assert planned == pytest.approx(measured, abs=10_000)

"""Planned memory of runs with `compile=true` against what torch's profiler counts in real ones on a
CPU.

The simulation runs the Python module that inductor writes, with kernels that do nothing; the real
run compiles it. No tracer of ours is in the real run: torch's CPU allocator tells the profiler of
each allocation and release. The whole table is made by `python -m benchmarks.compiled_plans`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # so that no process pays for the import
import torch._inductor.config

from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.plan.profiled_runs import profile_peak
from tests.plan.test_real_runs import PAIRS, TIED, config_of
from tests.recipes.runs import DPO, FULL, LORA

# Ranks, recipe, overrides.
CASES: dict[str, tuple[Any, ...]] = {
    "full": (2, FULL),
    "full, one rank": (1, FULL),
    "full, bf16": (2, FULL, "dtype=bf16"),
    "full, recomputed": (2, FULL, "memory.activation_checkpointing=full"),
    "full, selective": (2, FULL, "memory.activation_checkpointing=selective"),
    "full, 4 micro-batches": (2, FULL, "gradient_accumulation_steps=4"),
    "full, layers": (
        2,
        FULL,
        "parallel.fsdp_wrap_policy=layers",
        "parallel.reshard_after_forward=false",
    ),
    "full, ddp": (2, FULL, "parallel.strategy=ddp"),
    "full, packed": (2, FULL, "data.packing=true"),
    "full, 8 bits": (2, FULL, "dtype=bf16", "optimizer.state_bits=8"),
    "lora": (2, LORA),
    "lora, dropout, recomputed": (
        2,
        LORA,
        "lora.dropout=0.1",
        "memory.activation_checkpointing=full",
    ),
    "lora, dora": (2, LORA, "lora.dora=true"),
    "qlora, nf4": (2, LORA, "lora.quantize_base=nf4"),
    "qlora, nf4, one rank": (
        1,
        LORA,
        "lora.quantize_base=nf4",
        "memory.activation_checkpointing=selective",
    ),
    "qlora, int8": (2, LORA, "lora.quantize_base=int8"),
    "dpo": (2, DPO, PAIRS),
    "dpo, all": (2, DPO, PAIRS, "dpo.trainable=all", "optimizer.name=sgd"),
}


def config(case: tuple[Any, ...], folder: Path) -> tuple[type, Any, Any]:
    """As `load_row_config`, compiled, of the tied model."""
    torch._inductor.config.cpp.vec_isa_ok = (
        True  # else the simulation asks the C++ compiler, which takes seconds
    )
    ranks, name, *overrides = case
    return config_of((ranks, name, TIED, *overrides, "compile=true"), folder)


def planned_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The most bytes of a later step on rank 0, as planned."""
    recipe, cfg, shape = config(case, folder)
    found = simulate(recipe, cfg, shape, ranks=case[0], phases=(), like_cpu=True)
    assert [note.partition(":")[0] for note in found.notes] == ["compiled code"], (
        "planned as it is compiled"
    )
    return found.trace.find_active_peaks()[STEADY]


def measured_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The same as torch's profiler counts it in a real run on this rank."""
    return profile_peak(*config(case, folder))


def compared(name: str, folder: Path) -> tuple[int, int]:
    """(planned, measured) bytes of a case."""
    case = CASES[name]
    planned = run_ranks(planned_peak, 1, case, folder, process_group=False, timeout=300)[0]
    return planned, run_ranks(measured_peak, case[0], case, folder, timeout=600)[0]


@pytest.mark.slow
def test_planned_peak_of_compiled_layers_is_the_measured_one(tmp_path: Path) -> None:
    torch._dynamo.reset()
    planned, measured = compared("full, recomputed", tmp_path)
    assert planned == pytest.approx(measured, rel=0.01)

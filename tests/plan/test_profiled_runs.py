"""Planned memory of runs that are not compiled against what torch's profiler counts in real ones on a CPU.

Of a tied embedding and a wide vocabulary, whose two gradients are most of what is there when they are summed: autograd
adds one to the other in place, which it does not do under a tracer.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config import load_config
from recipe_lib.plan.tracing.simulate import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.plan.profiled_runs import profiled_peak
from tests.plan.test_real_runs import BASE, PACKED_DOCUMENTS, TIED
from tests.plan.test_real_runs import CASES as CASES_TRACED
from tests.recipes.runs import FULL, PLAIN, recipe_class, recipe_module

SMALL = ("batch_size=1", "max_seq_len=16", "memory.loss_chunks=1", "optimizer.name=sgd")
CASES: dict[str, tuple[int, *tuple[str, ...]]] = {
    "one rank": (1, "memory.activation_checkpointing=full"),
    "one rank, micro-batches": (1, "gradient_accumulation_steps=3", "fused_kernels=false"),
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp": (2, "parallel.strategy=fsdp", "memory.activation_checkpointing=full"),
}
BATCHES = 1024  # bytes of a step's tokens, labels and positions, which a device gets by a copy


def config(case: tuple[int, *tuple[str, ...]], folder: Path) -> tuple[type, Any, Any]:
    """The recipe's class, the case's config and the shape of its batches."""
    preset = folder / "wide.json"
    preset.write_text(json.dumps(json.loads(Path(TIED).read_text()) | {"vocab_size": 4096}))
    module = recipe_module(FULL)
    overrides = [*BASE, *SMALL, *case[1:], f"model.preset={preset}", f"output_dir={folder / 'none'}", f"recipe={FULL}"]
    cfg = load_config(PLAIN, overrides, module.Config)
    return recipe_class(module), cfg, SimpleNamespace(tokens=cfg.max_seq_len, documents=PACKED_DOCUMENTS)


def planned_peak(case: tuple[int, *tuple[str, ...]], folder: Path) -> int:
    """The most bytes of a later step on rank 0, as planned."""
    recipe, cfg, shape = config(case, folder)
    return simulate(recipe, cfg, shape, ranks=case[0], phases=(), like_cpu=True).trace.active_peaks()[STEADY]


def measured_peak(case: tuple[int, *tuple[str, ...]], folder: Path) -> int:
    """The same as torch's profiler counts it in a real run on this rank."""
    return profiled_peak(*config(case, folder))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_as_a_run_sums_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    planned = run_ranks(planned_peak, 1, case, tmp_path, process_group=False, timeout=300)[0]
    measured = run_ranks(measured_peak, case[0], case, tmp_path, timeout=300)[0]
    assert 0 <= planned - measured < BATCHES


def planned_case(name: str, folder: Path) -> int:
    """The planned peak of a case of tests/plan/test_real_runs.py, whose real runs are traced."""
    recipe, cfg, shape = case_config(CASES_TRACED[name], folder)
    ranks = CASES_TRACED[name][0]
    return simulate(recipe, cfg, shape, ranks=ranks, phases=(), like_cpu=True).trace.active_peaks()[STEADY]


def measured_case(name: str, folder: Path) -> int:
    """The same as torch's profiler counts it."""
    return profiled_peak(*case_config(CASES_TRACED[name], folder))


def case_config(case: tuple[Any, ...], folder: Path) -> tuple[type, Any, Any]:
    """As `config`, of the tiny tied model as it is."""
    _, name, model, *overrides = case
    module = recipe_module(name)
    overrides += [f"model.preset={model}", f"output_dir={folder / 'none'}", f"recipe={name}"]
    cfg = load_config(PLAIN, [*BASE, *overrides], module.Config)
    return recipe_class(module), cfg, SimpleNamespace(tokens=cfg.max_seq_len, documents=PACKED_DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["full layers selective 4", "nf4, one rank", "pairs, full", "8 bits", "muon", "zero-1", "transformers"]
)
def test_no_tracer_is_in_the_way(name: str, tmp_path: Path) -> None:
    """A CPU keeps its state of random numbers for what is computed again, 5,056 bytes; a device gets its batches."""
    planned = run_ranks(planned_case, 1, name, tmp_path, process_group=False, timeout=300)[0]
    measured = run_ranks(measured_case, CASES_TRACED[name][0], name, tmp_path, timeout=300)[0]
    assert planned == pytest.approx(measured, abs=10_000)

"""What a simulation says of the ranks of a pipeline against real runs of two on a CPU, to the
byte.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from recipe_lib.config import load_config
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate, trace_real_run
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.plan.test_real_runs import BASE, PAIRS, TIED
from tests.recipes.runs import DPO, FULL, PLAIN, get_recipe_class, import_recipe_module
from tests.selection import mark_slow_but, select_cases

ZBV = "parallel.pipeline_schedule=zbv"
ONCE = "parallel.reduce_gradients=step"
KEPT = "parallel.reshard_after_forward=false"
RECOMPUTED = "memory.activation_checkpointing=full"
# Recipe, overrides. Of all but the pairs the simulation traces fewer micro-batches than the run
# has.
CASES: dict[str, tuple[str, ...]] = {
    "zbv, zero-1, recomputed": (FULL, "gradient_accumulation_steps=6", ZBV, ONCE, KEPT, RECOMPUTED),
    "1f1b, adapters, pairs": (DPO, "gradient_accumulation_steps=3", PAIRS),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """By rank, of every selected case what the simulation traced and what the run did."""
    folder = tmp_path_factory.mktemp("runs")
    deep = {"tie_word_embeddings": False, "num_hidden_layers": 4}
    (folder / "deep.json").write_text(json.dumps(json.loads(Path(TIED).read_text()) | deep))

    names = select_cases(request, "name")

    def simulated() -> list[dict[str, Any]]:
        return [
            {name: run(name, folder, place * ranks_of(name) // 2) for name in names}
            for place in range(2)
        ]

    def real(names: list[str]) -> dict[str, Any]:
        return {name: run(name, folder, None) for name in names}

    found: list[dict[str, Any]] = [{}, {}]
    for ranks in (2, 4):
        alike = [name for name in names if ranks_of(name) == ranks]
        for place, runs in enumerate(run_ranks(real, ranks, alike)[:: ranks // 2] if alike else ()):
            found[place] |= runs
    return run_ranks(simulated, 1, process_group=False)[0], found


def ranks_of(case: str) -> int:
    """Two for the pipeline, and as many that share its stages where it matters."""
    return 4 if ONCE in CASES[case] else 2


def run(case: str, folder: Path, rank: int | None) -> dict[str, Any]:
    """Peaks by phase. rank: simulated; None: this one, for real."""
    name, *overrides = CASES[case]
    overrides += [
        f"model.preset={folder / 'deep.json'}",
        f"output_dir={folder / 'none'}",
        f"recipe={name}",
        "parallel.pipeline=2",
    ]
    module = import_recipe_module(name)
    cfg = load_config(PLAIN, [*BASE, *overrides], module.Config)
    shape = SimpleNamespace(tokens=cfg.max_seq_len, documents=1)
    if rank is not None:
        found = simulate(
            get_recipe_class(module),
            cfg,
            shape,
            rank=rank,
            ranks=ranks_of(case),
            phases=(),
            like_cpu=True,
        )
    else:
        with start_world(cfg) as world, let_collectives_go():
            assert dist.get_world_size() == ranks_of(case)
            found = trace_real_run(get_recipe_class(module), cfg, world, shape)
    return {"peaks": found.trace.find_active_peaks(), "repeats": found.repeats}


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", mark_slow_but(CASES, 0))
def test_peaks_of_both_ranks_are_those_of_the_real_run(
    runs: tuple[list[dict[str, Any]], list[dict[str, Any]]], name: str, rank: int
) -> None:
    simulated, real = (side[rank][name] for side in runs)
    assert real["repeats"] and simulated["repeats"]
    found = {phase: simulated["peaks"][phase] for phase in (FIRST, STEADY)}
    assert found == {phase: real["peaks"][phase] for phase in (FIRST, STEADY)}

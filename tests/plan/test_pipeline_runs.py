"""What a simulation says of the ranks of a pipeline against real runs of two on a CPU, to the byte."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from recipe_lib.config import load_config
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing.simulate import FIRST, STEADY, simulate, trace_real_run
from tests.distributed.ranks import run_ranks
from tests.plan.test_real_runs import BASE, PAIRS, TIED, collectives_let_go
from tests.recipes.runs import DPO, FULL, LORA, PLAIN, recipe_class, recipe_module
from tests.selection import selected, slow_except

ZBV = "parallel.pipeline_schedule=zbv"
RECOMPUTED = "memory.activation_checkpointing=full"
# Recipe, overrides. Of all but the pairs the simulation traces fewer micro-batches than the run has.
CASES: dict[str, tuple[str, ...]] = {
    "1f1b, tied": (FULL, "gradient_accumulation_steps=6"),
    "zbv": (FULL, "gradient_accumulation_steps=7", ZBV, "memory.loss_chunks=1"),
    "zbv, adapters, recomputed": (LORA, "gradient_accumulation_steps=6", ZBV, RECOMPUTED),
    "1f1b, pairs": (DPO, "gradient_accumulation_steps=3", PAIRS),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """By rank, of every selected case what the simulation traced and what the run did."""
    folder = tmp_path_factory.mktemp("runs")
    deep = {"tie_word_embeddings": False, "num_hidden_layers": 6}
    (folder / "deep.json").write_text(json.dumps(json.loads(Path(TIED).read_text()) | deep))

    names = selected(request, "name")

    def simulated() -> list[dict[str, Any]]:
        return [{name: run(name, folder, rank) for name in names} for rank in range(2)]

    def real() -> dict[str, Any]:
        return {name: run(name, folder, None) for name in names}

    return run_ranks(simulated, 1, process_group=False)[0], run_ranks(real, 2)


def run(case: str, folder: Path, rank: int | None) -> dict[str, Any]:
    """Peaks by phase. rank: simulated; None: this one, for real."""
    name, *overrides = CASES[case]
    model = TIED if "tied" in case else folder / "deep.json"
    overrides += [f"model.preset={model}", f"output_dir={folder / 'none'}", f"recipe={name}", "parallel.pipeline=2"]
    module = recipe_module(name)
    cfg = load_config(PLAIN, [*BASE, *overrides], module.Config)
    shape = SimpleNamespace(tokens=cfg.max_seq_len, documents=1)
    if rank is not None:
        found = simulate(recipe_class(module), cfg, shape, rank=rank, ranks=2, phases=(), like_cpu=True)
    else:
        with start_world(cfg) as world, collectives_let_go():
            assert dist.get_world_size() == 2
            found = trace_real_run(recipe_class(module), cfg, world, shape)
    return {"peaks": found.trace.active_peaks(), "repeats": found.repeats}


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", slow_except(CASES, ["zbv, adapters, recomputed"]))
def test_peaks_of_both_ranks_are_those_of_the_real_run(
    runs: tuple[list[dict[str, Any]], list[dict[str, Any]]], name: str, rank: int
) -> None:
    simulated, real = (side[rank][name] for side in runs)
    assert real["repeats"] and simulated["repeats"]
    found = {phase: simulated["peaks"][phase] for phase in (FIRST, STEADY)}
    assert found == {phase: real["peaks"][phase] for phase in (FIRST, STEADY)}

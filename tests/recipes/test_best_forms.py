"""The best step's weights, put back into models of every form: what is exported is what a run of so
many steps exports.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.recipes.runs import FULL, LORA, ROOT, offload_on_a_cpu, run_here
from tests.recipes.test_best_runs import command, equal, validations, weights
from tests.recipes.test_resume import stop_after
from tests.selection import select_cases

TWO = "batch_size=2"
STEPPING = ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "device=auto")
STREAMED = ("memory.stream_layers=true", "device=auto")
OFFLOADED = ("memory.stream_layers=true", "memory.optimizer_offload=true")
STAGES = ("parallel.pipeline=2", "batch_size=1", "gradient_accumulation_steps=4")
# Recipe, ranks and overrides.
FORMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "fsdp": (FULL, 2, (TWO,)),
    "stages of transformers": (FULL, 2, (*STAGES, "model.implementation=transformers")),
    "streamed": (FULL, 1, (*STEPPING, *OFFLOADED, "dtype=bf16", "optimizer.master_weights=true")),
    "adapters on nf4": (LORA, 1, ("lora.quantize_base=nf4", "lora.dora=true", *STREAMED)),
}
STEPS = 6


def argv_of(form: str, folder: Path, name: str, *more: str) -> list[str]:
    recipe, _, overrides = FORMS[form]
    output = folder / form.replace(" ", "_").replace(",", "") / name
    if recipe == FULL:
        return command(output, *overrides, *more)
    data = (
        "data.source=examples/demo/train.jsonl",
        "data.format=alpaca",
        "tokenizer.path=examples/demo/tokenizer",
    )
    config = str(ROOT / "tests" / "recipes" / "adapters.yaml")
    return command(output, "dtype=fp32", "device=cpu", *data, *overrides, *more, config=config)


def train(form: str, folder: Path) -> dict[str, Any]:
    """A run that keeps its best step, and one that ends there; what they exported, by rank 0."""
    recipe, ranks, _ = FORMS[form]

    def run(name: str, *more: str) -> tuple[Path, Any]:
        argv = argv_of(form, folder, name, *more)
        found = run_here(argv, recipe=recipe)
        assert found.code == 0, found.said
        if ranks > 1:
            dist.barrier()
        output = Path(
            argv[-1 - [word.partition("=")[0] for word in reversed(argv)].index("output_dir")][11:]
        )
        return output, weights(
            next(each for each in (output / "adapter", output / "model") if each.is_dir())
        )

    output, kept = run("kept", "checkpoint.keep_best=true", f"max_steps={STEPS}")
    step = min(validations(output))[1]
    short = run("short", f"max_steps={step}")[1]
    return {"step": step, "is_best": equal(kept, short), "exported": kept}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By form; all of as many ranks in one go."""
    folder, wanted = tmp_path_factory.mktemp("forms"), select_cases(request, "form")

    def together(ranks: int) -> dict[str, dict[str, Any]]:
        offload_on_a_cpu()
        return {form: train(form, folder) for form in wanted if FORMS[form][1] == ranks}

    return run_ranks(together, 1, 1)[0] | run_ranks(together, 2, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_is_exported_is_the_best_step(trained: dict[str, dict[str, Any]], form: str):
    found = trained[form]
    assert found["step"] < STEPS and found["is_best"], found["step"]


@pytest.mark.slow
def test_two_ranks_keep_what_one_goes_on_with(trained: dict[str, dict[str, Any]], tmp_path: Path):
    """Stopped after the best step of two ranks; one rank has the same, and exports it."""
    best = trained["fsdp"]["step"]

    def stop() -> int:
        argv = command(tmp_path / "run", TWO, "checkpoint.keep_best=true", f"max_steps={STEPS}")
        return run_here(argv, stop_after(best + 1, rank=1)).code

    def go_on() -> tuple[int, Any]:
        argv = command(
            tmp_path / "run", "checkpoint.keep_best=true", f"max_steps={STEPS}", "resume=latest"
        )
        return run_here(argv).code, weights(tmp_path / "run" / "model")

    assert run_ranks(stop, 2) == [3, 3]
    code, found = run_ranks(go_on, 1, process_group=False)[0]
    assert code == 0 and min(validations(tmp_path / "run"))[1] == best
    assert equal(found, trained["fsdp"]["exported"])

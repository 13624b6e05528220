"""Rounded weights on two ranks and on one: the same losses, of every kind, sharded, replicated and
in a pipeline.

A weight that differs in its last bit may turn to the next code, so that losses are equal up to a
few such turns.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.memory import apply_levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.runs import (
    FULL,
    LORA,
    build_arguments,
    find_largest_difference,
    offload_on_a_cpu,
    read_steps,
    run_here,
)
from tests.selection import mark_slow_except, select_cases

ROWS = 8
STEPS = 3
ON_ANY_DEVICE = "device=auto"  # said to be a CPU, offloading has no effect
LORA_INT4 = ("qat=int4", "qat_group_size=16", f"recipe={LORA}")
# What is rounded, and what is done with it on how many ranks.
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "int8, whole layers offloaded": (2, ("qat=int8",), ("memory.cpu_offload=true", ON_ANY_DEVICE)),
    "fp8, DDP, checkpointed": (
        2,
        ("qat=fp8",),
        ("parallel.strategy=ddp", "memory.activation_checkpointing=selective"),
    ),
    "int4, shared sequences": (2, ("qat=int4",), ("parallel.context=2",)),
    "int4, pipeline": (
        2,
        ("qat=int4",),
        ("parallel.pipeline=2", "parallel.pipeline_microbatches=2"),
    ),
    "int4, compiled": (
        2,
        ("qat=int4", "qat_start_step=1"),
        ("compile=true", "data.pad_to_multiple_of=64"),
    ),
    "adapters, streamed": (2, LORA_INT4, ("memory.stream_layers=true", ON_ANY_DEVICE)),
}
QUICK = ["adapters, streamed"]


def train(
    folder: Path, rounding: tuple[str, ...], others: tuple[str, ...], ranks: int
) -> dict[str, Any]:
    """Code, last line, and (step, loss, norm) of each step."""
    torch._dynamo.reset()
    copies = 1 if any("context=2" in word or "pipeline=2" in word for word in others) else ranks
    own = [
        f"batch_size={ROWS // copies}",
        f"max_steps={STEPS}",
        "checkpoint.save_model=false",
        "optimizer.lr=1e-3",
    ]
    recipe, output = LORA if f"recipe={LORA}" in rounding else FULL, folder / f"run{ranks}"
    words = [
        *build_arguments(output),
        *own,
        "log.every_n_steps=1000",
        "overwrite_output_dir=true",
        *rounding,
        *others,
    ]
    if "parallel.pipeline=2" in others and "parallel.pipeline_microbatches=2" not in others:
        words.append("parallel.pipeline_microbatches=2")
    last = {word.partition("=")[0]: word for word in words[2:]}
    run = run_here([*words[:2], *last.values()], recipe=recipe)
    torch.distributed.barrier()  # the first rank still writes its records
    is_on = run.code == 0 and run.recipe.parallel.levers.quantization.is_on
    return {
        "code": run.code,
        "said": run.said[-1:],
        "steps": [] if run.code else read_steps(output),
        "on": is_on,
    }


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, dict[str, Any]]:
    """Of each selected case, and under what it rounds the run of one process."""
    folder = tmp_path_factory.mktemp("rounded")
    cases = [CASES[name] for name in select_cases(request, "name")]
    bases = list(dict.fromkeys(rounding for _, rounding, _ in cases))

    def train_all(ranks: int) -> list[dict[str, Any]]:
        apply_levers.compile_layers = functools.partial(
            apply_levers.compile_layers, backend="eager"
        )
        offload_on_a_cpu()
        if ranks == 1:
            return [train(folder, rounding, (), 1) for rounding in bases]
        return [train(folder, rounding, others, ranks) for _, rounding, others in cases]

    if any("compile=true" in others for _, _, others in cases):
        import_compiler()
    found: dict[Any, dict[str, Any]] = dict(zip(bases, run_ranks(train_all, 1, 1)[0], strict=True))
    return found | dict(zip(cases, run_ranks(train_all, 2, 2, timeout=300)[0], strict=True))


@pytest.mark.parametrize("name", mark_slow_except(CASES, QUICK))
def test_losses_are_those_of_one_process(results: dict[Any, dict[str, Any]], name: str):
    found, wanted = results[CASES[name]], results[CASES[name][1]]
    assert found["code"] == wanted["code"] == 0, (found["said"], wanted["said"])
    assert found["on"] and wanted["on"]
    losses, expected = ([loss for _, loss, _ in run["steps"]] for run in (found, wanted))
    assert len(losses) == STEPS and find_largest_difference(losses[:1], expected[:1]) < 1e-6
    assert find_largest_difference(losses, expected) < 1e-3
    assert (
        find_largest_difference(
            [norm for *_, norm in found["steps"]], [norm for *_, norm in wanted["steps"]]
        )
        < 2e-2
    )

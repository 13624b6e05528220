"""Whole runs with layers streamed from the host: what they train is bitwise what the same ranks
train without it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.memory.layer_stream import LayerStream
from tests.distributed.ranks import run_ranks
from tests.plan.mixtures import write_mixture
from tests.recipes.runs import (
    DPO,
    FULL,
    LORA,
    ROOT,
    build_arguments,
    expect_done,
    gather_whole,
    keep_latest,
    list_states,
    offload_on_a_cpu,
    read_metrics,
    read_tree,
    run_here,
)
from tests.recipes.test_dpo import write_pairs
from tests.selection import mark_slow_except, select_cases

STREAM = "memory.stream_layers=true"
EXPERTS = "memory.stream_layers=experts"
STEPPING = (
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    "clip_grad_norm=null",
)
NF4 = "lora.quantize_base=nf4"
INT8 = "lora.quantize_base=int8"
RECOMPUTE, KEPT_HALF = (
    "memory.activation_checkpointing=full",
    "memory.activation_checkpointing=selective",
)
VALIDATION = (
    "validation.source=examples/demo/heldout.jsonl",
    "validation.format=alpaca",
    "validation.every_n_steps=1",
    "validation.max_samples=5",
    "validation.batch_size=2",
)
EXTERNAL = "model.implementation=transformers"
PIPELINE = ("parallel.pipeline=2", "gradient_accumulation_steps=4", "batch_size=1")


@dataclass(frozen=True)
class Case:
    """A run with a lever less than the one that it is compared with. ranks: gloo processes."""

    recipe: str
    overrides: tuple[str, ...]
    ranks: int = 1
    model: str = "tiny"
    lever: str = STREAM

    def __str__(self) -> str:
        words = " ".join(
            each.rpartition(".")[2]
            for each in (*self.overrides, *[self.lever] * (self.lever != STREAM))
        )
        return f"{self.recipe.partition('_')[0]} {words} {self.ranks} {self.model}"


def lora(*overrides: str, ranks: int = 1, model: str = "tiny") -> Case:
    return Case(LORA, overrides, ranks, model)


def experts(*overrides: str, ranks: int = 1, recipe: str = LORA) -> Case:
    return Case(recipe, overrides, ranks, "qwen3_moe", EXPERTS)


def full(*overrides: str) -> Case:
    return Case(FULL, (*overrides, *STEPPING))


CASES = [
    lora(NF4, *VALIDATION),
    full("optimizer.state_bits=8", *VALIDATION),
    Case(DPO, ("dpo.trainable=all", *STEPPING)),
    lora("parallel.tensor=2", INT8, RECOMPUTE, ranks=2),
    lora("parallel.fsdp_wrap_policy=memory_efficient", "gradient_accumulation_steps=2", ranks=2),
    lora(*PIPELINE, "parallel.pipeline_schedule=zbv", RECOMPUTE, ranks=2, model="deep"),
    lora("dtype=bf16", KEPT_HALF, "data.packing=true"),
    lora(
        *(NF4, RECOMPUTE, "memory.mlp_tiles=3"),
        *("lora.dora=true", "lora.dropout=0.1", "lora.target_modules=[q, down, embedding, head]"),
    ),
    lora(EXTERNAL, NF4, RECOMPUTE),
    full(
        *("optimizer.state_bits=4", "dtype=bf16", "optimizer.stochastic_rounding=true"),
        *("memory.activation_offload=true", "data.packing=true"),
    ),
    experts(NF4, RECOMPUTE, "lora.target_modules=[q, experts]"),
    experts(*STEPPING, "optimizer.state_bits=8", recipe=FULL),
]
QUICK = CASES[:2]


def command(case: Case, folder: Path, name: str, *more: str) -> list[str]:
    argv = build_arguments(folder / name)
    if case.recipe != FULL:
        argv[1] = str(
            ROOT / "tests" / "recipes" / {LORA: "adapters.yaml", DPO: "pairs.yaml"}[case.recipe]
        )
        source = (
            folder / "pairs.jsonl" if case.recipe == DPO else ROOT / "examples/demo/train.jsonl"
        )
        argv = [word for word in argv if not word.startswith("~")]
        argv += [
            f"data.source={source}",
            f"tokenizer.path={ROOT / 'examples/demo/tokenizer'}",
            "lora.rank=4",
        ]
    argv += [] if case.model == "tiny" else [f"model.preset={folder / case.model}.json"]
    argv += [
        "device=auto",
        "max_steps=3",
        "epochs=9",
        "optimizer.lr=1e-2",
        "dtype=fp32",
        "log.every_n_steps=1000",
    ]
    words = [word for word in case.overrides if word not in ("dpo.trainable=all",)]
    kept = [
        word
        for word in argv
        if not ("dpo.trainable=all" in case.overrides and word.startswith("lora."))
    ]
    return keep_latest(
        *kept, *(each for each in case.overrides if each not in words), *words, *more
    )


def trained_in(run: Any) -> dict[str, Any]:
    """What a run has trained, and the optimizer's states, as bytes. A collective."""
    run.recipe.model.state_dict()  # FSDP's hook frees what is gathered
    weights = {
        name: gather_whole(one.detach())
        for name, one in run.recipe.model.named_parameters()
        if one.requires_grad
    }
    return {
        name: one.contiguous().flatten().view(torch.uint8)
        for name, one in (weights | list_states(run.recipe)).items()
    }


def numbers(output: Path) -> list[tuple[float, ...]]:
    """What each step and each validation recorded."""
    words = ("step", "loss", "grad_norm", "validation_loss", "reward_margin")
    return [tuple(line[word] for word in words if word in line) for line in read_metrics(output)]


def train(case: Case, folder: Path, name: str, *more: str) -> dict[str, Any]:
    """streams: units and whether the most units that were on the device at a time were two; left:
    bytes there now.
    """
    made: list[LayerStream] = []
    most = [0]
    allocate = LayerStream._allocate

    def noted(stream: LayerStream, number: int) -> Any:
        made.append(stream) if stream not in made else None
        most[0] = max(most[0], len(stream._prefetch.on_device) + 1)
        return allocate(stream, number)

    LayerStream._allocate = noted  # type: ignore[method-assign]
    try:
        run = expect_done(run_here(command(case, folder, name, *more), recipe=case.recipe))
    finally:
        LayerStream._allocate = allocate  # type: ignore[method-assign]
    there = [
        one
        for stream in made
        for unit in stream.units
        for one in unit.get_device_parameters().values()
    ]
    left = sum(
        (one.to_local() if hasattr(one, "to_local") else one).untyped_storage().nbytes()
        for one in there
    )
    said = [line for line in run.said if "copied to the device one ahead" in line]
    said += [
        line
        for line in run.said
        if re.match(r"memory per rank: parameters \S+ \S+ and \S+ \S+ in host memory, ", line)
    ]
    return {
        "numbers": numbers(folder / name),
        "trained": trained_in(run),
        "most": most[0],
        "left": left,
        "said": said,
        "files": {
            key: value
            for key, value in read_tree(folder / name).items()
            if key.endswith(".safetensors")
        },
    }


def train_each(folder: Path, cases: list[Case]) -> list[tuple[Any, Any]]:
    offload_on_a_cpu()
    ranks = cases[0].ranks
    return [
        (
            train(case, folder, f"{ranks} {at} plain"),
            train(case, folder, f"{ranks} {at} streamed", case.lever),
        )
        for at, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streamed")
    write_mixture(made, "qwen3_moe")
    write_pairs(made)
    tiny = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    (made / "deep.json").write_text(json.dumps(tiny | {"num_hidden_layers": 4}))
    return made


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[Case, tuple[Any, Any]]:
    """What every selected case came to without and with streaming, on rank 0."""
    found: dict[Case, tuple[Any, Any]] = {}
    for ranks in (1, 2):
        mine = [case for case in select_cases(request, "case") if case.ranks == ranks]
        if mine:
            found |= dict(
                zip(mine, run_ranks(train_each, ranks, folder, mine, timeout=600)[0], strict=True)
            )
    return found


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK), ids=str)
def test_what_is_trained_is_bitwise_that_of_the_resident_run(
    results: dict[Case, Any], case: Case
) -> None:
    expected, found = results[case]
    assert len(found["numbers"]) >= 3 and found["numbers"] == expected["numbers"]
    assert found["trained"].keys() == expected["trained"].keys()
    for name, one in found["trained"].items():
        assert torch.equal(one, expected["trained"][name]), name
    assert found["files"] and found["files"] == expected["files"]
    assert expected["most"] == 0 and not expected["said"]
    assert found["most"] == 2 and len(found["said"]) == 2
    # Frozen experts of the first layer stay for the next forward.
    assert (found["left"] > 0) == (case.lever == EXPERTS and case.recipe != FULL)
    assert ("experts of 2 layers in host memory" in found["said"][0]) == (case.lever == EXPERTS)


RESUMED = [lora(NF4, RECOMPUTE), full("optimizer.state_bits=8")]


def in_two_parts(folder: Path, case: Case) -> list[Any]:
    """A run, one that goes on from its first state, and one that goes on from that of a resident
    run.
    """
    offload_on_a_cpu()
    kept = ("checkpoint.save_every_n_steps=1", "checkpoint.keep_last_n=3")
    found = [train(case, folder, "whole", STREAM, *kept)]
    train(case, folder, "resident", *kept)
    for name in ("whole", "resident"):
        resume = f"resume={folder / name / 'state' / 'step_1'}"
        found.append(train(case, folder, f"{name} resumed", STREAM, resume))
    return found


@pytest.mark.parametrize("case", mark_slow_except(RESUMED, RESUMED[1:]), ids=str)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, case: Case) -> None:
    expected, *resumed = run_ranks(in_two_parts, 1, tmp_path, case, timeout=300)[0]
    for found in resumed:
        assert found["numbers"] == expected["numbers"][1:]
        assert all(
            torch.equal(one, expected["trained"][name]) for name, one in found["trained"].items()
        )
        assert found["files"].keys() <= expected["files"].keys() and found["left"] == 0


def refused(folder: Path) -> tuple[int, list[str]]:
    offload_on_a_cpu()
    run = run_here(command(full(), folder, "refused", STREAM))
    return run.code, [line for line in run.said if line.startswith("error")]


def test_trained_layers_on_two_ranks_are_refused_by_name(tmp_path: Path) -> None:
    codes, said = zip(*run_ranks(refused, 2, tmp_path), strict=True)
    assert codes == (2, 2)
    assert [line for lines in said for line in lines] == [  # one of the ranks tells it
        "error: memory.stream_layers: found 2 ranks with tokens of their own for layers that are"
        " trained, expected 1, as a layer is stepped by the gradient of one rank's tokens; use"
        " memory.cpu_offload, or start one process"
    ]

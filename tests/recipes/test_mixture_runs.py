"""Whole runs of mixtures of experts: the losses of one process for every way to divide a model and
to save memory.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from recipe_lib.config.mesh import MODEL_DIMS
from tests.distributed.ranks import run_ranks
from tests.recipes.mixtures import MIXTURES, write_mixture
from tests.recipes.runs import (
    DPO,
    FULL,
    LORA,
    ROOT,
    build_arguments,
    expect_done,
    find_largest_difference,
    keep_latest,
    offload_on_a_cpu,
    read_metrics,
    run_here,
)
from tests.recipes.test_dpo import write_pairs
from tests.selection import mark_slow_except, select_cases

GLOBAL_BATCH = 8
STEPS = 3
_NF4 = ("dtype=fp32", "lora.quantize_base=nf4", "lora.rank=4", "optimizer.lr=1e-2")
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": (FULL, ("dtype=fp64",)),
    "balanced": (FULL, ("dtype=fp64", "router_aux_loss_coef=0.5")),
    "packed": (FULL, ("dtype=fp64", "data.packing=true", "data.max_samples=96")),
    "lora": (
        LORA,
        (
            "dtype=fp64",
            "lora.rank=4",
            "lora.target_modules=[q, v, router, experts]",
            "optimizer.lr=1e-2",
        ),
    ),
    "lora of all": (
        LORA,
        ("dtype=fp64", "lora.rank=4", "lora.target_modules=[all-linear]", "optimizer.lr=1e-2"),
    ),
    "qlora": (LORA, _NF4),
    "qlora of experts": (
        LORA,
        (
            "dtype=fp32",
            "lora.quantize_base=nf4",
            "lora.rank=4",
            "lora.target_modules=[q, experts]",
            "optimizer.lr=1e-2",
        ),
    ),
    "int8": (
        LORA,
        (
            "dtype=fp32",
            "lora.quantize_base=int8",
            "lora.rank=4",
            "lora.target_modules=[o, experts]",
        ),
    ),
    "dpo of all": (DPO, ("dtype=fp64", "lora.rank=4", "optimizer.lr=1e-2")),
    "dpo": (
        DPO,
        ("dtype=fp64", "lora.rank=4", "lora.target_modules=[q, experts]", "optimizer.lr=1e-2"),
    ),
}
TENSOR = ("parallel.tensor=2",)
PIPELINE = ("parallel.pipeline=2", "gradient_accumulation_steps=4")
ZERO_BUBBLE = (*PIPELINE, "parallel.pipeline_schedule=zbv")
RECOMPUTE = ("memory.activation_checkpointing=full",)
KEPT_HALF = ("memory.activation_checkpointing=selective",)
TILES = ("memory.mlp_tiles=3",)
OFFLOAD = ("memory.cpu_offload=true",)
WINDOW = ("memory.activation_offload=true",)
HOSTED = ("memory.stream_layers=experts",)
STEPPING = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")


MORE = ("expert_load_max_over_mean", "dropped_tokens", "router_aux_loss")


@dataclass(frozen=True)
class Case:
    """A run that is compared with one of one process. family: of the model. levers: overrides."""

    family: str
    kind: str
    ranks: int
    levers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.family} {self.kind} {self.ranks}"
            f" {' '.join(lever.rpartition('.')[2] for lever in self.levers)}"
        )

    @property
    def basis(self) -> "Case":
        """The plain run of one process; without clipping, if this one has none."""
        plain = tuple(lever for lever in self.levers if lever.startswith("clip_grad_norm"))
        return Case(self.family, self.kind, 1, plain)


CASES = [
    Case("qwen3_moe", "full", 2, TENSOR),
    Case("qwen3_moe", "full", 1, (*OFFLOAD, *RECOMPUTE)),
    Case("qwen3_moe", "lora", 2, (*ZERO_BUBBLE, *RECOMPUTE)),
    Case("gpt_oss", "full", 1, (*TILES, *WINDOW)),
    Case("gpt_oss", "full", 4, (*TENSOR, *PIPELINE)),
    Case("gpt_oss", "packed", 2, RECOMPUTE),
    Case("gpt_oss", "qlora of experts", 2, (*HOSTED, *TENSOR)),
    Case("mixtral", "full", 1, STEPPING),
    Case("mixtral", "dpo", 2, PIPELINE),
    Case("mixtral", "int8", 2, ("parallel.strategy=ddp",)),
    Case("mixtral", "int8", 2, TENSOR),
    Case("gpt_oss", "int8", 2, (*TENSOR, *RECOMPUTE)),
    Case("olmoe", "balanced", 1, KEPT_HALF),
]
QUICK = CASES[:1]


def train(case: Case, folder: Path, name: str, *more: str) -> list[tuple[float, ...]]:
    """(step, loss, gradient norm, numbers about the experts) of each step of a run."""
    recipe, settings = KINDS[case.kind]
    shared = math.prod(
        size for size in (2, 4) for name in MODEL_DIMS if f"parallel.{name}={size}" in case.levers
    )
    accumulated = 4 if "gradient_accumulation_steps=4" in case.levers else 1
    argv = build_arguments(folder / name)
    if recipe != FULL:
        argv[1] = str(
            ROOT / "tests" / "recipes" / {LORA: "adapters.yaml", DPO: "pairs.yaml"}[recipe]
        )
        source = folder / "pairs.jsonl" if recipe == DPO else ROOT / "examples/demo/train.jsonl"
        argv = [word for word in argv if not word.startswith("~")]
        argv += [f"data.source={source}", f"tokenizer.path={ROOT / 'examples/demo/tokenizer'}"]
    argv += [
        f"model.preset={folder / case.family}.json",
        f"batch_size={GLOBAL_BATCH // (case.ranks // shared) // accumulated}",
        f"max_steps={STEPS}",
        "device=auto",  # a CPU: one that is named has no host to offload to
        "lr_scheduler.type=constant",
        # Padding is given to experts too, and counts among what they are given
        "data.pad_to_multiple_of=64",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        *settings,
        *case.levers,
        *more,
    ]
    expect_done(run_here(keep_latest(*argv), recipe=recipe))
    lines = [line for line in read_metrics(folder / name) if "loss" in line]
    return [
        tuple(line[key] for key in ("step", "loss", "grad_norm", *MORE) if key in line)
        for line in lines
    ]


def train_each(folder: Path, cases: list[Case]) -> list[list[tuple[float, ...]]]:
    offload_on_a_cpu()
    found = []
    for number, case in enumerate(cases):
        found.append(train(case, folder, f"{case.ranks} {number}"))
        dist.barrier()
    return found


def train_in_two(folder: Path, case: Case) -> tuple[Any, Any]:
    """What a run records, and what one does that goes on from its first state."""
    kept = ("checkpoint.save_every_n_steps=1", "checkpoint.keep_last_n=3")
    whole = train(case, folder, "whole", *kept)
    dist.barrier()
    resumed = train(case, folder, "resumed", f"resume={folder / 'whole' / 'state' / 'step_1'}")
    dist.barrier()
    return whole, resumed


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Any]:
    """What every selected case, and what it is compared with, recorded."""
    folder = tmp_path_factory.mktemp("mixtures")
    for family in MIXTURES:
        write_mixture(family, folder)
    write_pairs(folder)
    return with_bases(select_cases(request, "case"), folder)


def with_bases(cases: list[Case], folder: Path) -> dict[Case, Any]:
    """What the cases, and the runs of one process that they are compared with, recorded."""
    every = list(dict.fromkeys([*(case.basis for case in cases), *cases]))
    found: dict[Case, Any] = {}
    for ranks in (1, 2, 4):
        mine = [case for case in every if case.ranks == ranks]
        if mine:
            found |= dict(
                zip(mine, run_ranks(train_each, ranks, folder, mine, timeout=400)[0], strict=True)
            )
    return found


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK), ids=str)
def test_losses_are_those_of_one_process(results: dict[Case, Any], case: Case) -> None:
    expected, found = results[case.basis], results[case]
    tolerance = 1e-9 if "fp64" in str(KINDS[case.kind][1]) else 1e-5
    for column in (1, 2, 3, *([5] if case.kind == "balanced" else [])):
        mine, wanted = ([line[column] for line in lines] for lines in (found, expected))
        assert find_largest_difference(mine, wanted) <= tolerance
    assert all(line[3] >= 1 and line[4] == 0 for line in found)
    assert expected[0][1] != expected[-1][1]


RESUMED = [Case("gpt_oss", "full", 2, TENSOR), Case("mixtral", "lora", 2, PIPELINE)]


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_a_resumed_run_goes_on_bit_for_bit_and_one_process_does(case: Case, tmp_path: Path) -> None:
    write_mixture(case.family, tmp_path)
    whole, resumed = run_ranks(train_in_two, case.ranks, tmp_path, case, timeout=200)[0]
    assert [line[0] for line in resumed] == [2, 3]
    assert resumed == whole[1:]
    alone = run_ranks(go_on_alone, 1, tmp_path, Case(case.family, case.kind, 1), timeout=200)[0]
    for column in (1, 2):
        mine, wanted = ([line[column] for line in lines] for lines in (alone, whole[1:]))
        assert find_largest_difference(mine, wanted) <= 1e-9


def go_on_alone(folder: Path, case: Case) -> list[tuple[float, ...]]:
    return train(case, folder, "alone", f"resume={folder / 'whole' / 'state' / 'step_1'}")


WRITTEN = {
    "full shared": ("full", TENSOR),
    "full stages": ("full", PIPELINE),
    "lora shared": ("lora", TENSOR),
}


def export_each(folder: Path, family: str) -> None:
    """Models and adapters that two ranks write, of each a half of every expert or of the layers,
    and one process.
    """
    ranks = dist.get_world_size()
    runs = WRITTEN if ranks == 2 else {"full alone": ("full", ()), "lora alone": ("lora", ())}
    for name, (kind, levers) in runs.items():
        train(
            Case(family, kind, ranks, levers),
            folder,
            name,
            "checkpoint.save_model=true",
            "max_steps=1",
        )
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_ranks_of_a_group_and_of_a_pipeline_write(family: str, tmp_path: Path) -> None:
    """Rows of gate and up lie in the file's order, whatever the order on the ranks; transformers
    opens the model.
    """
    write_mixture(family, tmp_path)
    for ranks in (1, 2):
        run_ranks(export_each, ranks, tmp_path, family, timeout=200)
    files = {"full": "model/model.safetensors", "lora": "adapter/adapter_model.safetensors"}
    for run, (kind, _) in WRITTEN.items():
        alone, written = (
            load_file(tmp_path / name / files[kind]) for name in (f"{kind} alone", run)
        )
        assert alone.keys() == written.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(written[name], tensor, atol=1e-8, rtol=0, msg=name)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "full shared/model", output_loading_info=True
    )
    assert not any(info.values()), info

"""Runs with fused kernels, which on a CPU are operators that compute their chains: the losses of
runs without.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from recipe_lib.ops import fused_kernels
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    DPO,
    FULL,
    LORA,
    ROOT,
    build_arguments,
    expect_done,
    keep_latest,
    read_steps,
    run_here,
)
from tests.recipes.test_dpo import arguments as preference_arguments
from tests.recipes.test_dpo import write_pairs
from tests.selection import mark_slow_except

ADAPTERS = ("recipe=lora_finetune_distributed", "lora.rank=4")
# Kind of run -> recipe, overrides.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": (FULL, ("memory.activation_checkpointing=selective", "memory.mlp_tiles=2")),
    "nf4": (LORA, (*ADAPTERS, "lora.quantize_base=nf4", "memory.activation_checkpointing=full")),
    "int8": (
        LORA,
        (*ADAPTERS, "lora.quantize_base=int8", "lora.target_modules=[q, v, gate, down, head]"),
    ),
    "preference": (DPO, ()),
}
MESHES = {
    "fsdp": ("full", "batch_size=2"),
    "tensor nf4": ("nf4", "parallel.tensor=2"),
    "zero bubble": (
        "full", "parallel.pipeline=2", "parallel.pipeline_schedule=zbv", "gradient_accumulation_steps=2",
        "batch_size=2", "memory.activation_checkpointing=none", "memory.mlp_tiles=1",
    ),
}  # fmt: skip
Steps = list[tuple[int, float, float]]


@contextmanager
def fused() -> Iterator[list[int]]:
    """Inside, a CPU is a device whose chains are fused, by nothing; notes calls of operators.
    test_fused_kernels has what inductor makes of them.
    """
    calls: list[int] = []
    with (
        mock.patch.object(fused_kernels, "get_kernel_type", lambda device: "cuda"),
        mock.patch.object(fused_kernels, "has_triton", lambda: True),
        mock.patch.object(fused_kernels, "can_compile", lambda tensor: calls.append(0) or False),
        mock.patch.object(fused_kernels, "_find_compile_fault", lambda device: ""),
        mock.patch.object(fused_kernels._fusing, "value", False),
    ):
        yield calls


def run(folder: Path, name: str, kind: str, *overrides: str) -> Steps:
    """A run of three steps of a model of four layers, whose matrices have whole blocks of 64
    numbers.
    """
    recipe, own = KINDS[kind]
    output = folder / name
    argv = (
        preference_arguments(folder / "pairs.jsonl", output)
        if recipe == DPO
        else build_arguments(output)
    )
    common = (f"model.preset={folder / 'wide.json'}", "max_steps=3", "optimizer.lr=1e-2", "dtype=fp32",
              "checkpoint.save_model=false", "device=auto")  # fmt: skip
    expect_done(run_here(keep_latest(*argv, *common, *own, *overrides), recipe=recipe))
    return read_steps(output)


def assert_same(found: Steps, wanted: Steps, tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted) == 3
    for mine, other in zip(found, wanted, strict=True):
        assert mine == pytest.approx(other, rel=tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fused")
    preset = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    (found / "wide.json").write_text(
        json.dumps(preset | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4})
    )
    write_pairs(found)
    return found


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ["full"]))
def test_fused_runs_are_those_without(folder: Path, kind: str) -> None:
    plain = run(folder, f"{kind} plain", kind)
    with fused() as calls:
        found = run(folder, f"{kind} fused", kind)
        assert len(calls) > 50
        calls.clear()
        assert run(folder, f"{kind} off", kind, "fused_kernels=false") == plain and not calls
    assert_same(found, plain)


@pytest.mark.slow
def test_ranks_that_fuse_train_as_one_that_does_not(folder: Path) -> None:
    """Sharded, with shared matrices, and with deferred weight gradients."""
    wanted = {
        kind: run(folder, f"{kind} one", kind) for kind in {mesh[0] for mesh in MESHES.values()}
    }

    def ranks() -> list[Steps]:
        with fused():
            return [
                run(folder, name, kind, *overrides) for name, (kind, *overrides) in MESHES.items()
            ]

    for name, found in zip(MESHES, run_ranks(ranks, 2)[0], strict=True):
        assert_same(found, wanted[MESHES[name][0]])

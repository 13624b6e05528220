"""Whole models on every data rank: the sums of their gradients, and whole runs beside those of one
process.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from recipe_lib.config.mesh import compute_mesh_shape
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.parallel import Parallel, all_reduce_gradients, ddp
from recipe_lib.parallel.ddp import Replicas
from recipe_lib.training.run_description import _describe_devices
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    FULL,
    LORA,
    ROOT,
    build_story_arguments,
    expect_done,
    find_largest_difference,
    gather_whole,
    make_probe_tokens,
    read_metrics,
    read_steps,
    run_here,
)
from tests.selection import select_cases

SIZES = [
    (3,),
    (5, 8),
    (64,),
    (7, 40),
    (1,),
    (0, 4),
    (16, 4),
]  # with buckets of 64: packed, exactly one, in several
GLOBAL_BATCH = 8
STEPS = 3
SAVED = 1
DDP = "parallel.strategy=ddp"
SAVE = f"checkpoint.save_every_n_steps={SAVED}"
FULLY = "memory.activation_checkpointing=full"


def gradients_of(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


class Model(nn.Module):
    """A parameter of each size, one more that is frozen, one without a gradient, and one of another
    type.
    """

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.trained = nn.ParameterList(
            nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES
        )
        for parameter, gradient in zip(self.trained, gradients_of(rank, dtype), strict=True):
            parameter.grad = gradient
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.zeros(9, dtype=torch.float64))
        self.other.grad = torch.full((9,), rank + 1.0, dtype=torch.float64)


def test_gradients_become_sums_whatever_their_sizes(monkeypatch: pytest.MonkeyPatch):
    """Against sums taken in one process, in the type that was asked for; at most two buckets are
    held.
    """
    monkeypatch.setattr(ddp, "BUCKET_ELEMENTS", 64)

    def work() -> dict[str, Any]:
        rank = dist.get_rank()
        mesh = init_device_mesh(
            "cpu", (1, 2, 1, 1), mesh_dim_names=("pipeline", "data_replicate", "data_shard", "t")
        )
        found: dict[str, Any] = {}
        held = [0, 0, 0]  # buckets in memory, most of them, elements of the largest
        start = ddp._start_sum

        def started(pieces: list[torch.Tensor], dtype: torch.dtype, group: Any) -> Any:
            finish = start(pieces, dtype, group)
            is_packed = len(pieces) > 1 or pieces[0].dtype != dtype
            if is_packed:
                held[0] += 1
                held[1], held[2] = (
                    max(held[:2]),
                    max(held[2], sum(piece.numel() for piece in pieces)),
                )

            def finished() -> None:
                held[0] -= is_packed
                finish()

            return finished

        ddp._start_sum = started  # type: ignore[assignment]
        for own, wide in (
            (torch.float32, None),
            (torch.bfloat16, None),
            (torch.bfloat16, torch.float32),
        ):
            model = Model(rank, own)
            world: Any = SimpleNamespace(mesh=mesh, tensor=None)
            all_reduce_gradients(model, Parallel(), world)
            assert all(
                torch.equal(p.grad, g)
                for p, g in zip(model.trained, gradients_of(rank, own), strict=True)
            )
            all_reduce_gradients(model, Parallel(replicas=Replicas(2, wide)), world)
            assert model.unused.grad is None and model.frozen.grad is None
            found[f"{own} {wide}"] = [parameter.grad for parameter in (*model.trained, model.other)]
        return found | {"held": held}

    ranks = run_ranks(work, 2)
    for own, wide in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ):
        parts = [gradients_of(rank, own) for rank in range(2)]
        sums = [
            (one.to(wide or own) + other.to(wide or own)).to(own)
            for one, other in zip(*parts, strict=True)
        ]
        for found in ranks:
            *trained, other = found[f"{own} {wide}"]
            assert all(torch.equal(*pair) for pair in zip(trained, sums, strict=True))
            assert other.tolist() == [3.0] * 9
    assert [found["held"] for found in ranks] == [[0, 2, 64], [0, 2, 64]]


def test_the_mesh_has_copies_and_no_shards():
    assert tuple(compute_mesh_shape(ParallelConfig(strategy="ddp"), 8).values()) == (1, 8, 1, 1)
    assert tuple(
        compute_mesh_shape(ParallelConfig(strategy="ddp", tensor=2, pipeline=2), 8).values()
    ) == (
        2,
        2,
        1,
        2,
    )


def test_auto_that_nobody_has_decided_is_said_to_be_fsdp():
    mesh = SimpleNamespace(mesh_dim_names=("data_replicate", "data_shard"), shape=(1, 2))
    world = SimpleNamespace(size=2, data_ranks=2, device=torch.device("cpu"), mesh=mesh)
    cfg = FullFinetuneConfig(parallel=ParallelConfig(strategy="auto"))
    said = (
        "devices: 2 cpu = data_replicate 1 x data_shard 2; parallel.strategy=auto is fsdp here,"
        " since `tune run` "
    )
    assert _describe_devices(cfg, world) == said + "has not planned both"  # type: ignore[arg-type]
    assert (
        tuple(compute_mesh_shape(cfg.parallel, 2).values()) == (1, 1, 2, 1)
        and cfg.parallel.strategy != "ddp"
    )


class Runs:
    """Whole runs: one process, two ranks with whole models, and with shards. Pipelines and groups:
    test_levers.
    """

    def __init__(self, realdata: Path, folder: Path) -> None:
        self.realdata, self.folder = realdata, folder
        text = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()
        (folder / "text.txt").write_text(text[:6_000])

    def run(self, name: str, data_ranks: int, *overrides: str, recipe: str = FULL) -> Any:
        argv = build_story_arguments(
            self.realdata,
            self.folder / name,
            f"data.source={self.folder / 'text.txt'}",
            "data.format=text",
            f"batch_size={GLOBAL_BATCH // data_ranks // 2}",
            "gradient_accumulation_steps=2",
            f"max_steps={STEPS}",
            "lr_scheduler.type=constant",
            "checkpoint.save_model=false",
            "checkpoint.keep_last_n=3",
            "clip_grad_norm=0.5",
            *overrides,
        )
        if recipe == LORA:
            argv[1] = str(ROOT / "tests" / "recipes" / "adapters.yaml")
        return expect_done(run_here(argv, recipe=recipe))

    def state(self, name: str) -> str:
        return f"resume={self.folder / name / 'state' / f'step_{SAVED}'}"


def alone(runs: Runs, names: list[str]) -> None:
    runs.run("full 1", 1)
    if "lora ddp" in names:
        runs.run("lora 1", 1, "optimizer.lr=1e-2", recipe=LORA)


def of_two(runs: Runs, bits: list[int], names: list[str]) -> dict[str, Any]:
    if bits:
        runs.run("int8 ddp", 2, DDP, "matmul_dtype=int8", FULLY)
        runs.run("int8 fsdp", 2, "matmul_dtype=int8", FULLY)
    if not names:
        return {}
    run = runs.run("full ddp", 2, DDP, SAVE)
    with torch.no_grad():
        logits = run.recipe.model(make_probe_tokens())
    marked = {
        "units": [line for line in run.said if line.startswith("FSDP")],
        "whole": all(
            type(parameter) is nn.Parameter for parameter in run.recipe.model.parameters()
        ),
    }
    if "lora ddp" in names:
        runs.run("lora ddp", 2, DDP, "optimizer.lr=1e-2", recipe=LORA)
    runs.run("full fsdp", 2, SAVE, "max_steps=1", "lr_scheduler.type=constant")
    runs.run("fsdp to ddp", 2, DDP, runs.state("full fsdp"))
    resumed = runs.run("ddp to fsdp", 2, runs.state("full ddp"))
    with torch.no_grad():
        return {
            "logits": logits,
            "resumed": gather_whole(resumed.recipe.model(make_probe_tokens())),
        } | marked


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, realdata: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the runs, and what the two ranks found."""
    found = Runs(realdata, tmp_path_factory.mktemp("replicas"))
    bits = select_cases(request, "bits")
    # Tests that have neither read what the first of these runs finds.
    names = select_cases(request, "name") or ([] if bits else ["full ddp"])
    run_ranks(alone, 1, found, names)
    two = run_ranks(of_two, 2, found, bits, names)
    return found.folder, two


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("full ddp", "full 1"),
        pytest.param("lora ddp", "lora 1", marks=pytest.mark.slow),
        ("fsdp to ddp", "full 1"),
        ("ddp to fsdp", "full 1"),
    ],
)
def test_losses_and_norms_are_those_of_one_process(runs: Any, name: str, reference: str):
    many, one = read_steps(runs[0] / name), read_steps(runs[0] / reference)
    one = one[SAVED:] if len(many) < STEPS else one
    assert [step for step, _, _ in many] == [step for step, _, _ in one]
    assert (
        find_largest_difference([loss for _, loss, _ in many], [loss for _, loss, _ in one]) <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in many], [norm for _, _, norm in one]) <= 1e-4
    )
    assert all(norm > 0.5 for _, _, norm in one)  # all are clipped


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8])
def test_matmuls_of_few_bits_find_the_same_whether_weights_are_gathered(runs: Any, bits: int):
    """Rounded are the same operands; gradients are summed in another order. The loss is near that
    of full precision.
    """
    shards, copies, plain = (
        read_steps(runs[0] / name) for name in (f"int{bits} fsdp", f"int{bits} ddp", "full 1")
    )
    assert (
        find_largest_difference([loss for _, loss, _ in copies], [loss for _, loss, _ in shards])
        <= 1e-3
    )
    assert copies[0][1] == shards[0][1]
    off = find_largest_difference([loss for _, loss, _ in copies], [loss for _, loss, _ in plain])
    assert 1e-6 < off < 0.02


def test_every_rank_has_the_whole_trained_model(runs: Any):
    first, second = runs[1]
    assert first["whole"] and second["whole"]
    assert torch.equal(first["logits"], second["logits"])
    assert torch.allclose(first["resumed"], first["logits"], atol=1e-4)
    assert first["units"][0].startswith("FSDP: off (ddp): 2 ranks have the same parameters")
    assert len(read_metrics(runs[0] / "full ddp")) == STEPS

"""However a global batch is divided, over accumulation, ranks or replicas, a step is the same:
loss, gradient norm and parameters, in fp64 to 1e-12 and in fp32 to 1e-6. The rows are such that a
wrong normalization shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe_lib.data.data_plan import DataPlan
from recipe_lib.data.dataset import Dataset
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import build_arguments, list_parameters, read_steps, run_here
from tests.selection import mark_slow_except, select_cases

STEPS = 3
ROWS = 8
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
OPTIMIZERS = {
    "sgd": [
        "optimizer.name=sgd",
        "optimizer.lr=0.5",
        "optimizer.momentum=0.9",
        "clip_grad_norm=null",
    ],
    "clipped": [
        "optimizer.name=sgd",
        "optimizer.lr=0.5",
        "clip_grad_norm=0.5",
        "optimizer.weight_decay=0.1",
    ],
}


@dataclass(frozen=True)
class Division:
    """How the 8 rows of a step are divided."""

    ranks: int
    batch_size: int
    accumulation: int
    replicate: int = 1

    def __str__(self) -> str:
        copies = f"{self.replicate} copies of " if self.replicate > 1 else ""
        return (
            f"{copies}{self.ranks // self.replicate} ranks x {self.batch_size} rows x"
            f" {self.accumulation}"
        )


WHOLE = Division(1, 8, 1)
LENGTHS = [3, 60, 7, 41, 64, 1, 18, 33]
# Rows 2 and 3 train nothing: with 1 row at a time a whole micro-batch, with ranks a rank's one. The
# others have 1 to 60 trained tokens.
TRAINED = [1, 60, 0, 0, 5, 1, 18, 2]


def uneven_rows(recipe: Any) -> None:
    """Puts rows of those lengths and trained counts in place of the recipe's, other ones in each
    step.
    """
    drawn = np.random.default_rng(0)
    lengths = LENGTHS * STEPS
    offsets = np.cumsum([0, *(length + 1 for length in lengths)])
    ids = drawn.integers(3, 500, offsets[-1]).astype(np.int32)
    trained = np.zeros(offsets[-1], dtype=np.uint8)
    for end, count in zip(offsets[1:], TRAINED * STEPS, strict=True):
        trained[end - count : end] = 1
    data = recipe.data
    data.dataset = Dataset(ids, offsets, trained, data.dataset.report, "uneven rows")
    data.plan = DataPlan(
        data.dataset, seed=0, slots_per_step=ROWS, shuffle=False, packing_capacity=None
    )
    data.total_steps = STEPS
    assert list(data.dataset.trained_counts) == TRAINED * STEPS


def train(
    folder: Path,
    division: Division,
    dtype: str,
    optimizer: str,
    before_training: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Losses, gradient norms and parameters of a run, on every rank."""
    output = folder / f"{division}, {dtype}, {optimizer}"
    run = run_here(
        [
            *build_arguments(output),
            f"dtype={dtype}",
            f"batch_size={division.batch_size}",
            f"gradient_accumulation_steps={division.accumulation}",
            f"parallel.data_replicate={division.replicate}",
            f"max_steps={STEPS}",
            "data.shuffle=false",
            "lr_scheduler.type=constant",
            "checkpoint.save_model=false",
            *OPTIMIZERS[optimizer],
        ],
        before_training=before_training,
        before_model=uneven_rows,
    )
    assert run.code == 0, run.said
    assert run.recipe.data.total_steps == STEPS
    return {"steps": read_steps(output), "parameters": list_parameters(run.recipe)}


Key = tuple[Division, str, str]
# Clipping is by the norm, which is compared in both.
QUICK: list[Key] = [(Division(2, 4, 1), "fp64", "sgd"), (Division(1, 2, 4), "fp64", "clipped")]
CASES: list[Key] = [*QUICK, (Division(2, 2, 2, replicate=2), "fp32", "sgd"),
                    (Division(4, 1, 2, replicate=2), "fp64", "clipped")]  # fmt: skip


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Key, dict[str, Any]]:
    """Every selected case and the undivided runs; as many processes as the division has ranks, once
    a world size.
    """
    folder = tmp_path_factory.mktemp("equality")
    cases = select_cases(request, "case")
    kinds = dict.fromkeys([("fp64", "sgd"), ("fp64", "clipped"), *(case[1:] for case in cases)])
    keys: list[Key] = [*((WHOLE, *kind) for kind in kinds), *cases]

    def train_all(keys: list[Key]) -> list[dict[str, Any]]:
        return [train(folder, *key) for key in keys]

    found = {}
    for ranks in sorted({division.ranks for division, _, _ in keys}):
        mine = [key for key in keys if key[0].ranks == ranks]
        found |= dict(zip(mine, run_ranks(train_all, ranks, mine)[0], strict=True))
    return found


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference in losses and norms, and in parameters relative to the
    largest one.
    """
    numbers = [
        abs(a - b) / abs(b)
        for mine, other in zip(found["steps"], expected["steps"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    tensors = [
        ((found["parameters"][name] - tensor).abs().max() / tensor.abs().max()).item()
        for name, tensor in expected["parameters"].items()
    ]
    return max(*numbers, *tensors)


@pytest.mark.parametrize(
    "case", mark_slow_except(CASES, QUICK), ids=lambda case: ", ".join(map(str, case))
)
def test_a_step_is_the_same(results: dict[Key, dict[str, Any]], case: Key):
    found = results[case]
    expected = results[WHOLE, *case[1:]]
    dtype = case[1]
    assert found["parameters"].keys() == expected["parameters"].keys()
    assert all(
        tensor.dtype == getattr(torch, f"float{dtype[2:]}")
        for tensor in found["parameters"].values()
    )
    assert difference(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_change_the_model(results: dict[Key, dict[str, Any]], optimizer: str):
    found = results[WHOLE, "fp64", optimizer]
    assert len({loss for _, loss, _ in found["steps"]}) == STEPS
    norms = [norm for _, _, norm in found["steps"]]
    assert all(norm > 0.5 for norm in norms), norms  # so that clipping to 0.5 acts
    other = results[WHOLE, "fp64", next(name for name in OPTIMIZERS if name != optimizer)]
    assert difference(found, other) > 1e-3


def mean_of_own_tokens(recipe: Any) -> None:
    """The usual mistake: each rank divides by its own tokens, and the ranks' means are averaged."""
    honest = recipe.train_step

    def train_step(batches: Any) -> Any:
        own = sum(int((batch.labels >= 0).sum()) for batch in batches.micro_batches)
        return honest(replace(batches, num_label_tokens=own * recipe.world.data_ranks))

    recipe.train_step = train_step


def mean_of_micro_batches(recipe: Any) -> None:
    """The other usual mistake: the mean of the micro-batches' means."""
    honest = recipe.compute_loss

    def compute_loss(batch: Any) -> Any:
        step_tokens = recipe.data.dataset.trained_counts[:ROWS].sum()
        parts = recipe.cfg.gradient_accumulation_steps * recipe.world.data_ranks
        return honest(batch) * step_tokens / max(1, int((batch.labels >= 0).sum())) / parts

    recipe.compute_loss = compute_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "mistake"),
    [(Division(2, 4, 1), mean_of_own_tokens), (Division(1, 1, 8), mean_of_micro_batches)],
    ids=["ranks", "micro-batches"],
)
def test_a_wrong_normalization_would_show(
    results: dict[Key, dict[str, Any]],
    tmp_path: Path,
    division: Division,
    mistake: Callable[[Any], None],
):
    found = run_ranks(train, division.ranks, tmp_path, division, "fp64", "sgd", mistake)[0]
    expected = results[WHOLE, "fp64", "sgd"]
    first, honest = found["steps"][0], expected["steps"][0]
    assert (
        abs(first[1] - honest[1]) > 1e-4 * honest[1]
    )  # all losses of an untrained model are close to log(512)
    assert abs(first[2] - honest[2]) > 1e-2 * honest[2]
    assert difference(found, expected) > 1e-2

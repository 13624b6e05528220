"""The search among pipelines: what it tries, what it finds where ranks cannot reach each other, how
it estimates.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.plan.apart import build_settings, call_in_fork
from tests.plan.configs import build_wide_model, load

ROWS = 16  # of a step on four ranks
STEP = ("batch_size=1", f"gradient_accumulation_steps={ROWS // 4}", "parallel.strategy=fsdp")
FIXED = ("memory.cpu_offload", "lora.quantize_base", "parallel.reshard_after_forward",
         "memory.activation_checkpointing", "parallel.data_replicate", "parallel.pipeline_schedule",
         "parallel.reduce_gradients", "parallel.strategy")  # fmt: skip


def searched(folder: Path) -> dict[str, Any]:
    """What is found for four cards on which the model does not fit whole, what is typed for it; and
    an estimate.
    """
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.plan_schema import OutsideTorch
    from recipe_lib.plan.search.fastest_settings import search
    from recipe_lib.plan.search.trials import estimate_run, format_overrides

    recipe_class, cfg, plain = build_settings(
        "llama3/8B_lora", 4, *build_wide_model(folder, *STEP), device="rtx4090"
    )
    hardware = dataclasses.replace(plain.hardware, memory=int(1.6 * 2**30))
    wanted = dataclasses.replace(plain, hardware=hardware, outside=OutsideTorch(0, 0))
    result = search(recipe_class, cfg, wanted, want=1, fixed=FIXED)
    once = (
        "parallel.reduce_gradients=step",
        "parallel.reshard_after_forward=false",
        "parallel.pipeline=2",
    )
    recipe_class, cfg, plain = build_settings(
        "llama3/8B_full",
        4,
        *build_wide_model(folder, *once, "gradient_accumulation_steps=5"),
        device="rtx4090",
    )
    whole, zero_1 = make_plan(recipe_class, cfg, plain)[0], estimate_run(recipe_class, cfg, plain)
    assert whole.time is not None
    return {
        "zero-1": (zero_1.active / whole.heaviest.peak.active, zero_1.seconds / whole.time.step),
        "changes": [one.changes for one in result.fitting],
        "typed": [format_overrides(one.changes) for one in result.fitting],
        "global_batch_size": result.global_batch_size,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return call_in_fork(searched, tmp_path_factory.mktemp("wide"))


@pytest.mark.slow
def test_a_pipeline_wins_where_gathering_is_slow(found: dict[str, Any], tmp_path: Path):
    """It is a run that `tune run` takes, with as many rows a step."""
    (changes,), (text,) = found["changes"], found["typed"]
    assert changes["parallel.pipeline"] in (2, 4)
    assert found["global_batch_size"] == ROWS
    cfg = load("llama3/8B_lora", *build_wide_model(tmp_path, *STEP), *text.split())
    different = 4 // cfg.parallel.pipeline
    assert cfg.batch_size * cfg.gradient_accumulation_steps * different == ROWS


@pytest.mark.slow
def test_the_estimate_of_a_pipeline(found: dict[str, Any]):
    assert found["zero-1"][0] == pytest.approx(1, abs=0.005)
    assert found["zero-1"][1] == pytest.approx(1, abs=0.02)


def tried(
    ranks: int, device: str, *overrides: str, fixed: tuple[str, ...] = (), **more: bool
) -> list[dict[str, Any]]:
    """The pipelines that are looked at, each checked to keep the rows of a step with every size of
    micro-batch.
    """
    from recipe_lib.config.mesh import compute_mesh_shape
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.hardware import find_hardware
    from recipe_lib.plan.search.trial_order import (
        count_sequences,
        list_micro_batch_sizes,
        list_pipelines,
        set_micro_batch,
    )
    from recipe_lib.plan.search.trials import apply_changes, count_data_ranks
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence

    cfg = load("demo/full", "device=auto", *overrides)
    wanted = PlanSettings(
        hardware=find_hardware(device), sequence=PlannedSequence(8, ""), ranks=ranks
    )
    every = list(list_pipelines(cfg, wanted, fixed, **more))
    for changes in every:
        for size in list_micro_batch_sizes(cfg, changes):
            other = apply_changes(cfg, changes | set_micro_batch(cfg, changes, size))
            assert other is not None
            assert count_sequences(other) * count_data_ranks(other, ranks) == count_sequences(
                cfg
            ) * count_data_ranks(cfg, ranks)
            assert other.gradient_accumulation_steps >= other.parallel.pipeline
            assert (
                compute_mesh_shape(other.parallel, ranks)["pipeline"]
                == changes["parallel.pipeline"]
            )
    return every


def test_which_pipelines_are_tried():
    """The demo has four layers: ZBV, with two stages on a rank, can be at most two ranks long."""
    key, schedule, copies = (
        "parallel.pipeline",
        "parallel.pipeline_schedule",
        "parallel.data_replicate",
    )
    reduce, reshard = "parallel.reduce_gradients", "parallel.reshard_after_forward"
    found = tried(4, "rtx4090")
    assert [(one[key], one[schedule], one[copies], one.get(reduce)) for one in found] == [
        (2, "1f1b", 1, None),
        (2, "1f1b", 1, "step"),
        (2, "1f1b", 2, None),
        (2, "1f1b", 2, "step"),
        (2, "zbv", 1, None),
        (2, "zbv", 1, "step"),
        (2, "zbv", 2, None),
        (2, "zbv", 2, "step"),
        (4, "1f1b", 1, None),
    ]
    assert all(one.get(reshard) is (False if reduce in one else None) for one in found)
    assert not any(reduce in one for one in tried(4, "rtx4090", fixed=(reshard,)))
    assert {one[schedule] for one in tried(4, "rtx4090", splits=False)} == {"1f1b"}
    assert {one[copies] for one in tried(4, "rtx4090", fixed=(copies,))} == {1}
    for strategy in ("ddp", "auto"):  # stages are copied and divided by FSDP
        other = tried(4, "rtx4090", f"parallel.strategy={strategy}")
        assert other == [one | {"parallel.strategy": "fsdp"} for one in found]
    begun = tried(
        4,
        "rtx4090",
        "parallel.pipeline=4",
        "gradient_accumulation_steps=8",
        "parallel.pipeline_microbatches=8",
    )
    assert {one[key] for one in begun} == {2, 4}
    assert all(one["parallel.pipeline_microbatches"] is None for one in begun)


@pytest.mark.parametrize(
    ("ranks", "device", "fixed"),
    [
        (4, "h100", ()),
        (1, "rtx4090", ()),
        (4, "rtx4090", ("parallel.pipeline",)),
        (4, "rtx4090", ("batch_size",)),
    ],
)
def test_where_no_pipeline_is_tried(ranks: int, device: str, fixed: tuple[str, ...]):
    assert tried(ranks, device, fixed=fixed) == []

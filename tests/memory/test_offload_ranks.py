"""Activation offload where layers are shared out: losses and norms of the same ranks without it,
bit for bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.memory import activation_offload
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import FULL, LORA, build_arguments, expect_done, read_steps, run_here
from tests.selection import mark_slow_but

CASES: dict[str, tuple[str, ...]] = {
    "fsdp": (FULL, "gradient_accumulation_steps=2"),
    "tensor, inputs alone": (FULL, "parallel.tensor=2", "memory.activation_checkpointing=full"),
    "pipeline, two stages a rank, deferred weight gradients": (
        FULL, "parallel.pipeline=2", "parallel.pipeline_schedule=zbv", "gradient_accumulation_steps=4", "batch_size=1",
    ),
    "adapters, packed rows, kept gathered": (
        LORA, "~model.path", "tokenizer.path=examples/demo/tokenizer", "batch_size=1",
        "parallel.reshard_after_forward=false", "memory.activation_offload_prefetch_layers=2",
    ),
}  # fmt: skip


def losses_of_each(folder: Path) -> dict[str, Any]:
    """By case the steps without and with it; and how many bytes it sent in the last forward of each
    layer.
    """
    activation_offload.has_host = lambda device: True  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for number, (name, (recipe, *overrides)) in enumerate(CASES.items()):
        windows: list[Any] = []
        make = activation_offload.OffloadedActivations

        def made(*args: Any, make: Any = make, windows: list[Any] = windows) -> Any:
            windows.append(make(*args))
            return windows[-1]

        activation_offload.OffloadedActivations = made  # type: ignore[misc, assignment]
        for lever in ("false", "true"):
            output = folder / f"{number}{lever}"
            argv = build_arguments(output, "demo/lora" if recipe == LORA else "demo/full")
            argv += [
                f"model.preset={folder / 'model.json'}",
                "device=auto",
                "max_steps=2",
                "checkpoint.save_model=false",
            ]
            argv += [*overrides, f"memory.activation_offload={lever}"]
            argv += [] if lever == "true" else ["~memory.activation_offload_prefetch_layers"]
            expect_done(run_here(argv, recipe=recipe))
            found[f"{name} {lever}"] = read_steps(output)
        activation_offload.OffloadedActivations = make  # type: ignore[misc]
        found[f"{name} sent"] = [sum(window.host_bytes.values()) for window in windows]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("offload")
    tiny = json.loads((Path(__file__).parent.parent / "recipes" / "tiny.json").read_text())
    (folder / "model.json").write_text(json.dumps(tiny | {"num_hidden_layers": 4}))
    return run_ranks(losses_of_each, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow_but(CASES, 1))
def test_losses_are_those_of_the_same_ranks_without_it(
    name: str, results: list[dict[str, Any]]
) -> None:
    found = results[0]
    assert len(found[f"{name} true"]) == 2
    assert found[f"{name} true"] == found[f"{name} false"]
    for rank in results:
        (sent,) = rank[f"{name} sent"]
        assert sent > 0

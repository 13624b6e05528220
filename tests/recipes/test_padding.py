"""Padding enters no number of a run: its batches are padded further, and whatever is recorded
stays, and each gradient.

The balance loss of routers is compared with transformers', which takes a mask of what is padding.
"""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.recipes.padded_runs import (
    ACCUMULATED,
    BALANCED,
    INT8,
    LONG_ROPE,
    Case,
    train_padded,
    write_presets,
)
from tests.selection import mark_slow_except, select_cases

EXTERNAL = "model.implementation=transformers"
RECOMPUTE = "memory.activation_checkpointing=full"
CASES = [
    Case("messages", "qwen3_moe", 1, (BALANCED,)),
    Case("messages", "tiny", 1, (INT8, "dtype=fp32")),
    Case("messages", "tiny", 1, ("memory.mlp_tiles=3", "memory.loss_chunks=3")),
    Case("messages", "mixtral", 1, (EXTERNAL, "dtype=fp32")),
    Case("messages", "qwen3_moe", 2, (BALANCED, "parallel.context=2")),
    Case("packed", LONG_ROPE),
    Case("packed", "gpt_oss", 1, (BALANCED, RECOMPUTE)),
    Case("lora", "qwen3_moe", 1, ("lora.target_modules=[q, router, experts]", BALANCED)),
    Case("packed dpo"),
    Case("dpo", "tiny", 2, ("parallel.pipeline=2", ACCUMULATED)),
    Case("ipo"),
    Case("kto"),
    Case("reward", "tiny", 2, ("parallel.tensor=2",)),
    Case("classes"),
    Case("distillation"),
]
QUICK = CASES[:1]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Any]:
    """Of every selected case what both runs recorded, and how the parameters moved."""
    folder = tmp_path_factory.mktemp("padding")
    write_presets(folder)
    cases = select_cases(request, "case")
    found: dict[Case, Any] = {}
    for ranks in (1, 2):
        mine = [case for case in cases if case.ranks == ranks]
        if mine:
            found |= dict(
                zip(mine, run_ranks(train_padded, ranks, folder, mine, timeout=500)[0], strict=True)
            )
    return found


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK), ids=str)
def test_more_padding_changes_no_number(results: dict[Case, Any], case: Case) -> None:
    (lines, moved), *others = results[case]
    bound = 5e-6 if "dtype=fp32" in case.words else 1e-11
    assert lines
    for other_lines, other_moved in others:
        for mine, wanted in zip(other_lines, lines, strict=True):
            assert mine == pytest.approx(wanted, rel=bound, abs=0.01 * bound)
        assert other_moved.keys() == moved.keys()
        for name, change in moved.items():
            torch.testing.assert_close(
                other_moved[name], change, rtol=0, atol=0.02 * bound, msg=name
            )

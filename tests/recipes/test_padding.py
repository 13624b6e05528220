"""Padding enters no number of a run: its batches are padded further, and whatever is recorded stays, and each gradient.

The balance loss of routers is compared with transformers', which takes a mask of what is padding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.data import Batch, StepBatches, batches
from tests.distributed.ranks import run_ranks
from tests.recipes.padded_runs import ACCUMULATED, BALANCED, INT8, KINDS, LONG_ROPE, Case, train_padded, write_presets
from tests.selection import selected, slow_except

EXTERNAL = "model.implementation=transformers"
RECOMPUTE = "memory.activation_checkpointing=full"
CASES = [
    Case("messages", "qwen3_moe", 1, (BALANCED,)),
    Case("kto"),
    Case("messages", "tiny", 1, (INT8, "dtype=fp32")),
    *(Case(kind) for kind in KINDS if kind != "kto"),
    Case("packed", "gpt_oss", 1, (BALANCED, RECOMPUTE)),
    Case("packed", LONG_ROPE),
    Case("messages", "tiny", 1, ("memory.mlp_tiles=3", "memory.loss_chunks=3")),
    Case("lora", "qwen3_moe", 1, ("lora.target_modules=[q, router, experts]", BALANCED)),
    Case("messages", "mixtral", 1, (EXTERNAL, "dtype=fp32")),
    Case("messages", "qwen3_moe", 2, (BALANCED, "parallel.tensor=2")),
    Case("messages", "qwen3_moe", 2, (BALANCED, "parallel.context=2")),
    Case("reward", "tiny", 2, ("parallel.tensor=2",)),
    Case("dpo", "tiny", 2, ("parallel.pipeline=2", ACCUMULATED)),
]
QUICK = CASES[:1]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    """Of every selected case what both runs recorded, and how the parameters moved."""
    folder = tmp_path_factory.mktemp("padding")
    write_presets(folder)
    cases = selected(request, "case")
    found: dict[Case, Any] = {}
    for ranks in (1, 2, 4):
        mine = [case for case in cases if case.ranks == ranks]
        if mine:
            found |= dict(zip(mine, run_ranks(train_padded, ranks, folder, mine, timeout=500)[0], strict=True))
    return found


@pytest.mark.parametrize("case", slow_except(CASES, QUICK), ids=str)
def test_more_padding_changes_no_number(results: dict[Case, Any], case: Case) -> None:
    check_same(case, results[case])


def check_same(case: Case, found: list[Any]) -> None:
    (lines, moved), *others = found
    bound = 5e-6 if "dtype=fp32" in case.words else 1e-11
    assert lines
    for other_lines, other_moved in others:
        for mine, wanted in zip(other_lines, lines, strict=True):
            assert mine == pytest.approx(wanted, rel=bound, abs=0.01 * bound)
        assert other_moved.keys() == moved.keys()
        for name, change in moved.items():
            torch.testing.assert_close(other_moved[name], change, rtol=0, atol=0.02 * bound, msg=name)


def label_padding(original: Any) -> Any:
    """A micro-batch whose padding has labels, and is of the first of the sequences that are told apart."""

    def fill(slots: Any, rows: Any, width: int) -> Batch:
        batch = original(slots, rows, width)
        for row, (first, last) in enumerate(batch.attention.real.spans):
            batch.labels[row, last - first :] = 2
        return batch if batch.segments is None else replace(batch, segments=batch.segments.clamp(min=0))

    return fill


def count_padding(original: Any) -> Any:
    """A step that counts padding among its tokens."""

    def fill(slots: Any, own: Any) -> StepBatches:
        step = original(slots, own)
        return replace(step, total_tokens=step.padded_tokens)

    return fill


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["_filled", "batches"])
def test_padding_that_is_counted_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each kind of batch of a model without experts, of which all numbers are right."""
    plant = label_padding if fault == "_filled" else count_padding
    monkeypatch.setattr(batches._StepSlots, fault, plant(getattr(batches._StepSlots, fault)))
    write_presets(tmp_path)
    cases = [Case(kind) for kind in KINDS]
    for case, found in zip(cases, run_ranks(train_padded, 1, tmp_path, cases, timeout=500)[0], strict=True):
        with pytest.raises(AssertionError):
            check_same(case, found)

"""Ranks whose settings differ, as on machines with a config each, end before they wait for each
other.
"""

import os
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.recipes.runs import build_arguments, run_here


def train(folder: Path, strategies: list[str]) -> tuple[int, list[str]]:
    rank = int(os.environ["RANK"])
    own = [
        f"parallel.strategy={strategies[rank]}",
        f"seed={rank}",
        "log.trackers=[]",
        "max_steps=1",
    ]
    run = run_here(
        [
            *build_arguments(folder / f"of rank {rank}"),
            *own,
            f"data.cache_dir={folder / f'cache{rank}'}",
        ]
    )
    return run.code, run.said


@pytest.mark.slow
def test_settings_that_differ_are_named_and_paths_may(tmp_path: Path) -> None:
    found = run_ranks(train, 2, tmp_path, ["fsdp", "ddp"], process_group=False, timeout=60)
    remedy = (
        "expected the same on all ranks; start every machine with the same config and overrides"
    )
    assert [code for code, _ in found] == [2, 2]
    # Either rank says it; the launcher, which is not here, sees to it that a user reads it once.
    assert {line for _, said in found for line in said if line.startswith("error: ")} == {
        f"error: parallel.strategy: found fsdp on rank 0 and ddp on rank 1, {remedy}",
        f"error: seed: found 0 on rank 0 and 1 on rank 1, {remedy}",
    }


def train_in_own_folder(folder: Path) -> tuple[int, list[str]]:
    rank = int(os.environ["RANK"])
    own = [f"data.cache_dir={folder / f'cache{rank}'}", "data.format=auto", "max_steps=1"]
    run = run_here([*build_arguments(folder / f"of rank {rank}"), *own])
    return run.code, run.said


@pytest.mark.slow
def test_what_one_rank_alone_finds_wrong_is_what_is_said(tmp_path: Path) -> None:
    """And not that the others have found the format of their data by then."""
    (tmp_path / "of rank 1").touch()
    found = run_ranks(train_in_own_folder, 2, tmp_path, process_group=False, timeout=60)
    assert [code for code, _ in found] == [2, 2]
    errors = [line for _, said in found for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and "of rank 1" in errors[0] and "output_dir" in errors[0], errors

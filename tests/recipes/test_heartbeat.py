"""A rank that is stopped, hangs, is killed or refuses alone ends all ranks of a run, however the
work is divided.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import DataError, StorageError, end_process, run_for_exit_code
from recipe_lib.parallel import heartbeat
from recipe_lib.parallel.world import meet_ranks
from tests.distributed import ranks as ranks_of_tests
from tests.distributed.ranks import RankFailure, run_ranks
from tests.recipes.runs import (
    FULL,
    build_arguments,
    get_recipe_class,
    import_recipe_module,
    run_here,
)
from tests.selection import mark_slow_except

Trouble = Callable[[], None]
TIMEOUT = 2  # seconds, of the key
DIVISIONS = {
    "fsdp": ["parallel.strategy=fsdp"],
    "ddp": ["parallel.strategy=ddp"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "gradient_accumulation_steps=2", "batch_size=2"],
}
KEY = f"set parallel.heartbeat_timeout_seconds={TIMEOUT} higher if the run is only slow"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks, which have these too."""
    import_recipe_module(FULL)
    for name, seconds in {
        "BEAT_SECONDS": 0.1,
        "PEER_LOST_SECONDS": 1.5,
        "FAILURE_GRACE_SECONDS": 1.0,
        "REPORT_SECONDS": 0.3,
    }.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    monkeypatch.setattr(
        ranks_of_tests, "_GRACE_SECONDS", 15.0
    )  # each ends by itself, on a busy machine a little later


def run(folder: Path, trouble: Trouble, where: str, on: int, *overrides: str) -> int:
    """A run of three steps; rank `on` has trouble in a method of the recipe: in `train_step` in the
    second step.
    """
    calls = [0]
    original = get_recipe_class(import_recipe_module(FULL))
    method = getattr(original, where)

    def troubled(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if int(os.environ["RANK"]) == on and calls[0] == (2 if where == "train_step" else 1):
            trouble()
        return method(self, *args)

    setattr(original, where, troubled)
    found = run_here([*build_arguments(folder / "run"), "max_steps=3", f"parallel.heartbeat_timeout_seconds={TIMEOUT}",
                      *overrides])  # fmt: skip
    for line in found.said if found.code else []:
        print(line, flush=True)
    if found.code:
        os._exit(found.code)
    return found.code


def ended(
    folder: Path,
    trouble: Trouble,
    *overrides: str,
    where: str = "train_step",
    on: int = 1,
    ranks: int = 2,
) -> list[str]:
    """How each rank ended and, on the lines after it, what it printed."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(run, ranks, folder, trouble, where, on, *overrides, timeout=60)
    assert "time ran out" not in str(caught.value), str(caught.value)
    return [text[3:] for text in str(caught.value).split("--- rank ")[1:]]


def errors_of(found: list[str]) -> list[str]:
    """The lines that begin so, of all ranks together; those that a run gives to whoever started it
    too.
    """
    return [line for text in found for line in text.splitlines() if line.startswith("error: ")]


def stop() -> None:
    """As a debugger, or Ctrl-Z, does it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    """As the kernel does it without memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def loop() -> None:
    """An endless loop in Python, or so long that it is none of a test's business."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pass


def wait() -> None:
    """A call that does not return."""
    time.sleep(60)


def refuse() -> None:
    """What only one rank finds wrong."""
    raise DataError("rows.jsonl:7: found nothing")


@pytest.mark.slow
@pytest.mark.parametrize("division", ["ddp", "pipeline"])
def test_a_stopped_rank_is_named(
    tmp_path: Path, division: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_TIMEOUTS", 2.0)
    monkeypatch.setattr(ranks_of_tests, "_GRACE_SECONDS", 1.0)  # the one that is stopped does not
    began = time.monotonic()
    found = ended(tmp_path, stop, *DIVISIONS[division])
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    (line,) = errors_of(found)
    assert re.match(r"error: rank 1 is stopped or unreachable for \d+ s; rank 0", line), line
    assert line.endswith(KEY)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("division", "trouble"),
    [("fsdp", wait), pytest.param("tensor", loop, marks=pytest.mark.slow)],
    ids=["fsdp-a call", "tensor-an endless loop"],
)
def test_a_rank_that_hangs_is_named_with_its_place(
    tmp_path: Path, division: str, trouble: Trouble
) -> None:
    """Its heartbeat goes on: the others have entered a collective that it has not."""
    found = ended(tmp_path, trouble, *DIVISIONS[division])
    assert found[0].startswith("exit code 7") and found[1].startswith("exit code 7")
    (line,) = errors_of(found)
    assert re.match(r"error: rank 1 has made no progress for \d+ s in step 2, at ", line), line
    assert "recipes/test_heartbeat.py:" in line and line.endswith(KEY)


@pytest.mark.slow
def test_of_four_ranks_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    """Two of the others do not wait for it, but for the one that does."""
    found = ended(tmp_path, wait, "parallel.tensor=2", "batch_size=2", on=2, ranks=4)
    assert all(text.startswith("exit code 7") for text in found)
    (line,) = errors_of(found)
    assert line.startswith("error: rank 2 has made no progress for "), line


def test_a_killed_rank_is_named_without_tracebacks(tmp_path: Path) -> None:
    found = ended(tmp_path, kill)
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    (line,) = errors_of(found)
    assert (
        line.startswith("error: rank 1 is gone, killed or crashed; rank 0 waits for ")
        and "in step 2, at" in line
    )


@pytest.mark.parametrize(
    "where",
    mark_slow_except(
        ["__init__", "setup_model", "resume", "train_step"], ["setup_model", "train_step"]
    ),
)
def test_what_one_rank_refuses_alone_ends_all_in_its_line(tmp_path: Path, where: str) -> None:
    """Rank 0, whose line it is not, waits in a collective or comes to one."""
    found = ended(tmp_path, refuse, where=where)
    assert [text.splitlines()[0] for text in found] == ["exit code 2", "exit code 2"]
    assert errors_of(found) == ["error: rows.jsonl:7: found nothing"]
    assert "Traceback" not in "".join(found)


def test_a_defect_of_one_rank_has_one_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug of ours")

    found = ended(tmp_path, fail)
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    assert errors_of(found) == ["error: rank 1 failed in step 2: ZeroDivisionError: a bug of ours"]
    assert found[1].count("ZeroDivisionError: a bug of ours") == 1


@pytest.mark.parametrize(
    ("error", "seconds", "ends", "told"),
    [
        (StorageError("disk full"), 1.0, ["exit code 6", "exit code 6"], "disk full"),
        (
            torch.OutOfMemoryError("CUDA out"),
            0.0,
            ["Traceback (most recent call last):", "exit code 5"],
            "rank 0 failed in starting: OutOfMemoryError: CUDA out",
        ),
    ],
    ids=["after the other one left", "out of memory"],
)
def test_what_fails_on_one_machine_is_told_on_the_other(
    error: Exception, seconds: float, ends: list[str], told: str
) -> None:
    """With the exit code, although the rank there has nothing left to do."""

    def main() -> None:
        with meet_ranks(FullFinetuneConfig(device="cpu")) as ranks:
            if ranks.rank == 0:
                time.sleep(seconds)
                raise error

    def end() -> None:
        os.environ["GROUP_RANK"] = os.environ["RANK"]
        end_process(run_for_exit_code(main))

    with pytest.raises(RankFailure) as caught:
        run_ranks(end, 2, timeout=60)
    found = [text[3:].splitlines() for text in str(caught.value).split("--- rank ")[1:]]
    assert [lines[0] for lines in found] == ends
    assert [line for line in found[1] if line.startswith("error: ")] == [f"error: {told}"]


def test_out_of_memory_of_one_rank_while_loading(tmp_path: Path) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = ended(tmp_path, fail, where="load_weights")
    assert [text.splitlines()[0] for text in found] == ["exit code 5", "exit code 5"]
    (line,) = errors_of(found)
    assert line.startswith("error: setting up the model: out of memory on cpu with ")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["validate"])
def test_what_may_take_long_is_waited_for(tmp_path: Path, where: str) -> None:
    overrides = ["validation.source=examples/demo/heldout.jsonl", "validation.max_samples=4"]
    assert run_ranks(
        run, 2, tmp_path, lambda: time.sleep(2.5 * TIMEOUT), where, 0, *overrides, timeout=60
    ) == [0, 0]
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_process_that_was_stopped_itself_blames_nobody(tmp_path: Path) -> None:
    """Both ranks, as by Ctrl-Z, for longer than the timeout; which of them goes on first does not
    matter.
    """

    def pause() -> None:
        mine = os.getpid()
        if os.fork() == 0:
            time.sleep(2 * TIMEOUT)
            os.kill(mine, signal.SIGCONT)
            os._exit(0)
        stop()

    def both(folder: Path) -> int:
        return run(folder, pause, "train_step", int(os.environ["RANK"]))

    assert run_ranks(both, 2, tmp_path, timeout=60) == [0, 0]

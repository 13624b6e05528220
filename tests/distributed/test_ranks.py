"""The helper itself: results in order, failures shown, nothing left hanging."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankFailure, run_ranks


def test_results_come_back_in_rank_order() -> None:
    def work(offset: int) -> dict[str, object]:
        total = torch.tensor([float(dist.get_rank() + offset)])
        dist.all_reduce(total)
        return {"rank": int(os.environ["RANK"]), "total": total}

    results = run_ranks(work, 2, 10)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(result["total"].item() == 21 for result in results)


def test_a_failing_rank_shows_its_traceback_and_ends_the_others() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("rank one has had enough")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank one has had enough"):
        run_ranks(work, 2)
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_at_the_timeout_and_shows_its_stack() -> None:
    def sleep_long() -> None:
        if dist.get_rank() == 0:
            time.sleep(60)

    with pytest.raises(RankFailure, match="rank 0: still running when time ran out") as caught:
        run_ranks(sleep_long, 2, timeout=2)
    assert "in sleep_long" in str(caught.value)


def test_backward_runs_in_a_fork_of_a_process_that_ran_backward() -> None:
    def work() -> torch.Tensor:
        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad

    expected = work()
    assert torch.equal(run_ranks(work, 1)[0], expected)


def test_a_crash_is_a_failure_that_shows_its_stack() -> None:
    def crash() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailure, match="rank 1: exit code -11\n.*Segmentation fault") as caught:
        run_ranks(crash, 2, process_group=False)
    assert "in crash" in str(caught.value)


@pytest.mark.slow
def test_ranks_have_no_group_of_the_test_process() -> None:
    """That a circle of objects of an earlier run still holds; a fork that takes it down crashes or
    hangs.
    """

    class Run:
        """What a run leaves."""

    def collect() -> int:
        gc.unfreeze()
        gc.collect()
        threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return int(os.environ["RANK"])

    gc.disable()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(
            torch.ones(1)
        )  # a thread of the group has begun, by whose name the group is seen
        run = Run()
        run.group, run.itself = dist.group.WORLD, run
        dist.destroy_process_group()
        del run
        assert run_ranks(collect, 1, process_group=False, timeout=20) == [0]
    finally:
        gc.enable()


@pytest.mark.slow
def test_torch_does_what_is_reported_of_groups_in_forks() -> None:
    """Which of the three a fork ends by is not the same in each run."""
    folder = Path(__file__).parents[2] / "docs" / "upstream"
    command = [sys.executable, str(folder / "gloo_group_in_fork.py"), "1"]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True
    ).stdout.splitlines()
    pattern = r"(keeps|drops) it .*before: (.*)"
    ends = [re.match(pattern, line).groups() for line in printed[1:]]  # type: ignore[union-attr]
    assert [what for what, _ in ends] == ["keeps"] * 2 + ["drops"] * 6
    assert all((how == "1 ends") if what == "keeps" else "ends" not in how for what, how in ends), (
        printed
    )

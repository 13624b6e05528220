"""The helper itself: results in order, failures shown, nothing left hanging."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankCrashWarning, RankFailure, run_ranks


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


def test_a_crash_is_reported_and_its_ranks_run_once_more(tmp_path: Path) -> None:
    def crash(once: bool) -> int:
        if os.environ["RANK"] == "1" and not (once and (tmp_path / "crashed").exists()):
            (tmp_path / "crashed").touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return int(os.environ["RANK"])

    with pytest.warns(RankCrashWarning, match="exit code -11"):
        assert run_ranks(crash, 2, True, process_group=False) == [0, 1]
    with pytest.warns(RankCrashWarning), pytest.raises(RankFailure, match="exit code -11"):
        run_ranks(crash, 2, False, process_group=False)

"""A rank that is stopped, in whatever phase of a run or an evaluation, is told by the others as
soon as in a step.
"""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.parallel import heartbeat
from recipe_lib.parallel.heartbeat import find_stopped_ranks
from recipe_lib.parallel.world import meet_ranks
from tests.distributed.launched import ROOT, START, Ended, Ranks, start_ranks
from tests.recipes.runs import build_arguments, keep_latest

TIMEOUT = 2  # seconds, of the key
KEY = f"parallel.heartbeat_timeout_seconds={TIMEOUT}"
CONNECTING = "connecting to the store"
# What a rank comes to, in this order; `test_these_are_all_phases` holds that no other one is there.
TRAINING = [
    START, CONNECTING, "reading the data", "meeting the other ranks", "setting up", "reading data",
    "setting up the model", "loading weights", "setting up the optimizer", "resuming", "starting to train",
    "step 1", "recording step 1", "validation after step 1", "keeping the best step 1", "end of step 1",
    "saving step 1", "step 2", "recording step 2", "validation after step 2",
    "keeping the best step 2", "end of step 2", "saving step 2", "loading the best step", "exporting",
    "waiting for the others to end",
]  # fmt: skip
# Those in which a rank is stopped: before it has met the others, in the middle of collectives, and
# at the end.
STOPPED = [START, "recording step 1", TRAINING[-1]]
EVALUATION = [
    START, CONNECTING, "reading the data", "meeting the other ranks", "loading weights", "likelihoods (tuned)",
    "answers (tuned)", "likelihoods (base)", "answers (base)", "waiting for the others to end",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks that have imported what they need."""
    with start_ranks() as started:
        yield started


def train(
    ranks: Ranks, folder: Path, stopped: int | None = None, at: str = "", *overrides: str
) -> Ended:
    """Train two steps, with a validation and a state after each."""
    words = keep_latest(
        *build_arguments(folder / "run"), "validation.source=examples/demo/heldout.jsonl", "validation.every_n_steps=1",
        "checkpoint.save_every_n_steps=1", "checkpoint.keep_best=true", "max_steps=2", "data.max_samples=16", KEY,
        *overrides,
    )  # fmt: skip
    words.remove("~validation")
    return ranks.run(
        folder / "launch", ROOT / "recipes" / "full_finetune_distributed.py", words, stopped, at
    )


def evaluate(
    ranks: Ranks, folder: Path, model: Path, stopped: int | None = None, at: str = ""
) -> Ended:
    """Measure a model, with answers."""
    words = [str(model), "--data", "examples/demo/heldout.jsonl", "--max-samples", "4", "--max-new-tokens", "2",
             "device=cpu", KEY]  # fmt: skip
    return ranks.run(folder / "launch", ROOT / "recipe_lib" / "cli" / "eval.py", words, stopped, at)


@pytest.fixture(scope="module")
def model(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves in which nobody is stopped; its phases are in `phases` beside it."""
    folder = tmp_path_factory.mktemp("trained")
    ended = train(ranks, folder)
    assert ended.codes == [0, 0], ended.said
    (folder / "run" / "phases").write_text("\n".join(ended.phases))
    return folder / "run" / "model"


def check_is_told(ended: Ended, stopped: int) -> None:
    """One line names the rank within less than two timeouts, and the other one ends with exit code
    7.
    """
    codes = [7, -signal.SIGKILL]
    assert ended.codes == (codes if stopped == 1 else codes[::-1]), ended.said
    assert "Traceback" not in ended.said
    lines = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, ended.said
    matched = re.match(
        rf"error: rank {stopped} is stopped for (\d+) s; rank {1 - stopped} waits for (\d+) s in"
        r" \S.*; "
        rf"set {KEY} higher if the run is only slow$",
        lines[0],
    )
    assert matched, lines
    assert all(TIMEOUT <= int(seconds) < 2.5 * TIMEOUT for seconds in matched.groups()), lines


@pytest.mark.slow
@pytest.mark.parametrize("at", STOPPED)
def test_a_rank_that_is_stopped_in_training_is_told(at: str, ranks: Ranks, tmp_path: Path) -> None:
    check_is_told(train(ranks, tmp_path, 1, at), 1)


@pytest.mark.slow
def test_so_is_the_first_rank(ranks: Ranks, tmp_path: Path) -> None:
    check_is_told(train(ranks, tmp_path, 0, CONNECTING), 0)


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_an_evaluation_is_told(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    check_is_told(evaluate(ranks, tmp_path, model, 1, "answers (tuned)"), 1)


@pytest.mark.slow
def test_these_are_all_phases(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    assert (model.parent / "phases").read_text().splitlines() == TRAINING
    ended = evaluate(ranks, tmp_path, model)
    assert (ended.codes, ended.phases) == ([0, 0], EVALUATION), ended.said


# Where ranks meet: whether torchrun has it, and after how many timeouts its silence is told
STORES = {
    "stopped": (True, 1),  # it takes connections and says nothing
    "rank 0's, which still imports": (False, 2),
}


def meet_alone(environment: dict[str, str], printed: Path) -> None:
    """What rank 1 does before it has met any other, in a fork."""
    os.environ.update(environment)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    heartbeat.LONG_TIMEOUTS = 2.0
    signal.alarm(30)  # else it would wait for ever
    parallel = ParallelConfig(heartbeat_timeout_seconds=TIMEOUT)
    with meet_ranks(FullFinetuneConfig(parallel=parallel, device="cpu")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_a_store_that_does_not_answer_is_told_before_the_ranks_meet(
    store: str, tmp_path: Path
) -> None:
    """torch waits half an hour for one that is not there, and for ever for one that is silent."""
    is_made, timeouts = STORES[store]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if store == "stopped":
            listening.listen()
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": str(listening.getsockname()[1]), "GROUP_RANK": "0",
                  "TORCHELASTIC_USE_AGENT_STORE": str(is_made)}  # fmt: skip
        first = subprocess.Popen(["sleep", "120"], env=os.environ | common | {"RANK": "0"})
        try:
            given = common | {"RANK": "1", "LOCAL_RANK": "1"}, tmp_path / "printed"
            second = multiprocessing.get_context("fork").Process(target=meet_alone, args=given)
            second.start()
            second.join()
        finally:
            first.kill()
            first.wait()
    printed = (tmp_path / "printed").read_text()
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert second.exitcode == 7 and len(lines) == 1, printed
    assert re.match(
        r"error: the store of the run at 127\.0\.0\.1:\d+ \(rank 0 or its launcher\) is stopped or"
        r" unreachable for "
        rf"{timeouts * TIMEOUT} s; rank 1 waits for \d+ s in {CONNECTING}; set {KEY} higher if the"
        r" run is "
        r"only slow$",
        lines[0],
    ), lines


@pytest.mark.slow
def test_a_stopped_process_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another run's, and not one that only sleeps."""
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "1", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    cases = [
        {"RANK": "1"},
        {"RANK": "2", "MASTER_PORT": "2"},
        {"RANK": "3"},
        {"RANK": "4", "GROUP_RANK": "1"},
        {},
    ]
    processes = [subprocess.Popen(["sleep", "60"], env=os.environ | case) for case in cases]
    try:
        for case, process in zip(cases, processes, strict=True):
            if case.get("RANK") != "3":
                process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while find_stopped_ranks() != {1} and time.monotonic() < deadline:
            time.sleep(0.05)
        assert find_stopped_ranks() == {1}
        processes[0].send_signal(signal.SIGCONT)
        while find_stopped_ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert find_stopped_ranks() == set()
    finally:
        for process in processes:
            process.kill()
            process.wait()

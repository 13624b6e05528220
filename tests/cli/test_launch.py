"""`tune run` with real ranks: exit codes come out, signals go in, nobody is left behind."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from recipe_lib.cli.launch import PARENT_VARIABLE, Rank, choose_exit_code
from recipe_lib.cli.main import main
from recipe_lib.errors import FOLDER_VARIABLE
from tests.cli.commands import ROOT, TUNE, build_environment, start_forked, tune

# Does what its last argument says. Only `stopped` imports torch, which takes seconds.
RECIPE = '''
"""A recipe of the user's own."""
import os, signal, time
from recipe_lib.errors import ConfigError, DivergedError, StoppedAndSaved
import beside


def main(argv):
    mode = argv[-1]
    rank = int(os.environ.get("RANK", 0))
    if mode == "user error":
        raise ConfigError("mine.yaml:3: first fault", "mine.yaml:4: second fault")
    if rank == 0:
        print("threads", os.environ.get("OMP_NUM_THREADS"), beside.NAME, argv[:-1], flush=True)
    if mode == "count":
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}\\n", end="", flush=True)
    if mode == "diverged":
        raise DivergedError("step 3: the loss is nan")
    if mode == "crash" and rank == 1:
        raise RuntimeError("a bug")
    if mode == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "wait":
        wait(rank)
    if mode == "stopped":
        stop_one(rank)
    return 0


def stop_one(rank):
    print(f"ready {os.getpid()} ", end="", flush=True)
    from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
    from recipe_lib.parallel import start_world
    from recipe_lib.parallel.heartbeat import STEP_TIMEOUTS

    parallel = ParallelConfig(heartbeat_timeout_seconds=1.5)
    with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
        world.heartbeat.enter("step 2", STEP_TIMEOUTS)
        world.any(False)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.any(False)


def wait(rank):
    received = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    print(f"ready {os.getpid()} ", end="", flush=True)  # in one piece: ranks share the file
    deadline = time.monotonic() + 60
    while not received and time.monotonic() < deadline:
        time.sleep(0.02)
    if rank == 0:
        time.sleep(1.5)
        print("saved by rank 0", flush=True)
    raise StoppedAndSaved("stopped by a signal; the state is saved")
'''


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's file, with a module of the user's beside it, in a folder that has nothing to do
    with ours.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "mine.py").write_text(RECIPE)
    return folder / "mine.py"


@dataclass
class Launch:
    """A run that has ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Launch]


@pytest.fixture
def run(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Run:
    """`tune run` in this process, from the recipe's folder. Nothing leads its ranks to recipe_lib,
    as where a checkout is not installed.
    """
    monkeypatch.chdir(recipe.parent)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")

    def call(*words: str) -> Launch:
        capfd.readouterr()
        return Launch(main(["run", *words]), *capfd.readouterr())

    return call


@pytest.mark.slow
def test_two_ranks(run: Run):
    result = run("--nproc_per_node", "2", "./mine.py", "--config", "x=y", "count")
    assert result.returncode == 0, result.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = ["rank 0 of 2", "rank 1 of 2", f"threads {threads} beside ['--config', 'x=y']"]
    assert sorted(result.stdout.splitlines()) == expected
    assert result.stderr == ""


@pytest.mark.slow
def test_own_thread_count_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "threads 7 " in run("--nproc-per-node=1", "mine.py", "ok").stdout


def test_one_process_without_flags(recipe: Path):
    result = tune("run", "./mine.py", "ok", cwd=recipe.parent, OMP_NUM_THREADS=None)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "threads None beside []\n"


@pytest.mark.parametrize(
    ("mode", "code", "line"),
    [
        ("user error", 2, "error: mine.yaml:3: first fault\nerror: mine.yaml:4: second fault\n"),
        pytest.param("diverged", 4, "error: step 3: the loss is nan\n", marks=pytest.mark.slow),
        pytest.param(
            "killed",
            137,
            "error: rank 1 was killed by SIGKILL; often the host's memory ran out: see `dmesg`\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exit_codes_come_out_and_are_told_once(mode: str, code: int, line: str, run: Run):
    result = run("--nproc_per_node", "2", "mine.py", mode)
    assert result.returncode == code
    assert (
        re.sub(r"starting the ranks, \d+s\n", "", result.stderr) == line
    )  # told of a start that takes long


@pytest.mark.slow
def test_a_crash_keeps_its_traceback_and_adds_one_line(run: Run):
    result = run("--nproc_per_node", "2", "mine.py", "crash")
    assert result.returncode == 1
    assert "RuntimeError: a bug" in result.stderr
    assert result.stderr.endswith("error: rank 1 failed with exit code 1; its traceback is above\n")
    assert "ChildFailedError" not in result.stderr


@pytest.mark.slow
def test_a_stopped_rank_is_killed_soon_and_not_called_out_of_memory(run: Run):
    result = run("--nproc_per_node", "2", "mine.py", "stopped")
    assert result.returncode == 7
    line = r"error: rank 1 is stopped for \d+ s; rank 0 waits for \d+ s in step 2.*\n"
    assert re.fullmatch(line, result.stderr), result.stderr
    pids = re.findall(r"ready (\d+) ", result.stdout)
    assert len(pids) == 2 and all(gone(int(pid)) for pid in pids), result.stdout


def start(recipe: Path, folder: Path, *words: str) -> BaseProcess:
    """`tune run` in the background, its temporary files below `folder`, its output in
    `folder`/out.
    """
    (folder / "tmp").mkdir()
    with open(folder / "out", "w") as out:
        words = ("run", *words, "mine.py", "wait")
        files = {"stdout": out.fileno(), "stderr": out.fileno()}
        return start_forked(*words, **files, cwd=recipe.parent, TMPDIR=str(folder / "tmp"))


def end(process: BaseProcess, number: int) -> int | None:
    """Send the signal; returns the exit code."""
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


def ready(folder: Path, ranks: int) -> list[int]:
    """The ranks' process ids, once all of them wait for a signal."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = (folder / "out").read_text().split()
        pids = [int(pid) for word, pid in zip(words, words[1:], strict=False) if word == "ready"]
        if len(pids) == ranks:
            return pids
        time.sleep(0.05)
    raise AssertionError((folder / "out").read_text())


def gone(pid: int) -> bool:
    """True when there is no such process, or only its remains that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, ["--nproc_per_node", "2"]),
        pytest.param(signal.SIGINT, ["--nproc_per_node", "2"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM, one process"],
)
def test_a_signal_lets_the_ranks_save(number: int, flags: list[str], recipe: Path, tmp_path: Path):
    process = start(recipe, tmp_path, *flags)
    pids = ready(tmp_path, 2 if flags else 1)
    assert end(process, number) == 3
    out = (tmp_path / "out").read_text()
    assert "saved by rank 0" in out
    assert out.count("stopped by a signal; the state is saved") == 1
    assert "Traceback" not in out
    assert all(map(gone, pids))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_signal_before_the_ranks_are_there(recipe: Path, tmp_path: Path):
    process = start(recipe, tmp_path, "--nproc_per_node", "2")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "tmp").glob("tune-run-*/pids")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert end(process, signal.SIGTERM) == 128 + signal.SIGTERM
    out = (tmp_path / "out").read_text()
    assert "saved by rank 0" not in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_was_killed(recipe: Path, tmp_path: Path):
    process = start(recipe, tmp_path, "--nproc_per_node", "2")
    pids = ready(tmp_path, 2)
    assert end(process, signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert "saved" not in (tmp_path / "out").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu_to_count(recipe: Path, capsys: pytest.CaptureFixture):
    assert main(["run", "--nproc_per_node", "gpu", str(recipe), "ok"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: torchrun: --nproc_per_node gpu: Cuda is not available.\n",
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--max-restarts", "-1"],
            "torchrun: max_restarts must be >= 0; check --standalone --max-restarts -1",
        ),
        (
            ["--max-restarts", "x"],
            "torchrun: argument --max-restarts/--max_restarts: invalid int value: 'x'; ",
        ),
        (
            ["--rdzv-backend", "none", "--rdzv-endpoint", "127.0.0.1:1"],
            "torchrun: The rendezvous backend 'none' is not registered.",
        ),
    ],
)
def test_what_torchrun_refuses_is_one_line(
    flags: list[str], line: str, recipe: Path, capsys: pytest.CaptureFixture
):
    environment_before = dict(os.environ)
    assert main(["run", *flags, str(recipe), "ok"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {line}")
    assert printed.err.count("\n") == 1
    assert dict(os.environ) == environment_before


def test_a_port_that_is_taken(recipe: Path, capsys: pytest.CaptureFixture):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--nnodes", "1", "--master_port", str(port)]
        assert main(["run", *flags, str(recipe), "ok"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: torchrun: ")
    assert printed.endswith(f"; check --nnodes 1 --master_port {port}\n")
    assert "EADDRINUSE" in printed or "in use" in printed


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_that_starts_after_the_signal_does_not_run(
    stopped: bool, recipe: Path, tmp_path: Path
):
    (tmp_path / "pids").mkdir()
    if stopped:
        (tmp_path / "stop").touch()
    variables = {FOLDER_VARIABLE: str(tmp_path), PARENT_VARIABLE: str(os.getpid()), "RANK": "0"}
    worker = ROOT / "recipe_lib" / "cli" / "worker.py"
    result = subprocess.run(
        [TUNE[0], worker, recipe, "ok"],
        env=build_environment(**variables),
        capture_output=True,
        text=True,
    )
    assert (result.returncode, "beside" in result.stdout) == (
        (143, False) if stopped else (0, True)
    )
    assert list((tmp_path / "pids").iterdir()) == []


def test_a_rank_that_has_saved_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """torchrun kills the others 30 seconds after the first has left."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rank = Rank()
    other = threading.Timer(0.4, (tmp_path / "saved_1").touch)
    other.start()
    began = time.monotonic()
    assert rank.leave_together(3) == 3
    assert time.monotonic() - began >= 0.4
    other.join()
    (tmp_path / "saved_1").unlink()
    for code in (0, 2, 5):
        assert rank.leave_together(code) == code  # at once: the others may never come


@pytest.mark.parametrize(
    ("codes", "stopped_by", "expected"),
    [
        ({0: 3, 1: 3}, signal.SIGTERM, (3, "")),
        ({0: -15, 1: 3}, signal.SIGTERM, (3, "")),
        ({0: 1, 1: 5}, None, (5, "")),
        ({0: -15, 1: 2}, None, (2, "")),
        ({0: 3, 1: 6}, signal.SIGTERM, (6, "")),
        (
            {0: -15, 1: 1},
            None,
            (1, "error: rank 1 failed with exit code 1; its traceback is above"),
        ),
        (
            {0: 7, 1: 1, 2: -15},
            None,
            (1, "error: rank 1 failed with exit code 1; its traceback is above"),
        ),
        ({0: 7, 1: 7}, None, (7, "")),  # a rank has told which one stands still
        ({0: 7, 1: -15}, None, (7, "")),
        ({0: -15, 1: -11}, None, (139, "error: rank 1 was killed by SIGSEGV")),
        ({0: -2, 1: 143}, signal.SIGINT, (130, "stopped by SIGINT before a state was saved")),
    ],
)
def test_one_code_out_of_many(
    codes: dict[int, int], stopped_by: int | None, expected: tuple[int, str]
):
    assert choose_exit_code(codes, stopped_by) == expected


def test_what_a_rank_has_said_is_not_said_again():
    assert choose_exit_code({0: 7, 1: -9}, None, has_reported=True) == (7, "")
    assert choose_exit_code({0: 7, 1: 2}, None, has_reported=True) == (2, "")

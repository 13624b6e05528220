"""Run recipes on ranks as `tune run` starts them, without importing torch for every run.

    with start_ranks() as ranks:
        ended = ranks.run(folder, recipe, words)

A rank is a process with torchrun's environment that has imported what a run needs. Each run is a
fork of it. The processes run this module; `run` sends them cases by their standard input.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipe_lib.cli import worker
from recipe_lib.cli.launch import PARENT_VARIABLE
from recipe_lib.errors import FOLDER_VARIABLE, end_process
from recipe_lib.parallel import heartbeat
from recipe_lib.training import run as _run  # noqa: F401  (so that no rank pays for the import)
from tests.distributed.ranks import find_free_port

ROOT = Path(__file__).parents[2]
START = "before it has imported anything"  # the phase before the recipe's first one


@dataclass
class Ended:
    """How a run ended."""

    codes: list[int]  # exit codes by rank; -9 of a rank that was stopped, and killed at the end
    said: str  # standard error of all ranks, in rank order
    phases: list[str]  # that rank 0 has entered: what its heartbeat says it is doing


class Ranks:
    """The processes of the ranks, whose forks run recipes."""

    def __init__(self, port: int, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._port = port
        self._processes = processes

    def run(
        self,
        folder: Path,
        recipe: Path,
        words: Sequence[str],
        stopped: int | None = None,
        at: str = "",
    ) -> Ended:
        """Run a recipe's file on all ranks, and wait until all but a stopped one have ended.

        folder: of the launcher's files about this run, without `pids` yet. words: the command line
        behind the recipe. stopped: rank that stops itself (SIGSTOP) at the phase `at`; None: none
        does. After 120 seconds the ranks that still run are killed.
        """
        (folder / "pids").mkdir(parents=True)
        # The store that torchrun serves in the launcher, where ranks meet.
        store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        case = {
            "folder": str(folder),
            "recipe": str(recipe),
            "words": list(words),
            "stopped": stopped,
            "at": at,
        }
        for process in self._processes:
            print(json.dumps(case), file=process.stdin, flush=True)
        pids = [int(process.stdout.readline()) for process in self._processes]  # type: ignore[union-attr]
        deadline = time.monotonic() + 120
        for rank, pid in enumerate(pids):
            while rank != stopped and Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        for pid in pids:  # those that are stopped or hang
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        codes = [int(process.stdout.readline()) for process in self._processes]  # type: ignore[union-attr]
        del store  # alive until all ranks have ended
        phases = folder / "phases"
        return Ended(
            codes=codes,
            said="".join((folder / f"said{rank}").read_text() for rank in range(len(pids))),
            phases=phases.read_text().splitlines() if phases.exists() else [],
        )


@contextmanager
def start_ranks(size: int = 2) -> Iterator[Ranks]:
    """Yield `size` ranks that have imported what they need; kill them at the end."""
    port = find_free_port()
    environment = os.environ | {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks do not serve the store
        "GROUP_RANK": "0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.launched"],
            cwd=ROOT,
            text=True,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        yield Ranks(port, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _serve() -> None:
    """Run each case that comes by standard input in a fork; print its process id and exit code."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_as_rank(**json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run_as_rank(folder: str, recipe: str, words: list[str], stopped: int | None, at: str) -> None:
    """Run the recipe in this process, noting its phases, and end with its exit code.

    The arguments are those of `Ranks.run`.
    """
    rank = int(os.environ["RANK"])
    os.environ |= {FOLDER_VARIABLE: folder, PARENT_VARIABLE: str(os.getppid())}
    os.dup2(os.open(Path(folder, f"said{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    # Standard output is the pipe that `_serve` prints to.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 0)
    heartbeat.BEAT_SECONDS = 0.1  # so that other ranks soon notice a stopped one
    original = heartbeat.Heartbeat.enter

    def note_phase(phase: str) -> None:
        if rank == 0:
            with open(Path(folder, "phases"), "a") as file:
                print(phase, file=file)
        if rank == stopped and phase == at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def enter(self: heartbeat.Heartbeat, phase: str, *patience: Any) -> None:
        original(self, phase, *patience)
        note_phase(phase)

    heartbeat.Heartbeat.enter = enter  # type: ignore[method-assign]
    note_phase(START)
    end_process(worker.main(recipe, words))


if __name__ == "__main__":
    _serve()

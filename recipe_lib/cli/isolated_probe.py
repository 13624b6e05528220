"""Steps that may hang or crash, each process of them a fork with a time limit.

A driver or a link that is broken does not answer, or takes the process along. What was found out before that is kept:
every step's result is sent as soon as it is there. The forks need a parent that has never touched a GPU.
"""

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from recipe_lib.cli.launch import end_with_parent
from recipe_lib.redaction import redact

GRACE_SECONDS = 3.0  # how long the others may go on after one rank has failed
KILL_SECONDS = 5.0  # a process inside a driver that does not answer cannot be killed: it is not waited for longer

# A step's name, and what is done; it returns plain values.
Step = tuple[str, Callable[[], Any]]


@dataclass
class Outcome:
    """What became of one process. values: by step. failed: step -> why, in a few words. hung: the step that it hung
    in, "" if it did not. said: the end of what it printed."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    hung: str = ""
    said: str = ""
    begun: str = "start"


def run_isolated(work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0) -> list[Outcome]:
    """Does the steps of `work(rank, folder)` in `ranks` processes at once; returns what became of each.

    folder: empty at first, shared by the ranks. seconds: how long no rank may come further; then all are killed. One
    process goes on after a step that failed; of several, the one that failed ends, as the others wait for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    found = [Outcome() for _ in range(ranks)]
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        parent, pids, running = os.getpid(), list[int](), dict[Any, int]()
        codes: dict[int, int | None] = {}
        try:
            for rank in range(ranks):
                mine, theirs = Pipe(duplex=False)
                pid = os.fork()
                if pid == 0:
                    _live(work, rank, Path(name), theirs, parent, goes_on=ranks == 1)
                theirs.close()
                pids.append(pid)
                running[mine] = rank
            hung = _listen(running, pids, found, codes, seconds)
        finally:
            for rank in running.values():
                with suppress(ProcessLookupError, IndexError):
                    os.kill(pids[rank], signal.SIGKILL)
            codes |= {rank: _exit_code(pids[rank]) for rank in running.values()}
        why = f"not done after {seconds:.0f} s" if hung else "ended, as another rank had failed"
        for rank, outcome in enumerate(found):
            _conclude(outcome, codes[rank], hung, why if rank in running.values() else "")
            output = Path(name, f"output{rank}")
            outcome.said = output.read_text(encoding="utf-8", errors="replace")[-4000:] if output.exists() else ""
    return found


def _live(
    work: Callable[[int, Path], Iterable[Step]], rank: int, folder: Path, pipe: Connection, parent: int, *,
    goes_on: bool,
) -> NoReturn:  # fmt: skip
    """The life of one process. It leaves through os._exit: what the parent does at its end is not its own."""
    code = 1
    try:
        gc.freeze()  # what the parent has thrown away is not to be taken down here: it may wait for threads
        end_with_parent(parent)
        output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        for name, step in work(rank, folder):
            pipe.send(("begun", name, None))
            try:
                pipe.send(("done", name, step()))
            except Exception as error:  # noqa: BLE001  (whatever a machine does wrong is to be reported)
                print(redact(traceback.format_exc()), file=sys.stderr)
                first = (str(error).strip().splitlines() or [""])[0]
                pipe.send(("failed", name, f"{type(error).__name__}: {first}"[:300]))
                if not goes_on:
                    break
        else:
            code = 0
    except BaseException:  # noqa: BLE001  (nothing of the parent's may run here)
        print(redact(traceback.format_exc()), file=sys.stderr)
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _listen(
    running: dict[Any, int], pids: list[int], found: list[Outcome], codes: dict[int, int | None], seconds: float
) -> bool:
    """Takes in what the processes send until all have ended, or for `seconds` without a word from any of them, or for
    a short while after the first failure; who ended leaves `running`. True: they hung."""
    deadline, failed = time.monotonic() + seconds, False
    while running:
        ready: list[Any] = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return not failed
        for pipe in ready:
            rank = running[pipe]
            try:
                kind, name, value = pipe.recv()
            except (EOFError, OSError):  # it has ended
                codes[rank] = _exit_code(pids[rank])
                del running[pipe]
                if codes[rank] and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
                continue
            if kind == "begun":
                found[rank].begun = name
            else:
                (found[rank].values if kind == "done" else found[rank].failed)[name] = value
            if not failed:
                deadline = time.monotonic() + seconds
    return False


def _exit_code(pid: int) -> int | None:
    """Of a process that is ending; None for one that does not go."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def _conclude(outcome: Outcome, code: int | None, hung: bool, killed: str) -> None:
    """Notes how a process ended. hung: whether all hung; killed: why this one was killed, if it was."""
    if code is None:
        killed = "does not even end when it is killed: the driver hangs; restart the machine"
    if killed:
        outcome.failed.setdefault(outcome.begun, killed)
        outcome.hung = outcome.begun if hung else ""
    elif code and outcome.begun not in outcome.failed:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        outcome.failed[outcome.begun] = ended

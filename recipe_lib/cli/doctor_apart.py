"""Steps that may hang or crash, each process of them a fork with a time limit.

A driver or a link that is broken does not answer, or takes the process along. What was found out before that is kept:
every step's result is written down as soon as it is there. The forks need a parent that has never touched a GPU.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from recipe_lib.cli.launch import end_with_parent
from recipe_lib.redaction import redact

GRACE_SECONDS = 3.0  # how long the others may go on after one rank has failed
KILL_SECONDS = 5.0  # a process inside a driver that does not answer cannot be killed: it is not waited for longer

# A step's name, and what is done; it returns what JSON can hold.
Step = tuple[str, Callable[[], Any]]


@dataclass
class Outcome:
    """What became of one process. values: by step. failed: step -> why, in a few words. hung: the step that it stood
    still in, "" if it did not. said: the end of what it printed."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    hung: str = ""
    said: str = ""

    @property
    def fine(self) -> bool:
        """Whether every step was done."""
        return not self.failed


def run_apart(work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0) -> list[Outcome]:
    """Does the steps of `work(rank, folder)` in `ranks` processes at once; returns what became of each.

    folder: empty at first, shared by the ranks. seconds: how long no rank may come further; then all are killed. One
    process goes on after a step that failed; of several, the one that failed ends, as the others wait for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        folder, parent = Path(name), os.getpid()
        codes: dict[int, int | None] = {}
        pids: list[int] = []
        try:
            for rank in range(ranks):
                pid = os.fork()
                if pid == 0:
                    _live(work, rank, folder, parent, goes_on=ranks == 1)
                pids.append(pid)
            hung = _watch(pids, folder, seconds, codes)
        finally:
            left = {pid for pid in pids if pid not in codes}
            _kill(left, codes)
        why = f"not done after {seconds:.0f} s" if hung else "ended, as another rank had failed"
        return [_outcome(folder, rank, codes[pid], hung, why if pid in left else "") for rank, pid in enumerate(pids)]


def _live(
    work: Callable[[int, Path], Iterable[Step]], rank: int, folder: Path, parent: int, *, goes_on: bool
) -> NoReturn:
    """The life of one process. It leaves through os._exit: what the parent does at its end is not its own."""
    code = 1
    try:
        gc.freeze()  # what the parent has thrown away is not to be taken down here: it may wait for threads
        end_with_parent(parent)
        output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        with open(folder / f"steps{rank}", "a", encoding="utf-8", buffering=1) as notes:
            good = True
            for name, step in work(rank, folder):
                if not good and not goes_on:
                    break
                notes.write(json.dumps({"begun": name}) + "\n")
                try:
                    line = {"done": name, "value": step()}
                except Exception as error:  # noqa: BLE001  (whatever a machine does wrong is to be told)
                    print(redact(traceback.format_exc()), file=sys.stderr)
                    line, good = {"failed": name, "why": _first_line(error)}, False
                notes.write(json.dumps(line) + "\n")
        code = 0 if good or goes_on else 1
    except BaseException:  # noqa: BLE001  (nothing of the parent's may run here)
        print(redact(traceback.format_exc()), file=sys.stderr)
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _first_line(error: BaseException) -> str:
    """`RuntimeError: what it says first`."""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}"[:300]


def _watch(pids: list[int], folder: Path, seconds: float, codes: dict[int, int | None]) -> bool:
    """Waits for all processes, for `seconds` without a line from any of them, or for a short while after the first
    failure. True: they stood still."""
    deadline, written, failed = time.monotonic() + seconds, 0, False
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        now = sum(file.stat().st_size for file in folder.glob("steps*"))
        if now > written and not failed:
            deadline, written = time.monotonic() + seconds, now
        if not failed and any(codes.values()):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(0.02)
    return False


def _kill(pids: set[int], codes: dict[int, int | None]) -> None:
    """Ends what is left; notes None for a process that does not go."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    left = set(pids)
    while left and time.monotonic() < deadline:
        for pid in tuple(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                codes[pid] = -signal.SIGKILL
                left.remove(pid)
        time.sleep(0.01)
    codes.update(dict.fromkeys(left))


def _outcome(folder: Path, rank: int, code: int | None, hung: bool, killed: str) -> Outcome:
    """What a process has written down. hung: whether all stood still; killed: why this one was killed, if it was."""
    found = Outcome()
    begun = "start"
    steps, output = folder / f"steps{rank}", folder / f"output{rank}"
    for text in steps.read_text(encoding="utf-8").splitlines() if steps.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # killed within a line
            continue
        if "begun" in line:
            begun = line["begun"]
        elif "done" in line:
            found.values[line["done"]] = line["value"]
        else:
            found.failed[line["failed"]] = line["why"]
    if output.exists():
        found.said = output.read_text(encoding="utf-8", errors="replace")[-4000:]
    if code is None:
        killed = "does not even end when it is killed: the driver hangs; restart the machine"
    if killed:
        found.failed.setdefault(begun, killed)
        found.hung = begun if hung else ""
    elif code and begun not in found.failed:
        found.failed[begun] = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return found

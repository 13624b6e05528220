"""Run torchrun inside `tune run`, so that signals reach the ranks and their exit codes come out.

torchrun's agent runs in a thread; the main thread takes the signals and hands them to the ranks,
which save and end by themselves. Both sides share a temporary folder, `FOLDER_VARIABLE`: the ranks
leave their process ids in it, and a rank that starts after the signal finds the file `stop` there.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from recipe_lib.errors import (
    DIVERGED,
    DONE,
    FOLDER_VARIABLE,
    OUT_OF_MEMORY,
    PEER_FAILED,
    SAID_FILE,
    STOPPED_AND_SAVED,
    STORAGE,
    USER_ERROR,
    SetupError,
)
from recipe_lib.report.phases import phase

PARENT_VARIABLE = "TUNE_LAUNCHER_PID"
CRASHED = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEAVING_SECONDS = 4.0  # for the ranks of this machine to end, when one of them has said why all do
SAVE_SECONDS = 600  # longest wait for the other ranks of this machine to finish saving


class Rank:
    """A rank's side of the launch: `with Rank() as rank: ...`."""

    stopped_early = 128 + signal.SIGTERM

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER_VARIABLE])
        self.pid_file = self.folder / "pids" / str(os.getpid())

    def __enter__(self) -> "Rank":
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
        self.pid_file.touch()
        return self

    def __exit__(self, *exception: object) -> None:
        self.pid_file.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        """Return True if the launcher was asked to stop."""
        return (self.folder / "stop").exists()

    def leave_together(self, code: int) -> int:
        """Return `code`; after a save, wait until all ranks of this machine have saved."""
        # torchrun takes the first rank that leaves with a code for a failure and kills the others
        # after 30 seconds, though one of them may still be writing.
        if code == STOPPED_AND_SAVED:
            (self.folder / f"saved_{os.environ['LOCAL_RANK']}").touch()
            deadline = time.monotonic() + SAVE_SECONDS
            ranks = int(os.environ["LOCAL_WORLD_SIZE"])
            while len(list(self.folder.glob("saved_*"))) < ranks and time.monotonic() < deadline:
                time.sleep(0.05)
        return code


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends in whatever way (Linux alone).

    parent: process id of the one that started this process.
    """
    # A launcher killed by SIGKILL cannot end its ranks; without this they would go on writing to
    # the run's folder.
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # A parent that died before the call has left this process to another one.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Launcher:
    """The launcher's side: runs torchrun's agent in a thread and hands signals on to the ranks."""

    def __init__(
        self, flags: Sequence[str], script: Path, arguments: Sequence[str], folder: Path
    ) -> None:
        """Keep what to launch.

        flags: torchrun's. script, arguments: what each rank runs. folder: empty, for this launch
        alone.
        """
        self.words = [*flags, str(script), *arguments]  # torchrun's command line
        self.flags = list(flags)
        self.folder = folder
        self.received: list[int] = []  # signals, first to last
        self.outcome: BaseException | None = None  # what torchrun's agent raised
        self.finished = threading.Event()  # the agent has ended

    def run(self) -> int:
        """Launch the ranks, wait for them, and return the exit code of the launch."""
        (self.folder / "pids").mkdir()
        former_handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in former_handlers.items():
            # `nohup` has SIGHUP ignored, to outlive the terminal: it stays ignored.
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        try:
            with phase("starting the ranks", leaves_line=False):
                # Left to itself torchrun leaves an empty folder in /tmp for every launch.
                has_log_dir = any(
                    flag.startswith(("--log-dir", "--log_dir")) for flag in self.flags
                )
                logs = [] if has_log_dir else ["--log-dir", str(self.folder / "logs")]
                parsed = parse_flags([*logs, *self.words])
                if self.received:
                    return 128 + self.received[0]
                # In a thread torchrun installs no signal handlers. Its own kill ranks that take
                # longer than 30 seconds to end, and print a traceback.
                thread = threading.Thread(target=self._launch, args=(parsed,), name="torchrun")
                thread.start()
                # The row on the terminal stays until the first rank has left its process id.
                while not any((self.folder / "pids").iterdir()) and not self.finished.wait(0.05):
                    continue
            self._wait()
            thread.join()
        finally:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)
        return self._exit_code()

    def _launch(self, parsed: Any) -> None:
        from torch.distributed import run

        try:
            run.run(parsed)
        except BaseException as error:  # noqa: BLE001  (the main thread judges it)
            self.outcome = error
        finally:
            self.finished.set()

    def _wait(self) -> None:
        """Wait until torchrun's agent has finished."""
        reported_at = None
        while not self.finished.wait(0.2):
            if reported_at is None and (self.folder / SAID_FILE).exists():
                reported_at = time.monotonic()
            # One rank has said why the run is over. The agent would give the others, which may hang
            # or be stopped, 30 seconds.
            if reported_at is not None and time.monotonic() - reported_at > LEAVING_SECONDS:
                self._send_signal(signal.SIGKILL)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        # For a rank that has not left its process id yet.
        (self.folder / "stop").touch()
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        # Asked three times: the ranks do not answer.
        self._send_signal(signal.SIGKILL if len(self.received) > 2 else forwarded)

    def _send_signal(self, number: int) -> None:
        for file in (self.folder / "pids").iterdir():
            try:
                os.kill(int(file.name), number)
            except ProcessLookupError:  # it was killed, and has left its file
                continue

    def _exit_code(self) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        if self.outcome is None:
            return DONE
        if isinstance(self.outcome, ChildFailedError):
            codes = {rank: failure.exitcode for rank, failure in self.outcome.failures.items()}
            stopped_by = self.received[0] if self.received else None
            said = (self.folder / SAID_FILE).exists()
            code, line = choose_exit_code(codes, stopped_by, said)
            if line:
                print(line, file=sys.stderr)
            return code
        # torchrun raises these for flags that it cannot use, and for nodes that do not meet.
        if isinstance(self.outcome, RendezvousError | DistError | ValueError | AssertionError):
            reason = (str(self.outcome).splitlines() or [type(self.outcome).__name__])[0]
            raise SetupError(f"torchrun: {reason}; check {' '.join(self.flags)}") from self.outcome
        raise self.outcome


def choose_exit_code(
    codes: dict[int, int], stopped_by: int | None, said: bool = False
) -> tuple[int, str]:
    """Return the exit code of the launch and, unless the ranks have said it, a line on the cause.

    codes: rank -> exit code of the ranks of this machine that did not end with 0; negative: killed
    by that signal. stopped_by: the signal that the launcher received, if any. said: a rank has said
    why all ranks end.
    """
    # Ranks end with these codes after they have said why; one such rank explains the others.
    for code in (OUT_OF_MEMORY, STORAGE, DIVERGED, USER_ERROR, STOPPED_AND_SAVED):
        if code in codes.values():
            return code, ""
    # The cause is a rank that hangs, or is on another machine. A rank that was killed here was
    # killed by the launcher.
    if said:
        return PEER_FAILED, ""
    if stopped_by is not None:
        return (
            128 + stopped_by,
            f"stopped by {signal.Signals(stopped_by).name} before a state was saved",
        )
    # Ranks that ended, or that the agent ended with SIGTERM, because another had failed, are not
    # the cause.
    order = {PEER_FAILED: 1, -signal.SIGTERM: 2}
    rank, code = min(codes.items(), key=lambda item: (order.get(item[1], 0), item[0]))
    if code == PEER_FAILED:
        return PEER_FAILED, ""  # reported by whoever found it
    if code >= 0:
        return CRASHED, f"error: rank {rank} failed with exit code {code}; its traceback is above"
    name = signal.Signals(-code).name
    hint = "; often the host's memory ran out: see `dmesg`" if name == "SIGKILL" else ""
    return 128 - code, f"error: rank {rank} was killed by {name}{hint}"


def parse_flags(words: list[str]) -> Any:
    """Return torchrun's own reading of its command line; choose threads, and silence its loggers.

    Raises SetupError if torchrun refuses the command line.
    """
    from torch.distributed import run

    def refuse(message: str) -> NoReturn:
        raise SetupError(f"torchrun: {message}; see `torchrun --help`")

    parser = run.get_args_parser()
    # torchrun's own error prints the whole usage.
    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(words)
    try:
        ranks = run.determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        raise SetupError(f"torchrun: --nproc_per_node {parsed.nproc_per_node}: {error}") from error
    # torchrun would set 1 and print a warning of five lines.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // ranks)))
    # The launcher reports failed ranks itself; LOGLEVEL is torchrun's way of asking for its logs.
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return parsed


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def set_environment(**values: str) -> Iterator[None]:
    """Set environment variables; put the whole environment back afterwards."""
    former = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def launch(flags: Sequence[str], recipe: Path, arguments: Sequence[str]) -> int:
    """Run a recipe's file on the ranks that torchrun's flags ask for; return the exit code."""
    worker = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory(prefix="tune-run-") as folder:
        with set_environment(**{FOLDER_VARIABLE: folder, PARENT_VARIABLE: str(os.getpid())}):
            return Launcher(flags, worker, [str(recipe.absolute()), *arguments], Path(folder)).run()

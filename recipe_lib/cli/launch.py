"""torchrun from inside `tune run`: signals reach the ranks, and the ranks' exit codes come out.

torchrun answers a signal by killing ranks that take longer than 30 seconds to end, and by a traceback. Here it runs in
a thread, where it installs no signal handlers; the main thread takes the signals and hands them to
the ranks, which save and end by themselves. The ranks leave their process ids in a temporary folder
that both sides know by `FOLDER_VARIABLE`; a rank that starts after the signal finds the mark `stop`
there.
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
    """A rank's side: with Rank() as rank: ..."""

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
        """True if the launcher was asked to stop."""
        return (self.folder / "stop").exists()

    def leave_together(self, code: int) -> int:
        """Returns `code`; after a save, when all ranks of this machine are that far.

        torchrun takes the first rank that leaves with a code for a failure and kills the others after 30 seconds,
        though one of them may still be writing.
        """
        if code == STOPPED_AND_SAVED:
            (self.folder / f"saved_{os.environ['LOCAL_RANK']}").touch()
            deadline = time.monotonic() + SAVE_SECONDS
            ranks = int(os.environ["LOCAL_WORLD_SIZE"])
            while len(list(self.folder.glob("saved_*"))) < ranks and time.monotonic() < deadline:
                time.sleep(0.05)
        return code


def end_with_parent(parent: int) -> None:
    """Has this process killed when `parent`, the process id of the one that started it, ends in
    whatever way (Linux).

    A launcher killed by SIGKILL cannot end its ranks; without this they would go on writing to the
    run's folder.
    """
    if sys.platform != "linux":
        return
    import ctypes

    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


class Launcher:
    """The launcher's side: runs torchrun's agent in a thread and hands signals on to the ranks."""

    def __init__(
        self, flags: Sequence[str], script: Path, arguments: Sequence[str], folder: Path
    ) -> None:
        """flags: torchrun's. script, arguments: what each rank runs. folder: empty, for this launch
        alone.
        """
        self.flags, self.script, self.arguments, self.folder = (
            list(flags),
            script,
            list(arguments),
            folder,
        )
        self.received: list[int] = []
        self.outcome: BaseException | None = None
        self.finished = threading.Event()

    def run(self) -> int:
        """Launches, waits, and returns the exit code of the whole."""
        (self.folder / "pids").mkdir()
        former = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in former.items():
            if (
                number != signal.SIGHUP or handler != signal.SIG_IGN
            ):  # `nohup` asks to outlive the terminal
                signal.signal(number, self._on_signal)
        try:
            with phase("starting the ranks", leaves_line=False):
                # Left to itself torchrun leaves an empty folder in /tmp for every launch.
                given = any(flag.startswith(("--log-dir", "--log_dir")) for flag in self.flags)
                logs = [] if given else ["--log-dir", str(self.folder / "logs")]
                parsed = parse_flags([*logs, *self.flags, str(self.script), *self.arguments])
                if self.received:
                    return 128 + self.received[0]
                thread = threading.Thread(target=self._launch, args=(parsed,), name="torchrun")
                thread.start()
                while not any((self.folder / "pids").iterdir()) and not self.finished.wait(0.05):
                    continue
            self._wait()
            thread.join()
        finally:
            for number, handler in former.items():
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
        """Until torchrun's agent has finished. It gives ranks that do not end 30 seconds, those
        that are stopped too; if one has said that the run is over, the others are killed before
        that.
        """
        said = None
        while not self.finished.wait(0.2):
            if said is None and (self.folder / SAID_FILE).exists():
                said = time.monotonic()
            if said is not None and time.monotonic() - said > LEAVING_SECONDS:
                self._signal_ranks(signal.SIGKILL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        (self.folder / "stop").touch()
        passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if len(self.received) > 2:
            passed_on = signal.SIGKILL  # asked three times: the ranks do not answer
        self._signal_ranks(passed_on)

    def _signal_ranks(self, number: int) -> None:
        for file in (self.folder / "pids").iterdir():
            try:
                os.kill(int(file.name), number)
            except ProcessLookupError:
                continue

    def _exit_code(self) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        if self.outcome is None:
            return DONE
        if isinstance(self.outcome, ChildFailedError):
            codes = {rank: failure.exitcode for rank, failure in self.outcome.failures.items()}
            said = (self.folder / SAID_FILE).exists()
            code, line = judge(codes, self.received[0] if self.received else None, said)
            if line:
                print(line, file=sys.stderr)
            return code
        # What torchrun says of flags that it cannot use, and of nodes that do not meet.
        if isinstance(self.outcome, RendezvousError | DistError | ValueError | AssertionError):
            reason = (
                str(self.outcome).splitlines()[0]
                if str(self.outcome)
                else type(self.outcome).__name__
            )
            raise SetupError(f"torchrun: {reason}; check {' '.join(self.flags)}") from self.outcome
        raise self.outcome


def judge(codes: dict[int, int], stopped_by: int | None, said: bool = False) -> tuple[int, str]:
    """The exit code of the whole and, where the ranks have not said it, a line about what happened.

    codes: rank -> exit code of the ranks of this machine that did not end with 0; negative: killed
    by that signal. stopped_by: the signal that the launcher received, if any. said: whether a rank
    has said why all end.
    """
    for code in (OUT_OF_MEMORY, STORAGE, DIVERGED, USER_ERROR, STOPPED_AND_SAVED):
        if code in codes.values():
            return code, ""
    # Of a rank that was stopped, or is elsewhere; who was killed here, by the launcher, is not the
    # cause
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
    """torchrun's own reading of its command line, thread count chosen and loggers quiet;
    ConfigError if it refuses.
    """
    from torch.distributed import run

    def refuse(message: str) -> NoReturn:
        raise SetupError(f"torchrun: {message}; see `torchrun --help`")

    parser = run.get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]  # its own prints the whole usage
    parsed = parser.parse_args(words)
    try:
        ranks = run.determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        raise SetupError(f"torchrun: --nproc_per_node {parsed.nproc_per_node}: {error}") from error
    # torchrun would set 1 and print a warning of five lines.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return parsed


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables; puts the whole environment back afterwards."""
    former = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def launch(flags: Sequence[str], recipe: Path, arguments: Sequence[str]) -> int:
    """Runs a recipe's file on the ranks that torchrun's flags ask for; returns the exit code of the
    whole.
    """
    worker = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory(prefix="tune-run-") as folder:
        with environment(**{FOLDER_VARIABLE: folder, PARENT_VARIABLE: str(os.getpid())}):
            return Launcher(flags, worker, [str(recipe.absolute()), *arguments], Path(folder)).run()

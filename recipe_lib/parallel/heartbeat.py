"""End all ranks of a run, in bounded time and with one line, when one fails, is gone, or hangs.

A rank spends much of its time waiting for others, where nothing of Python's runs. So each has two
threads. One talks with the store by which the ranks have met, over a separate connection: it says
twice a second that this rank lives and what its main thread is at, and sees whether another rank
has failed. The other one looks where the main thread is, without a call to the device. If that has
not moved for `parallel.heartbeat_timeout_seconds`, it looks for the rank that is waited for, and
ends the run. A rank that moves itself never ends a run. A process ends by os._exit: a kernel or a
collective that is stuck cannot hold it up.

A rank that waits in a collective has entered more collectives of some group than the rank it waits
for, and one that waits for an exchange with a neighbor of its pipeline has entered more of these.
So the rank that holds up the others is behind in one and ahead in none, whatever it is doing
itself: sleeping, an endless loop, a call that does not return.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from recipe_lib import errors
from recipe_lib.errors import OUT_OF_MEMORY, PEER_FAILED, StoppedAndSaved, UserError
from recipe_lib.parallel.thread_stacks import (
    StackLine,
    describe_place,
    get_current_thread,
    is_compiling,
    read_stack,
)
from recipe_lib.redaction import redact
from recipe_lib.report.phases import Phase
from recipe_lib.report.phases import phase as show_phase

# How many timeouts long a rank may be at something before the others stop waiting for it.
STEP_TIMEOUTS = 1.0  # a training step
FIRST_STEP_TIMEOUTS = 10.0  # communicators and kernels are made
# Loading, quantizing, compiling, validation, saving, export: for ever while it moves, this long
# where it does not.
LONG_TIMEOUTS = 30.0
# Most, of any phase, for a rank without a beat that is not known to be stopped: a library that
# holds the interpreter's lock, as while it opens a large file or the first use of a GPU, lets no
# thread beat. And of a step for all ranks.
SILENT_TIMEOUTS = 5.0

# Seconds.
BEAT_SECONDS = 0.5  # between two beats
OWN_STALL_SECONDS = 2.0  # by which this process must be late to have been stopped itself
FAILURE_GRACE_SECONDS = 2.5  # that a rank which fails waits for the others to have seen it
# That the others wait while it writes why: a launcher ends all ranks when the first one ends.
REPORT_SECONDS = 2.0
SHUTDOWN_SECONDS = 60.0  # for a rank that is on its way out itself, to write what it leaves
PRINTING_SECONDS = 0.5  # that a silent rank waits for the one of its machine that prints
LINE_SECONDS = 2.0  # that the last line may take to be written
PEER_LOST_SECONDS = 3.0  # without a beat by which a rank is gone, once an exchange has failed

_heartbeat_numbers = count(1)  # of this process; all ranks make them alike
_RUN = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")  # the same on the ranks of one machine
_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|ncclRemoteError|Socket Timeout|Timed out"
    r" waiting"
)


class PeerFailedError(RuntimeError):
    """Raised by a rank that is well because another one has failed by a defect, and tells it."""


@dataclass(frozen=True)
class Beat:
    """The last message of a rank."""

    at: str = "starting"  # `step 12, at recipe.py:120 (train_step)`
    patience: float = LONG_TIMEOUTS  # how many timeouts that may take
    still: float = 0.0  # seconds for which its main thread has been at one and the same place
    quiet: float = 0.0  # seconds for which it has entered no collective, exchange or new phase
    # Collectives by group, exchanges by pair of ranks.
    entered: dict[str, int] = field(default_factory=dict)
    node: str = ""  # its machine; "": it has not met the others
    left: bool = False  # it has ended in order, or knows why the run ends
    unheard: float = 0.0  # seconds since it was last heard of


@dataclass(frozen=True)
class Failure:
    """Why a run ends, as the ranks hear of it."""

    rank: int  # that tells it
    lines: list[str]
    nodes: list[str] = field(default_factory=list)  # machines that report it without these lines
    code: int = PEER_FAILED  # of all processes


def find_silent(
    beats: Mapping[int, Beat], timeout: float, stopped: Collection[int] = ()
) -> list[int]:
    """Return the ranks that have not been heard of for too long.

    stopped: those known to be, which have one timeout whatever they are at. Others may be on a
    machine that cannot be reached, or busy in a call that lets no thread beat; one that has not met
    the others may still import.
    """
    patience = {
        rank: min(beat.patience, SILENT_TIMEOUTS) if beat.node else LONG_TIMEOUTS
        for rank, beat in beats.items()
    }
    patience |= dict.fromkeys(stopped, STEP_TIMEOUTS)
    return [rank for rank, beat in beats.items() if beat.unheard >= timeout * patience[rank]]


def find_behind(beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that have entered fewer collectives of some group than others, of none more.

    Exchanges count as collectives of two ranks. They are behind even those that are behind in
    another group only because they wait for one of them.
    """
    fewer: set[int] = set()
    more: set[int] = set()
    for name in set().union(*(beat.entered for beat in beats.values())):
        counts = {rank: beat.entered[name] for rank, beat in beats.items() if name in beat.entered}
        fewer |= {rank for rank, entered in counts.items() if entered < max(counts.values())}
        more |= {rank for rank, entered in counts.items() if entered > min(counts.values())}
    return sorted(fewer - more)


def is_overdue(beat: Beat, timeout: float) -> bool:
    """Return True for a rank that others wait for and that has had its time.

    In a step that is judged by what it has entered, in what may take long by whether it moves.
    """
    seconds = beat.quiet if beat.patience <= FIRST_STEP_TIMEOUTS else beat.still
    return seconds >= timeout * beat.patience


def are_all_stuck(beats: Mapping[int, Beat], timeout: float) -> bool:
    """Return True if no rank has moved for so long that none will.

    The work that ranks have queued on GPUs has longer than a step.
    """
    return all(
        beat.still >= timeout * max(beat.patience, SILENT_TIMEOUTS) for beat in beats.values()
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3 is` or `ranks 0, 2 are`; of more than eight, the first eight and `...`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} are"


class Heartbeat:
    """Says that this rank lives and where it is, and hears it of the others.

    with Heartbeat(store, rank, size, 60.0) as heartbeat:
        heartbeat.enter("step 1", STEP_TIMEOUTS)

    What is raised inside the block ends the other ranks too. Of one rank, or without a store,
    nothing runs, and nothing is watched.
    """

    def __init__(
        self, store: dist.Store | None = None, rank: int = 0, size: int = 1, timeout: float = 60.0
    ) -> None:
        """Prepare a heartbeat; the block starts it.

        store: where the ranks have met. timeout: `parallel.heartbeat_timeout_seconds`.
        """
        self.is_ending = False  # an exception is on its way out
        self.action = ""  # of a pipeline's schedule, that this rank is at
        self._store: dist.Store | None = None  # a separate connection
        if store is not None and size > 1:
            self._store = dist.PrefixStore(f"heartbeat {next(_heartbeat_numbers)}", store.clone())
        self._rank = rank
        self._size = size
        self._timeout = timeout
        # This machine, as torchrun counts them, or else by its name.
        self._node = os.environ.get("GROUP_RANK") or socket.gethostname()
        self._folder = os.environ.get(errors.FOLDER_VARIABLE)
        self._main = get_current_thread()
        self._once = threading.Lock()
        self._phase = "starting"
        self._patience = LONG_TIMEOUTS
        self._exchanges = Counter[str]()  # by pair of a pipeline's ranks
        self._not_collective = Counter[str]()  # by process group, what its count has of these
        self._entered: tuple[str, str, dict[str, int]] = ("", "", {})
        self._stack: list[StackLine] = []
        self._lost = False  # the store does not answer any more
        self._moved = self._advanced = self._answered = time.monotonic()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._has_parted = False  # all ranks have left, or none can be heard of any more
        self._left = False
        self._failure: Failure | None = None  # the run's first, of whatever rank
        self._own_failure: Failure | None = None
        self._seen: dict[int, tuple[Beat, float]] = {}  # others' beats, and when they came
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._store is not None:
            self._threads = [
                threading.Thread(target=run, name="heartbeat", daemon=True)
                for run in (self._talk, self._look)
            ]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._store is None:
            return
        self._left = error is None or isinstance(error, StoppedAndSaved)
        if self._left:  # a rank that is stopped now would be missed by nobody
            self.enter("waiting for the others to end")
            self.is_ending = False
            self._wake.set()
            self._wait(lambda: self._has_parted, float("inf"))
            if self._failure is not None:  # of a rank that came to its end later
                time.sleep(REPORT_SECONDS)
                self._end(self._failure)
        elif isinstance(error, Exception):
            self._fail(error)
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_SECONDS)

    def enter(self, phase: str, patience: float = LONG_TIMEOUTS) -> None:
        """Note what the main thread comes to. patience: how many timeouts that may take."""
        self._phase = phase
        self._patience = patience

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Note what the main thread comes to, and show it on the terminal."""
        self.enter(name)
        with show_phase(name) as going:
            yield going

    @contextmanager
    def name_action_in_errors(self) -> Iterator[None]:
        """Say in what is raised inside which action of a pipeline's schedule this rank was at.

        An action that a generator has begun, and in which it is left, stays the rank's action:
        around the loop over the generator this names it in what the loop's body has raised.
        """
        try:
            yield
        except Exception as error:
            action = f"rank {self._rank}, {self.action}"
            if self.action and isinstance(error, UserError):
                error.faults = [f"{fault} ({action})" for fault in error.faults]
            elif self.action:
                error.add_note(action)
            self.action = ""
            raise
        else:
            self.action = ""

    @contextmanager
    def exchange(self, other: int) -> Iterator[None]:
        """Count what begins inside as one exchange with another rank, and as no collective."""
        before = Counter(count_collectives())
        yield
        self._not_collective.update(Counter(count_collectives()) - before)
        self._exchanges[f"{min(self._rank, other)} with {max(self._rank, other)}"] += 1

    @contextmanager
    def limit_connecting(self, *, is_made: bool) -> Iterator[None]:
        """End this process with a line where the block that connects to the store takes too long.

        torch waits half an hour for a store that is not there, and for ever for one that takes a
        connection and is silent. is_made: it is older than this rank, and has one timeout.
        Otherwise rank 0 makes it, and may still import.
        """
        seconds = self._timeout * (STEP_TIMEOUTS if is_made else LONG_TIMEOUTS)
        self.enter("connecting to the store")
        timer = threading.Timer(seconds, lambda: self._end(self._blame_store(seconds)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # What the main thread is at, seen from a thread that judges and makes no call that may not
    # return.

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - looked > BEAT_SECONDS + OWN_STALL_SECONDS:
                # This process was stopped itself: what it knows of the others is old.
                self._moved = self._advanced = self._answered = now
                self._seen.clear()
            looked = now
            if self._failure is not None:
                self._leave(self._failure)
                return
            self._notice(now)
            is_due = self._own_failure is None and now - self._moved >= self._timeout
            verdict = self._find_verdict(now) if is_due else None
            if verdict is not None:
                failure = self._post(verdict)
                self._wait(lambda: self._has_parted, FAILURE_GRACE_SECONDS)
                self._end(failure)

    def _notice(self, now: float) -> None:
        """Look what the main thread is at, and whether it has moved since the last look."""
        counts = {
            name: entered - self._not_collective[name]
            for name, entered in count_collectives().items()
        }
        entered = (self._phase, self.action, {**counts, **self._exchanges})
        if entered != self._entered:
            self._entered = entered
            self._advanced = self._moved = now
        stack = read_stack(self._main)
        if stack != self._stack:
            self._stack = stack
            self._moved = now

    def _make_beat(self) -> Beat:
        now = time.monotonic()
        return Beat(
            at=", ".join(filter(None, (self._phase, self.action, describe_place(self._stack)))),
            patience=LONG_TIMEOUTS if is_compiling(self._stack) else self._patience,
            still=now - self._moved,
            quiet=now - self._advanced,
            entered=self._entered[2],
            node=self._node,
            left=self._left or self._failure is not None,
        )

    def _find_verdict(self, now: float) -> Failure | None:
        """Return whom this rank waits for in vain, if there is one: of itself others tell."""
        known = self._read_others(now)
        timeout = self._timeout
        if now - self._answered >= timeout:
            # In whatever phase: no thread of Python has to run for the store to answer.
            return self._blame_store(now - self._answered)
        is_any_unheard = any(beat.unheard >= timeout for beat in known.values())
        stopped = find_stopped_ranks() if is_any_unheard else set()
        silent = find_silent(known, timeout, stopped)
        if silent:
            how = "stopped" if stopped.issuperset(silent) else "stopped or unreachable"
            seconds = max(known[rank].unheard for rank in silent)
            return self._blame(f"{name_ranks(silent)} {how} for {seconds:.0f} s")
        behind = find_behind(known)
        if (
            behind
            and self._rank not in behind
            and all(is_overdue(known[rank], timeout) for rank in behind)
        ):
            lines = [
                f"rank {rank} has made no progress for {known[rank].quiet:.0f} s in"
                f" {known[rank].at}"
                for rank in behind[:4]
            ]
            return self._blame("; ".join(lines))
        if known and are_all_stuck(known, timeout):
            seconds = min(beat.still for beat in known.values())
            return self._blame(f"no rank has moved for {seconds:.0f} s")
        return None

    def _blame(self, text: str) -> Failure:
        """Return a failure of this line, with what this rank is at, and what to do."""
        key = f"parallel.heartbeat_timeout_seconds={self._timeout:g}"
        wait = self._describe_own_wait()
        return Failure(self._rank, [f"{text}; {wait}; set {key} higher if the run is only slow"])

    def _blame_store(self, seconds: float) -> Failure:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return self._blame(
            f"the store of the run at {address} (rank 0 or its launcher) is stopped or unreachable"
            f" for {seconds:.0f} s"
        )

    def _describe_own_wait(self) -> str:
        beat = self._make_beat()
        return f"rank {self._rank} waits for {beat.still:.0f} s in {beat.at}"

    # The thread that talks with the store, and alone does.

    def _talk(self) -> None:
        while True:
            try:
                self._exchange_beats()
            except RuntimeError:  # the store is gone, with the process that held it
                self._lost = self._has_parted = True
                return
            if self._closed.is_set():
                return
            self._answered = time.monotonic()
            is_ending = self._left or self._own_failure is not None or self._failure is not None
            self._wake.wait(BEAT_SECONDS / 10 if is_ending else BEAT_SECONDS)
            self._wake.clear()

    def _exchange_beats(self) -> None:
        """Say this rank's beat, and hear the others' where something may be wrong."""
        store = self._store
        assert store is not None
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._make_beat())))
        if self._own_failure is not None:  # the run's, unless another one was first
            store.compare_set("failed", "", json.dumps(asdict(self._own_failure)))
        resting = time.monotonic() - self._moved
        is_ending = self.is_ending or self._left or self._own_failure is not None
        if is_ending or resting >= min(2 * BEAT_SECONDS, self._timeout / 4):
            for rank in range(self._size):
                key = f"beat/{rank}"
                beat = Beat(**json.loads(store.get(key))) if store.check([key]) else Beat()
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = (beat, time.monotonic())
        else:
            self._seen.clear()  # it would be old when it is wanted again
        # After the beats: a rank whose beat says that it has left because of a failure has told
        # this before.
        if self._failure is None and store.check(["failed"]):
            self._failure = Failure(**json.loads(store.get("failed")))
        beats = [beat for beat, _ in list(self._seen.values())]
        self._has_parted = len(beats) == self._size and all(beat.left for beat in beats)

    def _read_others(self, now: float) -> dict[int, Beat]:
        """Return what is known of the ranks that have not left, this one too."""
        seen = {
            rank: replace(beat, unheard=now - since)
            for rank, (beat, since) in list(self._seen.items())
        }
        if seen:
            seen[self._rank] = self._make_beat()
        return {rank: beat for rank, beat in seen.items() if not beat.left}

    # How it ends.

    def _fail(self, error: Exception) -> None:
        """Tell the others in the main thread that this rank has failed.

        If another rank is the cause the process ends here, quietly.
        """
        self.is_ending = True
        self._wake.set()
        # That another process is not there any more: gloo's errors are known by their text alone.
        is_of_gone = isinstance(error, RuntimeError) and bool(_GONE.search(str(error)))
        is_lost = isinstance(error, PeerFailedError) or is_of_gone
        if is_lost:  # who is the cause says so, or is not heard of any more
            self._wait(
                lambda: self._failure is not None or self._lost or bool(self._find_gone()),
                PEER_LOST_SECONDS + 4 * BEAT_SECONDS,
            )
        cause = self._post(self._describe_lost(error) if is_lost else self._describe_error(error))
        if is_lost or (cause.rank != self._rank and not isinstance(error, UserError)):
            time.sleep(REPORT_SECONDS)
            self._end(cause)
        if isinstance(error, UserError):
            if cause.rank != self._rank and self._node in cause.nodes:  # several ranks say the same
                error.faults = [fault for fault in error.faults if fault not in cause.lines]
        else:
            hook = sys.excepthook
            # Not through Python's shutdown, in which threads of gloo may abort.
            sys.excepthook = lambda *caught: (hook(*caught), errors.end_process(1))[1]
        self._wait(lambda: self._has_parted, FAILURE_GRACE_SECONDS)
        if isinstance(error, UserError) and not error.faults:
            time.sleep(PRINTING_SECONDS)  # a launcher that sees a rank end ends the others

    def _describe_error(self, error: Exception) -> Failure:
        """Return this rank's own failure."""
        if isinstance(error, UserError):
            return Failure(self._rank, list(error.faults), nodes=[self._node], code=error.exit_code)
        line = (
            f"rank {self._rank} failed in {self._phase}: {type(error).__name__}:"
            f" {errors.get_first_line(error)}"
        )
        code = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else PEER_FAILED
        return Failure(self._rank, [line], nodes=[self._node] if self._folder else [], code=code)

    def _describe_lost(self, error: Exception) -> Failure:
        """Return the failure that another rank is gone without a word."""
        gone = self._find_gone()
        text = f"rank {self._rank} has lost a connection"
        if gone:
            text = f"{name_ranks(sorted(gone))} gone, killed or crashed"
        elif self._lost:
            text = "the process that holds the rendezvous store (rank 0 or its launcher) is gone"
        # A launcher tells of those on its own machine.
        nodes = {beat.node for beat in gone.values()} if self._folder else set()
        line = f"{text}; {self._describe_own_wait()} ({errors.get_first_line(error)})"
        return Failure(self._rank, [line], nodes=sorted(nodes))

    def _find_gone(self) -> dict[int, Beat]:
        """Return the ranks that are not heard of any more."""
        known = self._read_others(time.monotonic())
        return {rank: beat for rank, beat in known.items() if beat.unheard >= PEER_LOST_SECONDS}

    def _post(self, failure: Failure) -> Failure:
        """Tell the others; return the run's first failure, which may be another rank's."""
        self._own_failure = failure
        self._wake.set()
        self._wait(lambda: self._failure is not None or self._lost, FAILURE_GRACE_SECONDS)
        return self._failure or failure

    def _leave(self, failure: Failure) -> None:
        """End this process for a failure when the rank that tells it has had the time to."""
        if self._own_failure is None:
            time.sleep(REPORT_SECONDS)
            # Not while the main thread is on its way out by itself: it writes what the run leaves,
            # or its own traceback.
            self._wait(
                lambda: not self.is_ending or self._own_failure is not None, SHUTDOWN_SECONDS
            )
        if self._own_failure is None:
            self._end(failure)

    def _end(self, failure: Failure) -> None:
        self._once.acquire()  # for good: of two threads the first one ends the process
        # A stuck thread may hold what is flushed.
        timer = threading.Timer(LINE_SECONDS, lambda: os._exit(failure.code))
        timer.daemon = True
        timer.start()
        if self._node not in failure.nodes and self._is_first_to_say():
            lines = [redact(errors.escape_invisible(line)) for line in failure.lines]
            sys.stderr.write("".join(f"error: {line}\n" for line in lines))
            sys.stderr.flush()
        errors.end_process(failure.code)

    def _is_first_to_say(self) -> bool:
        """Return True on one rank of a machine, as far as it can be known."""
        if self._folder:
            try:
                open(Path(self._folder, errors.SAID_FILE), "x").close()
            except OSError as error:  # a full disk must not swallow the lines
                return not isinstance(error, FileExistsError)
        elif self._store is not None and not self._lost:
            # A store that is silent would hold up the end.
            if time.monotonic() - self._answered < 4 * BEAT_SECONDS:
                return self._store.add(f"said/{self._node}", 1) == 1
        return True

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_ready() and time.monotonic() < deadline:
            time.sleep(0.02)


def find_stopped_ranks() -> set[int]:
    """Return the ranks of this run on this machine whose process is stopped, as by SIGSTOP.

    Also before they import. Only Linux shows it. A process that is busy in a call which lets no
    thread of Python run is not among them, nor one that a debugger holds.
    """
    stopped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended, or is another user's
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
                variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                if all(variables.get(name) == os.environ.get(name) for name in _RUN):
                    stopped.add(int(variables.get("RANK", "")))
    return stopped


def count_collectives() -> dict[str, int]:
    """Return by process group how many collectives this rank has entered."""
    counts = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # of a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            counts[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return counts

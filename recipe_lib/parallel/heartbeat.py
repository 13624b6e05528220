"""End all ranks of a run, in bounded time and with one line, when one fails, is gone, or hangs.

`meet_ranks` makes a `Heartbeat`, and a recipe trains inside its block. Two more threads of a rank
write its beat (that it lives, and where its main thread is) to the rendezvous store, and judge the
other ranks by theirs. A phase is a part of a run, such as a step; its patience is how long a rank
may be in it, in timeouts of `parallel.heartbeat_timeout_seconds`. An exchange is a send or receive
between two ranks of a pipeline.
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

# The patience for a phase, in timeouts.
STEP_TIMEOUTS = 1.0  # a training step
FIRST_STEP_TIMEOUTS = 10.0  # a first step, in which communicators and kernels are made
# Loading, quantizing, compiling, validation, saving, export. They may take any time while the main
# thread moves, and this long while it does not.
LONG_TIMEOUTS = 30.0
# The most, in any phase, for a rank that sends no beats and is not known to be stopped: a library
# that holds the interpreter's lock, as while it opens a large file or at the first use of a GPU,
# lets no thread beat. Also the least before all ranks count as stuck.
SILENT_TIMEOUTS = 5.0

BEAT_SECONDS = 0.5  # between two beats
OWN_STALL_SECONDS = 2.0  # a look that is later than this was held up: the process was stopped
FAILURE_GRACE_SECONDS = 2.5  # the most that a failed rank waits until the others have seen it
# The others wait so long while it writes why: a launcher ends all ranks when the first one ends.
REPORT_SECONDS = 2.0
SHUTDOWN_SECONDS = 60.0  # the most for a rank to write files while its exception is on its way out
PRINTING_SECONDS = 0.5  # a rank without a line of its own waits so long for the one that prints
LINE_SECONDS = 2.0  # the most that writing the last line may take
PEER_LOST_SECONDS = 3.0  # without a beat: the rank is gone, once a connection has failed

# Numbers the heartbeats of a process, for their keys in the store; all ranks make as many.
_heartbeat_numbers = count(1)
# Environment variables with the same values in all processes of a run on one machine.
_RUN = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# Messages of gloo, NCCL and the store when the process at the other end is gone.
_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|ncclRemoteError|Socket Timeout|Timed out"
    r" waiting"
)


class PeerFailedError(RuntimeError):
    """Raised by a rank that works, because another one has failed by a bug and reports it."""


@dataclass(frozen=True)
class Beat:
    """A message of a rank to the others, as it is in the store (JSON)."""

    at: str = "starting"  # where it is: `step 12, at recipe.py:120 (train_step)`
    patience: float = LONG_TIMEOUTS  # for that phase, in timeouts
    still: float = 0.0  # seconds since the stack of its main thread last changed
    quiet: float = 0.0  # seconds since it last entered a collective, an exchange or a phase
    # By name of a process group, the number of its collectives that the rank has entered; by pair
    # of ranks ("0 with 2"), that of its exchanges.
    entered: dict[str, int] = field(default_factory=dict)
    node: str = ""  # its machine; "": it has not sent a beat yet
    left: bool = False  # it has ended without an error, or knows already why the run ends
    unheard: float = 0.0  # seconds since its beat last changed, filled in by the reader


@dataclass(frozen=True)
class Failure:
    """Why a run ends, as it is in the store (JSON)."""

    rank: int  # the rank that reports it
    lines: list[str]  # for standard error, without `error: `
    # Machines on which a rank or the launcher writes it anyway, so that others there do not.
    nodes: list[str] = field(default_factory=list)
    code: int = PEER_FAILED  # exit code of all processes


def find_silent(
    beats: Mapping[int, Beat], timeout: float, stopped: Collection[int] = ()
) -> list[int]:
    """Return the ranks whose beats have not changed for too long.

    timeout: seconds. stopped: ranks whose process is known to be stopped; they have one timeout in
    any phase. Others may be on a machine that cannot be reached, or busy in a call that lets no
    thread beat. A rank that has not sent a beat yet may still import.
    """
    patience = {
        rank: min(beat.patience, SILENT_TIMEOUTS) if beat.node else LONG_TIMEOUTS
        for rank, beat in beats.items()
    }
    patience |= dict.fromkeys(stopped, STEP_TIMEOUTS)
    return [rank for rank, beat in beats.items() if beat.unheard >= timeout * patience[rank]]


def find_behind(beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that the others wait for: behind in a process group, and ahead in none.

    A rank that waits in a collective has entered more of its group than the rank it waits for. A
    rank that is behind in one group because it waits in a second one is ahead in the second, so it
    is not returned. Exchanges count as collectives of two ranks.
    """
    behind: set[int] = set()
    ahead: set[int] = set()
    for name in set().union(*(beat.entered for beat in beats.values())):
        counts = {rank: beat.entered[name] for rank, beat in beats.items() if name in beat.entered}
        behind |= {rank for rank, entered in counts.items() if entered < max(counts.values())}
        ahead |= {rank for rank, entered in counts.items() if entered > min(counts.values())}
    return sorted(behind - ahead)


def is_overdue(beat: Beat, timeout: float) -> bool:
    """Return True if a rank that others wait for has used up the patience for its phase.

    In a step the time counts since the rank last entered a collective, exchange or phase, so that
    an endless loop is found too. In phases that may take long it counts since its main thread last
    moved. timeout: seconds.
    """
    seconds = beat.quiet if beat.patience <= FIRST_STEP_TIMEOUTS else beat.still
    return seconds >= timeout * beat.patience


def are_all_stuck(beats: Mapping[int, Beat], timeout: float) -> bool:
    """Return True if no rank has moved for so long that none will. timeout: seconds.

    It takes SILENT_TIMEOUTS at least, since work that is queued on GPUs may take longer than the
    patience for a step.
    """
    return all(
        beat.still >= timeout * max(beat.patience, SILENT_TIMEOUTS) for beat in beats.values()
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3 is` or `ranks 0, 2 are`. Of more than eight it names the first eight."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} are"


class Heartbeat:
    """Reports to the other ranks that this one lives and where it is, and watches them.

        with Heartbeat(store, rank, size, 60.0) as heartbeat:
            heartbeat.enter("step 1", STEP_TIMEOUTS)

    An exception that leaves the block ends the other ranks too, but for `sys.exit(0)`. With one
    rank, or without a store, no threads run and nothing is watched.
    """

    def __init__(
        self, store: dist.Store | None = None, rank: int = 0, size: int = 1, timeout: float = 60.0
    ) -> None:
        """Prepare a heartbeat; the block starts it.

        store: the rendezvous store of the run. size: number of ranks. timeout:
        `parallel.heartbeat_timeout_seconds`.
        """
        self.is_ending = False  # an exception is on its way out
        self.action = ""  # the action of a pipeline's schedule that this rank is at, in words
        self._store: dist.Store | None = None  # None: nothing is watched
        if store is not None and size > 1:
            # A connection of its own: the main thread's may be in a call that waits for long.
            self._store = dist.PrefixStore(f"heartbeat {next(_heartbeat_numbers)}", store.clone())
        self._rank = rank
        self._size = size
        self._timeout = timeout
        # This machine: its number in torchrun, or else its name.
        self._node = os.environ.get("GROUP_RANK") or socket.gethostname()
        self._folder = os.environ.get(errors.FOLDER_VARIABLE)  # shared with the launcher, if any
        self._main_thread = get_current_thread()
        self._end_lock = threading.Lock()  # held by the thread that ends the process
        self._phase = "starting"
        self._patience = LONG_TIMEOUTS  # for the phase, in timeouts
        self._exchanges = Counter[str]()  # number by pair of a pipeline's ranks
        # By process group, the number of its counted collectives that were such exchanges.
        self._not_collective = Counter[str]()
        # Phase, action and `Beat.entered` at the last look; and the main thread's stack then.
        self._last_entered: tuple[str, str, dict[str, int]] = ("", "", {})
        self._stack: list[StackLine] = []
        self._is_store_lost = False  # the store does not answer any more
        # When the stack last changed, when `_last_entered` did, and when the store last answered,
        # by time.monotonic().
        self._moved_at = self._advanced_at = self._answered_at = time.monotonic()
        self._wake = threading.Event()  # lets `_talk` run at once
        self._closed = threading.Event()  # ends both threads
        self._has_parted = False  # the beats of all ranks say `left`, or the store is lost
        self._has_left = False  # this rank has left the block without an error
        self._failure: Failure | None = None  # the run's first one, of any rank
        self._own_failure: Failure | None = None  # the one that this rank reports
        # By rank, its last beat, and when that changed, by time.monotonic().
        self._seen: dict[int, tuple[Beat, float]] = {}
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
        self._has_left = error is None or isinstance(error, StoppedAndSaved)
        # From here on the others do not watch this rank: nobody would miss it if it were stopped.
        if self._has_left:
            self.enter("waiting for the others to end")
            self.is_ending = False
            self._wake.set()
            self._wait(lambda: self._has_parted, float("inf"))
            if self._failure is not None:  # of a rank that was still running
                time.sleep(REPORT_SECONDS)
                self._end_run(self._failure)
        elif isinstance(error, Exception):
            self._handle_exception(error)
        elif isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code):
            self._report_failure(self._describe_error(error))
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_SECONDS)

    def enter(self, phase: str, patience: float = LONG_TIMEOUTS) -> None:
        """Note that the main thread begins a phase. patience: for it, in timeouts."""
        self._phase = phase
        self._patience = patience

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        self.enter(name)
        with show_phase(name) as shown_phase:
            yield shown_phase

    @contextmanager
    def name_action_in_errors(self) -> Iterator[None]:
        """Add to an exception of the block the pipeline action that this rank was at.

        Around a loop over the driver's generator it names the action of the loop's body too.
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
    def exchange(self, peer: int) -> Iterator[None]:
        """Count the send or receive that the block starts as an exchange with the rank `peer`.

        A backend counts it as a collective of the group, but only two ranks have it: the group's
        other ranks would seem to be behind.
        """
        before = Counter(count_collectives())
        yield
        self._not_collective.update(Counter(count_collectives()) - before)
        self._exchanges[f"{min(self._rank, peer)} with {max(self._rank, peer)}"] += 1

    @contextmanager
    def limit_connecting(self, *, is_made: bool) -> Iterator[None]:
        """End this process with a line if the block, which connects to the store, takes too long.

        torch waits half an hour for a store that is not there, and for ever for one that takes a
        connection and is silent. is_made: True if the store existed before this rank, so that it
        has to answer in one timeout. Otherwise rank 0 makes it, and may still import.
        """
        seconds = self._timeout * (STEP_TIMEOUTS if is_made else LONG_TIMEOUTS)
        self.enter("connecting to the store")
        timer = threading.Timer(seconds, lambda: self._end_run(self._make_store_failure(seconds)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # The thread that looks at the main thread. If that has not moved for a timeout, it finds the
    # rank that this one waits for, and ends the run; a rank that moves judges no other. It makes no
    # call that might not return, such as one to the store or the device. It runs until the block
    # has ended, or ends the process.
    def _look(self) -> None:
        last_look = time.monotonic()
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last_look > BEAT_SECONDS + OWN_STALL_SECONDS:
                # This process was stopped itself, and the beats that it has read are old.
                self._moved_at = self._advanced_at = self._answered_at = now
                self._seen.clear()
            last_look = now
            if self._failure is not None:
                self._end_after_report(self._failure)
                return
            self._observe_main_thread(now)
            is_due = self._own_failure is None and now - self._moved_at >= self._timeout
            failure = self._find_verdict(now) if is_due else None
            if failure is not None:
                first_failure = self._report_failure(failure)
                self._wait(lambda: self._has_parted, FAILURE_GRACE_SECONDS)
                self._end_run(first_failure)

    def _observe_main_thread(self, now: float) -> None:
        """Read where the main thread is, and note if it has moved since the last look."""
        counts = {
            name: entered - self._not_collective[name]
            for name, entered in count_collectives().items()
        }
        entered = (self._phase, self.action, {**counts, **self._exchanges})
        if entered != self._last_entered:
            self._last_entered = entered
            self._advanced_at = self._moved_at = now
        stack = read_stack(self._main_thread)
        if stack != self._stack:
            self._stack = stack
            self._moved_at = now

    def _make_beat(self) -> Beat:
        now = time.monotonic()
        return Beat(
            at=", ".join(filter(None, (self._phase, self.action, describe_place(self._stack)))),
            # A step compiles when it meets new shapes.
            patience=LONG_TIMEOUTS if is_compiling(self._stack) else self._patience,
            still=now - self._moved_at,
            quiet=now - self._advanced_at,
            entered=self._last_entered[2],
            node=self._node,
            left=self._has_left or self._failure is not None,
        )

    def _find_verdict(self, now: float) -> Failure | None:
        """Return a failure that names the rank, or store, that this one waits for in vain, or None.

        If this rank is behind itself, the others judge it. Called when the main thread has not
        moved for a timeout. now: by time.monotonic().
        """
        beats = self._read_others(now)
        timeout = self._timeout
        if now - self._answered_at >= timeout:
            # In any phase: the store answers without a thread of Python.
            return self._make_store_failure(now - self._answered_at)
        is_any_unheard = any(beat.unheard >= timeout for beat in beats.values())
        stopped = find_stopped_ranks() if is_any_unheard else set()
        silent = find_silent(beats, timeout, stopped)
        if silent:
            state = "stopped" if stopped.issuperset(silent) else "stopped or unreachable"
            seconds = max(beats[rank].unheard for rank in silent)
            return self._make_failure(f"{name_ranks(silent)} {state} for {seconds:.0f} s")
        behind = find_behind(beats)
        if (
            behind
            and self._rank not in behind
            and all(is_overdue(beats[rank], timeout) for rank in behind)
        ):
            lines = [
                f"rank {rank} has made no progress for {beats[rank].quiet:.0f} s in"
                f" {beats[rank].at}"
                for rank in behind[:4]
            ]
            return self._make_failure("; ".join(lines))
        if beats and are_all_stuck(beats, timeout):
            seconds = min(beat.still for beat in beats.values())
            return self._make_failure(f"no rank has moved for {seconds:.0f} s")
        return None

    def _make_failure(self, text: str) -> Failure:
        key = f"parallel.heartbeat_timeout_seconds={self._timeout:g}"
        wait = self._describe_own_wait()
        return Failure(self._rank, [f"{text}; {wait}; set {key} higher if the run is only slow"])

    def _make_store_failure(self, seconds: float) -> Failure:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return self._make_failure(
            f"the store of the run at {address} (rank 0 or its launcher) is stopped or unreachable"
            f" for {seconds:.0f} s"
        )

    def _describe_own_wait(self) -> str:
        beat = self._make_beat()
        return f"rank {self._rank} waits for {beat.still:.0f} s in {beat.at}"

    # The thread that exchanges beats and failures over the store, until the block has ended or the
    # store is gone. Other threads call the store in `_is_first_to_say` only.
    def _talk(self) -> None:
        while True:
            try:
                self._exchange_beats()
            except RuntimeError:  # the store is gone, with the process that held it
                self._is_store_lost = self._has_parted = True
                return
            if self._closed.is_set():
                return
            self._answered_at = time.monotonic()
            is_ending = self._has_left or self._own_failure is not None or self._failure is not None
            # More often at the end, where ranks wait for each other to have left.
            self._wake.wait(BEAT_SECONDS / 10 if is_ending else BEAT_SECONDS)
            self._wake.clear()

    def _exchange_beats(self) -> None:
        """Write this rank's beat and failure to the store, and read the run's failure from it.

        All beats are read only while this rank ends, or its main thread stands still.
        """
        store = self._store
        assert store is not None
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._make_beat())))
        if self._own_failure is not None:  # it becomes the run's, unless another one was first
            store.compare_set("failed", "", json.dumps(asdict(self._own_failure)))
        still_seconds = time.monotonic() - self._moved_at
        is_ending = self.is_ending or self._has_left or self._own_failure is not None
        if is_ending or still_seconds >= min(2 * BEAT_SECONDS, self._timeout / 4):
            for rank in range(self._size):
                key = f"beat/{rank}"
                beat = Beat(**json.loads(store.get(key))) if store.check([key]) else Beat()
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = (beat, time.monotonic())
        else:
            self._seen.clear()  # the beats would be old when they are needed again
        # Read after the beats: a rank whose beat says `left` because of a failure has written the
        # failure before it.
        if self._failure is None and store.check(["failed"]):
            self._failure = Failure(**json.loads(store.get("failed")))
        beats = [beat for beat, _ in list(self._seen.values())]
        self._has_parted = len(beats) == self._size and all(beat.left for beat in beats)

    def _read_others(self, now: float) -> dict[int, Beat]:
        """Return by rank the last beats of all ranks that have not left, of this one too.

        Empty while `_exchange_beats` does not read them. now: by time.monotonic(), for `unheard`.
        """
        beats = {
            rank: replace(beat, unheard=now - since)
            for rank, (beat, since) in list(self._seen.items())  # a copy: `_talk` changes it
        }
        if beats:
            beats[self._rank] = self._make_beat()
        return {rank: beat for rank, beat in beats.items() if not beat.left}

    # The end of a run.

    def _handle_exception(self, error: Exception) -> None:
        """Report this rank's exception to the others; called by the main thread.

        If another rank is the cause, the process ends here. Otherwise return, so that the exception
        leaves the block.
        """
        self.is_ending = True
        self._wake.set()
        # Errors of gloo have no class of their own: only their text tells them apart.
        is_connection_lost = isinstance(error, RuntimeError) and bool(_GONE.search(str(error)))
        is_lost = isinstance(error, PeerFailedError) or is_connection_lost
        if is_lost:  # the rank that is the cause reports it, or is not heard of any more
            # The beats are read from now on, and `unheard` counts from the first reading.
            self._wait(
                lambda: self._failure is not None or self._is_store_lost or bool(self._find_gone()),
                PEER_LOST_SECONDS + 4 * BEAT_SECONDS,
            )
        cause = self._report_failure(
            self._describe_lost(error) if is_lost else self._describe_error(error)
        )
        if is_lost or (cause.rank != self._rank and not isinstance(error, UserError)):
            time.sleep(REPORT_SECONDS)
            self._end_run(cause)
        if isinstance(error, UserError):
            # Leave out lines that another rank of this machine writes too.
            if cause.rank != self._rank and self._node in cause.nodes:
                error.faults = [fault for fault in error.faults if fault not in cause.lines]
        else:
            hook = sys.excepthook
            # End after the traceback, without Python's shutdown, in which gloo's threads may abort.
            sys.excepthook = lambda *caught: (hook(*caught), errors.end_process(1))[1]
        self._wait(lambda: self._has_parted, FAILURE_GRACE_SECONDS)
        if isinstance(error, UserError) and not error.faults:
            time.sleep(PRINTING_SECONDS)  # a launcher that sees a rank end ends the others

    def _describe_error(self, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return Failure(
                rank=self._rank,
                lines=list(error.faults),
                nodes=[self._node],
                code=error.exit_code,
            )
        line = (
            f"rank {self._rank} failed in {self._phase}: {type(error).__name__}:"
            f" {errors.get_first_line(error)}"
        )
        code = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else PEER_FAILED
        return Failure(
            rank=self._rank,
            lines=[line],
            nodes=[self._node] if self._folder else [],  # a launcher reports its own machine's
            code=code,
        )

    def _describe_lost(self, error: Exception) -> Failure:
        """Return the failure to report when another rank, or the store, is gone without a word."""
        gone = self._find_gone()
        text = f"rank {self._rank} has lost a connection"
        if gone:
            text = f"{name_ranks(sorted(gone))} gone, killed or crashed"
        elif self._is_store_lost:
            text = "the process that holds the rendezvous store (rank 0 or its launcher) is gone"
        # A launcher reports the ranks of its own machine that are gone.
        nodes = {beat.node for beat in gone.values()} if self._folder else set()
        line = f"{text}; {self._describe_own_wait()} ({errors.get_first_line(error)})"
        return Failure(self._rank, [line], nodes=sorted(nodes))

    def _find_gone(self) -> dict[int, Beat]:
        beats = self._read_others(time.monotonic())
        return {rank: beat for rank, beat in beats.items() if beat.unheard >= PEER_LOST_SECONDS}

    def _report_failure(self, failure: Failure) -> Failure:
        """Report a failure; return the run's first one, which may be another rank's."""
        self._own_failure = failure
        self._wake.set()
        self._wait(lambda: self._failure is not None or self._is_store_lost, FAILURE_GRACE_SECONDS)
        return self._failure or failure

    def _end_after_report(self, failure: Failure) -> None:
        """End this process for another rank's failure, once that rank has had time to report it."""
        if self._own_failure is None:
            time.sleep(REPORT_SECONDS)
            # Not while the main thread's exception is on its way out: it may save files, or write
            # its own traceback.
            self._wait(
                lambda: not self.is_ending or self._own_failure is not None, SHUTDOWN_SECONDS
            )
        if self._own_failure is None:
            self._end_run(failure)

    # Ends by os._exit (`end_process`), which a stuck kernel or collective cannot hold up.
    def _end_run(self, failure: Failure) -> None:
        # Never released: of two threads the first one ends the process.
        self._end_lock.acquire()
        # End without the line if another thread, which is stuck, holds the lock of a stream.
        timer = threading.Timer(LINE_SECONDS, lambda: os._exit(failure.code))
        timer.daemon = True
        timer.start()
        if self._node not in failure.nodes and self._is_first_to_say():
            lines = [redact(errors.escape_invisible(line)) for line in failure.lines]
            sys.stderr.write("".join(f"error: {line}\n" for line in lines))
            sys.stderr.flush()
        errors.end_process(failure.code)

    def _is_first_to_say(self) -> bool:
        """Return True on one rank of a machine, which writes the lines; without a store on all."""
        if self._folder:
            try:
                open(Path(self._folder, errors.REPORTED_FILE), "x").close()  # one rank can make it
            except OSError as error:  # a full disk must not swallow the lines
                return not isinstance(error, FileExistsError)
        elif (
            self._store is not None
            and not self._is_store_lost
            # A store that is silent would hold up the end.
            and time.monotonic() - self._answered_at < 4 * BEAT_SECONDS
        ):
            return self._store.add(f"said/{self._node}", 1) == 1
        return True

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        # Polls, since several threads change what `is_ready` reads.
        deadline = time.monotonic() + seconds
        while not is_ready() and time.monotonic() < deadline:
            time.sleep(0.02)


def find_stopped_ranks() -> set[int]:
    """Return the ranks of this run on this machine whose process is stopped, as by SIGSTOP.

    They are found in /proc, on Linux only, by the environment of each process: so also before they
    have imported anything. A process that is busy in a call which lets no thread of Python run is
    not among them, nor one that a debugger holds.
    """
    stopped = set()
    for process in Path("/proc").glob("[0-9]*"):
        # OSError: it has ended, or is another user's. ValueError: it has no RANK.
        with suppress(OSError, ValueError):
            # The state is the first field after the name, which may itself hold parentheses.
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
                variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                if all(variables.get(name) == os.environ.get(name) for name in _RUN):
                    stopped.add(int(variables.get("RANK", "")))
    return stopped


def count_collectives() -> dict[str, int]:
    """Return by name of a process group how many collectives this rank has entered.

    By private methods of torch.distributed, which has no public ones.
    """
    counts = {}
    # A copy: the main thread may make a group meanwhile.
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # of a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            counts[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return counts

"""Ends all ranks of a run, in bounded time and with one line, when one of them fails, is gone, or hangs.

A rank spends much of its time waiting for others, where nothing of Python's runs. So each has two threads. One talks
with the store by which the ranks have met, over a separate connection: it says twice a second that this rank lives
and what its main thread is at, and sees whether another rank has failed. The other one looks where the main thread is,
without a call to the device. If that has not moved for `parallel.heartbeat_timeout_seconds`, it looks for the rank that
is waited for (`beats.py`), and ends the run. A rank that moves itself never ends a run. A process ends by os._exit: a
kernel or a collective that is stuck cannot hold it up.
"""

import ctypes
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, Self, cast

import torch
import torch.distributed as dist

from recipe_lib import errors
from recipe_lib.errors import OUT_OF_MEMORY, PEER_FAILED, StoppedAndSaved, UserError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.hang_detection import beats as rules
from recipe_lib.parallel.hang_detection.beats import Beat, Detail, numbers
from recipe_lib.parallel.hang_detection.peers import (
    PeerFailedError,
    first_line,
    node_name,
    says_gone,
    stopped_ranks,
)
from recipe_lib.redaction import redact
from recipe_lib.report.phases import Phase
from recipe_lib.report.phases import phase as show_phase

BEAT_SECONDS = 0.5  # seconds between two beats
OWN_STALL_SECONDS = 2.0  # seconds by which this process must be late to have been stopped itself
FAILURE_GRACE_SECONDS = 2.5  # seconds that a rank which fails waits for the others to have seen it, before it ends
REPORT_SECONDS = 6.0  # seconds that the others wait for its report: a launcher ends all when the first one ends
SHUTDOWN_SECONDS = 60.0  # seconds for a rank that is on its way out itself, to write what it leaves
LINE_SECONDS = 2.0  # seconds that the last line may take to be written
PEER_LOST_SECONDS = 3.0  # seconds without a beat by which a rank is gone, after an exchange with it has failed
_made = 0  # heartbeats of this process; all ranks make them alike


def start_heartbeat(store: dist.Store, rank: int, size: int, timeout: float) -> "Heartbeat":
    """Return the heartbeat of the ranks that meet at a store, to be entered; of one rank an idle one.

    timeout: seconds, see `parallel.heartbeat_timeout_seconds`.
    """
    global _made
    if size == 1:
        return Heartbeat()
    _made += 1
    return Heartbeat(dist.PrefixStore(f"heartbeat {_made}", store.clone()), rank, size, timeout)


class Heartbeat:
    """Says that this rank lives and where it is, and hears it of the others.

    with start_heartbeat(60.0) as heartbeat:
        heartbeat.enter("step 1", beats.STEP)

    What is raised inside the block ends the other ranks too. Without a store nothing runs, and nothing is watched.
    """

    def __init__(self, store: dist.Store | None = None, rank: int = 0, size: int = 1, timeout: float = 60.0) -> None:
        """store: a separate connection to where the ranks have met; timeout: seconds."""
        self.detail: Detail | None = None
        self.is_ending = False  # an exception is on its way out
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._node = node_name()
        self._folder = os.environ.get(errors.FOLDER_VARIABLE)
        self._pid, self._main, self._once = os.getpid(), this_thread(), threading.Lock()
        self._phase, self._patience = "starting", rules.LONG_SECONDS
        self._base: dict[str, int] = {}  # by process group, the collectives entered before `count_anew`
        self._era = 0
        self._entered: tuple[Any, ...] = ()
        self._stack: list[StackLine] = []
        self._groups: dict[str, list[int]] = {}
        self._where = self._busy = self._lost = ""  # lost: why the store does not answer any more
        self._moved = self._advanced = self._answered = time.monotonic()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._posted, self._heeded, self._told = threading.Event(), threading.Event(), threading.Event()
        self._parted = threading.Event()
        self._failure: dict[str, Any] | None = None  # the run's first, of whatever rank
        self._mine: dict[str, Any] | None = None
        self._looks_around = self._left = False
        self._seen: dict[int, tuple[Beat, float]] = {}  # others' beats, and when their numbers have changed
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._store is not None:
            get_logger().debug("heartbeat: %d ranks, %g seconds", self._size, self._timeout)
            for run in (self._talk, self._look):
                self._threads.append(threading.Thread(target=run, name="heartbeat", daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        self._left = error is None or isinstance(error, StoppedAndSaved)
        if self._left:  # a rank that is stopped now would be missed by nobody
            self.enter("waiting for the others to end")
            self.is_ending = False
            self._looks_around = True
            self._wake.set()
            self._parted.wait()
        elif isinstance(error, Exception):
            self._fail(error)
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_SECONDS)

    def enter(self, phase: str, patience: float = rules.LONG_SECONDS) -> None:
        """Notes what the main thread comes to. patience: how many timeouts that may take, see `beats`."""
        self._phase, self._patience = phase, patience

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Notes what the main thread comes to, and shows it on the terminal, see `report.phases.phase`."""
        self.enter(name)
        with show_phase(name) as going:
            yield going

    def wait_for_store(self, connected: threading.Event, is_made: bool) -> None:
        """End the process unless it is connected in time; runs in a thread of `limit_connecting`."""
        self.enter("connecting to the store")
        waited = 0.0  # counted, since a clock goes on while this process is stopped itself
        while not connected.wait(BEAT_SECONDS):
            waited += BEAT_SECONDS
            if waited < self._timeout:
                continue
            timeouts = rules.STEP_SECONDS if is_made or 0 in stopped_ranks() else rules.LONG_SECONDS
            if waited >= self._timeout * timeouts:
                self._end(self._for_all([self._line(self._without_store(waited), self._beat())], []))

    def count_anew(self) -> None:
        """Notes that the ranks have entered different numbers of collectives so far, as the stages of a pipeline do."""
        if self._store is not None:
            self._era, self._base = self._era + 1, collectives()

    # What the main thread is at, seen from a thread that judges and makes no call that may not return.

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - looked > BEAT_SECONDS + OWN_STALL_SECONDS:  # stopped itself: what it knows of the others is old
                self._moved = self._advanced = self._answered = now
                self._seen.clear()
            looked = now
            if self._failure is not None:
                self._leave(self._failure)
                return
            self._notice(now)
            resting = now - self._moved
            self._looks_around = self.is_ending or self._left or resting >= min(2 * BEAT_SECONDS, self._timeout / 4)
            if not self._looks_around:
                self._seen.clear()  # it would be old when it is wanted again
            verdict = self._verdict(now) if self._mine is None and resting >= self._timeout else None
            if verdict is not None:
                self._end_run(*verdict)
                return

    def _notice(self, now: float) -> None:
        stack = stack_of(self._main)
        groups = {name: [self._era, count - self._base.get(name, 0)] for name, count in collectives().items()}
        entered = self._phase, groups, self.detail.stand()["done"] if self.detail is not None else 0
        if entered != self._entered:
            self._entered, self._groups, self._advanced, self._moved = entered, groups, now, now
        if stack != self._stack:
            self._stack, self._moved = stack, now
            self._where, self._busy = where(stack), busy(stack)

    def _beat(self, number: int = 0) -> Beat:
        now, phase, patience = time.monotonic(), self._phase, self._patience
        if self._busy:
            phase, patience = f"{phase}, {self._busy}", rules.PHASE_TIMEOUTS[self._busy]
        stand = self.detail.stand() if self.detail is not None else None
        still, quiet = now - self._moved, now - self._advanced
        return Beat(number, phase, patience, still, quiet, self._where, self._groups, stand, self._node)

    def _verdict(self, now: float) -> tuple[list[int], str] | None:
        """Whom this rank waits for in vain: ranks that will not hear of it, and the line."""
        own, known, timeout = self._beat(), self._others(now), self._timeout
        if now - self._answered >= timeout:  # in whatever phase: no thread of Python has to run for it to answer
            return [], self._line(self._without_store(now - self._answered), own)
        stopped = stopped_ranks() if any(beat.unheard >= timeout for beat in known.values()) else set()
        found = rules.silent(known, timeout, stopped)
        if found:
            return found, self._line(f"{self._names(found)} {rules.describe_silence(found, known, stopped)}", own)
        stands = {rank: beat.stand for rank, beat in known.items() if beat.stand is not None}
        culprits = self.detail.culprits(stands) if self.detail is not None and len(stands) == len(known) else None
        found = rules.behind(known) if culprits is None else culprits
        if found and all(rules.is_overdue(known[rank], timeout) for rank in found):
            return [], self._line("; ".join(self._words(rank, known[rank]) for rank in found[:4]), own, found)
        if known and rules.all_stand(known, timeout):
            return [], self._line(f"no rank has moved for {min(b.still for b in known.values()):.0f} s", own)
        return None

    def _line(self, text: str, own: Beat, found: Sequence[int] = ()) -> str:
        if self._rank not in found:
            text += f"; {self._words(self._rank, own, waits=True)}"
        key = f"parallel.heartbeat_timeout_seconds={self._timeout:g}"
        return f"{text}; set {key} higher if the run is only slow"

    def _words(self, rank: int, beat: Beat, waits: bool = False) -> str:
        words = self.detail.words(rank, beat.stand) if self.detail is not None and beat.stand is not None else ""
        verb = f"waits for {beat.still:.0f} s" if waits else f"has made no progress for {beat.quiet:.0f} s"
        return words or f"{self._names([rank])} {verb} in {beat.at}"

    def _names(self, ranks: list[int]) -> str:
        return numbers(ranks) if self.detail is None or len(ranks) > 4 else " and ".join(map(self.detail.name, ranks))

    def _without_store(self, seconds: float) -> str:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        first, local = self._rank - int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        others = [rank for rank in range(self._size) if not first <= rank < first + local]
        whom = f", and with it {numbers(others)}," if others else " (rank 0 or its launcher)"
        return f"the store of the run at {address}{whom} is stopped or unreachable for {seconds:.0f} s"

    # The thread that talks with the store, and alone does.

    def _talk(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                self._exchange(number)
            except RuntimeError as error:  # it is gone, with the process that held it
                self._lost = first_line(error)
                self._parted.set()
                return
            if self._closed.is_set():
                return
            self._answered = time.monotonic()
            is_ending = self._left or self._mine is not None or self._failure is not None
            self._wake.wait(BEAT_SECONDS / 10 if is_ending else BEAT_SECONDS)
            self._wake.clear()

    def _exchange(self, number: int) -> None:
        store, beat = self._store, replace(self._beat(number), left=self._left)
        assert store is not None
        store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))
        if self._mine is not None and not self._posted.is_set():
            if store.add("first", 1) == 1:
                store.set("failed", json.dumps(self._mine))
            self._posted.set()
        if self._failure is None and store.check(["failed"]):
            self._failure = json.loads(store.get("failed"))
            store.add("heeded", 1)
        if self._failure is not None:
            if store.add("heeded", 0) >= self._size - len(self._failure["lost"]):
                self._heeded.set()
            if store.check([f"reported/{self._failure['rank']}"]):
                self._told.set()
        elif self._looks_around:
            for rank in range(self._size):
                key, former = f"beat/{rank}", self._seen.get(rank)
                beat = Beat(**json.loads(store.get(key))) if store.check([key]) else Beat()
                is_same = former is not None and former[0].number == beat.number
                self._seen[rank] = beat, former[1] if former is not None and is_same else time.monotonic()
            if self._left and all(beat.left for beat, _ in list(self._seen.values())):
                self._parted.set()

    def _others(self, now: float) -> dict[int, Beat]:
        """What is known of the ranks, this one too, without those that have left in order."""
        seen = {rank: replace(beat, unheard=now - since) for rank, (beat, since) in list(self._seen.items())}
        if seen:
            seen[self._rank] = self._beat()
        return {rank: beat for rank, beat in seen.items() if not beat.left}

    # How it ends.

    def _fail(self, error: Exception) -> None:
        """In the main thread: this rank has failed. If another one is the cause the process ends here, quietly."""
        self.is_ending = self._looks_around = True
        self._wake.set()
        is_lost = isinstance(error, PeerFailedError) or says_gone(error)
        if is_lost:  # who is the cause says so, or is not heard of any more
            self._wait(
                lambda: self._failure is not None or bool(self._lost or self._gone()),
                PEER_LOST_SECONDS + 4 * BEAT_SECONDS,
            )
        cause = self._failure or self._post(self._of_lost(error) if is_lost else self._of_own(error))
        if is_lost or (cause["rank"] != self._rank and not isinstance(error, UserError)):
            self._leave(cause, is_main=True)
        errors.at_end(self._say_told)
        if not isinstance(error, UserError):
            hook = sys.excepthook
            # Not through Python's shutdown, in which threads of gloo may abort.
            sys.excepthook = lambda *caught: (hook(*caught), errors.end_process(1))[1]
        self._heeded.wait(FAILURE_GRACE_SECONDS)

    def _of_own(self, error: Exception) -> dict[str, Any]:
        """This rank's failure, as the others hear of it. nodes: where it is reported without them."""
        code = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else PEER_FAILED
        lines, nodes = [f"{self._names([self._rank])} failed in {self._phase}: {first_line(error)}"], []
        if isinstance(error, UserError):
            code, lines = error.exit_code, list(error.faults)
        if isinstance(error, UserError) or self._folder:
            nodes = [self._node]
        return {"rank": self._rank, "code": code, "lines": lines, "lost": [], "nodes": nodes, "tells": True}

    def _of_lost(self, error: Exception) -> dict[str, Any]:
        """That another rank is gone without a word. A launcher tells of those on its own machine."""
        gone, text = self._gone(), f"{self._names([self._rank])} has lost a connection"
        if gone:
            text = f"{self._names(sorted(gone))} {'is' if len(gone) == 1 else 'are'} gone, killed or crashed"
        elif self._lost:
            text = "the process that holds the rendezvous store (rank 0 or its launcher) is gone"
        line = f"{text}; {self._words(self._rank, self._beat(), waits=True)} ({first_line(error)})"
        return self._for_all([line], sorted(gone), sorted(set(gone.values())) if self._folder else [])

    def _for_all(self, lines: list[str], lost: list[int], nodes: Sequence[str] = ()) -> dict[str, Any]:
        code, rank = PEER_FAILED, self._rank
        return {"rank": rank, "code": code, "lines": lines, "lost": lost, "nodes": list(nodes), "tells": False}

    def _gone(self) -> dict[int, str]:
        """Ranks that are not heard of any more, and their machines."""
        known = self._others(time.monotonic())
        return {rank: beat.node for rank, beat in known.items() if beat.unheard >= PEER_LOST_SECONDS}

    def _end_run(self, lost: list[int], line: str) -> None:
        failure = self._post(self._for_all([line], lost))
        if self._posted.is_set():
            self._heeded.wait(FAILURE_GRACE_SECONDS)
        self._end(failure)

    def _post(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Tells the others; returns the run's first failure, which may be another rank's."""
        self._mine = failure
        self._wake.set()
        self._wait(lambda: self._failure is not None or bool(self._lost), FAILURE_GRACE_SECONDS)
        return self._failure or failure

    def _leave(self, failure: dict[str, Any], is_main: bool = False) -> None:
        """Ends this process because of a failure, when the rank that tells it has had the time to.

        Not while the main thread is on its way out by itself, which writes what the run leaves, or its own traceback.
        """
        if self._mine is not None and not is_main:  # the failure of this rank itself
            return
        sys.excepthook = lambda *_: self._end(failure)  # what is raised meanwhile is a consequence
        if failure["tells"]:
            self._wait(lambda: self._told.is_set() or bool(self._lost), REPORT_SECONDS)
        if not is_main:
            self._wait(lambda: not self.is_ending or self._mine is not None, SHUTDOWN_SECONDS)
        if is_main or self._mine is None:
            self._end(failure)

    def _end(self, failure: dict[str, Any]) -> None:
        self._once.acquire()  # for good: of two threads the first one ends the process
        # A stuck thread may hold what is flushed.
        timer = threading.Timer(LINE_SECONDS, lambda: os._exit(failure["code"]))
        timer.daemon = True
        timer.start()
        self._say(failure)
        errors.end_process(failure["code"])

    def _say(self, failure: dict[str, Any]) -> None:
        """Once a machine, and nothing where it is reported without us."""
        if self._node in failure["nodes"]:
            return
        if self._folder:
            try:
                open(Path(self._folder, errors.SAID_FILE), "x").close()
            except FileExistsError:
                return
            except OSError:
                pass  # a full disk must not swallow the lines
        elif not self._lost and time.monotonic() - self._answered < 4 * BEAT_SECONDS:  # the store may be asked
            if self._store is not None and self._store.add(f"said/{self._node}", 1) > 1:
                return
        sys.stderr.write("".join(f"error: {redact(errors.visible(line))}\n" for line in failure["lines"]))
        sys.stderr.flush()

    def _say_told(self) -> None:
        """At the end of the process of a rank that has failed: what it had to report is reported."""
        if self._store is not None and os.getpid() == self._pid:
            thread = threading.Thread(target=self._store.set, args=(f"reported/{self._rank}", "yes"), daemon=True)
            thread.start()  # apart: the store may be gone, and must not hold up the end
            thread.join(timeout=BEAT_SECONDS)

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)


# What a thread is at, seen from another one: its stack, and the collectives that this process has
# entered.


# What is among the innermost calls while something is compiled, and in no step after that.
_COMPILERS = (
    "/_dynamo/convert_frame.py", "/_dynamo/symbolic_convert.py", "/_dynamo/output_graph.py", "/_inductor/compile_fx.py",
    "/_inductor/async_compile.py", "/_inductor/graph.py", "/_inductor/scheduler.py", "/_inductor/codegen/",
    "/triton/compiler/", "/triton/runtime/autotuner.py",
)  # fmt: skip
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackLine(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


def collectives() -> dict[str, int]:
    """By process group, how many collectives this rank has entered."""
    found = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # of a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            found[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return found


class WatchedThread(NamedTuple):
    """A thread that lives as long as somebody asks for its stack; made in it, by `this_thread`.

    ident: its `threading.get_ident()`. state: the address of its PyThreadState, where one thread's stack can be had.
    """

    ident: int
    state: int | None


def this_thread() -> WatchedThread:
    """The calling thread, for `stack_of` in another one.

    Python 3.11 adds a thread's state to its list before it has filled it: who goes through the list while a thread of
    C++ first calls Python, as those of autograd do in each backward, ends the process with a segmentation fault now and
    then. There the interpreter's own function is asked for the one thread's stack; later versions do not have the race.
    """
    if sys.version_info >= (3, 12) or not hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):
        return WatchedThread(threading.get_ident(), None)
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    return WatchedThread(threading.get_ident(), current())


def stack_of(thread: WatchedThread) -> list[StackLine]:
    """The innermost 100 calls of a thread, innermost first; [] if it is not found.

    As faulthandler writes them, which reads the interpreter's frames and makes no objects of them. Where the thread is
    within torch.compile, which runs frames of its own, the objects that `sys._current_frames` makes end the process
    with a segmentation fault now and then.
    """
    with suppress(OSError), _scratch() as file:
        if thread.state is None:
            faulthandler.dump_traceback(file, all_threads=True)
            heading = f"Thread 0x{thread.ident:016x} (most recent call first):\n"
        else:  # called with the interpreter's lock, so that the thread's frames stay as they are
            dump = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(("_Py_DumpTraceback", ctypes.pythonapi))
            dump(file.fileno(), thread.state)
            heading = "Stack (most recent call first):\n"
        file.seek(0)
        _, found, rest = file.read().decode("utf-8", "replace").partition(heading)
        if found:
            calls = _CALL.findall(re.split(r"^\S|^$", rest, maxsplit=1, flags=re.MULTILINE)[0])
            return [StackLine(name, int(line), function) for name, line, function in calls]
    return []


def _scratch() -> BinaryIO:
    """A file in memory where there is such a thing: disks fill up."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b", buffering=0)
    return cast(BinaryIO, TemporaryFile(buffering=0))


def where(stack: list[StackLine]) -> str:
    """`training/loop.py:120 (finish)`: the innermost place that is not torch's."""
    for call in stack:
        if "/torch/" not in call.file:
            return f"{'/'.join(Path(call.file).parts[-2:])}:{call.line} ({call.function})"
    return ""


def busy(stack: list[StackLine]) -> str:
    """A key of `beats.PHASE_TIMEOUTS`, or ""."""
    for what, places in (("in a debugger", _DEBUGGERS), ("compiling", _COMPILERS)):
        if any(place in call.file for call in stack for place in places):
            return what
    return ""

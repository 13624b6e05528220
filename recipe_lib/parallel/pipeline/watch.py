"""Ends all ranks of a run, in bounded time, when one of them fails in a pipeline or stands still, with one line.

A rank of a pipeline spends much of a step waiting for another, where nothing of Python's runs. So each has a thread
that looks every second at the store by which the ranks have met: has another one failed; and at how far its own work
is. A rank that has not come to anything new for `parallel.pipeline_timeout` seconds asks all others where they stand,
and tells who of them waits for nobody, or does not answer.

On a GPU the host is ahead of the work that it has queued: there the work itself marks how far it is, by events.
"""

import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib import errors
from recipe_lib.config.pipeline import rank_of_stage
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import OUT_OF_MEMORY, PEER_FAILED, UserError
from recipe_lib.ops.device import holds_values
from recipe_lib.parallel.pipeline.schedules import COMPUTE, Action
from recipe_lib.parallel.pipeline.standstill import (
    BETWEEN,
    COMPUTES,
    WAITS,
    Ranks,
    Stand,
    culprits,
    silent,
    standstill_line,
    to_json,
)
from recipe_lib.parallel.world import World

EVERY = 1.0  # seconds between two looks
ANSWERING = 4.0  # seconds that all ranks have to answer in
HEEDING = 2.5  # seconds that a rank which fails waits for the others to have seen it, before it ends
TELLING = 6.0  # seconds that the others wait for it to tell what happened: a launcher ends all when the first one ends
_FAILED, _HEEDED, _FIRST = "pipeline/failed", "pipeline/heeded", "pipeline/first"
_FROM_BEFORE = ("F", "RF", "SB")  # kinds of actions that take from the stage before, or send to it
_GONE = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|ncclRemoteError|Socket Timeout")

_current: "tuple[Any, Watch] | None" = None
_made = 0  # watches of this process; all ranks make them alike


def watch_over(world: World, parallel: ParallelConfig) -> "Watch":
    """The watch of this process, one for all its pipelines. In a simulation it only notes, and no thread runs."""
    global _current, _made
    if world.size == 1 or not holds_values(world.device) or dist.get_backend() == "fake":
        return Watch(world, parallel, None)
    group = dist.distributed_c10d._get_default_group()
    if _current is None or _current[0] is not group or _current[1].parallel != parallel:
        if _current is not None:
            _current[1].stop()
        _made += 1
        store = dist.distributed_c10d._get_default_store().clone()
        _current = group, Watch(world, parallel, dist.PrefixStore(f"watch {_made}", store))
    return _current[1]


class Watch:
    """What a rank is at, and whether any rank of the run has failed."""

    def __init__(self, world: World, parallel: ParallelConfig, store: dist.Store | None) -> None:
        """store: a connection of its own to where the ranks have met; None: nothing is watched, only noted."""
        self.parallel = parallel
        self._rank, self._ranks = world.rank, Ranks(parallel, world.size)
        self._timeout, self._store = parallel.pipeline_timeout, store
        self._members = world.pipeline.ranks if world.pipeline is not None else (world.rank,)
        self._device, self._on_device = world.device, world.device.type == "cuda"
        self._done, self._own_failure, self._is_leaving = 0, False, False
        self._crashed = False
        self._host = self._reached = (Stand(), time.monotonic())  # of the host, and of the work that it has queued
        self._marks: deque[tuple[Any, Stand]] = deque()
        self._lock = threading.Lock()
        self._asked, self._ask_again = 0, 0.0
        self._question: tuple[int, float] | None = None  # of this rank: its number, and until when it may be answered
        self._looked = time.monotonic()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """A run of a rank's actions. What is raised inside ends the other ranks; this one goes on as it would.

        If the cause is another rank this process ends here, without a traceback of its own.
        """
        if self._store is not None and not self._threads:
            self._start()
        try:
            yield
        except Exception as error:
            if self._store is not None:
                self._fail(error)
            raise
        finally:
            self._note(Stand())

    def at(self, action: Action) -> None:
        """Notes what comes now. An exchange counts as waiting for the other rank: what is sent until it is taken."""
        self._note(Stand(COMPUTES, action.stage, action.kind, action.micro_batch))
        if action.kind not in COMPUTE:
            self.waits()

    def waits(self) -> None:
        """Notes that the action waits for the rank that has the stage before it, or behind it."""
        stand = self._host[0]
        stage = stand.stage + (-1 if stand.kind in _FROM_BEFORE else 1)
        other = self._members[rank_of_stage(self._ranks.parallel, stage)]
        self._note(replace(stand, what=WAITS, other=other))

    def computes(self) -> None:
        """Notes that what the action has waited for is there."""
        self._note(replace(self._host[0], what=COMPUTES, other=-1))

    def stop(self) -> None:
        """Ends the threads."""
        self._stopped.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2 * EVERY)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook

    def _note(self, stand: Stand) -> None:
        self._done += 1
        stand = replace(stand, done=self._done)
        self._host = stand, time.monotonic()
        if self._on_device and self._store is not None:
            with suppress(RuntimeError):  # a device that has failed takes no more marks, and says so by itself
                event = torch.cuda.Event()
                event.record()
                self._marks.append((event, stand))

    def _where(self) -> tuple[Stand, float]:
        """What the work is at, and since when; on a GPU as far as it has been seen."""
        if not self._on_device:
            return self._host
        with self._lock:
            try:
                while self._marks and self._marks[0][0].query():
                    self._reached = self._marks.popleft()[1], time.monotonic()
            except RuntimeError:  # the device has failed: its error comes to the host by itself
                return self._host
            return self._reached

    def _start(self) -> None:
        for run in (self._look_out, self._look_after):
            self._threads.append(threading.Thread(target=run, name="pipeline watch", daemon=True))
            self._threads[-1].start()
        errors.at_end(self._say_left)
        self._hook, sys.excepthook = sys.excepthook, self._uncaught

    def _say_left(self) -> None:
        """At an orderly end of the process: it will not answer any more, and need not."""
        if self._store is None or self._stopped.is_set() or self._crashed or self._own_failure or self._is_leaving:
            return
        self.stop()
        thread = threading.Thread(target=self._store.set, args=(f"pipeline/left/{self._rank}", "yes"), daemon=True)
        thread.start()  # apart: the store may be gone, and must not hold up the end
        thread.join(timeout=EVERY)

    def _choose_device(self) -> None:
        """So that a thread which looks at a mark takes nothing of the first GPU."""
        if self._on_device and torch.cuda.is_available():
            torch.cuda.set_device(self._device)

    def _look_out(self) -> None:
        """The thread that talks with the store."""
        self._choose_device()
        while not self._stopped.wait(EVERY):
            try:
                failure = self._failure()
                if self._own_failure:
                    return
                if failure is not None:
                    self._leave(failure)
                self._answer()
                self._ask()
            except RuntimeError as error:  # the store is gone, with the process that held it
                self._end_without_store(error)
                return
            self._looked = time.monotonic()

    def _look_after(self) -> None:
        """The thread that ends the process if the store does not answer, as of a machine that is gone."""
        self._choose_device()
        while not self._stopped.wait(EVERY):
            (stand, since), now = self._where(), time.monotonic()
            if stand.what == BETWEEN or now - since < self._timeout + 2 * ANSWERING:
                continue
            if now - self._looked > ANSWERING + 2 * EVERY:
                self._end_without_store(RuntimeError("no answer"))

    def _failure(self) -> dict[str, Any] | None:
        assert self._store is not None
        return json.loads(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None

    def _answer(self) -> None:
        """If a rank has asked, tells where this one stands."""
        assert self._store is not None
        if not self._store.check([f"pipeline/asked/{self._asked + 1}"]):
            return
        self._asked += 1
        stand, since = self._where()
        told = json.dumps(to_json(replace(stand, seconds=time.monotonic() - since)))
        self._store.set(f"pipeline/stand/{self._asked}/{self._rank}", told)

    def _ask(self) -> None:
        """If nothing has moved for long, asks all ranks and, when they have answered, ends the run if it is clear whom
        they wait for.

        Between two steps ranks may work as long as they like, and too hard to answer: there only one that does not
        answer for as long again ends the run.
        """
        assert self._store is not None
        (stand, since), now = self._where(), time.monotonic()
        if now - since < self._timeout:
            self._question = None
        elif self._question is not None:
            self._judge(*self._question, outside=stand.what == BETWEEN)
        elif now >= self._ask_again:
            self._ask_again = now + max(ANSWERING, self._timeout / 4)
            number = self._asked + 1
            if self._store.add(f"pipeline/asked/{number}", 1) == 1:  # else another one has, just now
                self._question = number, now + (max(ANSWERING, self._timeout) if stand.what == BETWEEN else ANSWERING)
                self._answer()

    def _judge(self, number: int, until: float, outside: bool) -> None:
        """Ends the run if the answers to a question, all of them or those until a time, say who holds it up."""
        store = self._store
        assert store is not None
        there = [rank for rank in range(self._ranks.size) if not store.check([f"pipeline/left/{rank}"])]
        keys = {rank: f"pipeline/stand/{number}/{rank}" for rank in there}
        if not store.check(list(keys.values())) and time.monotonic() < until:
            return
        self._question = None
        stands = {
            rank: Stand(**json.loads(store.get(key))) if store.check([key]) else None for rank, key in keys.items()
        }
        found = silent(stands) if outside else culprits(stands, self._ranks, self._timeout)
        if found and self._publish(PEER_FAILED):
            _tell(standstill_line(stands, found, self._ranks, self._rank, self._timeout))
            self._await(self._heeded, HEEDING)
            _end(PEER_FAILED)

    def _publish(self, code: int, wait: float = 0.0) -> bool:
        """Tells all ranks to end with a code, after so many seconds; False: another rank has done so before."""
        assert self._store is not None
        if self._store.add(_FIRST, 1) > 1:
            return False
        self._own_failure = True
        self._store.set(_FAILED, json.dumps({"code": code, "wait": wait}))
        return True

    def _fail(self, error: Exception) -> None:
        """An exception in an action: the others are to end; this process too, here, if another one is the cause."""
        stand = self._host[0]
        try:
            if self._failure() is not None or (not _says_gone(error) and not self._publish(_code_of(error), TELLING)):
                self._await(lambda: self._failure() is not None, TELLING)
                self._leave(self._failure() or {"code": PEER_FAILED, "wait": 0})
        except RuntimeError:
            pass  # the store is gone, with the process that held it
        if _says_gone(error):
            self._end_for(stand, error)
        self._explain(error, self._ranks.name(self._rank, stand.stage), stand.action)
        self._await(self._heeded, HEEDING)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What nobody has caught, outside of actions too. That another rank is gone is told in one line; else the
        others end because of this one."""
        self._crashed = True
        if isinstance(error, RuntimeError) and _says_gone(error) and not self._own_failure:
            self._fail(error)
        self._hook(kind, error, trace)
        try:
            if issubclass(kind, Exception) and not self._own_failure and self._publish(PEER_FAILED, TELLING):
                self._await(self._heeded, HEEDING)
        except RuntimeError:
            pass  # the store is gone
        if isinstance(error, Exception):
            _end(1)  # not through Python's shutdown, in which these threads and gloo's may abort

    def _explain(self, error: Exception, who: str, action: str) -> None:
        """Says where it was: in the lines of a user's error, in a note for whoever explains it, or at once."""
        if isinstance(error, UserError):
            error.faults = [f"{fault} ({who}, {action})" for fault in error.faults]
        elif isinstance(error, torch.OutOfMemoryError):
            error.add_note(f"{who}, {action}")
        else:
            _tell(f"pipeline: {who} failed in {action}: {type(error).__name__}: {_first_line(error)}")

    def _heeded(self) -> bool:
        """Whether all others know."""
        try:
            return self._store is None or self._store.add(_HEEDED, 0) >= self._ranks.size - 1
        except RuntimeError:
            return True

    def _leave(self, failure: dict[str, Any]) -> None:
        """Ends this process because of what another rank has published, when that one has had the time to tell it."""
        sys.excepthook = lambda *_: _end(failure["code"])  # what is raised meanwhile is a consequence
        try:
            if self._store is not None and not self._is_leaving:
                self._is_leaving = True
                self._store.add(_HEEDED, 1)
        except RuntimeError:
            pass  # it is gone already
        time.sleep(failure["wait"])
        _end(failure["code"])

    def _end_for(self, stand: Stand, error: BaseException) -> None:
        """Another rank is gone without a word: ends all that are left."""
        self._crashed = True
        mine, why = self._ranks.name(self._rank, stand.stage), _first_line(error)
        if stand.what == WAITS:
            line = f"{self._ranks.name(stand.other)} is gone; {mine} waited for it, for {stand.action} ({why})"
        else:
            line = f"a rank that {mine} exchanges with is gone; this one was {stand.where} ({why})"
        try:
            told = self._publish(PEER_FAILED)
        except RuntimeError:
            told = True
        if told:
            _tell(f"pipeline: {line}; see what ended it")
            self._await(self._heeded, HEEDING)
        _end(PEER_FAILED)

    def _end_without_store(self, error: BaseException) -> None:
        """The store is gone or does not answer: between two steps that may be the end of the run."""
        stand = self._where()[0]
        if stand.what == BETWEEN:
            return
        time.sleep(TELLING)  # what its end causes here is often told by the action itself
        if self._stopped.is_set() or self._own_failure:
            return
        self._crashed = True
        mine = self._ranks.name(self._rank, stand.stage)
        _tell(
            f"pipeline: the process that holds the run's store (rank 0, or its launcher) is gone or stands still; "
            f"{mine} is {stand.where} ({_first_line(error)}); see what ended it"
        )
        _end(PEER_FAILED)

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)


def _says_gone(error: BaseException) -> bool:
    """Whether an error is that another process is not there any more: gloo's are plain ones, told by their text."""
    return isinstance(error, RuntimeError) and bool(_GONE.search(str(error)))


def _code_of(error: BaseException) -> int:
    """What the other ranks end with."""
    if isinstance(error, UserError):
        return error.exit_code
    return OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else PEER_FAILED


def _first_line(error: BaseException) -> str:
    """What it says; of gloo's without the place in its source, and what it goes on to suppose."""
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[") and "/gloo/" in text else text


def _tell(line: str) -> None:
    sys.stderr.write(f"error: {errors.visible(line)}\n")
    sys.stderr.flush()


def _end(code: int) -> None:
    """Ends the process, even if a thread that is stuck holds what flushing takes."""
    timer = threading.Timer(EVERY, lambda: os._exit(code))
    timer.daemon = True
    timer.start()
    errors.end_process(code)

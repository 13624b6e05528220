"""Work on many pieces in several processes, its results in order."""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from recipe_lib.errors import SetupError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

AHEAD = 4  # pieces for each process that may be done before the first of them is taken

_work: Callable[[Any], Any] | None = None  # in a worker: what it does


def worker_count(wanted: int | None, shared_by: int = 1) -> int:
    """Processes to work with; wanted: `data.num_proc`, per machine. shared_by: how many of us do the same work on it.

    One where a fork is no longer safe, since a process group or a device has threads that a fork does not have; and in
    a daemonic process, which may have no children.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if grouped or _device_in_use() or multiprocessing.current_process().daemon:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (wanted or cores) // shared_by)


def drop_dead_groups() -> None:
    """Collect the process group that a run before has left in this process, if there is one; called before a fork.

    A fork in which the group's last reference goes away crashes or hangs (docs/upstream/gloo_group_in_fork.md).
    """
    if not dist.is_available() or dist.is_initialized():
        return
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            names.append(file.read_text())
    if any("gloo" in name for name in names):
        gc.unfreeze()
        gc.collect()


def in_order(work: Callable[[Piece], Result], pieces: Sequence[Piece], workers: int) -> Generator[Result, None, None]:
    """`work` of each piece, in the order of the pieces, by so many forks of this process; 1: here.

    A piece and its result go through pipes, `work` does not. Raises SetupError if a worker is killed.
    """
    workers = min(workers, len(pieces))
    if workers <= 1:
        yield from map(work, pieces)
        return
    done: deque[Future[Result]] = deque()
    try:
        with forks(work, workers) as submit:
            for piece in pieces:
                done.append(submit(piece))
                if len(done) >= AHEAD * workers:
                    yield done.popleft().result()
            while done:
                yield done.popleft().result()
    except BrokenProcessPool:
        raise SetupError(
            f"data.num_proc: one of {workers} processes that tokenize was killed (out of memory?); lower data.num_proc"
        ) from None


@contextmanager
def forks(work: Callable[[Piece], Result], workers: int) -> Iterator[Callable[[Piece], Future[Result]]]:
    """`workers` forks of this process; what is yielded has one of them do `work` of a piece.

    A piece and its result go through pipes, `work` does not. Futures raise BrokenProcessPool if a fork was killed.
    """
    drop_dead_groups()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(work,))
    try:
        yield functools.partial(_submit, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, piece: Any) -> Future[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread at a fork; those that are here hold no lock that a worker takes.
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        return pool.submit(_run, piece)


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    gc.freeze()  # what the parent left for collection is not ours to end
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)


def _device_in_use() -> bool:
    """Whether a CUDA context exists, without making one."""
    module = sys.modules.get("torch.cuda")
    return module is not None and bool(module.is_initialized())

"""Run a function on several gloo ranks: `run_ranks(function, 2, argument)`.

Each rank is a fork of the test process, which has torch imported already. `run_in_fork` decorates
a test that compiles.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx  # noqa: F401  # so that no rank pays for the import, as for the next
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh

from recipe_lib.parallel import world
from recipe_lib.report.page import load_page_template

load_page_template()  # before ranks are forked, each of whose runs ends with a page

_GRACE_SECONDS = 3.0  # how long the other ranks may go on after one has failed
_STACKS = signal.SIGUSR2  # makes a rank write the stacks of its threads


class RankFailure(AssertionError):  # noqa: N818  (what a failing test shows)
    """One or more ranks failed; the message holds their tracebacks and what they wrote."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    process_group: bool = True,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` processes at once; return the ranks' results in rank order.

    fn: any function, closures included (the ranks are forks). It may return None, numbers, strings,
    tensors, and lists, tuples and dicts of those. What a rank prints appears only when one fails.
    timeout: seconds. process_group: initialize a gloo group in each rank, for `start_world`.

    In each rank RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
    as torchrun sets them, and torch uses one thread.

    Raises RankFailure when a rank raises, exits or is still running after `timeout`, with the
    stacks of its threads, or of the one that crashed. No process outlives the call.
    """
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    with TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        port = find_free_port()
        processes = [
            context.Process(
                target=_run_rank,
                args=(fn, args, rank, world_size, folder, port, process_group),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        timed_out = _wait(processes, timeout)
        failures = [
            f"--- rank {rank}: {_explain_end(process, rank, folder, timed_out)}"
            for rank, process in enumerate(processes)
            if process.exitcode != 0
        ]
        if failures:
            raise RankFailure("\n".join(failures))
        return [
            torch.load(folder / f"result{rank}", weights_only=True) for rank in range(world_size)
        ]


def run_in_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that compiles so that it runs in a process of its own.

    Else compiled code and the compiler's threads would stay in the test process, of which later
    tests fork their ranks.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_ranks(functools.partial(test, *args, **kwargs), 1, timeout=300, process_group=False)

    return run


def _run_rank(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: Path,
    port: int,
    process_group: bool,
) -> None:
    """Set up one rank, call `fn` in it, write its result or traceback, and end the process."""
    # A dead process group of the parent must not be collected here: it would wait for the parent's
    # threads, which a fork does not have.
    gc.freeze()
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # pytest has replaced both by its own.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(_STACKS, file=sys.stderr)
    code = 1
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        torch.set_num_threads(1)
        _forget_compile_threads()
        _tell_meshes_apart()
        if process_group:
            store = dist.FileStore(str(folder / "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
            _share_meshes()
        result = fn(*args)
        torch.save(result, folder / f"result{rank}")
        code = 0
    # SystemExit and KeyboardInterrupt too: the test shows whatever ended the rank.
    except BaseException:
        (folder / f"traceback{rank}").write_text(traceback.format_exc())
        raise  # ends at os._exit below
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the exit handlers of the test process, pytest's among them


def _forget_compile_threads() -> None:
    """Drop inductor's pool of threads, if the test process has compiled.

    A fork has no threads but its own: a rank that compiles would wait for the pool's for ever.
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()


def _tell_meshes_apart() -> None:
    """Make meshes of this rank unequal to those that the test process has built.

    DTensor caches an operator's sharding by its meshes. A rank would otherwise get the entry of an
    equal mesh that the test process has built for another rank of a simulated world.
    """
    original = DeviceMesh.__init__

    def init_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        # A part of `==` and of the hash; there is no public way to tell two meshes apart.
        mesh._thread_id = os.getpid()
        mesh._hash = None  # computed anew

    DeviceMesh.__init__ = init_mesh  # type: ignore[method-assign]


def _share_meshes() -> None:
    """Let worlds of one shape share their mesh, as long as the process group is the same.

    A mesh's groups, each with threads and sockets, live as long as the process: a rank that starts
    many worlds would have hundreds.
    """
    original = world.init_device_mesh
    meshes: dict[tuple[Any, ...], DeviceMesh] = {}

    def init_device_mesh(
        device: str, shape: tuple[int, ...], **names: tuple[str, ...]
    ) -> DeviceMesh:
        key = (dist.group.WORLD, device, shape, *names.items())
        if key not in meshes:
            meshes[key] = original(device, shape, **names)
        return meshes[key]

    world.init_device_mesh = init_device_mesh  # type: ignore[assignment]


def _wait(processes: Sequence[BaseProcess], timeout: float) -> bool:
    """Wait for all ranks, or briefly after the first failure, then kill the rest.

    Returns True if time ran out.
    """
    deadline = time.monotonic() + timeout
    failed = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.01)
    running = [process for process in processes if process.is_alive()]
    timed_out = bool(running) and not failed
    if timed_out:
        for process in running:
            os.kill(process.pid or 0, _STACKS)
        time.sleep(0.5)  # for the stacks to be written
    for process in running:
        process.kill()
    for process in processes:
        process.join()
    return timed_out


def _explain_end(process: BaseProcess, rank: int, folder: Path, timed_out: bool) -> str:
    """Return why a rank failed: its traceback, or how it was ended, and what it printed."""
    report = folder / f"traceback{rank}"
    if report.exists():
        why = report.read_text()
    elif process.exitcode == -9:  # killed by `_wait`
        why = (
            "still running when time ran out" if timed_out else "ended because another rank failed"
        )
    else:
        why = f"exit code {process.exitcode}"
    output = folder / f"output{rank}"
    printed = output.read_text(errors="replace") if output.exists() else ""
    # The first lines of a crash's report name what crashed; the last are the failing test's.
    if len(printed) > 8000:
        printed = f"{printed[:4000]}\n[...]\n{printed[-4000:]}"
    return f"{why}\n{printed}".rstrip()


def import_compiler() -> None:
    """Compile a small module, so that the compiler is imported before ranks that compile fork."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
    torch.compile(layer, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()


def find_free_port() -> int:
    """Return a port of this machine that nobody listens on at the moment.

    The system gives ports to others, such as gloo's of tests beside this one, from a range that
    begins at 32768 (Linux) or 49152. One below is not given away before the caller listens on it.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)  # tests seed other sources of random numbers
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

"""Works of asynchronous collectives in a simulation: which call made each, and who waits for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from recipe_lib.plan.trace import OP, WORK_WAIT, Op
from recipe_lib.plan.tracing.tracer import Tracer

_STARTING = (
    "send", "recv", "recv_anysource", "allreduce", "broadcast", "reduce", "allgather", "_allgather_base",
    "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "gather", "scatter", "barrier",
)  # fmt: skip


@contextmanager
def following_works(tracer: Tracer) -> Iterator[None]:
    """Inside, a tracer and its checker learn which works a fake process group returns, and of each wait for one."""
    checker, asynchronous = tracer.checker, set[int]()
    group, work = dist.ProcessGroup, torch._C._distributed_c10d.FakeWork
    alive: list[Any] = []  # works are known by their id, which another may have when one is gone

    def starting(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found, ops = original.__get__(args[0])(*args[1:], **kwargs), tracer.trace.ops
            alive.append(found)
            collective = ops[-1].collective if ops else None
            if collective is not None and not collective.waits:
                asynchronous.add(id(found))
            if checker is not None:
                checker.started(found)
            return found

        return run

    wait = work.wait

    def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in asynchronous:
            asynchronous.discard(id(self))
            op = Op(WORK_WAIT, tracer.stream(), *tracer.place(), tracer.phase)  # for the oldest that the stream issued
            tracer.trace.ops.append(op)
            tracer.trace.events.append((OP, len(tracer.trace.ops) - 1))
        if checker is not None:
            checker.waited_for_work(self, tracer.stream())
        return wait(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(work, "wait", waited))
        for name in _STARTING:
            if name in vars(group):
                stack.enter_context(mock.patch.object(group, name, starting(vars(group)[name])))
        yield

"""Tensors on their way between the ranks of a pipeline: received into new memory, and let go when they were taken."""

import queue
import threading
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_lib.parallel.world import World


class Arriving:
    """A tensor that is being received. No memory is there before, and none is used again."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        """The tensor, when it is there: the host waits for gloo, the device's stream for NCCL."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Transport:
    """What one rank of a pipeline sends to and receives from the others.

    Two ranks have to exchange their tensors in one order, which is the schedule's affair: NCCL knows no tags. gloo
    does, and gets them, so that there a mistake would be noticed.
    """

    def __init__(self, world: World) -> None:
        assert world.pipeline is not None
        self._group = world.mesh.get_group("pipeline")
        self._ranks = world.pipeline.ranks
        self._device = world.device
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._waiter: _Waiter | None = None

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, place: int, tag: int) -> Arriving:
        """Asks the rank at `place` of the pipeline for a tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return Arriving(tensor, dist.irecv(tensor, self._ranks[place], group=self._group, tag=tag))

    def send(self, tensor: Tensor, place: int, tag: int) -> None:
        """Sends it to the rank at `place`; it is held here until that rank has it."""
        self.let_go()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[place], group=self._group, tag=tag)
        if self._device.type != "cpu":
            self._leaving.append((tensor, work))
            return
        if self._waiter is None:
            self._waiter = _Waiter()
        self._waiter.wait_for(work, tensor)

    def let_go(self) -> None:
        """Drops what has been taken; waits for nothing."""
        while self._leaving and self._leaving[0][1].is_completed():
            self._leaving.popleft()

    def finish(self) -> None:
        """Waits until everything has been taken; on a GPU it is the device's stream that waits."""
        while self._leaving:
            self._leaving.popleft()[1].wait()
        if self._waiter is not None:
            self._waiter.finish()


class _Waiter:
    """A thread that waits for sends one by one: of gloo's none says that it is done unless it is waited for."""

    def __init__(self) -> None:
        self._sent: queue.Queue[list[Any]] = queue.Queue()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="pipeline sends", daemon=True).start()

    def wait_for(self, work: Any, tensor: Tensor) -> None:
        """Holds the tensor until its send is done."""
        self._sent.put([work, tensor])

    def finish(self) -> None:
        """Waits for all of them; raises what one of them raised."""
        self._sent.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while True:
            entry = self._sent.get()
            try:
                entry[0].wait()
            except RuntimeError as error:  # the other rank is gone, or too slow: told when the step ends
                self._error = error
            entry.clear()
            self._sent.task_done()

"""Tensors on their way between the ranks of a pipeline: received into new memory, and held until they are taken."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipe_lib.errors import SetupError
from recipe_lib.parallel.world import World


class OnItsWay:
    """A tensor that is being received or sent, held until somebody has waited for it."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    @property
    def is_here(self) -> bool:
        """Whether it is of this rank, and not to be waited for."""
        return self._work is None

    def wait(self) -> Tensor:
        """The tensor, when it is there, or taken: the host waits for gloo, the device's stream for NCCL."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Transport:
    """What one rank of a pipeline sends to and receives from the others.

    Two ranks have to exchange their tensors in one order, which is the schedule's affair: NCCL knows no tags. gloo
    does, and gets them, so that there a mistake would be noticed. Ranks that wait for different ones must not wait for
    each other: NCCL gives each pair a communicator and a stream each, as long as the process group was not made
    with `device_id` and transfers are not batched; with one stream for all, interleaved schedules would hang.
    """

    def __init__(self, world: World, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: places of all ranks of the pipeline that exchange tensors, the lower first.

        Makes the communicator of each pair: else this would be in the middle of the first step, where a rank's host
        waits for the other while kernels of other pairs run. In one order for all, so that no ranks wait in a circle.
        Raises SetupError for a process group with one communicator for all.
        """
        assert world.pipeline is not None
        self._group = world.mesh.get_group("pipeline")
        self._ranks = world.pipeline.ranks
        self._device = world.device
        _check_streams_of_pairs(self._group)
        for low, high in sorted(pairs):
            if world.pipeline.rank == low:
                self.send(torch.zeros(1, device=self._device), high, tag=0).wait()
            elif world.pipeline.rank == high:
                self.receive((1,), torch.float32, low, tag=0).wait()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, place: int, tag: int, device: torch.device | None = None
    ) -> OnItsWay:
        """Asks the rank at `place` of the pipeline for a tensor, on the rank's device or the one where it was sent."""
        tensor = torch.empty(shape, dtype=dtype, device=device or self._device)
        return OnItsWay(tensor, dist.irecv(tensor, self._ranks[place], group=self._group, tag=tag))

    def send(self, tensor: Tensor, place: int, tag: int) -> OnItsWay:
        """Sends it to the rank at `place`."""
        tensor = tensor.contiguous()
        return OnItsWay(tensor, dist.isend(tensor, self._ranks[place], group=self._group, tag=tag))


def _check_streams_of_pairs(group: Any) -> None:
    for one in (group, dist.group.WORLD):
        if getattr(one, "bound_device_id", None) is not None:
            raise SetupError(
                "parallel.pipeline: found a process group that was made with device_id, expected one without: NCCL "
                "would exchange all tensors on one stream, and interleaved schedules would hang; remove device_id "
                "from init_process_group"
            )


def sum_with(other: int, parameter: Tensor, transport: Transport) -> None:
    """Adds the gradient that the rank at another place has of the same parameter to this rank's; both call it.

    One of the two is at place 0. Without a gradient, which is so on both, nothing is done.
    """
    if parameter.grad is None:
        return
    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    # In one order for the two, as everywhere: first the first rank's, then the last one's.
    sent = transport.send(own, other, tag=0) if other != 0 else None
    received = transport.receive(tuple(own.shape), own.dtype, other, 0, own.device).wait()
    (sent or transport.send(own, other, tag=0)).wait()  # before it is written to
    own.add_(received)

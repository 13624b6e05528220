"""Whole models on every data rank (`parallel.strategy: ddp`), whose gradients are summed once a
step.

A rank holds all parameters of its stage and of its part of a tensor-parallel group, their gradients
and their states; nothing is gathered, in forward, backward or evaluation. What is sent is one
all-reduce of the trained gradients a step, however many micro-batches it has: with adapters a few
MiB, where sharding gathers the frozen weights twice a micro-batch.

The sum comes after the last backward, not during it: a rank waits for all of it. Gradients that are
small are packed into buckets, so that the sum takes no memory but two of these; large ones are
summed where they are.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import MemoryConfig, ParallelConfig
from recipe_lib.parallel.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
BUCKET_ELEMENTS = 2**24  # 32 MiB in bf16, 64 MiB in fp32
_BUCKETS = 2  # at a time: one is filled while the other is summed


@dataclass(frozen=True)
class Replicas:
    """A model that every data rank has whole.

    ranks: how many there are. dtype: that gradients are summed in; None: their own.
    """

    ranks: int
    dtype: torch.dtype | None


def find_replicas(parallel: ParallelConfig, memory: MemoryConfig, world: World) -> Replicas | None:
    """Return the replicas of a model that `shard_model` leaves whole; None for one that is sharded,
    as by `auto` that nobody has decided, or the only one.
    """
    if parallel.strategy != "ddp" or (world.copies == 1 and not memory.cpu_offload):
        return None
    return Replicas(world.copies, DTYPES[parallel.reduce_dtype] if parallel.reduce_dtype else None)


@torch.no_grad()
def sum_replica_gradients(model: nn.Module, replicas: Replicas, world: World) -> None:
    """Sum the trained gradients of a replicated model over the data ranks, in place.

    Once a step, after its last backward. The same parameters have gradients on all ranks: those
    without one are left out. Of a parameter that a tensor-parallel group shares, the rank's part is
    summed over the ranks with that part. Next to the gradients there are at most two buckets of
    BUCKET_ELEMENTS. A collective.
    """
    group = world.mesh.get_group("data_replicate")
    waiting: deque[Callable[[], None]] = deque()
    for pieces, dtype in _fill_buckets(model.parameters(), replicas.dtype):
        while len(waiting) == _BUCKETS:
            waiting.popleft()()  # so that its memory is free before the next one takes some
        waiting.append(_start_sum(pieces, dtype, group))
    while waiting:
        waiting.popleft()()


def _start_sum(
    pieces: list[Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Begin to sum flat pieces of gradients; return what lets the device's stream wait for the sum,
    and brings it to them. They are packed where they are several, or of another type.
    """
    packed = None
    sizes = [piece.numel() for piece in pieces]
    if len(pieces) > 1 or pieces[0].dtype != dtype:
        packed = torch.empty(sum(sizes), dtype=dtype, device=pieces[0].device)
        torch._foreach_copy_(list(packed.split(sizes)), pieces)
    work = dist.all_reduce(pieces[0] if packed is None else packed, group=group, async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        if packed is not None:
            torch._foreach_copy_(pieces, list(packed.split(sizes)))

    return finish


def _fill_buckets(
    parameters: Iterable[nn.Parameter], dtype: torch.dtype | None
) -> Iterator[tuple[list[Tensor], torch.dtype]]:
    """Yield flat pieces of gradients of one type and device, at most BUCKET_ELEMENTS together, and
    the type to sum them in; in the order of the parameters, a large one in several.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is None:
            continue
        gradient = (
            parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        kind = (gradient.dtype, gradient.device)
        wide = dtype or gradient.dtype
        for piece in gradient.view(-1).split(BUCKET_ELEMENTS):
            if piece.numel() == BUCKET_ELEMENTS:
                yield [piece], wide
                continue
            bucket = filling.setdefault(kind, [])
            if sum(other.numel() for other in bucket) + piece.numel() > BUCKET_ELEMENTS:
                yield bucket, wide
                bucket = filling[kind] = []
            bucket.append(piece)
    for (own, _), bucket in filling.items():
        yield bucket, dtype or own

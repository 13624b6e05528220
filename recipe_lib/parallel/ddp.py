"""Sum the gradients of a model that every data rank has whole (`parallel.strategy: ddp`).

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

from recipe_lib.config.schema import MemoryConfig, ParallelConfig
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.parallel.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
BUCKET_ELEMENTS = 2**24  # 32 MiB in bf16, 64 MiB in fp32
_BUCKETS = 2  # at a time: one is filled while the other is summed


@dataclass(frozen=True)
class Replicas:
    """A model that every data rank has whole."""

    ranks: int  # that have it
    dtype: torch.dtype | None  # that gradients are summed in; None: their own


def find_replicas(parallel: ParallelConfig, memory: MemoryConfig, world: World) -> Replicas | None:
    """Return the replicas of a model that `shard_model` leaves whole.

    None for one that is sharded, as by `auto` that nobody has decided, or the only one.
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
    """Begin to sum flat pieces of gradients, packed where they are several or of another type.

    Return what lets the device's stream wait for the sum, and brings it to the pieces.
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
    """Yield flat pieces of gradients of one type and device, and the type to sum them in.

    They have BUCKET_ELEMENTS together at most, and come in the order of the parameters, a large
    gradient in several buckets.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is None:
            continue
        gradient = get_local(parameter.grad)
        kind = (gradient.dtype, gradient.device)
        wide = dtype or gradient.dtype
        for piece in gradient.view(-1).split(BUCKET_ELEMENTS):
            if piece.numel() == BUCKET_ELEMENTS:
                yield [piece], wide
                continue
            bucket = filling.setdefault(kind, [])
            if sum(filled.numel() for filled in bucket) + piece.numel() > BUCKET_ELEMENTS:
                yield bucket, wide
                bucket = filling[kind] = []
            bucket.append(piece)
    for (own_dtype, _), bucket in filling.items():
        yield bucket, dtype or own_dtype

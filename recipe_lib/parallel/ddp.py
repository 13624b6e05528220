"""Sum the gradients of a model that every data rank has whole (`parallel.strategy: ddp`).

`parallelize` calls `find_replicas`, and `all_reduce_gradients` calls `sum_replica_gradients` once a
step. That all-reduce is all that is sent, with any number of micro-batches: with adapters a few
MiB, where FSDP gathers the frozen weights twice in each micro-batch. It begins after the last
backward. Data ranks are those that have batches of their own.
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

# The dtypes by their names in the config, as in `parallel.reduce_dtype`.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Of small gradients that are packed to be summed together; 32 MiB in bf16, 64 MiB in fp32.
BUCKET_ELEMENTS = 2**24
_NUM_BUCKETS = 2  # alive at a time: one is filled while the other is summed


@dataclass(frozen=True)
class Replicas:
    """The settings for summing the gradients of a model that every data rank has whole."""

    ranks: int  # number of ranks that have the same parameters
    dtype: torch.dtype | None  # of the sums, `parallel.reduce_dtype`; None: that of each gradient


def find_replicas(parallel: ParallelConfig, memory: MemoryConfig, world: World) -> Replicas | None:
    """Return how gradients of replicas are summed, if `parallel.strategy` is ddp.

    Return None for a model that FSDP shards, also if the strategy is still `auto`, and for one data
    rank without `memory.cpu_offload`.
    """
    # The condition is that of `shard_model`, which leaves these models whole.
    if parallel.strategy != "ddp" or (world.copies == 1 and not memory.cpu_offload):
        return None
    return Replicas(world.copies, DTYPES[parallel.reduce_dtype] if parallel.reduce_dtype else None)


@torch.no_grad()
def sum_replica_gradients(model: nn.Module, replicas: Replicas, world: World) -> None:
    """Sum the trained gradients of a replicated model over the data ranks, in place.

    Called by all ranks once a step, after its last backward. Parameters without a gradient are left
    out; they have to be the same on all ranks. Of a parameter that a tensor-parallel group divides,
    a rank's part is summed over the data ranks with the same part. Besides the gradients it takes
    two buckets of BUCKET_ELEMENTS at most.
    """
    group = world.mesh.get_group("data_replicate")
    # Functions that finish the sums that were started, the oldest first.
    finish_sums: deque[Callable[[], None]] = deque()
    for pieces, dtype in _fill_buckets(model.parameters(), replicas.dtype):
        while len(finish_sums) == _NUM_BUCKETS:
            finish_sums.popleft()()  # frees its bucket before the next one is allocated
        finish_sums.append(_start_sum(pieces, dtype, group))
    while finish_sums:
        finish_sums.popleft()()


def _start_sum(
    pieces: list[Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Start to sum flat pieces of gradients over the group, in `dtype`.

    Several pieces, or one of another dtype, are packed into a bucket; else the piece is summed in
    place. Return a function that lets the device's stream wait for the sum, and copies it back to
    the pieces.
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
    """Yield the flat pieces of gradients that make a bucket, and the dtype to sum them in.

    The pieces of a bucket are of one dtype and device, BUCKET_ELEMENTS at most together, in the
    order of the parameters. A large gradient is cut into several pieces. dtype: None for that of
    the gradients.
    """
    # By dtype and device, the pieces of the bucket that is being filled.
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is None:
            continue
        gradient = get_local(parameter.grad)
        bucket_key = (gradient.dtype, gradient.device)
        sum_dtype = dtype or gradient.dtype
        for piece in gradient.view(-1).split(BUCKET_ELEMENTS):
            if piece.numel() == BUCKET_ELEMENTS:  # a bucket of its own
                yield [piece], sum_dtype
                continue
            bucket = filling.setdefault(bucket_key, [])
            if sum(filled.numel() for filled in bucket) + piece.numel() > BUCKET_ELEMENTS:
                yield bucket, sum_dtype
                bucket = filling[bucket_key] = []
            bucket.append(piece)
    for (gradient_dtype, _), bucket in filling.items():
        yield bucket, dtype or gradient_dtype

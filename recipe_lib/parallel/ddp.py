"""Whole models on every data rank (`parallel.strategy: ddp`), whose gradients are summed once a step.

A rank holds all parameters of its stage and of its part of a tensor-parallel group, their gradients and their states;
nothing is gathered, in forward, backward or evaluation. What is sent is one all-reduce of the trained gradients a
step, however many micro-batches it has: with adapters a few MiB, where sharding gathers the frozen weights twice a
micro-batch.

The sum comes after the last backward, not during it: a rank waits for all of it. Gradients that are small are packed
into buckets, so that the sum takes no memory but two of these; large ones are summed where they are.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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


def is_replicated(parallel: ParallelConfig) -> bool:
    """Whether every data rank is to have the whole model. `auto` that nobody has decided is FSDP."""
    return parallel.strategy == "ddp"


def replicas_of(parallel: ParallelConfig, memory: MemoryConfig, world: World) -> Replicas | None:
    """The replicas of a model that `shard_model` leaves whole; None for a model that is sharded, or the only one."""
    if not is_replicated(parallel) or (world.copies == 1 and not memory.cpu_offload):
        return None
    return Replicas(world.copies, DTYPES[parallel.reduce_dtype] if parallel.reduce_dtype else None)


@torch.no_grad()
def sum_gradients_of_replicas(model: nn.Module, replicas: Replicas, world: World) -> None:
    """Sums the trained gradients of a replicated model over the data ranks, in place.

    Once a step, after its last backward. The same parameters have gradients on all ranks: those without one are left
    out. Of a parameter that a tensor-parallel group shares, the rank's part is summed over the ranks with that part.
    Next to the gradients there are at most two buckets of BUCKET_ELEMENTS. A collective.
    """
    group = world.mesh.get_group("data_replicate")
    waiting: deque[_Sum] = deque()
    for bucket in _buckets(model.parameters(), replicas.dtype):
        while len(waiting) == _BUCKETS:
            waiting.popleft().finish()  # so that its memory is free before the next one takes some
        waiting.append(bucket.start(group))
    while waiting:
        waiting.popleft().finish()


@dataclass
class _Sum:
    """A sum that is under way. packed: None where the gradients themselves are summed."""

    work: Any
    pieces: list[Tensor]
    packed: Tensor | None

    def finish(self) -> None:
        """Lets the device's stream wait for the sum, and brings it to the gradients."""
        if self.work is not None:
            self.work.wait()
        if self.packed is not None:
            torch._foreach_copy_(self.pieces, list(self.packed.split([piece.numel() for piece in self.pieces])))
            self.packed = None


@dataclass
class _Bucket:
    """Flat pieces of gradients of one type and device, at most BUCKET_ELEMENTS together; dtype: to sum them in."""

    pieces: list[Tensor]
    dtype: torch.dtype

    @property
    def needs_memory(self) -> bool:
        """Whether they are packed: where they are several, or of another type."""
        return len(self.pieces) > 1 or self.pieces[0].dtype != self.dtype

    def start(self, group: dist.ProcessGroup) -> _Sum:
        """Begins to sum them."""
        packed = None
        if self.needs_memory:
            sizes = [piece.numel() for piece in self.pieces]
            packed = torch.empty(sum(sizes), dtype=self.dtype, device=self.pieces[0].device)
            torch._foreach_copy_(list(packed.split(sizes)), self.pieces)
        work = dist.all_reduce(self.pieces[0] if packed is None else packed, group=group, async_op=True)
        return _Sum(work, self.pieces, packed)


def _buckets(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> Iterator[_Bucket]:
    """The gradients in buckets, each in the order of the parameters; a large one is in several."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is None:
            continue
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        kind = (gradient.dtype, gradient.device)
        wide = dtype or gradient.dtype
        for piece in gradient.view(-1).split(BUCKET_ELEMENTS):
            if piece.numel() == BUCKET_ELEMENTS:
                yield _Bucket([piece], wide)
                continue
            held = filling.setdefault(kind, [])
            if sum(other.numel() for other in held) + piece.numel() > BUCKET_ELEMENTS:
                yield _Bucket(held, wide)
                held = filling[kind] = []
            held.append(piece)
    for (own, _), held in filling.items():
        yield _Bucket(held, dtype or own)

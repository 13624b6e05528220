"""Collectives timed by size among the ranks of a machine, and how long one of another size takes by them.

torch is imported only to measure. Measured with NCCL on GPUs and with gloo on a CPU; the first has never run here.
"""

import bisect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from recipe_lib.units import MIB, format_bytes

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
# Bytes of the whole tensor: a norm, a small weight, a layer of 1B, of 8B, an embedding.
GPU_SIZES = (4096, 65536, MIB, 16 * MIB, 128 * MIB, 512 * MIB)
CPU_SIZES = (4096, 65536, MIB, 8 * MIB)
FEW, MANY = 3, 20  # calls between two looks at the clock, of large and of small messages
ROUNDS = 5


@dataclass(frozen=True)
class Links:
    """What was measured. ranks, backend: of the measurement. points: operation -> (bytes that a rank sends, seconds),
    small ones first."""

    ranks: int
    backend: str
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def seconds(self, operation: str, sent: float) -> float | None:
        """Of a collective in which each rank sends so many bytes; None for an operation that nothing is known of.

        Straight between two measured sizes; below the smallest its time, above the largest at its bandwidth. What was
        not measured (broadcasts, all-to-alls, transfers) is taken to be as fast as an all-gather.
        """
        points = self.points.get(operation) or self.points.get("all_gather")
        if not points:
            return None
        place = bisect.bisect_left(points, (sent, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            return points[-1][1] * sent / points[-1][0]
        (small, quick), (large, slow) = points[place - 1], points[place]
        return quick + (slow - quick) * (sent - small) / (large - small)


# Measuring


def collective_steps(
    rank: int, ranks: int, folder: Path, *, on_gpu: bool, sizes: tuple[int, ...], seconds: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The steps of one rank: joining the others, then every collective at every size.

    folder: shared by the ranks, where they meet. seconds: how long one may take before the backend gives up. Each step
    gives {"operation", "bytes", "seconds" (the median, of one call), "wrong" (numbers that are not what they should
    be)}.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    def meet() -> str:
        if on_gpu:
            torch.get_device_module(device).set_device(device)
        backend = "nccl" if on_gpu else "gloo"
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=max(1.0, seconds))
        )
        dist.all_reduce(torch.ones(1, device=device))
        return backend

    yield "meet", meet
    for size in sizes:
        for operation in OPERATIONS:
            work = partial(measure_collective, operation, size, rank, ranks, device)
            yield f"{operation} of {format_bytes(size)}", work


def measure_collective(operation: str, size: int, rank: int, ranks: int, device: Any) -> dict[str, Any]:
    """One collective of fp32 numbers, `size` bytes in all: its time, and whether the numbers are right before and
    after; small whole numbers, so that sums are exact."""
    import torch

    on_gpu = torch.device(device).type != "cpu"
    synchronize = torch.get_device_module(device).synchronize if on_gpu else (lambda: None)
    part = max(1, size // 4 // ranks)
    call, check = _prepare(operation, part, rank, ranks, device)
    call()
    synchronize()
    wrong = check()
    calls, times = MANY if size <= MIB else FEW, []
    for _ in range(ROUNDS):  # as many on every rank
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / calls)
    wrong += check() if operation != "all_reduce" else 0  # which adds in place, over and over
    return {"operation": operation, "bytes": 4 * part * ranks, "seconds": sorted(times)[ROUNDS // 2], "wrong": wrong}


def _prepare(
    operation: str, part: int, rank: int, ranks: int, device: Any
) -> tuple[Callable[[], Any], Callable[[], int]]:
    """(the call, a count of its wrong results). part: numbers of a rank's share."""
    import torch
    import torch.distributed as dist

    pattern = torch.arange(part * ranks, device=device).remainder(251).float()
    summed = pattern * ranks + ranks * (ranks - 1) / 2
    own = slice(rank * part, (rank + 1) * part)
    if operation == "all_gather":
        result, given = torch.full_like(pattern, -1.0), pattern[own].clone()
        return (
            lambda: dist.all_gather_into_tensor(result, given),
            lambda: int((result != pattern).sum()),
        )
    whole = pattern + rank
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole), lambda: int((whole != summed).sum())
    result = torch.full_like(pattern[own], -1.0)
    return (
        lambda: dist.reduce_scatter_tensor(result, whole),
        lambda: int((result != summed[own]).sum()),
    )

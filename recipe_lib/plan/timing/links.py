"""Collectives timed by size among the ranks of a machine.

Measured with NCCL on GPUs and with gloo on a CPU; the first has not run so far (docs/measurements/on_a_gpu.md).
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib.plan.timing.cost import OPERATIONS
from recipe_lib.units import MIB, format_bytes

# Bytes of the whole tensor: a norm, a small weight, a layer of 1B, of 8B, an embedding.
GPU_SIZES = (4096, 65536, MIB, 16 * MIB, 128 * MIB, 512 * MIB)
CPU_SIZES = (4096, 65536, MIB, 8 * MIB)
FEW, MANY = 3, 20  # calls between two looks at the clock, of large and of small messages
ROUNDS = 5


def collective_steps(
    rank: int, ranks: int, folder: Path, *, on_gpu: bool, sizes: tuple[int, ...], seconds: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The steps of one rank: joining the others, then every collective at every size.

    folder: shared by the ranks, where they meet. seconds: how long one may take before the backend gives up. Each step
    gives {"operation", "bytes", "seconds" (the median, of one call), "wrong" (numbers that are not what they should
    be)}.
    """
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

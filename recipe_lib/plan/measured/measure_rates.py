"""Measure the rates of this machine's device, and the links between devices, for the planner.

`calibrate` measures one device (`tune plan --calibrate`), `list_collective_steps` yields what `tune
doctor` runs on every rank to measure links. `rates_file.py` reads the JSON of both. On a CPU the
shapes are tiny: a dry run that shows the file's form. A rate is a number of bytes or operations (a
multiplication and an addition are two) per second; `device` is the name of a torch device.
"""

import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from recipe_lib.plan.measured.rates_file import LARGE_MATMUL, MATMULS, TINY_MATMULS, VERSION
from recipe_lib.plan.timing.cost import ATTENTION, OPERATIONS, TINY_ATTENTION
from recipe_lib.units import MIB, format_bytes

# Seconds of load before a step is timed: under load a GPU lowers its clocks, so that the first step
# takes less time than later ones (docs/measurements/gpu-times-nvidia-h200.md).
_LOADED_SECONDS = 3.0


def calibrate(device: str | None = None) -> dict[str, Any]:
    """Measure matmuls, attention, an elementwise operator and launches; it takes some seconds.

    On a GPU measure also copies, its memory in bytes, an optimizer and a step. Return the content
    of the JSON file by key (`Calibration` in plan/timing/cost.py has their meaning); `dry_run` is
    True on a CPU.

    device: `cuda` or `cpu`; None: a GPU if there is one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.device(device).type != "cpu"
    bandwidth = _measure_bandwidth(device)
    matmul = {
        "bf16": _measure_matmuls(torch.bfloat16, device),
        "fp32": _measure_matmuls(torch.float32, device),
    }
    result: dict[str, Any] = {
        "version": VERSION,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "dry_run": not on_gpu,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "matmul": matmul,
        "attention": _measure_attention(device),
        "bandwidth": bandwidth,
        **_measure_issuing(device),
        "link_bandwidth": None,  # `rates_file.add_links` fills it in
    }
    if on_gpu:
        result |= measure_copy_rates(device) | {
            "memory": torch.cuda.mem_get_info(device)[1],
            "optimizer": measure_optimizer_rate(device),
            "step_share": measure_step_share(device, matmul["bf16"], bandwidth),
        }
    return result


def _measure_seconds(work: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call of `work`: the median of seven runs, each of many calls."""
    on_gpu = torch.device(device).type != "cpu"
    _time_calls(work, 3, device)  # kernels are loaded and chosen, clocks rise
    # As many calls as last 20 ms, so that the first launch and the wait count for little.
    least_seconds = 0.02 if on_gpu else 0.001
    num_calls = max(1, math.ceil(least_seconds / max(_time_calls(work, 1, device), 1e-7)))
    return sorted(_time_calls(work, num_calls, device) for _ in range(7))[3]


def _time_calls(work: Callable[[], Any], num_calls: int, device: Any) -> float:
    """Return the seconds of one of `num_calls` calls, from an idle device to an idle device."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronize()
    return (time.perf_counter() - start) / num_calls


def measure_copy_rates(device: str) -> dict[str, float]:
    """Measure the bytes a second of copies to and from pinned host memory, one way at a time."""
    on_gpu = torch.device(device).type != "cpu"
    num_bytes = (256 if on_gpu else 1) * MIB
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    to_device = _measure_seconds(lambda: on_device.copy_(host, non_blocking=True), device)
    to_host = _measure_seconds(lambda: host.copy_(on_device, non_blocking=True), device)
    return {"copy_to_device": num_bytes / to_device, "copy_to_host": num_bytes / to_host}


def measure_matmul_rate(device: str, dtype: str) -> float:
    """Measure the operations a second of one large matmul in bf16, int8 or fp8.

    fp8 is e4m3, with one scale for each of the two matrices. Raises an error of torch's, of no
    fixed class, if the device cannot compute in this dtype: fp8 needs compute capability 8.9.
    """
    m, n, k = LARGE_MATMUL if torch.device(device).type != "cpu" else TINY_MATMULS[-1]
    if dtype == "int8":
        left, right = (
            torch.randint(-8, 8, (size, k), dtype=torch.int8, device=device) for size in (m, n)
        )
        # Private, as `_scaled_mm` below: torch has no public matmul of these dtypes.
        work = partial(torch._int_mm, left, right.t())
    elif dtype == "fp8":
        left, right = (
            torch.randn(size, k, device=device).to(torch.float8_e4m3fn) for size in (m, n)
        )
        scale = torch.ones((), device=device)
        work = partial(
            torch._scaled_mm,
            left,
            right.t(),
            scale_a=scale,
            scale_b=scale,
            out_dtype=torch.bfloat16,
        )
    else:
        left, right = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
        work = partial(torch.nn.functional.linear, left, right)
    return 2 * m * n * k / _measure_seconds(work, device)


def _measure_matmuls(dtype: Any, device: str) -> list[dict[str, Any]]:
    """Measure the operations a second of linear layers, `[m, k] @ [k, n]`, for each shape.

    Return a list of {"shape": [m, n, k], "rate": operations a second}.
    """
    points = []
    for m, n, k in MATMULS if torch.device(device).type != "cpu" else TINY_MATMULS:
        left = torch.randn(m, k, dtype=dtype, device=device)
        right = torch.randn(n, k, dtype=dtype, device=device)
        seconds = _measure_seconds(partial(torch.nn.functional.linear, left, right), device)
        points.append({"shape": [m, n, k], "rate": 2 * m * n * k / seconds})
    return points


def _measure_attention(device: str) -> float:
    """Measure the operations a second of causal attention, forward and backward together."""
    shape = ATTENTION if torch.device(device).type != "cpu" else TINY_ATTENTION
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    # As torch's flop counter counts: every score, also those that causality leaves out, has 4
    # operations a head element forward and 10 backward.
    return (4 + 10) * math.prod(shape) * shape[2] / _measure_seconds(work, device)


def _measure_bandwidth(device: str) -> float:
    """Measure the bytes a second of `a + b` in bf16: two read, one written."""
    num_elements = 64 * MIB if torch.device(device).type != "cpu" else MIB // 8
    first, second, out = (
        torch.ones(num_elements, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    seconds = _measure_seconds(lambda: torch.add(first, second, out=out), device)
    return 3 * 2 * num_elements / seconds  # three tensors, two bytes an element


def measure_optimizer_rate(device: str) -> float:
    """Measure the bytes a second that a step of fused AdamW in bf16 reads and writes."""
    num_tensors, num_elements = (16, 16 * MIB) if torch.device(device).type != "cpu" else (2, 1024)
    weights = [
        torch.ones(num_elements, dtype=torch.bfloat16, device=device) for _ in range(num_tensors)
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    seconds = _measure_seconds(torch.optim.AdamW(weights, fused=True).step, device)
    # Weights, gradients and two states are read, all but gradients written: seven times two bytes.
    return 7 * 2 * num_tensors * num_elements / seconds


def measure_step_share(device: str, matmuls: list[dict[str, Any]], bandwidth: float) -> float:
    """Measure the share of LARGE_MATMUL's bf16 rate that the matmuls of a sustained step reach.

    A step is forward and backward of three gated MLPs with residuals. It is timed after
    _LOADED_SECONDS of such steps, while the rate of LARGE_MATMUL is one of a short burst.

    matmuls: as `_measure_matmuls` returns them. bandwidth: bytes a second of an addition.
    """
    on_gpu = torch.device(device).type != "cpu"
    tokens, inner, width = LARGE_MATMUL if on_gpu else TINY_MATMULS[-1]
    num_layers = 3
    shapes = [(inner, width), (inner, width), (width, inner)] * num_layers
    weights = [
        torch.randn(shape, dtype=torch.bfloat16, device=device).div_(shape[1]) for shape in shapes
    ]
    hidden, gradient = (
        torch.randn(tokens, width, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    for tensor in (hidden, *weights):
        tensor.requires_grad_()

    def step() -> None:
        output = hidden
        for gate, up, down in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            output = output + F.linear(F.silu(F.linear(output, gate)) * F.linear(output, up), down)
        torch.autograd.grad(output, [hidden, *weights], gradient)

    load_end = time.perf_counter() + (_LOADED_SECONDS if on_gpu else 0.0)
    while time.perf_counter() < load_end:
        _measure_seconds(step, device)
    # A layer has three matmuls; each is one in forward and two in backward.
    flops = num_layers * 3 * 3 * 2 * tokens * inner * width
    # The other operators read and write, in tensors of the inner width: silu 2, its product with
    # `up` 3, their gradients 9; of the outer width: the residual 3, the sum of its gradient with
    # those of `gate` and `up` 6.
    moved_bytes = num_layers * 2 * tokens * (14 * inner + 9 * width)
    # The time of these operators, at the bandwidth of an addition, is subtracted.
    seconds = _measure_seconds(step, device) - moved_bytes / bandwidth
    burst_rate = next(
        point["rate"] for point in matmuls if point["shape"] == [tokens, inner, width]
    )
    return flops / max(seconds, 1e-9) / burst_rate


def _measure_issuing(device: str) -> dict[str, float]:
    """Measure the seconds of the host to launch an operator, and of the GPU for a tiny kernel.

    Return them as "host_seconds" and "kernel_seconds"; on a CPU both are the same.
    """
    small = torch.ones(16, device=device)
    # With a gradient, as the operators of training: autograd's work is a part of the host's time.
    tracked = torch.ones(16, device=device, requires_grad=True)
    on_gpu = torch.device(device).type != "cpu"
    num_calls = 2000 if on_gpu else 50
    # Only to warm up.
    _measure_seconds(partial(torch.mul, tracked, small), device)
    start = time.perf_counter()
    for _ in range(num_calls):
        torch.mul(tracked, small)
    host_seconds = (time.perf_counter() - start) / num_calls
    kernel_seconds = host_seconds
    if on_gpu:  # in a CUDA graph, so that no kernel waits for the host
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                small.mul_(1.0)
        kernel_seconds = _measure_seconds(graph.replay, device) / 1000
    return {"host_seconds": host_seconds, "kernel_seconds": kernel_seconds}


# Collectives, timed by size among the ranks of a machine, with NCCL on GPUs and gloo on CPUs. Those
# of NCCL have not run so far (docs/measurements/on_a_gpu.md).

# Bytes of the full tensor: from a norm's weight to a layer of 1B, of 8B and an embedding.
GPU_SIZES = (4096, 65536, MIB, 16 * MIB, 128 * MIB, 512 * MIB)
CPU_SIZES = (4096, 65536, MIB, 8 * MIB)
# Numbers of calls that are timed together.
FEW = 3  # for tensors above 1 MiB
MANY = 20  # for smaller ones
ROUNDS = 5  # number of timings, of which the median is taken


def list_collective_steps(
    rank: int, ranks: int, folder: Path, *, on_gpu: bool, sizes: tuple[int, ...], seconds: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, step) pairs for one rank: joining the others, then each collective at each size.

    Call the steps in this order, on all ranks. The first, "meet", returns the backend's name, the
    others return what `measure_collective` does.

    Args:
        rank: of this process.
        ranks: their number, all on this machine.
        folder: shared by the ranks, for the file store by which they meet.
        on_gpu: True: each rank has the GPU of its number; False: they are on the CPU.
        sizes: bytes of the full tensors.
        seconds: timeout of a collective, at least 1.
    """
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    def meet() -> str:
        if on_gpu:
            torch.get_device_module(device).set_device(device)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(folder / "store"), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=max(1.0, seconds)),
        )
        dist.all_reduce(torch.ones(1, device=device))
        return backend

    yield "meet", meet
    for size in sizes:
        for operation in OPERATIONS:
            yield (
                f"{operation} of {format_bytes(size)}",
                partial(
                    measure_collective,
                    operation=operation,
                    size=size,
                    rank=rank,
                    ranks=ranks,
                    device=device,
                ),
            )


def measure_collective(
    operation: str, size: int, rank: int, ranks: int, device: Any
) -> dict[str, Any]:
    """Measure one collective of fp32 numbers; every rank has to call it.

    Return {"operation", "bytes" (of the full tensor, after rounding), "seconds" (of one call, the
    median of ROUNDS), "wrong" (the number of values in the result that are not as expected)}.

    operation: one of OPERATIONS. size: bytes of the full tensor; it is rounded down to equal parts
    for the ranks. device: a `torch.device`.
    """
    part_length = max(1, size // 4 // ranks)  # values of each rank, of 4 bytes
    # Small integers, so that sums are exact.
    pattern = torch.arange(part_length * ranks, device=device).remainder(251).float()
    rank_slice = slice(rank * part_length, (rank + 1) * part_length)
    inputs = pattern + rank  # of a sum: another tensor on every rank
    expected_sum = pattern * ranks + ranks * (ranks - 1) / 2
    if operation == "all_gather":
        result = torch.full_like(pattern, -1.0)
        expected = pattern
        call = partial(dist.all_gather_into_tensor, result, pattern[rank_slice].clone())
    elif operation == "all_reduce":
        result = inputs
        expected = expected_sum
        call = partial(dist.all_reduce, inputs)
    else:
        result = torch.full_like(pattern[rank_slice], -1.0)
        expected = expected_sum[rank_slice]
        call = partial(dist.reduce_scatter_tensor, result, inputs)
    _time_calls(call, 1, device)  # the first one, which connects the ranks
    num_wrong = int((result != expected).sum())
    num_calls = MANY if size <= MIB else FEW
    # A fixed number of calls, as the ranks have to make the same ones.
    times = sorted(_time_calls(call, num_calls, device) for _ in range(ROUNDS))
    # All-reduce writes into its input: each timed call has summed the last one's result again.
    if operation != "all_reduce":
        num_wrong += int((result != expected).sum())
    return {
        "operation": operation,
        "bytes": 4 * part_length * ranks,
        "seconds": times[ROUNDS // 2],
        "wrong": num_wrong,
    }

"""Measures the rates of this machine's device for the planner, and reads what was measured.

torch is imported only to measure. On a CPU the shapes are tiny: a dry run that shows the file, not a figure to use.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from recipe_lib.config.suggest import quote
from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.timing.cost import Calibration, wire_bytes
from recipe_lib.plan.timing.links import OPERATIONS, Links
from recipe_lib.units import MIB

VERSION = 1
# What a file need not hold.
_OPTIONAL = ("links", "copy_to_device", "copy_to_host")

# (m, n, k) of matmuls: the projections of 1B to 70B models at 512 to 8192 tokens. On a CPU, three tiny ones.
_MATMULS = ((512, 2048, 2048), (512, 4096, 4096), (2048, 4096, 4096), (4096, 14336, 4096), (8192, 28672, 8192))
_TINY_MATMULS = ((32, 32, 32), (64, 64, 64), (96, 96, 96))
_LARGE = _MATMULS[3]  # long enough to show what a device sustains
_ATTENTION = {"rows": 2, "heads": 32, "tokens": 4096, "head_width": 128}
_TINY_ATTENTION = {"rows": 1, "heads": 2, "tokens": 64, "head_width": 32}


def calibrate(device: str | None = None, path: Path | None = None) -> dict[str, Any]:
    """Measures matmuls, attention, an elementwise operator, issuing, and an all-gather if ranks are joined already.

    device: `cuda` or `cpu`; None: a GPU if there is one. path: where the result is written as JSON (by rank 0); what
    is there is replaced. Takes some seconds on a GPU. Returns the result; its `dry_run` is true on a CPU.
    """
    import torch
    import torch.distributed as dist

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = torch.device(device).type != "cpu"
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    result: dict[str, Any] = {
        "version": VERSION,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "dry_run": not on_gpu,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "matmul": {name: _matmuls(dtype, device) for name, dtype in dtypes.items()},
        "attention": _attention(device),
        "bandwidth": _bandwidth(device),
        **_issuing(device),
        "link_bandwidth": _link_bandwidth(device, ranks) if ranks > 1 else None,
        **(copy_rates(device) if on_gpu else {}),
    }
    if path is not None and (ranks == 1 or dist.get_rank() == 0):
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def with_links(
    measured: dict[str, Any], links: dict[str, Any] | None, low_precision: dict[str, float]
) -> dict[str, Any]:
    """A calibration as `calibrate` makes it, with what was measured beside it.

    links: {"ranks", "backend", "points": [{"operation", "bytes", "seconds"}, ...]} or None. low_precision: dtype ->
    operations a second of the matmul of `matmul_rate`.
    """
    on_cpu = measured["device"] == "cpu"
    shape = list(_TINY_MATMULS[-1] if on_cpu else _LARGE)
    matmul = {dtype: [{"shape": shape, "rate": rate}] for dtype, rate in low_precision.items()}
    result = measured | {"matmul": measured["matmul"] | matmul}
    if links is None:
        return result
    points = {
        operation: [
            {"bytes": point["bytes"], "seconds": point["seconds"]}
            for point in links["points"]
            if point["operation"] == operation
        ]
        for operation in OPERATIONS
    }
    largest = max(points["all_gather"], key=lambda point: point["bytes"])
    return result | {
        "link_bandwidth": wire_bytes("all_gather", largest["bytes"], links["ranks"]) / largest["seconds"],
        "links": {"ranks": links["ranks"], "backend": links["backend"], **points},
    }


def read_calibration(path: str | Path, hardware: Hardware) -> Calibration:
    """The rates in a file that `calibrate` wrote, to plan for `hardware`.

    ConfigError if it cannot be read, lacks a key, holds no positive number where one is due, or is of another device
    (a size of memory, such as 24GB, takes any).
    """
    place = f"calibration: {quote(str(path))}"
    remedy = "measure again with --calibrate"
    values: Any
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{place} cannot be read ({error.strerror}); expected a file, {remedy}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{place} is not JSON; expected a calibration, {remedy}") from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ConfigError(f"{place} is no calibration of version {VERSION}; {remedy}")
    values = {**dict.fromkeys(_OPTIONAL), **values}
    missing = [field.name for field in fields(Calibration) if field.name not in values]
    if missing:
        raise ConfigError(f"{place} lacks {', '.join(missing)}; {remedy}")
    for name in ("device", "torch", "date"):
        if not isinstance(values[name], str):
            raise ConfigError(f"{place}: {name} is no text; {remedy}")
    unknown = ("link_bandwidth", "copy_to_device", "copy_to_host")  # where nothing was there to measure
    for name in ("attention", "bandwidth", "host_seconds", "kernel_seconds", *unknown):
        if not (_positive(values[name]) or (name in unknown and values[name] is None)):
            raise ConfigError(f"{place}: {name} is {quote(str(values[name]))}; expected a positive number, {remedy}")
    _check_device(place, values["device"], hardware)
    measured: dict[str, Any] = {field.name: values[field.name] for field in fields(Calibration)}
    matmul, links = _read_matmuls(place, values["matmul"]), _read_links(place, values["links"])
    return Calibration(**{**measured, "matmul": matmul, "links": links})


def _read_links(place: str, values: Any) -> Links | None:
    """Collectives by size, as `tune doctor` writes them; None where there are none."""
    if values is None:
        return None
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    try:
        ranks, backend = values["ranks"], values["backend"]
        for operation in OPERATIONS:
            sent = [(wire_bytes(operation, point["bytes"], ranks), point["seconds"]) for point in values[operation]]
            if not sent or not all(_positive(number) for pair in sent for number in pair):
                raise ValueError(operation)
            sizes = sorted(sent)
            slowest = accumulate(
                (seconds for _, seconds in sizes), max
            )  # noise: no message takes less than a smaller one
            points[operation] = tuple(zip((size for size, _ in sizes), slowest, strict=True))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{place}: links is no list of bytes and seconds by collective; measure again with `tune doctor --write`"
        ) from None
    return Links(ranks, str(backend), points)


def _read_matmuls(place: str, matmul: Any) -> dict[str, tuple[tuple[float, float], ...]]:
    """By dtype (operations, operations a second), small ones first."""
    try:
        read = {
            dtype: tuple(sorted((2.0 * math.prod(point["shape"]), point["rate"]) for point in points))
            for dtype, points in matmul.items()
        }
    except (AttributeError, KeyError, TypeError):
        read = {}
    if not read or not all(
        points and all(_positive(size) and _positive(rate) for size, rate in points) for points in read.values()
    ):
        raise ConfigError(f"{place}: matmul is no list of shapes and rates by dtype; measure again with --calibrate")
    return read


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check_device(place: str, device: str, hardware: Hardware) -> None:
    """ConfigError unless rates of `device` may be used for `hardware`."""
    try:
        measured = find_hardware(device).name
    except ConfigError:  # a card that the table lacks: its rates serve for a size of memory only
        measured = device
    if measured != hardware.name and not (hardware.generic and measured != "cpu"):
        raise ConfigError(
            f"{place} was measured on {quote(device)}, the plan is for {hardware.name}; "
            "leave the file out, or plan for the device that was measured"
        )


# Measuring


def _seconds(work: Callable[[], Any], device: str) -> float:
    """Device time of one call: the median of seven, each of enough calls to last 20 ms (on a CPU, 1 ms)."""
    import torch

    on_gpu = torch.device(device).type != "cpu"
    synchronize = torch.get_device_module(device).synchronize if on_gpu else (lambda: None)

    def run(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize()
        return time.perf_counter() - start

    run(3)  # kernels are loaded and chosen, clocks rise
    calls = max(1, math.ceil((0.02 if on_gpu else 0.001) / max(run(1), 1e-7)))
    return sorted(run(calls) / calls for _ in range(7))[3]


def copy_rates(device: str) -> dict[str, float]:
    """copy_to_device, copy_to_host: bytes a second between the device and pinned memory of the host, one way at a
    time; 256 MiB, on a CPU 1 MiB of ordinary memory."""
    import torch

    on_gpu = torch.device(device).type != "cpu"
    count = (256 if on_gpu else 1) * MIB
    host = torch.ones(count, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(count, dtype=torch.uint8, device=device)
    return {
        "copy_to_device": count / _seconds(lambda: there.copy_(host, non_blocking=True), device),
        "copy_to_host": count / _seconds(lambda: host.copy_(there, non_blocking=True), device),
    }


def matmul_rate(device: str, dtype: str) -> float:
    """Operations a second of one large matmul in bf16, int8 or fp8 (rows of e4m3, one scale each way).

    torch raises what it likes where a device cannot: fp8 needs compute capability 8.9.
    """
    import torch

    m, n, k = _LARGE if torch.device(device).type != "cpu" else _TINY_MATMULS[-1]
    if dtype == "int8":
        left, right = (torch.randint(-8, 8, (size, k), dtype=torch.int8, device=device) for size in (m, n))
        work = partial(torch._int_mm, left, right.t())
    elif dtype == "fp8":
        left, right = (torch.randn(size, k, device=device).to(torch.float8_e4m3fn) for size in (m, n))
        one = torch.ones((), device=device)
        work = partial(torch._scaled_mm, left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        left, right = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
        work = partial(torch.nn.functional.linear, left, right)
    return 2 * m * n * k / _seconds(work, device)


def _matmuls(dtype: Any, device: str) -> list[dict[str, Any]]:
    """Rates, in operations a second, of `[m, k] @ [k, n]` as a linear layer has them."""
    import torch

    measured = []
    for m, n, k in _MATMULS if torch.device(device).type != "cpu" else _TINY_MATMULS:
        left, right = torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
        seconds = _seconds(partial(torch.nn.functional.linear, left, right), device)
        measured.append({"shape": [m, n, k], "rate": 2 * m * n * k / seconds})
    return measured


def _attention(device: str) -> float:
    """Operations a second of causal attention, forward and backward together, counted as torch's flop counter does.

    It counts every score, also those that causality leaves out: 4 a score and head element forward, 10 backward.
    """
    import torch
    import torch.nn.functional as F

    size = _ATTENTION if torch.device(device).type != "cpu" else _TINY_ATTENTION
    shape = (size["rows"], size["heads"], size["tokens"], size["head_width"])
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return (4 + 10) * math.prod(shape) * size["tokens"] / _seconds(work, device)


def _bandwidth(device: str) -> float:
    """Bytes a second of `a + b` in bf16: two read, one written."""
    import torch

    elements = 64 * MIB if torch.device(device).type != "cpu" else MIB // 8
    first, second, out = (torch.ones(elements, dtype=torch.bfloat16, device=device) for _ in range(3))
    return 3 * 2 * elements / _seconds(lambda: torch.add(first, second, out=out), device)


def _issuing(device: str) -> dict[str, float]:
    """host_seconds: for the host to issue an operator with autograd; kernel_seconds: of the smallest kernel."""
    import torch

    small = torch.ones(16, device=device)
    tracked = torch.ones(16, device=device, requires_grad=True)
    on_gpu = torch.device(device).type != "cpu"
    calls = 2000 if on_gpu else 50
    _seconds(partial(torch.mul, tracked, small), device)
    start = time.perf_counter()
    for _ in range(calls):
        torch.mul(tracked, small)
    host = (time.perf_counter() - start) / calls
    kernel = host
    if on_gpu:  # events on the device do not see the host
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                small.mul_(1.0)
        kernel = _seconds(graph.replay, device) / 1000
    return {"host_seconds": host, "kernel_seconds": kernel}


def _link_bandwidth(device: str, ranks: int) -> float:
    """Bus bandwidth of an all-gather, bytes/second: of 256 MiB, on a CPU 1 MiB."""
    import torch
    import torch.distributed as dist

    whole = (256 if torch.device(device).type != "cpu" else 1) * MIB // 2 // ranks * ranks
    gathered = torch.empty(whole, dtype=torch.bfloat16, device=device)
    shard = torch.ones(whole // ranks, dtype=torch.bfloat16, device=device)
    synchronize = torch.get_device_module(device).synchronize if torch.device(device).type != "cpu" else (lambda: None)
    times = []
    for _ in range(8):  # as many on every rank
        synchronize()
        start = time.perf_counter()
        dist.all_gather_into_tensor(gathered, shard)
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * whole * (ranks - 1) / ranks / sorted(times[1:])[3]

"""How long operators and collectives take: a roofline for kernels, latency plus bandwidth for communication.

No torch in here. Without a calibration file the rates are the data sheet's times the share that kernels of such a
shape reach (`kernel_rates`).
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.timing.grouped_times import is_grouped, matmuls_issued
from recipe_lib.plan.timing.kernel_rates import (
    adam_rate,
    attention_kernel,
    attention_seconds,
    bandwidth_rate,
    matmul_rate,
    run_share,
)
from recipe_lib.plan.timing.operator_times import OperatorTime, operator_key
from recipe_lib.plan.trace import WORK_WAIT, Collective, Op, Trace

KERNEL_SECONDS = 3e-6  # no kernel is shorter: its start and end on the device, commonly given as 2 to 4 us
HOST_SECONDS = 6e-6  # for the host to issue one operator from Python, eagerly: 5 to 10 us
COMPILED_SECONDS = 40e-6  # for the host to call one of ours that is compiled: docs/measurements/fused_kernels.md
_HOST_BOUND = 2  # calls of Python that issue a product: one as long as `host_seconds`, and the module's around it
COLLECTIVE_SECONDS = 8.4e-6  # before the first step of a ring: NCCL's src/graph/tuning.cc, ring, Simple

# (rows, heads, tokens, width of a head) of the attention that a calibration measures; on a CPU a tiny one.
ATTENTION, TINY_ATTENTION = (2, 32, 4096, 128), (1, 2, 64, 32)
# Devices of docs/measurements/planned_times.md: planned without a calibration, next to published speeds.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "rtx4090")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")  # collectives that are measured


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


@dataclass(frozen=True)
class Calibration:
    """Rates that were measured on a device; they replace the datasheet's.

    device: as CUDA names it. matmul: by dtype, (m, n, k) and operations a second at several sizes, small ones first.
    attention: operations a second of one forward and backward of ATTENTION, all scores counted. bandwidth: bytes/second
    of an elementwise operator. host_seconds: to issue one. kernel_seconds: of the smallest kernel. link_bandwidth: bus
    bandwidth of a large all-gather, None where one rank measured. links: collectives by size, where `tune doctor`
    measured them. copy_to_device, copy_to_host: bytes/second of pinned copies, None where they were not measured.
    step_share: of `matmul`'s rates, what products reach in steps that follow each other; optimizer: bytes/second of
    fused AdamW; memory: total bytes of the device; each None in files that do not have it.
    operators: of a CPU, by name and dtype; host_seconds is then what a step takes beyond them, and recompute_seconds
    the same for each operator that is computed again in backward.
    """

    device: str
    torch: str
    date: str
    matmul: dict[str, tuple[tuple[tuple[int, int, int], float], ...]]
    attention: float
    bandwidth: float
    host_seconds: float
    kernel_seconds: float
    link_bandwidth: float | None = None
    links: Links | None = None
    copy_to_device: float | None = None
    copy_to_host: float | None = None
    operators: Mapping[str, OperatorTime] = field(default_factory=dict)
    recompute_seconds: float | None = None
    step_share: float | None = None
    optimizer: float | None = None
    memory: int | None = None


def wire_bytes(operation: str, num_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends (or, for `recv`, receives) in a collective of `ranks`; num_bytes: the whole tensor.

    What a ring sends, the least that any algorithm can: nccl-tests, doc/PERFORMANCE.md.
    """
    if operation in ("send", "recv"):
        return num_bytes
    if operation not in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"):
        raise ValueError(f"unknown collective {operation}")
    if ranks <= 1:
        return 0
    if operation == "broadcast":
        return num_bytes
    return (2 if operation == "all_reduce" else 1) * num_bytes * (ranks - 1) // ranks


def collective_seconds(collective: Collective, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """One collective alone on its link: latency of its steps plus wire bytes over bus bandwidth.

    Ranks are placed in order, `ranks_per_node` to a machine. A group that spans machines uses the network cards of all
    of its ranks on a machine, up to the bandwidth inside one.
    """
    ranks = len(collective.ranks)
    sent = wire_bytes(collective.operation, collective.bytes, ranks)
    if not sent:
        return 0.0
    by_node = Counter(rank // hardware.ranks_per_node for rank in collective.ranks)
    bandwidth = (calibration and calibration.link_bandwidth) or hardware.link.bandwidth
    if len(by_node) > 1:
        bandwidth = min(bandwidth, min(by_node.values()) * hardware.inter_node_bandwidth)
    steps = _steps(collective.operation, ranks)
    crossings = len(by_node) - 1  # of the steps, those that wait for the network (NCCL's src/graph/tuning.cc)
    if collective.operation == "all_reduce":
        crossings *= 2
    crossings = min(crossings, steps)
    if calibration and calibration.links and len(by_node) == 1:
        measured = calibration.links.seconds(collective.operation, sent)
        if measured is not None:  # among so many ranks; more of them take more steps
            more = max(0, steps - _steps(collective.operation, calibration.links.ranks))
            return measured + more * hardware.link.latency
    latency = crossings * hardware.inter_node_latency + (steps - crossings) * hardware.link.latency
    return COLLECTIVE_SECONDS + latency + sent / bandwidth


def _steps(operation: str, ranks: int) -> int:
    """Steps of a collective one after the other: of a ring, which an all-reduce goes round twice; a small one takes a
    tree, up and down."""
    if operation in ("send", "recv"):
        return 1
    return min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks))) if operation == "all_reduce" else ranks - 1


def op_seconds(op: Op, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """One operator alone on the device: the longest of computing, moving bytes and the smallest kernel.

    A collective takes what `collective_seconds` says, a copy between host and device what their link takes, what the
    host computes what its memory gives; waiting for a collective, and an operator that moves nothing (an empty tensor),
    takes nothing.
    """
    if op.collective:
        return collective_seconds(op.collective, hardware, calibration)
    if is_wait(op) or not (op.flops or op.bytes):
        return 0.0
    if op.transfer:  # its bytes are counted where they are read and where they are written
        return max(op.bytes / 2 / _copy_rate(op.transfer, hardware, calibration), KERNEL_SECONDS)
    if op.on_host:
        return op.bytes / hardware.host_memory_bandwidth
    measured = calibration and calibration.operators.get(operator_key(op.name, op.dtype))
    if measured:
        return measured.seconds(op.flops, op.bytes)
    if matmuls := matmuls_issued(op, hardware.architecture):
        one = replace(op, flops=op.flops // matmuls, bytes=op.bytes // matmuls, shape=(1, *op.shape[1:]))
        return matmuls * _kernel_seconds(one, hardware, calibration, splits=True)
    return _kernel_seconds(op, hardware, calibration)


def _kernel_seconds(op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False) -> float:
    floor = calibration.kernel_seconds if calibration else KERNEL_SECONDS
    bandwidth = calibration.bandwidth if calibration else bandwidth_rate(hardware, op.bytes)
    if "_fused_adam" in op.name:
        measured = calibration.optimizer if calibration else None
        bandwidth = measured or min(bandwidth, adam_rate(hardware, op.bytes))
    return max(_computing(op, hardware, calibration, splits), op.bytes / bandwidth, floor)


def _computing(op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False) -> float:
    """Seconds of a matmul or attention, 0 for others; measured rates scale those of `kernel_rates`."""
    if is_attention(op):
        if len(op.shape) != 5:
            return op.flops / hardware.rate(op.dtype)
        seconds = attention_seconds(hardware, op.name, op.dtype, op.shape)
        return seconds * _attention_scale(hardware, calibration, attention_kernel(hardware, op.name, op.shape[-1]))
    if not op.flops:
        return 0.0
    shape = op.shape[:-1] if is_grouped(op) else op.shape
    return op.flops / (matmul_rate(hardware, op.dtype, shape, splits) * _matmul_scale(op, hardware, calibration))


def least_op_seconds(op: Op, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """What a matmul or attention takes at least, however many rows of it are computed at once; 0 for others, and where
    a CPU's operators were measured."""
    if calibration and calibration.operators:
        return 0.0
    if is_attention(op):
        return _computing(op, hardware, calibration)
    points = [] if calibration is None else _matmul_scales(op.dtype, hardware, calibration)
    highest = max((scale for _, scale in points), default=1.0)
    return op.flops / (matmul_rate(hardware, op.dtype, ()) * highest)


def is_attention(op: Op) -> bool:
    """Whether it is an attention kernel."""
    return "attention" in op.name or "attn" in op.name


def _copy_rate(way: str, hardware: Hardware, calibration: Calibration | None) -> float:
    """Bytes a second between host and device."""
    measured = None
    if calibration is not None:
        measured = calibration.copy_to_host if way == "to_host" else calibration.copy_to_device
    return measured or hardware.host_bandwidth


def launch_seconds(op: Op, calibration: Calibration | None = None, architecture: str = "") -> float:
    """For the host to issue one operator: from Python, eagerly, or one of ours that is compiled; of a grouped matmul
    that the architecture has no kernel for, each of its matmuls as well."""
    issued = matmuls_issued(op, architecture) if architecture else 0
    if op.name.startswith("tune_recipes::") and not issued:
        return COMPILED_SECONDS
    if calibration is None:
        return (1 + issued) * HOST_SECONDS
    again = calibration.recompute_seconds if op.part == "recompute" else None
    return (1 + issued) * (again or calibration.host_seconds)


def is_wait(op: Op) -> bool:
    """Whether the operator only makes its stream wait for a collective."""
    return op.name == WORK_WAIT or op.name.endswith("wait_tensor")


def _matmul_scale(op: Op, hardware: Hardware, calibration: Calibration | None) -> float:
    """Measured rates of matmuls of this size over those of `matmul_rate`; a dtype that was not measured is as bf16."""
    return 1.0 if calibration is None else _interpolate(_matmul_scales(op.dtype, hardware, calibration), op.flops)


def _matmul_scales(dtype: str, hardware: Hardware, calibration: Calibration) -> list[tuple[float, float]]:
    """Return (operations, rate in a run over that of `matmul_rate`) of the shapes measured, small ones first.

    The host issues measured calls one by one: one that takes the host about as long is left out, but for the largest.
    """
    known = next(name for name in (dtype, "bf16", *calibration.matmul) if name in calibration.matmul)
    share = calibration.step_share or run_share(hardware)
    least = 0.0 if hardware.architecture == "cpu" else _HOST_BOUND * calibration.host_seconds
    points = [(2.0 * m * n * k, rate, (1, m, k, n)) for (m, n, k), rate in calibration.matmul[known]]
    points = [point for point in points if point[0] / point[1] >= least] or points[-1:]
    return [(flops, share * rate / matmul_rate(hardware, known, shape)) for flops, rate, shape in points]


def _attention_scale(hardware: Hardware, calibration: Calibration | None, kernel: str) -> float:
    """Return measured seconds of attention over those of `attention_seconds`; 1 for a kernel that was not measured."""
    rows, heads, tokens, width = TINY_ATTENTION if hardware.architecture == "cpu" else ATTENTION
    measured = "aten::_scaled_dot_product_flash_attention"
    if calibration is None or kernel != attention_kernel(hardware, measured, width):
        return 1.0
    shape = (rows * heads, tokens, tokens, (tokens + 1) // 2, width)
    expected = sum(attention_seconds(hardware, name, "bf16", shape) for name in (measured, f"{measured}_backward"))
    return 14.0 * rows * heads * tokens * tokens * width / calibration.attention / expected


def _interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at `size` between measured points, straight over the logarithm of size; the ends' beyond them."""
    if size <= points[0][0]:
        return points[0][1]
    for (small, slow), (large, fast) in zip(points, points[1:], strict=False):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return slow + share * (fast - slow)
    return points[-1][1]


def model_flops(trace: Trace, phase: str) -> int:
    """Operations of forward and backward in a phase, on this rank, without what activation checkpointing redoes."""
    return sum(op.flops * op.repeats for op in trace.phase_ops(phase) if op.part in ("forward", "backward"))


def model_flops_utilization(flops: float, seconds: float, hardware: Hardware, dtype: str = "bf16") -> float:
    """Share of the device's dense rate that the model's own operations use in a step (MFU, arXiv 2204.02311, app. B).

    flops: of one rank, from `model_flops`. 0 for a step that takes no time.
    """
    return flops / (hardware.rate(dtype) * seconds) if seconds > 0 else 0.0


def error_text(hardware: Hardware, calibration: Calibration | None) -> str:
    """How far off the times may be, for `TimePlan.error`; of data sheets, by docs/measurements/planned_times.md."""
    if calibration:
        link = "" if calibration.link_bandwidth else "; the links were not measured"
        return f"rates measured on {calibration.device} ({calibration.date}): about 10 to 15 %{link}"
    if hardware.name in COMPARED:
        return "not calibrated: of published speeds of such cards, nine in ten were planned within 25 %"
    rates = f"rates of {hardware.rates_of}; " if hardware.generic else ""
    return f"{rates}not calibrated, no published speed to compare with: tens of percent, good for ranking only"

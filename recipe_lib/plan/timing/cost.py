"""The seconds that operators and collectives take, each alone.

Kernels follow a roofline (`compute_op_seconds`), collectives latency plus bandwidth
(`compute_collective_seconds`). Without a calibration the rates are the data sheet's times the share
that kernels of such a shape reach (`kernel_rates.py`). No torch in here.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.timing.kernel_rates import (
    choose_attention_kernel,
    compute_adam_bandwidth,
    compute_attention_seconds,
    compute_bandwidth,
    compute_matmul_rate,
    get_run_share,
)
from recipe_lib.plan.tracing.trace import WORK_WAIT, Collective, Op, Trace

# No kernel is shorter: its start and end on the device, commonly given as 2 to 4 us.
KERNEL_SECONDS = 3e-6
HOST_SECONDS = 6e-6  # for the host to issue one operator from Python, eagerly: 5 to 10 us
# For the host to call one of ours that is compiled: docs/measurements/fused_kernels.md.
COMPILED_SECONDS = 40e-6
# Calls of Python that issue a product: one as long as `host_seconds`, and the module's around it.
_HOST_BOUND = 2
# Before the first step of a ring: NCCL's src/graph/tuning.cc, ring, Simple.
COLLECTIVE_SECONDS = 8.4e-6

# (rows, heads, tokens, width of a head) of the attention that a calibration measures.
ATTENTION = (2, 32, 4096, 128)
TINY_ATTENTION = (1, 2, 64, 32)  # on a CPU
# Devices of docs/measurements/planned_times.md: planned without a calibration, next to published
# speeds.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "rtx4090")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")  # collectives that are measured


@dataclass(frozen=True)
class Links:
    """Collectives that were measured, by size."""

    # Of the measurement.
    ranks: int
    # Of the measurement.
    backend: str
    # Operation to (bytes that a rank sends, seconds), small ones first.
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def interpolate_seconds(self, operation: str, sent: float) -> float:
        """Return the seconds of a collective in which each rank sends so many bytes.

        They are on a straight line between two measured sizes; below the smallest they are its
        time, above the largest as its bandwidth says.
        """
        # What was not measured (broadcasts, all-to-alls, transfers) is taken to be as fast as an
        # all-gather.
        points = self.points.get(operation) or self.points["all_gather"]
        sizes, seconds = zip(*points, strict=True)
        if sent > sizes[-1]:
            return float(seconds[-1] * sent / sizes[-1])
        return float(np.interp(sent, sizes, seconds))


@dataclass(frozen=True)
class Calibration:
    """Rates that were measured on a device; they replace the datasheet's.

    What is None was not measured, or is not in an older file.
    """

    # As CUDA names it.
    device: str
    torch: str
    date: str
    # By dtype ((m, n, k), operations per second) at several sizes, small ones first.
    matmul: dict[str, tuple[tuple[tuple[int, int, int], float], ...]]
    # Operations per second of one forward and backward of ATTENTION, all scores counted.
    attention: float
    # Of an elementwise operator, bytes per second.
    bandwidth: float
    # For the host to issue an operator.
    host_seconds: float
    # Of the smallest kernel.
    kernel_seconds: float
    # Bus bandwidth of a large all-gather, bytes per second; None where one rank measured.
    link_bandwidth: float | None = None
    # Collectives by size, where `tune doctor` measured them.
    links: Links | None = None
    # Of pinned copies, bytes per second.
    copy_to_device: float | None = None
    copy_to_host: float | None = None
    # Of `matmul`'s rates, what products reach in steps that follow each other.
    step_share: float | None = None
    # Of fused AdamW, bytes per second.
    optimizer: float | None = None
    # Total bytes of the device.
    memory: int | None = None


def count_wire_bytes(operation: str, num_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends (or, for `recv`, receives) in a collective of `ranks`.

    num_bytes: of the whole tensor.
    """
    # What a ring sends is the least that any algorithm can: nccl-tests, doc/PERFORMANCE.md.
    if operation in ("send", "recv"):
        return num_bytes
    if operation not in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"):
        raise ValueError(f"unknown collective {operation}")
    if ranks <= 1:
        return 0
    if operation == "broadcast":
        return num_bytes
    return (2 if operation == "all_reduce" else 1) * num_bytes * (ranks - 1) // ranks


def compute_collective_seconds(
    collective: Collective, hardware: Hardware, calibration: Calibration | None = None
) -> float:
    """Return the seconds of one collective alone on its link.

    They are the latency of its steps, plus wire bytes over bus bandwidth.
    """
    ranks = len(collective.ranks)
    sent = count_wire_bytes(collective.operation, collective.bytes, ranks)
    if not sent:
        return 0.0
    # Ranks are placed in order, so many to a machine.
    by_node = Counter(rank // hardware.ranks_per_node for rank in collective.ranks)
    bandwidth = (calibration and calibration.link_bandwidth) or hardware.link.bandwidth
    # A group that spans machines uses the network cards of all of its ranks on a machine, up to the
    # bandwidth inside one.
    if len(by_node) > 1:
        bandwidth = min(bandwidth, min(by_node.values()) * hardware.inter_node_bandwidth)
    steps = _count_steps(collective.operation, ranks)
    # Of the steps, those that wait for the network: NCCL's src/graph/tuning.cc.
    rounds = 2 if collective.operation == "all_reduce" else 1
    crossings = min(rounds * (len(by_node) - 1), steps)
    if calibration and calibration.links and len(by_node) == 1:
        # What was measured among some ranks takes more steps among more.
        more_steps = max(0, steps - _count_steps(collective.operation, calibration.links.ranks))
        seconds = calibration.links.interpolate_seconds(collective.operation, sent)
        return seconds + more_steps * hardware.link.latency
    latency = crossings * hardware.inter_node_latency + (steps - crossings) * hardware.link.latency
    return COLLECTIVE_SECONDS + latency + sent / bandwidth


def _count_steps(operation: str, ranks: int) -> int:
    """Return the steps of a collective, which are one after the other."""
    if operation in ("send", "recv"):
        return 1
    if operation != "all_reduce":
        return ranks - 1
    # An all-reduce goes round its ring twice; a small one takes a tree, up and down.
    return min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))


def compute_op_seconds(op: Op, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """Return the seconds of one operator alone on the device.

    A kernel takes the longest of computing, moving bytes and the smallest kernel.
    """
    if op.collective:
        return compute_collective_seconds(op.collective, hardware, calibration)
    # An operator that moves nothing makes an empty tensor.
    if is_wait(op) or not (op.flops or op.bytes):
        return 0.0
    if op.transfer:  # its bytes are counted where they are read and where they are written
        return max(
            op.bytes / 2 / _get_copy_rate(op.transfer, hardware, calibration), KERNEL_SECONDS
        )
    if op.on_host:
        return op.bytes / hardware.host_memory_bandwidth
    if matmuls := count_issued_matmuls(op, hardware.architecture):
        matmul = replace(
            op, flops=op.flops // matmuls, bytes=op.bytes // matmuls, shape=(1, *op.shape[1:])
        )
        return matmuls * _compute_kernel_seconds(matmul, hardware, calibration, splits=True)
    return _compute_kernel_seconds(op, hardware, calibration)


def _compute_kernel_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False
) -> float:
    floor = calibration.kernel_seconds if calibration else KERNEL_SECONDS
    bandwidth = calibration.bandwidth if calibration else compute_bandwidth(hardware, op.bytes)
    if "_fused_adam" in op.name:
        bandwidth = (calibration and calibration.optimizer) or min(
            bandwidth, compute_adam_bandwidth(hardware, op.bytes)
        )
    return max(
        _compute_arithmetic_seconds(op, hardware, calibration=calibration, splits=splits),
        op.bytes / bandwidth,
        floor,
    )


def _compute_arithmetic_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False
) -> float:
    """Return the seconds of a matmul's or attention's arithmetic, 0 for others."""
    # Measured rates scale those of `kernel_rates`.
    if is_attention(op):
        if len(op.shape) != 5:
            return op.flops / hardware.rate(op.dtype)
        seconds = compute_attention_seconds(hardware, op.name, dtype=op.dtype, shape=op.shape)
        return seconds * _compute_attention_scale(
            hardware, calibration, choose_attention_kernel(hardware, op.name, op.shape[-1])
        )
    if not op.flops:
        return 0.0
    shape = op.shape[:-1] if is_grouped(op) else op.shape
    scale = (
        1.0
        if calibration is None
        else _interpolate(_list_matmul_scales(op.dtype, hardware, calibration), op.flops)
    )
    return op.flops / (compute_matmul_rate(hardware, op.dtype, shape=shape, splits=splits) * scale)


def compute_least_op_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None = None
) -> float:
    """Return what a matmul or attention takes at least, however many rows are computed at once.

    It is 0 for others.
    """
    if is_attention(op):
        return _compute_arithmetic_seconds(op, hardware, calibration)
    points = [] if calibration is None else _list_matmul_scales(op.dtype, hardware, calibration)
    highest = max((scale for _, scale in points), default=1.0)
    return op.flops / (compute_matmul_rate(hardware, op.dtype, ()) * highest)


def is_attention(op: Op) -> bool:
    """Return True if it is an attention kernel."""
    return "attention" in op.name or "attn" in op.name


def _get_copy_rate(direction: str, hardware: Hardware, calibration: Calibration | None) -> float:
    """Return the bytes a second between host and device."""
    if calibration is None:
        return hardware.host_bandwidth
    measured = calibration.copy_to_host if direction == "to_host" else calibration.copy_to_device
    return measured or hardware.host_bandwidth


def compute_launch_seconds(
    op: Op, calibration: Calibration | None = None, architecture: str = ""
) -> float:
    """Return the seconds for the host to issue one operator."""
    # Of a grouped matmul that the architecture has no kernel for, each matmul is issued too.
    issued = count_issued_matmuls(op, architecture) if architecture else 0
    if op.name.startswith("tune_recipes::") and not issued:
        return COMPILED_SECONDS
    return (1 + issued) * (calibration.host_seconds if calibration else HOST_SECONDS)


def is_wait(op: Op) -> bool:
    """Return True if the operator only makes its stream wait for a collective."""
    return op.name == WORK_WAIT or op.name.endswith("wait_tensor")


def _list_matmul_scales(
    dtype: str, hardware: Hardware, calibration: Calibration
) -> list[tuple[float, float]]:
    """Return (operations, rate in a run over that of `compute_matmul_rate`) of the measured shapes.

    Small ones are first. Of a dtype that was not measured they are those of bf16.
    """
    known = next(
        name for name in (dtype, "bf16", *calibration.matmul) if name in calibration.matmul
    )
    share = calibration.step_share or get_run_share(hardware)
    least = 0.0 if hardware.architecture == "cpu" else _HOST_BOUND * calibration.host_seconds
    points = [
        (2.0 * m * n * k, rate, (1, m, k, n)) for (m, n, k), rate in calibration.matmul[known]
    ]
    # The host issues measured calls one by one: one that takes the host about as long says nothing
    # of the device. It is left out, but for the largest.
    points = [point for point in points if point[0] / point[1] >= least] or points[-1:]
    return [
        (flops, share * rate / compute_matmul_rate(hardware, known, shape))
        for flops, rate, shape in points
    ]


def _compute_attention_scale(
    hardware: Hardware, calibration: Calibration | None, kernel: str
) -> float:
    """Return the measured seconds of attention over those of `compute_attention_seconds`.

    It is 1 for a kernel that was not measured.
    """
    rows, heads, tokens, width = TINY_ATTENTION if hardware.architecture == "cpu" else ATTENTION
    measured = "aten::_scaled_dot_product_flash_attention"
    if calibration is None or kernel != choose_attention_kernel(hardware, measured, width):
        return 1.0
    shape = (rows * heads, tokens, tokens, (tokens + 1) // 2, width)
    expected = sum(
        compute_attention_seconds(hardware, name, dtype="bf16", shape=shape)
        for name in (measured, f"{measured}_backward")
    )
    # As `measure_rates` counts them: all scores, forward and backward.
    return 14.0 * rows * heads * tokens * tokens * width / calibration.attention / expected


def _interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value at `size` between points, linear in its logarithm; beyond them the ends'."""
    sizes, values = zip(*points, strict=True)
    return float(np.interp(math.log(size), np.log(sizes), values))


def count_model_flops(trace: Trace, phase: str) -> int:
    """Return the operations of forward and backward in a phase, on this rank."""
    # What activation checkpointing computes again is no work of the model.
    return sum(
        op.flops * op.repeats
        for op in trace.iterate_ops(phase)
        if op.part in ("forward", "backward")
    )


def compute_model_flops_utilization(
    flops: float, seconds: float, hardware: Hardware, dtype: str = "bf16"
) -> float:
    """Return the share of the device's dense rate that the model's own operations use in a step.

    That is the MFU of arXiv 2204.02311, appendix B; 0 for a step that takes no time. flops: of one
    rank, from `count_model_flops`.
    """
    return flops / (hardware.rate(dtype) * seconds) if seconds > 0 else 0.0


def describe_error(hardware: Hardware, calibration: Calibration | None) -> str:
    """Return how far off the times may be, for `TimePlan.error`.

    Those of data sheets are by docs/measurements/planned_times.md.
    """
    if calibration:
        link = "" if calibration.link_bandwidth else "; the links were not measured"
        about = (
            "tens of percent, as shapes were tiny"
            if hardware.architecture == "cpu"
            else "about 10 to 15 %"
        )
        return f"rates measured on {calibration.device} ({calibration.date}): {about}{link}"
    if hardware.name in COMPARED:
        return (
            "not calibrated: of published speeds of such cards, nine in ten were planned within"
            " 25 %"
        )
    rates = f"rates of {hardware.rates_of}; " if hardware.rates_of else ""
    return (
        f"{rates}not calibrated, no published speed to compare with: tens of percent, good for"
        " ranking only"
    )


# Matmuls over the rows of many experts: which devices have one kernel for all, and what an uneven
# router changes. Arithmetic and allocated bytes are the same whatever the router chooses; which
# weights are read, and how many rows are computed with each, is not.

# aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: one kernel (CUTLASS) for bf16 on
# these; else _grouped_mm_fallback of ATen/native/GroupedMMUtils.h, by which the host reads the
# numbers of rows and issues a matmul for each expert.
_ONE_KERNEL = ("sm90", "sm100")
_OURS = "tune_recipes::"  # those of `recipe_lib.ops.mlp`, a loop everywhere
_FIELDS = 5  # of a grouped matmul's shape; attention has as many


def has_grouped_kernel(architecture: str) -> bool:
    """Return True if such a GPU has one kernel for a grouped matmul in bf16."""
    return architecture in _ONE_KERNEL


def is_grouped(op: Op) -> bool:
    """Return True if it multiplies rows by their experts' weights, or makes gradients of those."""
    return "grouped" in op.name and len(op.shape) == _FIELDS


def count_issued_matmuls(op: Op, architecture: str) -> int:
    """Return how many matmuls the host issues one by one for a grouped one.

    It has waited for the numbers of their rows before. It is 0 for any other operator, and where
    one kernel computes all of them.
    """
    if not is_grouped(op) or architecture == "cpu":
        return 0
    if has_grouped_kernel(architecture) and op.dtype == "bf16" and not op.name.startswith(_OURS):
        return 0
    return op.shape[0]


def set_loads(op: Op, experts: int) -> Op:
    """Return a grouped matmul whose rows are all of `experts` experts, each with as many.

    Any other operator is returned as it is.
    """
    if not is_grouped(op) or experts >= op.shape[0]:
        return op
    matrices, m, k, n, row_dim = op.shape
    rows = math.ceil(matrices * (m if row_dim == 1 else k) / experts)
    if row_dim == 2:  # gradients of weights: those of other experts are 0
        return replace(op, shape=(experts, m, rows, n, row_dim))
    # Bytes are those of rows, results and weights, whose elements have one type. The weights of
    # other experts are not read.
    elements = matrices * (m * k + k * n + m * n)
    read = elements - (matrices - experts) * k * n
    return replace(op, shape=(experts, rows, k, n, row_dim), bytes=op.bytes * read // elements)

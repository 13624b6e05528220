"""Compute the seconds that each operator and collective of a trace takes while nothing else runs.

`stream_schedule.py` calls `compute_op_seconds` (a roofline) and `compute_launch_seconds` (the
host's time), and puts them on a time line. A calibration is the rates that `tune doctor` measured.
Without one, a rate is the data sheet's times the share that kernels of such a shape reach.
Operations are FLOPs: a multiplication and an addition are two. Imports no torch.
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

# The shortest kernel: its start and end on the device, commonly given as 2 to 4 us.
KERNEL_SECONDS = 3e-6
HOST_SECONDS = 6e-6  # for the host to issue one operator from Python, eagerly: 5 to 10 us
# For the host to call a compiled operator of this library: docs/measurements/fused_kernels.md.
COMPILED_SECONDS = 40e-6
# How many `host_seconds` issuing a linear layer takes: the operator, and its module's call.
_HOST_BOUND = 2
# Latency before the first step of a ring: NCCL's src/graph/tuning.cc, ring, Simple.
COLLECTIVE_SECONDS = 8.4e-6

# (batch size, heads, tokens, head dimension) of the attention that a calibration measures on a GPU.
ATTENTION = (2, 32, 4096, 128)
TINY_ATTENTION = (1, 2, 64, 32)  # the same for a CPU, whose measurement is only a dry run
# Devices whose times without a calibration docs/measurements/planned_times.md compares with
# published speeds.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "rtx4090")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")  # collectives that are measured


CollectiveTime = tuple[float, float]  # (bytes that a rank sends, seconds)
MatmulRate = tuple[tuple[int, int, int], float]  # ((m, n, k), operations per second)


@dataclass(frozen=True)
class Links:
    """Measured seconds of collectives by size."""

    # Number of ranks that measured.
    ranks: int
    # Backend of the process group that measured, such as `nccl`.
    backend: str
    # Operation -> its times, fewest bytes first.
    points: Mapping[str, tuple[CollectiveTime, ...]]

    def interpolate_seconds(self, operation: str, sent: float) -> float:
        """Return the seconds of a collective in which each rank sends `sent` bytes.

        They are interpolated linearly between two measured sizes. Below the smallest size its time
        is returned; above the largest one its bandwidth is taken.
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
    """Rates that `tune doctor` measured on a device; they replace those of its data sheet.

    None: not measured, or absent from an older file.
    """

    # Name of the device, as CUDA reports it.
    device: str
    # Version of torch.
    torch: str
    # Date of the measurement.
    date: str
    # Dtype -> rates of matmuls `[m, k] @ [k, n]`, smallest first.
    matmul: dict[str, tuple[MatmulRate, ...]]
    # Operations per second of one causal forward and backward of ATTENTION. Masked scores are
    # counted, too.
    attention: float
    # Bytes per second that an elementwise operator reads and writes.
    bandwidth: float
    # Seconds for the host to issue an operator.
    host_seconds: float
    # Seconds of the smallest kernel.
    kernel_seconds: float
    # Bus bandwidth of a large all-gather, bytes per second; None where one rank measured.
    link_bandwidth: float | None = None
    # Seconds of collectives by size.
    links: Links | None = None
    # Bytes per second of copies from pinned host memory.
    copy_to_device: float | None = None
    # Bytes per second of copies to pinned host memory.
    copy_to_host: float | None = None
    # Share of the rates in `matmul` that matmuls reach in the steps of a long run.
    step_share: float | None = None
    # Bytes per second that fused AdamW reads and writes.
    optimizer: float | None = None
    # Total bytes of the device's memory.
    memory: int | None = None


def count_wire_bytes(operation: str, num_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends (or, for `recv`, receives) in a collective of `ranks`.

    num_bytes: bytes of the full tensor. Raises ValueError for an unknown operation.
    """
    # A ring sends the least that any algorithm can: nccl-tests, doc/PERFORMANCE.md.
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

    They are the latency of its steps, plus the bytes that a rank sends divided by the bandwidth.
    Inside a machine they are interpolated from measured collectives if the calibration has some.
    """
    ranks = len(collective.ranks)
    sent = count_wire_bytes(collective.operation, collective.bytes, ranks)
    if not sent:
        return 0.0
    # Machine -> number of its ranks in this group. A machine has consecutive ranks.
    by_node = Counter(rank // hardware.ranks_per_node for rank in collective.ranks)
    bandwidth = (calibration and calibration.link_bandwidth) or hardware.link.bandwidth
    # A group that spans machines uses the network cards of all of its ranks on a machine, up to the
    # bandwidth inside one.
    if len(by_node) > 1:
        bandwidth = min(bandwidth, min(by_node.values()) * hardware.inter_node_bandwidth)
    steps = _count_steps(collective.operation, ranks)
    # Number of steps that cross the network, as NCCL's src/graph/tuning.cc counts them.
    rounds = 2 if collective.operation == "all_reduce" else 1
    crossings = min(rounds * (len(by_node) - 1), steps)
    if calibration and calibration.links and len(by_node) == 1:
        # A group larger than the measured one takes more steps.
        added_steps = max(0, steps - _count_steps(collective.operation, calibration.links.ranks))
        seconds = calibration.links.interpolate_seconds(collective.operation, sent)
        return seconds + added_steps * hardware.link.latency
    latency = crossings * hardware.inter_node_latency + (steps - crossings) * hardware.link.latency
    return COLLECTIVE_SECONDS + latency + sent / bandwidth


def _count_steps(operation: str, ranks: int) -> int:
    """Return the number of steps of a collective, each of which waits for the one before."""
    if operation in ("send", "recv"):
        return 1
    if operation != "all_reduce":
        return ranks - 1
    # An all-reduce goes round its ring twice; a small one takes a tree, up and down.
    return min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))


def compute_op_seconds(op: Op, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """Return the seconds of one operator alone on the device; 0 for one that launches no kernel.

    A kernel takes as long as its arithmetic, its memory traffic or the smallest kernel, whichever
    is longest. `op.repeats` is not counted.
    """
    if op.collective:
        return compute_collective_seconds(op.collective, hardware, calibration)
    # An operator without arithmetic and bytes makes an empty tensor.
    if is_wait(op) or not (op.flops or op.bytes):
        return 0.0
    if op.transfer:  # `op.bytes` counts each byte twice: as read and as written
        return max(
            op.bytes / 2 / _get_copy_rate(op.transfer, hardware, calibration), KERNEL_SECONDS
        )
    if op.on_host:  # the CPU computes it, limited by the host's memory
        return op.bytes / hardware.host_memory_bandwidth
    # A grouped matmul that the host issues as several: each has its share of arithmetic and bytes.
    if matmuls := count_issued_matmuls(op, hardware.architecture):
        matmul = replace(
            op, flops=op.flops // matmuls, bytes=op.bytes // matmuls, shape=(1, *op.shape[1:])
        )
        return matmuls * _compute_kernel_seconds(matmul, hardware, calibration, splits=True)
    return _compute_kernel_seconds(op, hardware, calibration)


def _compute_kernel_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False
) -> float:
    """Return the seconds of one kernel.

    splits: True for one of the matmuls of a grouped one, for which cuBLAS may choose split-K.
    """
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
    # A rate is that of `kernel_rates.py` for the shape, scaled by what a calibration measured.
    if is_attention(op):
        if len(op.shape) != 5:  # no shape was traced: at the device's full rate
            return op.flops / hardware.get_rate(op.dtype)
        seconds = compute_attention_seconds(hardware, op.name, dtype=op.dtype, shape=op.shape)
        return seconds * _compute_attention_scale(
            hardware, calibration, choose_attention_kernel(hardware, op.name, op.shape[-1])
        )
    if not op.flops:
        return 0.0
    shape = op.shape[:-1] if is_grouped(op) else op.shape  # without the row dimension
    scale = (
        1.0
        if calibration is None
        else _interpolate(_list_matmul_scales(op.dtype, hardware, calibration), op.flops)
    )
    return op.flops / (compute_matmul_rate(hardware, op.dtype, shape=shape, splits=splits) * scale)


def compute_least_op_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None = None
) -> float:
    """Return a lower bound of the seconds of a matmul or attention, for others 0.

    The bound holds for a micro-batch of any size: a matmul's is by the rate of a very large one.
    """
    if is_attention(op):
        return _compute_arithmetic_seconds(op, hardware, calibration)
    points = [] if calibration is None else _list_matmul_scales(op.dtype, hardware, calibration)
    highest = max((scale for _, scale in points), default=1.0)
    return op.flops / (compute_matmul_rate(hardware, op.dtype, ()) * highest)


def is_attention(op: Op) -> bool:
    """Return True if an operator is an attention kernel."""
    return "attention" in op.name or "attn" in op.name


def _get_copy_rate(direction: str, hardware: Hardware, calibration: Calibration | None) -> float:
    """Return the bytes per second of copies in a direction, `to_host` or `to_device`."""
    if calibration is None:
        return hardware.host_bandwidth
    measured = calibration.copy_to_host if direction == "to_host" else calibration.copy_to_device
    return measured or hardware.host_bandwidth


def compute_launch_seconds(
    op: Op, calibration: Calibration | None = None, architecture: str = ""
) -> float:
    """Return the seconds for the host to issue one operator.

    architecture: of the device, such as `sm90`; "": a grouped matmul counts as one kernel.
    """
    # Without a grouped kernel, the host issues each matmul of a grouped one too.
    num_matmuls = count_issued_matmuls(op, architecture) if architecture else 0
    if op.name.startswith("tune_recipes::") and not num_matmuls:
        return COMPILED_SECONDS
    return (1 + num_matmuls) * (calibration.host_seconds if calibration else HOST_SECONDS)


def is_wait(op: Op) -> bool:
    """Return True if the operator only makes its stream wait for a collective."""
    return op.name == WORK_WAIT or op.name.endswith("wait_tensor")


def _list_matmul_scales(
    dtype: str, hardware: Hardware, calibration: Calibration
) -> list[tuple[float, float]]:
    """Return (operations, rate in a run / rate of `compute_matmul_rate`) for each measured shape.

    Small shapes are first. For a dtype that was not measured, return the scales of bf16, or else
    of any that was.
    """
    measured_dtype = next(
        name for name in (dtype, "bf16", *calibration.matmul) if name in calibration.matmul
    )
    share = calibration.step_share or get_run_share(hardware)
    least_seconds = (
        0.0 if hardware.architecture == "cpu" else _HOST_BOUND * calibration.host_seconds
    )
    points = [
        (2.0 * m * n * k, rate, (1, m, k, n))
        for (m, n, k), rate in calibration.matmul[measured_dtype]
    ]
    # The measured matmuls were issued one by one: one that is shorter than issuing it shows the
    # host's time, not the device's. Such ones are left out; if all are, the largest stays.
    points = [point for point in points if point[0] / point[1] >= least_seconds] or points[-1:]
    return [
        (flops, share * rate / compute_matmul_rate(hardware, measured_dtype, shape))
        for flops, rate, shape in points
    ]


def _compute_attention_scale(
    hardware: Hardware, calibration: Calibration | None, kernel: str
) -> float:
    """Return the measured seconds of attention divided by those of `compute_attention_seconds`.

    kernel: `flash`, `cudnn` or `efficient`. Return 1 for one that was not measured.
    """
    batch_size, heads, tokens, head_dim = (
        TINY_ATTENTION if hardware.architecture == "cpu" else ATTENTION
    )
    measured = "aten::_scaled_dot_product_flash_attention"
    if calibration is None or kernel != choose_attention_kernel(hardware, measured, head_dim):
        return 1.0
    shape = (batch_size * heads, tokens, tokens, (tokens + 1) // 2, head_dim)
    expected = sum(
        compute_attention_seconds(hardware, name, dtype="bf16", shape=shape)
        for name in (measured, f"{measured}_backward")
    )
    # 14 operations for each score and element of a head, as `measure_rates` counts them: 4 in
    # forward and 10 in backward, of all scores although attention is causal.
    return 14.0 * batch_size * heads * tokens * tokens * head_dim / calibration.attention / expected


def _interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value at `size`, interpolated linearly in log(size).

    points: (size, value), smallest first; beyond them the nearest one's value holds.
    """
    sizes, values = zip(*points, strict=True)
    return float(np.interp(math.log(size), np.log(sizes), values))


def count_model_flops(trace: Trace, phase: str) -> int:
    """Return the operations of forward and backward in a phase, on this rank.

    Raises ValueError if the phase was not traced.
    """
    # Recomputation of activation checkpointing (part `recompute`) is no work of the model.
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
    return flops / (hardware.get_rate(dtype) * seconds) if seconds > 0 else 0.0


def describe_error(hardware: Hardware, calibration: Calibration | None) -> str:
    """Return a text that says how far off the times may be, for `TimePlan.error`.

    The figures for data sheets are from docs/measurements/planned_times.md.
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


# Grouped matmuls: each expert's weight times its rows. Some devices have one kernel for all.
# Arithmetic and allocated bytes are the same whatever the router chooses; which weights are read,
# and how many rows are multiplied with each, is not.

# aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: one kernel (CUTLASS) for bf16 on
# these; else _grouped_mm_fallback of ATen/native/GroupedMMUtils.h, by which the host reads the
# numbers of rows and issues a matmul for each expert.
_ONE_KERNEL = ("sm90", "sm100")
# Prefix of the operators of `recipe_lib.ops.mlp`, which issue a matmul for each expert everywhere.
_OURS = "tune_recipes::"
# Length of `Op.shape` of a grouped matmul: (matrices, m, k, n, row dimension).
_FIELDS = 5


def has_grouped_kernel(architecture: str) -> bool:
    """Return True if such a GPU has one kernel for a grouped matmul in bf16."""
    return architecture in _ONE_KERNEL


def is_grouped(op: Op) -> bool:
    """Return True for an operator that is a grouped matmul, of forward or backward."""
    return "grouped" in op.name and len(op.shape) == _FIELDS


def count_issued_matmuls(op: Op, architecture: str) -> int:
    """Return the number of matmuls that the host issues one by one for a grouped matmul.

    The host waits for the numbers of rows before it issues them. Return 0 for any other operator,
    and where one kernel computes all matmuls.
    """
    if not is_grouped(op) or architecture == "cpu":
        return 0
    if has_grouped_kernel(architecture) and op.dtype == "bf16" and not op.name.startswith(_OURS):
        return 0
    return op.shape[0]


def set_loads(op: Op, experts: int) -> Op:
    """Return a grouped matmul with all rows divided evenly among `experts` of its experts.

    Any other operator is returned as it is, and so is one that has no more experts.
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
    elements_read = elements - (matrices - experts) * k * n
    return replace(
        op, shape=(experts, rows, k, n, row_dim), bytes=op.bytes * elements_read // elements
    )

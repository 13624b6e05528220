"""How long operators and collectives take: a roofline for kernels, latency plus bandwidth for
communication.

No torch in here. Without a calibration file the rates are the data sheet's times the share that
kernels of such a shape reach (`kernel_rates`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from recipe_lib.plan.allocation.untraced_memory import choose_attention_backend
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.tracing.trace import WORK_WAIT, Collective, Op, Trace

KERNEL_SECONDS = (
    3e-6  # no kernel is shorter: its start and end on the device, commonly given as 2 to 4 us
)
HOST_SECONDS = 6e-6  # for the host to issue one operator from Python, eagerly: 5 to 10 us
COMPILED_SECONDS = (
    40e-6  # for the host to call one of ours that is compiled: docs/measurements/fused_kernels.md
)
# Calls of Python that issue a product: one as long as `host_seconds`, and the module's around it
_HOST_BOUND = 2
COLLECTIVE_SECONDS = (
    8.4e-6  # before the first step of a ring: NCCL's src/graph/tuning.cc, ring, Simple
)

# (rows, heads, tokens, width of a head) of the attention that a calibration measures; on a CPU a
# tiny one.
ATTENTION, TINY_ATTENTION = (2, 32, 4096, 128), (1, 2, 64, 32)
# Devices of docs/measurements/planned_times.md: planned without a calibration, next to published
# speeds.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "rtx4090")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")  # collectives that are measured


@dataclass(frozen=True)
class Links:
    """What was measured. ranks, backend: of the measurement. points: operation -> (bytes that a
    rank sends, seconds), small ones first.
    """

    ranks: int
    backend: str
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def seconds(self, operation: str, sent: float) -> float:
        """Of a collective in which each rank sends so many bytes.

        Straight between two measured sizes; below the smallest its time, above the largest at its
        bandwidth. What was not measured (broadcasts, all-to-alls, transfers) is taken to be as fast
        as an all-gather.
        """
        points = self.points.get(operation) or self.points["all_gather"]
        sizes, seconds = zip(*points, strict=True)
        if sent > sizes[-1]:
            return float(seconds[-1] * sent / sizes[-1])
        return float(np.interp(sent, sizes, seconds))


@dataclass(frozen=True)
class Calibration:
    """Rates that were measured on a device; they replace the datasheet's.

    device: as CUDA names it. matmul: by dtype, (m, n, k) and operations a second at several sizes,
    small ones first. attention: operations a second of one forward and backward of ATTENTION, all
    scores counted. bandwidth: bytes/second of an elementwise operator. host_seconds: to issue one.
    kernel_seconds: of the smallest kernel. link_bandwidth: bus bandwidth of a large all-gather,
    None where one rank measured. links: collectives by size, where `tune doctor` measured them.
    copy_to_device, copy_to_host: bytes/second of pinned copies, None where they were not measured.
    step_share: of `matmul`'s rates, what products reach in steps that follow each other; optimizer:
    bytes/second of fused AdamW; memory: total bytes of the device; each None in files that do not
    have it.
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
    step_share: float | None = None
    optimizer: float | None = None
    memory: int | None = None


def count_wire_bytes(operation: str, num_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends (or, for `recv`, receives) in a collective of `ranks`; num_bytes:
    the whole tensor.

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


def compute_collective_seconds(
    collective: Collective, hardware: Hardware, calibration: Calibration | None = None
) -> float:
    """One collective alone on its link: latency of its steps plus wire bytes over bus bandwidth.

    Ranks are placed in order, `ranks_per_node` to a machine. A group that spans machines uses the
    network cards of all of its ranks on a machine, up to the bandwidth inside one.
    """
    ranks = len(collective.ranks)
    sent = count_wire_bytes(collective.operation, collective.bytes, ranks)
    if not sent:
        return 0.0
    by_node = Counter(rank // hardware.ranks_per_node for rank in collective.ranks)
    bandwidth = (calibration and calibration.link_bandwidth) or hardware.link.bandwidth
    if len(by_node) > 1:
        bandwidth = min(bandwidth, min(by_node.values()) * hardware.inter_node_bandwidth)
    steps = _count_steps(collective.operation, ranks)
    crossings = (
        len(by_node) - 1
    )  # of the steps, those that wait for the network (NCCL's src/graph/tuning.cc)
    if collective.operation == "all_reduce":
        crossings *= 2
    crossings = min(crossings, steps)
    if calibration and calibration.links and len(by_node) == 1:
        # What was measured among some ranks takes more steps among more.
        more = max(0, steps - _count_steps(collective.operation, calibration.links.ranks))
        return calibration.links.seconds(collective.operation, sent) + more * hardware.link.latency
    latency = crossings * hardware.inter_node_latency + (steps - crossings) * hardware.link.latency
    return COLLECTIVE_SECONDS + latency + sent / bandwidth


def _count_steps(operation: str, ranks: int) -> int:
    """Steps of a collective one after the other: of a ring, which an all-reduce goes round twice; a
    small one takes a tree, up and down.
    """
    if operation in ("send", "recv"):
        return 1
    return (
        min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
        if operation == "all_reduce"
        else ranks - 1
    )


def compute_op_seconds(op: Op, hardware: Hardware, calibration: Calibration | None = None) -> float:
    """One operator alone on the device: the longest of computing, moving bytes and the smallest
    kernel.

    A collective takes what `collective_seconds` says, a copy between host and device what their
    link takes, what the host computes what its memory gives; waiting for a collective, and an
    operator that moves nothing (an empty tensor), takes nothing.
    """
    if op.collective:
        return compute_collective_seconds(op.collective, hardware, calibration)
    if is_wait(op) or not (op.flops or op.bytes):
        return 0.0
    if op.transfer:  # its bytes are counted where they are read and where they are written
        return max(
            op.bytes / 2 / _get_copy_rate(op.transfer, hardware, calibration), KERNEL_SECONDS
        )
    if op.on_host:
        return op.bytes / hardware.host_memory_bandwidth
    if matmuls := count_issued_matmuls(op, hardware.architecture):
        one = replace(
            op, flops=op.flops // matmuls, bytes=op.bytes // matmuls, shape=(1, *op.shape[1:])
        )
        return matmuls * _compute_kernel_seconds(one, hardware, calibration, splits=True)
    return _compute_kernel_seconds(op, hardware, calibration)


def _compute_kernel_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False
) -> float:
    floor = calibration.kernel_seconds if calibration else KERNEL_SECONDS
    bandwidth = calibration.bandwidth if calibration else compute_bandwidth(hardware, op.bytes)
    if "_fused_adam" in op.name:
        measured = calibration.optimizer if calibration else None
        bandwidth = measured or min(bandwidth, compute_adam_bandwidth(hardware, op.bytes))
    return max(
        _compute_arithmetic_seconds(op, hardware, calibration, splits), op.bytes / bandwidth, floor
    )


def _compute_arithmetic_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None, splits: bool = False
) -> float:
    """Seconds of a matmul or attention, 0 for others; measured rates scale those of
    `kernel_rates`.
    """
    if is_attention(op):
        if len(op.shape) != 5:
            return op.flops / hardware.rate(op.dtype)
        seconds = compute_attention_seconds(hardware, op.name, op.dtype, op.shape)
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
    return op.flops / (compute_matmul_rate(hardware, op.dtype, shape, splits) * scale)


def compute_least_op_seconds(
    op: Op, hardware: Hardware, calibration: Calibration | None = None
) -> float:
    """What a matmul or attention takes at least, however many rows of it are computed at once; 0
    for others.
    """
    if is_attention(op):
        return _compute_arithmetic_seconds(op, hardware, calibration)
    points = [] if calibration is None else _list_matmul_scales(op.dtype, hardware, calibration)
    highest = max((scale for _, scale in points), default=1.0)
    return op.flops / (compute_matmul_rate(hardware, op.dtype, ()) * highest)


def is_attention(op: Op) -> bool:
    """Whether it is an attention kernel."""
    return "attention" in op.name or "attn" in op.name


def _get_copy_rate(way: str, hardware: Hardware, calibration: Calibration | None) -> float:
    """Bytes a second between host and device."""
    measured = None
    if calibration is not None:
        measured = calibration.copy_to_host if way == "to_host" else calibration.copy_to_device
    return measured or hardware.host_bandwidth


def compute_launch_seconds(
    op: Op, calibration: Calibration | None = None, architecture: str = ""
) -> float:
    """For the host to issue one operator: from Python, eagerly, or one of ours that is compiled; of
    a grouped matmul that the architecture has no kernel for, each of its matmuls as well.
    """
    issued = count_issued_matmuls(op, architecture) if architecture else 0
    if op.name.startswith("tune_recipes::") and not issued:
        return COMPILED_SECONDS
    return (1 + issued) * (calibration.host_seconds if calibration else HOST_SECONDS)


def is_wait(op: Op) -> bool:
    """Whether the operator only makes its stream wait for a collective."""
    return op.name == WORK_WAIT or op.name.endswith("wait_tensor")


def _list_matmul_scales(
    dtype: str, hardware: Hardware, calibration: Calibration
) -> list[tuple[float, float]]:
    """Return (operations, rate in a run over that of `matmul_rate`) of the shapes measured, small
    ones first; of a dtype that was not measured those of bf16.

    The host issues measured calls one by one: one that takes the host about as long is left out,
    but for the largest.
    """
    known = next(
        name for name in (dtype, "bf16", *calibration.matmul) if name in calibration.matmul
    )
    share = calibration.step_share or get_run_share(hardware)
    least = 0.0 if hardware.architecture == "cpu" else _HOST_BOUND * calibration.host_seconds
    points = [
        (2.0 * m * n * k, rate, (1, m, k, n)) for (m, n, k), rate in calibration.matmul[known]
    ]
    points = [point for point in points if point[0] / point[1] >= least] or points[-1:]
    return [
        (flops, share * rate / compute_matmul_rate(hardware, known, shape))
        for flops, rate, shape in points
    ]


def _compute_attention_scale(
    hardware: Hardware, calibration: Calibration | None, kernel: str
) -> float:
    """Return measured seconds of attention over those of `attention_seconds`; 1 for a kernel that
    was not measured.
    """
    rows, heads, tokens, width = TINY_ATTENTION if hardware.architecture == "cpu" else ATTENTION
    measured = "aten::_scaled_dot_product_flash_attention"
    if calibration is None or kernel != choose_attention_kernel(hardware, measured, width):
        return 1.0
    shape = (rows * heads, tokens, tokens, (tokens + 1) // 2, width)
    expected = sum(
        compute_attention_seconds(hardware, name, "bf16", shape)
        for name in (measured, f"{measured}_backward")
    )
    return 14.0 * rows * heads * tokens * tokens * width / calibration.attention / expected


def _interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at `size` between measured points, straight over the logarithm of size; the ends'
    beyond them.
    """
    sizes, values = zip(*points, strict=True)
    return float(np.interp(math.log(size), np.log(sizes), values))


def count_model_flops(trace: Trace, phase: str) -> int:
    """Operations of forward and backward in a phase, on this rank, without what activation
    checkpointing redoes.
    """
    return sum(
        op.flops * op.repeats
        for op in trace.iterate_ops(phase)
        if op.part in ("forward", "backward")
    )


def compute_model_flops_utilization(
    flops: float, seconds: float, hardware: Hardware, dtype: str = "bf16"
) -> float:
    """Share of the device's dense rate that the model's own operations use in a step (MFU, arXiv
    2204.02311, app. B).

    flops: of one rank, from `model_flops`. 0 for a step that takes no time.
    """
    return flops / (hardware.rate(dtype) * seconds) if seconds > 0 else 0.0


def describe_error(hardware: Hardware, calibration: Calibration | None) -> str:
    """How far off the times may be, for `TimePlan.error`; of data sheets, by
    docs/measurements/planned_times.md.
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
    rates = f"rates of {hardware.rates_of}; " if hardware.generic else ""
    return (
        f"{rates}not calibrated, no published speed to compare with: tens of percent, good for"
        " ranking only"
    )


# Which share of a card's rates kernels reach, by their shape: from published measurements. No torch
# in here.
#
# A matmul is cut into tiles, which the multiprocessors take in rounds; the last round is seldom
# full, and each tile begins and ends with work that a short inner dimension does not make up for.
# Attention has rates of its own, forward and backward apart. What others measured of whole training
# steps is not used here: it is for checking (docs/measurements/planned_times.md).


# Multiprocessors, as the data sheets and architecture whitepapers of hardware.py have them.
MULTIPROCESSORS = {
    "t4": 40, "rtx3090": 82, "rtx3090ti": 84, "rtx4090": 128, "rtx5090": 170, "a5000": 64, "a6000": 84,
    "rtx5000ada": 100, "rtx6000ada": 142, "rtxpro6000": 188, "a10": 72, "a10g": 80, "l4": 58, "a40": 84, "l40": 142,
    "l40s": 142, "a100-40gb": 108, "a100-80gb": 108, "a100-40gb-pcie": 108, "a100-80gb-pcie": 108, "h100": 132,
    "h100-pcie": 114, "h100-nvl": 132, "h200": 132, "b200": 148,
}  # fmt: skip

# What long matmuls in bf16 reach of the data sheet's rate without tiles that stay idle, sustained.
# Single matmuls by torch.mm (github.com/zzc0721/torch-performance-test-data, best of five sizes)
# and the best found by MAMF (stas00's ml-engineering, compute/accelerator): A100 SXM 264.5 and
# 271.2 of 312, A100 PCIe 241.5 and 252.9, H100 SXM 797.5 and 794.5 of 989, H100 PCIe 503.8 of 756,
# RTX 4090 165 to 173 of 165.2, RTX 3090 76.6 of 71 (the boost clock is exceeded), RTX 5090 240 of
# 209.5, RTX PRO 6000 418 of 503.8, A6000 123.3 of 154.8, A40 122.3 of 149.7, A10G 69.5 of 70, L40S
# 269.2 of 362, T4 42.7 of 65, B200 1,745 of 2,250. In a run of minutes clocks fall with heat and
# power: SimuMax's 78 shapes of an A100 PCIe need 0.78 (configs/system/a100_pcie.json) where its
# best single one is 0.81. Others are taken down from their best in the same way, those of 700 W and
# the GeForce cards by 0.90, and cards that nobody measured (A5000, A10, L4, RTX 5000 and 6000 Ada,
# L40) get the share of their next relative.
_MATMUL = {
    "t4": 0.62, "rtx3090": 0.98, "rtx3090ti": 0.98, "rtx4090": 0.90, "rtx5090": 1.03, "a5000": 0.77, "a6000": 0.77,
    "rtx5000ada": 0.72, "rtx6000ada": 0.72, "rtxpro6000": 0.80, "a10": 0.77, "a10g": 0.95, "l4": 0.72, "a40": 0.78,
    "l40": 0.72, "l40s": 0.72, "a100-40gb": 0.82, "a100-80gb": 0.82, "a100-40gb-pcie": 0.78, "a100-80gb-pcie": 0.78,
    "h100": 0.73, "h100-pcie": 0.64, "h100-nvl": 0.73, "h200": 0.73, "b200": 0.70,
}  # fmt: skip
_UNKNOWN_MATMUL = 0.75
# What a run of minutes keeps of the rate of a burst of milliseconds, as said above: these cards,
# and others.
_HOT = {"rtx3090", "rtx3090ti", "rtx4090", "rtx5090", "h100", "h100-nvl", "h200", "b200"}
_HOT_SHARE = 0.90
_COOL_SHARE = 0.96

# Tiles (rows, columns) with their share of the largest ones' rate, and the inner elements that
# beginning and ending a tile costs: fitted to the 78 shapes of SimuMax above, which then are 5.1 %
# off on average and 31 % at worst (N = 512).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
_TILE_START = 128

# Of bf16's share: fp32 by torch.mm as above (RTX 4090 54 of 82.6, A10G 23 of 35, H100 52 of 66.9,
# A100 17.6 of 19.5); eight bits by MAMF (H100 1,402 of 1,979 in fp8).
_OF_BF16 = {"fp32": 0.9, "tf32": 0.85, "int8": 0.88, "fp8": 0.88}


@dataclass(frozen=True)
class AttentionRates:
    """Shares of the dense bf16 rate that flash attention reaches with endless rows of width 128,
    scores that causality leaves out not counted; start: keys that the beginning and end of a row
    cost.
    """

    forward: float
    backward: float
    start: int


# FlashAttention 2, which torch's kernels are, unless said. sm80: causal, width 128, 143 TFLOP/s at
# 1k and 158 at 4k (liangan1/GPU_travel), backward by SimuMax's A100 file. sm86: RTX A5000 and a
# 3090, width 64 (gpu-mode/ring-attention issue 10, flash-attention issue 416). sm89: RTX 4090 at
# 2k, 151 forward and 99 backward (apache/tvm tl_doc). sm90: FlashAttention 3's paper, 191 to 335 by
# length; backward by flash-attention PR 2688. cuDNN's: the same paper, 315 to 539. sm100:
# flash-attention issue 1589. sm120: nobody's; as sm89. sm75 has none; torch's memory-efficient
# kernel.
_ATTENTION = {
    "sm75": AttentionRates(0.30, 0.25, 150),
    "sm80": AttentionRates(0.53, 0.50, 150),
    "sm86": AttentionRates(0.80, 0.75, 200),
    "sm89": AttentionRates(0.96, 0.63, 100),
    "sm90": AttentionRates(0.345, 0.30, 350),
    "sm100": AttentionRates(0.17, 0.14, 350),
    "sm120": AttentionRates(0.96, 0.63, 100),
    "cpu": AttentionRates(1.0, 1.0, 0),
}
_CUDNN = {"sm90": AttentionRates(0.56, 0.45, 400)}
# Heads narrower than 128 do more besides matmuls: RTX 4090 127, 142 and 151 at widths 32, 64 and
# 128.
_WIDTH = 12
_EFFICIENT = (
    0.6  # torch's memory-efficient kernel next to flash; no published figure for these cards
)

# Of the memory's rate, by kernels that only move bytes, 64 MB or more. sm80: 1,380 of 1,555 and
# 1,616 of 2,039; sm86: A6000 656 of 768, 3090 Ti 860 of 1,008; sm89: RTX 4090 905 to 922 of 1,008;
# sm90: nobody's, as sm80; sm120: 1,376 to 1,490 of 1,792; sm75: T4 240 of 320
# (mli/transformers-benchmarks, xytpai/nvbench, voipmonitor/rtx6kpro).
_BANDWIDTH = {
    "sm75": 0.75,
    "sm80": 0.85,
    "sm86": 0.85,
    "sm89": 0.91,
    "sm90": 0.85,
    "sm100": 0.85,
    "sm120": 0.80,
}
# Level 2 caches that hold what an elementwise kernel has just written, bytes (Ada and Blackwell
# whitepapers); others' are too small for the rows of a micro-batch.
_LARGE_CACHE = {
    "rtx4090": 72e6, "rtx5000ada": 72e6, "rtx6000ada": 96e6, "l4": 48e6, "l40": 96e6, "l40s": 96e6, "rtx5090": 96e6,
    "rtxpro6000": 128e6,
}  # fmt: skip
# 34 MB in an RTX 4090's cache move at 3.9 times the memory's rate (mli/transformers-benchmarks,
# issue 4). Taken: half of what a kernel moves is there, since it reads what was just written and
# writes what is read next.
_CACHE_SPEED, _CACHED = 3.9, 0.5

# Bytes a second that torch's fused Adam moves for each multiprocessor: it waits for memory with too
# few loads under way. The model of github.com/pytorch/pytorch/pull/117872, Llama 2 in bf16 (taken
# to be 7B), took 49.935 ms on an H100 with 132 of them: weight, gradient and two states read, three
# of them written. Nobody's of other architectures was found: they get the memory's rate.
_ADAM = {"sm90": 7 * 2 * 6_738_415_616 / 49.935e-3 / 132}


def compute_matmul_rate(
    hardware: Hardware, dtype: str, shape: tuple[int, ...], splits: bool = False
) -> float:
    """Operations a second of a matmul. shape: (matrices, m, k, n); (): as a very large one. splits:
    as `tile_share`.
    """
    name = hardware.rates_of or hardware.name
    share = _MATMUL.get(name, _UNKNOWN_MATMUL)
    share = share if dtype in ("bf16", "fp16") else min(1.0, share * _OF_BF16.get(dtype, 0.9))
    if hardware.architecture == "cpu":
        return hardware.rate(dtype)
    if not shape:
        return share * hardware.rate(dtype)
    return (
        share
        * hardware.rate(dtype)
        * compute_tile_share(*shape, MULTIPROCESSORS.get(name, 108), splits)
    )


def get_run_share(hardware: Hardware) -> float:
    """Return the share of a matmul's rate in a short measurement that is left in a run."""
    if hardware.architecture == "cpu":
        return 1.0
    return _HOT_SHARE if (hardware.rates_of or hardware.name) in _HOT else _COOL_SHARE


@lru_cache(maxsize=4096)
def compute_tile_share(
    matrices: int, m: int, k: int, n: int, multiprocessors: int, splits: bool = False
) -> float:
    """The share of a matmul's time in which its tiles do work that counts: full rounds of all
    multiprocessors, and inner dimensions that are long.

    splits: where there are fewer tiles than multiprocessors, several may share the inner dimension
    of one (split-K, which cuBLAS chooses for few rows); what adding up their sums costs, no figure
    was found for.
    """
    best = 0.0
    for rows, columns, speed in _TILES:
        tiles = matrices * math.ceil(m / rows) * math.ceil(n / columns)
        useful = matrices * (m / rows) * (n / columns)
        for parts in range(1, (max(1, multiprocessors // tiles) if splits else 1) + 1):
            rounds = math.ceil(tiles * parts / multiprocessors) * multiprocessors
            inner = k / parts
            best = max(best, speed * useful * parts / rounds * inner / (inner + _TILE_START))
    return best


def choose_attention_kernel(hardware: Hardware, name: str, width: int) -> str:
    """Return the kernel that torch runs for an attention operator: `cudnn`, `efficient` or `flash`.

    The planner traces the flash operator where torch prefers cuDNN's, which has heads of up to 128
    in eights.
    """
    if "cudnn" in name:
        return "cudnn"
    if "efficient" in name:
        return "efficient"
    preferred = (
        "scaled_dot_product" in name and choose_attention_backend(hardware.architecture) == "cudnn"
    )
    return "cudnn" if preferred and width <= 128 and width % 8 == 0 else "flash"


def compute_attention_seconds(
    hardware: Hardware, name: str, dtype: str, shape: tuple[int, ...]
) -> float:
    """Of an attention operator, from its name and `(rows times heads, queries, keys, keys seen,
    width)`.
    """
    rows, queries, keys, seen, width = shape
    backward = name.endswith("backward")
    flops = (5 if backward else 2) * 2.0 * rows * queries * seen * width
    architecture = hardware.architecture
    rates = _ATTENTION.get(architecture, _ATTENTION["sm80"])
    kernel = choose_attention_kernel(hardware, name, width)
    if kernel == "cudnn":
        rates = _CUDNN.get(architecture, rates)
    share = rates.backward if backward else rates.forward
    share *= keys / (keys + rates.start) * width / (width + _WIDTH) * (128 + _WIDTH) / 128
    if kernel == "efficient" and architecture != "sm75":
        share *= _EFFICIENT
    return flops / (share * hardware.rate(dtype))


def compute_bandwidth(hardware: Hardware, num_bytes: int) -> float:
    """Bytes a second of a kernel that moves so many, of which it computes next to nothing."""
    rate = hardware.bandwidth * _BANDWIDTH.get(hardware.architecture, 0.8)
    cache = _LARGE_CACHE.get(hardware.rates_of or hardware.name, 0)
    if num_bytes < 0.6 * cache:
        rate /= 1 - _CACHED + _CACHED / _CACHE_SPEED
    return rate


def compute_adam_bandwidth(hardware: Hardware, num_bytes: int) -> float:
    """Return the bytes a second of torch's fused Adam and AdamW, which are bound by memory or by
    their own loads.
    """
    multiprocessors = MULTIPROCESSORS.get(hardware.rates_of or hardware.name, 108)
    return min(
        compute_bandwidth(hardware, num_bytes),
        _ADAM.get(hardware.architecture, math.inf) * multiprocessors,
    )


# Matmuls over the rows of many experts: which devices have one kernel for all, and what an uneven
# router changes.
#
# No torch in here. Arithmetic and allocated bytes are the same whatever the router chooses; which
# weights are read, and how many rows are computed with each, is not.


# aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: one kernel (CUTLASS) for bf16 on
# these; else _grouped_mm_fallback of ATen/native/GroupedMMUtils.h, by which the host reads the
# numbers of rows and issues a matmul for each expert.
_ONE_KERNEL = ("sm90", "sm100")
_OURS = "tune_recipes::"  # those of `recipe_lib.ops.grouped`, a loop everywhere
_FIELDS = 5  # of a grouped matmul's shape; attention has as many


def has_grouped_kernel(architecture: str) -> bool:
    """Whether such a GPU has one kernel for a grouped matmul in bf16."""
    return architecture in _ONE_KERNEL


def is_grouped(op: Op) -> bool:
    """Whether it multiplies rows by the weights of their experts, or makes the gradients of such
    weights.
    """
    return "grouped" in op.name and len(op.shape) == _FIELDS


def count_issued_matmuls(op: Op, architecture: str) -> int:
    """How many matmuls the host issues one by one for a grouped one, after it has waited for the
    numbers of their rows; 0 for any other operator, and where one kernel computes all of them.
    """
    if not is_grouped(op) or architecture == "cpu":
        return 0
    if has_grouped_kernel(architecture) and op.dtype == "bf16" and not op.name.startswith(_OURS):
        return 0
    return op.shape[0]


def set_loads(op: Op, experts: int) -> Op:
    """A grouped matmul whose rows are all of `experts` experts, each with as many: the weights of
    others are not read, and their gradients are 0. Any other operator as it is.
    """
    if not is_grouped(op) or experts >= op.shape[0]:
        return op
    matrices, m, k, n, place = op.shape
    rows = math.ceil(matrices * (m if place == 1 else k) / experts)
    if place == 2:
        return replace(op, shape=(experts, m, rows, n, place))
    # Bytes are those of rows, results and weights, whose elements have one type.
    elements = matrices * (m * k + k * n + m * n)
    read = elements - (matrices - experts) * k * n
    return replace(op, shape=(experts, rows, k, n, place), bytes=op.bytes * read // elements)

"""Compute the rates that kernels reach on a card, by their shape, from published measurements.

`cost.py` calls the `compute_...` functions. A matmul is cut into tiles, which the multiprocessors
take in rounds; the last round is seldom full, and a short inner dimension wastes the begin and end
of a tile. Attention has rates of its own. Measurements of whole training steps are not used here
but to check the result (docs/measurements/planned_times.md). Imports no torch.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from recipe_lib.plan.hardware import Hardware

# Card -> multiprocessors, by the data sheets and architecture whitepapers that hardware.py cites.
# A card that is not here is taken to have 108, as an A100.
MULTIPROCESSORS = {
    "t4": 40, "rtx3090": 82, "rtx3090ti": 84, "rtx4090": 128, "rtx5090": 170, "a5000": 64,
    "a6000": 84, "rtx5000ada": 100, "rtx6000ada": 142, "rtxpro6000": 188, "a10": 72, "a10g": 80,
    "l4": 58, "a40": 84, "l40": 142, "l40s": 142, "a100-40gb": 108, "a100-80gb": 108,
    "a100-40gb-pcie": 108, "a100-80gb-pcie": 108, "h100": 132, "h100-pcie": 114, "h100-nvl": 132,
    "h200": 132, "b200": 148,
}  # fmt: skip

# Card -> share of the data sheet's rate that large matmuls in bf16 reach in a run of minutes.
# TFLOP/s of single matmuls by torch.mm (github.com/zzc0721/torch-performance-test-data, best of 5
# sizes) and the best by MAMF (stas00's ml-engineering, compute/accelerator): A100 SXM 264.5 and
# 271.2 of 312, A100 PCIe 241.5 and 252.9, H100 SXM 797.5 and 794.5 of 989, H100 PCIe 503.8 of 756,
# RTX 4090 165 to 173 of 165.2, RTX 3090 76.6 of 71 (the boost clock is exceeded), RTX 5090 240 of
# 209.5, RTX PRO 6000 418 of 503.8, A6000 123.3 of 154.8, A40 122.3 of 149.7, A10G 69.5 of 70, L40S
# 269.2 of 362, T4 42.7 of 65, B200 1,745 of 2,250. In a run of minutes clocks fall with heat and
# power: SimuMax's 78 shapes of an A100 PCIe need 0.78 (configs/system/a100_pcie.json) where its
# best single one is 0.81. The shares of others are their best ones times 0.96 likewise, those of
# 700 W and the GeForce cards times 0.90. Cards that nobody measured (A5000, A10, L4, RTX 5000 and
# 6000 Ada, L40) get the share of their next relative.
MATMUL_SHARES = {
    "t4": 0.62, "rtx3090": 0.98, "rtx3090ti": 0.98, "rtx4090": 0.90, "rtx5090": 1.03, "a5000":
    0.77, "a6000": 0.77, "rtx5000ada": 0.72, "rtx6000ada": 0.72, "rtxpro6000": 0.80, "a10": 0.77,
    "a10g": 0.95, "l4": 0.72, "a40": 0.78, "l40": 0.72, "l40s": 0.72, "a100-40gb": 0.82,
    "a100-80gb": 0.82, "a100-40gb-pcie": 0.78, "a100-80gb-pcie": 0.78, "h100": 0.73, "h100-pcie":
    0.64, "h100-nvl": 0.73, "h200": 0.73, "b200": 0.70,
}  # fmt: skip
_UNKNOWN_CARD_SHARE = 0.75  # the same for a card that is not in the table
# Cards whose clocks fall most in a run of minutes, and the share of the rate of a burst of
# milliseconds that a run keeps, as said above: on these cards, and on others.
_HOT_CARDS = {
    "rtx3090",
    "rtx3090ti",
    "rtx4090",
    "rtx5090",
    "h100",
    "h100-nvl",
    "h200",
    "b200",
}
_HOT_SHARE = 0.90
_COOL_SHARE = 0.96

# Tiles (rows, columns, share of the largest ones' rate), and what begin and end of a tile cost, in
# elements of the inner dimension: fitted to the 78 shapes of SimuMax above, which then are 5.1 %
# off on average and 31 % at worst (N = 512).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
_TILE_START = 128

# Dtype -> factor from the share in bf16 to that in this dtype: fp32 by torch.mm as above (RTX 4090
# 54 of 82.6, A10G 23 of 35, H100 52 of 66.9, A100 17.6 of 19.5); eight bits by MAMF (H100 1,402 of
# 1,979 in fp8).
_FACTORS_OF_BF16 = {"fp32": 0.9, "tf32": 0.85, "int8": 0.88, "fp8": 0.88}


@dataclass(frozen=True)
class AttentionRates:
    """Shares of the dense bf16 rate that an attention kernel reaches.

    They are those of endless sequences with heads of 128; masked scores are not counted.
    """

    forward: float
    backward: float
    # Number of keys that take as long as the begin and end of a sequence.
    start: int


# Architecture -> rates of flash attention, by FlashAttention 2, which torch's kernels are. TFLOP/s
# of causal attention: sm80, width 128, 143 at 1k and 158 at 4k tokens (liangan1/GPU_travel),
# backward by SimuMax's A100 file. sm86: RTX A5000 and a 3090, width 64 (gpu-mode/ring-attention
# issue 10, flash-attention issue 416). sm89: RTX 4090 at 2k, 151 forward and 99 backward
# (apache/tvm tl_doc). sm90: FlashAttention 3's paper, 191 to 335 by length; backward by
# flash-attention PR 2688. sm100: flash-attention issue 1589. sm120: not measured, as sm89. sm75 has
# no flash attention: the rates are of torch's memory-efficient kernel.
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
# The same for cuDNN's kernels: FlashAttention 3's paper, 315 to 539 TFLOP/s.
_CUDNN_ATTENTION = {"sm90": AttentionRates(0.56, 0.45, 400)}
# Architectures on which torch prefers cuDNN above 9.15 for half-precision attention without a mask:
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention, release 2.13.
CUDNN_ARCHITECTURES = ("sm90", "sm100")
# Head width that takes as long as what a kernel does besides matmuls: RTX 4090 127, 142 and 151
# TFLOP/s at widths 32, 64 and 128.
_EXTRA_WIDTH = 12
# Rate of torch's memory-efficient kernel as a share of flash's: assumed, as no figure is published.
_EFFICIENT_SHARE = 0.6

# Architecture -> share of the memory's rate that kernels reach which only move bytes, 64 MB or
# more. GB/s: sm80 1,380 of 1,555 and 1,616 of 2,039; sm86: A6000 656 of 768, 3090 Ti 860 of 1,008;
# sm89: RTX 4090 905 to 922 of 1,008; sm90: not measured, as sm80; sm120: 1,376 to 1,490 of 1,792;
# sm75: T4 240 of 320 (mli/transformers-benchmarks, xytpai/nvbench, voipmonitor/rtx6kpro).
_BANDWIDTH = {
    "sm75": 0.75,
    "sm80": 0.85,
    "sm86": 0.85,
    "sm89": 0.91,
    "sm90": 0.85,
    "sm100": 0.85,
    "sm120": 0.80,
}
# Card -> bytes of its level 2 cache, where it is so large (Ada and Blackwell whitepapers) that it
# holds the activations that an elementwise kernel has just written.
_LARGE_CACHE = {
    "rtx4090": 72e6, "rtx5000ada": 72e6, "rtx6000ada": 96e6, "l4": 48e6, "l40": 96e6, "l40s":
    96e6, "rtx5090": 96e6, "rtxpro6000": 128e6,
}  # fmt: skip
# 34 MB in an RTX 4090's cache move at 3.9 times the memory's rate (mli/transformers-benchmarks,
# issue 4). It is assumed that half of what a kernel moves is there: it reads what was just written
# and writes what is read next.
_CACHE_SPEED = 3.9
_CACHED_SHARE = 0.5

# Architecture -> bytes a second that torch's fused Adam moves for each multiprocessor: it waits for
# memory with too few loads under way. The model of github.com/pytorch/pytorch/pull/117872, Llama 2
# in bf16 (taken to be 7B), took 49.935 ms on an H100 with 132 of them: weight, gradient and two
# states are read, all but the gradient written. No figure was found for other architectures: they
# get the memory's rate.
_ADAM_BANDWIDTH = {"sm90": 7 * 2 * 6_738_415_616 / 49.935e-3 / 132}


def compute_matmul_rate(
    hardware: Hardware, dtype: str, shape: tuple[int, ...], splits: bool = False
) -> float:
    """Return the operations a second of a matmul; a multiplication and an addition are two.

    shape: (matrices, m, k, n); (): that of a very large one. splits: as for `compute_tile_share`.
    """
    if hardware.architecture == "cpu":
        return hardware.get_rate(dtype)
    name = hardware.rates_of or hardware.name
    share = MATMUL_SHARES.get(name, _UNKNOWN_CARD_SHARE)
    if dtype not in ("bf16", "fp16"):
        share = min(1.0, share * _FACTORS_OF_BF16.get(dtype, 0.9))
    rate = share * hardware.get_rate(dtype)
    if not shape:
        return rate
    return rate * compute_tile_share(*shape, MULTIPROCESSORS.get(name, 108), splits)


def get_run_share(hardware: Hardware) -> float:
    """Return the share of a matmul's rate in a short measurement that it keeps in a run."""
    if hardware.architecture == "cpu":
        return 1.0
    return _HOT_SHARE if (hardware.rates_of or hardware.name) in _HOT_CARDS else _COOL_SHARE


@lru_cache(maxsize=4096)
def compute_tile_share(
    matrices: int, m: int, k: int, n: int, multiprocessors: int, splits: bool = False
) -> float:
    """Return the rate of a matmul `[m, k] @ [k, n]` as a share of a very large one's.

    Rounds of all multiprocessors may not be full, and short inner dimensions waste time. The best
    of _TILES is taken.

    matrices: how many such matmuls run at once. splits: where there are fewer tiles than
    multiprocessors, several may share the inner dimension of one (split-K, which cuBLAS chooses for
    few rows).
    """
    # No figure was found for the cost of adding up the sums of split-K: it is taken to be nothing.
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
    """Return the kernel that torch runs for attention: `cudnn`, `efficient` or `flash`.

    name: of the operator that was traced. width: head dimension.
    """
    if "cudnn" in name:
        return "cudnn"
    if "efficient" in name:
        return "efficient"
    # The planner traces the flash operator where torch prefers cuDNN's, which has heads of up to
    # 128 in eights. Documents of packed sequences always go through the varlen flash kernel.
    preferred = "scaled_dot_product" in name and hardware.architecture in CUDNN_ARCHITECTURES
    return "cudnn" if preferred and width <= 128 and width % 8 == 0 else "flash"


def compute_attention_seconds(
    hardware: Hardware, name: str, dtype: str, shape: tuple[int, ...]
) -> float:
    """Return the seconds of an attention operator, forward or backward by its name.

    shape: (batch size times heads, queries, keys, keys that a query sees on average, head width).
    """
    rows, queries, keys, seen, width = shape
    backward = name.endswith("backward")
    # Forward has two matmuls; backward four, and makes the scores again.
    flops = (5 if backward else 2) * 2.0 * rows * queries * seen * width
    architecture = hardware.architecture
    rates = _ATTENTION.get(architecture, _ATTENTION["sm80"])
    kernel = choose_attention_kernel(hardware, name, width)
    if kernel == "cudnn":
        rates = _CUDNN_ATTENTION.get(architecture, rates)
    share = rates.backward if backward else rates.forward
    share *= (
        keys / (keys + rates.start) * width / (width + _EXTRA_WIDTH) * (128 + _EXTRA_WIDTH) / 128
    )
    if kernel == "efficient" and architecture != "sm75":
        share *= _EFFICIENT_SHARE
    return flops / (share * hardware.get_rate(dtype))


def compute_bandwidth(hardware: Hardware, num_bytes: int) -> float:
    """Return the bytes a second of a kernel that moves `num_bytes` and computes next to nothing."""
    rate = hardware.bandwidth * _BANDWIDTH.get(hardware.architecture, 0.8)
    cache = _LARGE_CACHE.get(hardware.rates_of or hardware.name, 0)
    if num_bytes < 0.6 * cache:  # it fits beside other data
        rate /= 1 - _CACHED_SHARE + _CACHED_SHARE / _CACHE_SPEED
    return rate


def compute_adam_bandwidth(hardware: Hardware, num_bytes: int) -> float:
    """Return the bytes a second of a fused Adam or AdamW step of torch that moves `num_bytes`."""
    # They are bound by memory, or by the loads that their multiprocessors have under way.
    multiprocessors = MULTIPROCESSORS.get(hardware.rates_of or hardware.name, 108)
    return min(
        compute_bandwidth(hardware, num_bytes),
        _ADAM_BANDWIDTH.get(hardware.architecture, math.inf) * multiprocessors,
    )

"""Device memory that a simulated run cannot see: scratch of kernels, and what lies outside torch's allocator.

A simulated operator gives only its outputs; the real kernel also takes scratch from torch's allocator while it runs.
And a process holds memory that no allocator of torch hands out. No torch in here. Sources are files of PyTorch's
repository, release 2.13, unless they say otherwise; nothing here was fitted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.result import OutsideTorch
from recipe_lib.units import MIB

ALLOCATED, OUTSIDE = "allocated", "outside torch"


@dataclass(frozen=True)
class HiddenMemory:
    """A row of what is hidden. bytes: a fixed size, or None where a function of this module gives it from shapes.
    counted: `allocated` by torch, or `outside torch`. source: where the size is from."""

    name: str
    bytes: int | None
    counted: str
    source: str


HIDDEN = {
    row.name: row
    for row in (
        HiddenMemory(
            "matmul workspace, sm80 to sm89",
            4096 * 1024 * 2 + 16 * 1024 * 8,  # cuBLAS's default configuration :4096:2:16:8, in KiB
            ALLOCATED,
            "aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; pytorch issue 95668",
        ),
        HiddenMemory(
            "matmul workspace, sm90 and later",
            4096 * 8 * 1024,
            ALLOCATED,
            "aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize",
        ),
        HiddenMemory(
            "attention backward",
            None,
            ALLOCATED,
            "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd and mha_varlen_bwd; for cuDNN's "
            "kernel the same sums, an estimate",
        ),
        HiddenMemory("embedding backward", None, ALLOCATED, "aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu"),
        HiddenMemory(
            "softmax backward", None, ALLOCATED, "aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out"
        ),
        HiddenMemory(
            "grouped matmul",
            None,
            ALLOCATED,
            "aten/src/ATen/native/cuda/GroupMM.cu, input_args_size; CUTLASS's workspace, some tens of KiB, is left out",
        ),
        HiddenMemory(
            "context",
            600 * MIB,
            OUTSIDE,
            "processes of torch on A100 and H200 that hold little else, 612 to 614 MiB in public logs; 300 to 600 MiB "
            "is the range commonly given",
        ),
        HiddenMemory("communicator of 2 ranks", 544 * MIB, OUTSIDE, "github.com/NVIDIA/nccl/issues/964, 4 x A100"),
        HiddenMemory(
            "communicator of more ranks",
            688 * MIB,
            OUTSIDE,
            "github.com/NVIDIA/nccl/issues/964, 4 x A100; fewer channels (PCIe) take less, an all-to-all takes more "
            "(nccl issue 1685: 1.06 GB to 4.34 GB on 8 x H100)",
        ),
        HiddenMemory("reserve", 400 * MIB, OUTSIDE, "our choice: kernels loaded late, a display, other programs"),
    )
}

_SORTED_FROM = 3072  # aten/src/ATen/native/cuda/Embedding.cu: fewer tokens are added up without scratch


def workspace_bytes(architecture: str) -> int:
    """Workspace of cuBLAS and cuBLASLt (they share it) for each handle and stream that has multiplied; 0 on a CPU.

    The threads that run forward and backward have a handle each (aten/src/ATen/cuda/detail/DeviceThreadHandles.h).
    Allocated at the first matmul and kept; `CUBLAS_WORKSPACE_CONFIG` changes it.
    """
    if architecture == "cpu":
        return 0
    recent = _capability(architecture) >= 90
    return _bytes("matmul workspace, sm90 and later" if recent else "matmul workspace, sm80 to sm89")


def attention_backend(architecture: str) -> str:
    """The kernel that torch picks for half-precision attention without a mask: `cudnn`, `flash`, or `cpu`.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention: cuDNN above 9.15 on sm90 and
    sm100. Documents of packed sequences always go through the varlen flash kernel.
    """
    if architecture == "cpu":
        return "cpu"
    return "cudnn" if architecture in ("sm90", "sm100") else "flash"


def attention_backward_scratch(
    *, rows: int, heads: int, kv_heads: int, queries: int, keys: int, head_width: int, element_bytes: int = 2
) -> list[int]:
    """Bytes of each scratch tensor that the backward of flash attention holds while it runs, for q `[b, h, s, e]`.

    In their order: row sums of gradient times output `[b, h, s]`, the sum of dq `[b, s, h, e]`, both fp32, with s
    rounded up to 128 and e to 32 (to 64 above 128); then, where heads share keys, dk and dv for every head.
    """
    rounded = _round_up(queries, 128)
    scratch = [4 * rows * heads * rounded, 4 * rows * rounded * heads * _rounded_head(head_width)]
    return scratch + _expanded(rows * keys, heads, kv_heads, head_width, element_bytes)


def varlen_backward_scratch(
    *, tokens: int, documents: int, heads: int, kv_heads: int, head_width: int, element_bytes: int = 2
) -> list[int]:
    """The same for `documents` of together `tokens` tokens in one flat list: 128 more tokens for each document."""
    padded = tokens + 128 * documents
    scratch = [4 * heads * padded, 4 * padded * heads * _rounded_head(head_width)]
    return scratch + _expanded(tokens, heads, kv_heads, head_width, element_bytes)


def embedding_backward_scratch(*, tokens: int, width: int, index_bytes: int = 8) -> list[int]:
    """Bytes of each scratch tensor that the backward of an embedding holds while it runs; none for few tokens.

    Tokens and their order sorted, four lists over them, and an fp32 row of `width` for each token.
    """
    if tokens <= _SORTED_FROM:
        return []
    return [tokens * index_bytes] * 6 + [4 * tokens * width]


def softmax_backward_scratch(*, numbers: int, element_bytes: int) -> list[int]:
    """Bytes of the product of gradient and output that the backward of a softmax makes first; none of a log-softmax."""
    return [numbers * element_bytes]


def grouped_arguments(*, groups: int) -> int:
    """Bytes of what the kernel of a grouped matmul reads about each group: three pointers, an even number of each;
    three strides of 8 bytes, and three sizes of 4."""
    return 3 * 8 * _round_up(groups, 2) + 3 * 8 * groups + 3 * 4 * groups


def outside_torch(
    hardware: Hardware, communicators: Iterable[int], *, context: int | None = None, reserve: int | None = None
) -> OutsideTorch:
    """What one process holds outside torch's allocator.

    communicators: the number of ranks of each group that communicates (a group of one takes nothing). context,
    reserve: bytes that replace the table's. All are 0 on a CPU.
    """
    if hardware.architecture == "cpu":
        return OutsideTorch(context=context or 0, nccl=0, reserve=reserve or 0)
    nccl = sum(
        _bytes("communicator of 2 ranks" if ranks == 2 else "communicator of more ranks")
        for ranks in communicators
        if ranks > 1
    )
    return OutsideTorch(
        context=_bytes("context") if context is None else context,
        nccl=nccl,
        reserve=_bytes("reserve") if reserve is None else reserve,
    )


def _bytes(name: str) -> int:
    size = HIDDEN[name].bytes
    if size is None:
        raise ValueError(f"the size of {name} follows from shapes")
    return size


def _capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm"))


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _rounded_head(width: int) -> int:
    """Head width as the kernels are built for it: a multiple of 8 first, then of 32 or, above 128, of 64."""
    width = _round_up(width, 8)
    return _round_up(width, 32 if width <= 128 else 64)


def _expanded(tokens: int, heads: int, kv_heads: int, head_width: int, element_bytes: int) -> list[int]:
    """dk and dv with a copy for every query head, before they are summed over the heads that share them."""
    if heads == kv_heads:
        return []
    return [tokens * heads * _round_up(head_width, 8) * element_bytes] * 2

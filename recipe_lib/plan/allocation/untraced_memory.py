"""Device memory that a simulated run cannot see: scratch of kernels, and what lies outside torch's
allocator.

A simulated operator gives only its outputs; the real kernel also takes scratch from torch's
allocator while it runs. And a process holds memory that no allocator of torch hands out. No torch
in here. Sources are files of PyTorch's repository, release 2.13, unless they say otherwise; nothing
here was fitted.
"""

import math
from collections.abc import Iterable

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import OutsideTorch
from recipe_lib.units import MIB

# cuBLAS's default configuration :4096:2:16:8, in KiB, up to sm89;
# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; pytorch issue 95668.
MATMUL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
MATMUL_WORKSPACE_SM90 = 4096 * 8 * 1024  # the same, from sm90 on

# Outside of torch. Of a context: processes of torch on A100 and H200 that hold little else, 612 to
# 614 MiB in public logs; 300 to 600 MiB is the range commonly given.
CONTEXT = 600 * MIB
# Of communicators on 4 x A100: github.com/NVIDIA/nccl/issues/964. Fewer channels (PCIe) take less,
# an all-to-all takes more (nccl issue 1685: 1.06 GB to 4.34 GB on 8 x H100).
COMMUNICATOR_OF_TWO = 544 * MIB
COMMUNICATOR = 688 * MIB
RESERVE = 400 * MIB  # our choice: kernels loaded late, a display, other programs

_SORTED_FROM = (
    3072  # aten/src/ATen/native/cuda/Embedding.cu: fewer tokens are added up without scratch
)


def get_workspace_bytes(architecture: str) -> int:
    """Workspace of cuBLAS and cuBLASLt (they share it) for each handle and stream that has
    multiplied; 0 on a CPU.

    The threads that run forward and backward have a handle each
    (aten/src/ATen/cuda/detail/DeviceThreadHandles.h). Allocated at the first matmul and kept;
    `CUBLAS_WORKSPACE_CONFIG` changes it.
    """
    if architecture == "cpu":
        return 0
    return MATMUL_WORKSPACE_SM90 if int(architecture.removeprefix("sm")) >= 90 else MATMUL_WORKSPACE


def choose_attention_backend(architecture: str) -> str:
    """The kernel that torch picks for half-precision attention without a mask: `cudnn`, `flash`, or
    `cpu`.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention: cuDNN above
    9.15 on sm90 and sm100. Documents of packed sequences always go through the varlen flash kernel.
    """
    if architecture == "cpu":
        return "cpu"
    return "cudnn" if architecture in ("sm90", "sm100") else "flash"


def compute_attention_backward_scratch(
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_width: int,
    element_bytes: int = 2,
) -> list[int]:
    """Bytes of each scratch tensor that the backward of flash attention holds while it runs, for q
    `[b, h, s, e]`.

    In their order: row sums of gradient times output `[b, h, s]`, the sum of dq `[b, s, h, e]`,
    both fp32, with s rounded up to 128 and e to 32 (to 64 above 128); then, where heads share keys,
    dk and dv for every head. aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    mha_bwd and mha_varlen_bwd; for cuDNN's kernel the same sums, an estimate.
    """
    rounded = _round_up(queries, 128)
    scratch = [
        4 * rows * heads * rounded,
        4 * rows * rounded * heads * _round_head_width(head_width),
    ]
    return scratch + _compute_expanded_gradients(
        rows * keys, heads, kv_heads, head_width, element_bytes
    )


def compute_varlen_backward_scratch(
    *,
    tokens: int,
    documents: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    element_bytes: int = 2,
) -> list[int]:
    """The same for `documents` of together `tokens` tokens in one flat list: 128 more tokens for
    each document.
    """
    padded = tokens + 128 * documents
    scratch = [4 * heads * padded, 4 * padded * heads * _round_head_width(head_width)]
    return scratch + _compute_expanded_gradients(tokens, heads, kv_heads, head_width, element_bytes)


def compute_embedding_backward_scratch(
    *, tokens: int, width: int, index_bytes: int = 8
) -> list[int]:
    """Bytes of each scratch tensor that the backward of an embedding holds while it runs; none for
    few tokens.

    Tokens and their order sorted, four lists over them, and an fp32 row of `width` for each token:
    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    if tokens <= _SORTED_FROM:
        return []
    return [tokens * index_bytes] * 6 + [4 * tokens * width]


def compute_softmax_backward_scratch(*, numbers: int, element_bytes: int) -> list[int]:
    """Bytes of the product of gradient and output that the backward of a softmax makes first; none
    of a log-softmax.

    aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out.
    """
    return [numbers * element_bytes]


def count_grouped_arguments(*, groups: int) -> int:
    """Bytes of what the kernel of a grouped matmul reads about each group: three pointers, an even
    number of each; three strides of 8 bytes, and three sizes of 4.

    aten/src/ATen/native/cuda/GroupMM.cu, input_args_size; CUTLASS's workspace, some tens of KiB, is
    left out.
    """
    return 3 * 8 * _round_up(groups, 2) + 3 * 8 * groups + 3 * 4 * groups


def estimate_outside_torch(hardware: Hardware, communicators: Iterable[int]) -> OutsideTorch:
    """What one process holds outside torch's allocator; nothing on a CPU.

    communicators: the number of ranks of each group that communicates (a group of one takes
    nothing).
    """
    if hardware.architecture == "cpu":
        return OutsideTorch(context=0, nccl=0, reserve=0)
    nccl = sum(
        COMMUNICATOR_OF_TWO if ranks == 2 else COMMUNICATOR for ranks in communicators if ranks > 1
    )
    return OutsideTorch(context=CONTEXT, nccl=nccl, reserve=RESERVE)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _round_head_width(width: int) -> int:
    """Head width as the kernels are built for it: a multiple of 8 first, then of 32 or, above 128,
    of 64.
    """
    width = _round_up(width, 8)
    return _round_up(width, 32 if width <= 128 else 64)


def _compute_expanded_gradients(
    tokens: int, heads: int, kv_heads: int, head_width: int, element_bytes: int
) -> list[int]:
    """dk and dv with a copy for every query head, before they are summed over the heads that share
    them.
    """
    if heads == kv_heads:
        return []
    return [tokens * heads * _round_up(head_width, 8) * element_bytes] * 2

"""Compute the device memory that a simulated run cannot see, in bytes.

A simulated operator has only its outputs. The real kernel also takes scratch from torch's allocator
while it runs (`scratch` calls those functions). And a process holds memory that no allocator of
torch hands out (`estimate_outside_torch`, for a plan). Sources are files of PyTorch's repository,
release 2.13, unless they say otherwise; nothing here was fitted. No torch.
"""

import math
from collections.abc import Iterable

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import OutsideTorch
from recipe_lib.units import MIB

# cuBLAS's default workspace up to sm89, :4096:2:16:8: two buffers of 4096 KiB and eight of 16 KiB.
# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; pytorch issue 95668.
MATMUL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
MATMUL_WORKSPACE_SM90 = 4096 * 8 * 1024  # :4096:8, from sm90 on

# Outside of torch.
# The driver's context with the loaded kernels: processes of torch on A100 and H200 that hold little
# else have 612 to 614 MiB in public logs; 300 to 600 MiB is the range commonly given.
CONTEXT = 600 * MIB
# An NCCL communicator of two ranks and of more, on 4 x A100: github.com/NVIDIA/nccl/issues/964.
# Fewer channels (PCIe) take less, an all-to-all takes more (nccl issue 1685: 1.06 GB to 4.34 GB on
# 8 x H100).
COMMUNICATOR_OF_TWO = 544 * MIB
COMMUNICATOR = 688 * MIB
RESERVE = 400 * MIB  # our choice: kernels loaded late, a display, other programs

# Up to so many tokens, an embedding's backward takes no scratch:
# aten/src/ATen/native/cuda/Embedding.cu.
_MOST_UNSORTED = 3072


def get_workspace_bytes(architecture: str) -> int:
    """Return the bytes of the workspace of cuBLAS and cuBLASLt, which share it; 0 on a CPU.

    Each handle and stream that has multiplied has one, allocated at its first matmul and kept. The
    threads that run forward and backward have a handle each
    (aten/src/ATen/cuda/detail/DeviceThreadHandles.h). `CUBLAS_WORKSPACE_CONFIG` changes it.
    """
    if architecture == "cpu":
        return 0
    return MATMUL_WORKSPACE_SM90 if int(architecture.removeprefix("sm")) >= 90 else MATMUL_WORKSPACE


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
    """Return the bytes of each scratch tensor that flash attention's backward holds while it runs.

    rows: sequences of the batch. queries, keys: tokens of a sequence. element_bytes: of q, k and v.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd. For cuDNN's
    kernel it is an estimate.
    """
    return _compute_flash_scratch(
        padded_queries=rows * _round_up(queries, 128),  # the kernel takes queries in blocks of 128
        keys=rows * keys,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        element_bytes=element_bytes,
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
    """Return the same for packed documents, which have `tokens` tokens together.

    The kernel is varlen flash attention: mha_varlen_bwd in the same file.
    """
    return _compute_flash_scratch(
        padded_queries=tokens + 128 * documents,  # room for a block of 128 more in each document
        keys=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        element_bytes=element_bytes,
    )


def compute_embedding_backward_scratch(
    *, tokens: int, width: int, index_bytes: int = 8
) -> list[int]:
    """Return the bytes of each scratch tensor that an embedding's backward holds while it runs.

    width: of a row of the embedding. index_bytes: of a token's id. Source:
    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    if tokens <= _MOST_UNSORTED:
        return []
    # Tokens and their order sorted, four lists over them, and an fp32 row of `width` a token.
    return [tokens * index_bytes] * 6 + [4 * tokens * width]


def compute_softmax_backward_scratch(*, numbers: int, element_bytes: int) -> list[int]:
    """Return the bytes of each scratch tensor of a softmax's backward; a log-softmax has none.

    It makes the product of gradient and output first: aten/src/ATen/native/cuda/SoftMax.cu,
    softmax_backward_cuda_out. numbers: elements of the gradient.
    """
    return [numbers * element_bytes]


def count_grouped_arguments(*, groups: int) -> int:
    """Return the bytes of what the kernel of a grouped matmul reads about its groups.

    A group is an expert's rows and its weight. Source: aten/src/ATen/native/cuda/GroupMM.cu,
    input_args_size; CUTLASS's workspace, some tens of KiB, is left out.
    """
    # Three pointers, an even number of each; three strides of 8 bytes, and three sizes of 4.
    return 3 * 8 * _round_up(groups, 2) + 3 * 8 * groups + 3 * 4 * groups


def estimate_outside_torch(hardware: Hardware, communicators: Iterable[int]) -> OutsideTorch:
    """Return what one process holds outside torch's allocator; nothing on a CPU.

    communicators: the number of ranks of each group that communicates. A group of one takes
    nothing.
    """
    if hardware.architecture == "cpu":
        return OutsideTorch(context=0, nccl=0, reserve=0)
    nccl = sum(
        COMMUNICATOR_OF_TWO if ranks == 2 else COMMUNICATOR for ranks in communicators if ranks > 1
    )
    return OutsideTorch(context=CONTEXT, nccl=nccl, reserve=RESERVE)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _compute_flash_scratch(
    *,
    padded_queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    element_bytes: int,
) -> list[int]:
    """Return the bytes of each scratch tensor of flash attention's backward.

    padded_queries, keys: of all rows or documents together.
    """
    width = _round_up(head_width, 8)
    kernel_width = _round_up(width, 32 if width <= 128 else 64)  # that the kernels are built for
    # Both fp32: row sums of gradient times output `[b, h, s]`, and the sum of dq `[b, s, h, d]`.
    row_sums = 4 * heads * padded_queries
    scratch = [row_sums, row_sums * kernel_width]
    # Where query heads share keys, dk and dv have a copy for every query head, before those are
    # summed over the heads that share keys.
    if heads != kv_heads:
        scratch += [keys * heads * width * element_bytes] * 2
    return scratch

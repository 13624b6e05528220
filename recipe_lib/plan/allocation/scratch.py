"""Compute the scratch memory of kernels, which no tensor of a trace shows.

A plan passes the result of `make_kernel_memory` to a `Tracer` (it records what a simulated run
allocates), which calls it for each operator. This module reads the shapes from an operator's
arguments; `untraced_memory` has the formulas and their sources.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipe_lib.plan.allocation.untraced_memory import (
    compute_attention_backward_scratch,
    compute_embedding_backward_scratch,
    compute_softmax_backward_scratch,
    compute_varlen_backward_scratch,
    count_grouped_arguments,
    get_workspace_bytes,
)
from recipe_lib.plan.timing.cost import has_grouped_kernel
from recipe_lib.plan.tracing.tracer import KernelMemory

# Operators that take a workspace of cuBLAS.
_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
# Backward of attention `[b, h, s, d]`, and of attention over packed documents `[s, h, d]`.
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
    }
)
_VARLEN = frozenset({"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"})


def _compute_attention_scratch(args: Sequence[Any]) -> list[int]:
    # Returns the bytes of each scratch tensor. args: of an operator of _ATTENTION.
    _, query, key = args[:3]  # the gradient is the first
    rows, heads, queries, width = query.shape
    return compute_attention_backward_scratch(
        rows=rows,
        heads=heads,
        kv_heads=key.shape[1],
        queries=queries,
        keys=key.shape[2],
        head_width=width,
        element_bytes=query.element_size(),
    )


def _compute_varlen_scratch(args: Sequence[Any]) -> list[int]:
    # The same for an operator of _VARLEN.
    _, query, key = args[:3]
    tokens, heads, width = query.shape[-3:]
    bounds = [  # cu_seqlens of queries and keys
        value
        for value in args[3:]
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32
    ]
    return compute_varlen_backward_scratch(
        tokens=tokens,
        documents=len(bounds[0]) - 1 if bounds else 1,
        heads=heads,
        kv_heads=key.shape[-2],
        head_width=width,
        element_bytes=query.element_size(),
    )


# Operator -> a function of its arguments that returns the bytes of each of its scratch tensors.
# dequantize_nf4 takes codes with a row for each block, which has a scale, and as fourth argument a
# tensor of the result's type.
_SIZES: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    **dict.fromkeys(_ATTENTION, _compute_attention_scratch),
    **dict.fromkeys(_VARLEN, _compute_varlen_scratch),
    # Pointers and strides of each expert's matmul, for one kernel. The third argument has the end
    # of each expert's rows.
    "aten::_grouped_mm": lambda args: [count_grouped_arguments(groups=len(args[2]))],
    "aten::embedding_dense_backward": lambda args: compute_embedding_backward_scratch(
        tokens=args[1].numel(), width=args[0].shape[-1]
    ),
    "aten::_softmax_backward_data": lambda args: compute_softmax_backward_scratch(
        numbers=args[0].numel(), element_bytes=args[0].element_size()
    ),
    # A first kernel makes NF4's scales in the type of the result, from 8 bits.
    "tune_recipes::dequantize_nf4": lambda args: [len(args[0]) * args[3].element_size()],
}


def make_kernel_memory(architecture: str) -> KernelMemory:
    """Return the function that a tracer calls for the scratch of kernels.

    It takes (operator's name, its arguments, number of the stream), and returns [(bytes, True if
    they stay taken)]. It remembers the workspaces that are taken, so each simulation needs a
    function of its own. architecture: of the GPU, such as `sm90`, or `cpu`.
    """
    taken: set[tuple[int, bool]] = set()  # (stream, True in backward) that has a workspace
    workspace = get_workspace_bytes(architecture)
    if not workspace:  # a CPU
        return lambda name, args, stream: []
    # Without a kernel for grouped matmuls, torch runs one matmul of cuBLAS for each expert.
    matmuls = _MATMULS if has_grouped_kernel(architecture) else _MATMULS | {"aten::_grouped_mm"}

    def list_scratch(name: str, args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
        if name not in matmuls:
            return [(size, False) for size in _SIZES[name](args)] if name in _SIZES else []
        # A workspace of matmuls is taken once for each stream and handle, and stays. Forward and
        # backward run on threads with a handle each.
        is_backward = torch._C._current_graph_task_id() != -1
        if (stream, is_backward) in taken:
            return []
        taken.add((stream, is_backward))
        return [(workspace, True)]

    return list_scratch

"""Scratch memory of the operators in a trace, by `untraced_memory`: what the simulated device adds to it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipe_lib.plan.allocation.untraced_memory import (
    attention_backward_scratch,
    embedding_backward_scratch,
    grouped_arguments,
    softmax_backward_scratch,
    varlen_backward_scratch,
    workspace_bytes,
)
from recipe_lib.plan.timing.cost import one_kernel
from recipe_lib.plan.tracing.tracer import KernelMemory

_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
    }
)
_VARLEN = frozenset({"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"})


def kernel_memory(architecture: str) -> KernelMemory:
    """What each operator takes besides its outputs on a device of this architecture, as a tracer asks for it.

    A workspace of matmuls is taken once for each stream and direction (forward and backward run on threads with a
    handle each), and stays.
    """
    taken: set[tuple[int, bool]] = set()
    workspace = workspace_bytes(architecture)
    if not workspace:
        return lambda name, args, stream: []

    def matmul(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
        place = (stream, torch._C._current_graph_task_id() != -1)
        if place in taken:
            return []
        taken.add(place)
        return [(workspace, True)]

    table: dict[str, Callable[[Sequence[Any], int], list[tuple[int, bool]]]] = dict.fromkeys(_MATMULS, matmul)
    table |= dict.fromkeys(_ATTENTION, _attention) | dict.fromkeys(_VARLEN, _varlen)
    table["aten::_grouped_mm"] = _grouped if one_kernel(architecture) else matmul
    table["aten::embedding_dense_backward"] = _embedding
    table["aten::_softmax_backward_data"] = _softmax
    table["tune_recipes::dequantize_nf4"] = _scales

    def scratch(name: str, args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
        found = table.get(name)
        return found(args, stream) if found else []

    return scratch


def _attention(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    _, query, key = args[:3]
    rows, heads, queries, width = query.shape
    sizes = attention_backward_scratch(
        rows=rows, heads=heads, kv_heads=key.shape[1], queries=queries, keys=key.shape[2], head_width=width,
        element_bytes=query.element_size(),
    )  # fmt: skip
    return [(size, False) for size in sizes]


def _varlen(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    _, query, key = args[:3]
    tokens, heads, width = query.shape[-3:]
    boundaries = next(
        (value for value in args[3:] if isinstance(value, torch.Tensor) and value.dtype == torch.int32), None
    )
    sizes = varlen_backward_scratch(
        tokens=tokens, documents=len(boundaries) - 1 if boundaries is not None else 1, heads=heads,
        kv_heads=key.shape[-2], head_width=width, element_bytes=query.element_size(),
    )  # fmt: skip
    return [(size, False) for size in sizes]


def _grouped(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    """What one kernel for the rows of all experts is given of each; its last argument has the ends of their rows."""
    return [(grouped_arguments(groups=len(args[2])), False)]


def _embedding(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    gradient, tokens = args[:2]
    return [(size, False) for size in embedding_backward_scratch(tokens=tokens.numel(), width=gradient.shape[-1])]


def _softmax(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    gradient = args[0]
    sizes = softmax_backward_scratch(numbers=gradient.numel(), element_bytes=gradient.element_size())
    return [(size, False) for size in sizes]


def _scales(args: Sequence[Any], stream: int) -> list[tuple[int, bool]]:
    """NF4's scales, each block's in the type of its numbers, which a first kernel makes of 8 bits."""
    return [(len(args[0]) * args[3].element_size(), False)]

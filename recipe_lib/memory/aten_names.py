"""The operators that checkpointing tells apart, by their name: which of them exist depends on torch's release."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MATMUL, INTEGER_MATMUL, ATTENTION, SUM = "matmul", "integer matmul", "attention", "sum"

_KINDS = {
    "aten::mm": MATMUL,
    "aten::addmm": MATMUL,
    "aten::_scaled_mm": MATMUL,
    "aten::_int_mm": INTEGER_MATMUL,  # twice as large as what is made of it
    "aten::_scaled_dot_product_flash_attention": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": ATTENTION,
    "aten::_scaled_dot_product_fused_attention_overrideable": ATTENTION,
    "aten::_flash_attention_forward": ATTENTION,
    "aten::_efficient_attention_forward": ATTENTION,
    "torch_attn::_varlen_attn": ATTENTION,
    "flex_attention": ATTENTION,
    # Sums over the ranks that share a layer's matrices. What is gathered for them is kept by no mode: it is as large as
    # all ranks' hidden states; nor what FSDP gathers (`c10d::`), which would undo the sharding.
    "_c10d_functional::reduce_scatter_tensor": SUM,
    "_c10d_functional::all_reduce": SUM,
}

# Matmuls of the rows of each expert (`recipe_lib.ops.grouped`): torch's, and ours for other types than bf16.
GROUPED = frozenset({"aten::_grouped_mm", "tune_recipes::grouped_matmul_loop", "tune_recipes::grouped_gradient_loop"})


def grouped_flops(args: Sequence[Any], result: Tensor) -> int:
    """Operations of a grouped matmul, each of its rows once: they are the same whatever a row's expert is."""
    left, right = args[:2]
    if right.dim() == 2:
        return 2 * int(right.shape[0]) * int(result.shape[-2]) * int(result.shape[-1])
    return 2 * left.numel() * int(right.shape[-1])


def kind_of(operator: Any) -> str | None:
    """The kind of an operator of a dispatch mode; None: one that is never kept."""
    return _KINDS.get(
        operator.name().partition(".")[0] if isinstance(operator, torch._ops.OpOverload) else str(operator)
    )

"""Matmuls over the rows of many experts: which devices have one kernel for all, and what an uneven router changes.

No torch in here. Arithmetic and allocated bytes are the same whatever the router chooses; which weights are read, and
how many rows are computed with each, is not.
"""

import math
from dataclasses import replace

from recipe_lib.plan.trace import Op

# aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: one kernel (CUTLASS) for bf16 on these; else
# _grouped_mm_fallback of ATen/native/GroupedMMUtils.h, by which the host reads the numbers of rows and issues a matmul
# for each expert.
_ONE_KERNEL = ("sm90", "sm100")
_OURS = "tune_recipes::"  # those of `recipe_lib.ops.grouped`, a loop everywhere
_FIELDS = 5  # of a grouped matmul's shape; attention has as many


def one_kernel(architecture: str) -> bool:
    """Whether such a GPU has one kernel for a grouped matmul in bf16."""
    return architecture in _ONE_KERNEL


def is_grouped(op: Op) -> bool:
    """Whether it multiplies rows by the weights of their experts, or makes the gradients of such weights."""
    return "grouped" in op.name and len(op.shape) == _FIELDS


def matmuls_issued(op: Op, architecture: str) -> int:
    """How many matmuls the host issues one by one for a grouped one, after it has waited for the numbers of their rows;
    0 for any other operator, and where one kernel computes all of them."""
    if not is_grouped(op) or architecture == "cpu":
        return 0
    if one_kernel(architecture) and op.dtype == "bf16" and not op.name.startswith(_OURS):
        return 0
    return op.shape[0]


def with_loads(op: Op, experts: int) -> Op:
    """A grouped matmul whose rows are all of `experts` experts, each with as many: the weights of others are not read,
    and their gradients are 0. Any other operator as it is."""
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

"""The shapes that decide how fast a matmul or attention runs, from an operator's arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recipe_lib.memory.aten_names import GROUPED

_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
_FLAT = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "aten::_int_mm", "aten::_scaled_mm"})


def matmul_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """`(matrices, m, k, n)` of `[m, k] @ [k, n]`; () for an operator that is no matmul."""
    if name not in _FLAT and name not in _BATCHED:
        return ()
    dims = 3 if name in _BATCHED else 2
    first = 1 if name.startswith(("aten::addmm", "aten::baddbmm")) else 0
    left, right = args[first], args[first + 1]
    if left.dim() != dims or right.dim() != dims:
        return ()
    return (int(left.shape[0]) if dims == 3 else 1, int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1]))


def grouped_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """`(matrices, m, k, n, place of rows)` of a matmul of many weights; () for any other operator.

    Rows `[r, k]` by weights `[E, k, n]`: m is r / E, the rows of each expert where all have as many; their place is 1.
    Gradients of weights, `[m, r]` by `[r, n]`: the inner dimension is r / E, place 2. Fewer rows than experts are
    experts of one row each.
    """
    if name not in GROUPED:
        return ()
    left, right, ends = args[:3]
    if left.dim() != 2:
        return ()
    if right.dim() == 3:
        rows, inner = left.shape
        matrices, each = _shared(int(rows), int(right.shape[0]))
        return (matrices, each, int(inner), int(right.shape[2]), 1)
    outer = left.shape[1] if name == "tune_recipes::grouped_gradient_loop" else left.shape[0]
    matrices, each = _shared(int(right.shape[0]), len(ends))
    return (matrices, int(outer), each, int(right.shape[1]), 2)


def _shared(rows: int, experts: int) -> tuple[int, int]:
    """(experts that have rows, rows of each): shared out evenly, rounded up."""
    return max(1, min(rows, experts)), max(1, -(-rows // experts))


def attention_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """`(rows times heads, queries, keys, keys that a query sees on average, width)` of an attention operator; () for
    any other. Documents of one flat list count as rows of equal length."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    named.update(kwargs)
    query, key = named.get("query"), named.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return ()
    window = None
    if query.dim() == 4:
        rows, heads, queries, width = query.shape
        keys = key.shape[2]
    else:
        tokens, heads, width = query.shape
        bounds = named.get("cu_seq_q", named.get("cum_seq_q"))
        rows = len(bounds) - 1 if isinstance(bounds, Tensor) and bounds.dtype == torch.int32 else 1
        queries = keys = max(1, tokens // max(1, rows))
        window = named.get("window_size") or [named.get("window_size_left"), named.get("window_size_right")]
    left, right = window or (None, None)
    causal = bool(named.get("is_causal")) or right == 0
    return (rows * heads, queries, keys, _seen(keys, causal, -1 if left is None else left), width)


def _seen(keys: int, causal: bool, window: int) -> int:
    """Keys that a query sees on average. window: how many before itself it sees, -1 for all."""
    if not causal:
        return keys
    reach = min(keys, window + 1) if window >= 0 else keys
    return max(1, round(reach - reach * (reach - 1) / (2 * keys)))

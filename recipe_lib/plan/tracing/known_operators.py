"""Operators that a tracer knows by name."""

import torch

DEVICE = torch.ops.prim.device.default
NUMBER = torch.ops.aten._local_scalar_dense.default
PIN = torch.ops.aten._pin_memory.default
IS_PINNED = torch.ops.aten.is_pinned.default
LIKE = torch.ops.aten.empty_like.default
TO_COPY = torch.ops.aten._to_copy.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Made of aten::mm and views. An operator hashes itself in Python, its number does not; it lives as long as torch.
MATMULS = frozenset(map(id, (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)))
PROFILER = frozenset(
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)

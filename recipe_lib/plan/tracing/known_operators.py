"""Operators that a tracer knows by name."""

import torch

DEVICE = torch.ops.prim.device.default
NUMBER = torch.ops.aten._local_scalar_dense.default
PIN = torch.ops.aten._pin_memory.default
IS_PINNED = torch.ops.aten.is_pinned.default
LIKE = torch.ops.aten.empty_like.default
TO_COPY = torch.ops.aten._to_copy.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
MATMULS = frozenset({torch.ops.aten.linear.default, torch.ops.aten.matmul.default})  # made of aten::mm, with views
PROFILER = frozenset(
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)

"""What compiled code does, noted in a trace: its buffers, its kernels, and operators that it calls."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipe_lib.plan.trace import OP, Op
from recipe_lib.plan.tracing.operator_costs import cost_of, dtype_name
from recipe_lib.plan.world.cached_fake_mode import wrap
from recipe_lib.plan.world.compiled_code import CompiledCode, Listener, compiling_on_paper, is_compiling

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer

_BUFFER = "inductor::buffer"


@contextmanager
def compiling(tracer: "Tracer") -> Iterator[CompiledCode]:
    """Inside, torch.compile makes code that runs in the trace; what it does meanwhile is no part of the run."""
    assert tracer.fast is not None
    mode, device = tracer.fast.mode, torch.device(tracer.device_type, 0)

    def buffer(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        tensor = wrap(meta, mode, device)
        tracer.see([tensor], _BUFFER)
        return tensor

    def kernel(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        part, module = tracer.place()
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))
        dtype = dtype_name(written[0].dtype) if written else ""
        op = Op(f"inductor::{name}", tracer.stream(), part, module, tracer.phase, 0, moved, dtype)
        op.reads, op.makes = tracer.numbers(read), tracer.numbers(written)
        tracer.trace.ops.append(op)
        tracer.trace.events.append((OP, len(tracer.trace.ops) - 1))

    def matmul(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
        tracer.note(func, args, kwargs, result, cost_of(func, args, kwargs, result))

    tracer.is_compiling = is_compiling
    try:
        with compiling_on_paper(Listener(buffer, kernel, matmul)) as done:
            yield done
    finally:
        tracer.is_compiling = None


def around_operator(tracer: "Tracer", func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What compiled code wraps around an operator that draws numbers, so that it can be computed again."""
    if func.name() == "run_and_save_rng_state":
        state = torch.get_device_module(tracer.device_type).get_rng_state()
        with tracer:
            return state, args[0](*args[1:], **kwargs)
    if func.name() == "run_with_rng_state":
        with tracer:
            return args[1](*args[2:], **kwargs)
    raise RuntimeError(f"{func.name()}: not known on a simulated device")

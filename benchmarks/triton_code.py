"""What inductor makes of a function for an NVIDIA GPU, without one: its Triton kernels, and memory
that it takes.

The code is generated as for a device of compute capability 9.0, and not compiled. Needs the package
triton.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo import device_interface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, graph, scheduler
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from recipe_lib.ops.fused_kernels import get_inductor_options

H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 * 2**20, gcnArchName="",
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip


class _GeneratedError(Exception):
    """Carries the code past what would compile it."""


def generate_triton_code(function: Callable[..., Any], *arguments: Any) -> str:
    """The Python module that inductor writes for these arguments, as if their tensors were a
    GPU's.
    """
    given = [argument for argument in arguments if isinstance(argument, Tensor)]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        found = function(
            *(next(left) if isinstance(argument, Tensor) else argument for argument in arguments)
        )
        return found if isinstance(found, tuple) else (found,)

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with _pretend_h100(), torch.no_grad(), inductor_config.patch(get_inductor_options(function)):
        with fake:
            on = {where: [_make_like(one, where) for one in given] for where in ("cpu", "cuda")}
            module = make_fx(call, decomposition_table=select_decomp_table())(*on["cpu"])
            for node in module.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
                node.meta.pop("val", None)
            module.recompile()
            FakeTensorProp(module, fake).propagate_dont_convert_inputs(*on["cuda"])
        try:
            with tracing(TracingContext(fake)), inductor_config.patch(force_disable_caches=True):
                compile_fx.compile_fx_inner(module, on["cuda"])
        except BaseException as error:  # inductor wraps what is raised in it
            if (code := _find_code(error)) is None:
                raise
            return code
    raise RuntimeError("inductor generated no code")


def count_kernels(code: str) -> int:
    """Launches of Triton kernels."""
    return len(re.findall(r"^\s*\w+\.run\(", code, re.MULTILINE))


def count_bytes(code: str) -> int:
    """Bytes of all tensors that it makes, results among them."""
    total = 0
    for shape, dtype in re.findall(
        r"= empty_strided_cuda\(\(([\d, ]+)\), .*?, (torch\.\w+)\)", code
    ):
        numbers = [int(number) for number in shape.split(",") if number.strip()]
        total += torch.Size(numbers).numel() * getattr(torch, dtype.removeprefix("torch.")).itemsize
    return total


def _make_like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _find_code(error: BaseException | None) -> str | None:
    while error is not None and not isinstance(error, _GeneratedError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None if error is None else str(error.args[0])


def _raise_code(self: Any) -> Any:
    code = self.codegen()[0]
    raise _GeneratedError(getattr(code, "value", code))


@contextmanager
def _pretend_h100() -> Iterator[None]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    state = torch.zeros(16, dtype=torch.uint8)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    of_cuda = {
        "current_device": lambda: 0, "device_count": lambda: 1, "is_available": lambda: True,
        "_lazy_init": lambda: None, "get_rng_state": lambda *_: state, "set_rng_state": lambda *_: None,
        "_exchange_device": lambda _: 0, "_maybe_exchange_device": lambda _: 0,
        "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: H100,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, function in of_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(
            mock.patch.object(torch.cuda, "_get_device_properties", lambda _: H100, create=True)
        )
        interface = device_interface.CudaInterface
        properties = staticmethod(lambda *_: H100)
        stack.enter_context(
            mock.patch.object(interface.Worker, "get_device_properties", properties)
        )
        stack.enter_context(
            mock.patch.object(interface, "get_compute_capability", staticmethod(lambda *_: 90))
        )
        stack.enter_context(mock.patch.object(scheduler, "has_triton", lambda: True))
        stack.enter_context(
            mock.patch.object(graph.GraphLowering, "compile_to_module", _raise_code)
        )
        driver.set_active(target)
        yield

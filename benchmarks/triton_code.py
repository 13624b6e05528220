"""Generate the Triton code that inductor makes of a function for an H100, without a GPU.

`generate_triton_code` returns the module as text; nothing is compiled. `count_kernels` and
`count_bytes` read its kernels and the memory that it takes. Needs the package triton; private parts
of torch are patched so that it sees a device.
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

# What `torch.cuda.get_device_properties` says of an H100.
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)


class _GeneratedError(Exception):
    """Carries the generated code out of inductor, past what would compile it."""


def generate_triton_code(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the Python module that inductor writes, as if the tensors were a GPU's.

    arguments: the function's; of tensors only shape, strides and dtype matter. Raises RuntimeError
    if inductor ends without code, and what inductor raises before it has any.
    """
    tensor_arguments = [argument for argument in arguments if isinstance(argument, Tensor)]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the function with these tensors in the place of its tensor arguments."""
        remaining = iter(tensors)
        results = function(
            *(
                next(remaining) if isinstance(argument, Tensor) else argument
                for argument in arguments
            )
        )
        return results if isinstance(results, tuple) else (results,)

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with _pretend_h100(), torch.no_grad(), inductor_config.patch(get_inductor_options(function)):
        # Traced on the CPU. Then the graph's nodes are moved to the GPU, and fake tensors of the
        # GPU are propagated through them.
        with fake:
            cpu_inputs = [_make_like(tensor, "cpu") for tensor in tensor_arguments]
            cuda_inputs = [_make_like(tensor, "cuda") for tensor in tensor_arguments]
            module = make_fx(call, decomposition_table=select_decomp_table())(*cpu_inputs)
            for node in module.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
                node.meta.pop("val", None)
            module.recompile()
            FakeTensorProp(module, fake).propagate_dont_convert_inputs(*cuda_inputs)
        try:
            with tracing(TracingContext(fake)), inductor_config.patch(force_disable_caches=True):
                compile_fx.compile_fx_inner(module, cuda_inputs)
        except BaseException as error:  # inductor wraps what is raised in it
            code = _find_code(error)
            if code is None:
                raise
            return code
    raise RuntimeError("inductor generated no code")


def count_kernels(code: str) -> int:
    """Count the launches of Triton kernels."""
    return len(re.findall(r"^\s*\w+\.run\(", code, re.MULTILINE))


def count_bytes(code: str) -> int:
    """Count the bytes of all tensors that the code allocates, results included."""
    # (shape, dtype) of each, as text: `empty_strided_cuda((2, 3), (3, 1), torch.bfloat16)`.
    allocations = re.findall(r"= empty_strided_cuda\(\(([\d, ]+)\), .*?, (torch\.\w+)\)", code)
    total = 0
    for shape_text, dtype_text in allocations:
        shape = torch.Size([int(size) for size in shape_text.split(",") if size.strip()])
        dtype = getattr(torch, dtype_text.removeprefix("torch."))
        total += shape.numel() * dtype.itemsize
    return total


def _make_like(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on a device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _find_code(error: BaseException | None) -> str | None:
    """Return the code that an error carries, or one that it was raised from; None: neither does."""
    while error is not None and not isinstance(error, _GeneratedError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None if error is None else str(error.args[0])


def _raise_code(self: Any) -> Any:
    """Stand in for `GraphLowering.compile_to_module`: generate the code and compile nothing."""
    code = self.codegen()[0]  # text, or an object whose `value` it is, by the version of torch
    raise _GeneratedError(getattr(code, "value", code))


@contextmanager
def _pretend_h100() -> Iterator[None]:
    """Let torch, inductor and triton see an H100 while the block runs."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    rng_state = torch.zeros(16, dtype=torch.uint8)  # seed and offset, as CUDA's generator has
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    interface = device_interface.CudaInterface
    patches = [
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: 0,
            device_count=lambda: 1,
            is_available=lambda: True,
            _lazy_init=lambda: None,
            get_rng_state=lambda *_: rng_state,
            set_rng_state=lambda *_: None,
            _exchange_device=lambda _: 0,
            _maybe_exchange_device=lambda _: 0,
            get_device_capability=lambda *_: (9, 0),
            get_device_properties=lambda *_: H100,
        ),
        mock.patch.object(torch.cuda, "_get_device_properties", lambda _: H100, create=True),
        mock.patch.object(interface.Worker, "get_device_properties", staticmethod(lambda *_: H100)),
        mock.patch.object(interface, "get_compute_capability", staticmethod(lambda *_: 90)),
        mock.patch.object(scheduler, "has_triton", lambda: True),
        mock.patch.object(graph.GraphLowering, "compile_to_module", _raise_code),
        # Private, as `set_active` has no counterpart that works where there is no GPU.
        mock.patch.object(driver, "_active", target),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield

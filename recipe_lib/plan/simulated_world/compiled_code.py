"""Run torch.compile on the simulated device: inductor's own code, with kernels that do nothing.

`trace_rank.simulate` enters `trace_compiled_code` for a config with `compile: true`. Dynamo,
AOTAutograd's partitioner and inductor's scheduler run as in a real run. Inductor writes a Python
module that takes buffers, calls kernels and frees buffers. It is run without a compiler for C++ or
Triton: its buffers have no bytes, and its kernels only note their calls in the trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.plan.simulated_world.cached_fake_mode import wrap
from recipe_lib.plan.simulated_world.simulated_device import MODULE, NAME, dispatch_attention
from recipe_lib.plan.tracing.operator_costs import compute_cost, format_dtype
from recipe_lib.plan.tracing.trace import OP, Op
from recipe_lib.units import pluralize

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer

# The code is that for a CPU, with the attention kernel of the planned device. For a GPU inductor
# fuses by the same rules but for reductions, which it can split otherwise.

# Matmuls that inductor's code calls, by their names in it -> the operator.
_MATMULS = {
    "mm": torch.ops.aten.mm.out,
    "addmm": torch.ops.aten.addmm.out,
    "bmm": torch.ops.aten.bmm.out,
    "baddbmm": torch.ops.aten.baddbmm.out,
}
# Operators of recipe_lib that the compiler does not look into. The same holds for those with the
# suffix `_backward`.
_OPAQUE = (
    "tune_recipes::quantized_linear",
    "tune_recipes::quantized_experts",
    "tune_recipes::gather_linears",
)
# Code that inductor wrote, by (the graph, shapes and types of its inputs, True for a backward). It
# is kept, as a plan simulates a model more than once.
_written: dict[tuple[str, str, bool], str] = {}


class NotCompiled(Exception):  # noqa: N818 - not an error: the run is planned without
    """Raised for a graph that inductor has no code for here; the message says why."""


@dataclass
class CompiledCode:
    """A record of what was compiled in a simulation."""

    graphs: int = 0  # number of graphs that dynamo found
    # The errors of graphs that inductor has no code for; an error may be listed more than once.
    faults: list[str] = field(default_factory=list)

    def describe(self) -> str:
        kernel = "" if MODULE.kernels == "cpu" else ", with the attention kernel of the device"
        return (
            f"compiled code: {pluralize(self.graphs, 'graph')}, fused and with the buffers of"
            f" inductor's code for a CPU{kernel}"
        )


def find_opaque_function(operator: Any) -> Callable[..., Any] | None:
    """Return the Python function of an operator of `_OPAQUE`; None for any other operator."""
    name = operator._schema.name
    return OPDEFS[name]._init_fn if name.removesuffix("_backward") in _OPAQUE else None


@contextmanager
def trace_compiled_code(tracer: "Tracer") -> Iterator[CompiledCode]:
    """Trace the code that torch.compile makes with inductor inside the block.

    Operators that run while the compiler works are not traced. Raises NotCompiled for a graph that
    inductor has no code for.
    """
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import joint_graph

    compiled = CompiledCode()
    original = compile_fx.compile_fx
    lazy_init = joint_graph.lazy_init

    # In place of inductor's `compile_fx`, which dynamo calls with each graph.
    def compile_graph(
        graph: GraphModule, inputs: Sequence[Any], *_: Any, **__: Any
    ) -> Callable[..., Any]:
        compiled.graphs += 1
        # Without the modes of the simulation, whose trace is to show nothing of this.
        with _disable_current_modes(), note_faults():
            fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            with fake_mode:
                cpu_inputs = [
                    _make_cpu_input(value) if isinstance(value, Tensor) else value
                    for value in inputs
                ]
            _move_to_cpu(graph)
            with tracing(TracingContext(fake_mode)):
                return original(graph, cpu_inputs, inner_compile=compile_inner)

    # In place of inductor's `compile_fx_inner`, for each graph of a forward or a backward.
    def compile_inner(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with _disable_current_modes(), note_faults():
            return _load_code(_generate_code(graph, inputs, options), tracer)

    @contextmanager
    def note_faults() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            compiled.faults.append(f"{type(error).__name__}: {first_line}")
            raise

    torch._dynamo.reset()  # it keeps code, which would call an earlier simulation's tracer
    tracer.is_compiling = lambda: TracingContext.try_get() is not None
    try:
        with (
            mock.patch.object(compile_fx, "compile_fx", compile_graph),
            # Inductor makes its patterns of attention once, with tensors of the device that it is
            # first asked for.
            mock.patch.object(joint_graph, "lazy_init", lambda *_: lazy_init(torch.device("cpu"))),
        ):
            yield compiled
    except Exception as error:
        # dynamo and autograd wrap errors raised inside of them, so the type does not tell.
        if compiled.faults:
            raise NotCompiled(compiled.faults[0]) from error
        raise
    finally:
        tracer.is_compiling = None
        torch._dynamo.reset()


def _make_cpu_input(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device="cpu",
        requires_grad=tensor.requires_grad,
    )


def _move_to_cpu(graph: GraphModule) -> None:
    """Change a graph in place to run on the CPU, but with the attention of the planned device."""
    for subgraph in graph.modules():
        if not isinstance(subgraph, GraphModule):
            continue
        for node in subgraph.graph.nodes:
            node.meta.pop("example_value", None)  # a tensor of the simulated device
            if node.target is F.scaled_dot_product_attention and MODULE.kernels != "cpu":
                node.target = dispatch_attention
            node.args = tree_map(_replace_device, node.args)
            node.kwargs = tree_map(_replace_device, node.kwargs)
        subgraph.recompile()


def _replace_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _generate_code(graph: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> str:
    """Return the text of the module that inductor writes for a graph of aten's operators.

    options: keyword arguments of inductor's `compile_fx_inner`.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    input_types = [
        (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
        for value in inputs
    ]
    key = (str(graph.graph), str(input_types), bool(options.get("is_backward")))
    if key in _written:
        return _written[key]
    codes: list[str] = []

    def keep_code(lowering: Any) -> Any:
        code = lowering.codegen()[0]
        codes.append(getattr(code, "value", code))  # its text; a `ValueWithLineMap` has it as value
        # Never called, but torch 2.11's inductor asserts that it is not None.
        return SimpleNamespace(call=lambda args: None, runner=None)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        config.patch(force_disable_caches=True),  # from a cache it would write no code
    ):
        compile_fx.compile_fx_inner(graph, inputs, **options)
    return _written.setdefault(key, codes[-1])


def _load_code(text: str, tracer: "Tracer") -> Callable[[list[Any]], Any]:
    """Return the function `call` of a module's text, with buffers of the simulated device."""
    scope: dict[str, Any] = {}  # the module's globals
    # `cpp_pybinding` returns a function of the kernel's name: the name is known only when the code
    # has assigned it to a variable, below.
    compiles_nothing = SimpleNamespace(
        cpp_pybinding=lambda types, _: partial(_make_kernel, tracer, types),
        wait=lambda scope: None,
    )
    with mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: compiles_nothing):
        # The text is inductor's, which would run it too.
        exec(compile(text, "<inductor>", "exec"), scope)  # noqa: S102
    bindings = {name: value for name, value in scope.items() if isinstance(value, partial)}
    kernels = {name: bind(name.removeprefix("cpp_")) for name, bind in bindings.items()}
    matmuls = {name: partial(_note_matmul, tracer, operator) for name, operator in _MATMULS.items()}
    scope |= {
        **kernels,
        # `_grouped_mm` returns a new tensor, so the tracer notes it as any operator.
        "extern_kernels": SimpleNamespace(_grouped_mm=torch._grouped_mm, **matmuls),
        "empty_strided_cpu": partial(_take_buffer, tracer),
        "reinterpret_tensor": _reinterpret_tensor,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
    }
    call = scope["call"]

    def run(args: list[Any]) -> Any:
        return call(args)

    # Tells AOTAutograd that `run` takes its arguments as a list and empties it.
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _take_buffer(
    tracer: "Tracer", shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return a new buffer of the simulated device, noted in the trace as `inductor::buffer`."""
    assert tracer.cached_mode is not None
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    tensor = wrap(meta, tracer.cached_mode.mode, torch.device(tracer.device_type, 0))
    tracer.note_memory([tensor], "inductor::buffer")
    return tensor


def _make_kernel(tracer: "Tracer", types: Sequence[str], name: str) -> Callable[..., None]:
    """Return a kernel that notes its calls in the trace and does nothing else.

    types: the C++ types of its arguments. name: of the kernel, for the trace.
    """
    # The kernel does not write an argument that C++ takes as const.
    is_const = [kind.startswith("const") for kind in types]

    def call(*args: Any) -> None:
        buffers = list(zip(args, is_const, strict=False))
        read = list_tensors([value for value, const in buffers if const])
        written = list_tensors([value for value, const in buffers if not const])
        part, module = tracer.locate()
        tracer.trace.add(
            OP,
            Op(
                name=f"inductor::{name}",
                stream=tracer.get_stream(),
                part=part,
                module=module,
                phase=tracer.phase,
                bytes=sum(tensor.nbytes for tensor in read + written),
                dtype=format_dtype(written[0].dtype) if written else "",
                reads=tracer.list_storage_indices(read),
                makes=tracer.list_storage_indices(written),
            ),
        )

    return call


def _note_matmul(tracer: "Tracer", operator: Any, *args: Any, out: Tensor, **options: Any) -> None:
    # Notes the matmul in the trace and does not run it. out: the buffer of its result.
    kwargs = {**options, "out": out}
    cost = compute_cost(operator, args=args, kwargs=kwargs, result=out)
    tracer.note_operator(operator, args=args, kwargs=kwargs, result=out, cost=cost)


def run_higher_order_operator(
    tracer: "Tracer", func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an operator with random numbers, inside the wrapper by which compiled code recomputes it.

    args: (operator, its arguments) in forward, (state of the generator, operator, its arguments) in
    backward. Raises RuntimeError for any other higher-order operator.
    """
    if func.name() == "run_and_save_rng_state":
        state = torch.get_device_module(tracer.device_type).get_rng_state()
        with tracer:
            return state, args[0](*args[1:], **kwargs)
    if func.name() == "run_with_rng_state":
        with tracer:
            return args[1](*args[2:], **kwargs)
    raise RuntimeError(f"{func.name()}: not known on a simulated device")


def _reinterpret_tensor(
    tensor: Any, shape: Sequence[int], stride: Sequence[int], offset: int = 0
) -> Tensor:
    """Return a tensor of another shape on the same memory; no view, as compiled code has none.

    stride: in elements. offset: elements from the tensor's first one.
    """
    first_element = tensor.storage_offset() + offset
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            tensor.untyped_storage(), first_element, shape, stride
        )
    return wrap(meta, tensor.fake_mode, tensor.fake_device)

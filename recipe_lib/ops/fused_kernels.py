"""Fuse chains of elementwise operators into one kernel, by torch.compile on a GPU with Triton.

`@register_fused(schema, shapes)` makes a function an operator `tune_recipes::...`. `tune plan`,
which simulates a step on tensors without values, counts it as one kernel. A run calls
`use_fused_kernels` once. Without Triton, on a CPU, with `fused_kernels=false` and inside code that
is being compiled, the function runs as it is. The file also makes autograd nodes of functions.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from recipe_lib.ops.deferred import Switch
from recipe_lib.ops.device import get_kernel_type, holds_values
from recipe_lib.ops.kept_tensors import note_cheap, run_cheap

_COMPILATIONS = 64  # the most compilations of one function; beyond it torch runs it uncompiled
# The most operators by which inductor computes an element again instead of writing it to memory and
# reading it. Its own limit is 30.
_REPEATED = 100
# The namespace of the operators; a fragment, as `make_operator` adds to it too.
_library = torch.library.Library("tune_recipes", "FRAGMENT")
_repeats: set[Callable[..., Any]] = set()  # functions that are compiled with this limit
# True: chains are fused. False until a training run calls `use_fused_kernels`: generating a few
# tokens compiles nothing.
_fusing = Switch(False)
_on_meta = Switch(False)  # True: chains of meta tensors are one operator, see `fuse_on_meta`
_Result = TypeVar("_Result")


def use_fused_kernels(wanted: bool, device: torch.device) -> str:
    """Set whether chains are fused in this process from here on, and return a line for the log.

    wanted: the config's `fused_kernels`. device: the one that computes; on a CPU nothing is fused,
    and the line is empty.
    """
    _fusing.value = wanted and get_kernel_type(device) == "cuda"
    if get_kernel_type(device) != "cuda":
        return ""
    if not wanted:
        return "fused kernels: none (fused_kernels=false)"
    if not holds_values(device):
        return "fused kernels: by torch.compile"  # a simulated GPU is taken to have a compiler
    # A small function is compiled on trial: Triton needs a C compiler at run time, and the driver.
    fault = _find_compile_fault(device)
    if not fault:
        return "fused kernels: compiled by torch.compile with Triton"
    _fusing.value = False
    return f"fused kernels: none, operators run one by one, with more memory than planned: {fault}"


def should_fuse(device: torch.device) -> bool:
    """Return True if a chain on the device is one kernel; False in code that is being compiled."""
    if torch.compiler.is_compiling():
        return False
    if device.type == "meta":
        return _on_meta.value
    is_on = _fusing.value and get_kernel_type(device) == "cuda"
    return is_on and (not holds_values(device) or has_triton())


def fuse_on_meta(wanted: bool) -> AbstractContextManager[bool]:
    """Let chains of meta tensors be one operator each inside the block, if wanted.

    A forward on the meta device then saves for backward what it will save on a GPU.
    """
    return _on_meta.set(wanted)


def register_fused(
    schema: str, shapes: Callable[..., Any], repeats: bool = False
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorate a function so that it is called as an operator where `should_fuse` is True.

    The operator is not differentiable: call it from an autograd.Function.

    schema: `name(Tensor first, ...) -> Tensor`, for torch.library; the first argument is a tensor,
    results are new tensors. shapes: takes the same arguments, and returns empty tensors like the
    results. repeats: True: the compiler computes again what is needed twice, rather than write it
    to memory.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        if repeats:
            _repeats.add(function)

        def run(*arguments: Any) -> Any:
            compiles = can_compile(arguments[0])
            return call_compiled(function, *arguments) if compiles else function(*arguments)

        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tune_recipes::{name}", shapes, lib=_library)
        operator = getattr(torch.ops.tune_recipes, name).default

        @wraps(function)
        def call(*arguments: Any) -> _Result:
            is_fused = should_fuse(arguments[0].device)
            return operator(*arguments) if is_fused else function(*arguments)

        return call

    return decorate


class GradientNode(torch.autograd.Function):
    """The autograd node of a function whose gradients another function computes.

    It saves for backward only the arguments of the other function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        differentiate: Callable[..., Any],
        kept: Sequence[int],
        *arguments: Any,
    ) -> Any:
        """Return `function(*arguments)`.

        differentiate: takes the gradients of the results, then the arguments with the indices
        `kept`. It returns the gradient of the first argument, or a tuple of the gradients of the
        first arguments; all others get none.
        """
        saved = [arguments[index] for index in kept]
        # Tensors go through save_for_backward, so that its hooks (checkpointing, offload) see them.
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in saved))
        ctx.settings = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.differentiate = differentiate
        ctx.count = len(arguments)
        return function(*arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = [
            setting if tensor is None else tensor
            for tensor, setting in zip(ctx.saved_tensors, ctx.settings, strict=True)
        ]
        argument_grads = ctx.differentiate(*gradients, *saved)
        if not isinstance(argument_grads, tuple):
            argument_grads = (argument_grads,)
        # None for the three parameters before the arguments, and for the arguments behind.
        return None, None, None, *argument_grads, *(None,) * (ctx.count - len(argument_grads))


def call_with_gradient(
    function: Callable[..., _Result],
    *arguments: Any,
    differentiate: Callable[..., Any],
    kept: Sequence[int],
) -> _Result:
    """Return `function(*arguments)`, differentiated by `differentiate`, see `GradientNode`."""
    return cast(_Result, GradientNode.apply(function, differentiate, kept, *arguments))


def run_cheap_node(
    function: Callable[..., _Result],
    *arguments: Any,
    differentiate: Callable[..., Any],
    kept: Sequence[int],
) -> _Result:
    """Return `function(*arguments)`, which is cheap: backward may compute it again.

    It is differentiated as by `call_with_gradient`; in compiled code as the compiler does.
    """
    if torch.compiler.is_compiling():
        return run_cheap(function, *arguments)
    result = call_with_gradient(function, *arguments, differentiate=differentiate, kept=kept)
    return note_cheap(result, function, *arguments)


def make_operator(
    name: str, function: Callable[..., Any], shapes: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function as an operator of torch.library that a compiler does not look into.

    name: without `tune_recipes::`. function: annotated, as torch.library reads its schema from it.
    shapes: takes the same arguments, and returns empty tensors like the results; None: `function`
    itself can be called with tensors without values.
    """
    operator = torch.library.custom_op(f"tune_recipes::{name}", function, mutates_args=())
    operator.register_fake(shapes or function)
    return operator


def make_opaque_node(
    name: str,
    function: Callable[..., Any],
    shapes: Callable[..., Any],
    gradient: Callable[..., Any],
    gradient_shapes: Callable[..., Any],
    kept: Sequence[int],
) -> Callable[..., Any]:
    """Return a function whose node is a `GradientNode`, and in code that is compiled an operator.

    gradient: returns the gradient of the first argument, given that of the result and the arguments
    with the indices `kept`, tensors before others. shapes, gradient_shapes: of `function` and of
    `gradient`, see `make_operator`. name: see there.
    """
    # An operator: a compiler that looked into it would see that forward and backward compute the
    # same tensors, and save them in between.
    operator: Any = make_operator(name, function, shapes)
    gradient_operator = make_operator(f"{name}_backward", gradient, gradient_shapes)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        saved = [inputs[index] for index in kept]
        is_tensor = [value is None or isinstance(value, Tensor) for value in saved]
        ctx.save_for_backward(*itertools.compress(saved, is_tensor))
        ctx.settings = [value for value, saves in zip(saved, is_tensor, strict=True) if not saves]
        ctx.count = len(inputs)

    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        first_grad = gradient_operator(output_grad, *ctx.saved_tensors, *ctx.settings)
        return first_grad, *(None,) * (ctx.count - 1)

    operator.register_autograd(backward, setup_context=setup_context)

    def call(*arguments: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return operator(*arguments)  # type: ignore[no-any-return]
        return call_with_gradient(function, *arguments, differentiate=gradient, kept=kept)  # type: ignore[no-any-return]

    return call


def cut_rows(rows: int, columns: int, most: int) -> list[tuple[int, int]]:
    """Return (start, stop) of parts of `range(rows)`, each of at most `most` elements.

    columns: the number of elements of a row. A part has at least one row, of any length.
    """
    step = max(1, most // max(1, columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def can_compile(tensor: Tensor) -> bool:
    """Return True if code for this tensor's device can be compiled here."""
    return tensor.device.type == "cuda" and has_triton()


def call_compiled(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function compiled and without gradients.

    It is compiled once for tensors of all lengths.
    """
    # At torch's own limit of compilations the function would run uncompiled. The setting is a
    # thread's own, and autograd runs backward in other threads: it is set at each call.
    if torch._dynamo.config.recompile_limit < _COMPILATIONS:
        torch._dynamo.config.recompile_limit = _COMPILATIONS
    # Detached and without gradients: there would be compilations for parameters and for tensors
    # with gradients, too.
    plain = [
        argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments
    ]
    with torch.no_grad():
        return get_compiled(function)(*plain)


@cache
def get_compiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return the function, compiled once in this process."""
    # Dynamic: batches have many lengths, and sizes that happen to be equal stay distinct.
    return torch.compile(function, dynamic=True, options=get_inductor_options(function))


def get_inductor_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Return Inductor's options for a chain."""
    # Results are rounded as if the operators ran one by one: to bf16 where one of them would do it.
    # Divisions and exponentials in fp32 may differ in the last bit, as a GPU computes them.
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return options | {"realize_opcount_threshold": _REPEATED} if function in _repeats else options


@cache
def _find_compile_fault(device: torch.device) -> str:
    """Return why nothing can be compiled for the device, in one line; "" if it can."""
    if not has_triton():
        return "torch finds no Triton that supports this GPU"
    try:
        sums = call_compiled(_run_sample, torch.ones(2, 8, device=device, dtype=torch.bfloat16))
        if not bool(sums.isfinite().all()):
            return "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"
    # Any error, as compiler, cache and driver raise many kinds: the run goes on unfused, and the
    # log has the error's first line.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
    return ""


def _run_sample(tensor: Tensor) -> Tensor:
    """Run some operators of the chains if compiled, `[rows]`; return nan `[]` if not."""
    if not torch.compiler.is_compiling():
        return tensor.new_full((), float("nan"))
    rows = torch.tanh(tensor.float()).logsumexp(dim=1)
    return rows - tensor.gather(1, rows.long().clamp(0, 1).unsqueeze(1)).squeeze(1)


# Shaped work: functions that run many operators, which follow from the shapes of the arguments.
#
#     @register_shaped_work()
#     def dequantize(codes, scales, dtype): ...
#
# `tune plan` simulates such a function once for each set of shapes and settings, and repeats its
# records of that call (allocations, operators) for the others. It replaces the function by one that
# takes no keywords: give all arguments by position.


@dataclass
class Unfinished:
    """Hold what a piece of shaped work leaves to the one that ends it, as a graph for backward.

    It is the last result of a piece, and the first argument of the other, whose operators follow
    from what decides those of the first.
    """

    value: Any = None  # the other piece sets it to None, after which nothing keeps it alive
    # Set by a plan: what decided the operators, and the indices of the storages that are left.
    key: Any = None
    storages: list[int] = field(default_factory=list)


_Function = TypeVar("_Function", bound=Callable[..., Any])

# Function -> `fn(*arguments)` that returns what decides its operators; None: all arguments do.
SHAPED_WORK: dict[Callable[..., Any], Callable[..., Sequence[Any]] | None] = {}


def register_shaped_work(
    decisive: Callable[..., Sequence[Any]] | None = None,
) -> Callable[[_Function], _Function]:
    """Decorate a function of a module or class to be shaped work.

    decisive: its value in `SHAPED_WORK`.
    """

    def register(function: _Function) -> _Function:
        SHAPED_WORK[function] = decisive
        return function

    return register

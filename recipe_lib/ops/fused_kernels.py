"""Chains of operators that move bytes, fused by torch.compile on a GPU with Triton: into one
kernel, where that can be.

A chain reads and writes its tensors once for each of its operators, and makes temporaries; one
kernel reads the first ones and writes the last. Here a function of plain tensors gets a name as an
operator, `tune_recipes::...`, which a plan counts as one kernel; docs/measurements/fused_kernels.md
has how many there are of each. Without Triton, on a CPU, or with `fused_kernels=false`, the
function runs as it is. Inside a layer that is compiled as a whole the compiler sees the function
itself.

Rounding is that of the chain: what an operator of it would round to bf16 is rounded there too
(`emulate_precision_casts`). Divisions and exponentials in fp32 may differ in the last bit, as a GPU
computes them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from recipe_lib.ops.deferred import Switch
from recipe_lib.ops.device import get_kernel_type, holds_values

_COMPILATIONS = 64  # of one function, before torch runs it as it is
# Operators that compute a number again where it is needed again; inductor's own limit is 30
_REPEATED = 100
_library = torch.library.Library("tune_recipes", "FRAGMENT")
_repeats: set[Callable[..., Any]] = set()
_is_on = False  # until a run that trains says so: what generates a few tokens compiles nothing
_on_meta = Switch(False)
_Result = TypeVar("_Result")


def use_fused_kernels(wanted: bool, device: torch.device) -> str:
    """Whether chains are fused in this process from here on, and a line about it for the log; "" on
    a CPU.

    wanted: `fused_kernels`. On a GPU a small function is compiled to see whether that works: Triton
    needs a C compiler at run time, and the driver. On a simulated one it is taken to work.
    """
    global _is_on
    _is_on = wanted and get_kernel_type(device) == "cuda"
    if get_kernel_type(device) != "cuda":
        return ""
    if not wanted:
        return "fused kernels: none (fused_kernels=false)"
    if not holds_values(device):
        return "fused kernels: by torch.compile"
    fault = _find_compile_fault(device)
    if not fault:
        return "fused kernels: compiled by torch.compile with Triton"
    _is_on = False
    return f"fused kernels: none, operators run one by one, with more memory than planned: {fault}"


def should_fuse(device: torch.device) -> bool:
    """Whether a chain on the device is one kernel; not in code that is being compiled."""
    if torch.compiler.is_compiling():
        return False
    if device.type == "meta":
        return _on_meta.value
    return (
        _is_on and get_kernel_type(device) == "cuda" and (not holds_values(device) or has_triton())
    )


def fuse_on_meta(wanted: bool) -> AbstractContextManager[bool]:
    """Inside, chains of meta tensors are one operator each, if wanted: for what a layer will keep
    on a GPU.
    """
    return _on_meta.set(wanted)


def register_fused(
    schema: str, shapes: Callable[..., Any], repeats: bool = False
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorates a function of tensors and numbers: where `fuses` says so it is the operator of that
    schema.

    schema: `name(Tensor first, ...) -> Tensor`, for torch.library; the first argument is a tensor,
    results are new. shapes: of the same arguments, empty tensors like its results. repeats: numbers
    that it needs twice are computed twice, by however many operators, not written and read. Inside
    it has no gradients: call it from an autograd.Function.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        if repeats:
            _repeats.add(function)

        def run(*arguments: Any) -> Any:
            return (
                call_compiled(function, *arguments)
                if can_compile(arguments[0])
                else function(*arguments)
            )

        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tune_recipes::{name}", shapes, lib=_library)
        operator = getattr(torch.ops.tune_recipes, name).default

        @wraps(function)
        def call(*arguments: Any) -> _Result:
            first: Tensor = arguments[0]
            if should_fuse(first.device):
                return operator(*arguments)  # type: ignore[no-any-return]
            return function(*arguments)

        return call

    return decorate


class GradientNode(torch.autograd.Function):
    """A function, and the function that gives its gradients, which keeps for backward what this one
    takes alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        gradients: Callable[..., Any],
        kept: Sequence[int],
        *arguments: Any,
    ) -> Any:
        """kept: which of the arguments `gradients` takes, behind the gradient of the result.

        It returns the gradients of the first arguments: a tensor for the first one alone, or a
        tuple.
        """
        held = [arguments[number] for number in kept]
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in held))
        ctx.settings = [None if isinstance(one, Tensor) else one for one in held]
        ctx.gradients, ctx.count = gradients, len(arguments)
        return function(*arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        held = [
            setting if tensor is None else tensor
            for tensor, setting in zip(ctx.saved_tensors, ctx.settings, strict=True)
        ]
        found = ctx.gradients(*gradients, *held)
        found = found if isinstance(found, tuple) else (found,)
        return None, None, None, *found, *(None,) * (ctx.count - len(found))


def make_operator(
    name: str, function: Callable[..., Any], shapes: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function as an operator that a compiler does not look into.

    function: annotated, as torch.library reads its schema from it. shapes: of the same arguments,
    empty tensors like its results; None: what the function itself makes of tensors without values.
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
    """Return a `GradientNode` of a gradient of its first argument, in code that is compiled an
    operator.

    A compiler that looked into it would see that forward and backward make the same tensors, and
    keep these in between.
    """
    operator: Any = make_operator(name, function, shapes)
    gradient_operator = make_operator(f"{name}_backward", gradient, gradient_shapes)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        held = [inputs[number] for number in kept]
        ctx.save_for_backward(*(one for one in held if one is None or isinstance(one, Tensor)))
        ctx.settings = [one for one in held if not (one is None or isinstance(one, Tensor))]
        ctx.count = len(inputs)

    def differentiate(ctx: Any, found: Tensor) -> tuple[Tensor | None, ...]:
        return gradient_operator(found, *ctx.saved_tensors, *ctx.settings), *(None,) * (
            ctx.count - 1
        )

    operator.register_autograd(differentiate, setup_context=keep)

    def call(*arguments: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return operator(*arguments)  # type: ignore[no-any-return]
        return cast(Tensor, GradientNode.apply(function, gradient, kept, *arguments))

    return call


def cut_rows(rows: int, columns: int, most: int) -> list[tuple[int, int]]:
    """Return `range(rows)` in parts of at most so many elements, for what is not one kernel; one
    row at least.
    """
    step = max(1, most // max(1, columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def can_compile(tensor: Tensor) -> bool:
    """Whether code for this tensor's device can be compiled here."""
    return tensor.device.type == "cuda" and has_triton()


def call_compiled(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """The compiled function, of tensors that differ in shapes and strides alone, from wherever it
    is called.

    Parameters, and forward and backward, would each be compiled for themselves; at torch's limit of
    compilations the function would run as it is, whole.
    """
    if torch._dynamo.config.recompile_limit < _COMPILATIONS:  # a thread's own: autograd has others
        torch._dynamo.config.recompile_limit = _COMPILATIONS
    plain = [
        argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments
    ]
    with torch.no_grad():
        return get_compiled(function)(*plain)


@cache
def get_compiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """With sizes left open: batches have many lengths. Sizes that happen to be equal stay
    distinct.
    """
    return torch.compile(function, dynamic=True, options=get_inductor_options(function))


def get_inductor_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Inductor's options for a chain."""
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return options | {"realize_opcount_threshold": _REPEATED} if function in _repeats else options


@cache
def _find_compile_fault(device: torch.device) -> str:
    """Why nothing can be compiled for the device, in one line; "" if it can."""
    if not has_triton():
        return "torch finds no Triton that supports this GPU"
    try:
        found = call_compiled(_run_sample, torch.ones(2, 8, device=device, dtype=torch.bfloat16))
        if not bool(found.isfinite().all()):
            return "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"
    except Exception as error:  # noqa: BLE001 (whatever the compiler, its cache, or the driver raises)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
    return ""


def _run_sample(tensor: Tensor) -> Tensor:
    """Some of what chains do, if it is compiled; else what is not finite."""
    if not torch.compiler.is_compiling():
        return tensor.new_full((), float("nan"))
    rows = torch.tanh(tensor.float()).logsumexp(dim=1)
    return rows - tensor.gather(1, rows.long().clamp(0, 1).unsqueeze(1)).squeeze(1)


# Functions that issue many operators, and whose work follows from the shapes that they are given.
#
# @follows_from_shapes() def dequantize(codes, scales, dtype): ...
#
# A plan runs such a function once for each kind of arguments, and repeats its notes for the others.


_Function = TypeVar("_Function", bound=Callable[..., Any])

# The functions that are marked, each with what gives of its arguments those that matter; None: all
# of them do.
SHAPED_WORK: dict[Callable[..., Any], Callable[..., Sequence[Any]] | None] = {}


def register_shaped_work(
    decisive: Callable[..., Sequence[Any]] | None = None,
) -> Callable[[_Function], _Function]:
    """Mark a function of a module or class. decisive: as in `SHAPED_WORK`."""

    def mark(function: _Function) -> _Function:
        SHAPED_WORK[function] = decisive
        return function

    return mark

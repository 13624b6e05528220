"""Multiply in FP8 or INT8 in linears, with weights and results in the model's own dtype.

`apply_memory_levers` calls `use_low_precision(model, cfg.matmul_dtype)`, which replaces the forward
of the linears of attention and MLP, the frozen part of an adapted one too. Embedding, output head,
norms, adapters and attention itself stay in `dtype`. Time is saved, and no memory.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.memory.qat import find_plain_linears
from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import call_compiled, can_compile, cut_rows, make_operator

# Each of the three products of a linear is scaled row by row, with X `[N, i]`, W `[o, i]` and the
# gradient G `[N, o]`:
#
#     X W.T   rows of X, rows of W         along i
#     G W     rows of G, columns of W      along o
#     G.T X   columns of G, columns of X   along N, without tokens that have no gradient (padding)
#
# A row's scale is its largest magnitude over the largest code. The row is divided by it in fp32 and
# rounded to the nearest codes; the product of codes is multiplied by both scales. So an outlier
# costs the precision of its own row alone. `int8` has codes -127 to 127 and exact sums in int32, on
# any device, fast on GPUs from Ampere on. `fp8` has e4m3 codes up to 448 for all three, sums in
# fp32 and results in bf16, on GPUs of compute capability 8.9. Measured:
# docs/measurements/on_a_gpu.md.
#
# The scales are those of torchao's converters (quantized_training, and float8 with the recipe
# `rowwise`), with which tests compare: INT8's codes of fp32 are the same to the bit, FP8's but for
# ties. The converters themselves were tried (docs/measurements/torchao.md, by `python -m
# benchmarks.torchao_comparison`, torchao 0.18, torch 2.13). For plain trained linears they do as
# well, errors within 0.02 points of ours, checkpointed, compiled and sharded by FSDP. They are not
# used, because
#
# - a step without `torch.compile` around it is planned at 9.9 s (INT8) and 8.4 s (FP8) for Llama 3
#   8B on 4 H100, where bf16 takes 4.2 s, ours 3.8 s and 3.4 s: rounding is a chain of operators
#   there, one kernel here;
# - of 14 weight gradients a zero-bubble schedule can defer none, of ours all;
# - linears with an adapter either lose it or stay in bf16, and a frozen weight's input is kept for
#   backward all the same;
# - with a number of tokens that 16 does not divide, a GPU refuses one of FP8's three products.

KINDS = ("int8", "fp8")  # values of `matmul_dtype`
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}  # the magnitude that a row's largest one becomes
FP8_CAPABILITY = (8, 9)  # compute capability of the first GPUs that multiply FP8
_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # dtypes of the codes
_TINY = 1e-12  # the least divisor: that of a row of zeros, whose scale is 0
# The matmuls of GPUs ask for dimensions that are multiples of 16, and for more than 16 rows.
_MULTIPLE = 16
_MIN_ROWS = 32
_PIECE_ELEMENTS = 2**22  # elements that are converted to fp32 at a time: 16 MiB
# Number of products of two codes whose sum fits into int32 for sure: 127 * 127 * 2**17 < 2**31
_LONGEST_SUM = 2**17


def use_low_precision(
    model: nn.Module, matmul_dtype: str | None, device: torch.device | None = None
) -> None:
    """Let the layers' linears multiply in `matmul_dtype`, in place.

    Names and dtypes of parameters stay, so that checkpoints are those of any other run. Call it on
    a meta model, after adapters are added and before layers are checkpointed and compiled.

    matmul_dtype: of KINDS; None: nothing changes. device: where the model will run; None: this
    machine's GPU. Raises ConfigError for FP8 on a device that does not multiply it, for quantized
    weights, for mixtures of experts, and if there is no linear to change.
    """
    if matmul_dtype is None:
        return
    if matmul_dtype == "fp8":
        _check_fp8(device)
    mixtures = "most of whose matmuls are grouped ones in dtype"
    for module in find_plain_linears(
        model, key="matmul_dtype", value=matmul_dtype, mixtures=mixtures
    ).values():
        # An adapted linear calls `frozen_forward` for its frozen weight.
        method_name = "frozen_forward" if isinstance(module, AdaptedLinear) else "forward"
        setattr(module, method_name, MethodType(_make_scaled_forward(matmul_dtype), module))


@cache  # one function for all linears: torch.compile then compiles layers that are alike once
def _make_scaled_forward(kind: str) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, hidden: Tensor) -> Tensor:
        return scaled_linear(hidden, weight=module.weight, bias=module.bias, kind=kind)

    return forward


def _check_fp8(device: torch.device | None) -> None:
    """Raise ConfigError if the device does not multiply FP8. device: see `use_low_precision`."""
    kind = device.type if device is not None else "cuda"
    if kind not in ("cpu", "cuda"):  # a simulated device: the plan judges what it stands for
        return
    cuda = torch.get_device_module("cuda")
    if kind == "cpu" or not cuda.is_available():
        raise ConfigError(
            "matmul_dtype: found fp8 on a CPU, expected a GPU of compute capability 8.9 or more;"
            " choose int8, or remove matmul_dtype"
        )
    capability = cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"matmul_dtype: found fp8 on {cuda.get_device_name(device)} of compute capability"
            f" {'.'.join(map(str, capability))}, expected 8.9 or more (Ada, Hopper and later);"
            " choose int8, or remove matmul_dtype"
        )


def scaled_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o] + bias`, multiplied in `kind` of KINDS.

    The result has the dtype of hidden, which for fp8 is bf16. Hidden is saved for backward in that
    dtype if the weight is trained, and not at all if it is frozen.
    """
    out = cast(Tensor, _ScaledLinear.apply(hidden, weight, kind))
    return out if bias is None else out + bias


def scaled_mm(left: Tensor, right: Tensor, kind: str, counted: Tensor | None = None) -> Tensor:
    """Return `left [m, k] @ right.T [k, n]`, both rounded row by row, in left's dtype.

    kind: of KINDS. counted: bool `[k]`, False for columns in which left has zeros alone. In right
    they are then taken as zeros too, so that they do not enlarge its rows' scales. None: all count.
    """
    left_codes, left_scales = quantize_rows(left, kind)
    right_codes, right_scales = quantize_rows(right, kind, counted)
    if kind == "int8":
        # Compiled code calls the plain function, which the compiler fuses with its neighbors.
        scale_sums = _scale_unchunked if torch.compiler.is_compiling() else _SCALE
        sums = _multiply_codes(left_codes, right_codes)
        return cast(Tensor, scale_sums(sums, left_scales, right_scales, left.dtype))
    # Padding rows are cut off the product, but the kernel needs a scale for each.
    left_scales = F.pad(left_scales, (0, len(left_codes) - len(left_scales)), value=1.0)
    right_scales = F.pad(right_scales, (0, len(right_codes) - len(right_scales)), value=1.0)
    return torch._scaled_mm(
        left_codes,
        right_codes.t(),
        scale_a=left_scales.unsqueeze(1),
        scale_b=right_scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )[: left.shape[0], : right.shape[0]].to(left.dtype)


def quantize_rows(
    matrix: Tensor, kind: str, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes `[m', k']` of a matrix `[m, k]` and the scales of its rows `[m]`, fp32.

    Codes are padded with zeros to a shape that kernels take. `codes[:m, :k] * scales[:, None]` is
    the matrix, each entry within half a step of its row: its largest magnitude over 254 in int8,
    the entry's own magnitude over 16 in fp8. A row that is not finite gets a scale that is not, so
    that a run that diverges is noticed.

    counted: bool `[k]`, False for columns that are taken as zeros; None: none is.
    """
    if torch.compiler.is_compiling():
        return _quantize_unchunked(matrix, kind, counted)
    return cast(tuple[Tensor, Tensor], _QUANTIZE(matrix, kind, counted))


def _quantize_unchunked(
    matrix: Tensor, kind: str, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize all rows at once; for compiled code, in which this makes no temporary tensors."""
    matrix = matrix if counted is None else torch.where(counted, matrix, 0)
    scales, inverse = _compute_row_scales(matrix, kind)
    rows, columns = _compute_code_shape(matrix)
    # Padded before it is converted: the compiler has no `where` between numbers of FP8.
    part = F.pad(matrix * inverse, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))
    return (part.round() if kind == "int8" else part).to(_TYPES[kind]), scales


def _compute_row_scales(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the scales of a matrix's rows, `[m]`, and their inverses, `[m, 1]`, both fp32."""
    scales = torch.linalg.vector_norm(matrix, ord=float("inf"), dim=1).float() / LARGEST_CODE[kind]
    return scales, scales.clamp(min=_TINY).reciprocal().unsqueeze(1)


def _compute_code_shape(matrix: Tensor) -> tuple[int, int]:
    """Return the shape `[m', k']` of a matrix's codes, padded as matmuls of GPUs ask for."""
    rows, columns = matrix.shape
    return max(_MIN_ROWS, _round_up(rows)), _round_up(columns)


# `_quantize` and `_scale` are one operator each. As chains of operators they would take longer than
# the low precision saves, and make large temporary tensors. On a GPU with Triton each is compiled
# by itself; elsewhere it computes a piece of the rows at a time.


def _quantize(matrix: Tensor, kind: str, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if can_compile(matrix):
        return call_compiled(_quantize_unchunked, matrix, kind, counted)
    scales = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    zeros = torch.zeros(_compute_code_shape(matrix), dtype=torch.int8, device=matrix.device)
    codes = zeros.view(_TYPES[kind])  # zero is the same byte in both types
    for first, last in cut_rows(matrix.shape[0], matrix.shape[1], _PIECE_ELEMENTS):
        part = matrix[first:last]
        if counted is not None:
            part = torch.where(counted, part, 0)
        scales[first:last], inverse = _compute_row_scales(part, kind)
        part = part * inverse
        codes[first:last, : matrix.shape[1]] = part.round_() if kind == "int8" else part
        del part  # before the next piece is made
    return codes, scales


def _scale_unchunked(sums: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums `[m', n']` times the scales of rows `[m]` and columns `[n]`, `[m, n]`."""
    return (sums[: len(left), : len(right)] * right * left.unsqueeze(1)).to(dtype)


def _scale(sums: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if can_compile(sums):
        return call_compiled(_scale_unchunked, sums, left, right, dtype)
    out = torch.empty(len(left), len(right), dtype=dtype, device=sums.device)
    for first, last in cut_rows(out.shape[0], out.shape[1], _PIECE_ELEMENTS):
        part = sums[first:last, : len(right)] * right
        out[first:last] = part.mul_(left[first:last].unsqueeze(1))
        del part  # before the next piece is made
    return out


_QUANTIZE = make_operator(
    "quantize_rows",
    _quantize,
    lambda matrix, kind, counted=None: (
        matrix.new_empty(_compute_code_shape(matrix), dtype=_TYPES[kind]),
        matrix.new_empty(matrix.shape[0], dtype=torch.float32),
    ),
)
_SCALE = make_operator(
    "scale_sums",
    _scale,
    lambda sums, left, right, dtype: sums.new_empty((left.shape[0], right.shape[0]), dtype=dtype),
)


def _multiply_codes(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` of int8 codes `[m, n]`: int32, or fp32 where int32 may overflow."""
    if left.shape[1] <= _LONGEST_SUM:
        return torch._int_mm(left, right.t())
    total: Tensor | None = None
    for left_part, right_part in zip(
        left.split(_LONGEST_SUM, dim=1), right.split(_LONGEST_SUM, dim=1), strict=True
    ):
        part = torch._int_mm(left_part.contiguous(), right_part.contiguous().t())
        total = part.float() if total is None else total.add_(part)
        del part  # before the next product is made
    assert total is not None
    return total


def _round_up(size: int) -> int:
    return (size + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE


class _ScaledLinear(torch.autograd.Function):
    """The node of a linear without its bias, whose three products are in `kind`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.shape = hidden.shape
        trains_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(hidden if trains_weight else None, weight)
        # Held besides the saved tensors: a deferred gradient is added to the parameter, and what
        # checkpointing gives back of a saved tensor is another object.
        ctx.parameter = weight if deferred.is_split_backward_enabled() and trains_weight else None
        out = scaled_mm(hidden.reshape(-1, hidden.shape[-1]), weight, kind)
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        kind = ctx.kind
        gradient = gradients[0].reshape(-1, weight.shape[0])
        hidden_grad = None
        if ctx.needs_input_grad[0]:
            hidden_grad = scaled_mm(gradient, weight.t(), kind).view(ctx.shape)
        if hidden is None:
            return hidden_grad, None, None
        flat = hidden.detach().reshape(-1, weight.shape[1])
        if ctx.parameter is not None and deferred.is_deferring():
            deferred.defer_gradients(
                [ctx.parameter], lambda: [_compute_weight_gradient(gradient, flat, kind)]
            )
            return hidden_grad, None, None
        return hidden_grad, _compute_weight_gradient(gradient, flat, kind), None


def _compute_weight_gradient(gradient: Tensor, hidden: Tensor, kind: str) -> Tensor:
    """Return G.T X, with scales of X from the tokens that have a gradient.

    gradient: G `[N, o]`. hidden: X `[N, i]`.
    """
    # Padding has no gradient, and its hidden states must not cost other tokens precision.
    has_gradient = torch.linalg.vector_norm(gradient, ord=float("inf"), dim=1) != 0
    return scaled_mm(gradient.t(), right=hidden.t(), kind=kind, counted=has_gradient)

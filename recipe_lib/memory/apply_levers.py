"""The levers that change layers, in the order in which they wrap each other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedLinear
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.activation_offload import OffloadedActivations, offload_activations
from recipe_lib.memory.budget import PipelineStages
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.layer_stream import LayerStream, stream_layers
from recipe_lib.memory.mlp_tiles import chunk_mlps, exchange_parameters, find_parameters
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears, find_plain_linears
from recipe_lib.models.language_model import LanguageModel, list_layer_names
from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import (
    call_compiled,
    can_compile,
    cut_rows,
    make_operator,
    use_fused_kernels,
)


@dataclass(frozen=True)
class MemoryLevers:
    """What was decided. kernels: about fused ones, for the log. checkpointing: what layers keep,
    where a budget chose it. offload: what moves activations. layers: what copies them from the
    host. quantization: what linears are rounded to while they train.
    """

    kernels: str = ""
    checkpointing: str | None = None
    offload: OffloadedActivations | None = None
    layers: LayerStream | None = None
    quantization: FakeQuantization | None = None


def apply_memory_levers(
    model: nn.Module,
    cfg: FullFinetuneConfig,
    device: torch.device,
    pipeline: PipelineStages | None = None,
    *,
    for_training: bool = True,
    data_ranks: int = 1,
) -> MemoryLevers:
    """What the layers of a meta model multiply in, compute in tiles, keep for backward, compile and
    offload, in place.

    `fused_kernels`, `matmul_dtype`, `qat`, `memory.mlp_tiles`, `memory.activation_checkpointing`,
    `compile`, `memory.activation_offload`, `memory.stream_layers`. Call it when adapters and
    sharded matrices are in their places, and before FSDP wraps what it leaves. device: the one that
    computes. pipeline: what runs the model's stages. for_training: False for a model that never
    goes backward. data_ranks: that have batches of their own. Raises ConfigError for what device or
    model cannot do.
    """
    checkpointing = offload = quantization = None
    kernels = use_fused_kernels(cfg.fused_kernels, device)
    use_low_precision(model, cfg.matmul_dtype, device)
    if for_training:  # a reference stays as it is
        quantization = fake_quantize_linears(model, cfg.qat, cfg.qat_group_size, cfg.qat_start_step)
    chunk_mlps(model, cfg.memory.mlp_tiles, is_stage=pipeline is not None)
    if for_training:
        mode = cfg.memory.activation_checkpointing
        checkpointing = apply_activation_checkpointing(model, mode, cfg, device, pipeline)
    if cfg.compile:
        compile_layers(model)  # recomputation included
    if for_training:  # what compiled layers keep, too
        offload = offload_activations(model, cfg.memory, device, is_stage=pipeline is not None)
    # On the device by the time that these see them.
    layers = stream_layers(model, cfg.memory, device, data_ranks, is_stage=pipeline is not None)
    return MemoryLevers(kernels, checkpointing, offload, layers, quantization)


# torch.compile, layer by layer.


_MAX_COMPILATIONS = 64  # of one layer: kinds of layers, row lengths, with and without gradients


def compile_layers(model: nn.Module, backend: Any = "inductor") -> None:
    """torch.compile on each layer's forward: alike layers share one compilation, FSDP's hooks stay
    outside of it.

    The first row length is compiled for itself, the second for every length from then on; rows one
    at a time, and evaluation, are compiled on their own. A layer that is compiled too often runs as
    it is, silently: torch's limit is for all kinds of layers together, and is set where none comes
    to it.
    """
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, _MAX_COMPILATIONS
    )
    modules = dict(model.named_modules())
    compile_layer = model.compile_layer if isinstance(model, LanguageModel) else None
    for name in list_layer_names(model):
        if compile_layer is not None:
            compile_layer(name, backend)
            continue
        layer = modules[name]
        compiled = torch.compile(layer.forward, backend=backend)
        shared = any(isinstance(parameter, DTensor) for parameter in layer.parameters())
        layer.forward = _use_local_parameters(layer, compiled) if shared else compiled


def _use_local_parameters(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """While `forward` runs, the layer's DTensor parameters are this rank's parts of them.

    With DTensors compiled code keeps their mesh for backward, and torch 2.13 puts it where it
    expects a tensor if attention is computed again on a CPU. (A layer that is compiled too often
    would have DTensors again when it is computed again, and selective checkpointing miss an
    operator: one more reason for `_COMPILATIONS`.)
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        shared = find_parameters(layer.modules(), lambda parameter: isinstance(parameter, DTensor))
        with exchange_parameters(shared, lambda parameter: parameter.to_local()):
            return forward(*args, **kwargs)

    return run


# Linears that multiply in FP8 or INT8, with weights and results in the model's own type.
#
# `matmul_dtype` rounds what the layers' linears multiply, see `recipe_lib.memory.apply_levers`: of
# attention and MLP, the frozen part of an adapted one too. Embedding, output head, norms, adapters
# and attention itself stay in `dtype`. It is a lever of time alone: weights, gradients and states
# take what they take, and next to them are codes of the matrices that are being multiplied, one
# byte an element.
#
# INT8 runs on any device, fast on GPUs from Ampere on; FP8 takes a GPU of compute capability 8.9.
# Rounding reads each operand twice, which long micro-batches make up for and short ones do not:
# `tune plan` shows it. What has run on a GPU: docs/measurements/on_a_gpu.md. Why the linears are
# not torchao's stands, with figures, in `recipe_lib.memory.apply_levers`.


FP8_CAPABILITY = (8, 9)


def use_low_precision(
    model: nn.Module, matmul_dtype: str | None, device: torch.device | None = None
) -> None:
    """Lets the layers' linears multiply in `matmul_dtype` (fp8, int8), in place, on a meta model;
    None: as they did.

    Names and types of parameters stay, so that checkpoints are those of any other run. Called after
    the adapters and before layers are checkpointed and compiled. device: that the model is for.
    Raises ConfigError for FP8 where `device` (None: this machine's GPU) does not multiply it, for
    weights that are quantized, for mixtures of experts, and where there is no linear to change.
    """
    if matmul_dtype is None:
        return
    if matmul_dtype == "fp8":
        _check_fp8(device)
    mixtures = "most of whose matmuls are grouped ones in dtype"
    for module in find_plain_linears(model, "matmul_dtype", matmul_dtype, mixtures).values():
        changed = "frozen_forward" if isinstance(module, AdaptedLinear) else "forward"
        setattr(module, changed, MethodType(_make_scaled_forward(matmul_dtype), module))


@cache  # so that torch.compile compiles alike layers once
def _make_scaled_forward(kind: str) -> Callable[[Any, Tensor], Tensor]:
    """Return the forward of all linears of a kind."""

    def forward(module: Any, hidden: Tensor) -> Tensor:
        return scaled_linear(hidden, module.weight, module.bias, kind)

    return forward


def _check_fp8(device: torch.device | None) -> None:
    """ConfigError where the device does not multiply FP8. What a simulated device stands for is the
    plan's to judge.
    """
    kind = device.type if device is not None else "cuda"
    if kind not in ("cpu", "cuda"):
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


# Linears whose operands are rounded to 8 bits, forward and backward; weights, inputs and results
# stay what they are.
#
# Each of the three products of a linear, with X `[N, i]`, W `[o, i]` and the gradient G `[N, o]`:
#
# X W.T rows of X, rows of W scaled along i G W rows of G, columns of W along o G.T X columns of G,
# columns of X along N, without tokens that have no gradient, such as padding
#
# Every row (column) is divided by its largest magnitude over that of the type, in fp32, and rounded
# to nearest; the product of codes is multiplied by both scales. `int8`: codes -127 to 127, exact
# sums in int32. `fp8`: e4m3 codes up to 448 for all three, sums in fp32, results in bf16. So one
# entry of a row that stands out costs that row's precision, no other's.
#
# The scales are those of torchao's converters (quantized_training, and float8 with the recipe
# `rowwise`), with which tests compare: INT8's codes of fp32 are the same to the bit, FP8's but for
# ties. The converters themselves were tried in our place (docs/measurements/torchao.md, by `python
# -m benchmarks.torchao_comparison`, torchao 0.18, torch 2.13). For plain trained linears they do as
# well, errors within 0.02 points of ours, checkpointed, compiled and sharded by FSDP. They are not
# used, because
#
# - a step without `torch.compile` around it is planned at 9.9 s (INT8) and 8.4 s (FP8) for Llama 3
# 8B on 4 H100, where bf16 takes 4.2 s, ours 3.8 s and 3.4 s: rounding is a chain of operators
# there, one kernel here; - of 14 weight gradients a zero-bubble schedule can defer none, of ours
# all; - linears with an adapter either lose it or stay in bf16, and a frozen weight's input is kept
# for backward all the same; - lengths that 16 does not divide make a third of FP8's products ones
# that a GPU refuses.
#
# A scale of a row that is not finite makes its results not finite: a run that diverges is noticed
# as ever.


KINDS = ("int8", "fp8")
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_TINY = 1e-12  # a row of zeros is divided by it
_MULTIPLE = 16  # of both dimensions of a matrix of codes: what the kernels of GPUs ask for,
_FEWEST = 32  # and more than 16 rows
_PIECE_ELEMENTS = 2**22  # turned to fp32 at a time: 16 MiB
_LONGEST_SUM = (
    2**17
)  # of products of two codes that int32 holds for sure: 127 * 127 * 2**17 < 2**31


def scaled_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """`hidden [.., i] @ weight.T [i, o] + bias` with products in `kind` of KINDS, in hidden's type.

    For backward hidden is kept as it came if the weight is trained, and not at all if it is frozen.
    fp8 takes bf16.
    """
    out = cast(Tensor, _ScaledLinear.apply(hidden, weight, kind))
    return out if bias is None else out + bias


def scaled_mm(left: Tensor, right: Tensor, kind: str, counted: Tensor | None = None) -> Tensor:
    """Return `left [m, k] @ right.T [k, n]`, both rounded row by row, in left's type.

    counted: bool `[k]`, False where left has zeros alone, so that what right has there does not
    scale its rows.
    """
    rows, columns = left.shape[0], right.shape[0]
    left_codes, left_scales = quantize_rows(left, kind)
    right_codes, right_scales = quantize_rows(right, kind, counted)
    if kind == "int8":
        scale_sums = _scale_unchunked if torch.compiler.is_compiling() else _SCALE
        sums = _multiply_codes(left_codes, right_codes)
        return cast(Tensor, scale_sums(sums, left_scales, right_scales, left.dtype))
    # Scales of rows that only fill up are never looked at, and must be there.
    left_scales, right_scales = (
        F.pad(scales, (0, len(codes) - len(scales)), value=1.0)
        for codes, scales in ((left_codes, left_scales), (right_codes, right_scales))
    )
    found = torch._scaled_mm(
        left_codes,
        right_codes.t(),
        scale_a=left_scales.unsqueeze(1),
        scale_b=right_scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return found[:rows, :columns].to(left.dtype)


def quantize_rows(
    matrix: Tensor, kind: str, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes `[m', k']` of a matrix `[m, k]`, with zeros up to what kernels take, and a scale
    for each row `[m]`, fp32.

    `codes[:m, :k] * scales[:, None]` is the matrix, each entry within half a step of its row: of
    its largest magnitude over 254 in int8, of the entry's own magnitude over 16 in fp8. counted:
    bool `[k]`, the columns that are not taken as zeros; None: all.
    """
    if torch.compiler.is_compiling():
        return _quantize_unchunked(matrix, kind, counted)
    return cast(tuple[Tensor, Tensor], _QUANTIZE(matrix, kind, counted))


def _quantize_unchunked(
    matrix: Tensor, kind: str, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For code that is compiled, where steps one after the other make no temporaries.

    Filled up before it is converted: the compiler has no choice between numbers of FP8.
    """
    matrix = matrix if counted is None else torch.where(counted, matrix, 0)
    scales, inverse = _compute_row_scales(matrix, kind)
    rows, columns = _compute_code_shape(matrix)
    part = F.pad(matrix * inverse, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))
    return (part.round() if kind == "int8" else part).to(_TYPES[kind]), scales


def _compute_row_scales(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(scales of the rows `[m]`, what rows are multiplied by `[m, 1]`), fp32."""
    scales = torch.linalg.vector_norm(matrix, ord=float("inf"), dim=1).float() / LARGEST_CODE[kind]
    return scales, scales.clamp(min=_TINY).reciprocal().unsqueeze(1)


def _compute_code_shape(matrix: Tensor) -> tuple[int, int]:
    rows, columns = matrix.shape
    return max(_FEWEST, _round_up(rows)), _round_up(columns)


# Each of these two is one operator, which is compiled by itself on a GPU where Triton is there, and
# elsewhere works on a piece at a time: as a chain of operators they would take longer than they
# save, and temporaries besides.


def _quantize(matrix: Tensor, kind: str, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if can_compile(matrix):
        return call_compiled(_quantize_unchunked, matrix, kind, counted)
    scales = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    zeros = torch.zeros(_compute_code_shape(matrix), dtype=torch.int8, device=matrix.device)
    codes = zeros.view(_TYPES[kind])  # zero in both types
    for first, last in cut_rows(matrix.shape[0], matrix.shape[1], _PIECE_ELEMENTS):
        part = (
            matrix[first:last] if counted is None else torch.where(counted, matrix[first:last], 0)
        )
        scales[first:last], inverse = _compute_row_scales(part, kind)
        part = part * inverse
        codes[first:last, : matrix.shape[1]] = part.round_() if kind == "int8" else part
        del part
    return codes, scales


def _scale_unchunked(sums: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums `[m', n']` times the scales of rows `[m]` and columns `[n]`: `[m, n]` of dtype."""
    return (sums[: len(left), : len(right)] * right * left.unsqueeze(1)).to(dtype)


def _scale(sums: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if can_compile(sums):
        return call_compiled(_scale_unchunked, sums, left, right, dtype)
    out = torch.empty(len(left), len(right), dtype=dtype, device=sums.device)
    for first, last in cut_rows(out.shape[0], out.shape[1], _PIECE_ELEMENTS):
        part = sums[first:last, : len(right)] * right
        out[first:last] = part.mul_(left[first:last].unsqueeze(1))
        del part
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
    """Sums of products of int8 codes `[m, n]`: int32, or fp32 where int32 might not hold them."""
    if left.shape[1] <= _LONGEST_SUM:
        return torch._int_mm(left, right.t())
    total: Tensor | None = None
    for mine, other in zip(
        left.split(_LONGEST_SUM, dim=1), right.split(_LONGEST_SUM, dim=1), strict=True
    ):
        part = torch._int_mm(mine.contiguous(), other.contiguous().t())
        total = part.float() if total is None else total.add_(part)
        del part
    assert total is not None
    return total


def _round_up(size: int) -> int:
    return (size + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.kind, ctx.shape = kind, hidden.shape
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] else None, weight)
        # What checkpointing gives back of a saved tensor has no way to the parameter.
        ctx.parameter = (
            weight if deferred.is_split_backward_enabled() and ctx.needs_input_grad[1] else None
        )
        return scaled_mm(hidden.reshape(-1, hidden.shape[-1]), weight, kind).view(
            *hidden.shape[:-1], -1
        )

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
    """Return G.T X, with X scaled by the tokens that have a gradient: padding has none."""
    has_gradient = torch.linalg.vector_norm(gradient, ord=float("inf"), dim=1) != 0
    return scaled_mm(gradient.t(), hidden.t(), kind, has_gradient)

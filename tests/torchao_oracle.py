"""Compute with torchao what the library computes by itself, for comparison.

No other module of tests and benchmarks imports torchao: its modules move between releases.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def _import_silently() -> Iterator[None]:
    """Silence logging and warnings: at its import torchao logs what a build for CPUs lacks."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


def is_plain_linear(module: nn.Module, name: str) -> bool:
    """Return True for the modules that `matmul_dtype` changes in a full fine-tune.

    They are the plain linears of the layers. name: the module's.
    """
    return type(module) is nn.Linear and "layers." in name


def convert(
    model: nn.Module,
    kind: str,
    module_filter: Callable[[nn.Module, str], bool] | None = is_plain_linear,
    **settings: Any,
) -> nn.Module:
    """Let torchao convert linears to matmuls in `kind` (int8, fp8: one scale a row), in place.

    module_filter: called with module and name; None leaves the choice to torchao.
    settings: of Float8LinearConfig, beside those of its recipe `rowwise`; for fp8 only.
    """
    with _import_silently():
        if kind == "int8":
            from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
            from torchao.quantization import quantize_

            # Swapping modules leaves the parameters plain tensors.
            quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), module_filter)
            return model
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        rowwise = replace(
            Float8LinearConfig.from_recipe_name("rowwise"),
            **{"round_scales_to_power_of_2": False} | settings,  # as ours are not
        )
        return convert_to_float8_training(model, config=rowwise, module_filter_fn=module_filter)


def round_rows(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return torchao's codes of a matrix `[o, i]`, rounded row by row, and the rows' scales `[o]`.

    A row's codes are multiplied by its scale.
    """
    with _import_silently():
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
        from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
    if kind == "int8":
        codes, scales = quantize_int8_rowwise(matrix)
        return codes, scales
    rowwise = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    factors = tensor_to_scale(matrix, torch.float8_e4m3fn, **rowwise)
    codes = to_fp8_saturated(matrix.float() * factors, torch.float8_e4m3fn)
    return codes, factors.reciprocal().flatten()


def get_low_bit_adamw_classes() -> dict[int, Any]:
    """Return the classes of torchao's AdamW by the bits of their states."""
    with _import_silently():
        from torchao.optim import AdamW4bit, AdamW8bit
    return {8: AdamW8bit, 4: AdamW4bit}


def get_low_bit_levels() -> tuple[Any, dict[tuple[int, bool], tuple[float, ...]]]:
    """Return (torchao's module of quantizing functions, its levels by (bits, is signed)).

    Levels are the values of the codes of AdamW's states.
    """
    with _import_silently():
        from torchao.optim import quant_utils, subclass_4bit, subclass_8bit
    levels = {
        (8, True): subclass_8bit.get_qmap_signed(),
        (8, False): subclass_8bit.get_qmap_unsigned(),
        (4, True): subclass_4bit.get_qmap_signed(),
        (4, False): subclass_4bit.get_qmap_unsigned(),
    }
    return quant_utils, levels


def get_nf4_class() -> Any:
    """Return torchao's class of NF4 tensors."""
    with _import_silently():
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor
    return NF4Tensor


def compute_mxfp4_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix `[o, i]` in MXFP4: codes and biased exponents, uint8.

    Codes are `[o, i / 32, 16]`, two in a byte; exponents are `[o, i / 32]`.
    """
    with _import_silently():
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    rows, columns = matrix.shape
    scales, codes = to_mx(matrix.contiguous(), torch.float4_e2m1fn_x2, 32)  # 32 share a scale
    return codes.view(torch.uint8).reshape(rows, columns // 32, 16), scales.view(torch.uint8)


def build_base_config(kind: str, group_size: int = 32) -> Any:
    """Return torchao's config of an export in `kind` (int4, int8, fp8), as its docs write it.

    group_size: elements of a row that share a scale; for int4 only.
    """
    with _import_silently():
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            IntxWeightOnlyConfig,
            PerRow,
        )
        from torchao.quantization.granularity import PerAxis, PerGroup
    if kind == "fp8":
        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    if kind == "int8":
        return IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group_size))


def export_linears(model: nn.Module, kind: str, group_size: int = 32) -> nn.Module:
    """Let torchao quantize the layers' linears in place; return the model.

    kind, group_size: of `build_base_config`. fp8 needs a GPU that supports it.
    """
    with _import_silently():
        from torchao.quantization import quantize_

        quantize_(model, build_base_config(kind, group_size), is_plain_linear)
    return model


def prepare_linears(model: nn.Module, kind: str, group_size: int = 32) -> nn.Module:
    """Let torchao swap the layers' linears in place for fake-quantized ones, which train.

    Returns the model. kind, group_size: of `build_base_config`.
    """
    with _import_silently():
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        quantize_(
            model, QATConfig(build_base_config(kind, group_size), step="prepare"), is_plain_linear
        )
    return model


def compute_fp8_rows(matrix: Tensor) -> Tensor:
    """Return a matrix `[o, i]` rounded to fp8 and back, as an export does, in its own dtype."""
    with _import_silently():
        from torchao.quantization import PerRow
        from torchao.quantization.quantize_.workflows import Float8Tensor
    return Float8Tensor.from_hp(matrix, torch.float8_e4m3fn, PerRow()).dequantize()

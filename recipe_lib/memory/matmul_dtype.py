"""Linears that multiply in FP8 or INT8, with weights and results in the model's own type.

`matmul_dtype` rounds what the layers' linears multiply, see `recipe_lib.ops.low_precision`: of attention and MLP, the
frozen part of an adapted one too. Embedding, output head, norms, adapters and attention itself stay in `dtype`. It is a
lever of time alone: weights, gradients and states take what they take, and next to them are codes of the matrices that
are being multiplied, one byte an element.

INT8 runs on any device, fast on GPUs from Ampere on; FP8 takes a GPU of compute capability 8.9. Rounding reads each
operand twice, which long micro-batches make up for and short ones do not: `tune plan` shows it. What has run on a
GPU: docs/measurements/on_a_gpu.md. Why the linears are not torchao's stands, with figures, in
`recipe_lib.ops.low_precision`.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops.low_precision import KINDS, scaled_linear

FP8_CAPABILITY = (8, 9)


def use_low_precision(model: nn.Module, matmul_dtype: str | None, device: torch.device | None = None) -> None:
    """Lets the layers' linears multiply in `matmul_dtype` (fp8, int8), in place, on a meta model; None: as they did.

    Names and types of parameters stay, so that checkpoints are those of any other run. Called after the adapters and
    before layers are checkpointed and compiled. device: that the model is for. Raises ConfigError for FP8 where
    `device` (None: this machine's GPU) does not multiply it, for weights that are quantized, for mixtures of experts,
    and where there is no linear to change.
    """
    if matmul_dtype is None:
        return
    if matmul_dtype not in KINDS:
        raise ConfigError(f"matmul_dtype: found {matmul_dtype}, expected one of {', '.join(KINDS)}")
    if matmul_dtype == "fp8":
        _check_fp8(device)
    if any(isinstance(module, Mixture) for module in model.modules()):
        raise ConfigError(
            f"matmul_dtype: found {matmul_dtype} for a mixture of experts, most of whose matmuls are grouped ones in "
            "dtype; remove matmul_dtype"
        )
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name in layer_names(model))
    found = 0
    for name, module in modules.items():
        if not name.startswith(inside):
            continue
        if isinstance(module, QuantizedLinear):
            raise ConfigError(
                f"matmul_dtype: found {matmul_dtype} for weights that are kept in {module.kind}, expected weights in "
                "dtype; set lora.quantize_base=none, or remove matmul_dtype"
            )
        if type(module) is AdaptedLinear:
            module.frozen_forward = MethodType(_of(matmul_dtype), module)  # type: ignore[method-assign]
        elif type(module) is nn.Linear and not _is_of_adapter(name):
            module.forward = MethodType(_of(matmul_dtype), module)  # type: ignore[method-assign]
        else:
            continue
        found += 1
    if not found and inside:
        raise ConfigError(
            f"matmul_dtype: found {matmul_dtype} for a model whose layers have no plain linear; remove matmul_dtype"
        )


def _is_of_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _of(kind: str) -> Callable[[Any, Tensor], Tensor]:
    """The forward of all linears of a kind: one function, so that torch.compile compiles alike layers once."""
    return {"int8": _int8_forward, "fp8": _fp8_forward}[kind]


def _int8_forward(module: Any, hidden: Tensor) -> Tensor:
    return scaled_linear(hidden, module.weight, module.bias, "int8")


def _fp8_forward(module: Any, hidden: Tensor) -> Tensor:
    return scaled_linear(hidden, module.weight, module.bias, "fp8")


def _check_fp8(device: torch.device | None) -> None:
    """ConfigError where the device does not multiply FP8. What a simulated device stands for is the plan's to judge."""
    kind = device.type if device is not None else "cuda"
    if kind not in ("cpu", "cuda"):
        return
    cuda = torch.get_device_module("cuda")
    if kind == "cpu" or not cuda.is_available():
        raise ConfigError(
            "matmul_dtype: found fp8 on a CPU, expected a GPU of compute capability 8.9 or more; choose int8, or "
            "remove matmul_dtype"
        )
    capability = cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"matmul_dtype: found fp8 on {cuda.get_device_name(device)} of compute capability "
            f"{'.'.join(map(str, capability))}, expected 8.9 or more (Ada, Hopper and later); choose int8, or remove "
            "matmul_dtype"
        )

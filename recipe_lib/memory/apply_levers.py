"""The levers that change layers, in the order in which they wrap each other."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedLinear
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.activation_offload import Window, offload_activations
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.layer_costs import PipelineStages
from recipe_lib.memory.layer_stream import LayerStream, stream_layers
from recipe_lib.memory.mlp_tiles import chunk_mlps
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops.fused_kernels import use_fused_kernels
from recipe_lib.ops.low_precision import KINDS, scaled_linear


@dataclass(frozen=True)
class MemoryLevers:
    """What was decided. kernels: about fused ones, for the log. checkpointing: what layers keep, where a budget chose
    it. offload: what moves activations. layers: what copies them from the host. quantization: what linears are rounded
    to while they train."""

    kernels: str = ""
    checkpointing: str | None = None
    offload: Window | None = None
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
    """What the layers of a meta model multiply in, compute in tiles, keep for backward, compile and offload, in place.

    `fused_kernels`, `matmul_dtype`, `qat`, `memory.mlp_tiles`,
    `memory.activation_checkpointing`, `compile`, `memory.activation_offload`, `memory.stream_layers`. Call it when
    adapters and sharded matrices are in their places, and before FSDP wraps what it leaves. device: the one that
    computes. pipeline: what runs the model's stages. for_training: False for a model that never goes backward.
    data_ranks: that have batches of their own. Raises ConfigError for what device or model cannot do.
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


_COMPILATIONS = 64  # of one layer: kinds of layers, row lengths, with and without gradients


def compile_layers(model: nn.Module, backend: Any = "inductor") -> None:
    """torch.compile on each layer's forward: alike layers share one compilation, FSDP's hooks stay outside of it.

    The first row length is compiled for itself, the second for every length from then on; rows one at a time, and
    evaluation, are compiled on their own. A layer that is compiled too often runs as it is, silently: torch's limit is
    for all kinds of layers together, and is set where none comes to it.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    modules = dict(model.named_modules())
    compile_layer = model.compile_layer if isinstance(model, LanguageModel) else None
    for name in layer_names(model):
        if compile_layer is not None:
            compile_layer(name, backend)
            continue
        layer = modules[name]
        compiled = torch.compile(layer.forward, backend=backend)
        shared = any(isinstance(parameter, DTensor) for parameter in layer.parameters())
        layer.forward = _on_own_parts(layer, compiled) if shared else compiled


def _on_own_parts(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """While `forward` runs, the layer's DTensor parameters are this rank's parts of them.

    With DTensors compiled code keeps their mesh for backward, and torch 2.13 puts it where it expects a tensor if
    attention is computed again on a CPU. (A layer that is compiled too often would have DTensors again when it is
    computed again, and selective checkpointing miss an operator: one more reason for `_COMPILATIONS`.)
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        found = [(module._parameters, name) for module in layer.modules() for name in module._parameters]
        whole = [(place, name, place[name]) for place, name in found if isinstance(place[name], DTensor)]
        try:
            for place, name, parameter in whole:
                place[name] = parameter.to_local()  # type: ignore[union-attr, assignment]
            return forward(*args, **kwargs)
        finally:
            for place, name, parameter in whole:
                place[name] = parameter

    return run


# Linears that multiply in FP8 or INT8, with weights and results in the model's own type.
#
# `matmul_dtype` rounds what the layers' linears multiply, see `recipe_lib.ops.low_precision`: of
# attention and MLP, the frozen part of an adapted one too. Embedding, output head, norms, adapters
# and attention itself stay in `dtype`. It is a lever of time alone: weights, gradients and states
# take what they take, and next to them are codes of the matrices that are being multiplied, one
# byte an element.
#
# INT8 runs on any device, fast on GPUs from Ampere on; FP8 takes a GPU of compute capability 8.9.
# Rounding reads each operand twice, which long micro-batches make up for and short ones do not:
# `tune plan` shows it. What has run on a GPU: docs/measurements/on_a_gpu.md. Why the linears are
# not torchao's stands, with figures, in `recipe_lib.ops.low_precision`.


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

"""Apply the memory levers that change a model's layers, in the order in which they wrap each other.

A memory lever is a config key that trades time or precision for memory. `parallelize` calls
`apply_memory_levers(model, cfg, device)` on a model on the meta device. `compile_layers` is here
because its place in that order matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory.activation_offload import OffloadedActivations, offload_activations
from recipe_lib.memory.budget import PipelineStages
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.layer_stream import LayerStream, stream_layers
from recipe_lib.memory.low_precision import use_low_precision
from recipe_lib.memory.mlp_tiles import chunk_mlps, exchange_parameters, find_parameters
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.language_model import LanguageModel, list_layer_names
from recipe_lib.ops.fused_kernels import use_fused_kernels
from recipe_lib.ops.kept_tensors import KeptTensors, use_cheap_tags

# Compilations of layers' forwards that torch may make: one for each kind of layer, for the first
# sequence length and for later ones, with and without gradients. torch counts those of all kinds
# together. Beyond its own limit, which is lower, a layer silently runs uncompiled.
_MAX_COMPILATIONS = 64


@dataclass(frozen=True)
class MemoryLevers:
    """The results of applying levers to a model; None where a lever is off."""

    kernels: str = ""  # a line about fused kernels, for the log; empty on a CPU
    checkpointing: str | None = None  # a line on what layers keep within a budget, for the log
    offload: OffloadedActivations | None = None  # moves saved activations to the host and back
    layers: LayerStream | None = None  # copies layers from the host to the device, one at a time
    quantization: FakeQuantization | None = None  # rounds weights in training (QAT)


def apply_memory_levers(
    model: nn.Module,
    cfg: FullFinetuneConfig,
    device: torch.device,
    pipeline: PipelineStages | None = None,
    *,
    for_training: bool = True,
    data_ranks: int = 1,
) -> MemoryLevers:
    """Apply the config's memory levers to the layers of a meta model, in place.

    The keys are `fused_kernels`, `matmul_dtype`, `qat`, `memory.mlp_tiles`,
    `memory.activation_checkpointing`, `compile`, `memory.activation_offload` and
    `memory.stream_layers`. Call it when adapters and tensor-parallel matrices are in place, and
    before FSDP wraps the layers.

    device: the one that computes. pipeline: the stages of this rank; None: there is no pipeline.
    for_training: False for a model that never goes backward, such as a reference model. data_ranks:
    number of ranks that have batches of their own. Raises ConfigError for a lever that device or
    model do not have.
    """
    checkpointing = None
    offload = None
    quantization = None
    is_stage = pipeline is not None
    kernels = use_fused_kernels(cfg.fused_kernels, device)
    use_low_precision(model, cfg.matmul_dtype, device)
    if for_training:  # a reference model computes with its weights as they are
        quantization = fake_quantize_linears(
            model, kind=cfg.qat, group_size=cfg.qat_group_size, start=cfg.qat_start_step
        )
    chunk_mlps(model, cfg.memory.mlp_tiles, is_stage=is_stage)
    if for_training:
        # Innermost of what has hooks on saved tensors: what is computed again is neither
        # checkpointed nor offloaded.
        recompute_cheap_tensors(model, cfg)
        checkpointing = apply_activation_checkpointing(
            model, cfg.memory.activation_checkpointing, cfg=cfg, device=device, pipeline=pipeline
        )
    # Outside of checkpointing, so that recomputation is compiled too.
    if cfg.compile:
        compile_layers(model)
    # Outside of compilation, so that what compiled layers save is offloaded too.
    if for_training:
        offload = offload_activations(model, cfg.memory, device, is_stage=is_stage)
    # Outermost: all of the above must see weights on the device.
    layers = stream_layers(
        model, memory=cfg.memory, device=device, ranks=data_ranks, is_stage=is_stage
    )
    return MemoryLevers(
        kernels=kernels,
        checkpointing=checkpointing,
        offload=offload,
        layers=layers,
        quantization=quantization,
    )


def recompute_cheap_tensors(model: nn.Module, cfg: FullFinetuneConfig) -> None:
    """Let each layer keep only what is not cheap to compute again, in place.

    See `ops.kept_tensors`. With `memory.recompute_cheap=false` nothing changes. Layers that are not
    a `Decoder`'s say nothing about their calls, which are noted by name.
    """
    wanted = cfg.memory.recompute_cheap
    # A checkpointed layer is computed again as a whole.
    use_cheap_tags(wanted and cfg.compile and cfg.memory.activation_checkpointing == "none")
    is_ours = isinstance(model, Decoder)
    # An inferred tensor plan, which notes the calls of its ranks, does so by itself.
    if not wanted or cfg.compile or not (is_ours or cfg.parallel.tensor == 1):
        return
    modules = dict(model.named_modules())
    for name in list_layer_names(model):
        # Not a closure: a copy of the model would run the forward of the layer that it is made of.
        modules[name].forward = partial(_run_recorded, modules[name].forward, not is_ours)


def _run_recorded(forward: Callable[..., Any], notes_calls: bool, *args: Any, **kwargs: Any) -> Any:
    with KeptTensors().layer(notes_calls):  # its own: layers may run in several threads at once
        return forward(*args, **kwargs)


def compile_layers(model: nn.Module, backend: Any = "inductor") -> None:
    """Compile each layer's forward with torch.compile, in place.

    Layers of the same kind share a compilation; FSDP's hooks stay outside of it. The first sequence
    length has a compilation of its own, and all later lengths share one. A batch of one sequence,
    and evaluation, have others. backend: of torch.compile.
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
        has_dtensors = any(isinstance(parameter, DTensor) for parameter in layer.parameters())
        layer.forward = _use_local_parameters(layer, compiled) if has_dtensors else compiled


def _use_local_parameters(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `forward` with the local tensors of DTensor parameters.

    layer: the one whose parameters they are. forward: its compiled forward.
    """
    # With DTensors, compiled code keeps their mesh for backward. torch 2.13 then takes it for a
    # tensor if attention is recomputed on a CPU. A layer beyond the limit of compilations would see
    # DTensors again when it is recomputed, and selective checkpointing would miss an operator: one
    # more reason for `_MAX_COMPILATIONS`.

    def run(*args: Any, **kwargs: Any) -> Any:
        dtensors = find_parameters(layer.modules(), lambda tensor: isinstance(tensor, DTensor))
        with exchange_parameters(dtensors, lambda parameter: parameter.to_local()):
            return forward(*args, **kwargs)

    return run

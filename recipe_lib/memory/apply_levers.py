"""The levers that change layers, in the order in which they wrap each other."""

from dataclasses import dataclass

import torch
from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory.activation_offload import Window, offload_activations
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.compiling import compile_layers
from recipe_lib.memory.layer_costs import PipelineStages
from recipe_lib.memory.layer_stream import LayerStream, stream_layers
from recipe_lib.memory.matmul_dtype import use_low_precision
from recipe_lib.memory.mlp_tiles import chunk_mlps
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.ops.fused_kernels import use_fused_kernels


@dataclass(frozen=True)
class MemoryLevers:
    """What was decided. kernels: about fused ones, for the log. checkpointing: what layers keep, where a budget chose
    it. offload: what moves activations. layers: what copies them from the host. quantization: what linears are rounded
    to while they train."""

    kernels: str
    checkpointing: str | None
    offload: Window | None
    layers: LayerStream | None
    quantization: FakeQuantization | None


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

"""The levers that change layers, in the order in which they wrap each other."""

import torch
from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory.activation_offload import offload_activations
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.compiling import compile_layers
from recipe_lib.memory.loss_kernel import check_loss_kernel
from recipe_lib.memory.matmul_dtype import use_low_precision
from recipe_lib.memory.mlp_tiles import chunk_mlps


def apply_layer_levers(model: nn.Module, cfg: FullFinetuneConfig, device: torch.device, *, keeps: bool = True) -> None:
    """What the layers of a meta model multiply in, compute in pieces, keep for backward, compile and send, in place.

    `matmul_dtype`, `memory.mlp_tiles`, `memory.loss_kernel`, `memory.activation_checkpointing`, `compile`,
    `memory.activation_offload`. Call it when adapters and shared matrices are in their places, and before FSDP wraps
    what it leaves. keeps: False for a model that never goes backward. device: the one that computes. Raises ConfigError
    for what device or model cannot do.
    """
    use_low_precision(model, cfg.matmul_dtype, device)
    chunk_mlps(model, cfg.memory.mlp_tiles)
    check_loss_kernel(model, cfg.memory.loss_kernel, device)
    if keeps:
        apply_activation_checkpointing(model, cfg.memory.activation_checkpointing, cfg, device)
    if cfg.compile:
        compile_layers(model)  # recomputation included
    if keeps:
        offload_activations(model, cfg.memory, device)  # what compiled layers keep, too

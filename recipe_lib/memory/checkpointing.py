"""Activation checkpointing: what a layer keeps for backward, against what it computes again (arXiv 1604.06174).

For a layer of a Llama-like decoder it keeps, beside the log-sum-exp of attention, elements a token:

    none       every intermediate result that some gradient needs
    selective  2 d + h e + k e + f: its input, and what attention, the key, output and up projections gave
    full       d: its input
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from recipe_lib.errors import ConfigError
from recipe_lib.models.layers import layer_names

MODES = ("none", "full", "selective")

# Operators by their name, since which of them exist depends on torch's release and build.
_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
    }
)
# Sums over the ranks that share a layer's matrices. What is gathered for them is kept by no mode: it is as large as all
# ranks' hidden states; nor what FSDP gathers (`c10d::`), which would undo the sharding.
_SUMS = frozenset({"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"})


def apply_activation_checkpointing(model: nn.Module, mode: str) -> None:
    """Makes each layer keep less for backward, in place; call it before layers are compiled and sharded.

    mode `full`: a layer keeps its input and runs forward again in backward. `selective`: it also keeps the outputs of
    attention, of its own sums over ranks and of every second matmul, so that about half is computed again. `none`:
    nothing changes. Layers are the elements of the model's module lists. A layer's forward is wrapped, the module is
    not: parameter names stay as they are. Random numbers (dropout) come out the same the second time.
    """
    if mode not in MODES:
        raise ConfigError(f"memory.activation_checkpointing: found {mode}, expected one of {', '.join(MODES)}")
    if mode == "none":
        return
    options = {"context_fn": _selective_contexts} if mode == "selective" else {}
    modules = dict(model.named_modules())
    for name in layer_names(model):
        modules[name].forward = _checkpointed(modules[name].forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)

    return run


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one layer's forward and of its recomputation, which count matmuls from the start each."""
    matmuls = {False: 0, True: 0}

    def choose(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0] if isinstance(operator, torch._ops.OpOverload) else str(operator)
        if name in _MATMULS:
            matmuls[context.is_recompute] += 1
            # The second, fourth, ...: a layer's last matmul (down) is the seventh, and no gradient needs its output.
            kept = matmuls[context.is_recompute] % 2 == 0
        else:
            kept = name in _ATTENTION or name in _SUMS or name == "flex_attention"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)

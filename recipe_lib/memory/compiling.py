"""torch.compile, layer by layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.language_model import LanguageModel

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

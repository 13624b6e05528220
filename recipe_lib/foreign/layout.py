"""What can be read off the module that a model's class makes: its tensors, its layers, how they begin."""

import hashlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.foreign.build import ModuleSource, make_module
from recipe_lib.foreign.find_modules import layer_linears, linear_shape, uncalled_linears
from recipe_lib.models.external import TensorLayout
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.meta_init import persistent_buffers


def layer_kinds(source: ModuleSource) -> list[str]:
    """What each layer is: equal texts stand for layers of the same parameters and the same kind of attention."""
    model: Any = make_module(source)
    types = getattr(getattr(model, "config", None), "layer_types", None)
    kinds = []
    for at, name in enumerate(layer_names(model)):
        layer = model.get_submodule(name)
        shapes = [(inside, tuple(parameter.shape)) for inside, parameter in layer.named_parameters()]
        kinds.append(f"{type(layer).__name__} {types[at] if types and at < len(types) else ''} {shapes}")
    return kinds


@lru_cache(maxsize=8)
def layout(source: ModuleSource) -> TensorLayout:
    """What the files of a model hold, by one build of its class."""
    model = make_module(source)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    buffers = persistent_buffers(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()}
    return TensorLayout(
        shapes,
        frozenset(buffers),
        names={name: tuple(names[id(parameter)]) for name, parameter in parameters.items()},
        prefix=f"{prefix}." if (prefix := getattr(model, "base_model_prefix", "")) else "",
        linears={name: linear_shape(module) for name, module in layer_linears(model).items()},
        uncalled=uncalled_linears(model),
        modules=tuple(name for name, _ in model.named_modules() if name),
    )


@torch.no_grad()
def first_vectors(source: ModuleSource, seed: int) -> dict[str, Tensor]:
    """The values that a model's own class begins its vectors and numbers with: parameters of less than two dimensions.

    The class' own `_init_weights`, or its modules' `reset_parameters`, runs over a model of which nothing else has
    values; random ones follow from (seed, the module's name). Where a class has neither, biases are 0, others 1.
    """
    model: Any = make_module(source)
    vectors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 and parameter.is_floating_point():
                value = torch.full(parameter.shape, 0.0 if "bias" in name else 1.0)
                module._parameters[name] = nn.Parameter(value, False)
                vectors[f"{prefix}.{name}" if prefix else name] = value
    for name, module in reversed(list(model.named_modules())):  # those inside before the one around them
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            if hasattr(model, "_init_weights"):
                model._init_weights(module)
            elif any(True for _ in module.parameters(recurse=False)) and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return vectors

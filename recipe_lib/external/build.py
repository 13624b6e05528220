"""A model of another library without memory for its parameters, called as ours is, and what can be read off it.

Parameters are put on the meta device as they are registered. Buffers get their values, since what a class computes in
its constructor (rotary frequencies, slopes of alibi, causal masks) is in no checkpoint.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipe_lib.config.registry import register, registered
from recipe_lib.errors import SetupError
from recipe_lib.external.call import ExternalModel
from recipe_lib.external.find_modules import is_transposed, layer_linears, linear_shape, uncalled_linears
from recipe_lib.external.transformers_config import TRANSFORMERS, transformers_config
from recipe_lib.models.external_spec import ExternalSpec, TensorLayout
from recipe_lib.models.families import spec_from_config
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.meta_init import build_meta, persistent_buffers


@dataclass(frozen=True)
class ModuleSource:
    """What a model's module is made of."""

    implementation: str  # `transformers`, or the name that a plugin registered
    config: dict[str, Any] = field(hash=False)  # what config.json holds
    attention: str = "sdpa"  # or `eager`: what transformers calls its implementation


def build_module(source: ModuleSource, dtype: torch.dtype, spec: ExternalSpec) -> ExternalModel:
    """The model on meta, with parameters of `dtype`, and with our call signature.

    What its class computed for the buffers is in `computed_buffers`; `materialize` puts it there. Floating point
    buffers keep the type that the class gives them. Of a multimodal model `other_parts` have no gradient.
    """
    model = make_module(source, dtype)
    buffers = dict(model.named_buffers())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="meta")
    adopted = ExternalModel.adopt(model, spec, source.config, buffers)
    for name in adopted.other_parts:
        adopted.get_submodule(name).requires_grad_(False)
    return adopted


def make_module(source: ModuleSource, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module as its class makes it, parameters on meta, with the class' own forward."""
    with parameters_on_meta():
        make, config = registered("model", source.implementation), dict(source.config)
        own = source.implementation == TRANSFORMERS
        model = make(config, source.attention, dtype) if own else make(config)
    if not isinstance(model, nn.Module):
        raise SetupError(
            f"model.implementation={source.implementation}: found {type(model).__name__}, expected a torch.nn.Module"
        )
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                # In place, since others may share it.
                parameter.data = parameter.data.to(dtype)
                module._parameters[name] = parameter
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside the block every parameter that a module registers goes to the meta device; buffers do not."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            placed = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            placed.__dict__.update(parameter.__dict__ | placed.__dict__)  # a class may mark its parameters
            module._parameters[name] = placed

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@register("model", "native")
def native_module(config: dict[str, Any]) -> nn.Module:
    """Our own decoder of a config.json, on meta."""
    return build_meta(spec_from_config(config, "config.json"), torch.float32)


@register("model", "transformers")
def transformers_module(
    config: dict[str, Any], attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The causal language model that transformers has for a config.json; attention: its word for an implementation."""
    from transformers import AutoModelForCausalLM

    made = transformers_config(config, str(config.get("model_type")))
    made.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    return cast(nn.Module, model)


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
    parameters, linears = dict(model.named_parameters()), layer_linears(model)
    buffers = persistent_buffers(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()}
    return TensorLayout(
        shapes,
        frozenset(buffers),
        names={name: tuple(names[id(parameter)]) for name, parameter in parameters.items()},
        prefix=f"{prefix}." if (prefix := getattr(model, "base_model_prefix", "")) else "",
        linears={name: linear_shape(module) for name, module in linears.items()},
        transposed=frozenset(name for name, module in linears.items() if is_transposed(module)),
        plain=frozenset(name for name, module in linears.items() if type(module) is nn.Linear),
        uncalled=uncalled_linears(model),
        modules=tuple(name for name, _ in model.named_modules() if name),
        unread=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
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

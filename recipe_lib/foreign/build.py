"""A model of another library without memory for its parameters, called as ours is.

Parameters are put on the meta device as they are registered. Buffers get their values, since what a class computes in
its constructor (rotary frequencies, slopes of alibi, causal masks) is in no checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from recipe_lib.config.registry import register, registered
from recipe_lib.errors import SetupError
from recipe_lib.foreign.call import adopt_call
from recipe_lib.foreign.find_modules import other_parts
from recipe_lib.foreign.transformers_config import TRANSFORMERS, transformers_config
from recipe_lib.models.families import spec_from_config
from recipe_lib.models.meta_init import build_meta


@dataclass(frozen=True)
class ModuleSource:
    """What a model's module is made of."""

    implementation: str  # `transformers`, or the name that a plugin registered
    config: dict[str, Any] = field(hash=False)  # what config.json holds
    attention: str = "sdpa"  # or `eager`: what transformers calls its implementation


def build_module(source: ModuleSource, dtype: torch.dtype) -> nn.Module:
    """The model on meta, with parameters of `dtype`, and with our call signature.

    What its class computed for the buffers is in `first_buffers`, name -> values on the host; `materialize` puts it
    there. Floating point buffers keep the type that the class gives them. Of a multimodal model the parts that text
    does not run through, `other_parts`, have no gradient.
    """
    model: Any = make_module(source, dtype)
    model.first_buffers = dict(model.named_buffers())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="meta")
    adopt_call(model, source.config)
    model.other_parts = other_parts(model)  # for a recipe's `describe`
    for name in model.other_parts:
        model.get_submodule(name).requires_grad_(False)
    return cast(nn.Module, model)


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

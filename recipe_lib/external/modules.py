"""Make the module of a class of transformers or of a plugin, on meta, as text alone needs it.

`module_spec`, `checkpoint_layout` and `build` call `make_module` with a `ModuleSource`. Of a class
that is published with other parts (vision, audio, speech) those that text does not run through are
left out, which `find_needless_parts` finds by a run without data. Parameters are on meta, buffers
keep their values: what a constructor computes (rotary frequencies, slopes of alibi, causal masks)
is in no checkpoint.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from recipe_lib.config.registry import get_registered, register
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    build_transformers_config,
    format_one_line,
    list_auto_classes,
    list_other_parts,
)
from recipe_lib.external.scan_kernels import choose_scans_by_device
from recipe_lib.models import build_meta, build_spec
from recipe_lib.models.language_model import Entry, mix_in, replace_entries


@dataclass(frozen=True)
class ModuleSource:
    """All that a model's module is built from; equal sources build equal modules."""

    implementation: str  # `transformers`, or the name that a plugin registered
    config: dict[str, Any] = field(hash=False)  # of config.json; a dict cannot be hashed
    attention: str = "sdpa"  # transformers' `attn_implementation`; or `eager`
    # True: with the parts that text does not run through, such as a vision tower.
    has_all_parts: bool = False


def make_module(source: ModuleSource, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the class' own module, with floating point parameters of `dtype` on meta.

    Parts that text does not run through are left out, unless the source has all parts. Raises
    ConfigError for a name that no plugin registered, SetupError if a plugin returns no
    module. Errors of the class' constructor are not caught.
    """
    with put_parameters_on_meta():
        make = get_registered("model", source.implementation)
        config = dict(source.config)
        is_transformers = source.implementation == TRANSFORMERS
        # A plugin's function takes the config alone.
        model = make(config, source.attention, dtype) if is_transformers else make(config)
    if not isinstance(model, nn.Module):
        raise SetupError(
            f"model.implementation={source.implementation}: found {type(model).__name__}, expected"
            " a torch.nn.Module"
        )
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                # In place, since other modules may share the parameter.
                parameter.data = parameter.data.to(dtype)
    if not source.has_all_parts:
        _leave_out(model, find_needless_parts(source))
    return model


@lru_cache(maxsize=4)
def get_module(source: ModuleSource) -> nn.Module:
    """Return a module as of `make_module`, for all who only read its shapes and its config."""
    return make_module(source).to("meta")  # its buffers, too: it is kept


def _leave_out(model: nn.Module, parts: Iterable[str]) -> None:
    """Put None in the place of modules of a model. parts: their names."""
    for part in parts:
        owner, _, child = part.rpartition(".")
        model.get_submodule(owner)._modules[child] = None


@lru_cache(maxsize=8)
def find_needless_parts(source: ModuleSource) -> tuple[str, ...]:
    """Return the names of the parts that a multimodal class has and text does not run through.

    A part is needless if the class' forward runs without it on tokens alone; a few classes read
    sizes off such a part. Empty for a plugin's class, and for one whose forward reads values of
    tensors, so that it does not run without data. Raises CheckpointError for a class that does not
    take tokens alone.
    """
    if source.implementation != TRANSFORMERS:
        return ()
    # In bf16: grouped matmuls of experts take no fp32 without data.
    model = make_module(replace(source, has_all_parts=True), torch.bfloat16).to("meta").eval()
    parts = list_other_parts(model)
    if not parts:
        return ()
    # Two layers run as all do, and sooner; a class that counts them raises.
    if _try_tokens(model, parts, num_layers=2) is None or _try_tokens(model, parts) is None:
        return tuple(parts)
    error = _try_tokens(model)
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return ()  # it reads values, such as which experts have tokens
    if error is not None:
        raise CheckpointError(
            f"{type(model).__name__} does not take text alone ({format_one_line(error)}); expected"
            " a model whose forward needs input_ids and nothing else"
        )
    return tuple(part for part in parts if _try_tokens(model, without=[part]) is None)


def _try_tokens(
    model: nn.Module, without: Iterable[str] = (), num_layers: int | None = None
) -> Exception | None:
    """Run a model on tokens, without data; return the error that it raises, or None.

    model: on meta. without: names of modules that None stands for meanwhile. num_layers: of each
    list of layers that runs; None: all.
    """
    entries: list[Entry] = []
    for name, module in model.named_modules():
        is_of_layers = isinstance(module, nn.ModuleList) and not re.search(r"\.\d+\.", name)
        if num_layers is not None and is_of_layers:
            owner, _, child = name.rpartition(".")
            entries.append((model.get_submodule(owner)._modules, child, module[:num_layers]))
    for part in without:
        owner, _, child = part.rpartition(".")
        entries.append((model.get_submodule(owner)._modules, child, None))
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    # Fake tensors rather than meta ones alone: transformers makes its masks without reading values
    # of these.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        replace_entries(entries),
        mock.patch.object(logger, "disabled", True),  # it prints the traceback of what is caught
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        try:
            model(input_ids=tokens)
        except Exception as error:  # noqa: BLE001
            return error  # of any kind: a class computes with what it lacks
    return None


@contextmanager
def put_parameters_on_meta() -> Iterator[None]:
    """Put every parameter that is registered inside the block on meta; buffers stay where they are.

    `torch.device("meta")` would not do: buffers would lose the values that a constructor computes.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            on_meta = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            # Classes set attributes on parameters, which are kept. With the last one transformers
            # computes no first value, which would take most of the time of a build.
            on_meta.__dict__.update(parameter.__dict__ | on_meta.__dict__)
            on_meta._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[name] = on_meta

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


@register("model", "native")
def build_native_module(config: dict[str, Any]) -> nn.Module:
    """Build our own decoder of a config.json, on meta; `native` among the registered names."""
    return build_meta(build_spec(config, "config.json"), torch.float32)


@register("model", "transformers")
def build_transformers_module(
    config: dict[str, Any], attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the model that transformers has for a config.json, and that generates text.

    attention: "sdpa" or "eager", its `attn_implementation`.
    """
    model_config = build_transformers_config(config, str(config.get("model_type")))
    model_config.use_cache = False
    model_config.get_text_config().use_cache = False
    auto_class = _choose_auto_class(model_config, config.get("architectures"))
    model: Any = auto_class.from_config(model_config, attn_implementation=attention, dtype=dtype)
    if dtype == torch.float64:  # which torch multiplies for no groups of experts
        model.set_experts_implementation("batched_mm")
    model.tie_weights()
    choose_scans_by_device(model)
    if type(model).forward is nn.Module.forward and hasattr(model, "thinker"):
        _run_by_thinker(model)
    return cast(nn.Module, model)


def _run_by_thinker(model: Any) -> None:
    """Give a class without a forward of its own that of its text model, in place.

    The models that also speak (Qwen2.5-Omni, Qwen3-Omni) have one only in `generate`.
    """

    class Thinker:
        @wraps(type(model.thinker).forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.thinker(*args, **kwargs)

        def get_input_embeddings(self: Any) -> Any:
            return self.thinker.get_input_embeddings()

        def get_output_embeddings(self: Any) -> Any:
            return self.thinker.get_output_embeddings()

        def get_decoder(self: Any) -> Any:
            return self.thinker.get_decoder()

    mix_in(Thinker, model)


def _choose_auto_class(model_config: Any, architectures: Any) -> Any:
    """Return the auto class whose model a config.json names, or else that of the published one.

    architectures: the value in config.json.
    """
    auto_classes = list_auto_classes(model_config)
    if len(auto_classes) > 1 and isinstance(architectures, list):
        for auto_class in auto_classes:
            if auto_class._model_mapping[type(model_config)].__name__ in architectures:
                return auto_class
    return auto_classes[0]

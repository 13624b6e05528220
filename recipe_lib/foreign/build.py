"""A foreign model without memory for its parameters, and what can be read off it.

Parameters are put on the meta device as they are registered. Buffers get their values, since what a class computes in
its constructor (rotary frequencies, slopes of alibi, causal masks) is in no checkpoint.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipe_lib.config.registry import register, registered
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.foreign.linears import layer_linears, linear_shape, other_parts, uncalled_linears
from recipe_lib.foreign.spec import TRANSFORMERS, ForeignSpec, looks_ahead, transformers_config
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.meta_init import persistent_buffers

_MANY_POSITIONS = 2**24  # of a model whose config names no limit
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
_STD_KEYS = ("initializer_range", "init_std", "initializer_std")


def build_foreign(spec: ForeignSpec, dtype: torch.dtype) -> nn.Module:
    """The model of a foreign spec on meta, with parameters of `dtype`, and with our call signature.

    What its class computed for the buffers is in `first_buffers`, name -> values on the host; `materialize` puts it
    there. Floating point buffers keep the type that the class gives them. Of a multimodal model the parts that text
    does not run through, `other_parts`, have no gradient.
    """
    from recipe_lib.foreign.call import adopt_call

    model: Any = make_module(spec, dtype)
    model.first_buffers = dict(model.named_buffers())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="meta")
    adopt_call(model, spec)
    model.other_parts = other_parts(model)  # for a recipe's `describe`
    for name in model.other_parts:
        model.get_submodule(name).requires_grad_(False)
    return model


def make_module(spec: ForeignSpec, dtype: torch.dtype) -> nn.Module:
    """The module as its class makes it, parameters on meta, with the class' own forward."""
    with parameters_on_meta():
        make = registered("model", spec.source)
        config = dict(spec.config)
        model = make(config, spec.attention, dtype) if spec.source == TRANSFORMERS else make(config)
    if not isinstance(model, nn.Module):
        raise SetupError(f"model.source={spec.source}: found {type(model).__name__}, expected a torch.nn.Module")
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
    from recipe_lib.models.meta_init import build_meta
    from recipe_lib.models.spec import spec_from_config

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


def describe_foreign(config: dict[str, Any], where: str, source: str) -> ForeignSpec:
    """See `recipe_lib.foreign.spec.foreign_spec`."""
    family = str(config.get("model_type", source))
    spec = ForeignSpec(family=family, source=source, attention="sdpa", config=config)
    if source == TRANSFORMERS:
        transformers_config(config, where)
    try:
        model = make_module(spec, torch.float32)
    except (ValueError, ImportError) as first:  # a class without sdpa says so by one of these
        spec = replace(spec, attention="eager")
        try:
            model = make_module(spec, torch.float32)
        except (ValueError, ImportError):
            raise CheckpointError(f"{where}: {family} cannot be built ({' '.join(str(first).split())[:200]})") from None
    except (TypeError, AttributeError, RuntimeError, KeyError, IndexError, AssertionError) as error:
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{where}: {family} cannot be built from config.json ({said})") from error
    if source == TRANSFORMERS and looks_ahead(model.config):
        raise CheckpointError(
            f"{where}: config.json: model_type {family!r} lets each token see those behind it, and would learn to copy "
            "them, expected a causal language model; set is_decoder to true in config.json if it was trained so"
        )
    found = embedding_and_head(model)
    if found is None:
        raise CheckpointError(
            f"{where}: {type(model).__name__} has no embedding and output projection that could be found; "
            "expected get_input_embeddings and get_output_embeddings, or nn.Embedding and nn.Linear outside the layers"
        )
    embedding, head = found
    settings = _settings(model, config)
    return replace(
        spec,
        vocab_size=embedding.weight.shape[0],
        max_positions=next((number for key in _POSITION_KEYS if (number := settings(key))), _MANY_POSITIONS),
        init_std=next((float(number) for key in _STD_KEYS if (number := settings(key))), 0.02),
        tied=embedding.weight is head.weight,
        num_layers=len(layer_names(model)),
    )


def _settings(model: nn.Module, config: dict[str, Any]) -> Callable[[str], Any]:
    """A number of the config by its key, with the defaults of the class; None where there is none."""
    made: Any = getattr(model, "config", None)
    made = made.get_text_config() if hasattr(made, "get_text_config") else made

    def read(key: str) -> Any:
        value = getattr(made, key, None) if not isinstance(made, dict) else None
        value = config.get(key) if value is None else value
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None

    return read


def embedding_and_head(model: nn.Module) -> tuple[Any, Any] | None:
    """The module of the token embedding and that of the output projection; None where either is not found.

    Asked of the model, as transformers' classes answer; else the first nn.Embedding outside the layers and the last
    nn.Linear there that has as many outputs as that has rows.
    """
    embedding, head = _asked(model, "get_input_embeddings"), _asked(model, "get_output_embeddings")
    if embedding is not None and head is not None:
        return embedding, head
    inside = tuple(f"{name}." for name in layer_names(model))
    outside = [module for name, module in model.named_modules() if not name.startswith(inside)]
    embedding = embedding or next((module for module in outside if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        return None
    rows = embedding.weight.shape[0]
    heads = [module for module in outside if isinstance(module, nn.Linear) and module.out_features == rows]
    head = head or (heads[-1] if heads else None)
    return None if head is None else (embedding, head)


def _asked(model: nn.Module, method: str) -> Any:
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(getattr(found, "weight", None), Tensor) else None


def layer_kinds(spec: ForeignSpec) -> list[str]:
    """What each layer is: equal texts stand for layers of the same parameters and the same kind of attention."""
    model: Any = make_module(spec, torch.float32)
    types = getattr(getattr(model, "config", None), "layer_types", None)
    kinds = []
    for at, name in enumerate(layer_names(model)):
        layer = model.get_submodule(name)
        shapes = [(inside, tuple(parameter.shape)) for inside, parameter in layer.named_parameters()]
        kinds.append(f"{type(layer).__name__} {types[at] if types and at < len(types) else ''} {shapes}")
    return kinds


@dataclass(frozen=True)
class Layout:
    """The tensors that a checkpoint of a foreign model has.

    shapes: name -> shape, parameters first, then the buffers that belong into a checkpoint. names: name -> every name
    that the same tensor has (several for tied ones). buffers: those of the names that are buffers. linears: every
    linear inside the layers, name -> (outputs, inputs). uncalled: those that are none to an adapter, see
    `uncalled_linears`. modules: the names of all. prefix: what names begin with in a model with a head, and may
    lack in a file that was written without one.
    """

    shapes: dict[str, tuple[int, ...]]
    names: dict[str, tuple[str, ...]]
    buffers: frozenset[str]
    linears: dict[str, tuple[int, int]]
    uncalled: dict[str, str]
    modules: tuple[str, ...]
    prefix: str


@lru_cache(maxsize=8)
def layout(spec: ForeignSpec) -> Layout:
    """What the files of a model hold, by one build of its class."""
    model = make_module(spec, torch.float32)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    buffers = persistent_buffers(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()}
    linears = {name: linear_shape(module) for name, module in layer_linears(model).items()}
    return Layout(
        shapes,
        {name: tuple(names[id(parameter)]) for name, parameter in parameters.items()},
        frozenset(buffers),
        linears,
        uncalled_linears(model),
        tuple(name for name, _ in model.named_modules() if name),
        f"{prefix}." if (prefix := getattr(model, "base_model_prefix", "")) else "",
    )


@torch.no_grad()
def first_vectors(spec: ForeignSpec, seed: int) -> dict[str, Tensor]:
    """The values that a model's own class begins its vectors and numbers with: parameters of less than two dimensions.

    The class' own `_init_weights`, or its modules' `reset_parameters`, runs over a model of which nothing else has
    values; random ones follow from (seed, the module's name). Where a class has neither, biases are 0, others 1.
    """
    model: Any = make_module(spec, torch.float32)
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

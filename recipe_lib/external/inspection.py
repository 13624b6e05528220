"""Read what training needs off a model of another library, whose classes nobody has described.

`module_spec` and `build` call `build_transformers_config`, which makes transformers' config object
of a config.json with clear errors, and functions that find modules by their class and position:
`find_embedding_and_head`, `list_layer_linears`, `list_other_parts`. `add_adapters` puts LoRA
adapters on linears inside the layers, selected by the ends of their names.
"""

import inspect
import math
import re
import warnings
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.adapted_product import add_scaled
from recipe_lib.adapters.layers import AdaptedMatrix, AdapterSettings, adapt
from recipe_lib.adapters.lora import find_unknown_experts
from recipe_lib.config.local_files import check_transformers
from recipe_lib.config.schema import EXPERTS, PEFT_NAMES, ROUTER, LoraConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.external.experts import replace_experts
from recipe_lib.logs import silence_torchao
from recipe_lib.models.config_fields import NEWER
from recipe_lib.models.config_spelling import spell_both
from recipe_lib.models.language_model import (
    combine_classes,
    get_built_tensors,
    list_layer_names,
    replace_entries,
)
from recipe_lib.models.spec import TensorLayout

TRANSFORMERS = "transformers"  # the value of `model.implementation` for this library
# model_type of decoders whose config has `is_decoder` False, which their class does not read.
_DECODERS = ("gpt_neox", "gpt_neox_japanese")
# model_type of encoders whose config has no `is_decoder`.
_ENCODERS = ("cpmant", "xlnet")
# Numbers that JSON lacks, as transformers 5 spells them in a config.json.
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def build_transformers_config(config: Mapping[str, Any], where: str) -> Any:
    """Build the config object of transformers for a config.json.

    The checkpoint's own code is never run. where: the file, folder or preset, named in errors.
    Raises SetupError if transformers is not installed. Raises CheckpointError for a model_type that
    it does not have or that is no causal language model, or a config that its class does not take.
    """
    require_transformers()
    from transformers import AutoConfig

    model_type = config.get("model_type")
    where = f"{where}: config.json"
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            f"{where}: model_type: found {model_type!r}, expected the name of an architecture"
        )
    try:
        built = AutoConfig.for_model(
            model_type,
            **{key: restore_numbers(value) for key, value in config.items() if key != "model_type"},
        )
    except ValueError as error:
        if model_type in str(error) and "auto_map" in config:
            remedy = (
                "its own code is not run: convert it to an architecture that transformers has, or"
                " give it by --plugin"
            )
        else:
            remedy = (
                "install a release of transformers that has it, or give it by --plugin"
                f" ({format_one_line(error)})"
            )
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not one of transformers'; {remedy}"
        ) from None
    except Exception as error:  # noqa: BLE001
        # The class computes with the values and may raise anything: 0 heads divide by zero.
        raise CheckpointError(
            f"{where}: the config of {model_type!r} does not take it ({format_one_line(error)})"
        ) from None
    if not list_auto_classes(built):
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is no causal language model in transformers; take"
            " one that is"
        )
    return built


def list_auto_classes(built: Any) -> list[Any]:
    """Return transformers' auto classes that have a model for a config which generates text.

    The one of the published checkpoint is first: where a config has a text model's config inside,
    that is the class with the other parts, such as vision, too.
    """
    import transformers

    names = ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"]
    if built.get_text_config(decoder=True) is not built:
        names = [*names[1:], names[0]]
    # AutoModelForMultimodalLM came with transformers 5.
    auto_classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    return [auto_class for auto_class in auto_classes if type(built) in auto_class._model_mapping]


def spell_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json with both the older and the newer names of keys that were renamed.

    Releases of transformers before and after 5 can read the result. Classes that came with
    transformers 5 may read something else from a config with both spellings of rotary settings: for
    those no newer spelling of these is added. where: as in `build_transformers_config`.
    """
    built = build_transformers_config(config, where).to_dict()
    spelled = spell_both(_add_ropes(config, built))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such a class warns of a key that it does not know
        try:
            built_again = build_transformers_config(spelled, where).to_dict()
        except CheckpointError:
            built_again = {}
    is_same = all(
        _drop_type(built_again.get(key)) == _drop_type(value) for key, value in built.items()
    )
    return spelled if is_same else spell_both(config, with_ropes=False)


def _drop_type(value: Any) -> Any:
    """Return a value of a config without `type`, which transformers keeps beside `rope_type`."""
    if not isinstance(value, dict):
        return value
    return {key: _drop_type(inner) for key, inner in value.items() if key != "type"}


def _add_ropes(config: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the `rope_parameters` of the built config, in nested configs too.

    built: the dict of the config object that its class made of it.
    """
    parts = {
        key: value
        for key, value in config.items()
        if isinstance(value, dict) and isinstance(built.get(key), dict)
    }
    added = {key: _add_ropes(part, built[key]) for key, part in parts.items()}
    return dict(config) | added | ({NEWER: built[NEWER]} if built.get(NEWER) else {})


def is_encoder(config: Any) -> bool:
    """Return True if each token sees later ones: an encoder that has a head for tokens too.

    config: the config object of a built model, since decoders of encoder-decoders set `is_decoder`
    in their constructors.
    """
    is_no_decoder = (
        getattr(config, "is_decoder", None) is False and config.model_type not in _DECODERS
    )
    return (
        is_no_decoder or getattr(config, "causal", None) is False or config.model_type in _ENCODERS
    )


def restore_numbers(value: Any) -> Any:
    """Return a value of config.json with its infinite numbers and nan as floats.

    transformers 5 writes them as `{"__float__": "Infinity"}`. Nested values are restored too.
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and str(value["__float__"]) in _FLOATS:
            return _FLOATS[str(value["__float__"])]
        return {key: restore_numbers(item) for key, item in value.items()}
    return [restore_numbers(item) for item in value] if isinstance(value, list) else value


def require_transformers() -> None:
    """Raise SetupError unless transformers is installed; called before it is imported.

    It also keeps torchao from printing at that import.
    """
    silence_torchao()
    check_transformers()


def format_one_line(error: Exception) -> str:
    """Return the message of another library's exception in one line, of at most 200 characters."""
    return " ".join(str(error).split())[:200]


# Find the modules of a model, and put adapters on its linears.


# Follows `self.CHILD.weight` in a regular expression: no attribute of the weight that is read
# without its values.
_NOT_AN_ATTRIBUTE = r"(?!\.(dtype|device|shape|size|is_meta|requires_grad|ndim)\b)"


def find_embedding_and_head(model: nn.Module) -> tuple[Any, Any] | None:
    """Find the modules (token embedding, output projection); None if one is missing.

    The model's own `get_input_embeddings` and `get_output_embeddings`, as transformers' classes
    have them, are asked first. Else it is the first nn.Embedding outside the layers, and the last
    nn.Linear there with as many outputs as the embedding has rows.
    """
    embedding = _call_getter(model, "get_input_embeddings")
    head = _call_getter(model, "get_output_embeddings")
    if embedding is not None and head is not None:
        return embedding, head
    layer_prefixes = tuple(f"{name}." for name in list_layer_names(model))
    outside_layers = [
        module for name, module in model.named_modules() if not name.startswith(layer_prefixes)
    ]
    embedding = embedding or next(
        (module for module in outside_layers if isinstance(module, nn.Embedding)), None
    )
    if embedding is None:
        return None
    rows = embedding.weight.shape[0]
    heads = [
        module
        for module in outside_layers
        if isinstance(module, nn.Linear) and module.out_features == rows
    ]
    head = head or (heads[-1] if heads else None)
    return None if head is None else (embedding, head)


def _call_getter(model: nn.Module, method: str) -> Any:
    """Call a method of the model that returns a module; None without it, or without a weight."""
    try:
        module = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(getattr(module, "weight", None), Tensor) else None


def list_layer_linears(model: nn.Module) -> dict[str, nn.Module]:
    """List the linears inside the layers that the model calls as linears, by name."""
    uncalled = find_uncalled_linears(model)
    return {
        name: module for name, module in _list_inner_linears(model).items() if name not in uncalled
    }


def find_uncalled_linears(model: nn.Module) -> dict[str, str]:
    """Find linears inside the layers on which an adapter would not work: name -> the reason.

    There are two reasons. A kernel of the module around it reads the weight and never calls the
    linear (state-space layers of Mamba and its descendants). Or its class derives from nn.Linear
    and returns something else (routers of mixtures). The model may be on meta.
    """
    reasons: dict[str, str] = {}
    for name, module in _list_inner_linears(model).items():
        owner, _, child = name.rpartition(".")
        owner_class: Any = type(model.get_submodule(owner))
        if is_weight_read(owner_class, child):
            reasons[name] = "its layer reads the weight without calling the linear"
        elif not _is_called_as_linear(module):
            reasons[name] = (
                f"a {type(module).__name__} returns something else than a linear's outputs"
            )
    return reasons


def list_other_parts(model: Any) -> list[str]:
    """List names of modules that text does not run through: vision, audio, their projectors.

    Only the outermost ones; empty for a model that is not multimodal.
    """
    config: Any = getattr(model, "config", None)
    if (
        not hasattr(config, "get_text_config")
        or config.get_text_config() is config
        or not hasattr(model, "get_decoder")
    ):
        return []
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        return []
    text_modules = nn.ModuleList([decoder, model.get_output_embeddings()])
    text_ids = set(map(id, text_modules.parameters()))
    parts: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{part}.") for part in parts)
        parameters = [] if is_inside or not name else list(module.parameters())
        if parameters and not any(id(parameter) in text_ids for parameter in parameters):
            parts.append(name)
    return parts


def _list_inner_linears(model: nn.Module) -> dict[str, nn.Module]:
    """List all linears inside the layers by name, without the parts that text does not run through.

    transformers' Conv1D counts as a linear; its weight is transposed.
    """
    layer_prefixes = tuple(f"{name}." for name in list_layer_names(model))
    not_text_prefixes = tuple(f"{name}." for name in list_other_parts(model))
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(layer_prefixes)
        and not name.startswith(not_text_prefixes)
        and (isinstance(module, nn.Linear) or is_transposed(module))
    }


@lru_cache(maxsize=1024)
def is_weight_read(owner: type, child: str) -> bool:
    """Return True if the source of a class reads the values of `self.CHILD.weight` or `.bias`.

    owner: the class of the module that has the linear. child: the linear's name there.
    """
    pattern = rf"\bself\.{re.escape(child)}\.(weight|bias)\b{_NOT_AN_ATTRIBUTE}"
    return re.search(pattern, _read_methods(owner)) is not None


@lru_cache(maxsize=256)
def _read_methods(owner: type) -> str:
    """Return the source of a class' methods; empty for a class made in a console.

    Method by method: for a class, `inspect` parses the whole file. A class with a mixin of ours has
    the name of the class that it is made from.
    """
    classes = [base for base in owner.__mro__ if base.__name__ == owner.__name__]
    members = [member for base in classes for member in vars(base).values()]
    try:
        return "".join(map(inspect.getsource, filter(inspect.isfunction, members)))
    except (OSError, TypeError):
        return ""


def _is_called_as_linear(module: Any) -> bool:
    """Return True if a linear's forward maps `[2, in]` to one tensor `[2, out]`."""
    if type(module).forward is nn.Linear.forward or is_transposed(module):
        return True
    outputs, inputs = get_linear_shape(module)
    try:
        with torch.no_grad():
            output = module(
                torch.empty(2, inputs, device=module.weight.device, dtype=module.weight.dtype)
            )
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return isinstance(output, Tensor) and tuple(output.shape) == (2, outputs)


def is_transposed(module: nn.Module) -> bool:
    """Return True if a module is transformers' Conv1D: a linear whose weight is `[in, out]`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def get_linear_shape(module: Any) -> tuple[int, int]:
    """Return (output channels, input channels) of a linear."""
    rows, columns = module.weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


# Kind of mixture -> names of linears that PEFT 0.21 takes for the experts that transformers 5 has
# fused: the keys of _MOE_TARGET_MODULE_MAPPING in peft.utils.transformers_weight_conversion.
_FUSED_EXPERTS = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}


class AdaptedExternal(AdaptedMatrix):
    """A linear of another class than torch's own, such as transformers' Conv1D, with an adapter.

    `AdaptedMatrix` documents the methods. The frozen part is computed by the class' own forward.
    """

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        super().__init__(base, settings, get_linear_shape(base))
        self.kind = type(base)  # the class of the linear
        self.transposed = is_transposed(base)  # its weight is [in, out]

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        weight: Any = self.weight
        return weight[:, start:stop].t() if self.transposed else weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        return self.kind.forward(self, hidden)


class AdaptedClassRouter(AdaptedMatrix):
    """A mixin for a router, whose class reads the parameter `weight`, with an adapter of it.

    PEFT adapts such a parameter as this does: the class computes with the sum.
    """

    def __init__(self, base: Any, settings: AdapterSettings) -> None:
        super().__init__(base, settings, tuple(base.weight.shape))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class' own forward returns, of the weight with the adapter's product."""
        run = super(AdaptedMatrix, self).forward
        if self.is_off:
            return run(*args, **kwargs)
        product = self.lora_B.weight @ self.lora_A.weight
        frozen: Any = self.weight
        weight = add_scaled(frozen, product, self.settings.scaling).to(frozen.dtype)
        with replace_entries([(self._parameters, "weight", weight)]):
            return run(*args, **kwargs)


def select_adapter_targets(
    linears: Collection[str], targets: Collection[str], refused_reasons: Mapping[str, str]
) -> list[str]:
    """Select the names of the linears that get an adapter.

    targets: `lora.target_modules`: ends of names, PEFT's short names, or "all-linear"; empty: none.
    refused_reasons: name -> reason, of the linears that cannot have an adapter. Raises ConfigError
    for an end that no linear's name has, or that a name in `refused_reasons` has.
    """
    ends = [] if "all-linear" in targets else [PEFT_NAMES.get(name, name) for name in targets]
    for end in ends:
        refused = next((name for name in refused_reasons if has_end(name, end)), None)
        if refused is not None:
            raise ConfigError(
                f"lora.target_modules: {end!r}: {refused} cannot have an adapter:"
                f" {refused_reasons[refused]}; remove it"
            )
        if not any(has_end(name, end) for name in linears):
            leaves = sorted(
                {get_leaf_name(name) for name in linears if name not in refused_reasons}
            )
            raise ConfigError(
                f"lora.target_modules: {end!r} is the end of no linear of this model; its linears"
                f" end in {', '.join(leaves)}"
            )
    return [
        name
        for name in linears
        if name not in refused_reasons
        and ("all-linear" in targets or any(has_end(name, end) for end in ends))
    ]


def list_linear_targets(cfg: LoraConfig, layout: TensorLayout) -> list[str]:
    """Return the values of `lora.target_modules` but for `experts` and `router`.

    Where the model has none that are known, these are ends of names like others.
    """
    words = {EXPERTS: layout.experts, ROUTER: layout.routers}
    return [name for name in cfg.target_modules if not words.get(name)]


def list_without_adapter(
    layout: TensorLayout, uncalled: Mapping[str, str], family: str
) -> dict[str, str]:
    """Return the linears and routers that cannot be named as linears: name -> the reason.

    uncalled: name -> reason, of those that the model does not call as linears. family: model_type.
    """
    # model_type -> the kind of mixture whose conversions transformers uses for it.
    kinds: dict[str, str] = {}
    if find_spec("transformers") is not None:
        from transformers import conversion_mapping

        kinds = {"mixtral": "mixtral"} | getattr(
            conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {}
        )
    expert_names = _FUSED_EXPERTS.get(kinds.get(family, ""), frozenset())
    why = f"PEFT takes the name for the experts of {family}, and would not open the adapter"
    return (
        dict(uncalled)
        | dict.fromkeys(layout.routers, "it is no linear, and is named by the word router")
        | {name: why for name in layout.linears if get_leaf_name(name) in expert_names}
    )


def get_leaf_name(name: str) -> str:
    """Return the last part of a module's name; the last two where it is a number (`experts.3`)."""
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if last.isdigit() and before else last


def has_end(name: str, end: str) -> bool:
    """Return True if a module's name ends in these parts: `mlp.up` ends in `up`, but not in `p`."""
    return name == end or name.endswith(f".{end}")


def add_adapters(model: Any, cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Put adapters on linears inside the layers, in place, and quantize as `lora.quantize_base`.

    Linears of nn.Linear itself and experts are quantized, also those without an adapter. Linears
    that a recipe added to the model are left as they are. cfg: its `target_modules` and
    `quantize_base` are read. settings: the adapters' rank and more. Raises ConfigError for a target
    that no linear matches or that cannot have an adapter, and for a model whose layers have no
    linears for one.
    """
    built = get_built_tensors(model)  # names of the class' own tensors; None: all are
    linears = {
        name: base
        for name, base in list_layer_linears(model).items()
        if built is None or f"{name}.weight" in built
    }
    layout = model.spec.layout()
    if EXPERTS in cfg.target_modules and not layout.experts:
        reason = find_unknown_experts(model) or "no layer of the model has experts"
        raise ConfigError(f"lora.target_modules: {EXPERTS}: {reason}; remove it from the list")
    targets = list_linear_targets(cfg, layout)
    adapted_names = set(
        select_adapter_targets(
            linears,
            targets,
            list_without_adapter(layout, find_uncalled_linears(model), model.spec.family),
        )
    )
    if targets and not adapted_names:
        raise ConfigError(
            "lora.target_modules: the model's layers have no linears that could have an adapter"
        )
    for name, base in linears.items():
        owner, _, child = name.rpartition(".")
        adapter = settings if name in adapted_names else None
        if type(base) is nn.Linear:
            base = adapt(base, adapter, cfg.quantize_base)
        elif adapter is not None:
            base = AdaptedExternal(base, adapter)
        setattr(model.get_submodule(owner), child, base)
    for name in layout.routers if ROUTER in cfg.target_modules else ():
        owner, _, child = name.rpartition(".")
        router = model.get_submodule(name)
        kind: Any = type(router)
        adapted_router = combine_classes(AdaptedClassRouter, kind)(router, settings)
        setattr(model.get_submodule(owner), child, adapted_router)
    has_adapters = EXPERTS in cfg.target_modules
    replace_experts(model, settings if has_adapters else None, cfg.quantize_base)

"""The config, the embedding and head, and the linears of a model of another library.

`build_transformers_config` makes transformers' own object of a config.json. Of the modules nobody
wrote a description: they are found by what they are (`find_embedding_and_head`), and an adapter
stands for any linear inside the layers, of whatever class, by the ends of its name.
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

from recipe_lib.adapters.layers import AdaptedMatrix, AdapterSettings, adapt
from recipe_lib.config.local_files import check_transformers
from recipe_lib.config.schema import PEFT_NAMES, LoraConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.logs import silence_torchao
from recipe_lib.models.config_fields import NEWER
from recipe_lib.models.config_spelling import spell_both
from recipe_lib.models.language_model import get_built_tensors, list_layer_names

TRANSFORMERS = "transformers"
_DECODERS = (
    "gpt_neox",
    "gpt_neox_japanese",
)  # whose config has an is_decoder that they do not read
_ENCODERS = ("cpmant", "xlnet")  # whose config has none
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def build_transformers_config(config: Mapping[str, Any], where: str) -> Any:
    """Build the config object of transformers for a config.json. Nothing of the checkpoint's own
    code is run.

    Raises SetupError if transformers is not installed, CheckpointError for a model_type that it
    does not have.
    """
    require_transformers()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    kind = config.get("model_type")
    where = f"{where}: config.json"
    if not isinstance(kind, str) or not kind:
        raise CheckpointError(
            f"{where}: model_type: found {kind!r}, expected the name of an architecture"
        )
    try:
        built = AutoConfig.for_model(
            kind,
            **{key: restore_numbers(value) for key, value in config.items() if key != "model_type"},
        )
    except ValueError as error:
        if kind in str(error) and "auto_map" in config:
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
            f"{where}: model_type {kind!r} is not one of transformers'; {remedy}"
        ) from None
    except Exception as error:  # noqa: BLE001
        # Its class computes with it: no heads are a division by zero.
        raise CheckpointError(
            f"{where}: the config of {kind!r} does not take it ({format_one_line(error)})"
        ) from None
    if type(built) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{where}: model_type {kind!r} is no causal language model in transformers; take one"
            " that is"
        )
    return built


def spell_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json with the older and the newer names of its keys, if its class reads the
    same from them.

    Classes that came with transformers 5 may not; earlier releases have none for those models.
    """
    built = build_transformers_config(config, where).to_dict()
    spelled = spell_both(_add_ropes(config, built))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of such a class on a name that is not its own
        try:
            read = build_transformers_config(spelled, where).to_dict()
        except CheckpointError:
            read = {}
    is_same = all(_drop_type(read.get(key)) == _drop_type(value) for key, value in built.items())
    return spelled if is_same else spell_both(config, with_ropes=False)


def _drop_type(value: Any) -> Any:
    """Return a value of a config without `type`, which transformers keeps beside `rope_type`."""
    if not isinstance(value, dict):
        return value
    return {key: _drop_type(inner) for key, inner in value.items() if key != "type"}


def _add_ropes(config: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json, and its parts, with the `rope_parameters` that its class makes of
    it.
    """
    parts = {
        key: value
        for key, value in config.items()
        if isinstance(value, dict) and isinstance(made.get(key), dict)
    }
    added = {key: _add_ropes(part, made[key]) for key, part in parts.items()}
    return dict(config) | added | ({NEWER: made[NEWER]} if made.get(NEWER) else {})


def is_encoder(made: Any) -> bool:
    """Return True if a config is of an encoder, which transformers has a language model's head for
    too.

    made: that of a built model: decoders of encoder-decoders are configured so in their
    constructors.
    """
    is_no_decoder = getattr(made, "is_decoder", None) is False and made.model_type not in _DECODERS
    return is_no_decoder or getattr(made, "causal", None) is False or made.model_type in _ENCODERS


def restore_numbers(value: Any) -> Any:
    """Return a value of config.json with its numbers: transformers 5 writes an infinite one as
    `{"__float__": "Infinity"}`.
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and str(value["__float__"]) in _FLOATS:
            return _FLOATS[str(value["__float__"])]
        return {key: restore_numbers(item) for key, item in value.items()}
    return [restore_numbers(item) for item in value] if isinstance(value, list) else value


def require_transformers() -> None:
    """Raise SetupError unless transformers is installed; call it before an import, which it makes a
    silent one.
    """
    silence_torchao()
    check_transformers()


def format_one_line(error: Exception) -> str:
    """Return what an exception of another library says, in one line and not in full."""
    return " ".join(str(error).split())[:200]


# The modules of a model that nobody described, and adapters on its linears.


# What is asked of a weight without reading its numbers.
_OF_ITS_FORM = r"(?!\.(dtype|device|shape|size|is_meta|requires_grad|ndim)\b)"


def find_embedding_and_head(model: nn.Module) -> tuple[Any, Any] | None:
    """Find the module of the token embedding and that of the output projection; None where either
    is not found.

    Asked of the model, as transformers' classes answer; else the first nn.Embedding outside the
    layers and the last nn.Linear there that has as many outputs as that has rows.
    """
    embedding = _ask_model(model, "get_input_embeddings")
    head = _ask_model(model, "get_output_embeddings")
    if embedding is not None and head is not None:
        return embedding, head
    inside = tuple(f"{name}." for name in list_layer_names(model))
    outside = [module for name, module in model.named_modules() if not name.startswith(inside)]
    embedding = embedding or next(
        (module for module in outside if isinstance(module, nn.Embedding)), None
    )
    if embedding is None:
        return None
    rows = embedding.weight.shape[0]
    heads = [
        module
        for module in outside
        if isinstance(module, nn.Linear) and module.out_features == rows
    ]
    head = head or (heads[-1] if heads else None)
    return None if head is None else (embedding, head)


def _ask_model(model: nn.Module, method: str) -> Any:
    try:
        module = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(getattr(module, "weight", None), Tensor) else None


def list_layer_linears(model: nn.Module) -> dict[str, nn.Module]:
    """List the linears inside the layers that the model calls as linears, by name."""
    left = find_uncalled_linears(model)
    return {name: module for name, module in _list_inner_linears(model).items() if name not in left}


def find_uncalled_linears(model: nn.Module) -> dict[str, str]:
    """Find linears inside the layers that are not called as one, with the reason: an adapter there
    would be passed by.

    A class whose kernels read a linear's weight (the state-space layers of Mamba and its
    descendants), and a class derived from nn.Linear whose forward returns something else (routers
    of mixtures). Plain and meta models.
    """
    reasons: dict[str, str] = {}
    for name, module in _list_inner_linears(model).items():
        owner, _, child = name.rpartition(".")
        layer: Any = type(model.get_submodule(owner))
        if is_weight_read(layer, child):
            reasons[name] = "its layer reads the weight without calling the linear"
        elif not _is_called_as_linear(module):
            reasons[name] = (
                f"a {type(module).__name__} returns something else than a linear's outputs"
            )
    return reasons


def list_other_parts(model: Any) -> list[str]:
    """List modules of a multimodal model that text does not run through (vision, audio, their
    projector), by name.
    """
    made: Any = getattr(model, "config", None)
    if (
        not hasattr(made, "get_text_config")
        or made.get_text_config() is made
        or not hasattr(model, "get_decoder")
    ):
        return []
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        return []
    of_text = nn.ModuleList([decoder, model.get_output_embeddings()])
    run = set(map(id, of_text.parameters()))
    parts: list[str] = []
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{part}.") for part in parts)
        parameters = [] if outer or not name else list(module.parameters())
        if parameters and not any(id(parameter) in run for parameter in parameters):
            parts.append(name)
    return parts


def _list_inner_linears(model: nn.Module) -> dict[str, nn.Module]:
    inside = tuple(f"{name}." for name in list_layer_names(model))
    other_parts = tuple(f"{name}." for name in list_other_parts(model))
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(inside)
        and not name.startswith(other_parts)
        and (isinstance(module, nn.Linear) or is_transposed(module))
    }


@lru_cache(maxsize=1024)
def is_weight_read(owner: type, child: str) -> bool:
    """Return True if a class reads the numbers of `self.CHILD.weight` or `.bias` itself, as its
    source says.
    """
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):  # a class made in a console
        return False
    return (
        re.search(rf"\bself\.{re.escape(child)}\.(weight|bias)\b{_OF_ITS_FORM}", source) is not None
    )


def _is_called_as_linear(module: Any) -> bool:
    """Return True if what a linear's forward makes of `[2, in]` is one tensor `[2, out]`."""
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
    """Return (outputs, inputs) of a linear."""
    rows, columns = module.weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


# Names of linears that PEFT (0.21) takes for experts, which transformers 5 has fused, in models of
# these kinds: in peft.utils.transformers_weight_conversion the keys of _MOE_TARGET_MODULE_MAPPING.
_FUSED = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}


class AdaptedExternal(AdaptedMatrix):
    """A linear of a class that is not torch's own, such as transformers' Conv1D: its own forward,
    and an adapter.
    """

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        super().__init__(base, settings, get_linear_shape(base))
        self.kind = type(base)
        self.transposed = is_transposed(base)

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        """Return rows of W `[stop - start, in]`."""
        weight: Any = self.weight
        return weight[:, start:stop].t() if self.transposed else weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Map hidden `[..., in]` to `[..., out]` by the frozen part alone."""
        return self.kind.forward(self, hidden)


def select_adapter_targets(
    linears: Collection[str], targets: Collection[str], left: Mapping[str, str]
) -> list[str]:
    """Select the linears that an adapter is for. targets: `lora.target_modules`, ends of names or
    short names.

    left: names of modules that cannot have an adapter -> why, as `list_without_adapter` has them.
    Raises ConfigError for an end that no linear's name has, or that one of them has.
    """
    ends = [] if "all-linear" in targets else [PEFT_NAMES.get(name, name) for name in targets]
    for end in ends:
        refused = next((name for name in left if has_end(name, end)), None)
        if refused is not None:
            raise ConfigError(
                f"lora.target_modules: {end!r}: {refused} cannot have an adapter: {left[refused]};"
                " remove it"
            )
        if not any(has_end(name, end) for name in linears):
            leaves = sorted({get_leaf_name(name) for name in linears if name not in left})
            raise ConfigError(
                f"lora.target_modules: {end!r} is the end of no linear of this model; its linears"
                f" end in {', '.join(leaves)}"
            )
    return [
        name
        for name in linears
        if name not in left and (not ends or any(has_end(name, end) for end in ends))
    ]


def list_without_adapter(
    linears: Collection[str], uncalled: Mapping[str, str], family: str
) -> dict[str, str]:
    """List linears, and parameters that stand for some, that get no adapter: name -> why."""
    # Family -> the kind of mixture for whose fused experts PEFT takes names of linears.
    kinds: dict[str, str] = {}
    if find_spec("transformers") is not None:
        from transformers import conversion_mapping

        kinds = {"mixtral": "mixtral"} | getattr(
            conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {}
        )
    taken = _FUSED.get(kinds.get(family, ""), frozenset())
    why = f"PEFT takes the name for the experts of {family}, and would not open the adapter"
    return dict(uncalled) | {name: why for name in linears if get_leaf_name(name) in taken}


def get_leaf_name(name: str) -> str:
    """Return the last part of a module's name; with the one before it, where that is a number
    alone.
    """
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if last.isdigit() and before else last


def has_end(name: str, end: str) -> bool:
    """Return True if a module's name has this end, in whole parts, as PEFT understands it."""
    return name == end or name.endswith(f".{end}")


def add_adapters(model: Any, cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Put adapters on linears inside the layers, in place, and quantize those of torch's own class
    if asked to.

    Linears that a recipe added are left as they are. Raises ConfigError as `select_adapter_targets`
    does, and for a model whose layers have no linears for an adapter.
    """
    built = get_built_tensors(model)
    linears = {
        name: base
        for name, base in list_layer_linears(model).items()
        if built is None or f"{name}.weight" in built
    }
    adapted_names = set(
        select_adapter_targets(
            linears,
            cfg.target_modules,
            list_without_adapter(linears, find_uncalled_linears(model), model.spec.family),
        )
    )
    if not adapted_names:
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

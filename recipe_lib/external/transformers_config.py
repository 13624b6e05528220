"""A config.json as transformers' own config object. No torch here."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from recipe_lib.config.local_files import check_transformers
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import silence_torchao
from recipe_lib.models.config_fields import NEWER
from recipe_lib.models.config_spelling import spell_both

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
    added = dict(config) | {key: _add_ropes(part, made[key]) for key, part in parts.items()}
    return added | ({NEWER: made[NEWER]} if made.get(NEWER) else {})


def is_encoder(made: Any) -> bool:
    """Return True if a config is of an encoder, which transformers has a language model's head for
    too.

    made: that of a built model: decoders of encoder-decoders are configured so in their
    constructors.
    """
    if made.model_type in _ENCODERS or getattr(made, "causal", None) is False:
        return True
    return getattr(made, "is_decoder", None) is False and made.model_type not in _DECODERS


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

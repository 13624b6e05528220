"""One decoder for every family; torch is imported with the first name that needs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipe_lib.models.families import build_spec, read_spec, read_trained_spec
from recipe_lib.models.spec import DecoderSpec, list_presets, read_config, read_preset_config

if TYPE_CHECKING:
    from recipe_lib.models.decoder import Decoder, KVCache
    from recipe_lib.models.meta_init import build_meta, init_weights

__all__ = [
    "Decoder",
    "DecoderSpec",
    "KVCache",
    "build_meta",
    "init_weights",
    "read_preset_config",
    "list_presets",
    "read_config",
    "read_spec",
    "read_trained_spec",
    "build_spec",
]

_NEED_TORCH = {
    "Decoder": "decoder",
    "KVCache": "decoder",
    "build_meta": "meta_init",
    "init_weights": "meta_init",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)

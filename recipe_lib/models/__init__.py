"""Export what describes, builds and fills models to the rest of the library.

torch is imported with the first name that needs it, so that commands without a model start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipe_lib.models.families import (
    build_scored_spec,
    build_spec,
    count_head_labels,
    make_score_config,
    read_run_spec,
    read_spec,
    read_trained_spec,
    settle_packing,
)
from recipe_lib.models.spec import (
    SCORE,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    StageParts,
    has_score_head,
    list_presets,
    read_config,
    read_preset_config,
)

if TYPE_CHECKING:
    from recipe_lib.models.decoder import Decoder, KVCache
    from recipe_lib.models.meta_init import allocate, build_meta, find_extra_tensors, init_weights

__all__ = [
    "Decoder",
    "DecoderSpec",
    "ExternalSpec",
    "KVCache",
    "ModelSpec",
    "SCORE",
    "StageParts",
    "allocate",
    "build_meta",
    "build_scored_spec",
    "build_spec",
    "count_head_labels",
    "find_extra_tensors",
    "has_score_head",
    "init_weights",
    "list_presets",
    "make_score_config",
    "read_config",
    "read_preset_config",
    "read_run_spec",
    "settle_packing",
    "read_spec",
    "read_trained_spec",
]

# Name -> the module of this folder that has it and imports torch.
_NEED_TORCH = {
    "find_extra_tensors": "meta_init",
    "allocate": "meta_init",
    "Decoder": "decoder",
    "KVCache": "decoder",
    "build_meta": "meta_init",
    "init_weights": "meta_init",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)

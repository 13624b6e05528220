"""Write the older and the newer names of a config.json's keys.

transformers 5 renamed some keys. A reader that does not find a key takes a default without a word,
and computes another model. So an exported config.json has every value under both names. Exports
call `spell_native` for families of our own decoder, and `spell_both` for any other config.json.
"""

from collections.abc import Mapping
from typing import Any

from recipe_lib.models.config_fields import (
    LAYER_KINDS,
    NEWER,
    OLDER,
    POSITIONS,
    Fields,
    complete_ropes,
)
from recipe_lib.models.families import FAMILIES

# Newer name -> older name, in all families.
_RENAMED = {"dtype": "torch_dtype"}
# `model_type` -> the same, for single families.
_RENAMED_IN = {"qwen3_moe": {"num_local_experts": "num_experts"}}
# Older names of three values of a rotary embedding: its base, the share of channels that rotate,
# and the base in layers with a window. Empty: the older class has no such key.
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
# `model_type` -> the same, for single families.
_ROPE_KEYS_IN = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct", ""),
    "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct", ""),
    "modernbert-decoder": ("global_rope_theta", "", "local_rope_theta"),
}
# Families whose older class checks the keys in `rope_scaling`, and calls the type `type`.
_WITH_TYPE = ("fuyu", "olmo", "olmo2", "phi3", "phi4_multimodal")
# Those whose class takes for a longrope the type and both lists of factors, and no other key.
_THREE_KEYS = ("phi3", "phi4_multimodal")
# Keys that end in `_config` and describe no part of the model.
_NO_PARTS = ("quantization_config", "compression_config")


def spell_native(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return a config.json with both names of what transformers 5 renamed.

    family: of our own decoder, a key of FAMILIES.
    """
    fields = Fields(FAMILIES[family].defaults | dict(config), family)
    return spell_both(dict(config) | {NEWER: complete_ropes(fields, family)})


def spell_both(config: Mapping[str, Any], with_ropes: bool = True) -> dict[str, Any]:
    """Return a config.json, and its parts, with both names of what transformers 5 renamed.

    with_ropes: True: write the older keys of rotary embeddings too, from `rope_parameters`.
    """
    spelled = dict(config) | {
        key: spell_both(value, with_ropes)
        for key, value in config.items()
        if isinstance(value, Mapping) and key.endswith("_config") and key not in _NO_PARTS
    }
    family = str(config.get("model_type"))
    for newer, older in (_RENAMED | _RENAMED_IN.get(family, {})).items():
        values = [config[key] for key in (newer, older) if config.get(key) is not None]
        if values:
            spelled |= dict.fromkeys((newer, older), values[0])
    ropes = config.get(NEWER)
    if with_ropes and isinstance(ropes, Mapping) and ropes:
        spelled |= _spell_older_ropes(ropes, family)
    return spelled


def _spell_older_ropes(ropes: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the rotary embeddings of `rope_parameters` under the keys of older files."""
    full = ropes
    sliding: Mapping[str, Any] = {}
    if not ropes.keys().isdisjoint(LAYER_KINDS):
        full, sliding = (ropes.get(kind) or {} for kind in LAYER_KINDS)
    base_key, fraction_key, local_key = _ROPE_KEYS_IN.get(family, _ROPE_KEYS)
    # Older key -> value; None: there is none to write.
    values = {
        base_key: full.get("rope_theta"),
        fraction_key: full.get("partial_rotary_factor"),
        local_key: sliding.get("rope_theta"),
    }
    scaling = {
        key: value
        for key, value in full.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    if scaling.get("rope_type") == "longrope":
        # Older readers look for it outside of `rope_scaling`, but for PhiMoE's.
        values[POSITIONS] = scaling.get(POSITIONS)
    older = {key: value for key, value in values.items() if key and value is not None}
    if scaling == {"rope_type": "default"}:
        return older | {OLDER: None}
    if family in _WITH_TYPE and "rope_type" in scaling:
        scaling["type"] = scaling.pop("rope_type")
    if family in _THREE_KEYS and POSITIONS in older:
        del scaling[POSITIONS]
    return older | {OLDER: scaling}

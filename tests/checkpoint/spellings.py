"""Spell config.json with the keys of transformers 4 alone, or with those of transformers 5.

Tests read both spellings, made by `build_older_config` and `remove_keys`, as the same model.
"""

from collections.abc import Mapping
from typing import Any

from tests.models.reference import CASES, SMALL

# Keys of transformers 5, and of transformers 4, that the other release spells otherwise. They stand
# in the parts of a config (`text_config`) too.
NEWER = {"dtype", "rope_parameters", "num_local_experts"}
OLDER = {
    "torch_dtype", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_emb_base",
    "rotary_pct", "global_rope_theta", "local_rope_theta", "num_experts",
}  # fmt: skip
_ONE_NAME = (
    "mixtral",
    "gpt_oss",
    "olmoe",
    "granitemoehybrid",
)  # families whose number of experts has kept its key
# Case whose reference has the newer keys -> its keys as transformers 4.57.6 writes them.
_BY_HAND: dict[str, dict[str, Any]] = {
    "gemma3": {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None},
    "mixtral": {"rope_theta": 1000000.0},
    "mixtral-all": {"rope_theta": 1000000.0},
    "gemma3-linear": {
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt-oss": {
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False},
    },
    "phi3.5-long": {"rope_scaling": {**CASES["phi3.5-long"][1]["rope_scaling"], "type": "longrope"}},
    "phi3.5-short": {"rope_scaling": {**CASES["phi3.5-short"][1]["rope_scaling"], "type": "longrope"}},
}  # fmt: skip
for _case in ("phi3.5-long", "phi3.5-short"):
    # Phi 3's class of transformers 4 takes three keys, no other.
    del _BY_HAND[_case]["rope_scaling"]["rope_type"]


def build_older_config(case: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's config.json as transformers 4 writes it.

    case: of tests/models/reference.py. written: its config.json as transformers 5 has written it.
    """
    options = CASES[case][1]
    shared = {
        key: value for key, value in written.items() if key not in NEWER or is_shared(written, key)
    }
    older = {"rope_theta": 10000.0} | SMALL | options | _BY_HAND.get(case, {})
    older.pop("rope_parameters", None)
    return shared | older | {"torch_dtype": "float32"}


def remove_keys(config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a config.json without the keys `names` of one release, in its parts too."""
    remaining = {}
    for key, value in config.items():
        if key not in names or is_shared(config, key):
            remaining[key] = remove_keys(value, names) if key.endswith("_config") else value
    return remaining


def is_shared(config: Mapping[str, Any], key: str) -> bool:
    """Return True if both releases have this key in the config's family."""
    return "experts" in key and config.get("model_type") in _ONE_NAME

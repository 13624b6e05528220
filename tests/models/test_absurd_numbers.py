"""Every number of a config.json at its extremes is a line, or a model whose numbers a GGUF file
holds.
"""

import itertools
import struct
from functools import cache
from typing import Any

import pytest

from recipe_lib.checkpoint.gguf.gguf_adapter import ARCHITECTURES, describe_architecture
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_spec, list_presets, read_preset_config

EXTREMES = (
    1e300,
    1e-300,
    1e39,
    10**18,
    2**33,
    10**400,
    1,
    0.5,
    -1,
    0,
    float("inf"),
    float("nan"),
    True,
)
ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0, "mscale": 1.0,
     "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    {"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 4096},
)  # fmt: skip


@cache
def presets() -> dict[str, dict[str, Any]]:
    """One preset of each family that is written as GGUF."""
    configs = {
        str(config["model_type"]).removesuffix("_text"): config
        for config in map(read_preset_config, list_presets())
    }
    return {family: config for family, config in configs.items() if family in ARCHITECTURES}


def changed_numbers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config with each of its numbers at each of the extremes, those of its rope object too."""
    found = []
    for key, extreme in itertools.product(config, EXTREMES):
        if isinstance(config[key], (int, float)) and not isinstance(config[key], bool):
            found.append(config | {key: extreme})
        elif isinstance(config[key], dict):
            found += (
                [config | {key: inner} for inner in changed_numbers(config[key])]
                if extreme is True
                else []
            )
    return found


@pytest.mark.parametrize(
    "rope", ROPES, ids=lambda rope: str(rope and (rope.get("type") or rope["rope_type"]))
)
@pytest.mark.parametrize("family", presets())
def test_numbers_are_refused_or_written(family: str, rope: dict[str, Any] | None):
    config = presets()[family] | ({} if rope is None else {"rope_scaling": rope})
    if rope and rope.get("type") == "longrope":
        pairs = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        config["rope_scaling"] = rope | {
            name: [1.0] * (pairs // 2) for name in ("short_factor", "long_factor")
        }
    refused = 0
    for one in changed_numbers(config):
        try:
            held = describe_architecture(build_spec(one, "here"), "here")
        except CheckpointError as error:
            assert all("\n" not in fault and len(fault) < 600 for fault in error.faults)
            refused += 1
        else:
            for value in [*held.metadata.values(), *itertools.chain(*held.rope_tables.values())]:
                (
                    struct.pack("<f" if isinstance(value, float) else "<I", value)
                    if not isinstance(value, str)
                    else None
                )
    assert refused > 10


def test_an_absurd_factor_names_its_range():
    config = read_preset_config("llama3/8B") | {"rope_scaling": {"type": "yarn", "factor": 1e300}}
    line = (
        "here: config.json: rope_scaling.factor: found 1e+300, expected a number from 1e-09 to"
        " 1e+09"
    )
    with pytest.raises(CheckpointError, match=line.replace("+", r"\+")):
        build_spec(config, "here")

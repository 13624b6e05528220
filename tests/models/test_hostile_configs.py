"""Whatever stands in a config.json, it is a spec of bounded sizes or one line a fault."""

import json
import random
import sys
from pathlib import Path

import pytest

from recipe_lib.errors import CheckpointError, UserError
from recipe_lib.models import build_spec, list_presets, read_config, read_preset_config
from recipe_lib.models.config_fields import MAX_SIZES, check_sizes
from tests.hostile import change_json

SEEDS = 1500
ROPES = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"type": "linear", "factor": 2.0},
    {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
)


def test_changed_presets_are_specs_or_lines(tmp_path: Path):
    presets, refused = [read_preset_config(name) for name in list_presets()], 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        config = dict(draw.choice(presets)) | (
            {"rope_scaling": draw.choice(ROPES)} if draw.random() < 0.3 else {}
        )
        for _ in range(draw.choice((1, 1, 2, 3))):
            config = change_json(config, draw)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            spec = build_spec(read_config(tmp_path), "here")
        except UserError as error:
            refused += 1
            assert all("\n" not in fault and len(fault) < 6000 for fault in error.faults), seed
        else:
            assert (
                spec.num_layers <= MAX_SIZES["num_hidden_layers"]
                and spec.width <= MAX_SIZES["hidden_size"]
            )
    assert SEEDS / 4 < refused < SEEDS


def test_sizes_at_the_bound_and_over_it():
    for key, most in MAX_SIZES.items():
        check_sizes({key: most}, "here")
        with pytest.raises(
            CheckpointError,
            match=rf"^here: config.json: {key}: found {most + 1}, expected at most {most}$",
        ):
            check_sizes({key: most + 1}, "here")
        with pytest.raises(
            CheckpointError, match=rf"config.json: text_config.{key}: found inf, expected at most"
        ):
            check_sizes({"text_config": {key: float("inf")}}, "here")
    check_sizes(
        {"hidden_size": "a", "vocab_size": None, "text_config": 5}, "here"
    )  # for others to say


def test_an_integer_that_is_no_float():
    config = read_preset_config("demo/0.5M") | {"rms_norm_eps": int(sys.float_info.max) * 10}
    with pytest.raises(
        CheckpointError, match="rms_norm_eps: found .*, expected a number from 1e-30 to 1e\\+30"
    ):
        build_spec(config, "here")

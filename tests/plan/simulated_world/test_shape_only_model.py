"""What a plan takes in place of a checkpoint: the shape alone, from whatever says it."""

import copy
import json
import os
from pathlib import Path

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.paths import list_configs, list_presets
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.models import build_spec, read_preset_config
from recipe_lib.plan.simulated_world.shape_only_model import (
    count_layers,
    find_layer_pattern,
    find_shape,
    find_sibling,
    limit_layers,
    list_shipped_shapes,
    make_plannable,
)
from tests.plan.configs import SMALL, load
from tests.selection import mark_slow_except

SHIPPED = sorted(
    {name for names in list_configs().values() for name in names if not name.startswith("demo/")}
)
# Gemma 4's class takes seconds to build.
QUICK = [name for name in SHIPPED if not name.startswith("gemma4/")]


@pytest.mark.parametrize("name", mark_slow_except(SHIPPED, QUICK))
def test_a_hub_id_has_the_shape_of_the_preset_beside_its_config(name: str):
    shaped, assumed = make_plannable(load(name))
    preset = name.rpartition("_")[0]
    assert (shaped.model.path, shaped.model.preset) == (None, preset)
    assert f"its shape is that of the preset {preset}" in assumed[0]


def test_every_preset_has_a_config():
    shipped = {name.rpartition("_")[0] for names in list_configs().values() for name in names}
    assert {preset for preset in list_presets() if not preset.startswith("demo/")} <= shipped


def test_a_run_that_was_planned_before_it_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """demo/lora goes on from what demo/full trains, which is not there yet."""
    monkeypatch.chdir(tmp_path)
    shaped, _ = make_plannable(load("demo/lora"))
    assert shaped.model.preset == "demo/0.5M"


def test_config_json_alone_is_enough(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps(read_preset_config("qwen3/0.6B")), encoding="utf-8"
    )
    shaped, assumed = make_plannable(load(SMALL, "~model.preset", f"model.path={tmp_path}"))
    assert build_spec(read_preset_config(shaped.model.preset), "") == build_spec(
        read_preset_config("qwen3/0.6B"), ""
    )
    assert assumed == []


def test_the_hub_cache_goes_before_the_shipped_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only config.json needs to be there; what it says counts, even where a preset has that id."""
    from huggingface_hub import constants

    cached = tmp_path / "models--Qwen--Qwen3-0.6B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    config = read_preset_config("qwen3/0.6B") | {"num_hidden_layers": 3}
    (cached / "snapshots" / ("0" * 40) / "config.json").write_text(
        json.dumps(config), encoding="utf-8"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    shaped, assumed = make_plannable(load_config("qwen3/0.6B_full"))
    assert count_layers(shaped) == 3
    assert assumed == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "meta-llama/Meta-Lama-3-8B",
            "model.path=meta-llama/Meta-Llama-3-8B if it has the same shape",
        ),
        ("somebody/something", "tune download somebody/something --include config.json`"),
        ("no/such/folder", "found no folder"),
    ],
)
def test_an_unknown_model_is_one_line(path: str, said: str):
    with pytest.raises(ConfigError, match=r"^model\.path=") as raised:
        make_plannable(load("llama3/8B_full", f"model.path={path}"))
    assert said in str(raised.value)
    assert len(raised.value.faults) == 1


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_1/8B"),
        ("/tmp/Meta-Llama-3-8B-Instruct", "llama3/8B"),  # as torchtune's configs have it
        ("/tmp/Qwen2_5-7B-Instruct", "qwen2_5/7B"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3/4B"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2_5/7B"),
        ("unsloth/gemma-3-27b-it", "gemma3/27B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral/7B_v0.3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2_5/7B"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_6/35B"),
        ("Qwen/Qwen3-Coder-Next", "qwen3_next/80B"),
    ],
)
def test_siblings_have_the_shape_of_a_shipped_config(path: str, preset: str) -> None:
    shape, assumption = find_shape(path)
    assert shape == preset
    assert assumption.startswith(f"{path} is not on this machine: its shape is taken for that of ")


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-VL-7B", "meta-llama/Llama-3.1-9B", "/data/model"])
def test_other_models_have_no_sibling(path: str) -> None:
    assert find_sibling(path, list_shipped_shapes()) == ""


def test_a_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        make_plannable(load(SMALL, "~model.preset", f"model.path={tmp_path}"))


def test_nothing_of_an_earlier_run_is_in_the_way(tmp_path: Path):
    cfg = load(
        "demo/lora", f"output_dir={tmp_path}", "log.trackers=[wandb]", f"lora.adapter_path={tmp_path / 'absent'}",
    )  # fmt: skip
    before = copy.deepcopy(cfg)
    shaped, assumed = make_plannable(cfg)
    assert cfg == before
    assert not os.path.exists(shaped.output_dir)
    assert (shaped.resume, shaped.log.trackers, shaped.lora.adapter_path) == (None, [], None)
    assert any("lora.adapter_path" in line for line in assumed)
    cfg.lora.adapter_path = str(tmp_path)
    assert make_plannable(cfg)[0].lora.adapter_path == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "period"), [("gemma2/2B_full", 2), ("gemma3/1B_full", 6), ("llama3/8B_full", 1)]
)
def test_the_period_of_layers_is_that_of_their_windows(name: str, period: int):
    shaped, _ = make_plannable(load_config(name))
    assert find_layer_pattern(shaped) == (0, period)
    windows = build_spec(read_preset_config(shaped.model.preset), "").windows
    assert windows[period:] == windows[:-period]
    assert all(windows[shift:] != windows[:-shift] for shift in range(1, period))


@pytest.mark.parametrize("name", ["gemma3/1B_full", "qwen3/0.6B_full", "phi3/mini_full"])
def test_a_model_with_fewer_layers_is_the_beginning_of_it(name: str):
    shaped, _ = make_plannable(load_config(name))
    whole = build_spec(read_preset_config(shaped.model.preset), "")
    for layers in (1, whole.num_layers - 1, whole.num_layers):
        cut = build_spec(read_preset_config(limit_layers(shaped, layers).model.preset), "")
        assert cut.windows == whole.windows[:layers]
        assert {key for key in vars(cut) if vars(cut)[key] != vars(whole)[key]} <= {
            "num_layers",
            "windows",
        }
        assert cut.num_layers == layers
    assert count_layers(shaped) == whole.num_layers


def test_layers_that_it_does_not_have():
    shaped, _ = make_plannable(load(SMALL))
    for layers in (0, count_layers(shaped) + 1):
        with pytest.raises(ValueError, match=f"found {layers} layers"):
            limit_layers(shaped, layers)


def test_layers_listed_one_by_one_are_cut_too(tmp_path: Path):
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = read_preset_config("gemma3/1B") | {"num_hidden_layers": 4, "layer_types": types}
    (tmp_path / "shape.json").write_text(json.dumps(config), encoding="utf-8")
    shaped, _ = make_plannable(load(SMALL, f"model.preset={tmp_path / 'shape.json'}"))
    windows = build_spec(read_preset_config(limit_layers(shaped, 3).model.preset), "").windows
    assert [window is not None for window in windows] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "changed", "pattern"),
    [
        ("qwen3_moe/30B", {}, (0, 1)),
        ("qwen3_moe/30B", {"decoder_sparse_step": 3}, (0, 3)),
        ("qwen3_moe/30B", {"mlp_only_layers": [0]}, (1, 1)),
        ("qwen3_moe/30B", {"mlp_only_layers": [0, 2], "decoder_sparse_step": 2}, (0, 2)),
        ("qwen3_moe/30B", {"mlp_only_layers": [1, 3], "decoder_sparse_step": 2}, (4, 2)),
        ("gpt_oss/20B", {}, (0, 2)),
    ],
)
def test_layers_with_experts_differ_from_others(
    name: str, changed: dict[str, object], pattern: tuple[int, int], tmp_path: Path
):
    """An MLP among mixtures is another layer; those at the front are never repeated."""
    (tmp_path / "shape.json").write_text(json.dumps(read_preset_config(name) | changed))
    shaped, _ = make_plannable(load(SMALL, f"model.preset={tmp_path / 'shape.json'}"))
    assert find_layer_pattern(shaped) == pattern
    assert find_layer_pattern(limit_layers(shaped, 12)) == pattern

"""Every shipped architecture has the published number of parameters, and every shipped config its
preset.
"""

from pathlib import Path

import pytest
import torch
import yaml

from recipe_lib.config import load_config
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.models import build_meta, list_presets, read_preset_config, read_spec
from tests.selection import mark_slow_except

CONFIGS = Path(__file__).parents[2] / "configs"

# Parameters as published with the checkpoints (tied weights once; Gemma 3 from 4B on: the text
# part).
PUBLISHED = {
    "llama2/7B": 6_738_415_616,
    "llama3/8B": 8_030_261_248,
    "llama3/70B": 70_553_706_496,
    "llama3_1/8B": 8_030_261_248,
    "llama3_1/70B": 70_553_706_496,
    "llama3_2/1B": 1_235_814_400,
    "llama3_2/3B": 3_212_749_824,
    "llama3_3/70B": 70_553_706_496,
    "smollm2/135M": 134_515_008,
    "smollm2/360M": 361_821_120,
    "smollm2/1.7B": 1_711_376_384,
    "mistral/7B_v0.3": 7_248_023_552,
    "mistral/nemo_12B": 12_247_782_400,
    "mistral/small_24B": 23_572_403_200,
    "qwen2_5/0.5B": 494_032_768,
    "qwen2_5/1.5B": 1_543_714_304,
    "qwen2_5/3B": 3_085_938_688,
    "qwen2_5/7B": 7_615_616_512,
    "qwen2_5/14B": 14_770_033_664,
    "qwen2_5/32B": 32_763_876_352,
    "qwen2_5/72B": 72_706_203_648,
    "qwen3/0.6B": 596_049_920,
    "qwen3/1.7B": 1_720_574_976,
    "qwen3/4B": 4_022_468_096,
    "qwen3/8B": 8_190_735_360,
    "qwen3/14B": 14_768_307_200,
    "qwen3/32B": 32_762_123_264,
    "gemma2/2B": 2_614_341_888,
    "gemma2/9B": 9_241_705_984,
    "gemma2/27B": 27_227_128_320,
    "gemma3/1B": 999_885_952,
    "gemma3/4B": 3_880_263_168,
    "gemma3/12B": 11_766_034_176,
    "gemma3/27B": 27_009_346_304,
    "phi3/mini": 3_821_079_552,
    "phi4/14B": 14_659_507_200,
    "qwen3_moe/30B": 30_532_122_624,
    "gpt_oss/20B": 20_914_757_184,
    "gpt_oss/120B": 116_829_156_672,
    "mixtral/8x7B": 46_702_792_704,
    "olmoe/7B": 6_919_161_856,
    "smollm3/3B": 3_075_098_624,
    "phi4/mini_4B": 3_836_021_760,
    "olmo3/7B": 7_298_011_136,
    "lfm2/8B": 8_339_929_856,
    "glm4/flash_30B": 29_943_393_920 - 46 * 64,  # without its MTP layer, and routers' buffers
}
# Text parts whose count is published nowhere: it is near the size in the name (billions).
SIZED = {
    "gemma4/12B": 12,
    "gemma4/E4B": 7.5,  # 4.5 and the embeddings of each layer
    "granite4/micro_3B": 3.4,
    "granite4/small_32B": 32,
    "ministral3/8B": 8.5,
    "ministral3/14B": 13.5,
    "qwen3_5/4B": 4.2,
    "qwen3_5/9B": 9,
    "qwen3_6/27B": 27,
    "qwen3_6/35B": 35,
    "gemma4/26B": 25.2,
    "nemotron3/nano_30B": 31.6,
    "qwen3_next/80B": 79.7,  # without its MTP layer
}
# What takes more than 8 cards of 24 GB or, of earlier families, 16 of 80 GB to be trained whole,
# and has no config for that.
WITHOUT_FULL = {
    "gpt_oss/120B",
    "llama3_1/70B",
    "llama3_3/70B",
    "qwen2_5/72B",
    "qwen3_6/27B",
    "qwen3_6/35B",
    "qwen3_next/80B",
    "gemma4/26B",
    "nemotron3/nano_30B",
    "granite4/small_32B",
    "glm4/flash_30B",
}
SHIPPED = sorted(name for name in list_presets() if not name.startswith("demo/"))


def find_method(name: str) -> str:
    """Return the first method that a model has a config for: the largest have none for all."""
    methods = ("full", "qlora", "lora")
    return next(method for method in methods if (CONFIGS / f"{name}_{method}.yaml").exists())


def get_implementation(name: str) -> str:
    file = CONFIGS / f"{name}_{find_method(name)}.yaml"
    return str(yaml.safe_load(file.read_text())["model"].get("implementation", "native"))


# One of transformers' classes is enough for each run: building them takes seconds each.
COUNTED = [
    name for name in SHIPPED if name == "ministral3/8B" or get_implementation(name) == "native"
]


def test_all_presets_are_known() -> None:
    assert set(SHIPPED) == PUBLISHED.keys() | SIZED.keys()


@pytest.mark.parametrize("name", mark_slow_except(SHIPPED, COUNTED))
def test_parameters_of_a_preset(name: str) -> None:
    model = build_meta(
        read_spec(read_preset_config(name), name, get_implementation(name)), torch.bfloat16
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if name in PUBLISHED:
        assert count == PUBLISHED[name]
    else:
        assert count == pytest.approx(SIZED[name] * 1e9, rel=0.02)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_config_of_a_preset(name: str) -> None:
    method = find_method(name)
    recipe = "full_finetune_distributed" if method == "full" else "lora_finetune_distributed"
    cfg = load_config(f"{name}_{method}", (), read_recipe_configs()[recipe])
    text = (CONFIGS / f"{name}_{method}.yaml").read_text()
    assert f"#   tune download {cfg.model.path}\n" in text
    assert f"{recipe} --config {name}_{method}\n" in text
    assert 15 <= len(text.splitlines()) <= 30
    assert cfg.model.preset is None
    # Those of 2026 are chat models.
    assert cfg.data.source in ("hub:tatsu-lab/alpaca", "hub:HuggingFaceH4/no_robots")
    assert cfg.output_dir == "outputs/" + name.replace("/", "-") + (
        "" if method == "full" else f"-{method}"
    )


def test_every_config_outside_the_demo_has_a_preset() -> None:
    names = {str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.glob("*/*.yaml")}
    full = {name for name in names if name.endswith("_full") and not name.startswith("demo/")}
    assert {name.removesuffix("_full") for name in full} == set(SHIPPED) - WITHOUT_FULL
    assert {f"{name}_qlora" for name in SHIPPED} <= names

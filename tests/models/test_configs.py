"""Every shipped architecture has the published number of parameters, and every shipped config its
preset.
"""

from pathlib import Path

import pytest
import torch

from recipe_lib.config import load_config
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.models import build_meta, build_spec, list_presets, read_preset_config

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
}
# What takes 16 cards of 80 GB or more to be trained whole, and has no config for that.
WITHOUT_FULL = {"gpt_oss/120B", "llama3_1/70B", "llama3_3/70B", "qwen2_5/72B"}
SHIPPED = sorted(name for name in list_presets() if not name.startswith("demo/"))


def test_all_presets_are_known() -> None:
    assert set(SHIPPED) == set(PUBLISHED)


@pytest.mark.parametrize("name", SHIPPED)
def test_parameters_of_a_preset(name: str) -> None:
    model = build_meta(build_spec(read_preset_config(name), name), torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_config_of_a_preset(name: str) -> None:
    method = (
        "full" if (CONFIGS / f"{name}_full.yaml").exists() else "qlora"
    )  # the largest have no full fine-tuning
    recipe = "full_finetune_distributed" if method == "full" else "lora_finetune_distributed"
    cfg = load_config(f"{name}_{method}", (), read_recipe_configs()[recipe])
    text = (CONFIGS / f"{name}_{method}.yaml").read_text()
    assert f"#   tune download {cfg.model.path}\n" in text
    assert f"{recipe} --config {name}_{method}\n" in text
    assert 15 <= len(text.splitlines()) <= 30
    assert cfg.model.preset is None and cfg.data.source == "hub:tatsu-lab/alpaca"
    assert cfg.output_dir == "outputs/" + name.replace("/", "-") + (
        "" if method == "full" else "-qlora"
    )


def test_every_config_outside_the_demo_has_a_preset() -> None:
    names = {str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.glob("*/*.yaml")}
    full = {name for name in names if name.endswith("_full") and not name.startswith("demo/")}
    assert {name.removesuffix("_full") for name in full} == set(SHIPPED) - WITHOUT_FULL
    assert {f"{name}_qlora" for name in SHIPPED} <= names

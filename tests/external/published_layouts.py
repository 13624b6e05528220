"""Write tiny folders of models as they are published: with vision towers and heads that text does
not run through, under the names that their files have.

write_published(tmp_path / "mistral3", "mistral3")
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from recipe_lib.external.inspection import list_auto_classes, restore_numbers
from recipe_lib.external.tensor_plan.small_models import randomize, shrink

ROOT = Path(__file__).parent.parent.parent
# Kind -> tensors beside those that its class has, as its published files have them: (name, shape).
EXTRAS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "qwen3_5": [("mtp.fc.weight", (8, 8)), ("mtp.layers.0.input_layernorm.weight", (8,))],
    "qwen3_5_moe": [("mtp.fc.weight", (8, 8))],
    "qwen3_next": [("mtp.fc.weight", (8, 8))],
    "glm4_moe": [("model.layers.46.eh_proj.weight", (8, 8))],
    "glm4_moe_lite": [("model.layers.47.eh_proj.weight", (8, 8))],
    "glm_moe_dsa": [("model.layers.78.eh_proj.weight", (8, 8))],
    "deepseek_v3": [("model.layers.61.eh_proj.weight", (8, 8))],
    "nemotron_h": [("mtp.layers.0.norm.weight", (8,))],
    "ernie4_5_moe": [("model.mtp_block.0.norm.weight", (8,))],
    "llava": [("vision_tower.vision_model.embeddings.position_ids", (1, 9))],
}
MULTIMODAL = (
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "muse_glimmer",
    "internvl",
    "smolvlm",
    "kimi_k25",
    "llama4",
    "qwen2_5_omni",
    "nemotron_h_omni",
    "step3p7",
    "qwen2_audio",
)
KINDS = (*EXTRAS, *MULTIMODAL)


# Kind -> keys of a text model, without which its class has no experts or no layers.
KEYS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": None,
        "hidden_size_per_layer_input": 0,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
}


def make_config(kind: str, sizes: Mapping[str, int] = MappingProxyType({})) -> Any:
    """Make the config of a tiny model of the class that is published, as config.json has it.

    sizes: of the text model, in place of the tiny ones.
    """
    small = shrink(CONFIG_MAPPING[kind](**KEYS.get(kind, {})))
    settings = restore_numbers(json.loads(small.to_json_string(use_diff=False)))
    del settings["model_type"]
    config = CONFIG_MAPPING[kind](**settings)
    text = config.get_text_config()
    for key, size in (dict(sizes) | {"vocab_size": 512}).items():
        setattr(text, key, size)
    for part in (text, config):
        part.tie_word_embeddings = False
        part.bos_token_id = 0
        part.eos_token_id = 1
        part.pad_token_id = 2
    if kind == "step3p7":
        text.sliding_window = 16
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and kind.startswith("qwen2"):
        rope["mrope_section"] = [2, 1, 1]  # pairs of a head's 8 channels
    return config


def write_published(
    folder: Path,
    kind: str,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Write a folder with random weights, the demo's tokenizer and a processor's file.

    Returns the model. dtype: of the tensors that the class does not have. sizes: see `make_config`.
    """
    torch.manual_seed(0)
    config = make_config(kind, sizes)
    model = list_auto_classes(config)[0].from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, shape in EXTRAS.get(kind, ()):
        tensors[name] = torch.randn(shape).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    for path in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
        shutil.copy(path, folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}\n')
    if kind == "qwen2_5_omni":
        torch.save({}, folder / "spk_dict.pt")  # voices, without which its class does not open
    return model.eval()


def open_published(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Open a folder by its published class; return (the model, transformers' report on names)."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class = list_auto_classes(config)[0]
    if config.model_type == "qwen2_5_omni":
        # Its class takes the model for a pair with the report.
        model = auto_class.from_pretrained(folder, dtype=torch.float32)
        names = ("missing_keys", "mismatched_keys", "unexpected_keys")
        return model.eval(), dict.fromkeys(names, ())
    model, report = auto_class.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), report


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors

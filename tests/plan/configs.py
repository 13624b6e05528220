"""Load the configs that tests plan, checked against the schema of the recipe that they name."""

import json
from pathlib import Path
from typing import Any

from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config

SMALL = "demo/full"  # a config of a tiny model
# config.json of four layers as wide as Llama 3 8B's: gathering them takes long over PCIe.
WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.02,
}


def load(name: str, *overrides: str) -> Any:
    """Load a shipped config by its name, with overrides."""
    return load_config(name, overrides, find_config_recipe(name).load_schema())


def build_wide_model(folder: Path, *more: str) -> tuple[str, ...]:
    """Write config.json of the wide model into the folder; return the overrides that select it.

    more: further overrides.
    """
    (folder / "wide.json").write_text(json.dumps(WIDE))
    model = (f"model.preset={folder / 'wide.json'}", "~model.path", "tokenizer.path=unread")
    return (*model, "max_seq_len=512", "~validation.source", *more)

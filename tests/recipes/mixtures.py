"""Write config.json of a tiny mixture of experts of each family, for whole runs.

All sizes can be divided between two ranks.
"""

import json
from pathlib import Path
from typing import Any

# Keys that all families share, unless they say otherwise.
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# model_type -> its keys.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "num_hidden_layers": 4,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "clip_qkv": 2.0,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "tie_word_embeddings": False,
    },
}


def write_mixture(family: str, folder: Path) -> Path:
    """Write the config.json of one of MIXTURES as FAMILY.json into the folder; return its path."""
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family} | _SHAPE | MIXTURES[family]))
    return path

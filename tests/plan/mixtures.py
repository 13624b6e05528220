"""Write config.json of a tiny mixture of experts of each family, for plans."""

import json
from pathlib import Path
from typing import Any

from tests.recipes.runs import ROOT

EXPERTS = 6
CHOICES = 2  # experts that compute a token
# model_type -> its keys, beside those of tests/recipes/tiny.json.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "head_dim": 8,
        "mlp_only_layers": [],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
        "intermediate_size": 32,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": EXPERTS,
        "head_dim": 8,
        "sliding_window": 16,
        "intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def write_mixture(folder: Path, name: str, **changed: Any) -> Path:
    """Write config.json of a tiny mixture of two layers of width 32; return its path.

    name: of MIXTURES. changed: further keys of config.json, which are in the file's name too.
    """
    shape = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    for key in ("attention_bias", "mlp_bias", "rope_theta"):
        shape.pop(key)
    config = shape | {"model_type": name, "num_experts_per_tok": CHOICES} | MIXTURES[name] | changed
    file = folder / f"{name}{'-' * bool(changed)}{'-'.join(changed)}.json"
    file.write_text(json.dumps(config))
    return file

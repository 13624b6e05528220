"""Define tiny models of the architectures that transformers saves in unusual ways.

KINDS says for each what is unusual; `build_settings(kind)` are the arguments of its config class.
"""

from typing import Any

import transformers

# Settings of every kind, unless it says otherwise.
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# model_type -> settings beside COMMON; None removes one that its config does not take.
KINDS: dict[str, dict[str, Any]] = {
    # Buffers of no dimension.
    "apertus": {},
    # A router derived from nn.Linear whose forward returns two tensors; experts of 3 dimensions.
    "llama4_text": EXPERTS
    | {"intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]},
    # An infinite number in config.json; state-space layers, the first one with experts under other
    # names in files.
    "granitemoehybrid": EXPERTS
    | _MAMBA
    | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention"],
        "num_hidden_layers": None,
    },
    # Files with one tensor per expert.
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # The experts' matrices are parameters of modules of their own.
    "jetmoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "kv_channels": 8,
        "num_attention_heads": None,
        "head_dim": None,
    },
    # A vision part beside the decoder.
    "gemma3": {
        "text_config": COMMON | {"layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
    },
}


def build_settings(kind: str) -> dict[str, Any]:
    """Return the arguments of the config class of a kind."""
    kind_settings = KINDS[kind]
    if "text_config" in kind_settings:
        return kind_settings
    return {key: value for key, value in (COMMON | kind_settings).items() if value is not None}


def import_models(*kinds: str) -> None:
    """Import transformers' classes of these architectures, so that ranks (forks) need not."""
    # Looking a class up in the mapping imports its module.
    for kind in kinds:
        assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[
            type(transformers.AutoConfig.for_model(kind))
        ]

"""The largest sizes that a `config.json` may name: far above any model there is, far below what hangs a machine.

A width of 10^18 overflows torch's storage, 10^9 layers fill the host's memory before anything is computed; both are
typing errors or a hostile file. The bounds hold for native models and for those of transformers alike.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from recipe_lib.errors import CheckpointError

WIDTH, POSITIONS = 2**20, 2**40
LAYERS = 4096
_WIDTHS = (
    "hidden_size", "n_embd", "d_model", "dim", "hidden_dim", "head_dim", "kv_lora_rank", "q_lora_rank",
    "embedding_size", "word_embed_proj_dim",
)  # fmt: skip
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "moe_intermediate_size", "shared_expert_intermediate_size")
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window", "max_window_layers")

# Key of config.json -> the most it may say.
MAX_SIZES: dict[str, int] = {
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_INNER, 2**24),
    **dict.fromkeys(_HEADS, 2**16),
    **dict.fromkeys(_EXPERTS, 2**16),
    **dict.fromkeys(_POSITIONS, POSITIONS),
    **dict.fromkeys(("n_positions", "n_ctx"), 2**27),  # a learned embedding has a row for each
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("vocab_size", "type_vocab_size"), 2**27),
}
_NESTED = ("text_config", "vision_config", "audio_config")


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """CheckpointError, one line a key, for sizes that no machine can hold; also those of a multimodal file's parts.

    where: the file or preset, named in errors. What a size must be besides is for the reader of the family to say.
    """
    faults = list(_faults(config, where, ""))
    if faults:
        raise CheckpointError(*faults)


def _faults(config: Mapping[str, Any], where: str, prefix: str) -> Iterator[str]:
    for key, most in MAX_SIZES.items():
        value = config.get(key)
        if isinstance(value, (int, float)) and value > most:
            yield f"{where}: config.json: {prefix}{key}: found {str(value)[:40]}, expected at most {most}"
    for part in _NESTED:
        inner = config.get(part)
        if isinstance(inner, Mapping) and not prefix:
            yield from _faults(inner, where, f"{part}.")

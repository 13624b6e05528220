"""Make small copies of large models of transformers, to prove things on them in seconds.

`shrink` makes the config of a copy of the same class and kinds of layers, `randomize` fills it with
values. Tensor-parallel plans (`proven_plan`, `apply_plan`) and cuts into pipeline stages
(`stage_parts`) are proven on it. Sizes are set by the names that configs use for them.
"""

import copy
from typing import Any

import torch

SMALL_MODEL = 2**20  # parameters (elements) of a model that needs no smaller copy
_WIDTH = 64  # channels of hidden states
_HEADS = 8  # heads of queries; also what a size without a name in `_SIZES` becomes
# What a size becomes -> the names that configs give it.
_SIZES = {
    64: (
        "hidden_size n_embd d_model n_embed embed_dim word_embed_proj_dim dim model_dim"
        " mamba_hidden_size embed_size attention_hidden_size recurrent_dim embedding_size"
        " hidden_dim"
    ),
    8: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads"
        " decoder_attention_heads linear_num_value_heads index_n_heads num_encoder_attention_heads"
        " num_lightning_heads swa_num_attention_heads head_dim v_head_dim qk_nope_head_dim"
        " qk_rope_head_dim attention_head_dim linear_key_head_dim linear_value_head_dim"
        " mamba_head_dim mamba_d_head index_head_dim swa_head_dim global_head_dim d_kv"
        " hidden_size_per_layer_input per_head_dim head_size rotary_dim mamba_headdim"
        " linear_head_dim linear_num_heads"
    ),
    96: (
        "intermediate_size ffn_dim n_inner ffn_hidden_size inner_dim decoder_ffn_dim"
        " encoder_ffn_dim ffn_embed_dim d_ff dense_intermediate_size intermediate_size_mlp dim_ff"
        " mlp_hidden_size mlp_dim"
    ),
    48: (
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"
        " shared_intermediate_size moe_shared_expert_intermediate_size expert_dim"
    ),
    4: (
        "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_key_heads"
        " mamba_d_conv conv_kernel num_memory_blocks linear_conv_kernel_dim"
    ),
    2: (
        "num_experts_per_tok num_experts_per_token moe_top_k moe_topk num_experts_per_topk moe_k"
        " top_k_experts expand mamba_expand"
    ),
    1: (
        "n_group topk_group num_expert_group num_nextn_predict_layers n_shared_experts"
        " mamba_n_groups mamba_ngroups num_shared_experts moe_layer_start_index"
        " first_k_dense_replace"
    ),
    16: (
        "kv_lora_rank state_size mamba_d_state d_state time_step_rank mamba_dt_rank ssm_state_size"
        " index_topk mlp_bias_rank lora_rank_decay sliding_window attention_window_size window_size"
        " local_window_size sliding_window_size attention_chunk_size lru_width_min mamba_n_heads"
        " mamba_num_heads n_mamba_heads mamba_head_count qk_head_dim"
    ),
    32: "q_lora_rank chunk_size mamba_chunk_size altup_lora_rank laurel_rank_max o_lora_rank",
    128: (
        "mamba_d_ssm max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length"
        " seq_length max_position"
    ),
    160: "vocab_size vocab_size_per_layer_input padded_vocab_size text_vocab_size",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
# Names of the number of layers.
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
    " num_decoder_layers".split()
)
# Sizes that are None in some configs, though their models cannot be built without.
_NEEDED = frozenset(
    "head_dim num_key_value_heads n_routed_experts num_experts num_experts_per_tok v_head_dim"
    " n_shared_experts moe_intermediate_size linear_num_value_heads linear_num_key_heads"
    " linear_key_head_dim linear_value_head_dim intermediate_size".split()
)


# Names of the number of heads of keys and values.
_KEYS = (
    "num_key_value_heads num_kv_heads n_kv_heads n_head_kv kv_n_heads multi_query_group_num"
    " swa_num_key_value_heads".split()
)


def shrink(config: Any, min_layers: int = 2, num_key_heads: int = 4) -> Any:
    """Return a small copy of a transformers config, with one layer of each kind.

    It has `min_layers` layers or more. num_key_heads: the number of heads of keys and values, if
    there are fewer of them than of queries; one head stays one. Configs within it are shrunk, too,
    and special token ids fit the vocabulary.
    """
    small = copy.deepcopy(config)
    settings = vars(small)
    count = _cut_layer_lists(settings, min_layers)
    for name, value in list(settings.items()):
        if hasattr(value, "to_dict") and not isinstance(value, type):
            settings[name] = shrink(value, min_layers, num_key_heads)
        elif name in _LAYERS and isinstance(value, int):
            settings[name] = count
        elif name in _KEYS and isinstance(value, int):
            settings[name] = _choose_key_heads(value, vars(config), num_key_heads)
        elif name.endswith("token_id") and isinstance(value, int):
            settings[name] = min(value, 2)
        elif name in _NEEDED and value is None:
            settings[name] = _SIZE_OF.get(name, _HEADS)
        elif (
            name in _SIZE_OF
            and isinstance(value, int)
            and not isinstance(value, bool)
            and value > 0
        ):
            # Counts, such as of experts, do not grow; nor does the vocabulary.
            settings[name] = (
                min(_SIZE_OF[name], value)
                if _SIZE_OF[name] < 8 or name == "vocab_size"
                else _SIZE_OF[name]
            )
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(settings.get(name), dict):
            fraction = settings.get("partial_rotary_factor") or 1.0
            settings[name] = _reset_rope(settings[name], fraction)
    # A state-space model: its heads share the expanded channels evenly.
    if (
        isinstance(settings.get("expand"), int)
        and isinstance(settings.get("num_heads"), int)
        and "head_dim" in settings
    ):
        settings["head_dim"] = settings["expand"] * _WIDTH // settings["num_heads"]
    # Zamba's attention reads hidden states and embeddings side by side.
    if getattr(config, "attention_hidden_size", None) == 2 * getattr(config, "hidden_size", 0):
        settings["attention_hidden_size"] = 2 * _WIDTH
        settings["attention_head_dim"] = 2 * _WIDTH // _HEADS
    if isinstance(settings.get("pad_token_id"), int):
        settings["pad_token_id"] = 0
    return small


def _choose_key_heads(value: int, original: dict[str, Any], fewer: int) -> int:
    """Return the heads of keys and values: one stays one, fewer than of queries stay fewer.

    value: in the original config. original: its attributes. fewer: the result if they are fewer.
    """
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    heads = next((original[name] for name in names if isinstance(original.get(name), int)), value)
    return 1 if value == 1 else fewer if value < heads else _HEADS


def _reset_rope(held: dict[str, Any], fraction: float) -> dict[str, Any]:
    """Return rotary settings of the default kind, without lists: these fit the old head width.

    One list stays, with other numbers: how many of a head's pairs of channels rotate by the time,
    the height and the width of an image. fraction: of a head's channels that rotate.
    """
    if any(isinstance(value, dict) for value in held.values()):  # one for each kind of layer
        return {
            key: _reset_rope(value, fraction) if isinstance(value, dict) else value
            for key, value in held.items()
        }
    kept = {key: value for key, value in held.items() if not isinstance(value, (list, tuple))}
    if "mrope_section" in held:
        fraction = held.get("partial_rotary_factor") or fraction
        pairs = int(_WIDTH // _HEADS * fraction) // 2
        kept["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return (
        {**kept, "rope_type": "default"} if kept.get("rope_type", "default") != "default" else kept
    )


def _cut_layer_lists(held: dict[str, Any], layers: int) -> int:
    """Cut lists with an entry for each layer, in place; return the number of layers to have.

    One layer of each kind stays, at least `layers`. held: the attributes of a config. Without such
    lists a period, such as a key that ends in `_every_n_layers`, says how many layers show all
    kinds, 9 at most.
    """
    num_layers = next((held[name] for name in _LAYERS if isinstance(held.get(name), int)), layers)
    lists = {
        name: value
        for name, value in held.items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    }
    periods = [
        value
        for name, value in held.items()
        if name.endswith(("period", "_every_n_layers", "_interval"))
    ]
    if not lists:
        longest = max((value for value in periods if isinstance(value, int)), default=1)
        return max(layers, min(longest + 1 if longest > 1 else layers, 9))
    # The kind of a layer is what the lists say of it.
    # The last layers of Gemma 3n and 4 share keys and values of earlier ones.
    num_own_keys = num_layers - (held.get("num_kv_shared_layers") or 0)
    shares_keys = [str(index >= num_own_keys) for index in range(num_layers)]
    kinds = list(zip(*(map(repr, value) for value in lists.values()), shares_keys, strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})  # indices of layers
    while len(kept) < min(layers, num_layers):
        kept = sorted([*kept, next(index for index in range(num_layers) if index not in kept)])
    for name, value in lists.items():
        held[name] = type(value)(value[index] for index in kept)
    if num_own_keys < num_layers:
        held["num_kv_shared_layers"] = sum(index >= num_own_keys for index in kept)
    return len(kept)


def randomize(model: torch.nn.Module) -> None:
    """Fill a model with random weights, in place.

    Biases of zero and scales of one, as classes initialize them, would hide wrong cuts of them.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise + (1 if parameter.dim() < 2 else 0))

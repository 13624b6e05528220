"""The families with a mixture of experts in place of an MLP: Mixtral, Qwen3-MoE, OLMoE, gpt-oss."""

from typing import Any

from recipe_lib.models.family_fields import COMMON, Family, Fields, activation, layer_windows
from recipe_lib.models.spec import MixtureSpec


def _mixture(fields: Fields, width: str, layers: tuple[bool, ...], **more: Any) -> dict[str, Any]:
    """The mixture of a family whose key for the width of an expert is this. more: its own fields of the mixture.

    The number of experts has either of two names: files of one family have both, by who wrote them.
    """
    key = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
    experts, top_k = fields.integer(key), fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise fields.fault("num_experts_per_tok", f"at most {key} = {experts}")
    found: dict[str, Any] = {
        "num_experts": experts,
        "top_k": top_k,
        "mlp_width": fields.integer(width),
        "layers": layers,
        "normalized": True,
        "router_bias": False,
        "expert_bias": False,
        "activation": activation(fields, "hidden_act"),
        "interleaved": False,
        "alpha": 1.0,
        "limit": float("inf"),
    }
    return {"mixture": MixtureSpec(**found | more)}


def _mixtral(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Mixtral: Mistral with experts in every layer."""
    if fields.config["router_jitter_noise"] != 0:
        raise fields.fault("router_jitter_noise", "0 (noise on the router's input is not supported)")
    layers = (True,) * common["num_layers"]
    window = (fields.optional_integer("sliding_window"),) * common["num_layers"]
    return {"windows": window} | _mixture(fields, "intermediate_size", layers)


def _qwen3_moe(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3 with experts in all layers, or in every n-th one that is not among mlp_only_layers."""
    every, dense = fields.integer("decoder_sparse_step"), fields.config["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.fault("mlp_only_layers", "a list of layers' numbers")
    layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(common["num_layers"]))
    if not any(layers):
        raise fields.fault("mlp_only_layers", "some layer with experts: without any the model is one of type qwen3")
    normalized = fields.flag("norm_topk_prob")
    mixture = _mixture(fields, "moe_intermediate_size", layers, normalized=normalized)
    window = fields.config["sliding_window"] if fields.flag("use_sliding_window") else None
    if window is not None:
        window = fields.integer("sliding_window")
    bias = fields.flag("attention_bias")
    found = {"head_norms": True, "qkv_bias": bias, "output_bias": bias, "windows": (window,) * common["num_layers"]}
    return found | mixture


def _olmoe(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """OLMoE: norms over all heads of queries and of keys together."""
    bias, layers = fields.flag("attention_bias"), (True,) * common["num_layers"]
    normalized, clip = fields.flag("norm_topk_prob"), fields.optional_number("clip_qkv")
    found = {"width_norms": True, "qkv_clip": clip, "qkv_bias": bias, "output_bias": bias}
    return found | _mixture(fields, "intermediate_size", layers, normalized=normalized)


def _gpt_oss(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss: attention sinks, a window in every second layer from the first on, experts with biases."""
    layers, bias = common["num_layers"], fields.flag("attention_bias")
    mixture = _mixture(
        fields,
        "intermediate_size",
        (True,) * layers,
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        interleaved=True,
        alpha=fields.number("swiglu_alpha"),
        limit=fields.number("swiglu_limit"),
    )
    windows = layer_windows(fields, layers, [layer % 2 == 0 for layer in range(layers)])
    return {"sinks": True, "qkv_bias": bias, "output_bias": bias, "windows": windows} | mixture


MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        _mixtral,
        ("MixtralForCausalLM",),
        COMMON
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
        },
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        ("Qwen3MoeForCausalLM",),
        COMMON
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "olmoe": Family(
        _olmoe,
        ("OlmoeForCausalLM",),
        COMMON
        | {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": Family(
        _gpt_oss,
        ("GptOssForCausalLM",),
        COMMON
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
}

"""From `config.json` to a spec, family by family.

A family is a row of `FAMILIES`; what its real files leave out is filled in from there, so that no default hides in the
code.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from recipe_lib.config.registry import owner
from recipe_lib.errors import CheckpointError
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.models.family_fields import COMMON, Family, Fields, activation, layer_windows
from recipe_lib.models.quantized_files import read_codes
from recipe_lib.models.rope_config import read_rope
from recipe_lib.models.sizes import check_sizes
from recipe_lib.models.spec import DecoderSpec, FileCodes, MixtureSpec, ModelSpec

# The families with a mixture of experts in place of an MLP: Mixtral, Qwen3-MoE, OLMoE, gpt-oss.


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


SCORED = "ForSequenceClassification"  # how transformers names a decoder with a score head
_GEMMA = COMMON | {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}


def read_spec(config: Mapping[str, Any], where: str, implementation: str) -> ModelSpec:
    """The spec of a `config.json` for one implementation of models, `native` or a name that is registered.

    where: as for `spec_from_config`. Raises what that does, or the `read_spec` of the other implementations.
    """
    if implementation == "native":
        return spec_from_config(config, where)
    spec: ExternalSpec = owner("model").read_spec(config, where, implementation)
    return spec


def read_trained_spec(config: Mapping[str, Any], where: str, implementation: str | None = None) -> ModelSpec:
    """The spec of a model that somebody has trained; implementation: as of its run, None: not known.

    Then our own decoder for its families, and transformers' class, where that is installed, for all others. Raises as
    `read_spec` does.
    """
    if implementation is None:
        kind = text_config(config).get("model_type")
        ours = any(kind in (name, *row.model_types) for name, row in FAMILIES.items())
        implementation = "native" if ours or find_spec("transformers") is None else "transformers"
    return read_spec(config, where, implementation)


def spec_from_config(config: Mapping[str, Any], where: str) -> DecoderSpec:
    """The spec of a Hugging Face `config.json`.

    where: the file or preset, named in errors. Raises CheckpointError for an architecture that is not supported,
    weights that are quantized in a form that is not read, and keys that are missing or make no sense.
    """
    outer = read_codes(config, where)
    check_sizes(config, where)
    config = text_config(config)
    inner = read_codes(config, where)
    family = _family(config, where)
    fields = Fields(FAMILIES[family].defaults | dict(config), where)
    common = _common_shape(fields, family)
    return DecoderSpec(
        **common | FAMILIES[family].shape(fields, common), codes=outer if inner == FileCodes() else inner
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's part of a multimodal Gemma 3 config, as the config of a text-only model; others unchanged.

    What is trained and exported is the text model alone, so its config names the text architecture.
    """
    if config.get("model_type") != "gemma3" or not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    outer = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        if key in config
    }
    own: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    if "tie_word_embeddings" in config:  # transformers ties by the outer key, whatever the text's own says
        own["tie_word_embeddings"] = config["tie_word_embeddings"]
    return outer | dict(config["text_config"]) | own


def _family(config: Mapping[str, Any], where: str) -> str:
    """The family of a config; raises CheckpointError for one that the decoder does not cover."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    family = next((name for name, row in FAMILIES.items() if model_type in (name, *row.model_types)), None)
    if family is None or (names and not set(FAMILIES[family].architectures).intersection(map(str, names))):
        if any(str(name).endswith(SCORED) for name in names):
            raise CheckpointError(
                f"{where}: config.json: {names[0]} has a score head, which predicts no tokens; expected a causal "
                "language model; transformers' AutoModelForSequenceClassification opens it, and reward_distributed "
                "goes on training it"
            )
        kind = f" ({', '.join(map(str, names))})" if names else ""
        remedy = ""
        if family is None and isinstance(model_type, str):
            remedy = "; to train it in transformers' own class, set model.implementation=transformers"
        raise CheckpointError(
            f"{where}: config.json: model_type {model_type!r}{kind} is not supported; expected a causal language "
            f"model of type {', '.join(sorted(FAMILIES))}{remedy}"
        )
    return family


def _common_shape(fields: Fields, family: str) -> dict[str, Any]:
    """The fields that every family reads alike."""
    config = fields.config
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if config["head_dim"] is None and width % heads:
        raise fields.fault("hidden_size", f"a multiple of num_attention_heads = {heads}")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.fault("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_width = fields.optional_integer("head_dim") or width // heads
    layers = fields.integer("num_hidden_layers")
    if config.get("use_bidirectional_attention"):
        raise fields.fault("use_bidirectional_attention", "false (a causal model)")
    if not config.get("is_causal", True):
        raise fields.fault("is_causal", "true (a causal model)")
    rope, local_rope = read_rope(fields, family, head_width)
    return {
        "family": family,
        "vocab_size": fields.integer("vocab_size"),
        "width": width,
        "mlp_width": fields.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_width": head_width,
        "max_positions": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        "rope": rope,
        "local_rope": local_rope,
        "windows": (None,) * layers,
        "attention_scale": head_width**-0.5,
        "attention_softcap": None,
        "logit_softcap": None,
        "embedding_scale": None,
        "activation": activation(fields, "hidden_act"),
        "norm_offset": False,
        "post_norms": False,
        "head_norms": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tied": fields.flag("tie_word_embeddings"),
        "fused_file": False,
        "init_std": fields.number("initializer_range"),
    }


def _llama(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


def _mistral(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Mistral 7B, Nemo, Small: a window in every layer or in none; Ministral, in the layers that layer_types says."""
    layers, has_window = common["num_layers"], fields.config["sliding_window"] is not None
    return {"windows": layer_windows(fields, layers, [has_window] * layers)}


def _qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Only the layers from max_window_layers on have a window, and only if use_sliding_window says so."""
    if not fields.flag("use_sliding_window"):
        return (None,) * layers
    first = fields.config["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.fault("max_window_layers", "an integer")
    has_window = fields.config["sliding_window"] is not None
    return layer_windows(fields, layers, [has_window and index >= first for index in range(layers)])


def _qwen2(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen 2.5: biases on queries, keys and values."""
    return {"qkv_bias": True, "windows": _qwen_windows(fields, common["num_layers"])}


def _qwen3(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3: a norm over each query and key head."""
    bias = fields.flag("attention_bias")
    windows = _qwen_windows(fields, common["num_layers"])
    return {"head_norms": True, "qkv_bias": bias, "output_bias": bias, "windows": windows}


def _gemma(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Gemma: scaled embeddings, norms around 1; files that say `gelu` mean its tanh form."""
    bias = fields.flag("attention_bias")
    return {
        "embedding_scale": common["width"] ** 0.5,
        "norm_offset": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": "gelu_tanh" if common["activation"] == "gelu" else common["activation"],
    }


def _gemma2(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Gemma 2: soft caps, norms after attention and MLP, every second layer with a window."""
    layers, pattern = common["num_layers"], fields.integer("sliding_window_pattern")
    return _gemma(fields, common) | {
        "activation": activation(fields, "hidden_activation"),
        "post_norms": True,
        "windows": layer_windows(fields, layers, [(index + 1) % pattern != 0 for index in range(layers)]),
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _gemma3(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 text: five layers with a window to one without, head norms, a second rope base for the windows."""
    if fields.config["attn_logit_softcapping"] is not None:
        raise fields.fault("attn_logit_softcapping", "null (the attention of Gemma 3 has no cap)")
    return _gemma2(fields, common) | {"head_norms": True}


def _phi3(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    """Phi 3, Phi 3.5, Phi 4: Llama with fused projections in the file."""
    return {"fused_file": True, "windows": (fields.optional_integer("sliding_window"),) * common["num_layers"]}


_QWEN_WINDOWS = {"max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28}
FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, ("LlamaForCausalLM",), COMMON | {"max_position_embeddings": 2048}),
    "mistral": Family(
        _mistral,
        ("MistralForCausalLM",),
        COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(_qwen2, ("Qwen2ForCausalLM",), COMMON | _QWEN_WINDOWS),
    "qwen3": Family(_qwen3, ("Qwen3ForCausalLM",), COMMON | _QWEN_WINDOWS | {"head_dim": 128}),
    "gemma": Family(_gemma, ("GemmaForCausalLM",), _GEMMA | {"hidden_act": "gelu"}),
    "gemma2": Family(
        _gemma2,
        ("Gemma2ForCausalLM",),
        _GEMMA
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Family(
        _gemma3,
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _GEMMA
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        model_types=("gemma3_text",),
    ),
    "phi3": Family(
        _phi3,
        ("Phi3ForCausalLM",),
        COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    ),
} | MIXTURES

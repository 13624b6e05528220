"""Read the spec of a model, its shape as plain numbers, from its `config.json`.

Runs call `read_spec`, or `build_scored_spec` for a score head; exports call `read_trained_spec`. A
family is the models that one row of `FAMILIES` covers. A row also has the values of the keys that
files of the family leave out. Adding a family is adding a row (docs/extending.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

from recipe_lib.config.registry import import_owner
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.models.config_fields import (
    COMMON,
    Family,
    Fields,
    check_sizes,
    read_activation,
    read_codes,
    read_rope,
)
from recipe_lib.models.family_readers import (
    evaluate_shape,
    make_flag_reader,
    make_mixture_reader,
    make_window_reader,
    read_mixtral_windows,
    read_qwen_windows,
    read_rotated_layers,
    read_same_windows,
    read_smollm3_windows,
    read_sparse_layers,
    refuse_cap,
)
from recipe_lib.models.spec import DecoderSpec, ExternalSpec, FileCodes, ModelSpec

SCORED = "ForSequenceClassification"  # how transformers names a decoder with a score head


def read_spec(config: Mapping[str, Any], where: str, implementation: str) -> ModelSpec:
    """Read the spec of a `config.json` for one implementation of models.

    where: the file or preset, named in errors. implementation: `native` (our own decoder), or
    another value of `model.implementation`, such as `transformers`. Raises CheckpointError for a
    config that the implementation cannot build, and what another implementation raises besides.
    """
    if implementation == "native":
        return build_spec(config, where)
    # Imported now, by the registry: other implementations are not needed, or installed, everywhere.
    return cast(ExternalSpec, import_owner("model").read_spec(config, where, implementation))


def read_trained_spec(
    config: Mapping[str, Any], where: str, implementation: str | None = None
) -> ModelSpec:
    """Read the spec of a model that somebody has trained.

    where: the file or preset, named in errors. implementation: the one of its run; None: not known.
    Then our own decoder is taken for the families of `FAMILIES`, and for all others transformers'
    class, if transformers is installed. Raises what `read_spec` does.
    """
    if implementation is None:
        is_ours = _find_row(get_text_config(config)) is not None
        is_foreign = not is_ours and find_spec("transformers") is not None
        implementation = "transformers" if is_foreign else "native"
    return read_spec(config, where, implementation)


def build_spec(config: Mapping[str, Any], where: str) -> DecoderSpec:
    """Build the spec of a Hugging Face `config.json`.

    where: the file or preset, named in errors. Raises CheckpointError for an architecture that is
    not supported, weights that are quantized in a form that is not read, and keys that are missing
    or make no sense.
    """
    # A multimodal file may say at its top, or in its text part, how its weights are quantized.
    outer_codes = read_codes(config, where)
    check_sizes(config, where)
    config = get_text_config(config)
    inner_codes = read_codes(config, where)
    family = _find_family(config, where)
    fields = Fields(FAMILIES[family].defaults | dict(config), where)
    common = _read_common_fields(fields, family)
    return DecoderSpec(
        **common | evaluate_shape(FAMILIES[family].shape, fields, common),
        codes=outer_codes if inner_codes == FileCodes() else inner_codes,
    )


def get_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a multimodal Gemma 3 config as that of its text model; any other as it is, a copy.

    The text model alone is trained and exported, so that the result names its class and type.
    """
    if config.get("model_type") != "gemma3" or not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    outer_keys = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        if key in config
    }
    text_keys: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
    }
    # transformers ties by the outer key, whatever the text's own says.
    if "tie_word_embeddings" in config:
        text_keys["tie_word_embeddings"] = config["tie_word_embeddings"]
    return outer_keys | dict(config["text_config"]) | text_keys


def _find_row(config: Mapping[str, Any]) -> str | None:
    """Return the family of a config by its model_type, None if there is no row for it."""
    model_type = config.get("model_type")
    if model_type == "granitemoehybrid" and not _is_dense(config):
        return None
    return next(
        (name for name, row in FAMILIES.items() if model_type in (name, *row.model_types)), None
    )


def _is_dense(config: Mapping[str, Any]) -> bool:
    """Return True for a Granite 4 whose layers are attention and an MLP: no Mamba, no experts."""
    kinds = config.get("layer_types")
    return (
        isinstance(kinds, list)
        and len(kinds) == config.get("num_hidden_layers")
        and all(kind in ("attention", "full_attention") for kind in kinds)
        and config.get("num_local_experts") == 0
    )


def _find_family(config: Mapping[str, Any], where: str) -> str:
    """Return the family of a config.

    Raises CheckpointError for one that the decoder does not cover.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    family = _find_row(config)
    covered = set(FAMILIES[family].architectures) if family is not None else set()
    if family is None or (names and covered.isdisjoint(map(str, names))):
        if any(str(name).endswith(SCORED) for name in names):
            raise CheckpointError(
                f"{where}: config.json: {names[0]} has a score head, which predicts no tokens;"
                " expected a causal language model; transformers'"
                " AutoModelForSequenceClassification opens it, and reward_distributed goes on"
                " training it"
            )
        classes = f" ({', '.join(map(str, names))})" if names else ""
        remedy = ""
        if family is None and isinstance(model_type, str):
            remedy = (
                "; to train it in transformers' own class, set model.implementation=transformers"
            )
        types = ", ".join(sorted(FAMILIES)).replace(
            "granitemoehybrid", "granitemoehybrid (without Mamba layers and experts)"
        )
        raise CheckpointError(
            f"{where}: config.json: model_type {model_type!r}{classes} is not supported; expected a"
            f" causal language model of type {types}{remedy}"
        )
    return family


def _read_common_fields(fields: Fields, family: str) -> dict[str, Any]:
    """Return the fields of `DecoderSpec` that all families read alike.

    A family's `shape` may replace any of them.
    """
    config = fields.config
    width = fields.read_integer("hidden_size")
    heads = fields.read_integer("num_attention_heads")
    if config["head_dim"] is None and width % heads:
        raise fields.make_fault("hidden_size", f"a multiple of num_attention_heads = {heads}")
    kv_heads = fields.read_optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.make_fault(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    head_width = fields.read_optional_integer("head_dim") or width // heads
    layers = fields.read_integer("num_hidden_layers")
    if config.get("use_bidirectional_attention"):
        raise fields.make_fault("use_bidirectional_attention", "false (a causal model)")
    if not config.get("is_causal", True):
        raise fields.make_fault("is_causal", "true (a causal model)")
    rope, local_rope = read_rope(fields, family, head_width)
    return {
        "family": family,
        "vocab_size": fields.read_integer("vocab_size"),
        "width": width,
        "mlp_width": fields.read_integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_width": head_width,
        "max_positions": fields.read_integer("max_position_embeddings"),
        "norm_eps": fields.read_number("rms_norm_eps"),
        "rope": rope,
        "local_rope": local_rope,
        "windows": (None,) * layers,
        "attention_scale": head_width**-0.5,
        "attention_softcap": None,
        "logit_softcap": None,
        "embedding_scale": None,
        "activation": read_activation(fields, "hidden_act"),
        "norm_offset": False,
        "post_norms": False,
        "head_norms": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tied": fields.read_flag("tie_word_embeddings"),
        "fused_file": False,
        "init_std": fields.read_number("initializer_range"),
    }


# Parts of the families' `shape`: field of `DecoderSpec` -> its value, or a reader.
_BIASES = {
    "qkv_bias": make_flag_reader("attention_bias"),
    "output_bias": make_flag_reader("attention_bias"),
}
_GEMMA_SHAPE = _BIASES | {
    "embedding_scale": lambda fields, common: common["width"] ** 0.5,
    "norm_offset": True,
}
_GRANITE_SHAPE = _BIASES | {
    "embedding_scale": lambda fields, common: fields.read_number("embedding_multiplier"),
    "attention_scale": lambda fields, common: fields.read_number("attention_multiplier"),
    "residual_scale": lambda fields, common: fields.read_number("residual_multiplier"),
    "logit_scale": lambda fields, common: 1 / fields.read_number("logits_scaling"),
}
_GEMMA2_SHAPE = _GEMMA_SHAPE | {
    "attention_softcap": lambda fields, common: fields.read_optional_number(
        "attn_logit_softcapping"
    ),
    "activation": lambda fields, common: read_activation(fields, "hidden_activation"),
    "post_norms": True,
    "windows": make_window_reader(
        lambda fields, layer: (layer + 1) % fields.read_integer("sliding_window_pattern") != 0
    ),
    "attention_scale": lambda fields, common: fields.read_number("query_pre_attn_scalar") ** -0.5,
    "logit_softcap": lambda fields, common: fields.read_optional_number("final_logit_softcapping"),
}

# Parts of the families' `defaults`: key of config.json -> its value where a file lacks it.
_GEMMA = COMMON | {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
_GRANITE = COMMON | {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_QWEN_WINDOWS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
# `model_type` -> (shape, architectures, defaults), see `Family`. A default that is not in COMMON is
# that of the family's config class in transformers.
FAMILIES: dict[str, Family] = {
    # Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2.
    "llama": Family(
        _BIASES | {"mlp_bias": make_flag_reader("mlp_bias")},
        ("LlamaForCausalLM",),
        COMMON | {"max_position_embeddings": 2048},
    ),
    # Mistral 7B, Nemo, Small: a window in every layer or in none; Ministral, in the layers that
    # layer_types says.
    "mistral": Family(
        {
            "windows": make_window_reader(
                lambda fields, layer: fields.config["sliding_window"] is not None
            )
        },
        ("MistralForCausalLM",),
        COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    # Qwen 2.5: biases on queries, keys and values.
    "qwen2": Family(
        {"qkv_bias": True, "windows": read_qwen_windows},
        ("Qwen2ForCausalLM",),
        COMMON | _QWEN_WINDOWS,
    ),
    # Qwen 3: a norm over each query and key head.
    "qwen3": Family(
        _BIASES | {"head_norms": True, "windows": read_qwen_windows},
        ("Qwen3ForCausalLM",),
        COMMON | _QWEN_WINDOWS | {"head_dim": 128},
    ),
    # Gemma: scaled embeddings, norms around 1; files that say `gelu` mean its tanh form.
    "gemma": Family(
        _GEMMA_SHAPE
        | {
            "activation": (
                lambda fields, common: {"gelu": "gelu_tanh"}.get(
                    common["activation"], common["activation"]
                )
            )
        },
        ("GemmaForCausalLM",),
        _GEMMA | {"hidden_act": "gelu"},
    ),
    # Gemma 2: soft caps, norms after attention and MLP, every second layer with a window.
    "gemma2": Family(
        _GEMMA2_SHAPE,
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
    # Gemma 3 text: five layers with a window to one without, head norms, a second rope base for the
    # windows.
    "gemma3": Family(
        _GEMMA2_SHAPE | {"head_norms": True, "attention_softcap": refuse_cap},
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
    # Phi 3, Phi 3.5, Phi 4: Llama with fused projections in the file.
    "phi3": Family(
        {"fused_file": True, "windows": read_same_windows},
        ("Phi3ForCausalLM",),
        COMMON
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    ),
    # SmolLM3: Llama with some layers, every fourth, that do not rotate queries and keys.
    "smollm3": Family(
        _BIASES
        | {
            "mlp_bias": make_flag_reader("mlp_bias"),
            "rotated": read_rotated_layers,
            "windows": read_smollm3_windows,
        },
        ("SmolLM3ForCausalLM",),
        COMMON
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    # Granite 3: Llama with constants that multiply embeddings, scores, residuals and logits.
    "granite": Family(
        _GRANITE_SHAPE | {"mlp_bias": make_flag_reader("mlp_bias")},
        ("GraniteForCausalLM",),
        _GRANITE,
    ),
    # Granite 4 without Mamba layers and experts: the same, with other names of the MLP in the file.
    "granitemoehybrid": Family(
        _GRANITE_SHAPE
        | {
            "fused_file": True,
            "mlp_width": lambda fields, common: fields.read_integer("shared_intermediate_size"),
            "rotated": lambda fields, common: (
                (fields.config["position_embedding_type"] == "rope",) * common["num_layers"]
            ),
        },
        ("GraniteMoeHybridForCausalLM",),
        _GRANITE
        | {
            "intermediate_size": 11008,
            "position_embedding_type": None,
            "shared_intermediate_size": 1024,
        },
    ),
    # From here on the families have a mixture of experts in place of an MLP.
    # Mixtral: Mistral with experts in every layer.
    "mixtral": Family(
        {"windows": read_mixtral_windows, "mixture": make_mixture_reader("intermediate_size")},
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
    # Qwen 3 with experts in all layers, or in every n-th one that is not among mlp_only_layers.
    "qwen3_moe": Family(
        _BIASES
        | {
            "head_norms": True,
            "windows": lambda fields, common: (
                read_same_windows(fields, common)
                if fields.read_flag("use_sliding_window")
                else common["windows"]
            ),
            "mixture": make_mixture_reader(
                "moe_intermediate_size",
                layers=read_sparse_layers,
                normalized=make_flag_reader("norm_topk_prob"),
            ),
        },
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
    # OLMoE: norms over all heads of queries and of keys together.
    "olmoe": Family(
        _BIASES
        | {
            "width_norms": True,
            "qkv_clip": lambda fields, common: fields.read_optional_number("clip_qkv"),
            "mixture": make_mixture_reader(
                "intermediate_size", normalized=make_flag_reader("norm_topk_prob")
            ),
        },
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
    # gpt-oss: attention sinks, a window in every second layer from the first on, experts with
    # biases.
    "gpt_oss": Family(
        _BIASES
        | {
            "sinks": True,
            "windows": make_window_reader(lambda fields, layer: layer % 2 == 0),
            "mixture": make_mixture_reader(
                "intermediate_size",
                router_bias=True,
                expert_bias=True,
                activation="clamped_swiglu",
                interleaved=True,
                alpha=lambda fields, common: fields.read_number("swiglu_alpha"),
                limit=lambda fields, common: fields.read_number("swiglu_limit"),
            ),
        },
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


# A decoder with a score head, for rewards or classes: its spec, and the config.json of its export.
#
# A checkpoint's tensors are named as by transformers' ...ForSequenceClassification: those of the
# decoder begin with `model.`, and the head is `score.weight`.


_CAUSAL = "ForCausalLM"
# Families of which transformers has no such class.
_UNSCORED = ("olmoe", "granite", "granitemoehybrid")


def count_head_labels(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of a checkpoint's score head; None: it has no score head.

    config: its config.json.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SCORED) for name in names):
        return None
    labels = config.get("id2label")
    # transformers makes 2 rows where a config.json does not say how many.
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    return count if isinstance(count, int) and count > 0 else 2


def build_scored_spec(config: Mapping[str, Any], where: str, num_labels: int | None) -> DecoderSpec:
    """Build the spec of a decoder with a score head of `num_labels` rows.

    config: of a checkpoint with or without a score head. where: the file or preset, named in
    errors. num_labels: None: as many as the checkpoint's head has. Raises CheckpointError as
    `build_spec` does. It also does so if the number is not known, is not that of the checkpoint's
    head, or if transformers has no class to load the export.
    """
    head_labels = count_head_labels(config)
    if num_labels is None and head_labels is None:
        raise CheckpointError(
            f"{where}: config.json: has no score head that would say how many classes there are;"
            " set reward.num_labels to their number"
        )
    if num_labels is not None and head_labels not in (None, num_labels):
        raise CheckpointError(
            f"{where}: config.json: its score head has {head_labels} rows, the config asks for"
            f" {num_labels}; set reward.num_labels={head_labels}, or start from a model without one"
        )
    if config.get("model_type") in _UNSCORED:
        raise CheckpointError(
            f"{where}: config.json: transformers has no classifier of the family"
            f" {config['model_type']}, so that no other program would open what is exported; start"
            " from a model of another family"
        )
    causal = dict(config)
    if head_labels is not None:
        names = [str(name).replace(SCORED, _CAUSAL) for name in config["architectures"]]
        # The one family whose two classes are named differently before `For...`.
        is_gemma3 = names == ["Gemma3TextForCausalLM"]
        causal["architectures"] = ["Gemma3ForCausalLM"] if is_gemma3 else names
    return replace(
        build_spec(causal, where),
        tied=False,
        logit_softcap=None,
        num_labels=num_labels or head_labels,
    )


def read_run_spec(cfg: FullFinetuneConfig, config: Mapping[str, Any], where: str) -> ModelSpec:
    """Read the spec of the model that a run trains, with a score head if its method scores.

    cfg: of the run. config: the model's config.json. where: named in errors. Raises what
    `build_scored_spec` or `read_spec` does.
    """
    if cfg.scores_sequences:
        return build_scored_spec(config, where, cfg.num_labels)
    return read_spec(config, where, cfg.model.implementation)


def settle_packing(cfg: FullFinetuneConfig, spec: ModelSpec) -> list[str]:
    """Replace `data.packing: auto` in the config by what the model can; return lines for the log.

    A model whose documents would see each other trains on rows of one sequence each. Raises
    SetupError for such a model if packing is on.
    """
    choice = cfg.data.packing
    if choice and isinstance(spec, ExternalSpec):
        try:
            spec.check_packing(cfg.parallel.tensor, compiled=cfg.compile)
        except SetupError as error:
            if choice != "auto":
                raise
            cfg.data.packing = False
            reason = str(error).removeprefix("data.packing: ").partition(";")[0]
            return [f"data.packing=auto: one sequence in a row, with padding, as {reason}"]
    cfg.data.packing = bool(choice)
    return ["data.packing=auto: several sequences in a row"] if choice == "auto" else []


def get_score_architecture(spec: DecoderSpec) -> str:
    """Return the class of transformers that loads a model with a score head."""
    if spec.family == "gemma3":
        return f"Gemma3Text{SCORED}"
    return FAMILIES[spec.family].architectures[0].replace(_CAUSAL, SCORED)


def make_score_config(
    config: Mapping[str, Any], names: list[str], pad_id: int | None
) -> dict[str, Any]:
    """Return a config.json with the names of a score head's rows, and the id of padding.

    names: of the rows, in order. pad_id: None: the config's own stays.
    """
    changed = get_text_config(config) | {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    changed.pop("num_labels", None)
    if len(names) > 1:
        changed["problem_type"] = "single_label_classification"
    return changed if pad_id is None else changed | {"pad_token_id": pad_id}

"""Build tiny random transformers models of every family, and move weights between them and ours.

build_reference_model("llama3").save_pretrained(folder)
model = load_ours(folder)
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from recipe_lib.models import Decoder, build_meta, build_spec, read_config
from recipe_lib.models.weight_names import (
    OpenView,
    build_weight_map,
    build_written_layout,
    find_tied_copies,
    why_left_out,
)

# Keys of config.json that every case has, unless it says otherwise.
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Values of `rope_scaling`.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG_ROPE = {
    "rope_type": "longrope",
    # One for each pair of a head's 48 / 4 = 12 channels.
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(6)],
}

_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}
# Keys of a Granite 4 without Mamba layers and experts.
_DENSE_GRANITE = {
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 56,
    # Of no layer. The config class checks that they fit, and JSON has no infinite number.
    "mamba_n_heads": 1,
    "time_step_limit": [0.0, 100.0],
}
# Name of a case -> (transformers' config class, keys that differ from SMALL).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_theta": 500000.0}),
    "llama3.1": (
        "LlamaConfig",
        {"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama-yarn": ("LlamaConfig", {"rope_scaling": _YARN_ROPE}),
    "llama-yarn-options": (
        "LlamaConfig",
        {
            "rope_scaling": (
                _YARN_ROPE
                | {
                    "attention_factor": 0.7,
                    "beta_fast": 8.0,
                    "beta_slow": 2.0,
                    "truncate": False,
                }
            )
        },
    ),
    "llama-yarn-mscale": (
        "LlamaConfig",
        {"rope_scaling": _YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 0.5}},
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "mistral-nemo": ("MistralConfig", {"sliding_window": None, "head_dim": 20}),
    "qwen2.5": ("Qwen2Config", {"rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen2.5-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 18, "rope_theta": 1000000.0}),
    "qwen3-yarn": (
        "Qwen3Config",
        {"head_dim": 16, "rope_scaling": _YARN_ROPE, "attention_bias": True},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 14, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 14,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24},
    ),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "num_hidden_layers": 7,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "phi4": ("Phi3Config", {"sliding_window": None, "rope_theta": 250000.0}),
    "phi4-mini": (
        "Phi3Config",
        {"hidden_size": 64, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "phi3.5-long": (
        "Phi3Config",
        {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 24},
    ),
    "smollm3": (
        "SmolLM3Config",
        {"num_hidden_layers": 5, "rope_theta": 5000000.0, "tie_word_embeddings": True},
    ),
    "smollm3-window": (
        "SmolLM3Config",
        {
            "no_rope_layers": [0, 1, 0],
            "rope_theta": 10000.0,
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite": ("GraniteConfig", _GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite4": (
        "GraniteMoeHybridConfig",
        _GRANITE
        | _DENSE_GRANITE
        | {"position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granite4-unrotated": ("GraniteMoeHybridConfig", _GRANITE | _DENSE_GRANITE),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "mixtral-all": (
        "MixtralConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 9},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-unnormalized": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 20,
            "sliding_window": 8,
            "use_sliding_window": True,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 4, "clip_qkv": 0.8, "intermediate_size": 20},
    ),
    "olmoe-normalized": (
        "OlmoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "rope_theta": 150000.0,
            },
        },
    ),
    "phi3.5-short": (
        "Phi3Config",
        {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 64},
    ),
}


def build_options(case: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of the config class of one of CASES. changes: keys of its config."""
    options = SMALL | CASES[case][1] | changes
    if "layer_types" in CASES[case][1]:  # all alike, of as many layers as there are now
        options["layer_types"] = options["layer_types"][:1] * options["num_hidden_layers"]
    return options


def build_reference_model(
    case: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> transformers.PreTrainedModel:
    """Return a transformers model of one of CASES, with norms and biases random too.

    changes: keys of its config.
    """
    class_name, _ = CASES[case]
    config = getattr(transformers, class_name)(**build_options(case, **changes))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            values = torch.randn(parameter.shape, generator=generator)
            values *= 0.3 if is_norm else 0.15
            if is_norm and "Gemma" not in class_name:  # Gemma adds 1 to a norm's weight
                values += 1.0
            parameter.copy_(values)
    return model.eval()


def load_ours(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return our decoder with the weights of a folder, read without the library's own loader.

    Raises AssertionError for a tensor of the files that is neither used nor known to be ignorable.
    """
    spec = build_spec(read_config(folder), str(folder))
    files = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        files |= load_file(file)
    model = build_meta(spec, dtype)
    model.to_empty(device="cpu")
    entries = build_weight_map(spec, files)  # which tensor, or which rows of it, a parameter has
    with torch.no_grad():
        for entry in entries:
            parameter = model.get_parameter(entry.our_name)
            if entry.view is not None:  # computed from several tensors of the file
                tensor = OpenView(entry.view, files.__getitem__, dtype)[:]
            else:
                tensor = files[entry.file_name]
            if entry.length is not None:
                tensor = tensor[entry.start : entry.start + entry.length]
            assert parameter.shape == tensor.shape, entry
            parameter.copy_(tensor)
    unused = set(files) - {entry.file_name for entry in entries}
    for entry in entries:
        if entry.view is not None:
            unused -= set(entry.view.tensors())
    unused -= find_tied_copies(spec, entries, files).keys()
    assert all(why_left_out(spec, name, files[name].dim()) for name in unused), unused
    return model


def save_ours(model: Decoder, source: Path, folder: Path) -> None:
    """Write our weights into `folder`, which must not exist, as transformers names them.

    source: a model's folder, of which config.json is copied.
    """
    config_text = (Path(source) / "config.json").read_text()
    spec = build_spec(read_config(source), str(source))
    parts: dict[str, list[torch.Tensor]] = {}  # the file's name -> tensors to concatenate
    layout = build_written_layout(spec)
    if layout is None:
        for entry in build_weight_map(spec):
            parts.setdefault(entry.file_name, []).append(
                model.get_parameter(entry.our_name).detach()
            )
    else:
        for file_name, our_name in layout.renamed.items():
            parts[file_name] = [model.get_parameter(our_name).detach()]
        # A conversion that gives several tensors stands under each of their names: run it once.
        conversions = {id(conversion): conversion for conversion in layout.made.values()}
        for conversion in conversions.values():
            tensors = conversion.convert(lambda name: model.get_parameter(name).detach())
            parts |= {name: [tensor] for name, tensor in tensors.items()}
    folder.mkdir()
    save_file(
        {name: torch.cat(pieces).contiguous() for name, pieces in parts.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(config_text)

"""Build tiny random models of the families that GGUF supports, and run GGUF files with llama.cpp.

`save_model(case, folder)` writes a folder to export; `compute_llama_logits` and
`tokenize_with_llama` are the reference for the file.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.tokenizers.made import write_json

# Keys of config.json that every case has, unless it says otherwise. Matrices have rows of 256, as
# quantized blocks of 256 need them. The vocabulary has more rows than the tokenizer has ids, 320.
SMALL: dict[str, Any] = {
    "vocab_size": 336,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
# Values of `rope_scaling`, and what the Gemma cases share.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(32)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(32)],
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6}

# Name of a case -> (transformers' config class, keys that differ from SMALL).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3.1": (
        "LlamaConfig",
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama-yarn": ("LlamaConfig", {"rope_scaling": YARN | {"attention_factor": 0.7}}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 48}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_theta": 1000000.0}),
    "gemma": ("GemmaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi4-mini": ("Phi3Config", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi3.5-long": ("Phi3Config", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "phi3.5-short": ("Phi3Config", {"rope_scaling": LONG, "original_max_position_embeddings": 256}),
}


def make_model(case: str, **changes: Any) -> transformers.PreTrainedModel:
    """Return the model of one of CASES, norms and biases random too. changes: of its config."""
    class_name, options = CASES[case]
    config = getattr(transformers, class_name)(**SMALL | options | changes)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            values = torch.randn(parameter.shape, generator=generator)
            values *= 0.3 if is_norm else 0.06
            if is_norm and "Gemma" not in class_name:  # Gemma adds 1 to a norm's weight
                values += 1.0
            parameter.copy_(values)
    return model.eval()


def save_model(case: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write the model of a case with a tokenizer of 320 ids into a folder; return the model.

    dtype: of the weights. changes: keys of its config.
    """
    model = make_model(case, **changes).to(dtype)
    model.save_pretrained(folder)
    write_json(folder)
    return model


def make_tokens(length: int = 40) -> list[int]:
    """Return `length` random ids of the tokenizer, none of them special (0 to 3)."""
    return torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def import_llama_cpp() -> Any:
    """Return llama.cpp's Python package, silenced; skip the test where it is not installed."""
    library = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: no llama.cpp to compare with"
    )
    library.llama_log_set(_build_silent_callback(library), None)
    return library


@cache
def _build_silent_callback(library: Any) -> Any:
    """Return a log callback that drops its lines.

    The cache keeps it alive, as llama.cpp calls it as long as the process lives.
    """
    return library.llama_log_callback(lambda *_: None)


def compute_llama_logits(file: Path, ids: list[int], adapter: Path | None = None) -> np.ndarray:
    """Return the logits fp32 `[s, v]` that llama.cpp computes, with its KV cache in fp32.

    file: the GGUF model. adapter: a GGUF adapter to apply to it.
    """
    library = import_llama_cpp()
    options = library.llama_model_default_params()
    options.use_mmap = False
    model = library.llama_model_load_from_file(str(file).encode(), options)
    assert model, f"llama.cpp does not load {file}"
    settings = library.llama_context_default_params()
    settings.n_ctx = 256
    settings.n_batch = 256
    settings.n_threads = 1
    settings.n_threads_batch = 1
    settings.flash_attn_type = 0  # off
    settings.type_k = 0  # fp32
    settings.type_v = 0
    context = library.llama_init_from_model(model, settings)
    if adapter is not None:
        lora = library.llama_adapter_lora_init(model, str(adapter).encode())
        assert lora, f"llama.cpp does not load {adapter}"
        # Positional: context, adapters, how many, their scales.
        loras = (library.llama_adapter_lora_p_ctypes * 1)(lora)
        library.llama_set_adapters_lora(context, loras, 1, (ctypes.c_float * 1)(1.0))
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position] = token
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = 1  # logits of every position, not of the last alone
    assert library.llama_decode(context, batch) == 0
    vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    logits = []
    for position in range(len(ids)):
        row = library.llama_get_logits_ith(context, position)
        logits.append(np.ctypeslib.as_array(row, (vocab_size,)).copy())
    library.llama_free(context)
    library.llama_model_free(model)
    return np.stack(logits)


def tokenize_with_llama(file: Path, texts: list[str], special: bool) -> list[list[int]]:
    """Return the ids of each text by llama.cpp, without BOS.

    file: a GGUF model. special: parse special tokens in the text.
    """
    library = import_llama_cpp()
    options = library.llama_model_default_params()
    options.vocab_only = True
    model = library.llama_model_load_from_file(str(file).encode(), options)
    assert model, f"llama.cpp does not load {file}"
    vocabulary = library.llama_model_get_vocab(model)
    ids_of_texts = []
    for text in texts:
        encoded = text.encode()
        ids = (library.llama_token * (len(encoded) + 16))()
        # Positional: vocabulary, text, its bytes, buffer, its size, add_special, parse_special.
        num_ids = library.llama_tokenize(
            vocabulary, encoded, len(encoded), ids, len(ids), False, special
        )
        assert num_ids >= 0
        ids_of_texts.append(list(ids[:num_ids]))
    library.llama_model_free(model)
    return ids_of_texts

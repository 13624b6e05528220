"""Define tiny models of every class of transformers that carries a state along a sequence.

build_hybrid("qwen3_5_text") is one with random weights; HYBRIDS has all, CANNOT_PACK why some can't.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig, MemoryConfig
from recipe_lib.external.inspection import restore_numbers
from recipe_lib.external.module_spec import ModuleSpec, read_spec
from recipe_lib.external.recomputed_scans import Scan
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.memory.layer_stream import stream_layers
from recipe_lib.models import build_meta
from recipe_lib.parallel import materialize

_CONVOLUTION_AND_ATTENTION = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
# model_type -> settings of its config beside the small ones of `shrink`.
HYBRIDS: dict[str, dict[str, Any]] = {
    # Gated delta nets
    "qwen3_5_text": {},
    "qwen3_5": {},
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_5_moe": {},
    "qwen3_next": _EXPERTS,
    "olmo_hybrid": {},
    # with n-grams of tokens, and convolutions over their embeddings
    "qwen4_exp_text": _EXPERTS
    | {
        "layer_types": ["linear_attention", "linear_attention"],
        "num_hidden_layers": 2,
        "eos_token_id": 1,
        "ple_layer_ids": [1, 2],
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 2,
    },
    # Kimi's delta attention
    "kimi_linear": {},
    "bailing_hybrid": {},
    # Mamba-2
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "bamba": {},
    "falcon_h1": {},
    "nemotron_h": {},
    "mamba2": {},
    "zamba2": {},
    # Mamba
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
    # Short convolutions: alone, or of keys, values and residuals
    "lfm2": _CONVOLUTION_AND_ATTENTION,
    "lfm2_moe": _CONVOLUTION_AND_ATTENTION | {"num_dense_layers": 1},
    "lfm3": {},
    "inkling_text": {},
    "inkling2_text": {},
    "zaya": {},
    # Others
    "minimax": {},
    "recurrent_gemma": {},
    "rwkv": {},
}
# model_type -> what the check of packing, or the class itself, says.
CANNOT_PACK: dict[str, str] = {
    # Its sparse attention picks tokens by their place in the row, whatever document they are of.
    "glm5_next": "Glm5NextForConditionalGeneration cannot keep documents .*; set data.packing=auto",
}
# Multimodal classes around one of the above, and classes that do not open.
WRAPPERS = {
    "qwen4_exp": "around qwen4_exp_text, its config has no default that can be built",
    "inkling2": "around inkling2_text",
    "inkling_mm_model": "around inkling_text",
    "xlstm": "its embedding is not found: it has no get_input_embeddings",
    "zamba": "its small copy has one shared block, and its class needs two",
}
# What the source of a class with a state along the sequence has.
_STATE = re.compile(
    r"update_recurrent_state|update_conv_state|set_linear_cache|recurrent_states|rnn_state|time_shift"
)


def list_stateful_types() -> set[str]:
    """List the model types of causal language models whose file has a module with such a state."""
    types = set()
    for model_type in {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }:
        name = model_type_to_module_name(model_type)
        try:
            file = find_spec(f"transformers.models.{name}.modeling_{name}")
        except ModuleNotFoundError:
            continue
        if file is not None and _STATE.search(Path(str(file.origin)).read_text()):
            types.add(model_type)
    return types


def make_hybrid_config(kind: str) -> dict[str, Any]:
    """Make the config.json of a tiny model."""
    settings = (HYBRIDS | dict.fromkeys(CANNOT_PACK, {}))[kind]
    small = shrink(CONFIG_MAPPING[kind](**settings))
    config: dict[str, Any] = restore_numbers(json.loads(small.to_json_string(use_diff=False)))
    config.pop("hybrid_layer_ids", None)
    return config


def make_hybrid_spec(kind: str) -> ModuleSpec:
    return read_spec(make_hybrid_config(kind), kind)


def build_hybrid(
    kind: str,
    dtype: torch.dtype = torch.float32,
    mode: str = "none",
    *,
    adapted: bool = False,
    streamed: bool = False,
) -> Any:
    """Build a tiny model with random weights on the CPU.

    mode: of activation checkpointing. adapted: it has adapters. streamed: its frozen layers are.
    """
    model: Any = build_meta(make_hybrid_spec(kind), dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matmuls take no fp64
    if adapted:
        add_adapters(model, LoraConfig(rank=4, target_modules=["all-linear"]), dtype)
    memory = MemoryConfig(stream_layers=streamed)
    apply_activation_checkpointing(model, mode)
    stream_layers(model, memory, torch.device("cpu"))
    materialize(model, memory, torch.device("cpu"))
    randomize(model)
    return model


class InDouble(TorchFunctionMode):
    """Let classes compute in fp64 what they compute in fp32 whatever the type of the weights is."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


@contextmanager
def compute_in_double() -> Iterator[None]:
    """Run a block `InDouble`, with the scans that backward runs, where a mode is not entered."""
    run_scan = Scan.__call__

    def run_in_double(scan: Scan, *tensors: Tensor) -> Tensor:
        with InDouble():
            return run_scan(scan, *tensors)

    with InDouble(), patch.object(Scan, "__call__", run_in_double):
        yield

"""Every key of a config.json that changes what transformers computes changes it here as well, or is
refused by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipe_lib.errors import CheckpointError
from tests.models.reference import build_reference_model, load_ours
from tests.selection import mark_slow_except

_CASES = (
    "mistral-window",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmoe",
    "gpt-oss",
    "smollm3",
    "smollm3-window",
    "granite",
    "granite4",
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_CHANGES: tuple[dict[str, Any], ...] = (
    {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}
    },  # beside rope_parameters, as a model's card may advise
    {"rope_scaling": _YARN},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    {"rope_theta": 50.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    {"partial_rotary_factor": 0.5},
    {"is_causal": False},
    {"is_causal": True},
    {"use_bidirectional_attention": True},
    {"layer_types": ["full_attention"] * 3},
    {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    {"sliding_window": 4},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"attn_logit_softcapping": 2.0},
    {"final_logit_softcapping": 1.0},
    {"query_pre_attn_scalar": 5},
    {"hidden_act": "gelu"},
    {"hidden_activation": "silu"},
    {"rms_norm_eps": 1e-2},
    {"tie_word_embeddings": False},
    {"norm_topk_prob": False},
    {"num_experts_per_tok": 1},
    {"clip_qkv": 0.3},
    {"swiglu_limit": 0.3},
    {"no_rope_layers": [0, 0, 1, 1, 0]},
    {"no_rope_layers": [0, 0]},
    {"no_rope_layers": None, "no_rope_layer_interval": 2, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 4, "layer_types": None},
    {"embedding_multiplier": 1.0},
    {"attention_multiplier": 0.1},
    {"residual_multiplier": 1},
    {"logits_scaling": 4},
    {"position_embedding_type": "nope"},
    {"position_embedding_type": None},
    {"layer_types": ["mamba", "attention", "attention"]},
)


def _read_theirs(folder: Path, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return transformers' logits; None: it does not read the config, or not all of the weights."""
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
        return (
            None
            if loading["missing_keys"] or loading["unexpected_keys"]
            else model.eval()(tokens).logits
        )
    except Exception:  # noqa: BLE001 (of many types)
        return None


@pytest.mark.parametrize("case", mark_slow_except(_CASES, ("mistral-window", "gemma3", "qwen3")))
@torch.no_grad()
def test_a_key_is_read_as_transformers_reads_it_or_refused(case: str, tmp_path: Path) -> None:
    build_reference_model(case).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    tokens = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    equal = 0
    for change in _CHANGES:
        file.write_text(json.dumps(config | change))
        try:
            ours = load_ours(tmp_path)(tokens)
        except (CheckpointError, KeyError):  # KeyError: a tensor that the file does not have
            continue
        theirs = _read_theirs(tmp_path, tokens)
        if theirs is not None:
            bound = 1e-5 * max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(
                ours, theirs, atol=bound, rtol=0, msg=lambda text, of=change: f"{of}: {text}"
            )
            equal += 1
    assert equal >= len(_CHANGES) // 2

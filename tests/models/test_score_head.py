"""A score head on decoders of each family: transformers opens the exported folder with equal
scores, and so do we.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint.huggingface import export_model, load_weights
from recipe_lib.config import FullFinetuneConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.families import build_scored_spec, make_score_config
from recipe_lib.models.meta_init import allocate
from recipe_lib.parallel import start_world

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "phi3": {},
    "smollm3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def loaded(folder: Path, labels: int | None) -> Decoder:
    spec = build_scored_spec(read_config(folder), str(folder), labels)
    model = build_meta(spec, torch.float32)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, folder, 5)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES[kind])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "causal")
    model, source = loaded(tmp_path / "causal", 3), read_config(tmp_path / "causal")
    named = make_score_config(source, ["a", "b", "c"], 2)
    with start_world(FullFinetuneConfig(device="cpu")) as world:
        out = {"tokenizer_folder": None, "max_shard_bytes": 2**30, "world": world}
        export_model(model, model.spec, named, tmp_path / "scored", **out)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scored", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.randint(3, 128, (2, 9))
    expected = model(tokens)
    assert torch.allclose(theirs.eval()(input_ids=tokens).logits, expected[:, -1], atol=1e-6)
    assert torch.equal(loaded(tmp_path / "scored", None)(tokens), expected)


def test_a_family_that_transformers_does_not_score_is_refused() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^x: config.json: transformers has no classifier of the family olmoe",
    ):
        build_scored_spec({"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}, "x", 2)

"""The line of the log that says which layers have an adapter, against the number of layers in the
model's config.
"""

from typing import Any

import pytest
import torch

from recipe_lib.adapters import add_adapters
from recipe_lib.adapters.lora import describe_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.external.module_spec import read_spec
from recipe_lib.models import build_meta
from tests.parallel.small_models import build_small_spec

LAYERS = 4
TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0,
             "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}  # fmt: skip
# Lists of modules beside the layers: of projections, and of the layers of a vision tower.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": TEXT | {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3n_text": TEXT | PER_LAYER | {
        "architectures": ["Gemma3nForCausalLM"], "intermediate_size": [48] * LAYERS, "altup_num_inputs": 2,
        "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT, "mm_tokens_per_image": 4,
        "vision_config": VISION | {"image_size": 28, "patch_size": 14},
    },
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"], "text_config": TEXT | PER_LAYER | {"global_head_dim": 8},
        "vision_config": VISION | {"head_dim": 16, "patch_size": 14},
    },
}  # fmt: skip


def with_adapters(kind: str, cfg: LoraConfig) -> Any:
    """A model without values, of transformers' class or ours."""
    spec = (
        read_spec({**CONFIGS[kind], "model_type": kind}, kind)
        if kind in CONFIGS
        else build_small_spec(layers=LAYERS)
    )
    model = build_meta(spec, torch.float32)
    add_adapters(model, cfg, torch.float32)
    return model


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"]], ids=lambda names: names[0])
@pytest.mark.parametrize("kind", ["native", *CONFIGS])
def test_a_target_of_every_layer_is_named_alone(kind: str, targets: list[str]) -> None:
    cfg = LoraConfig(
        rank=2, target_modules=["q"] if kind == "native" and targets == ["q_proj"] else targets
    )
    line = describe_adapters(with_adapters(kind, cfg), cfg)
    assert "layers" not in line.partition("parameters trained")[0], line
    assert "none on ," not in line and ", ," not in line, line


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4"])
def test_layers_without_a_target_are_counted_in_their_own_list(kind: str) -> None:
    cfg = LoraConfig(rank=2, target_modules=["q_proj"])
    model = with_adapters(kind, cfg)
    *_, last = [module for module in model.modules() if hasattr(module, "q_proj")]
    last.q_proj = torch.nn.Identity()
    assert f"on q_proj (in {LAYERS - 1} of {LAYERS} layers): " in describe_adapters(model, cfg)


@pytest.mark.parametrize("kind", ["native", "gemma3"])
def test_a_rank_of_a_pipeline_says_that_it_counts_its_own_layers(kind: str) -> None:
    cfg = LoraConfig(rank=2, target_modules=["q"] if kind == "native" else ["q_proj"])
    model = with_adapters(kind, cfg)
    model.keep_stages([1], first=False, last=False)
    assert " in this rank's layers: " in describe_adapters(model, cfg)

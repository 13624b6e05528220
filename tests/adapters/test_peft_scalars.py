"""Numbers of no dimension in an adapter's file (modules_to_save): of a user's own model, merged and
computed with.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from recipe_lib.adapters import disable_adapters
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.open_exports import load_model, load_model_with_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.registry import register
from recipe_lib.models import read_config, read_spec
from tests.adapters.hugging_face import SHAPE, compute_logits
from tests.adapters.peft_folders import compute_relative_difference, make_tokens

CPU = torch.device("cpu")


class Scale(nn.Module):
    """Multiplies by one trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class ScaledLlama(LlamaForCausalLM):
    """Llama whose MLPs' inputs are scaled."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.post_attention_layernorm.scale = Scale()
            layer.post_attention_layernorm.register_forward_hook(
                lambda norm, _, hidden: norm.scale(hidden)
            )


@pytest.fixture(scope="module", autouse=True)
def own_model() -> None:
    register("model", "scaled")(lambda config: ScaledLlama(LlamaConfig(**config)))


def make_adapter(folder: Path) -> Any:
    torch.manual_seed(4)
    model = ScaledLlama(LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "base")
    settings = PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["scale"])
    adapted = get_peft_model(model, settings).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    adapted.save_pretrained(str(folder / "adapter"))
    return adapted


@torch.no_grad()
def test_a_saved_number_is_merged_and_computed_with(tmp_path: Path) -> None:
    adapted = make_adapter(tmp_path)
    expected = compute_logits(adapted, make_tokens())
    spec = read_spec(read_config(tmp_path / "base"), "base", "scaled")
    model, filled = load_model_with_adapter(
        tmp_path / "adapter", spec, tmp_path / "base", torch.float32, CPU
    )
    assert filled == 2 and compute_relative_difference(model(make_tokens()), expected) < 1e-5
    with disable_adapters(model), adapted.disable_adapter():
        assert (
            compute_relative_difference(
                model(make_tokens()), compute_logits(adapted, make_tokens())
            )
            < 1e-5
        )
    merge_adapter(
        tmp_path / "base",
        tmp_path / "adapter",
        tmp_path / "model",
        quantize="none",
        implementation="scaled",
        dtype=torch.float32,
        ranks=SingleRank(),
    )
    assert (
        compute_relative_difference(
            load_model(spec, tmp_path / "model", torch.float32, CPU)(make_tokens()), expected
        )
        < 1e-5
    )

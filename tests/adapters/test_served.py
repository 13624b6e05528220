"""A part of an adapter that a server would refuse or ignore is told; others are not."""

import pytest

from recipe_lib.adapters.served import find_unserved

LAYER = "model.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
MLP = [f"{LAYER}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "Mistral3ForConditionalGeneration", "UnknownForX"],
)
def test_linears_of_dense_layers_are_served(architecture: str) -> None:
    assert find_unserved(architecture, [*ATTENTION, *MLP]) == []


@pytest.mark.parametrize(
    ("architecture", "module", "is_refused"),
    [
        ("DeepseekV3ForCausalLM", f"{LAYER}.self_attn.kv_b_proj", False),
        ("Qwen3MoeForCausalLM", f"{LAYER}.mlp.gate", False),
        ("Qwen3_5MoeForConditionalGeneration", f"{LAYER}.mlp.shared_expert_gate", False),
        ("NemotronHForCausalLM", f"{LAYER}.mixer.gate", False),
        ("Glm4ForCausalLM", f"{LAYER}.mlp.gate_up_proj", True),
        ("GraniteMoeHybridForCausalLM", f"{LAYER}.block_sparse_moe.router.layer", True),
        ("Qwen3NextForCausalLM", "lm_head", True),
        ("Qwen3MoeForCausalLM", f"{LAYER}.mlp.experts.base_layer", True),
    ],
)
def test_a_part_that_a_server_does_not_apply_is_named(
    architecture: str, module: str, is_refused: bool
) -> None:
    (part,) = find_unserved(architecture, [*ATTENTION, module])
    assert part.is_refused == is_refused
    verb = "refuses this adapter for" if is_refused else "loads this adapter and ignores"
    name = module.removesuffix(".base_layer").rpartition(".")[2]
    assert f"{verb} {name} (1 module)" in part.text
    assert "merge the adapter" in part.text


def test_fused_experts_are_served_where_the_class_takes_them() -> None:
    assert find_unserved("GptOssForCausalLM", [f"{LAYER}.mlp.experts"]) == []


def test_keys_that_are_values_too() -> None:
    keys_alone = f"{LAYER}.self_attn.k_proj"
    both = [f"model.layers.1.self_attn.{name}" for name in ("k_proj", "v_proj")]
    (part,) = find_unserved("Gemma4ForCausalLM", [keys_alone, *both])
    assert not part.is_refused and "k_proj (1 module)" in part.text
    assert find_unserved("Gemma4ForCausalLM", both) == []


def test_a_class_without_adapters_is_merged() -> None:
    (part,) = find_unserved("FalconForCausalLM", ATTENTION)
    assert part.is_refused and part.text.endswith("merge this one")

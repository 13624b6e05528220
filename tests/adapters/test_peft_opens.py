"""Every kind of adapter that we write, of every family: PEFT itself opens it as trained, and as we
merge it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.families import FAMILIES
from recipe_lib.training import validate_parallelism
from tests.adapters.exported_adapters import (
    NATIVE,
    compute_logits,
    compute_relative_difference,
    make_base,
    open_with_peft,
    read_base_spec,
    write_adapter,
)
from tests.adapters.hugging_face import load_theirs
from tests.selection import mark_slow_except

# kind -> what the config says of lora beside the rank
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "all-linear, rsLoRA": {"rslora": True, "rank": 3, "alpha": 5.0},
    "all-linear, dropout": {"dropout": 0.1},
    "DoRA": {"dora": True},
    "q and v, rsLoRA": {"target_modules": ["q", "v"], "rslora": True},
    "MLPs": {"target_modules": ["gate", "up", "down"]},
    "one matrix of the MLPs": {"target_modules": ["q", "down"]},
    "embedding": {"target_modules": ["q", "embedding"]},
    "head": {"target_modules": ["q", "head"]},
    "head alone, DoRA": {"target_modules": ["head"], "dora": True},
    "experts alone": {"target_modules": ["experts"]},
    "router alone": {"target_modules": ["router"]},
    "experts and router": {"target_modules": ["q", "v", "router", "experts"]},
    "all of it": {"target_modules": ["all-linear", "embedding", "head", "router", "experts"]},
}
QUICK = [
    "qwen3_moe, one dense layer: all of it",
    "phi3: DoRA",
    "deepseek_v3 of transformers: all-linear",
]
CASES = [
    *QUICK, "llama, tied: embedding", "llama, biases: all-linear, dropout", "qwen2: q and v, rsLoRA",
    "qwen3: MLPs", "gemma2: one matrix of the MLPs", "gemma3: head", "phi3: head alone, DoRA",
    "smollm3: all-linear", "granite: head", "granitemoehybrid: MLPs", "granitemoehybrid: all-linear",
    "mixtral: experts alone", "olmoe: router alone", "gpt_oss: experts and router",
    "qwen3_moe, every second layer dense: all-linear", "gemma3, multimodal: one matrix of the MLPs",
    "gpt2 of transformers: DoRA", "llama4_text of transformers: all-linear",
    "granitemoeshared of transformers: all-linear, rsLoRA", "falcon_h1 of transformers: all-linear",
    "mixtral of transformers: all-linear, dropout",
]  # fmt: skip
DENSE_AMONG_EXPERTS = [base for base in NATIVE if base.startswith("qwen3_moe, ")]


def settings(kind: str) -> LoraConfig:
    return LoraConfig(**({"rank": 4, "alpha": 8.0} | KINDS[kind]))


def test_every_family_of_the_library_has_a_base() -> None:
    assert {base.partition(",")[0] for base in NATIVE} == set(FAMILIES)
    assert {case.split(": ")[1] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK))
def test_peft_opens_what_was_trained(case: str, tmp_path: Path) -> None:
    base, kind = case.split(": ")
    folder = make_base(base, tmp_path / "base")
    written = write_adapter(base, folder, settings(kind), tmp_path)
    merged = compute_logits(load_theirs(written / "model"))
    assert (
        compute_relative_difference(
            compute_logits(open_with_peft(folder, written / "adapter")), merged
        )
        < 1e-5
    )
    assert compute_relative_difference(compute_logits(load_theirs(folder)), merged) > 1e-3, (
        "the adapter changes next to nothing"
    )


@pytest.mark.parametrize("base", DENSE_AMONG_EXPERTS)
def test_dora_of_dense_layers_among_experts_is_refused_before_training(
    base: str, tmp_path: Path
) -> None:
    """PEFT has them by target_parameters alone, which go with no lengths; the remedies work."""
    spec = read_base_spec(base, make_base(base, tmp_path))
    cfg = LoraFinetuneConfig(device="cpu", lora=settings("DoRA"))
    with pytest.raises(ConfigError, match=r"^lora.dora: model.layers.\d.mlp.gate_proj") as fault:
        validate_parallelism(cfg, spec)
    assert "\n" not in str(fault.value)
    remedy = re.search(r"lora.target_modules=\[([\w,]+)\]$", str(fault.value))
    assert remedy is not None
    validate_parallelism(
        replace(cfg, lora=replace(cfg.lora, target_modules=remedy[1].split(","))), spec
    )
    validate_parallelism(replace(cfg, lora=replace(cfg.lora, dora=False)), spec)

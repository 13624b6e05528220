"""Recipes over classes of transformers whose layers are divided among ranks: losses and folders of
one process.
"""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.distributed.ranks import run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import (
    FULL,
    LORA,
    build_arguments,
    expect_done,
    find_largest_difference,
    gather_whole,
    keep_latest,
    read_steps,
    run_here,
)

GPT2 = {
    "model_type": "gpt2", "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "n_embd": 32,
    "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
STEPS = 3
SAVED = 2
ZBV = ("parallel.pipeline=2", "parallel.pipeline_schedule=zbv")
ADAPTERS = ("optimizer.lr=1e-2", "lora.rank=4", "lora.target_modules=[attn.c_proj, c_fc]")


def probe() -> torch.Tensor:
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def words(folder: Path, name: str, config: str, *more: str) -> list[str]:
    return keep_latest(
        *build_arguments(folder / name, config),
        f"model.preset={folder}/config.json",
        "model.implementation=transformers",
        "dtype=fp32",
        "device=cpu",
        f"max_steps={STEPS}",
        "batch_size=2",
        "gradient_accumulation_steps=4",
        "log.every_n_steps=1000",
        "lr_scheduler.type=constant",
        "data.packing=false",
        "epochs=2",
        *more,
    )


def full(folder: Path, name: str, *more: str) -> Any:
    saved = f"checkpoint.save_every_n_steps={SAVED}"
    return expect_done(run_here(words(folder, name, "demo/full", saved, *more), recipe=FULL)).recipe


def adapters(folder: Path, name: str, *more: str) -> Any:
    base = [
        word
        for word in words(folder, name, "demo/lora", *ADAPTERS, *more)
        if "model.preset" not in word
    ]
    return expect_done(
        run_here([*base, "~model.preset", f"model.path={folder}/full-1/model"], recipe=LORA)
    ).recipe


def resumed(folder: Path, name: str) -> str:
    return f"resume={folder / name / 'state' / f'step_{SAVED}'}"


def alone(folder: Path) -> torch.Tensor:
    model = full(folder, "full-1").model
    adapters(folder, "lora-1")
    with torch.no_grad():
        return gather_whole(model(probe()))


def two(folder: Path) -> None:
    full(folder, "full-2", *ZBV)
    full(folder, "1-to-2", "parallel.pipeline=2", resumed(folder, "full-1"))
    adapters(folder, "lora-2", *ZBV)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("stages")
    import_models("gpt2")
    (folder / "config.json").write_text(json.dumps(GPT2))
    logits = run_ranks(alone, 1, folder)[0]
    run_ranks(two, 2, folder, timeout=300)
    return folder, logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full-2", "1-to-2", "lora-2"])
def test_stages_record_the_losses_of_one_process(found: tuple[Path, Any], name: str) -> None:
    folder, _ = found
    alone, divided = (
        read_steps(folder / ("lora-1" if "lora" in name else "full-1")),
        read_steps(folder / name),
    )
    assert len(alone) == STEPS and all(norm > 1e-3 for _, _, norm in alone)
    wanted = alone[SAVED:] if "to" in name else alone
    assert [step for step, _, _ in divided] == [step for step, _, _ in wanted]
    for column, most in ((1, 1e-5), (2, 1e-4)):
        assert (
            find_largest_difference(
                [each[column] for each in divided], [each[column] for each in wanted]
            )
            <= most
        )


@pytest.mark.slow
def test_transformers_opens_what_stages_exported(found: tuple[Path, torch.Tensor]) -> None:
    folder, logits = found
    for name in ("full-2", "1-to-2"):
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name / "model", output_loading_info=True
        )
        assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            assert (model(probe(), use_cache=False).logits - logits).abs().max() <= 1e-4


@pytest.mark.slow
def test_peft_opens_the_adapters_of_stages(found: tuple[Path, torch.Tensor]) -> None:
    folder, _ = found
    made = []
    for name in ("lora-1", "lora-2"):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "full-1" / "model")
        model = peft.PeftModel.from_pretrained(base, folder / name / "adapter")
        with torch.no_grad():
            made.append(model(probe(), use_cache=False).logits)
    assert (made[0] - made[1]).abs().max() <= 1e-4


WIDE = {
    "model_type": "qwen3", "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


def quantized(folder: Path, name: str, *more: str) -> None:
    packed = (
        "data.packing=true",
        "data.max_samples=120",
        "lora.quantize_base=nf4",
        "lora.rank=4",
        *more,
    )
    packed += ("tokenizer.path=examples/demo/tokenizer",)
    expect_done(run_here([*words(folder, name, "demo/lora", *packed), "~model.path"], recipe=LORA))


@pytest.mark.slow
def test_quantized_stages_and_packs_record_the_losses_of_one_process(tmp_path: Path) -> None:
    """A rank without the embedding begins with stored numbers of another type."""
    import_models("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    run_ranks(quantized, 1, tmp_path, "alone")
    run_ranks(quantized, 2, tmp_path, "divided", *ZBV, timeout=300)
    alone, divided = read_steps(tmp_path / "alone"), read_steps(tmp_path / "divided")
    assert len(alone) == STEPS
    for column in (1, 2):
        assert (
            find_largest_difference(
                [each[column] for each in divided], [each[column] for each in alone]
            )
            <= 1e-4
        )

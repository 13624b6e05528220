"""Whole LoRA runs on real weights: what they leave loads elsewhere, and goes on from where it
stopped.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.runs import LORA, read_losses, read_steps, run_here

STEPS = 4


def arguments(realdata: Path, output: Path, *overrides: str) -> list[str]:
    """Command line of a run on a text, from weights that are not ours."""
    return [
        "--config",
        str(Path(__file__).parent / "adapters.yaml"),
        f"model.path={realdata / 'stories260K-hf'}",
        f"data.source={realdata / 'datasets' / 'text' / 'tinyshakespeare.txt'}",
        "data.format=text",
        "max_seq_len=128",
        "batch_size=4",
        "dtype=fp32",
        "device=cpu",
        "optimizer.lr=1e-2",
        "lr_scheduler.type=constant",
        "log.every_n_steps=1000",
        f"max_steps={STEPS}",
        f"output_dir={output}",
        *overrides,
    ]


@torch.no_grad()
def logits_here(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model.eval()(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_and_merged_model_load_elsewhere(realdata: Path, tmp_path: Path, kind: str):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dora = f"lora.dora={str(kind == 'dora').lower()}"
    run = run_here(
        arguments(realdata, tmp_path / "run", "lora.merge_on_save=true", dora), recipe=LORA
    )
    assert run.code == 0, run.said
    tokens = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    own = logits_here(run.recipe.model, tokens)
    base = AutoModelForCausalLM.from_pretrained(realdata / "stories260K-hf", dtype=torch.float32)
    plain = base(tokens).logits.detach()
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    largest = own.abs().max()
    assert (own - plain).abs().max() > 0.1  # the adapter does something
    for other in (adapted, merged):
        with torch.no_grad():
            assert (other(tokens).logits - own).abs().max() <= 1e-5 * max(1, largest)


@pytest.mark.slow
def test_an_adapter_is_gone_on_with(realdata: Path, tmp_path: Path):
    """Its first loss is that of the trained model, on the rows of the second run's first step."""
    first = run_here(arguments(realdata, tmp_path / "first"), recipe=LORA)
    assert first.code == 0, first.said
    adapter = tmp_path / "first" / "adapter"
    second = run_here(
        arguments(realdata, tmp_path / "second", f"lora.adapter_path={adapter}"), recipe=LORA
    )
    assert second.code == 0, second.said
    batches = next(first.recipe.data.batches(0))
    with torch.no_grad():
        expected = (
            first.recipe.compute_loss(batches.micro_batches[0]).item() / batches.num_label_tokens
        )
    assert read_losses(tmp_path / "second")[0] == pytest.approx(expected, rel=1e-6)
    assert read_losses(tmp_path / "second")[0] < read_losses(tmp_path / "first")[0] - 0.1


def test_an_adapter_of_another_rank_is_refused(realdata: Path, tmp_path: Path):
    assert run_here(arguments(realdata, tmp_path / "first", "max_steps=1"), recipe=LORA).code == 0
    again = ("lora.rank=4", f"lora.adapter_path={tmp_path / 'first' / 'adapter'}")
    run = run_here(arguments(realdata, tmp_path / "second", *again), recipe=LORA)
    assert run.code == 2
    assert len(run.said) == 1 and "lora.rank" in run.said[0]
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_losses(realdata: Path, tmp_path: Path):
    keep = (
        "checkpoint.save_every_n_steps=2",
        "checkpoint.keep_last_n=9",
        "lora.dora=true",
        "lora.dropout=0.1",
    )
    assert run_here(arguments(realdata, tmp_path / "whole", *keep), recipe=LORA).code == 0
    assert (
        run_here(
            arguments(realdata, tmp_path / "cut", *keep, "checkpoint.save_model=false"), recipe=LORA
        ).code
        == 0
    )
    state = tmp_path / "cut" / "state" / "step_2"
    assert (
        sum(file.stat().st_size for file in state.glob("shard-*")) < 1_500_000
    )  # adapters, no frozen weights
    assert (
        run_here(arguments(realdata, tmp_path / "cut", *keep, f"resume={state}"), recipe=LORA).code
        == 0
    )
    assert read_steps(tmp_path / "cut") == read_steps(tmp_path / "whole")

"""Preference training on real pairs from real weights: the margin rises, and PEFT, given the
adapter that was exported, finds the rewards that the run recorded.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.runs import DPO, Run, read_metrics, run_here

BETA = 0.1
STEPS = 8


def train(realdata: Path, output: Path) -> Run:
    """The pairs that are short enough, those of the first rows in each validation."""
    pairs = realdata / "datasets" / "dpo"
    argv = [
        "--config",
        str(Path(__file__).parent / "pairs.yaml"),
        f"model.path={realdata / 'stories260K-hf'}",
        f"data.source={pairs}",
        f"validation.source={pairs}",
        "validation.every_n_steps=4",
        "validation.max_samples=250",
        "data.truncation=drop",
        "data.cache=false",
        "max_seq_len=256",
        "dtype=fp32",
        "device=cpu",
        "batch_size=4",
        "epochs=100",
        f"max_steps={STEPS}",
        "optimizer.lr=1e-3",
        f"dpo.beta={BETA}",
        f"output_dir={output}",
        "log.every_n_steps=1000",
    ]
    return run_here(argv, recipe=DPO)


def log_prob(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Of the trained targets of one row, by a transformers model."""
    with torch.no_grad():
        log_probs = model(input_ids=tokens.unsqueeze(0)).logits[0].double().log_softmax(-1)
    return sum(
        float(log_probs[at, label]) for at, label in enumerate(labels.tolist()) if label != -100
    )


@pytest.mark.slow
def test_the_margin_rises_and_the_export_has_it(realdata: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    run = train(realdata, tmp_path)
    assert run.code == 0, run.said
    lines = read_metrics(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["reward_margin"] == 0 and steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[-1]["loss"] < 0.5 and steps[-1]["reward_margin"] > 0.5
    middle, last = (line for line in lines if "validation_loss" in line)
    assert 0 < middle["validation_reward_margin"] < last["validation_reward_margin"]
    assert last["validation_loss"] < middle["validation_loss"] < 0.693
    assert last["validation_reward_accuracy"] > 0.8

    rows = run.recipe.data.validation_dataset
    assert rows.items == last["validation_pairs"] > 4
    base = transformers.AutoModelForCausalLM.from_pretrained(
        realdata / "stories260K-hf", dtype=torch.float32
    )
    read = [(torch.from_numpy(rows[at].tokens).long(), rows[at].labels) for at in range(len(rows))]
    before = [log_prob(base, *row) for row in read]
    trained = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    rewards = [
        BETA * (log_prob(trained, *row) - old) for row, old in zip(read, before, strict=True)
    ]
    chosen, rejected = sum(rewards[0::2]) / rows.items, sum(rewards[1::2]) / rows.items
    assert last["validation_reward_chosen"] == pytest.approx(chosen, abs=1e-3)
    assert last["validation_reward_rejected"] == pytest.approx(rejected, abs=1e-3)
    assert last["validation_reward_margin"] == pytest.approx(chosen - rejected, abs=1e-3)

"""A document of 2,048 tokens, trained on by ranks that share it; transformers computes the losses
again.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipe_lib.tokenizers import load_tokenizer
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    FULL,
    ROOT,
    build_story_arguments,
    expect_done,
    keep_latest,
    read_metrics,
    run_here,
)

TOKENS = 2_048  # of each of two documents


def long_run(realdata: Path, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """What a run records, step by step."""
    argv = build_story_arguments(
        realdata,
        folder / name,
        "~model.path",
        f"model.preset={folder / 'tiny.json'}",
        f"tokenizer.path={realdata / 'stories260K-hf'}",
        f"data.source={folder / 'text.txt'}",
        "data.format=text",
        "data.shuffle=false",
        f"max_seq_len={TOKENS}",
        "batch_size=1",
        "lr_scheduler.type=constant",
        "memory.activation_checkpointing=full",
        "memory.loss_chunks=16",
        "memory.mlp_tiles=4",
        "parallel.heartbeat_timeout_seconds=600",
        *overrides,
    )
    expect_done(run_here(keep_latest(*argv), recipe=FULL))
    return [line for line in read_metrics(folder / name) if "loss" in line]


def loss_by_transformers(model: Any, ids: list[int]) -> float:
    """The mean loss of a document's tokens, whose hidden states go through the head in pieces."""
    tokens, total = torch.tensor([ids]), 0.0
    with torch.no_grad():
        hidden = model.model(tokens[:, :-1]).last_hidden_state[0]
        for part, labels in zip(hidden.split(1024), tokens[0, 1:].split(1024), strict=True):
            total += torch.nn.functional.cross_entropy(
                model.lm_head(part), labels, reduction="sum"
            ).item()
    return total / (len(ids) - 1)


@pytest.mark.slow
def test_two_ranks_train_on_it_four_go_on_and_others_open_the_model(
    realdata: Path, tmp_path: Path
) -> None:
    shape = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    shape |= {"num_hidden_layers": 1, "max_position_embeddings": 16384, "initializer_range": 0.1}
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    text = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()[: 16 * TOKENS]
    (tmp_path / "text.txt").write_text(text)
    ids = load_tokenizer(realdata / "stories260K-hf").encode(text, add_bos=True)
    documents = [
        ids[at * TOKENS : (at + 1) * TOKENS + 1] for at in range(2)
    ]  # a target more than there are inputs
    assert len(documents[1]) == TOKENS + 1
    saving = ("checkpoint.save_every_n_steps=1", "checkpoint.save_model=true")
    (first,) = run_ranks(
        long_run,
        2,
        realdata,
        tmp_path,
        "first",
        "max_steps=1",
        "parallel.context=2",
        *saving,
        timeout=900,
    )[0]
    state = tmp_path / "first" / "state" / "step_1"
    (second,) = run_ranks(
        long_run,
        4,
        realdata,
        tmp_path,
        "second",
        "max_steps=2",
        "parallel.context=4",
        f"resume={state}",
        timeout=900,
    )[0]
    assert (first["step"], second["step"]) == (1, 2) and first["label_tokens"] == second[
        "label_tokens"
    ] == TOKENS
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "model")
    assert second["loss"] == pytest.approx(loss_by_transformers(trained, documents[1]), rel=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "model")
    assert loss_by_transformers(again, documents[1]) != loss_by_transformers(trained, documents[1])

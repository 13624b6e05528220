"""Recipes over classes of transformers, in stages whose matrices ranks share: steps and weights of
one process.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.ranks import run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import (
    FULL,
    build_arguments,
    expect_done,
    find_largest_difference,
    keep_latest,
    read_steps,
    run_here,
)

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.1, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
STEPS = 3
SAVED = 2
SHARED = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.pipeline_schedule=zbv",
          "memory.activation_checkpointing=full")  # fmt: skip


def train(folder: Path, output: str, *more: str) -> None:
    words = keep_latest(
        *build_arguments(folder / output), f"model.preset={folder}/llama.json", "model.implementation=transformers",
        "dtype=fp64", "device=cpu", f"max_steps={STEPS}", "batch_size=2", "gradient_accumulation_steps=4",
        "log.every_n_steps=1000", "data.packing=false", "epochs=2", f"checkpoint.save_every_n_steps={SAVED}",
        "optimizer.eps=1e-4", *more,
    )  # fmt: skip
    expect_done(run_here(words, recipe=FULL))


def tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the run on one rank, of four ranks, and of one that goes on from what these have
    saved.
    """
    folder = tmp_path_factory.mktemp("shared-stages")
    import_models("llama")
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    run_ranks(train, 1, folder, "alone", timeout=300)
    run_ranks(train, 4, folder, "four", *SHARED, timeout=300)
    run_ranks(train, 1, folder, "one goes on", f"resume={folder}/four/state/step_{SAVED}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "one goes on"])
def test_steps_and_weights_are_those_of_one_process(found: Path, name: str) -> None:
    one = read_steps(found / "alone")
    several = read_steps(found / name)
    assert len(one) == STEPS and all(norm > 0.05 for _, _, norm in one)
    one = one if name == "four" else one[SAVED:]
    assert [step for step, _, _ in several] == [step for step, _, _ in one]
    for column in (1, 2):
        assert (
            find_largest_difference(
                [each[column] for each in several], [each[column] for each in one]
            )
            <= 1e-9
        )
    right = tensors(found / "alone" / "model")
    ours = tensors(found / name / "model")
    assert right.keys() == ours.keys() and right
    for tensor in right:
        assert (right[tensor] - ours[tensor]).abs().max() <= 1e-9 * right[tensor].abs().max(), (
            tensor
        )

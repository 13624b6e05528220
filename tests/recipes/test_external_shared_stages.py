"""Recipes over classes of transformers, in stages whose matrices ranks share: steps and weights of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.ranks import run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import FULL, arguments, done, furthest, latest, run_here, steps

COMMON = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.1}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_key_value_heads": 2, "tie_word_embeddings": False},
    # Another embedding, tied, and linears that are transposed.
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
}  # fmt: skip
STEPS, SAVED = 3, 2
SHARED = ("parallel.pipeline=2", "parallel.tensor=2")
RUNS: dict[str, tuple[str, ...]] = {
    "llama zbv": ("parallel.pipeline_schedule=zbv", "memory.activation_checkpointing=full"),
    "gpt2": ("parallel.pipeline_schedule=interleaved_1f1b",),
}


def train(folder: Path, kind: str, output: str, *more: str) -> None:
    words = latest(
        *arguments(folder / output), f"model.preset={folder}/{kind}.json", "model.implementation=transformers",
        "dtype=fp64", "device=cpu", f"max_steps={STEPS}", "batch_size=2", "gradient_accumulation_steps=4",
        "log.every_n_steps=1000", "data.packing=false", "epochs=2", f"checkpoint.save_every_n_steps={SAVED}",
        "optimizer.eps=1e-4", *more,
    )  # fmt: skip
    done(run_here(words, recipe=FULL))


def alone(folder: Path) -> None:
    for kind, config in CONFIGS.items():
        (folder / f"{kind}.json").write_text(json.dumps(COMMON | config | {"model_type": kind}))
        train(folder, kind, f"{kind} alone")


def four(folder: Path) -> None:
    for name, more in RUNS.items():
        train(folder, name.split()[0], name, *SHARED, *more)


def alone_again(folder: Path) -> None:
    train(folder, "llama", "llama on", f"resume={folder}/llama zbv/state/step_{SAVED}")


def tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared-stages")
    import_models(*CONFIGS)
    run_ranks(alone, 1, folder, timeout=300)
    run_ranks(four, 4, folder, timeout=300)
    run_ranks(alone_again, 1, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, "llama on"])
def test_steps_and_weights_are_those_of_one_process(found: Path, name: str) -> None:
    kind = name.split()[0]
    one, several = steps(found / f"{kind} alone"), steps(found / name)
    assert len(one) == STEPS and all(norm > 0.05 for _, _, norm in one)
    one = one[SAVED:] if name.endswith("on") else one
    assert [step for step, _, _ in several] == [step for step, _, _ in one]
    for column in (1, 2):
        assert furthest([each[column] for each in several], [each[column] for each in one]) <= 1e-9
    right, ours = tensors(found / f"{kind} alone" / "model"), tensors(found / name / "model")
    assert right.keys() == ours.keys() and right
    for tensor in right:
        assert (right[tensor] - ours[tensor]).abs().max() <= 1e-9 * right[tensor].abs().max(), tensor

"""`compile` with `parallel.tensor` for classes of transformers: the steps of one process that
compiles nothing.
"""

import functools
import json
from pathlib import Path

import pytest

from recipe_lib.memory import apply_levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import (
    LORA,
    build_arguments,
    expect_done,
    find_largest_difference,
    keep_latest,
    read_steps,
    run_here,
)

COMMON = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT_NEOX = WIDE | {"model_type": "gpt_neox", "hidden_dropout": 0.0, "attention_dropout": 0.0}
LEVERS = ("lora.dora=true", "lora.quantize_base=nf4", "lora.dropout=0", "lora.rank=4")


def train(folder: Path, name: str, *more: str) -> None:
    words = [
        *build_arguments(folder / name, "demo/lora"), "~model.path", f"model.preset={folder}/gpt_neox.json",
        "tokenizer.path=examples/demo/tokenizer", "model.implementation=transformers", "dtype=fp32", "device=cpu",
        "max_steps=3", "batch_size=4", "log.every_n_steps=1000", "data.packing=false", "gradient_accumulation_steps=2",
        "data.pad_to_multiple_of=64", "optimizer.lr=1e-2", "optimizer.eps=1e-4",
    ]  # fmt: skip
    expect_done(run_here(keep_latest(*words, *LEVERS, *more), recipe=LORA))


def train_compiled(folder: Path) -> None:
    apply_levers.compile_layers = functools.partial(apply_levers.compile_layers, backend="eager")
    train(folder, "compiled", "parallel.tensor=2", "compile=true")


@pytest.mark.slow
def test_two_ranks_record_what_one_process_does(tmp_path: Path) -> None:
    import_compiler()
    import_models("gpt_neox")
    (tmp_path / "gpt_neox.json").write_text(json.dumps(COMMON | GPT_NEOX))
    run_ranks(train, 1, tmp_path, "alone", timeout=300)
    run_ranks(train_compiled, 2, tmp_path, timeout=500)
    one = read_steps(tmp_path / "alone")
    several = read_steps(tmp_path / "compiled")
    assert len(one) == len({loss for _, loss, _ in one}) == 3 and all(
        norm > 0.01 for _, _, norm in one
    )
    for column in (1, 2):
        assert (
            find_largest_difference(
                [line[column] for line in several], [line[column] for line in one]
            )
            <= 1e-4
        )

"""`compile` with `parallel.tensor` for classes of transformers: the steps of one process that compiles nothing."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.memory import apply_levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import DPO, FULL, LORA, arguments, done, latest, metrics, offload_on_a_cpu, run_here
from tests.recipes.test_dpo import write_pairs

COMMON = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.1}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": WIDE | {"num_key_value_heads": 2, "head_dim": 32},
    "gpt_neox": WIDE | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
CONFIG = {FULL: "demo/full", LORA: "demo/lora", DPO: str(Path(__file__).parent / "pairs.yaml")}
# Name -> recipe, model, settings of one process and of ranks, and of ranks alone.
Case = tuple[str, str, tuple[str, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "dora nf4": (LORA, "gpt_neox", ("lora.dora=true", "lora.quantize_base=nf4", "lora.dropout=0"), ()),
}
ON_FOUR: dict[str, Case] = {
    "stages": (FULL, "qwen3", (), ("parallel.pipeline=2",)),
}
SINGLE = ("dora nf4",)  # what is quantized is computed with in float32


def train(folder: Path, case: str, settings: Case, *more: str) -> None:
    """The run named `case` and, on several ranks, ` compiled`."""
    recipe, kind, both, of_ranks = settings
    data_ranks = 2 if more and "parallel.data_replicate=2" in of_ranks else 1
    output = folder / (f"{case} compiled" if more else case)
    data = (f"data.source={folder / 'pairs.jsonl'}", "data.template=plain", "data.cache=false")
    data = (*data, f"validation.source={folder / 'pairs.jsonl'}", "validation.format=preference")
    words = [word for word in arguments(output, CONFIG[recipe]) if word != "~validation" or recipe != DPO]
    words += ["~model.path"] if recipe == LORA else []
    words += [f"model.preset={folder / kind}.json", "tokenizer.path=examples/demo/tokenizer",
              "model.implementation=transformers", f"dtype={'fp32' if case in SINGLE else 'fp64'}", "device=cpu",
              "max_steps=3", f"batch_size={4 // data_ranks}", "log.every_n_steps=1000", "data.packing=false",
              "gradient_accumulation_steps=2", "data.pad_to_multiple_of=64",
              "optimizer.lr=1e-2", "optimizer.eps=1e-4",
              *(("lora.rank=4",) if recipe != FULL else ()), *(data if recipe == DPO else ())]  # fmt: skip
    done(run_here(latest(*words, *both, *(of_ranks if more else ()), *more), recipe=recipe))
    torch._dynamo.reset()


def alone(folder: Path, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        train(folder, name, case)


def compiled(folder: Path, cases: dict[str, Case]) -> None:
    offload_on_a_cpu()
    apply_levers.compile_layers = functools.partial(apply_levers.compile_layers, backend="eager")
    for name, case in cases.items():
        train(folder, name, case, "parallel.tensor=2", "compile=true")


def check(folder: Path, cases: dict[str, Case], ranks: int) -> None:
    import_compiler()
    import_models(*{case[1] for case in cases.values()})
    for kind, config in MODELS.items():
        (folder / f"{kind}.json").write_text(json.dumps(COMMON | config | {"model_type": kind}))
    write_pairs(folder)
    run_ranks(alone, 1, folder, cases, timeout=300)
    run_ranks(compiled, ranks, folder, cases, timeout=500)
    for name in cases:
        limit = 1e-4 if name in SINGLE else 1e-9
        one, several = (metrics(folder / each) for each in (name, f"{name} compiled"))
        trained = [line["loss"] for line in one if "loss" in line]
        assert len(one) == len(several) and len(set(trained)) == len(trained) > 1
        assert all(line["grad_norm"] > 0.01 for line in one if "grad_norm" in line), name
        for line, wanted in zip(several, one, strict=True):
            found = {key for key in ("loss", "grad_norm", "reward_margin", "validation_loss") if key in wanted}
            for key in found:
                assert line[key] == pytest.approx(wanted[key], rel=limit), (name, key, line["step"])
            assert found


@pytest.mark.slow
def test_two_ranks_record_what_one_process_does(tmp_path: Path) -> None:
    check(tmp_path, CASES, 2)


@pytest.mark.slow
def test_four_ranks_record_what_one_process_does(tmp_path: Path) -> None:
    check(tmp_path, ON_FOUR, 4)

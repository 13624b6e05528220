"""Recipes over models of transformers' own classes: two ranks as one, and folders that transformers
and PEFT open.
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
    DPO,
    FULL,
    LORA,
    build_arguments,
    find_largest_difference,
    gather_whole,
    read_losses,
    read_steps,
    run_here,
)
from tests.selection import mark_slow_except, select_cases

COMMON = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Untied with head norms; fused projections; experts that are apart in its files.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    "phi3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "original_max_position_embeddings": 4096},
    "mixtral": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
STEPS = 3


def probe() -> torch.Tensor:
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


# Of the runs on two ranks; one model shares matrices, by a plan that nobody wrote.
SHARDED = ("memory.activation_checkpointing=full", "parallel.fsdp_wrap_policy=memory_efficient")
TENSOR = "parallel.tensor=2"
LEVERS = {
    "qwen3": SHARDED,
    "phi3": ("memory.activation_checkpointing=full", TENSOR),
    "mixtral": SHARDED,
}


def data_ranks(kind: str, ranks: int) -> int:
    return 1 if TENSOR in LEVERS[kind] else ranks


def prefer(folder: Path, ranks: int) -> None:
    """Adapters trained on preferences."""
    rows = [
        {"prompt": f"Say {word}", "chosen": f"{word} it is", "rejected": "no"}
        for word in ("one", "two") * 4
    ]
    pairs = folder / f"pairs{ranks}{torch.distributed.get_rank()}.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)))
    words = ["recipe=dpo_distributed", f"model.path={folder}/phi3-1/model", "model.implementation=transformers",
             "dtype=fp32", "device=cpu", "data.format=preference", f"data.source={pairs}", "dpo.beta=0.5",
             "tokenizer.path=examples/demo/tokenizer", "optimizer.lr=1e-2", "max_steps=4", "epochs=4", "max_seq_len=64",
             "batch_size=8", "lora.rank=4", f"output_dir={folder}/pairs-{ranks}"]  # fmt: skip
    run = run_here(
        ["--config", str(Path(__file__).parent / "pairs.yaml"), *words, f"parallel.tensor={ranks}"],
        recipe=DPO,
    )
    assert run.code == 0, run.said


def train(folder: Path, ranks: int, kinds: list[str]) -> dict[str, torch.Tensor]:
    """Each model wholly trained from random weights, then adapters beside what came out of one
    rank's run.
    """
    logits = {}
    for kind in kinds:
        common = (
            "model.implementation=transformers", "dtype=fp32", "device=cpu", f"max_steps={STEPS}",
            f"batch_size={4 // data_ranks(kind, ranks)}", "log.every_n_steps=1000", "data.packing=false",
        )  # fmt: skip
        start = f"model.preset={folder / kind}/config.json"
        plain = [
            *build_arguments(folder / f"{kind}-{ranks}"),
            start,
            *common,
            *(LEVERS[kind] if ranks > 1 else ()),
        ]
        run = run_here(plain, recipe=FULL)
        assert run.code == 0, run.said
        with torch.no_grad():
            logits[kind] = gather_whole(run.recipe.model(probe()))
        base = (
            "~model.preset",
            f"model.path={folder}/{kind}-1/model",
            "optimizer.lr=1e-2",
            "lora.rank=4",
        )
        tensor = [f"parallel.tensor={ranks // data_ranks(kind, ranks)}"]
        adapted = [
            *build_arguments(folder / f"{kind}-{ranks}-lora", "demo/lora"), *common, *base, *tensor,
        ]  # fmt: skip
        run = run_here(adapted, recipe=LORA)
        assert run.code == 0, run.said
        with torch.no_grad():
            logits[f"{kind}-lora"] = gather_whole(run.recipe.model(probe()))
    if "phi3" in kinds:
        prefer(folder, ranks)
    return logits


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("external")
    for kind, config in MODELS.items():
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(
            json.dumps(COMMON | config | {"model_type": kind})
        )
    kinds = select_cases(request, "kind")
    import_models(*kinds)
    return folder, {
        ranks: run_ranks(train, ranks, folder, ranks, kinds, timeout=300)[0] for ranks in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
def test_several_ranks_give_the_losses_of_one(runs: tuple[Path, Any], kind: str):
    folder, _ = runs
    for suffix in ("", "-lora"):
        one, two = (read_steps(folder / f"{kind}-{size}{suffix}") for size in (1, 2))
        assert len(one) == STEPS and all(norm > 0.1 for _, _, norm in one)
        assert (
            find_largest_difference([loss for _, loss, _ in two], [loss for _, loss, _ in one])
            <= 1e-5
        )
        assert (
            find_largest_difference([norm for _, _, norm in two], [norm for _, _, norm in one])
            <= 1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
def test_transformers_opens_the_model(runs: tuple[Path, Any], kind: str):
    folder, logits = runs
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"{kind}-2/model", output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert (model(probe(), use_cache=False).logits - logits[2][kind]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", mark_slow_except(["qwen3", "phi3"], ["qwen3"]))
def test_peft_opens_the_adapter(runs: tuple[Path, Any], kind: str):
    folder, logits = runs
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-1/model")
    model = peft.PeftModel.from_pretrained(base, folder / f"{kind}-2-lora/adapter")
    with torch.no_grad():
        found = model(probe(), use_cache=False).logits
    assert (found - logits[2][f"{kind}-lora"]).abs().max() <= 1e-5
    assert (found - logits[1][kind]).abs().max() > 1e-2
    names = {
        name.rsplit(".lora_", 1)[0] for name, _ in model.named_parameters() if ".lora_A." in name
    }
    assert len(names) == {"qwen3": 14, "phi3": 8}[kind]


@pytest.mark.parametrize("kind", ["qwen3"])
def test_an_adapter_goes_on_beside_quantized_weights(
    runs: tuple[Path, Any], tmp_path: Path, kind: str
):
    """QLoRA and a folder's adapter: the run begins with what the adapter changes."""
    folder, _ = runs
    words = ["model.implementation=transformers", "~model.preset", f"model.path={folder}/{kind}-1/model", "dtype=fp32",
             "device=cpu", "max_steps=1", "lora.rank=4"]  # fmt: skip
    first = {}
    for name, more in (("new", []), ("old", [f"lora.adapter_path={folder}/{kind}-1-lora/adapter"])):
        run = run_here(
            [
                *build_arguments(tmp_path / name, "demo/lora"),
                *words,
                "lora.quantize_base=int8",
                *more,
            ],
            recipe=LORA,
        )
        assert run.code == 0, run.said
        first[name] = read_losses(tmp_path / name)[0]
    assert first["old"] < first["new"] - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3"])
def test_preferences(runs: tuple[Path, Any], kind: str):
    """The reference is the model with its adapters off, by the same plan where matrices are
    shared.
    """
    folder, _ = runs
    found = {size: read_losses(folder / f"pairs-{size}") for size in (1, 2)}
    assert found[1][0] == pytest.approx(0.6931, abs=1e-3) and found[1][-1] < found[1][0] - 0.05
    assert find_largest_difference(found[2], found[1]) <= 1e-5


def test_names_of_no_linear_are_refused(tmp_path: Path):
    """Those of a native model's linears are known from the config; those of another model, when it
    is built.
    """
    run = run_here(
        [*build_arguments(tmp_path / "out", "demo/lora"), "lora.target_modules=[c_attn]"],
        recipe=LORA,
    )
    assert (
        run.code == 2
        and "lora.target_modules: found 'c_attn', expected a list [...] of q, k" in run.said[-1]
    ), run.said
    run = run_here(
        [
            *build_arguments(tmp_path / "out", "demo/lora"),
            "~model.path",
            "model.implementation=transformers",
            "lora.target_modules=[c_at]",
            "tokenizer.path=examples/demo/tokenizer",
        ],
        recipe=LORA,
    )
    assert (
        run.code == 2
        and "'c_at' is the end of no linear of this model; its linears end in down_proj"
        in run.said[-1]
    )

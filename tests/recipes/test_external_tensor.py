"""Adapters beside frozen weights of other kinds, in models of transformers by inferred plans: as in
one process.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.recipes.external_kinds import import_models
from tests.recipes.runs import (
    LORA,
    build_arguments,
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
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": WIDE | {"num_key_value_heads": 2, "head_dim": 32},
    "phi3": WIDE | {"num_key_value_heads": 2},  # gate and up in one
}
LEVERS: dict[str, tuple[str, ...]] = {
    "dora": ("lora.dora=true",),
    "nf4, sharded": ("lora.quantize_base=nf4", "memory.activation_checkpointing=full"),
    # Of matrices that read all tokens whole, of which ranks draw the same numbers as one process.
    "dropout": (
        "lora.dropout=0.2",
        "lora.target_modules=[q_proj, v_proj]",
        "data.pad_to_multiple_of=2",
    ),
}
CASES = [
    ("phi3", "dora"),
    # Queries, keys and values stay whole, and attention with them; gate and up are equal runs.
    ("phi3", "nf4, sharded"),
    ("qwen3", "nf4, sharded"),
    ("qwen3", "dropout"),
]


def write_config(folder: Path, kind: str) -> None:
    """Before there are ranks, one of which would read what another one is about to write."""
    import_models(kind)
    (folder / f"{kind}.json").write_text(json.dumps(COMMON | MODELS[kind] | {"model_type": kind}))


def words(folder: Path, kind: str, lever: str, ranks: int, tensor: int) -> list[str]:
    config = folder / f"{kind}.json"
    base = [*build_arguments(folder / f"{kind}-{lever}-{ranks}-{tensor}", "demo/lora"), "~model.path",
            f"model.preset={config}", "tokenizer.path=examples/demo/tokenizer",
            "model.implementation=transformers", "dtype=fp32", "device=cpu", "max_steps=3",
            f"batch_size={4 * tensor // ranks}", "log.every_n_steps=1000", "data.packing=false", "optimizer.lr=1e-2",
            "lora.rank=4", f"parallel.tensor={tensor}"]  # fmt: skip
    return keep_latest(*base, *LEVERS[lever])


def train(folder: Path, kind: str, lever: str, ranks: int, tensor: int) -> None:
    run = run_here(words(folder, kind, lever, ranks, tensor), recipe=LORA)
    assert run.code == 0, run.said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_losses_are_those_of_one_process(case: tuple[str, str], tmp_path: Path) -> None:
    kind, lever = case
    ranks = 4 if "sharded" in lever else 2
    write_config(tmp_path, kind)
    run_ranks(train, 1, tmp_path, kind, lever, 1, 1)
    run_ranks(train, ranks, tmp_path, kind, lever, ranks, 2, timeout=300)
    one, several = (
        read_steps(tmp_path / f"{kind}-{lever}-{size}") for size in ("1-1", f"{ranks}-2")
    )
    assert len(one) == 3 and one[-1][1] < one[0][1] and all(norm > 0.05 for _, _, norm in one)
    for at, limit in ((1, 1e-5), (2, 1e-4)):
        assert (
            find_largest_difference([line[at] for line in several], [line[at] for line in one])
            <= limit
        )


def test_a_quantized_product_is_one_call() -> None:
    """To whatever watches calls, as an inferred plan does; with the result that it has alone."""
    from torch import nn
    from torch.overrides import TorchFunctionMode

    from recipe_lib.adapters.quantized import QuantizedLinear

    class Names(TorchFunctionMode):
        seen: list[str] = []

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    module = QuantizedLinear(nn.Linear(64, 64, device="meta"), "nf4").to_empty(device="cpu")
    weight = torch.randn(64, 64)
    module.fill_weight(lambda start, stop, columns: weight[start:stop, columns])
    torch.nn.init.zeros_(module.bias)
    hidden = torch.randn(3, 64)
    with Names() as names:
        watched = module(hidden)
    assert names.seen[-1] == "linear" and names.seen.count("linear") == 1
    assert torch.equal(watched, module(hidden)) and (watched - hidden @ weight.t()).abs().max() < 3

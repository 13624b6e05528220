"""Measure what a layer of Llama 3 8B keeps for backward, beside plan, formula and transformers.

    python -m benchmarks.kept_bytes --output docs/measurements/kept_bytes.md

Layers have the model's real widths, in bf16 on the CPU, with a small vocabulary. Each figure is the
difference of a model of two layers and one of one, in bytes a token that are alive between forward
and backward. Takes about two minutes and 4 GiB of memory.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import torch
import transformers

from benchmarks.tables import format_markdown_table
from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.models import build_meta, build_spec, read_preset_config
from tests.memory.kept_formula import Adapters, count_kept_bytes
from tests.memory.live_bytes import LiveBytes
from tests.memory.test_kept_bytes import plan_kept_bytes

PRESET = "llama3/8B"
RANK = 16  # of adapters on all seven linears
ROWS = 1
LENGTH = 64
PLANNED_TOKENS = 128  # of `plan_kept_bytes`
VOCABULARY = 128
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = """# Kept for backward by a layer of Llama 3 8B

For whoever wants to know how many bytes of a token a layer keeps, and how that was counted.

    python -m benchmarks.kept_bytes --output docs/measurements/kept_bytes.md

A model of two layers less one of one layer, with the real widths, in bf16 on a CPU, {rows} x \
{length} tokens; storages that forward made and that are alive when it ends. The plan is that of a \
GPU, whose norms keep two numbers of fp32 a token where a CPU's keep none, and whose attention keeps \
a random state. transformers' norms are several operators here, whose results in fp32 are kept; on a \
GPU kernels that replace them, such as liger-kernel's, keep less. torch {torch}, transformers {transformers} with sdpa, PEFT {peft}. \
[memory.md](../memory.md) has the formulas.

"""


def main() -> None:
    """Write the page, and print its table."""
    parser = argparse.ArgumentParser(
        description="Measure what a layer of Llama 3 8B keeps for backward.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    table = format_markdown_table(["bytes of a token and layer", "full", "LoRA, rank 16"], rows())
    head = TEXT.format(
        rows=ROWS,
        length=LENGTH,
        torch=torch.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
    )
    output.write_text(head + table + "\n")
    print(table)


def rows() -> list[list[str]]:
    """Return the rows of the page's table: what is counted, all weights trained, adapters."""
    counts = {
        "plan of a GPU": [count_planned(rank) for rank in (None, RANK)],
        "formula for a GPU": [count_by_formula(rank, on_gpu=True) for rank in (None, RANK)],
        "formula for a CPU": [count_by_formula(rank) for rank in (None, RANK)],
        "run on a CPU": [measure(build_ours, rank) for rank in (None, RANK)],
        "`memory.recompute_cheap=false`, run on a CPU": [
            measure(build_keeping, rank) for rank in (None, RANK)
        ],
        "transformers and PEFT, run on a CPU": [
            measure(build_transformers, rank) for rank in (None, RANK)
        ],
    }
    ours = counts["run on a CPU"]
    theirs = counts["transformers and PEFT, run on a CPU"]
    shares = [f"{mine / other:.3f}" for mine, other in zip(ours, theirs, strict=True)]
    lines = [[name, *(f"{count:,.0f}" for count in numbers)] for name, numbers in counts.items()]
    return [*lines, ["run of ours over that of transformers and PEFT", *shares]]


def read_config(layers: int) -> dict[str, Any]:
    """Return the model's config.json with so many layers and the small vocabulary."""
    return read_preset_config(PRESET) | {"num_hidden_layers": layers, "vocab_size": VOCABULARY}


def count_by_formula(rank: int | None, on_gpu: bool = False) -> float:
    """Return the bytes of a token by the formula. rank: of adapters; None: all is trained."""
    adapters = None if rank is None else Adapters(rank)
    spec = cast(Any, build_spec(read_config(2), PRESET))
    tokens = ROWS * LENGTH
    return count_kept_bytes(spec, 1, tokens, adapters=adapters, on_gpu=on_gpu) / tokens


def count_planned(rank: int | None) -> float:
    """Return the bytes of a token in the table of a plan. rank: see `count_by_formula`."""
    with tempfile.TemporaryDirectory() as folder:
        _, kept = plan_kept_bytes(PRESET, rank, Path(folder))
    return kept[""] / PLANNED_TOKENS


def build_ours(layers: int, rank: int | None, recomputes: bool = True) -> Any:
    """Return our model, without values. recomputes: `memory.recompute_cheap`."""
    model: Any = build_meta(cast(Any, build_spec(read_config(layers), PRESET)), torch.bfloat16)
    if rank is not None:
        settings = LoraConfig(rank=rank, target_modules=["all-linear"])
        add_adapters(model, settings, torch.bfloat16)
    model = model.to_empty(device="cpu")
    memory = SimpleNamespace(recompute_cheap=recomputes, activation_checkpointing="none")
    recompute_cheap_tensors(model, cast(Any, SimpleNamespace(memory=memory, compile=False)))
    return model


def build_keeping(layers: int, rank: int | None) -> Any:
    """Return our model without what is computed again."""
    return build_ours(layers, rank, recomputes=False)


def build_transformers(layers: int, rank: int | None) -> Any:
    """Return the model of transformers, with PEFT's adapters, without values."""
    config = transformers.LlamaConfig(**read_config(layers), attn_implementation="sdpa")
    config.use_cache = False
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    # `to_empty` leaves the tables of rotary embeddings without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if rank is None:
        return model
    settings = peft.LoraConfig(r=rank, target_modules=LINEARS)
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def measure(build: Callable[[int, int | None], Any], rank: int | None) -> float:
    """Return the bytes of a token that one layer more keeps alive between forward and backward."""
    kept = []
    for layers in (2, 1):
        model = build(layers, rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
        with torch.no_grad():
            model.train()(tokens, labels=tokens)  # makes tables that stay
        with LiveBytes() as live:
            output = model(tokens, labels=tokens)
            gc.collect()
            kept.append(live.count_bytes())
        del output, model
    return (kept[0] - kept[1]) / (ROWS * LENGTH)


if __name__ == "__main__":
    main()

"""Measure what a layer keeps for backward by an inferred plan, beside the library's decoder.

Run `python -m benchmarks.inferred_tp_memory --output docs/measurements/inferred_tp_memory.md`. An
inferred plan says how the tensors of transformers' own class are divided over tensor-parallel
ranks, without a line about that model. Models run forward as rank 0 of t on a simulated device,
whose tensors have sizes and no bytes.
"""

import argparse
import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.tp_memory import Tracker, build_spec_of_layers
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ModelConfig, ParallelConfig
from recipe_lib.external.module_spec import read_spec
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.models import build_meta, read_preset_config
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import shard_tensors
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.simulated_world.simulated_ranks import (
    apply_patches,
    enter_simulated_world,
    patch_document_search,
    use_fake_tensors,
)
from recipe_lib.units import MIB

COMMAND = "python -m benchmarks.inferred_tp_memory --output docs/measurements/inferred_tp_memory.md"
MODELS = ("llama3/8B", "llama3/70B", "qwen3/8B", "phi3/mini", "gemma2/27B")
SIZES = (2, 4, 8)
# Numbers of layers of which bytes are counted; the difference is of layers alone.
MORE = 4
FEWER = 2
TOKENS = 8192  # of a forward


def measure_alive(
    name: str, layers: int, size: int, implementation: str, regather: str = "true", rows: int = 1
) -> int:
    """Return the bytes that a forward with its loss leaves alive on rank 0, besides parameters.

    name: of a preset. size: tensor-parallel ranks. implementation: `native` (the library's decoder)
    or `transformers`. regather: `true` if gathered tokens are gathered again in backward, `false`
    if they are kept. rows: sequences that the tokens are divided into.
    """
    config = read_preset_config(name) | {"num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    spec: Any
    if implementation == "transformers":
        spec = read_spec(config, name, implementation)
    else:
        spec = build_spec_of_layers(name, layers)
    parallel = ParallelConfig(tensor=size, tensor_regather_in_backward=regather)
    memory = MemoryConfig(activation_checkpointing="none")
    # A row is one document, for which transformers makes no mask where it can read positions.
    unpacked = FullFinetuneConfig(model=ModelConfig(implementation=implementation))
    with (
        enter_simulated_world(parallel, 0, size) as world,
        use_fake_tensors(),
        apply_patches(patch_document_search(unpacked, 1)),
    ):
        model: Any = build_meta(spec, torch.bfloat16)
        shard_tensors(model, parallel=parallel, memory=memory, world=world)
        recompute_cheap_tensors(model, FullFinetuneConfig(parallel=parallel, memory=memory))
        model.to_empty(device=NAME)
        tokens = torch.zeros(rows, TOKENS // rows, dtype=torch.int64, device=NAME)
        tracker = Tracker()
        with tracker:
            loss = model(tokens, labels=tokens, head_loss=CrossEntropy(8))
            gc.collect()  # tensors in reference cycles would count as alive
            alive = tracker.measure_alive()  # while the loss holds its graph
        del loss
    return alive


def measure_kept(name: str, size: int, implementation: str, regather: str = "true") -> int:
    """Return the bytes that a layer keeps for backward, by the difference of MORE and FEWER."""
    alive = {
        layers: measure_alive(
            name, layers=layers, size=size, implementation=implementation, regather=regather
        )
        for layers in (MORE, FEWER)
    }
    return (alive[MORE] - alive[FEWER]) // (MORE - FEWER)


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold the bytes that a layer of a model keeps for backward."""

    name: str  # of the model's preset
    size: int  # tensor-parallel ranks
    native: int  # in the library's decoder
    inferred: int  # by the inferred plan
    whole: int  # by the inferred plan, with gathered tokens kept


def build_page(rows: list[Row]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# What a layer keeps by an inferred tensor-parallel plan",
        "",
        (
            f"Made by `{COMMAND}`: transformers' own class of each model, of its real widths, as"
            f" rank 0 of t on the simulated device; b = 1, s = {TOKENS}, bf16, attention by torch's"
            f" kernels, no activation checkpointing. Bytes alive when backward would begin, {MORE}"
            f" layers less {FEWER}. **native** is the library's decoder, counted alike: the bytes"
            " of [tp_memory.md](tp_memory.md) without those of random states; **kept whole** is"
            " `parallel.tensor_regather_in_backward=false`: what autograd asks for, gathered"
            " tokens included. Gemma 2 caps the scores of attention, which transformers computes"
            " one by one: they are kept."
        ),
        "",
        "| model | t | native MiB | inferred plan MiB | ratio | kept whole MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row.name, str(row.size), f"{row.native / MIB:.1f}", f"{row.inferred / MIB:.1f}"]
        cells += [f"{row.inferred / row.native:.3f}", f"{row.whole / MIB:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        description="Measure what a layer keeps for backward by an inferred tensor-parallel plan.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="the page")
    parser.add_argument("--models", nargs="+", default=MODELS, help="presets")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        for size in SIZES:
            row = Row(
                name=name,
                size=size,
                native=measure_kept(name, size, "native"),
                inferred=measure_kept(name, size, "transformers"),
                whole=measure_kept(name, size, "transformers", regather="false"),
            )
            rows.append(row)
            print(row, f"{row.inferred / row.native:.3f}", flush=True)
    if arguments.output:
        arguments.output.write_text(build_page(rows), encoding="utf-8")
    else:
        print(build_page(rows))


if __name__ == "__main__":
    main()

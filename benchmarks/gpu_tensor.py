"""Measure tensor parallelism on one GPU, torch's DTensor styles beside ours, as rank 0 of t.

`python benchmarks/gpu_check.py tensor` calls `main`; without a GPU it is a dry run. A case is some
layers of a model's widths, a number of ranks and a mode of checkpointing; each implementation of it
runs in a process of its own. The fake process group moves nothing: values mean nothing, memory is a
real rank's, and seconds are of compute alone.
"""

import argparse
import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_check import REPOSITORY, describe_device, record_time, run_apart
from benchmarks.gpu_plan_report import name_device, write_pair
from benchmarks.tables import format_markdown_table
from benchmarks.tp_memory import (
    CACHED,
    OURS,
    STOCK,
    build_spec_of_layers,
    change_layer,
    is_recomputing,
    parallelize_stock_layer,
)
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.models import build_meta
from recipe_lib.parallel import shard_tensors, start_world
from recipe_lib.units import MIB

LAYERS = 4  # of each model, enough for peaks of layers
TOKENS = 8192  # of a step
DRY_TOKENS = 64  # of a step without a GPU
REPEATS = 5  # of which the fastest counts
WARM_UP_STEPS = 2
# (model, ranks that share its matrices, mode of activation checkpointing)
CASES = list(product(("llama3/8B", "llama3/70B"), (2, 4, 8), ("none", "full")))
DRY_CASES = [("demo/0.5M", 2, "none")]
# torch's DTensor styles; ours, with gathered tokens kept for backward; ours, gathering them again.
IMPLEMENTATIONS = (STOCK, CACHED, OURS)


def main(words: list[str]) -> int:
    """Run all cases and write the report after each. Return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py tensor",
        description="Measure tensor parallelism, torch's DTensor styles beside ours.",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    options = parser.parse_args(words)
    device = run_apart(describe_device, 60)
    rows: list[dict[str, Any]] = []
    has_failed = False
    for model, size, mode in CASES if device.get("type") == "cuda" else DRY_CASES:
        results = {}
        for implementation in IMPLEMENTATIONS:
            measure_case = functools.partial(
                measure, model, size, mode=mode, implementation=implementation
            )
            results[implementation] = run_apart(measure_case, 90)
            if "failed" in results[implementation]:
                has_failed = True
        rows.append({"model": model, "tensor": size, "checkpointing": mode, "ways": results})
        print(" ".join(build_row(rows[-1])), flush=True)
        write_report(rows, device, options.output)
    return 1 if has_failed else 0


def measure(name: str, size: int, *, mode: str, implementation: str) -> dict[str, Any]:
    """Measure forward and backward over the layers, in this process.

    name: of the model. size: ranks that share its matrices. mode: of activation checkpointing.
    implementation: one of IMPLEMENTATIONS. Returns `peak`, bytes beyond those before the step (0 on
    a CPU), and `seconds`, both of a step.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    parallel = ParallelConfig(tensor=size)
    world_cfg = FullFinetuneConfig(parallel=parallel)
    with start_world(world_cfg) as world, change_layer(implementation):
        spec = build_spec_of_layers(name, LAYERS)
        tokens = TOKENS if world.device.type == "cuda" else DRY_TOKENS
        if implementation == CACHED:
            # Ours, but what forward has gathered is kept for backward.
            parallel = replace(parallel, tensor_regather_in_backward="false")
        model = build_meta(spec, torch.bfloat16)
        memory = MemoryConfig(
            activation_checkpointing=mode, recompute_cheap=is_recomputing(implementation)
        )
        if implementation == STOCK:
            for layer in model.model.layers:
                parallelize_stock_layer(layer, world)
        else:
            shard_tensors(model, parallel=parallel, memory=memory, world=world)
        recompute_cheap_tensors(model, FullFinetuneConfig(parallel=parallel, memory=memory))
        apply_activation_checkpointing(model, mode)
        layers = model.model.layers.to_empty(device=world.device)
        with torch.no_grad():
            for parameter in layers.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.normal_(0, 0.02)
        # torch's styles shard dimension 1 of [batch, tokens, width]; ours take [tokens, width].
        hidden_shape = (tokens // size, spec.width)
        if implementation == STOCK:
            hidden_shape = (1, *hidden_shape)
        return _time_model(model, hidden_shape=hidden_shape, tokens=tokens, device=world.device)


def _time_model(
    model: Any, *, hidden_shape: tuple[int, ...], tokens: int, device: torch.device
) -> dict[str, Any]:
    """Time forward and backward over the layers, and measure the last repeat's peak.

    hidden_shape: of a rank's part of the tokens. tokens: of all ranks. Returns what `measure` does.
    """
    hidden = torch.randn(hidden_shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    rotation = model.model.rotary[0](torch.arange(tokens, device=device).unsqueeze(0))
    attention_inputs = model.model.prepare(
        None, rows=1, queries=tokens, keys=tokens, dtype=torch.bfloat16, device=device
    )
    gradient = torch.randn_like(hidden)
    module = torch.get_device_module(device)
    seconds: list[float] = []
    peak = 0
    for _ in range(WARM_UP_STEPS + REPEATS):
        # Gradients are part of the peak, so they are not kept from the repeat before.
        for parameter in model.model.layers.parameters():
            parameter.grad = None
        hidden.grad = None
        bytes_before = 0
        if device.type == "cuda":
            module.reset_peak_memory_stats(device)
            bytes_before = module.memory_allocated(device)
        with record_time(device, seconds):
            output = hidden
            for layer in model.model.layers:
                output = layer(output, rotation, attention_inputs, None)
            output.backward(gradient)
        del output
        if device.type == "cuda":
            peak = module.max_memory_allocated(device) - bytes_before
    return {"peak": peak, "seconds": min(seconds[WARM_UP_STEPS:])}


def build_row(row: dict[str, Any]) -> list[str]:
    """Build a case's cells of the table; the last has ours over stock, of peak and of time."""
    cells = [row["model"], str(row["tensor"]), row["checkpointing"]]
    for implementation in IMPLEMENTATIONS:
        result = row["ways"][implementation]
        cells.append(
            result.get("failed")
            or f"{result['peak'] / MIB:.0f} MiB, {result['seconds'] * 1e3:.1f} ms"
        )
    stock = row["ways"][STOCK]
    ours = row["ways"][OURS]
    ratios = ""
    if "failed" not in stock and "failed" not in ours and stock["peak"]:
        ratios = f"{ours['peak'] / stock['peak']:.2f}, {ours['seconds'] / stock['seconds']:.2f}"
    return [*cells, ratios]


def write_report(rows: list[dict[str, Any]], device: dict[str, Any], folder: Path) -> None:
    """Write gpu-tensor-DEVICE.json and .md into the folder.

    device: as `gpu_check.describe_device` returns it.
    """
    head = ["model", "t", "checkpointing", *IMPLEMENTATIONS, f"{OURS} / {STOCK}: peak, time"]
    table = format_markdown_table(head, [build_row(row) for row in rows])
    title = "dry run, CPU: tiny layers, to check the code; its numbers say nothing"
    if device.get("type") == "cuda":
        title = str(device["name"])
    report = {"device": device, "torch": torch.__version__, "rows": rows}
    page = PAGE.format(title=title, table=table)
    write_pair(folder / f"gpu-tensor-{name_device(device)}", report, page)


PAGE = f"""# Tensor parallel, rank 0 of t: {{title}}

Peak of forward and backward over {LAYERS} layers beyond what was there before, and its time \
without communication:
`python benchmarks/gpu_check.py tensor`, {TOKENS} tokens, bf16, torch {torch.__version__}.

{{table}}
"""

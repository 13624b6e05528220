"""Tensor parallel on one GPU: layers of real widths as rank 0 of t, torch's DTensor styles beside
ours.

    python benchmarks/gpu_check.py tensor                    a dry run without a GPU
    python benchmarks/gpu_check.py tensor --output FOLDER    where the report goes (default docs/measurements)

The fake process group moves nothing: values mean nothing, tensors are allocated where a real rank
allocates them, and what is timed is the compute of a rank, with no communication in it. A way of a
kind runs in a process of its own.
"""

import argparse
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.tp_memory import (
    CACHED,
    OURS,
    STOCK,
    build_spec_of_layers,
    build_stock_layer,
    change_layer,
)
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import DecoderSpec, build_meta
from recipe_lib.parallel import shard_tensors, start_world
from recipe_lib.units import MIB

REPOSITORY = Path(__file__).resolve().parents[1]
LAYERS, TOKENS, REPEATS = 4, 8192, 5
CASES = [
    (name, size, mode)
    for name in ("llama3/8B", "llama3/70B")
    for size in (2, 4, 8)
    for mode in ("none", "full")
]
DRY_CASES = [("demo/0.5M", 2, "none")]
WAYS = (STOCK, CACHED, OURS)


def main(words: list[str]) -> int:
    """Runs all cases and writes the report after each."""
    from benchmarks.gpu_check import describe_device, run_apart

    parser = argparse.ArgumentParser(prog="gpu_check.py tensor", description=__doc__)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    options = parser.parse_args(words)
    device = run_apart(describe_device, 60)
    rows: list[dict[str, Any]] = []
    for name, size, mode in CASES if device.get("type") == "cuda" else DRY_CASES:
        found = {
            how: run_apart(functools.partial(measure, name, size, mode, how), 90) for how in WAYS
        }
        rows.append({"model": name, "tensor": size, "checkpointing": mode, "ways": found})
        print(" ".join(build_row(rows[-1])), flush=True)
        write(rows, device, options.output)
    return 1 if any("failed" in found for row in rows for found in row["ways"].values()) else 0


def measure(name: str, size: int, mode: str, how: str) -> dict[str, Any]:
    """Peak bytes and seconds of forward and backward over the layers, in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    parallel = ParallelConfig(tensor=size)
    with start_world(FullFinetuneConfig(parallel=parallel)) as world, change_layer(how):
        on_gpu = world.device.type == "cuda"
        spec, tokens = build_spec_of_layers(name, LAYERS), TOKENS if on_gpu else 64
        if how == CACHED:
            parallel = replace(parallel, tensor_regather_in_backward="false")
        model = build_meta(spec, torch.bfloat16)
        if how == STOCK:
            for layer in model.model.layers:
                build_stock_layer(layer, world)
        else:
            shard_tensors(model, parallel, MemoryConfig(activation_checkpointing=mode), world)
        apply_activation_checkpointing(model, mode)
        layers = model.model.layers.to_empty(device=world.device)
        with torch.no_grad():
            for parameter in layers.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(
                    0, 0.02
                )
        return _time_model(model, spec, size, tokens, world.device, how)


def _time_model(
    model: Any, spec: DecoderSpec, size: int, tokens: int, device: torch.device, how: str
) -> dict[str, Any]:
    from benchmarks.gpu_check import record_time

    shape = (1, tokens // size, spec.width) if how == STOCK else (tokens // size, spec.width)
    hidden = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    turn = model.model.rotary[0](torch.arange(tokens, device=device).unsqueeze(0))
    info = model.model.prepare(
        None, rows=1, queries=tokens, keys=tokens, dtype=torch.bfloat16, device=device
    )
    gradient, module = torch.randn_like(hidden), torch.get_device_module(device)
    seconds: list[float] = []
    peak = 0
    for _ in range(REPEATS + 2):
        for parameter in model.model.layers.parameters():
            parameter.grad = None
        hidden.grad = None
        before = 0
        if device.type == "cuda":
            module.reset_peak_memory_stats(device)
            before = module.memory_allocated(device)
        with record_time(device, seconds):
            out = hidden
            for layer in model.model.layers:
                out = layer(out, turn, info, None)
            out.backward(gradient)
        del out
        if device.type == "cuda":
            peak = module.max_memory_allocated(device) - before
    return {"peak": peak, "seconds": min(seconds[2:])}


def build_row(row: dict[str, Any]) -> list[str]:
    """The cells of one line of the table."""
    cells = [row["model"], str(row["tensor"]), row["checkpointing"]]
    for how in WAYS:
        found = row["ways"][how]
        cells.append(
            found.get("failed") or f"{found['peak'] / MIB:.0f} MiB, {found['seconds'] * 1e3:.1f} ms"
        )
    stock, ours = row["ways"][STOCK], row["ways"][OURS]
    fine = "failed" not in stock and "failed" not in ours and stock["peak"]
    cells.append(
        f"{ours['peak'] / stock['peak']:.2f}, {ours['seconds'] / stock['seconds']:.2f}"
        if fine
        else ""
    )
    return cells


def write(rows: list[dict[str, Any]], device: dict[str, Any], folder: Path) -> None:
    """The report, as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    dry = device.get("type") != "cuda"
    name = f"gpu-tensor-{'dry-run-cpu' if dry else '-'.join(str(device['name']).lower().split())}"
    report = {"device": device, "torch": torch.__version__, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    head = ["model", "t", "checkpointing", *WAYS, f"{OURS} / {STOCK}: peak, time"]
    table = "\n".join(
        f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *map(build_row, rows))
    )
    title = (
        "dry run, CPU: tiny layers, to check the code; its numbers say nothing"
        if dry
        else str(device["name"])
    )
    (folder / f"{name}.md").write_text(PAGE.format(title=title, table=table))


PAGE = f"""# Tensor parallel, rank 0 of t: {{title}}

Peak of forward and backward over {LAYERS} layers beyond what was there before, and its time without communication:
`python benchmarks/gpu_check.py tensor`, {TOKENS} tokens, bf16, torch {torch.__version__}.

{{table}}
"""

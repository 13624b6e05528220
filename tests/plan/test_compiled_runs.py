"""Planned memory of runs with `compile=true` against what torch's profiler counts in real ones on a CPU.

The simulation runs the Python module that inductor writes, with kernels that do nothing; the real run compiles it. No
tracer of ours is in the real run: torch's CPU allocator tells the profiler of each allocation and release. The whole
table is made by `python -m benchmarks.compiled_plans`.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # so that no process pays for the import
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from recipe_lib.config import load_config
from recipe_lib.parallel import World, start_world
from recipe_lib.plan.tracing.simulate import STEADY, simulate
from recipe_lib.plan.world.planned_batches import PlannedData
from tests.distributed.ranks import run_ranks
from tests.plan.test_real_runs import BASE, COLLECTIVES, PACKED_DOCUMENTS, PAIRS, TIED, collectives_let_go
from tests.recipes.runs import DPO, FULL, LORA, PLAIN, recipe_class, recipe_module

# Ranks, recipe, overrides.
CASES: dict[str, tuple[Any, ...]] = {
    "full": (2, FULL),
    "full, one rank": (1, FULL),
    "full, bf16": (2, FULL, "dtype=bf16"),
    "full, recomputed": (2, FULL, "memory.activation_checkpointing=full"),
    "full, selective": (2, FULL, "memory.activation_checkpointing=selective"),
    "full, 4 micro-batches": (2, FULL, "gradient_accumulation_steps=4"),
    "full, layers": (2, FULL, "parallel.fsdp_wrap_policy=layers", "parallel.reshard_after_forward=false"),
    "full, ddp": (2, FULL, "parallel.strategy=ddp"),
    "full, packed": (2, FULL, "data.packing=true"),
    "full, 8 bits": (2, FULL, "dtype=bf16", "optimizer.state_bits=8"),
    "lora": (2, LORA),
    "lora, dropout, recomputed": (2, LORA, "lora.dropout=0.1", "memory.activation_checkpointing=full"),
    "lora, dora": (2, LORA, "lora.dora=true"),
    "qlora, nf4": (2, LORA, "lora.quantize_base=nf4"),
    "qlora, nf4, one rank": (1, LORA, "lora.quantize_base=nf4", "memory.activation_checkpointing=selective"),
    "qlora, int8": (2, LORA, "lora.quantize_base=int8"),
    "dpo": (2, DPO, PAIRS),
    "dpo, all": (2, DPO, PAIRS, "dpo.trainable=all", "optimizer.name=sgd"),
}
STEPS = 3


def config(case: tuple[Any, ...], folder: Path) -> tuple[type, Any, Any]:
    """The recipe's class, the case's config and the shape of its batches."""
    _, name, *overrides = case
    module = recipe_module(name)
    overrides += [f"model.preset={TIED}", f"output_dir={folder / 'none'}", f"recipe={name}", "compile=true"]
    cfg = load_config(PLAIN, [*BASE, *overrides], module.Config)
    return recipe_class(module), cfg, SimpleNamespace(tokens=cfg.max_seq_len, documents=PACKED_DOCUMENTS)


def planned_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The most bytes of a later step on rank 0, as planned."""
    recipe, cfg, shape = config(case, folder)
    found = simulate(recipe, cfg, shape, ranks=case[0], phases=(), like_cpu=True)
    assert [note.partition(":")[0] for note in found.notes] == ["compiled code"], "planned as it is compiled"
    return found.trace.active_peaks()[STEADY]


def measured_peak(case: tuple[Any, ...], folder: Path) -> int:
    """The same as torch's profiler counts it in a real run on this rank, in the last of its steps.

    Without what gloo takes for itself: NCCL has its own buffers, and the plan another line for them.
    Collectives inside layers (`parallel.tensor`) end in threads of gloo that the profiler does not follow.
    """
    recipe, cfg, shape = config(case, folder)
    collectives: list[tuple[int, int]] = []
    with start_world(cfg) as world, collectives_let_go(), noting_collectives(collectives):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            begun = train(recipe, cfg, world, shape)
    events = allocations(profiler.profiler.kineto_results.experimental_event_tree())
    alive: dict[int, int] = {}
    total = peak = 0
    for event in events:
        what, moment = event.extra_fields, event.start_time_ns
        if what.alloc_size > 0 and event.start_tid == events[0].start_tid:
            place = bisect_right(collectives, (moment, moment)) - 1
            if place < 0 or moment > collectives[place][1]:
                alive[what.ptr] = what.alloc_size
                total += what.alloc_size
        elif what.alloc_size < 0:
            total -= alive.pop(what.ptr, 0)
        peak = max(peak, total) if moment >= begun else 0
    return peak


@contextmanager
def noting_collectives(found: list[tuple[int, int]]) -> Iterator[None]:
    """When each collective of torch.distributed began and ended."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def noted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            begun = time.time_ns()
            operation(*args, **kwargs)
            found.append((begun, time.time_ns()))

        return call

    for name, operation in originals.items():
        setattr(dist, name, noted(operation))
    try:
        yield
    finally:
        for name, operation in originals.items():
            setattr(dist, name, operation)


def allocations(roots: list[Any]) -> list[Any]:
    """The profiler's events of the allocator, in order."""
    found, left = [], list(roots)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            found.append(event)
    return sorted(found, key=lambda event: event.start_time_ns)


def train(recipe_class: type, cfg: Any, world: World, shape: Any) -> int:
    """Some steps; the time at which the last began."""
    recipe: Any = recipe_class(cfg, world)
    recipe.setup_model()
    recipe.setup_optimizer()
    recipe.data = PlannedData(cfg, world, shape)
    begun = 0
    for _ in range(STEPS):
        batches = next(recipe.data.batches())
        begun = time.time_ns()
        recipe.train_step(batches)
        del batches
    return begun


def compared(name: str, folder: Path) -> tuple[int, int]:
    """(planned, measured) bytes of a case."""
    case = CASES[name]
    planned = run_ranks(planned_peak, 1, case, folder, process_group=False, timeout=300)[0]
    return planned, run_ranks(measured_peak, case[0], case, folder, timeout=600)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full, recomputed", "qlora, nf4"])
def test_planned_peak_of_compiled_layers_is_the_measured_one(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    planned, measured = compared(name, tmp_path)
    assert planned == pytest.approx(measured, rel=0.01)

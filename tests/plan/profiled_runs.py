"""Measure the peak memory of a real run on a CPU with torch's profiler, to compare plans with.

A tracer that is a dispatch mode, as the library's, would change what is measured: autograd sums
gradients in place only where no mode is active.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from recipe_lib.parallel import World, start_world
from recipe_lib.plan.simulated_world.planned_data import PlannedData
from tests.distributed.collectives import let_collectives_go, wrap_collectives

STEPS = 3  # the last is measured


def profile_peak(recipe: type, cfg: Any, shape: Any) -> int:
    """Return the most bytes alive at once on this rank in the last step.

    Allocations of gloo inside collectives do not count: NCCL has its own buffers, and the plan
    another line for them. Not for `parallel.tensor`: collectives inside layers end in threads of
    gloo that the profiler does not follow. shape: lengths of the rows, as a plan takes them.
    """
    collectives: list[tuple[int, int]] = []
    with start_world(cfg) as world, let_collectives_go(), note_collectives(collectives):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            last_step_start = train(recipe, cfg, world, shape)
    # The raw events, which have addresses and signed sizes.
    events = list_allocations(profiler.profiler.kineto_results.experimental_event_tree())
    alive: dict[int, int] = {}  # bytes by address
    total = 0
    peak = 0
    for event in events:
        address = event.extra_fields.ptr
        size = event.extra_fields.alloc_size  # negative: freed
        moment = event.start_time_ns
        if size > 0 and event.start_tid == events[0].start_tid:
            # The last one that has begun: does it go on?
            last_collective = bisect_right(collectives, (moment, moment)) - 1
            if last_collective < 0 or moment > collectives[last_collective][1]:
                alive[address] = size
                total += size
        elif size < 0:
            total -= alive.pop(address, 0)
        peak = max(peak, total) if moment >= last_step_start else 0
    return peak


def note_collectives(spans: list[tuple[int, int]]) -> AbstractContextManager[None]:
    """Append (start, end) in ns of each collective of torch.distributed, while it is entered."""

    def time_calls(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            start = time.time_ns()
            operation(*args, **kwargs)
            spans.append((start, time.time_ns()))

        return call

    return wrap_collectives(time_calls)


def list_allocations(roots: list[Any]) -> list[Any]:
    """Return the allocator's events of the profiler's trees, by time."""
    allocations = []
    pending = list(roots)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            allocations.append(event)
    return sorted(allocations, key=lambda event: event.start_time_ns)


def train(recipe_class: type, cfg: Any, world: World, shape: Any) -> int:
    """Run STEPS steps of rows of the planned lengths; return the time in ns when the last began."""
    recipe: Any = recipe_class(cfg, world)
    recipe.setup_model()
    recipe.setup_optimizer()
    recipe.data = PlannedData(cfg, world, shape)
    start = 0
    for _ in range(STEPS):
        batches = next(recipe.data.batches())
        start = time.time_ns()
        recipe.train_step(batches)
        del batches  # before the next ones are made
    return start

"""What a real run on a CPU takes, by torch's profiler: no tracer of ours is in it.

A mode of Python, as our tracer is one, changes what autograd does: it sums gradients in place only
where none looks on.
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
from tests.plan.test_real_runs import collectives_let_go, collectives_within

STEPS = 3


def profile_peak(recipe: type, cfg: Any, shape: Any) -> int:
    """The most bytes alive at once on this rank, in the last of some steps.

    Without what gloo takes for itself: NCCL has its own buffers, and the plan another line for
    them. Collectives inside layers (`parallel.tensor`) end in threads of gloo that the profiler
    does not follow.
    """
    collectives: list[tuple[int, int]] = []
    with start_world(cfg) as world, collectives_let_go(), note_collectives(collectives):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            begun = train(recipe, cfg, world, shape)
    events = list_allocations(profiler.profiler.kineto_results.experimental_event_tree())
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


def note_collectives(found: list[tuple[int, int]]) -> AbstractContextManager[None]:
    """When each collective of torch.distributed began and ended."""

    def noted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            begun = time.time_ns()
            operation(*args, **kwargs)
            found.append((begun, time.time_ns()))

        return call

    return collectives_within(noted)


def list_allocations(roots: list[Any]) -> list[Any]:
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

"""The peak and the step time of a pipeline from few micro-batches through each place, continued to all of them.

What an action takes and leaves behind is the same for every micro-batch but the first, which finds no gradients. So
what each stage holds of a micro-batch, and how long it takes, comes from a second one (or a later, where not every kind
of action has come before). The schedule's own order says how many of them are there at a time, and when.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import micro_batches, stage_count, stages_of_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline.schedule_memory import StageBytes, live_bytes, peak_bytes
from recipe_lib.parallel.pipeline.schedule_time import simulate
from recipe_lib.parallel.pipeline.schedules import Action
from recipe_lib.plan.allocation.blocks import block_bytes
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.pipeline_plan import first_of_each_place
from recipe_lib.plan.search.estimate_facts import Estimate, parameter_bytes, trained_bytes
from recipe_lib.plan.timing.pipeline_time import messages_of, of_all, parts_of
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.trace import ACTION, ALLOC, FREE, PHASE, Trace
from recipe_lib.plan.tracing.pipeline_actions import orders_of, taken_of, traced_micro_batches
from recipe_lib.plan.tracing.simulate import STEADY, Simulated
from recipe_lib.plan.tracing.simulated_micro_batches import is_shipped

TRACED = 2
# By stage and kind of an action.
_Key = tuple[int, str]


@dataclass
class _Place:
    """One simulation. before, change, most: by action bytes before it, left by it and at its height beyond those
    before; outside: the most outside of actions; held: between two steps; gaps: seconds outside of actions. every:
    seconds of each action of a step, where not all micro-batches are alike."""

    found: Simulated
    before: dict[_Key, int]
    change: dict[_Key, int]
    most: dict[_Key, int]
    outside: int
    held: int
    idle: tuple[int, int]
    seconds: dict[_Key, float]
    every: dict[Action, float]
    messages: dict[_Key, float]
    gaps: float
    module: str


def quick_pipeline(recipe_class: type, cfg: Any, settings: PlanSettings) -> Estimate:
    """The estimate for a plannable config with a pipeline, as `quick` gives it: of the heaviest of its places.

    Its active bytes are mostly those of the whole plan. settings.timed False: reserved is not more than active, and the
    time is 0. Raises UserErrors of recipe and config.
    """
    count = micro_batches(cfg)[1]
    orders = orders_of(cfg.parallel, count)
    ranks = first_of_each_place(cfg.parallel, settings.ranks)
    once = reduces_once(cfg.parallel)  # then the last micro-batch is unlike the others, and what each leaves adds up
    traced = [
        traced_micro_batches(cfg, place) if once else _traced(cfg.parallel, place, count) for place in range(len(ranks))
    ]
    places = [_simulate(recipe_class, cfg, settings, rank, number) for rank, number in zip(ranks, traced, strict=True)]
    peaks = [_whole_peak(found) if once else _peak(cfg, place, found, count) for place, found in enumerate(places)]
    heaviest = max(range(len(places)), key=lambda place: peaks[place] + places[place].idle[0])
    place, active = places[heaviest], peaks[heaviest]
    seconds: dict[_Key, float] = {}
    messages: dict[_Key, float] = {}
    every: dict[Action, float] = {}
    for one in places:
        seconds, messages, every = seconds | one.seconds, messages | one.messages, every | one.every
    step = max(one.gaps for one in places)
    if settings.timed:
        step += simulate(
            orders,
            cfg.parallel,
            lambda action: every.get(action, seconds[action.stage, action.kind]),
            lambda send: messages.get((send.stage, send.kind), 0.0),
        ).total
    return Estimate(
        active=active,
        reserved=active + place.idle[0],
        reserved_expandable=active + place.idle[1],
        host=max(max(one.found.trace.active_peaks(device=False).values(), default=0) for one in places),
        seconds=step,
        tokens=place.found.tokens,
        held=place.held,
        parameters=sum(parameter_bytes(one.found) for one in places),
        trained=sum(trained_bytes(one.found) for one in places),
        phase=STEADY,
        part="backward",
        module=place.module,
        estimate="" if is_shipped(recipe_class) else "micro-batches are taken to be alike",
        first=(peaks[0], peaks[0] + places[0].idle[0], peaks[0] + places[0].idle[1]) if heaviest else None,
    )


def _traced(parallel: ParallelConfig, place: int, count: int) -> int:
    """The fewest micro-batches, two if there are, whose order has all kinds of actions: some have B as well as I."""

    def kinds(number: int) -> set[_Key]:
        return {(action.stage, action.kind) for action in orders_of(parallel, number)[place]}

    return next((number for number in range(TRACED, count) if kinds(number) == kinds(count)), count)


def _simulate(recipe_class: type, cfg: Any, settings: PlanSettings, rank: int, traced: int) -> _Place:
    found = simulate_rank(recipe_class, cfg, replace(settings, phases=()), rank, (STEADY,), traced)
    trace = found.trace
    place = found.coordinates["pipeline"]
    gone = Counter(taken_of(cfg.parallel, place, traced).values())
    before, change, most, outside, held, module = _bytes(trace, gone, _boundary(trace))
    idle = (0, 0)
    seconds: dict[_Key, float] = {}
    every: dict[Action, float] = {}
    messages: dict[_Key, float] = {}
    gaps = 0.0
    if settings.timed:
        both = [replay(trace, AllocatorSettings(expandable=expandable)) for expandable in (False, True)]
        idle = (both[0].reserved - both[0].active, both[1].reserved - both[0].active)
        waits, runs = parts_of(trace, schedule(trace, STEADY, settings.hardware, settings.calibration))
        gaps = sum(waits)
        for run in runs:  # a reference's forwards too: the later, of what is trained, replace them
            seconds |= {(action.stage, action.kind): found for action, found in run.items()}
        if reduces_once(cfg.parallel):
            every = of_all(runs[-1], cfg.parallel, place, micro_batches(cfg)[1], True)
        messages = messages_of(trace, STEADY, settings.hardware, settings.calibration)
    return _Place(found, before, change, most, outside, held, idle, seconds, every, messages, gaps, module)


def _whole_peak(found: _Place) -> int:
    """The most that is alive, of a simulation that has every state of memory."""
    trace, alive, most, phase = found.found.trace, 0, 0, ""
    for kind, number in trace.events:
        if kind == PHASE:
            phase = trace.phases[number]
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += block_bytes(trace.storages[number].bytes) * (1 if kind == ALLOC else -1)
            most = max(most, alive) if phase == STEADY else most
    return most


def _bytes(
    trace: Trace, gone: Mapping[int, int], boundary: int
) -> tuple[dict[_Key, int], dict[_Key, int], dict[_Key, int], int, int, str]:
    """See `_Place`, of each stage's last micro-batch; and the module where the most is alive in a stage.

    gone: by number of an action how many tensors that were sent, of `boundary` bytes each, are let go of before it.
    """
    before: dict[_Key, int] = {}
    change: dict[_Key, int] = {}
    most: dict[_Key, int] = defaultdict(int)
    key: _Key = (-1, "")
    alive = outside = held = highest = 0
    module, phase, at = "", "", -1
    for kind, number in trace.events:
        if kind == PHASE:
            phase, held, outside = trace.phases[number], alive, alive
        elif kind == ACTION:
            mark = trace.actions[number]
            at = at + 1 if mark.kind else -1
            if key[1]:  # what was let go of since belongs to no action
                change[key] = alive - before[key] + gone.get(at, 0) * boundary
            key = (mark.stage, mark.kind)
            before[key], most[key] = alive, 0
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            alive += block_bytes(storage.bytes) * (1 if kind == ALLOC else -1)
            if phase == STEADY and not key[1]:
                outside = max(outside, alive)
            most[key] = max(most[key], alive - before.get(key, 0))
            if key[1] and alive > highest:
                highest, module = alive, storage.module
    return before, change, most, outside, held, module


def _peak(cfg: Any, place: int, found: _Place, count: int) -> int:
    """The most that is alive with all micro-batches: what is held, gradients, and what the stages keep."""
    parallel, last = cfg.parallel, stage_count(cfg.parallel) - 1
    order = orders_of(parallel, count)[place]
    boundary = _boundary(found.found.trace)
    sizes = {}
    for stage in stages_of_rank(parallel, place):
        got, given = boundary if stage else 0, boundary if stage < last else 0
        kept = found.change[stage, "F"] + got - given
        # What backward gives goes on to the stage before; the last stage gets nothing for it from another one.
        deferred = found.change.get((stage, "I"), 0) + kept - got + given if (stage, "I") in found.change else 0
        forward, backward, inputs, weights = (found.most.get((stage, kind), 0) for kind in ("F", "B", "I", "W"))
        sizes[stage] = StageBytes(kept, max(0, deferred), forward, backward, inputs, weights)
    live = live_bytes(order, parallel, sizes, boundary, taken=taken_of(parallel, place, count))
    inside = found.held + _gradients(found) + peak_bytes(live)
    return max(inside, found.outside)


def _boundary(trace: Trace) -> int:
    """Bytes of a tensor between two stages."""
    sizes = [
        op.collective.bytes
        for op in trace.ops
        if op.collective is not None and op.collective.operation in ("send", "recv") and op.part != "other"
    ]
    return block_bytes(max(sizes, default=0))


def _gradients(found: _Place) -> int:
    """Of what this rank trains, and batches: what is there when the last action is done beyond what was before."""
    last: dict[str, int] = {}
    trace = found.found.trace
    alive = 0
    for kind, number in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += block_bytes(trace.storages[number].bytes) * (1 if kind == ALLOC else -1)
        elif kind == ACTION and not trace.actions[number].kind:
            last["end"] = alive
    return max(0, last.get("end", found.held) - found.held)

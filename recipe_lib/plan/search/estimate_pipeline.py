"""The peak and the step time of a pipeline from few micro-batches through each place, continued to all of them.

What an action takes and leaves behind is the same for every micro-batch but the first, which finds no gradients. So
what each stage holds of a micro-batch, and how long it takes, comes from a second one (or a later, where not every kind
of action has come before). The schedule's own order says how many of them are there at a time, and when.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import mesh_shape, micro_batches, stage_count, stages_of_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline.balance import split_layers
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
from recipe_lib.plan.world.shape_only_model import layer_period, spec_of, with_layers

TRACED = 2
# Of a stage in the shorter simulation: a first, a last, and one between them; two more where FSDP gathers ahead.
_LAYERS, _AHEAD = 3, 2
_WORTHWHILE = 1.4  # two shallow models have to be so much less than the whole one
# By stage and kind of an action.
_Key = tuple[int, str]


@dataclass
class _Place:
    """What a rank of one place does.

    layers: of each of its stages. change, most: by action bytes left by it, and at its height by place in the model,
    beyond those before; outside: the most outside of actions, by place; held: between two steps; gradients: at the end
    of the step's actions, beyond those; whole: the most of the whole step, as it was simulated; boundary: of a tensor
    between two stages. gaps: seconds outside of actions. every: seconds of each action of a step, where not all
    micro-batches are alike.
    """

    layers: dict[int, int]
    change: dict[_Key, int]
    most: dict[_Key, dict[str, int]]
    outside: dict[str, int]
    held: int
    gradients: int
    whole: int
    boundary: int
    host: int
    tokens: int
    parameters: int
    trained: int
    idle: tuple[int, int]
    seconds: dict[_Key, float]
    every: dict[Action, float]
    messages: dict[_Key, float]
    gaps: float
    module: str


def quick_pipeline(recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None) -> Estimate:
    """The estimate for a plannable config with a pipeline, as `quick` gives it: of the heaviest of its places.

    Its active bytes are mostly those of the whole plan. settings.timed False: reserved is not more than active, and the
    time is 0. limit: after the first place with more active bytes no other is simulated, and the time is 0. Raises
    UserErrors of recipe and config.
    """
    count = micro_batches(cfg)[1]
    once = reduces_once(cfg.parallel)  # then the last micro-batch is unlike the others, and what each leaves adds up
    models, split = _models(cfg, settings, once=once)
    places: list[_Place] = []
    peaks: list[int] = []
    for at, rank in enumerate(first_of_each_place(cfg.parallel, settings.ranks)):
        traced = traced_micro_batches(cfg, at) if once else _traced(cfg.parallel, at, count)
        runs = [_simulate(recipe_class, model, settings, rank, traced) for model in models]
        places.append(_continued(runs[0], runs[1], split) if len(runs) > 1 else runs[0])
        peaks.append(places[-1].whole if once else _peak(cfg, at, places[-1], count))
        if limit is not None and peaks[-1] > limit:
            break
    heaviest = max(range(len(places)), key=lambda place: peaks[place] + places[place].idle[0])
    place, active = places[heaviest], peaks[heaviest]
    return Estimate(
        active=active,
        reserved=active + place.idle[0],
        reserved_expandable=active + place.idle[1],
        host=max(one.host for one in places),
        seconds=_step(cfg, places) if settings.timed and len(places) == cfg.parallel.pipeline else 0.0,
        tokens=place.tokens,
        held=place.held,
        parameters=sum(one.parameters for one in places),
        trained=sum(one.trained for one in places),
        phase=STEADY,
        part="backward",
        module=place.module,
        estimate="" if is_shipped(recipe_class) else "micro-batches are taken to be alike",
        first=(peaks[0], peaks[0] + places[0].idle[0], peaks[0] + places[0].idle[1]) if heaviest else None,
    )


def _step(cfg: Any, places: list[_Place]) -> float:
    """Seconds of a step, all micro-batches."""
    seconds: dict[_Key, float] = {}
    messages: dict[_Key, float] = {}
    every: dict[Action, float] = {}
    for one in places:
        seconds, messages, every = seconds | one.seconds, messages | one.messages, every | one.every
    actions = simulate(
        orders_of(cfg.parallel, micro_batches(cfg)[1]),
        cfg.parallel,
        lambda action: every.get(action, seconds[action.stage, action.kind]),
        lambda send: messages.get((send.stage, send.kind), 0.0),
    )
    return max(one.gaps for one in places) + actions.total


def _models(cfg: Any, settings: PlanSettings, *, once: bool) -> tuple[list[Any], list[int]]:
    """(configs to simulate, the layers of each stage): two with few layers on each stage where that is much less than
    the whole model, the shorter first.

    once: every micro-batch is simulated, and the peak is the simulation's own.
    """
    named = isinstance(cfg.parallel.fsdp_wrap_policy, list)
    budget = cfg.memory.activation_checkpointing == "budget"
    if once or named or budget or cfg.memory.activation_offload or layer_period(cfg) > 1:
        return [cfg], []
    shards = mesh_shape(cfg.parallel, settings.ranks)["data_shard"]
    split = [len(one) for one in split_layers(spec_of(cfg), cfg, shards)]
    fewest = _LAYERS + (_AHEAD if shards > 1 else 0)
    pair = [[min(count, most) for count in split] for most in (fewest, fewest + 1)]
    if _WORTHWHILE * sum(map(sum, pair)) > sum(split):
        return [cfg], split
    return [
        replace(with_layers(cfg, sum(counts)), parallel=replace(cfg.parallel, pipeline_layers_per_stage=counts))
        for counts in pair
    ], split


def _continued(short: _Place, long: _Place, split: list[int]) -> _Place:
    """A place with more layers than either: each more is what the longer one has beyond the shorter, of its own stage
    where that is known, else of the place."""
    more = {stage: split[stage] - count for stage, count in long.layers.items()}
    grown = sum(long.layers.values()) - sum(short.layers.values())
    steps = sum(more.values()) / grown if grown else 0.0

    def ahead(low: Any, high: Any, times: float) -> Any:
        return type(high)(high + (high - low) * times)

    values: dict[str, Any] = {}
    for name in ("change", "seconds", "messages"):
        low, high = getattr(short, name), getattr(long, name)
        values[name] = {key: ahead(low[key], high[key], more.get(key[0], steps)) for key in high}
    values["most"] = {
        key: {
            at: ahead(short.most.get(key, {}).get(at, high), high, more.get(key[0], steps)) for at, high in by.items()
        }
        for key, by in long.most.items()
    }
    values["outside"] = {at: ahead(short.outside.get(at, high), high, steps) for at, high in long.outside.items()}
    for name in ("held", "gradients", "whole", "host", "parameters", "trained", "gaps"):
        values[name] = ahead(getattr(short, name), getattr(long, name), steps)
    idle = (max(short.idle[0], long.idle[0]), max(short.idle[1], long.idle[1]))
    return replace(long, **values, idle=idle)


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
    boundary = _boundary(trace)
    change, most, outside, held, module = _bytes(found, gone, boundary)
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
    return _Place(
        layers={stage: len(layers) for stage, layers in found.stages.items()},
        change=change,
        most=most,
        outside=outside,
        held=held,
        gradients=_gradients(trace, held),
        whole=_whole_peak(trace),
        boundary=boundary,
        host=max(trace.active_peaks(device=False).values(), default=0),
        tokens=found.tokens,
        parameters=parameter_bytes(found),
        trained=trained_bytes(found),
        idle=idle,
        seconds=seconds,
        every=every,
        messages=messages,
        gaps=gaps,
        module=module,
    )


def _whole_peak(trace: Trace) -> int:
    """The most that is alive in a step, as it was simulated."""
    alive, most, phase = 0, 0, ""
    for kind, number in trace.events:
        if kind == PHASE:
            phase = trace.phases[number]
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += block_bytes(trace.storages[number].bytes) * (1 if kind == ALLOC else -1)
            most = max(most, alive) if phase == STEADY else most
    return most


def _bytes(
    found: Simulated, gone: Mapping[int, int], boundary: int
) -> tuple[dict[_Key, int], dict[_Key, dict[str, int]], dict[str, int], int, str]:
    """See `_Place`, of each stage's last micro-batch; and the module where the most is alive in a stage.

    gone: by number of an action how many tensors that were sent, of `boundary` bytes each, are let go of before it.
    """
    trace = found.trace
    before: dict[_Key, int] = {}
    change: dict[_Key, int] = {}
    most: dict[_Key, dict[str, int]] = {}
    outside: dict[str, int] = {}
    names: dict[str, str] = {}
    key: _Key = (-1, "")
    alive = held = highest = 0
    module, phase, at = "", "", -1
    for kind, number in trace.events:
        if kind == PHASE:
            phase, held, outside = trace.phases[number], alive, {"": alive}
        elif kind == ACTION:
            mark = trace.actions[number]
            at = at + 1 if mark.kind else -1
            if key[1]:  # what was let go of since belongs to no action
                change[key] = alive - before[key] + gone.get(at, 0) * boundary
            key = (mark.stage, mark.kind)
            before[key], most[key] = alive, {}
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            alive += block_bytes(storage.bytes) * (1 if kind == ALLOC else -1)
            if storage.module not in names:
                names[storage.module] = _place_in_stage(storage.module, found.stages)
            where = f"{names[storage.module]} {storage.op} {storage.part}"
            if phase == STEADY and not key[1]:
                outside[where] = max(outside.get(where, 0), alive)
            elif key[1]:
                most[key][where] = max(most[key].get(where, 0), alive - before[key])
            if key[1] and alive > highest:
                highest, module = alive, storage.module
    return change, most, outside, held, module


def _place_in_stage(module: str, stages: Mapping[int, range]) -> str:
    """A module's path with `first`, `last` or `*` for the number of its layer in its stage."""
    names = {str(number): "*" for layers in stages.values() for number in layers}
    for layers in stages.values():
        names |= {str(layers[0]): "first", str(layers[-1]): "last"}
    return ".".join(names.get(piece, piece) for piece in module.split("."))


def _peak(cfg: Any, place: int, found: _Place, count: int) -> int:
    """The most that is alive with all micro-batches: what is held, gradients, and what the stages keep."""
    parallel, last = cfg.parallel, stage_count(cfg.parallel) - 1
    order = orders_of(parallel, count)[place]
    boundary = found.boundary
    sizes = {}
    for stage in stages_of_rank(parallel, place):
        got, given = boundary if stage else 0, boundary if stage < last else 0
        kept = found.change[stage, "F"] + got - given
        # What backward gives goes on to the stage before; the last stage gets nothing for it from another one.
        deferred = found.change.get((stage, "I"), 0) + kept - got + given if (stage, "I") in found.change else 0
        forward, backward, inputs, weights = (
            max(found.most.get((stage, kind), {}).values(), default=0) for kind in ("F", "B", "I", "W")
        )
        sizes[stage] = StageBytes(kept, max(0, deferred), forward, backward, inputs, weights)
    live = live_bytes(order, parallel, sizes, boundary, taken=taken_of(parallel, place, count))
    inside = found.held + found.gradients + peak_bytes(live)
    return max(inside, *found.outside.values())


def _boundary(trace: Trace) -> int:
    """Bytes of a tensor between two stages."""
    sizes = [
        op.collective.bytes
        for op in trace.ops
        if op.collective is not None and op.collective.operation in ("send", "recv") and op.part != "other"
    ]
    return block_bytes(max(sizes, default=0))


def _gradients(trace: Trace, held: int) -> int:
    """Of what this rank trains, and batches: what is there when the last action is done beyond what was before."""
    alive, end = 0, held
    for kind, number in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += block_bytes(trace.storages[number].bytes) * (1 if kind == ALLOC else -1)
        elif kind == ACTION and not trace.actions[number].kind:
            end = alive
    return max(0, end - held)

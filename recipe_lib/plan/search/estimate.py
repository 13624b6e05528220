"""The peak and the step time of a run from two simulations with few layers, continued to the model's own depth.

What a layer holds, for how long, and what it computes is the same from layer to layer, so that the most bytes at one
place of the step are a straight line over the number of layers. The peak itself is none: with more layers it can move
from one place to another. So the line is drawn for each place, and the highest of them is taken afterwards.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from recipe_lib.plan.allocation.blocks import block_bytes
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.rank_plans import not_simulated
from recipe_lib.plan.search.estimate_facts import (
    Estimate,
    held_by_layers,
    kept_by_layers,
    least_seconds,
    parameter_bytes,
    traffic,
    trained_bytes,
)
from recipe_lib.plan.search.estimate_pipeline import quick_pipeline
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.trace import ALLOC, FREE, PHASE, Trace
from recipe_lib.plan.tracing.simulate import FIRST, MAKING_STATES, STEADY
from recipe_lib.plan.world.shape_only_model import layer_count, layer_period, with_layers

# Fewest layers of the short simulation: a first, a last, and one between them that has neighbors on both sides.
MIN_LAYERS = 3
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Short:
    """One simulation. peaks: of whole blocks by (phase, part, module, operator). unsplit: what the allocator's blocks
    had beyond the highest; idle: what it held beyond its blocks, with the default settings and with expandable
    segments."""

    layers: int
    peaks: dict[tuple[str, str, str, str], int]
    host: dict[str, int]
    idle: tuple[int, int]
    seconds: float
    tokens: int
    held: int
    parameters: int
    trained: int
    unsplit: int = 0
    estimate: str = ""
    kept: int = 0
    held_by_layers: int = 0
    least_seconds: float = 0.0
    traffic: tuple[int, int] = (0, 0)


def quick(recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None) -> Estimate:
    """The estimate for a plannable config, of the first of `settings.traced_ranks` or rank 0, without load, validation
    and save.

    settings.timed False: of the active bytes of setup and a steady step; reserved is not more, and the time is 0.
    limit: of a pipeline, as `quick_pipeline` takes it.

    Raises UserErrors of recipe and config.
    """
    if cfg.parallel.pipeline > 1:
        return quick_pipeline(recipe_class, cfg, settings, limit)
    layers = layer_count(cfg)
    ahead = cfg.memory.activation_offload_prefetch_layers if cfg.memory.activation_offload else 0
    short, long = short_depths(layers, layer_period(cfg), ahead)
    budget = cfg.memory.activation_checkpointing == "budget"  # for all layers together, which then differ
    if long >= layers or budget or _names_layers(cfg.parallel.fsdp_wrap_policy):
        whole = _simulate(recipe_class, cfg, settings, layers)
        return _continue(whole, whole, layers)
    pair = [_simulate(recipe_class, with_layers(cfg, depth), settings, depth) for depth in (short, long)]
    return _continue(pair[0], pair[1], layers)


def short_depths(layers: int, period: int, ahead: int = 0) -> tuple[int, int]:
    """Layers of the two simulations: as few as possible, so that whole periods are missing from the model's own.

    ahead: layers besides a present one whose activations are on the device, where the others' are sent away.
    """
    shortest = MIN_LAYERS + ahead
    short = shortest + (layers - shortest) % period
    return short, short + period


def _names_layers(wrapping: str | list[str]) -> bool:
    """Patterns of a wrapping can mean single layers, which fewer layers do not have."""
    return not isinstance(wrapping, str) and any(letter.isdigit() for pattern in wrapping for letter in pattern)


def _simulate(recipe_class: type, cfg: Any, settings: PlanSettings, layers: int) -> _Short:
    # States that are stepped in backward are made there: whose states come next is known from the first step.
    steps = (FIRST, STEADY) if settings.timed or cfg.memory.optimizer_in_backward else (STEADY,)
    found = simulate_rank(recipe_class, cfg, replace(settings, phases=()), next(iter(settings.traced_ranks), 0), steps)
    trace = found.trace
    peaks, held = _peaks_by_place(trace, layers)
    peaks = {place: peak for place, peak in peaks.items() if place[0] != MAKING_STATES}
    default = replay(trace)
    highest, seconds = max(peaks.values()), 0.0
    active = max(phase.active for name, phase in default.phases.items() if name != MAKING_STATES)
    reserved = [active, active]
    if settings.timed:
        reserved = [default.reserved, replay(trace, AllocatorSettings(expandable=True)).reserved]
        seconds = schedule(trace, STEADY, settings.hardware, settings.calibration).step
    return _Short(
        layers=layers,
        peaks=peaks,
        host=trace.active_peaks(device=False),
        idle=(reserved[0] - active, reserved[1] - active),
        seconds=seconds,
        tokens=found.tokens,
        held=held,
        parameters=parameter_bytes(found),
        trained=trained_bytes(found),
        unsplit=active - highest,
        estimate=not_simulated(found, None)[1],
        kept=kept_by_layers(trace),
        held_by_layers=held_by_layers(trace),
        least_seconds=least_seconds(trace, settings.hardware, settings.calibration),
        traffic=traffic(trace),
    )


def _peaks_by_place(trace: Trace, layers: int) -> tuple[dict[tuple[str, str, str, str], int], int]:
    """By (phase, part, module, operator) the most bytes in blocks at its allocations; those as the step begins."""
    peaks: dict[tuple[str, str, str, str], int] = defaultdict(int)
    places: dict[str, str] = {}
    phase, alive, held = "", 0, 0
    for kind, number in trace.events:
        if kind == PHASE:
            phase = trace.phases[number]
            held = alive if phase == STEADY else held
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            if kind == FREE:
                alive -= block_bytes(storage.bytes)
                continue
            alive += block_bytes(storage.bytes)
            if storage.module not in places:
                places[storage.module] = place_of(storage.module, layers)
            key = (phase, storage.part, places[storage.module], storage.op)
            peaks[key] = max(peaks[key], alive)
    return dict(peaks), held


def place_of(module: str, layers: int) -> str:
    """A module's path with `first`, `last` or `*` for the number of its layer: `model.layers.*.mlp`."""
    names = {0: "first", layers - 1: "last"}
    return ".".join(names.get(int(piece), "*") if piece.isdigit() else piece for piece in module.split("."))


def _continue(short: _Short, long: _Short, layers: int) -> Estimate:
    """The straight line through two simulations at the model's own depth."""

    def line(value: Callable[[_Short], Number]) -> Number:
        return _line(value(short), value(long), short.layers, long.layers, layers)

    peaks = {
        key: _line(short.peaks.get(key, high), high, short.layers, long.layers, layers)
        for key, high in long.peaks.items()
    }
    highest = max(peaks, key=lambda key: peaks[key])
    # What is left unsplit may grow with the layers, and does not shrink: a line downwards would end below zero.
    active = peaks[highest] + max(long.unsplit, line(lambda run: run.unsplit))
    idle = [max(pair) for pair in zip(short.idle, long.idle, strict=True)]
    host = [
        _line(short.host.get(phase, high), high, short.layers, long.layers, layers) for phase, high in long.host.items()
    ]
    return Estimate(
        active=active,
        reserved=active + idle[0],
        reserved_expandable=active + idle[1],
        host=max(host, default=0),
        seconds=line(lambda run: run.seconds),
        tokens=long.tokens,
        held=line(lambda run: run.held),
        parameters=line(lambda run: run.parameters),
        trained=line(lambda run: run.trained),
        phase=highest[0],
        part=highest[1],
        module=highest[2],
        estimate=long.estimate,
        kept=line(lambda run: run.kept),
        held_by_layers=line(lambda run: run.held_by_layers),
        least_seconds=line(lambda run: run.least_seconds),
        sent=line(lambda run: run.traffic[0]),
        copied=line(lambda run: run.traffic[1]),
    )


def _line(low: Number, high: Number, short: int, long: int, layers: int) -> Number:
    """`low` at `short` layers and `high` at `long` ones, continued to `layers`."""
    if long == short:
        return high
    slope = (high - low) * (layers - long)
    return high + (slope // (long - short) if isinstance(slope, int) else slope / (long - short))

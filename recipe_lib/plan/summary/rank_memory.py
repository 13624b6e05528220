"""One rank of a plan: its peaks by phase, what is live at the largest of them, and whether it all
fits.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import compute_micro_batches, count_stages_per_rank
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.parallel.pipeline.schedules import UNITS
from recipe_lib.parallel.pipeline.simulation import counted_in_flight, simulate
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    DOES_NOT_FIT,
    FITS,
    RISKY,
    ActionSpan,
    Alive,
    LayerRow,
    PhasePeak,
    PipelinePlan,
    Plan,
    RankPlan,
    StagePlan,
    list_stage_ranks,
)
from recipe_lib.plan.simulated_world.shape_only_model import read_spec
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.timing.pipeline_time import compute_pipeline_time, scale_to_step
from recipe_lib.plan.timing.stream_schedule import StepTime, schedule
from recipe_lib.plan.tracing.pipeline_actions import count_micro_batches_to_trace, get_orders
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, STORAGE_KINDS, Storage, Trace
from recipe_lib.plan.tracing.trace_rank import MAKING_STATES, STEADY, Simulated
from recipe_lib.plan.views.tables import list_outermost
from recipe_lib.units import format_bytes, format_duration

# A plan that leaves less than this share of the device's memory is called risky: its own error is
# as large.
RISKY_SHARE = 0.03


def has_room(reserved: int, usable: int, hardware: Hardware) -> bool:
    """Whether more is left of what the allocator may take than a plan's own error."""
    return reserved <= usable - RISKY_SHARE * hardware.memory


def decide_verdict(trace: Trace, heaviest: RankPlan, usable: int, hardware: Hardware) -> str:
    """Fits with room to spare; risky: it needs expandable segments, retries, or the last few
    percent of the device.
    """
    if has_room(heaviest.reserved, usable, hardware):
        return FITS
    if heaviest.reserved <= usable or heaviest.reserved_expandable <= usable:
        return RISKY
    if max(peak.requested for peak in heaviest.peaks) > usable:
        return DOES_NOT_FIT
    settings = (
        AllocatorSettings(expandable=expandable, cap=usable) for expandable in (True, False)
    )
    return RISKY if any(replay(trace, held).survived for held in settings) else DOES_NOT_FIT


def estimate_not_simulated(found: Simulated, steps: int | None) -> tuple[int, str]:
    """(bytes that may come to those that were simulated, why they may); (0, "") where nothing is
    left out.

    steps: of the run, if known.
    """
    more, said = found.untraced_bytes, [found.estimate] if found.estimate else []
    if found.step_growth:
        more += found.step_growth * max(0, (steps or 0) - 2)
        left = f"the second step left {format_bytes(found.step_growth)} more than the first"
        said.append(f"{left}, and so are the later ones taken to do")
    return more, "; ".join(said)


def lower_verdict(verdict: str, more: int, heaviest: RankPlan, usable: int) -> str:
    """The verdict with `more` bytes that were not simulated; it never says that an estimate of
    growth fits.
    """
    if more > usable - max(peak.requested for peak in heaviest.peaks):
        return DOES_NOT_FIT
    return RISKY if more and verdict == FITS else verdict


def build_rank_plan(rank: int, found: Simulated) -> RankPlan:
    """Of a simulated rank."""
    trace = found.trace
    device, host = trace.peaks(), trace.find_active_peaks(device=False)
    default = replay(trace, emptied_after=MAKING_STATES)
    expandable = replay(trace, AllocatorSettings(expandable=True), MAKING_STATES)
    peaks = []
    for phase, (requested, at) in device.items():
        if phase == MAKING_STATES:
            continue
        place = trace.storages[trace.events[at][1]] if at >= 0 else Storage(0)
        peaks.append(
            PhasePeak(
                phase,
                active=default.phases[phase].active,
                allocated=default.phases[phase].allocated,
                reserved=default.phases[phase].reserved,
                reserved_expandable=expandable.phases[phase].reserved,
                host=host.get(phase, 0),
                part=place.part,
                module=place.module,
                requested=requested,
            )
        )
    highest = max(peaks, key=lambda peak: peak.active).phase
    most = find_most_by_kind(trace, STEADY)
    return RankPlan(
        rank,
        found.coordinates,
        peaks,
        _list_alive(trace, highest),
        events=default.events,
        most=most,
    )


def find_most_by_kind(trace: Trace, phase: str) -> dict[str, int]:
    """Kind of memory to the most bytes on the device that it takes at a time in a phase; none for a
    phase that was not traced.
    """
    held: dict[str, int] = defaultdict(int)
    most: dict[str, int] = {}
    for _, kind, number, current, *_ in trace.walk():
        if kind == PHASE and current == phase:
            most |= held
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            held[storage.kind] += storage.bytes if kind == ALLOC else -storage.bytes
            if current == phase:
                most[storage.kind] = max(most.get(storage.kind, 0), held[storage.kind])
    return {kind: size for kind in STORAGE_KINDS if (size := most.get(kind, 0))}


def _list_alive(trace: Trace, phase: str) -> list[Alive]:
    """What is live at the peak of a phase, by kind and place."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number in trace.list_alive_at_peak(phase):
        storage = trace.storages[number]
        if storage.bytes:
            module = storage.label.rpartition(".")[0] if storage.label else storage.module
            groups[storage.kind, module, storage.label].append(storage.bytes)
    rows = [Alive(*place, bytes=sum(sizes), count=len(sizes)) for place, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.module, row.label))


def build_layer_rows(found: Simulated) -> list[LayerRow]:
    """The table of modules; what they keep is what is there when the last backward of the steady
    step begins.
    """
    kept: dict[str, int] = defaultdict(int)
    for module, size in _sum_kept_activations(found.trace).items():
        pieces = module.split(".")
        for cut in range(1, len(pieces) + 1):
            kept[".".join(pieces[:cut])] += size
    return [replace(row, kept=kept.get(row.module, 0)) for row in found.modules]


def _sum_kept_activations(trace: Trace) -> dict[str, int]:
    """By module the bytes of activations that are live when a backward of the steady step begins,
    where the most are; of equal ones the last.
    """
    before = ""
    most: dict[str, int] = {}
    for _, kind, number, phase, _, alive in trace.walk():
        if kind != OP or phase != STEADY:
            continue
        part = trace.ops[number].part
        if part == "backward" and before == "forward":
            kept: dict[str, int] = defaultdict(int)
            for storage in alive.values():
                if storage.kind == "activations":
                    kept[storage.module] += storage.bytes
            most = kept if sum(kept.values()) >= sum(most.values()) else most
        before = part if part in ("forward", "backward") else before
    return most


# What a plan says of a pipeline: the stages of each place, what they exchange, and when they do
# what.


@dataclass(frozen=True)
class SimulatedStep:
    """A steady step: of the one rank whose time is wanted, or of a pipeline. None: no time is
    wanted, or not every place of the pipeline was simulated.
    """

    # None without one.
    pipeline: PipelinePlan | None
    # Of the rank, in a pipeline the one that computes the longest.
    sums: StepTime | None = None
    trace: Trace | None = None
    # Of all ranks.
    seconds: float | None = None


def list_first_ranks(parallel: Any, ranks: int) -> tuple[int, ...]:
    """The first rank of each place in the pipeline; without one rank 0. The shards of the first are
    the largest.
    """
    return tuple(place * (ranks // parallel.pipeline) for place in range(parallel.pipeline))


def build_simulated_step(
    cfg: Any,
    simulated: Mapping[int, Simulated],
    timings: Mapping[int, StepTime] | None,
    hardware: Hardware,
    calibration: Calibration | None,
) -> SimulatedStep:
    """Return the step of a plan. simulated, timings: by rank; timings: without a pipeline of one
    rank alone, None where none are wanted.
    """
    if cfg.parallel.pipeline == 1:
        if timings is None:
            return SimulatedStep(None)
        ((rank, timing),) = timings.items()
        return SimulatedStep(None, timing, simulated[rank].trace, timing.step)
    size, count = compute_micro_batches(cfg)
    firsts: dict[int, int] = {}  # by place, the first rank simulated
    for rank, found in simulated.items():
        firsts.setdefault(found.coordinates["pipeline"], rank)
    firsts = dict(sorted(firsts.items()))
    places = [
        _build_stage_plan(cfg, place, rank, simulated[rank], count)
        for place, rank in firsts.items()
    ]
    plan = PipelinePlan(
        schedule=cfg.parallel.pipeline_schedule,
        stages_per_rank=count_stages_per_rank(cfg.parallel),
        micro_batches=count,
        micro_batch_size=size,
        places=places,
        ideal=float(
            simulate(
                get_orders(cfg.parallel, count), cfg.parallel, lambda action: UNITS[action.kind]
            ).bubble
        ),
    )
    if timings is None or len(firsts) < cfg.parallel.pipeline:
        return SimulatedStep(plan)
    traces = {place: simulated[rank].trace for place, rank in firsts.items()}
    own = {place: timings[rank] for place, rank in firsts.items()}
    line, seconds = compute_pipeline_time(
        cfg.parallel, count, traces, own, STEADY, hardware, calibration
    )
    plan.seconds = float(line.total)
    plan.bubble = float(line.bubble)
    for place in plan.places:
        place.compute = float(line.busy(place.place))
        place.idle = float(line.idle_share(place.place))
    for span in line.spans:
        action = span.action
        plan.spans.append(
            ActionSpan(
                place=span.rank,
                stage=action.stage,
                kind=action.kind,
                micro_batch=action.micro_batch,
                start=float(span.start),
                end=float(span.end),
            )
        )
    busiest = max(firsts, key=lambda place: places[place].compute)
    sums = scale_to_step(traces[busiest], own[busiest], STEADY, hardware, calibration)
    return SimulatedStep(plan, sums, traces[busiest], seconds)


def _build_stage_plan(cfg: Any, place: int, rank: int, found: Simulated, count: int) -> StagePlan:
    in_flight, deferred = counted_in_flight(get_orders(cfg.parallel, count)[place])
    modules = list_outermost(found.modules)
    sends = sent = 0
    for action, _, op in found.trace.iterate_action_ops(STEADY):
        if action.kind and op.collective is not None and op.collective.operation == "send":
            sends += op.repeats
            sent += op.repeats * op.collective.bytes
    return StagePlan(
        place=place,
        rank=rank,
        stages=list(found.stages),
        layers=[[layers[0], layers[-1]] for layers in found.stages.values()],
        parameters=sum(row.parameters for row in modules),
        trained=sum(row.trained for row in modules),
        in_flight=in_flight,
        deferred=deferred,
        compute=0.0,
        idle=0.0,
        sends=sends,
        sent=sent,
        ranks=list_stage_ranks(found.mesh, place),
    )


def list_pipeline_assumptions(cfg: Any, ranks: Sequence[int]) -> list[str]:
    """What the figures of a pipeline rest on. ranks: simulated."""
    count = compute_micro_batches(cfg)[1]
    traced = max(count_micro_batches_to_trace(cfg, place) for place in range(cfg.parallel.pipeline))
    lines = [
        "pipeline: every rank computes as fast as its trace says; a transfer begins when both ranks"
        " are ready"
    ]
    if traced < count:
        lines.append(
            f"pipeline: at most {traced} of the {count} micro-batches of a step are traced on a"
            " rank, which is enough to hold all that it holds with all of them; the others take as"
            " long as those like them"
        )
    if len(ranks) < cfg.parallel.pipeline:
        lines.append(
            "pipeline: --rank leaves pipeline ranks out, so neither the heaviest rank nor the time"
            " is certain"
        )
    return lines


def merge_layer_rows(places: Sequence[list[LayerRow]]) -> list[LayerRow]:
    """The table of modules of a whole model from those of its places, each module once, in the
    model's order.
    """
    found: dict[str, tuple[tuple[int, int, int], LayerRow]] = {}
    for rows in places:
        after = False
        for at, row in enumerate(rows):
            number = next((int(piece) for piece in row.module.split(".") if piece.isdigit()), None)
            after = after or number is not None
            place = (1, number, at) if number is not None else (2 if after else 0, 0, at)
            if row.module not in found or not row.module:
                found[row.module] = (place, row)
    return [row for _, row in sorted(found.values(), key=lambda entry: entry[0])]


# What the router of a mixture of experts changes in a plan: no byte, and times.


def get_mixture(cfg: Any) -> MixtureSpec | None:
    """The mixture of a plannable config's model; None without one, and of a model that is not
    native.
    """
    return getattr(read_spec(cfg), "mixture", None)


def add_router_choices(
    plan: Plan,
    cfg: Any,
    simulated: Mapping[int, Simulated],
    hardware: Hardware,
    calibration: Calibration | None,
) -> None:
    """Adds to the plan of a mixture how long a step takes if the router's choice is as uneven as it
    can be, and what that means for its figures. simulated: by rank.
    """
    mixture = get_mixture(cfg)
    if mixture is None:
        return
    line = (
        f"each token is computed by {mixture.top_k} of {mixture.num_experts} experts and none is"
        " dropped: all bytes, and the verdict, which is of bytes, are the same whatever the router"
        " chooses"
    )
    if plan.time is not None:
        wanted = simulated if plan.pipeline else {plan.heaviest.rank: simulated[plan.heaviest.rank]}
        timings = {
            rank: schedule(one.trace, STEADY, hardware, calibration, mixture.top_k)
            for rank, one in wanted.items()
        }
        seconds = build_simulated_step(cfg, simulated, timings, hardware, calibration).seconds
        plan.time.same_experts = seconds
        line += f"; times are those of even loads, {format_duration(plan.time.step)} a step"
        if seconds is not None:
            line += (
                f", and {format_duration(seconds)} if all tokens of a micro-batch go to the same"
                f" {mixture.top_k}"
            )
    plan.assumptions.append(line)

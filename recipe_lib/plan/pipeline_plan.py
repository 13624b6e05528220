"""What a plan says of a pipeline: the stages of each place, what they exchange, and when they do what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.mesh import micro_batches, stages_per_rank
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.parallel.pipeline.schedule_memory import counted_in_flight
from recipe_lib.parallel.pipeline.schedule_time import theoretical_bubble
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.result import ActionSpan, LayerRow, PipelinePlan, Plan, StagePlan, ranks_of_place
from recipe_lib.plan.tables import outermost
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.timing.pipeline_time import PipelineTime, pipeline_time, whole_step
from recipe_lib.plan.timing.stream_schedule import StepTime, is_transfer, schedule
from recipe_lib.plan.trace import ACTION, OP, Trace
from recipe_lib.plan.tracing.pipeline_actions import orders_of, traced_micro_batches
from recipe_lib.plan.tracing.simulate import STEADY, Simulated
from recipe_lib.plan.world.shape_only_model import spec_of
from recipe_lib.units import format_duration


@dataclass(frozen=True)
class Staged:
    """A pipeline and its time. sums: of the step of the rank that computes the longest, trace: of that rank; step:
    seconds; None all where not every place was simulated."""

    plan: PipelinePlan
    sums: StepTime | None = None
    step: float | None = None
    trace: Trace | None = None


def first_of_each_place(parallel: Any, ranks: int) -> tuple[int, ...]:
    """The first rank of each place in the pipeline; without one rank 0. The shards of the first are the largest."""
    return tuple(place * (ranks // parallel.pipeline) for place in range(parallel.pipeline))


def staged(
    cfg: Any,
    simulated: Mapping[int, Simulated],
    timings: Mapping[int, StepTime] | None,
    hardware: Hardware,
    calibration: Calibration | None,
) -> Staged | None:
    """The pipeline of a plan; None without one. simulated, timings: by rank; timings: None where none are wanted."""
    if cfg.parallel.pipeline == 1:
        return None
    size, count = micro_batches(cfg)
    firsts: dict[int, int] = {}  # by place, the first rank simulated
    for rank, found in simulated.items():
        firsts.setdefault(found.coordinates["pipeline"], rank)
    firsts = dict(sorted(firsts.items()))
    places = [_stage_plan(cfg, place, rank, simulated[rank], count) for place, rank in firsts.items()]
    plan = PipelinePlan(
        schedule=cfg.parallel.pipeline_schedule,
        stages_per_rank=stages_per_rank(cfg.parallel),
        micro_batches=count,
        micro_batch_size=size,
        traced=[traced_micro_batches(cfg, place) for place in firsts],
        places=places,
        ideal=theoretical_bubble(
            cfg.parallel.pipeline_schedule, cfg.parallel.pipeline, count, stages_per_rank(cfg.parallel)
        ),
    )
    if timings is None or len(firsts) < cfg.parallel.pipeline:
        return Staged(plan)
    traces = {place: simulated[rank].trace for place, rank in firsts.items()}
    own = {place: timings[rank] for place, rank in firsts.items()}
    time = pipeline_time(cfg.parallel, count, traces, own, STEADY, hardware, calibration)
    _with_times(plan, time)
    busiest = max(firsts, key=lambda place: places[place].compute)
    sums = whole_step(traces[busiest], own[busiest], STEADY, hardware, calibration)
    return Staged(plan, sums, time.step, traces[busiest])


def _with_times(plan: PipelinePlan, time: PipelineTime) -> None:
    """Puts the time line into the plan."""
    line = time.timeline
    plan.seconds, plan.bubble = float(line.total), float(line.bubble)
    for place in plan.places:
        place.compute, place.idle = float(line.busy(place.place)), float(line.idle_share(place.place))
    plan.spans = [
        ActionSpan(
            span.rank,
            span.action.stage,
            span.action.kind,
            span.action.micro_batch,
            float(span.start),
            float(span.end),
        )
        for span in line.spans
    ]


def _stage_plan(cfg: Any, place: int, rank: int, found: Simulated, count: int) -> StagePlan:
    in_flight, deferred = counted_in_flight(orders_of(cfg.parallel, count)[place])
    modules = outermost(found.modules)
    sends, sent = _exchanged(found.trace, "send")
    receives, received = _exchanged(found.trace, "recv")
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
        receives=receives,
        sent=sent,
        received=received,
        ranks=ranks_of_place(found.mesh, place),
    )


def _exchanged(trace: Trace, operation: str) -> tuple[int, int]:
    """(tensors, bytes) that a steady step's actions send or receive."""
    tensors = num_bytes = 0
    inside = False
    for kind, number in trace.phase_events(STEADY):
        if kind == ACTION:
            inside = bool(trace.actions[number].kind)
        elif kind == OP and inside and is_transfer(trace.ops[number]):
            op = trace.ops[number]
            if op.collective is not None and op.collective.operation == operation:
                tensors, num_bytes = tensors + op.repeats, num_bytes + op.repeats * op.collective.bytes
    return tensors, num_bytes


def pipeline_assumptions(cfg: Any, ranks: Sequence[int]) -> list[str]:
    """What the figures of a pipeline rest on. ranks: simulated."""
    count = micro_batches(cfg)[1]
    traced = max(traced_micro_batches(cfg, place) for place in range(cfg.parallel.pipeline))
    lines = ["pipeline: every rank computes as fast as its trace says; a transfer begins when both ranks are ready"]
    if traced < count:
        lines.append(
            f"pipeline: at most {traced} of the {count} micro-batches of a step are traced on a rank, which "
            "is enough to hold all that it holds with all of them; the others take as long as those like them"
        )
    if len(ranks) < cfg.parallel.pipeline:
        lines.append("pipeline: --rank leaves pipeline ranks out, so neither the heaviest rank nor the time is certain")
    return lines


def layers_of_all(places: Sequence[list[LayerRow]]) -> list[LayerRow]:
    """The table of modules of a whole model from those of its places, each module once, in the model's order."""
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


def mixture_of(cfg: Any) -> MixtureSpec | None:
    """The mixture of a plannable config's model; None without one, and of a model that is not native."""
    return getattr(spec_of(cfg), "mixture", None)


def say_router_choices(
    plan: Plan, cfg: Any, simulated: Mapping[int, Simulated], hardware: Hardware, calibration: Calibration | None
) -> None:
    """Adds to the plan of a mixture how long a step takes if the router's choice is as uneven as it can be, and what
    that means for its figures. simulated: by rank."""
    mixture = mixture_of(cfg)
    if mixture is None:
        return
    line = (
        f"each token is computed by {mixture.top_k} of {mixture.num_experts} experts and none is dropped: all bytes, "
        "and the verdict, which is of bytes, are the same whatever the router chooses"
    )
    if plan.time is not None:
        seconds = _same_experts(plan, cfg, mixture.top_k, simulated, hardware, calibration)
        plan.time.same_experts = seconds
        line += f"; times are those of even loads, {format_duration(plan.time.step)} a step"
        if seconds is not None:
            line += f", and {format_duration(seconds)} if all tokens of a micro-batch go to the same {mixture.top_k}"
    plan.assumptions.append(line)


def _same_experts(
    plan: Plan,
    cfg: Any,
    experts: int,
    simulated: Mapping[int, Simulated],
    hardware: Hardware,
    calibration: Calibration | None,
) -> float | None:
    """Seconds of a step in which so many experts have all rows of every grouped matmul."""
    wanted = simulated if plan.pipeline else {plan.heaviest.rank: simulated[plan.heaviest.rank]}
    timings = {rank: schedule(one.trace, STEADY, hardware, calibration, experts) for rank, one in wanted.items()}
    pipeline = staged(cfg, simulated, timings, hardware, calibration)
    return pipeline.step if pipeline else timings[plan.heaviest.rank].step

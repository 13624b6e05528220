"""The time of a steady step: of one rank, or of a pipeline whose ranks wait for each other.

`build_simulated_step` puts the ranks' timings together, `build_time_plan` sums them up for a plan,
and `add_router_choices` says how much longer a mixture of experts may take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipe_lib.config.mesh import compute_micro_batches, count_stages_per_rank
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.parallel.pipeline.schedules import UNITS
from recipe_lib.parallel.pipeline.simulation import count_in_flight, simulate
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    ActionSpan,
    PipelinePlan,
    Plan,
    StagePlan,
    TimePlan,
    list_stage_ranks,
)
from recipe_lib.plan.simulated_world.shape_only_model import read_spec
from recipe_lib.plan.summary.module_paths import list_outermost
from recipe_lib.plan.timing.cost import (
    Calibration,
    compute_model_flops_utilization,
    count_model_flops,
    describe_error,
)
from recipe_lib.plan.timing.pipeline_time import compute_pipeline_time, scale_to_step
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    MATMULS,
    MEMORY_BOUND,
    StepTime,
    count_launched_operators,
    schedule,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.pipeline_actions import get_orders
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, Simulated
from recipe_lib.units import format_duration

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings


@dataclass(frozen=True)
class SimulatedStep:
    """A steady step of the one rank whose time is planned, or of a pipeline.

    Its times are None where none are planned, or not every place of the pipeline was simulated.
    """

    # None without one.
    pipeline: PipelinePlan | None
    # Of the rank, in a pipeline the one that computes the longest.
    sums: StepTime | None = None
    trace: Trace | None = None
    # Of all ranks.
    seconds: float | None = None


def list_first_ranks(parallel: Any, ranks: int) -> tuple[int, ...]:
    """Return the first rank of each place in the pipeline; without one rank 0."""
    # Where shards are uneven, those of the first ranks are the largest.
    return tuple(place * (ranks // parallel.pipeline) for place in range(parallel.pipeline))


def build_simulated_step(
    cfg: Any,
    simulated: Mapping[int, Simulated],
    timings: Mapping[int, StepTime] | None,
    hardware: Hardware,
    calibration: Calibration | None,
) -> SimulatedStep:
    """Return the step of a plan.

    simulated, timings: by rank; timings: without a pipeline of one rank alone, None where none are
    planned.
    """
    if cfg.parallel.pipeline == 1:
        if timings is None:
            return SimulatedStep(None)
        ((rank, timing),) = timings.items()
        return SimulatedStep(
            pipeline=None, sums=timing, trace=simulated[rank].trace, seconds=timing.step
        )
    size, count = compute_micro_batches(cfg)
    first_ranks: dict[int, int] = {}  # by place
    for rank, simulation in simulated.items():
        first_ranks.setdefault(simulation.coordinates["pipeline"], rank)
    first_ranks = dict(sorted(first_ranks.items()))
    places = [
        _build_stage_plan(cfg, place, rank=rank, simulated=simulated[rank], count=count)
        for place, rank in first_ranks.items()
    ]
    ideal = simulate(
        get_orders(cfg.parallel, count), cfg.parallel, lambda action: UNITS[action.kind]
    )
    plan = PipelinePlan(
        schedule=cfg.parallel.pipeline_schedule,
        stages_per_rank=count_stages_per_rank(cfg.parallel),
        micro_batches=count,
        micro_batch_size=size,
        places=places,
        ideal=float(ideal.bubble),
    )
    if timings is None or len(first_ranks) < cfg.parallel.pipeline:
        return SimulatedStep(plan)
    traces = {place: simulated[rank].trace for place, rank in first_ranks.items()}
    place_timings = {place: timings[rank] for place, rank in first_ranks.items()}
    timeline, seconds = compute_pipeline_time(
        cfg.parallel,
        count,
        traces=traces,
        timings=place_timings,
        phase=STEADY,
        hardware=hardware,
        calibration=calibration,
    )
    plan.seconds = float(timeline.total)
    plan.bubble = float(timeline.bubble)
    for place in plan.places:
        place.compute = float(timeline.sum_busy_seconds(place.place))
        place.idle = float(timeline.compute_idle_share(place.place))
    for span in timeline.spans:
        plan.spans.append(
            ActionSpan(
                place=span.rank,
                stage=span.action.stage,
                kind=span.action.kind,
                micro_batch=span.action.micro_batch,
                start=float(span.start),
                end=float(span.end),
            )
        )
    busiest = max(first_ranks, key=lambda place: places[place].compute)
    sums = scale_to_step(
        traces[busiest],
        place_timings[busiest],
        phase=STEADY,
        hardware=hardware,
        calibration=calibration,
    )
    return SimulatedStep(pipeline=plan, sums=sums, trace=traces[busiest], seconds=seconds)


def _build_stage_plan(
    cfg: Any, place: int, rank: int, simulated: Simulated, count: int
) -> StagePlan:
    """Return the stages of a place in a pipeline of `count` micro-batches, times left at 0."""
    in_flight, deferred = count_in_flight(get_orders(cfg.parallel, count)[place])
    modules = list_outermost(simulated.modules)
    sends = 0
    sent = 0
    for action, _, op in simulated.trace.iterate_action_ops(STEADY):
        if action.kind and op.collective is not None and op.collective.operation == "send":
            sends += op.repeats
            sent += op.repeats * op.collective.bytes
    return StagePlan(
        place=place,
        rank=rank,
        stages=list(simulated.stages),
        layers=[[layers[0], layers[-1]] for layers in simulated.stages.values()],
        parameters=sum(row.parameters for row in modules),
        trained=sum(row.trained for row in modules),
        in_flight=in_flight,
        deferred=deferred,
        compute=0.0,
        idle=0.0,
        sends=sends,
        sent=sent,
        ranks=list_stage_ranks(simulated.mesh, place),
    )


def build_time_plan(
    step: SimulatedStep, simulated: Mapping[int, Simulated], settings: "PlanSettings", dtype: str
) -> TimePlan | None:
    """Return the times of the heaviest rank, in a pipeline of the one that computes the longest.

    It is None where no time is planned, or the places of a pipeline are not all known. simulated:
    by rank. dtype: of the run, whose dense rate the MFU is a share of.
    """
    sums = step.sums
    seconds = step.seconds
    if sums is None or step.trace is None or seconds is None:
        return None
    steps = settings.steps or settings.sequence.steps
    # A mean over places is one over ranks: each place has as many.
    flops = [count_model_flops(simulation.trace, STEADY) for simulation in simulated.values()]
    tokens = next(iter(simulated.values())).tokens
    kinds = sum_time_by_kind(
        step.trace, STEADY, hardware=settings.hardware, calibration=settings.calibration
    )
    return TimePlan(
        compute=sums.compute,
        communication=sums.communication,
        exposed=sums.exposed,
        launch=sums.launch,
        step=seconds,
        tokens_per_step=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        mfu=compute_model_flops_utilization(
            sum(flops) / len(flops), seconds, hardware=settings.hardware, dtype=dtype
        ),
        steps=steps,
        total=steps * seconds if steps else None,
        calibrated=settings.calibration is not None,
        error=describe_error(settings.hardware, settings.calibration),
        copies=sums.copies,
        copies_exposed=sums.copies_exposed,
        on_host=sums.on_host,
        matmuls=kinds[MATMULS],
        attention=kinds[ATTENTION],
        memory_bound=kinds[MEMORY_BOUND],
        idle=max(0.0, seconds - sums.compute - sums.exposed - sums.copies_exposed - sums.on_host),
        operators=count_launched_operators(step.trace, STEADY),
    )


# What the router of a mixture of experts changes in a plan: no byte, and times.


def get_mixture(cfg: Any) -> MixtureSpec | None:
    """Return the mixture of a plannable config's native model; None without one."""
    return getattr(read_spec(cfg), "mixture", None)


def add_router_choices(
    plan: Plan,
    cfg: Any,
    simulated: Mapping[int, Simulated],
    hardware: Hardware,
    calibration: Calibration | None,
) -> None:
    """Add to a mixture's plan how long a step takes if the router chooses as unevenly as it can.

    An assumption says what that means for the plan's figures. simulated: by rank.
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
        timings = {
            rank: schedule(
                simulation.trace,
                STEADY,
                hardware=hardware,
                calibration=calibration,
                experts=mixture.top_k,
            )
            for rank, simulation in simulated.items()
            if plan.pipeline or rank == plan.heaviest.rank
        }
        seconds = build_simulated_step(
            cfg, simulated, timings=timings, hardware=hardware, calibration=calibration
        ).seconds
        plan.time.same_experts = seconds
        line += f"; times are those of even loads, {format_duration(plan.time.step)} a step"
        if seconds is not None:
            line += (
                f", and {format_duration(seconds)} if all tokens of a micro-batch go to the same"
                f" {mixture.top_k}"
            )
    plan.assumptions.append(line)

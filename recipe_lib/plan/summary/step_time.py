"""The time of a steady step: of one rank, or of a pipeline whose ranks wait for each other.

`build_simulated_step` puts the ranks' timings together (`compute_pipeline_time` those of a
pipeline), `build_time_plan` sums them up for a plan, and `add_router_choices` says how much longer
a mixture of experts may take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from recipe_lib.config.mesh import compute_micro_batches, count_stages_per_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.parallel.pipeline.schedules import UNITS, Action
from recipe_lib.parallel.pipeline.simulation import Timeline, count_in_flight, simulate
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    ActionSpan,
    PipelinePlan,
    Plan,
    StagePlan,
    TimePlan,
    list_rank_groups,
)
from recipe_lib.plan.simulated_world.shape_only_model import read_spec
from recipe_lib.plan.summary.module_paths import list_outermost
from recipe_lib.plan.timing.cost import (
    Calibration,
    compute_collective_seconds,
    compute_launch_seconds,
    compute_model_flops_utilization,
    count_model_flops,
    describe_error,
)
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    MATMULS,
    MEMORY_BOUND,
    StepTime,
    count_launched_operators,
    is_kernel,
    is_transfer,
    schedule,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.simulated_micro_batches import find_stand_ins, get_orders
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, Simulated
from recipe_lib.units import format_duration


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


def find_rank_of_each_place(simulated: Mapping[int, Simulated]) -> dict[int, int]:
    """Return the first simulated rank of each place in the pipeline, in the order of places.

    simulated: by rank. Without a pipeline there is one place, 0.
    """
    # Reversed, so that of a place's ranks the first one stays.
    runs = reversed(list(simulated.items()))
    return dict(sorted({run.coordinates.get("pipeline", 0): rank for rank, run in runs}.items()))


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
    first_ranks = find_rank_of_each_place(simulated)
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
    plan.spans = [
        ActionSpan(
            place=span.rank,
            stage=span.action.stage,
            kind=span.action.kind,
            micro_batch=span.action.micro_batch,
            start=float(span.start),
            end=float(span.end),
        )
        for span in timeline.spans
    ]
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
    sends = [
        (op.repeats, op.collective.bytes)
        for action, _, op in simulated.trace.iterate_action_ops(STEADY)
        if action.kind and op.collective is not None and op.collective.operation == "send"
    ]
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
        sends=sum(times for times, _ in sends),
        sent=sum(times * num_bytes for times, num_bytes in sends),
        ranks=list_rank_groups(
            simulated.mesh, along=[dim for dim in simulated.mesh if dim != "pipeline"]
        )[place],
    )


def build_time_plan(
    step: SimulatedStep,
    simulated: Mapping[int, Simulated],
    *,
    steps: int | None,
    hardware: Hardware,
    calibration: Calibration | None,
    dtype: str,
) -> TimePlan | None:
    """Return the times of the heaviest rank, in a pipeline of the one that computes the longest.

    It is None where no time is planned, or the places of a pipeline are not all known. simulated:
    by rank. steps: of the run, if known. dtype: of the run, whose dense rate the MFU is a share of.
    """
    sums = step.sums
    seconds = step.seconds
    if sums is None or step.trace is None or seconds is None:
        return None
    # A mean over places is one over ranks: each place has as many.
    flops = [count_model_flops(simulation.trace, STEADY) for simulation in simulated.values()]
    tokens = next(iter(simulated.values())).tokens
    kinds = sum_time_by_kind(step.trace, STEADY, hardware=hardware, calibration=calibration)
    return TimePlan(
        compute=sums.compute,
        communication=sums.communication,
        exposed=sums.exposed,
        launch=sums.launch,
        step=seconds,
        tokens_per_step=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        mfu=compute_model_flops_utilization(
            sum(flops) / len(flops), seconds, hardware=hardware, dtype=dtype
        ),
        steps=steps,
        total=steps * seconds if steps else None,
        calibrated=calibration is not None,
        error=describe_error(hardware, calibration),
        copies=sums.copies,
        copies_exposed=sums.copies_exposed,
        on_host=sums.on_host,
        matmuls=kinds[MATMULS],
        attention=kinds[ATTENTION],
        memory_bound=kinds[MEMORY_BOUND],
        idle=max(0.0, seconds - sums.compute - sums.exposed - sums.copies_exposed - sums.on_host),
        operators=count_launched_operators(step.trace, STEADY),
    )


# The ranks of a pipeline on one time line. What a rank computes in an action takes what the
# schedule of its own trace says; when it can begin, and when a tensor has arrived, is simulated
# over all ranks. Before, between and after what goes through the pipeline (making batches, norms,
# the optimizer) each rank waits for the slowest.

_Seconds = dict[Action, float]


def compute_pipeline_time(
    parallel: ParallelConfig,
    count: int,
    traces: Mapping[int, Trace],
    timings: Mapping[int, StepTime],
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> tuple[Timeline, float]:
    """Return the forwards and backwards, and the seconds of a step of `count` micro-batches.

    traces, timings: of a rank for each place in the pipeline, of one phase. The time line has
    places as its ranks.
    """
    parts = [split_actions(traces[place], timing) for place, timing in timings.items()]
    runs = {place: place_runs for place, (_, place_runs) in zip(timings, parts, strict=True)}
    messages: dict[tuple[int, str], float] = {}  # seconds, by stage and kind of sending
    for trace in traces.values():
        messages |= {
            (action.stage, action.kind): compute_collective_seconds(
                op.collective, hardware, calibration
            )
            for action, _, op in trace.iterate_action_ops(phase)
            if action.kind in ("SF", "SB") and op.collective and op.collective.operation == "send"
        }
    step = sum(max(waits) for waits in zip(*(gaps for gaps, _ in parts), strict=True))
    trained: Timeline | None = None
    # All places have as many runs; one without a backward trains nothing.
    for index, run in enumerate(next(iter(runs.values()))):
        training = any(action.kind in ("B", "I") for action in run)
        seconds: _Seconds = {}
        for place, place_runs in runs.items():
            seconds |= extend_to_all(
                place_runs[index], parallel, place, count=count, training=training
            )
        timeline = simulate(
            get_orders(parallel, count, training=training),
            parallel=parallel,
            seconds=seconds.__getitem__,
            transfer=lambda send: messages.get((send.stage, send.kind), 0.0),
        )
        step += timeline.total
        if trained is None or training:
            trained = timeline
    assert trained is not None
    return trained, step


def split_actions(trace: Trace, timing: StepTime) -> tuple[list[float], list[_Seconds]]:
    """Return (gaps, runs): the seconds of each action of each run, and those outside of runs.

    Gaps are before the first run of actions, between runs, and after the last.
    """
    gaps = [0.0]
    runs: list[_Seconds] = []
    ended = 0.0
    running = False
    # An action lasts until the next one begins; the last mark is the end of a run.
    for (number, begin), (_, end) in pairwise([*timing.actions, (-1, 0.0)]):
        mark = trace.actions[number]
        if not mark.kind:  # the end of a run
            ended = begin
            running = False
            gaps.append(0.0)
            continue
        if not running:
            gaps[-1] = begin - ended
            runs.append({})
            running = True
        runs[-1][Action(mark.stage, mark.kind, mark.micro_batch)] = end - begin
    gaps[-1] = timing.step - ended
    return gaps, runs


def extend_to_all(
    run: _Seconds, parallel: ParallelConfig, place: int, count: int, training: bool
) -> _Seconds:
    """Return the seconds of a rank's actions with all micro-batches, from those traced."""
    traced = len({action.micro_batch for action in run})
    stands = find_stand_ins(
        parallel, pipeline_rank=place, traced=traced, count=count, training=training
    )
    if stands is None:
        raise ValueError(f"{traced} micro-batches cannot stand for {count}")
    return {action: run[known] for action, known in stands.items()}


def scale_to_step(
    trace: Trace,
    timing: StepTime,
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> StepTime:
    """Return the time of a rank's own step with the sums of all micro-batches.

    A trace has some of them, each of which may stand for more.
    """
    repeats: dict[int, int] = {}
    transfers = launch = 0.0
    for action, number, op in trace.iterate_action_ops(phase):
        repeats[number] = action.repeats
        launch += op.repeats * compute_launch_seconds(op, calibration, hardware.architecture)
        if op.collective is not None and is_transfer(op):
            transfers += op.repeats * compute_collective_seconds(
                op.collective, hardware, calibration
            )
    kernels = [entry for entry in timing.timeline if is_kernel(trace.ops[entry[0]])]
    alone = sum(end - start for _, start, end in kernels)
    # What runs at the same time is scaled as a whole, by how often its kernels run.
    repeated = sum((end - start) * repeats[number] for number, start, end in kernels)
    scale = repeated / alone if alone else 1.0
    moved = sum(seconds * repeats[number] for number, seconds in timing.collectives.items())
    return replace(
        timing,
        compute=timing.compute * scale,
        communication=moved + transfers,
        exposed=timing.exposed * scale,
        launch=launch,
        copies=timing.copies * scale,
        copies_exposed=timing.copies_exposed * scale,
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

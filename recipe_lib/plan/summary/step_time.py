"""Compute the time of a steady step: of one rank, or of a pipeline whose ranks wait for each other.

`build_plan.py` calls `build_simulated_step`, which joins the timings that `stream_schedule.py` made
of each simulated rank, then `build_time_plan` for the plan's figures and `add_router_choices` for
mixtures of experts. A place is a coordinate in the pipeline dimension of the mesh; an action is a
forward or backward of one micro-batch in one stage; the steady step is any after the first.
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

    Times are None where none are planned, or where not every place in the pipeline was simulated.
    """

    # None without a pipeline.
    pipeline: PipelinePlan | None
    # Sums of the rank's times, all micro-batches counted; in a pipeline, of the rank that computes
    # the longest.
    sums: StepTime | None = None
    # Trace of that rank.
    trace: Trace | None = None
    # Seconds of the step, with the waiting of a pipeline's ranks for each other.
    seconds: float | None = None


def list_first_ranks(parallel: Any, ranks: int) -> tuple[int, ...]:
    """Return the first rank of each place in the pipeline; without a pipeline, rank 0."""
    # Where a dimension divides unevenly, the first ranks have the largest shards.
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
    """Return the steady step of a plan.

    Args:
        cfg: the config of the run.
        simulated: by rank.
        timings: by rank; without a pipeline of one rank only; None: no times are planned.
        hardware: the device and its links.
        calibration: measured rates; None: those of the data sheet.
    """
    if cfg.parallel.pipeline == 1:
        if timings is None:
            return SimulatedStep(None)
        ((rank, timing),) = timings.items()
        return SimulatedStep(
            pipeline=None, sums=timing, trace=simulated[rank].trace, seconds=timing.step
        )
    micro_batch_size, num_micro_batches = compute_micro_batches(cfg)
    first_ranks = find_rank_of_each_place(simulated)  # place -> rank
    places = [
        _build_stage_plan(cfg, place, rank=rank, simulated=simulated[rank], count=num_micro_batches)
        for place, rank in first_ranks.items()
    ]
    # With equal stages and no communication time; seconds are counted in forwards.
    ideal = simulate(
        get_orders(cfg.parallel, num_micro_batches), cfg.parallel, lambda action: UNITS[action.kind]
    )
    plan = PipelinePlan(
        schedule=cfg.parallel.pipeline_schedule,
        stages_per_rank=count_stages_per_rank(cfg.parallel),
        micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        places=places,
        ideal=float(ideal.bubble),
    )
    if timings is None or len(first_ranks) < cfg.parallel.pipeline:
        return SimulatedStep(plan)
    traces = {place: simulated[rank].trace for place, rank in first_ranks.items()}
    place_timings = {place: timings[rank] for place, rank in first_ranks.items()}
    timeline, seconds = compute_pipeline_time(
        cfg.parallel,
        num_micro_batches,
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
    """Return the stages of a place in a pipeline of `count` micro-batches, without times.

    simulated: of `rank`, which is at that place.
    """
    in_flight, deferred = count_in_flight(get_orders(cfg.parallel, count)[place])
    modules = list_outermost(simulated.modules)
    # (how often, bytes) of each message; an operator stands for as many like it.
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
        # Of the groups along all other dimensions there is one for each place.
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

    Return None where no times are planned, or not all places of a pipeline are known.

    Args:
        step: from `build_simulated_step`.
        simulated: by rank.
        steps: of the run; None: not known.
        hardware: the device and its links.
        calibration: measured rates; None: those of the data sheet.
        dtype: of the run's matmuls, such as `bf16`; the MFU is a share of its dense rate.
    """
    sums = step.sums
    seconds = step.seconds
    if sums is None or step.trace is None or seconds is None:
        return None
    # One rank of each place: their mean is that of all ranks, as each place has as many.
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


# The ranks of a pipeline on one time line. A run is a pass of all micro-batches through the
# pipeline; a gap is what a rank does before, between and after runs (making batches, norms, the
# optimizer). The seconds of an action are from its rank's own trace; when it begins, and when a
# tensor arrives, is simulated over all ranks. In gaps each rank waits for the slowest.

_Seconds = dict[Action, float]  # action of a rank -> its seconds


def compute_pipeline_time(
    parallel: ParallelConfig,
    count: int,
    traces: Mapping[int, Trace],
    timings: Mapping[int, StepTime],
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> tuple[Timeline, float]:
    """Return (time line of the last run that trains, seconds of the step).

    The time line's ranks are places. Without a run that trains, the time line is of the first run.

    Args:
        parallel: the config's section.
        count: number of micro-batches.
        traces: place -> trace of a rank there.
        timings: place -> timing of that trace.
        phase: name of the traces' phase that was timed.
        hardware: the device and its links.
        calibration: measured rates; None: those of the data sheet.
    """
    gaps_and_runs = [split_actions(traces[place], timing) for place, timing in timings.items()]
    runs = {
        place: place_runs for place, (_, place_runs) in zip(timings, gaps_and_runs, strict=True)
    }
    # (stage that sends, `SF` for activations or `SB` for gradients) -> seconds of a message.
    messages: dict[tuple[int, str], float] = {}
    for trace in traces.values():
        messages |= {
            (action.stage, action.kind): compute_collective_seconds(
                op.collective, hardware, calibration
            )
            for action, _, op in trace.iterate_action_ops(phase)
            if action.kind in ("SF", "SB") and op.collective and op.collective.operation == "send"
        }
    total_seconds = sum(
        max(waits) for waits in zip(*(gaps for gaps, _ in gaps_and_runs), strict=True)
    )
    training_timeline: Timeline | None = None
    # All places have the same number of runs. One without a backward does not train: it is of a
    # reference model or a teacher, say.
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
        total_seconds += timeline.total
        if training_timeline is None or training:
            training_timeline = timeline
    assert training_timeline is not None
    return training_timeline, total_seconds


def split_actions(trace: Trace, timing: StepTime) -> tuple[list[float], list[_Seconds]]:
    """Return (gaps, runs) of a rank's step, one gap more than runs.

    A run is the seconds of each of its actions. Gaps are the seconds before the first run, between
    runs, and after the last.
    """
    gaps = [0.0]
    runs: list[_Seconds] = []
    run_end = 0.0
    in_run = False
    # An action lasts until the next one begins; the last mark is the end of a run.
    for (mark_index, begin), (_, end) in pairwise([*timing.actions, (-1, 0.0)]):
        mark = trace.actions[mark_index]
        if not mark.kind:  # no action: the end of a run
            run_end = begin
            in_run = False
            gaps.append(0.0)
            continue
        if not in_run:
            gaps[-1] = begin - run_end
            runs.append({})
            in_run = True
        runs[-1][Action(mark.stage, mark.kind, mark.micro_batch)] = end - begin
    gaps[-1] = timing.step - run_end
    return gaps, runs


def extend_to_all(
    run: _Seconds, parallel: ParallelConfig, place: int, count: int, training: bool
) -> _Seconds:
    """Return the seconds of a rank's actions for all `count` micro-batches.

    Each traced micro-batch stands for some of those that were not. Raises ValueError if too few
    were traced for that.

    run: seconds of the traced actions. place: of the rank. training: whether the run has backwards.
    """
    num_traced = len({action.micro_batch for action in run})
    stand_ins = find_stand_ins(
        parallel, pipeline_rank=place, traced=num_traced, count=count, training=training
    )
    if stand_ins is None:
        raise ValueError(f"{num_traced} micro-batches cannot stand for {count}")
    return {action: run[traced_action] for action, traced_action in stand_ins.items()}


def scale_to_step(
    trace: Trace,
    timing: StepTime,
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> StepTime:
    """Return a rank's timing with its sums scaled from the traced micro-batches to all of them.

    A traced micro-batch may stand for several; `repeats` of its actions says for how many. phase:
    name of the trace's phase that was timed.
    """
    repeats: dict[int, int] = {}  # index of an operator -> how many times its action counts
    transfer_seconds = launch_seconds = 0.0
    for action, op_index, op in trace.iterate_action_ops(phase):
        repeats[op_index] = action.repeats
        launch_seconds += op.repeats * compute_launch_seconds(
            op, calibration, hardware.architecture
        )
        if op.collective is not None and is_transfer(op):
            transfer_seconds += op.repeats * compute_collective_seconds(
                op.collective, hardware, calibration
            )
    kernels = [entry for entry in timing.timeline if is_kernel(trace.ops[entry[0]])]
    traced_seconds = sum(end - start for _, start, end in kernels)
    # Times during which other streams run too cannot be told apart by action: all are scaled by
    # one factor, that of the kernels.
    all_seconds = sum((end - start) * repeats[op_index] for op_index, start, end in kernels)
    scale = all_seconds / traced_seconds if traced_seconds else 1.0
    collective_seconds = sum(
        seconds * repeats[op_index] for op_index, seconds in timing.collectives.items()
    )
    return replace(
        timing,
        compute=timing.compute * scale,
        communication=collective_seconds + transfer_seconds,
        exposed=timing.exposed * scale,
        launch=launch_seconds,
        copies=timing.copies * scale,
        copies_exposed=timing.copies_exposed * scale,
    )


# The router of a mixture of experts: its choices change no bytes of a plan, only times.


def get_mixture(cfg: Any) -> MixtureSpec | None:
    """Return the spec of the model's mixture of experts.

    None for a dense model, and for one whose architecture is not in this library.
    """
    return getattr(read_spec(cfg), "mixture", None)


def add_router_choices(
    plan: Plan,
    cfg: Any,
    simulated: Mapping[int, Simulated],
    hardware: Hardware,
    calibration: Calibration | None,
) -> None:
    """Add to the plan of a mixture of experts the time of a step with the most uneven router.

    Sets `plan.time.same_experts` and appends an assumption; leaves a plan without a mixture as it
    is. simulated: by rank.
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

"""When each rank of a pipeline does what, and how long its step takes: the ranks' own traces on one
time line.

What a rank computes in an action takes what the schedule of its own trace says; when it can begin,
and when a tensor has arrived, is simulated over all ranks. Before, between and after what goes
through the pipeline (making batches, norms, the optimizer) each rank waits for the slowest.
"""

from collections.abc import Mapping
from dataclasses import replace

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedules import Action
from recipe_lib.parallel.pipeline.simulation import Timeline, simulate
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.timing.cost import (
    Calibration,
    compute_collective_seconds,
    compute_launch_seconds,
)
from recipe_lib.plan.timing.stream_schedule import StepTime, is_kernel, is_transfer
from recipe_lib.plan.tracing.pipeline_actions import find_stand_ins, get_orders
from recipe_lib.plan.tracing.trace import Trace

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
    """Return the forwards and backwards, places in the pipeline as their ranks, and the seconds of
    a whole step of `count` micro-batches. traces, timings: of a rank for each place in the
    pipeline, of one phase.
    """
    parts = {place: split_actions(traces[place], timings[place]) for place in timings}
    messages: dict[tuple[int, str], float] = {}
    for trace in traces.values():
        messages |= time_messages(trace, phase, hardware, calibration)
    gaps = zip(*(found[0] for found in parts.values()), strict=True)
    step = sum(max(waits) for waits in gaps)
    trained: Timeline | None = None
    for number, run in enumerate(next(iter(parts.values()))[1]):
        training = any(action.kind in ("B", "I") for action in run)
        seconds: _Seconds = {}
        for place, found in parts.items():
            seconds |= extend_to_all(found[1][number], parallel, place, count, training)
        timeline = simulate(
            get_orders(parallel, count, training=training),
            parallel,
            seconds.__getitem__,
            lambda send: messages.get((send.stage, send.kind), 0.0),
        )
        step += timeline.total
        if trained is None or training:
            trained = timeline
    assert trained is not None
    return trained, step


def split_actions(trace: Trace, timing: StepTime) -> tuple[list[float], list[_Seconds]]:
    """(seconds before the first run of actions, between runs, and after the last; by run those of
    each action).
    """
    gaps, runs = [0.0], list[_Seconds]()
    ended, running = 0.0, False
    for (number, begin), (_, end) in zip(
        timing.actions, [*timing.actions[1:], (-1, 0.0)], strict=True
    ):
        mark = trace.actions[number]
        if not mark.kind:
            ended, running = begin, False
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
    """Seconds of a rank's actions with all micro-batches, from those that were traced."""
    traced = len({action.micro_batch for action in run})
    stands = find_stand_ins(parallel, place, traced, count, training=training)
    if stands is None:
        raise ValueError(f"{traced} micro-batches cannot stand for {count}")
    return {action: run[known] for action, known in stands.items()}


def time_messages(
    trace: Trace, phase: str, hardware: Hardware, calibration: Calibration | None
) -> dict[tuple[int, str], float]:
    """By stage and kind of sending the seconds that it takes; what a stage does not send is not in
    it.
    """
    seconds: dict[tuple[int, str], float] = {}
    for action, _, op in trace.iterate_action_ops(phase):
        if (
            action.kind in ("SF", "SB")
            and op.collective is not None
            and op.collective.operation == "send"
        ):
            seconds[action.stage, action.kind] = compute_collective_seconds(
                op.collective, hardware, calibration
            )
    return seconds


def scale_to_step(
    trace: Trace,
    timing: StepTime,
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> StepTime:
    """Return the time of a rank's own step with the sums of all micro-batches, of which a trace has
    some.
    """
    counted: dict[int, int] = {}
    transfers = launch = 0.0
    for action, number, op in trace.iterate_action_ops(phase):
        counted[number] = action.repeats
        launch += op.repeats * compute_launch_seconds(op, calibration, hardware.architecture)
        if op.collective is not None and is_transfer(op):
            transfers += op.repeats * compute_collective_seconds(
                op.collective, hardware, calibration
            )
    kernels = [entry for entry in timing.timeline if is_kernel(trace.ops[entry[0]])]
    alone = sum(end - start for _, start, end in kernels)
    scale = (
        sum((end - start) * counted[number] for number, start, end in kernels) / alone
        if alone
        else 1.0
    )
    moved = sum(seconds * counted[number] for number, seconds in timing.collectives.items())
    return replace(
        timing,
        compute=timing.compute * scale,
        communication=moved + transfers,
        exposed=timing.exposed * scale,
        launch=launch,
        copies=timing.copies * scale,
        copies_exposed=timing.copies_exposed * scale,
    )

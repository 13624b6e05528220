"""The time of a pipeline's step: the ranks' own traces on one time line.

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
from recipe_lib.plan.tracing.simulated_micro_batches import find_stand_ins, get_orders
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
    """Return the forwards and backwards, and the seconds of a step of `count` micro-batches.

    traces, timings: of a rank for each place in the pipeline, of one phase. The time line has
    places as its ranks.
    """
    gaps: dict[int, list[float]] = {}
    runs: dict[int, list[_Seconds]] = {}
    messages: dict[tuple[int, str], float] = {}
    for place, timing in timings.items():
        gaps[place], runs[place] = split_actions(traces[place], timing)
    for trace in traces.values():
        messages |= time_messages(trace, phase, hardware=hardware, calibration=calibration)
    step = sum(max(waits) for waits in zip(*gaps.values(), strict=True))
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
    """Return (gaps, runs): the seconds of each action of each run, and those outside of runs.

    Gaps are before the first run of actions, between runs, and after the last.
    """
    gaps = [0.0]
    runs: list[_Seconds] = []
    ended = 0.0
    running = False
    # An action lasts until the next one begins.
    ends = [begin for _, begin in timing.actions[1:]]
    for (number, begin), end in zip(timing.actions, [*ends, 0.0], strict=True):
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
    stands = find_stand_ins(parallel, place, traced, count, training=training)
    if stands is None:
        raise ValueError(f"{traced} micro-batches cannot stand for {count}")
    return {action: run[known] for action, known in stands.items()}


def time_messages(
    trace: Trace, phase: str, hardware: Hardware, calibration: Calibration | None
) -> dict[tuple[int, str], float]:
    """Return the seconds of each message by (stage, kind of sending)."""
    seconds: dict[tuple[int, str], float] = {}
    for action, _, op in trace.iterate_action_ops(phase):
        collective = op.collective
        if action.kind in ("SF", "SB") and collective and collective.operation == "send":
            seconds[action.stage, action.kind] = compute_collective_seconds(
                collective, hardware, calibration
            )
    return seconds


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

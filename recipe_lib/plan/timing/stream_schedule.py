"""Schedule the operators of a traced phase on streams, links and the host.

`build_plan.py` calls `schedule` for the times of a steady step (any after the first). The host
issues operators one after the other; each starts when it has been issued, and its stream and link
are free. Kernels on different streams do not slow each other, and other ranks are taken to be as
fast as this one. A pipeline's sends and receives are left out: `summary/step_time.py` puts its
ranks together. Imports no torch.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.timing.cost import (
    Calibration,
    compute_launch_seconds,
    compute_op_seconds,
    count_issued_matmuls,
    is_attention,
    is_wait,
    set_loads,
)
from recipe_lib.plan.tracing.trace import ACTION, HOST, OP, RECORD, WAIT, ActionMark, Op, Trace


@dataclass
class StepTime:
    """The times of a phase, seconds."""

    # While kernels run, on one stream or several.
    compute: float
    # Sum of all collectives, each while nothing else runs.
    communication: float
    # While a collective runs and no kernel does.
    exposed: float
    # CPU time of the host for issuing all operators.
    launch: float
    # From the first operator issued to the last one done.
    step: float
    # Index in `Trace.ops` -> seconds of a collective alone.
    collectives: dict[int, float]
    # (index in `Trace.ops`, start, end) of each operator on the device, in the order issued.
    timeline: list[tuple[int, float, float]]
    # In a pipeline: (index in `Trace.actions`, time at which the compute stream has finished all
    # that was issued before it). An action counts once, however many it stands for; sends and
    # receives do not count.
    actions: list[tuple[int, float]] = field(default_factory=list)
    # Sum of copies between host and device, each while nothing else runs.
    copies: float = 0.0
    # While a copy runs and no kernel does.
    copies_exposed: float = 0.0
    # Operators that the host's CPU computes.
    on_host: float = 0.0


def schedule(
    trace: Trace,
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
    experts: int = 0,
) -> StepTime:
    """Return the times of one phase of a trace. Raises ValueError if it was not traced.

    Collectives on a link (inside the machine, or the network) run one after the other, and so do
    copies in one direction between host and device. A collective that `waits`, or receives, holds
    up the stream that issued it. Another one is waited for by the next `wait_tensor` of that
    stream, the oldest first, or through the next event recorded there, or else by the end of the
    phase.

    experts: number of experts that all rows of each grouped matmul go to; 0: all, evenly.
    """
    # Time at which the host is free, and two sums of StepTime.
    host = launch = on_host = 0.0
    # Times at which each stream and link is free, and at which each event is reached.
    streams: dict[int, float] = defaultdict(float)
    links: dict[str, float] = defaultdict(float)
    recorded: dict[int, float] = defaultdict(float)
    # Stream -> ends of collectives that it has not waited for, oldest first.
    pending: dict[int, deque[float]] = defaultdict(deque)
    timeline: list[tuple[int, float, float]] = []
    actions: list[tuple[int, float]] = []
    action = ActionMark()  # that the operators belong to; of kind "" outside of a pipeline's
    in_turn = hardware.architecture == "cpu"  # the CPU both issues and computes each operator
    for kind, index in trace.iterate_events(phase):
        if kind == OP:
            op = trace.ops[index]
            if action.kind and is_transfer(op):  # between ranks of a pipeline
                continue
            repeats = op.repeats // action.repeats  # each action once, however many it stands for
            issuing = compute_launch_seconds(op, calibration, hardware.architecture) * repeats
            matmuls = count_issued_matmuls(op, hardware.architecture)
            if matmuls:  # first the host waits, to read the numbers of rows of each matmul
                host = max(host, streams[op.stream])
            host += issuing
            launch += issuing
            loaded_op = set_loads(op, experts) if experts else op
            seconds = repeats * compute_op_seconds(loaded_op, hardware, calibration)
            if op.on_host or (in_turn and is_kernel(op) and not is_wait(op)):
                host += seconds
                if op.on_host:
                    on_host += seconds
                else:
                    timeline.append((index, host - seconds, host))
                    streams[op.stream] = host
                continue
            # Time at which the operator, or the first of its matmuls, is issued: it starts while
            # the host issues the others.
            issued = host - issuing * matmuls / (1 + matmuls) if matmuls else host
            occupied = _list_links(op, hardware)
            start = max([issued, streams[op.stream], *(links[link] for link in occupied)])
            if is_wait(op) and pending[op.stream]:
                start = max(start, pending[op.stream].popleft())
            end = start + seconds
            timeline.append((index, start, end))
            links.update(dict.fromkeys(occupied, end))
            if op.collective and not op.collective.waits and op.collective.operation != "recv":
                pending[op.stream].append(end)
            else:
                streams[op.stream] = max(end, host) if matmuls else end
                host = max(host, end) if in_turn else host
        elif kind == RECORD:
            sync = trace.syncs[index]
            # Who waits for the event waits for the stream's collectives, too.
            recorded[sync.event] = max([streams[sync.stream], *pending[sync.stream]])
            pending[sync.stream].clear()
        elif kind == WAIT:
            sync = trace.syncs[index]
            if sync.stream == HOST:
                host = max(host, recorded[sync.event])
            else:
                streams[sync.stream] = max(streams[sync.stream], recorded[sync.event])
        elif kind == ACTION:
            action = trace.actions[index]
            actions.append((index, streams[0]))  # stream 0 computes
    return replace(
        _sum_up(trace, timeline, host=host, actions=actions), launch=launch, on_host=on_host
    )


def is_transfer(op: Op) -> bool:
    """Return True if an operator sends to or receives from one other rank, as in a pipeline."""
    return op.collective is not None and op.collective.operation in ("send", "recv")


def is_kernel(op: Op) -> bool:
    """Return True if an operator is neither a collective nor a copy between host and device."""
    return op.collective is None and not op.transfer


def _list_links(op: Op, hardware: Hardware) -> tuple[str, ...]:
    """Return the links that an operator occupies: `machine`, `network`, `to_host`, `to_device`."""
    if op.transfer:
        return (op.transfer,)
    if op.collective is None:
        return ()
    if len({rank // hardware.ranks_per_node for rank in op.collective.ranks}) > 1:
        return ("network",)
    # Cards that are connected by PCIe send and receive over the same bus as copies with the host.
    return ("to_host", "to_device") if hardware.link.kind.startswith("pcie") else ("machine",)


def _sum_up(
    trace: Trace,
    timeline: list[tuple[int, float, float]],
    host: float,
    actions: list[tuple[int, float]],
) -> StepTime:
    """Return the sums of a time line; `launch` and `on_host` are left to the caller.

    host: time at which the host is done. actions: as in StepTime.
    """
    collectives = {
        index: end - start for index, start, end in timeline if trace.ops[index].collective
    }
    kernels = [(start, end) for index, start, end in timeline if is_kernel(trace.ops[index])]
    copies = [(start, end) for index, start, end in timeline if trace.ops[index].transfer]
    moving = [(start, end) for index, start, end in timeline if index in collectives]
    compute = _count_covered(kernels)
    return StepTime(
        compute=compute,
        communication=sum(collectives.values()),
        exposed=_count_covered(kernels + moving) - compute,
        launch=host,
        step=max([host, *(end for _, _, end in timeline)]),
        collectives=collectives,
        timeline=timeline,
        actions=actions,
        copies=sum(end - start for start, end in copies),
        copies_exposed=_count_covered(kernels + copies) - compute,
    )


def _count_covered(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the spans (start, end) covers."""
    total = run_start = run_end = 0.0
    for start, end in sorted(spans):
        if start > run_end:
            total += run_end - run_start
            run_start = start
        run_end = max(run_end, end)
    return total + run_end - run_start


# The time of a step by kind of operator. Seconds are those of each operator alone on the device,
# all micro-batches counted. What runs at the same time counts twice, so that the kinds add up to
# more than a step.

MATMULS = "matmuls"
ATTENTION = "attention"
MEMORY_BOUND = "memory-bound kernels"
COPIES = "copies"
COMMUNICATION = "communication"
KINDS = (MATMULS, ATTENTION, MEMORY_BOUND, COPIES, COMMUNICATION)


def classify_op(op: Op) -> str:
    """Return one of KINDS; "" for an operator that takes no time on the device."""
    if op.collective is not None:
        return COMMUNICATION
    if op.transfer:
        return COPIES
    if is_wait(op) or op.on_host or not (op.flops or op.bytes):
        return ""
    if is_attention(op):
        return ATTENTION
    return MATMULS if op.flops else MEMORY_BOUND


def sum_time_by_kind(
    trace: Trace, phase: str, hardware: Hardware, calibration: Calibration | None = None
) -> dict[str, float]:
    """Return kind -> seconds, for all KINDS. Raises ValueError if the phase was not traced."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for op in trace.iterate_ops(phase):
        if kind := classify_op(op):
            seconds[kind] += op.repeats * compute_op_seconds(op, hardware, calibration)
    return seconds


def count_launched_operators(trace: Trace, phase: str) -> int:
    """Return the number of operators that the host issues, with collectives and copies.

    Raises ValueError if the phase was not traced.
    """
    return sum(op.repeats for op in trace.iterate_ops(phase) if not is_wait(op))

"""When each operator of a traced phase runs: a list schedule over the device's streams, the links
and the host.

No torch in here. The host issues operators one after the other; an operator starts when it has been
issued, when its stream is free and, for a collective, when its link is. Kernels on different
streams do not slow each other, and the other ranks are taken to be as fast as this one: a stage of
a pipeline never waits for its neighbor here, and what they exchange is left out; `pipeline_time`
puts the ranks together.
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
    """A phase, seconds. compute: while kernels run, on one stream or several; communication: of all
    collectives, alone; exposed: while a collective runs and no kernel does; copies, copies_exposed:
    the same of copies between host and device; launch: the host's, to issue all; on_host: what it
    computes itself; step: from the first operator issued to the last one done. collectives: by
    number in `Trace.ops`, how long each takes alone. timeline: (number, start, end), as issued.
    actions: of a rank of a pipeline, (number in `Trace.actions`, when the stream that computes was
    done with all before it); what is in one is here as often as it was traced, and what ranks
    exchange in it is not here.
    """

    compute: float
    communication: float
    exposed: float
    launch: float
    step: float
    collectives: dict[int, float]
    timeline: list[tuple[int, float, float]]
    actions: list[tuple[int, float]] = field(default_factory=list)
    copies: float = 0.0
    copies_exposed: float = 0.0
    on_host: float = 0.0


def schedule(
    trace: Trace,
    phase: str,
    hardware: Hardware,
    calibration: Calibration | None = None,
    experts: int = 0,
) -> StepTime:
    """Simulates one phase of a trace; ValueError if it was not traced. experts: that have all rows
    of each grouped matmul; 0: all have as many.

    A collective runs on a link (inside the machine, or the network), one after the other, as do
    copies between host and device, each way for itself. One that `waits`, or receives, holds up the
    stream that issued it. One that does not is waited for by the next `wait_tensor` of that stream,
    the oldest first, or through the next event recorded there; else only the end of the phase waits
    for it.
    """
    host = launch = on_host = 0.0
    streams: dict[int, float] = defaultdict(
        float
    )  # by stream, link and event: when it is free, or has come
    links: dict[str, float] = defaultdict(float)
    recorded: dict[int, float] = defaultdict(float)
    pending: dict[int, deque[float]] = defaultdict(
        deque
    )  # by stream, ends of collectives that it has not waited for
    timeline: list[tuple[int, float, float]] = []
    actions: list[tuple[int, float]] = []
    action = ActionMark()
    in_turn = hardware.architecture == "cpu"  # what issues the operators computes them
    for kind, number in trace.iterate_events(phase):
        if kind == OP:
            op = trace.ops[number]
            if action.kind and is_transfer(op):
                continue
            repeats = op.repeats // action.repeats
            issuing = compute_launch_seconds(op, calibration, hardware.architecture) * repeats
            matmuls = count_issued_matmuls(op, hardware.architecture)
            if matmuls:  # of which the host reads the numbers of rows first
                host = max(host, streams[op.stream])
            host, launch = host + issuing, launch + issuing
            seconds = repeats * compute_op_seconds(
                set_loads(op, experts) if experts else op, hardware, calibration
            )
            if op.on_host or (in_turn and is_kernel(op) and not is_wait(op)):
                host += seconds
                if op.on_host:
                    on_host += seconds
                else:
                    timeline.append((number, host - seconds, host))
                    streams[op.stream] = host
                continue
            issued = host if not matmuls else host - issuing * matmuls / (1 + matmuls)
            start = max(issued, streams[op.stream])
            if is_wait(op) and pending[op.stream]:
                start = max(start, pending[op.stream].popleft())
            occupied = _list_links(op, hardware)
            start = max([start, *(links[link] for link in occupied)])
            end = start + seconds
            timeline.append((number, start, end))
            links.update(dict.fromkeys(occupied, end))
            if op.collective and not op.collective.waits and op.collective.operation != "recv":
                pending[op.stream].append(end)
            else:
                streams[op.stream] = max(end, host) if matmuls else end
                host = max(host, end) if in_turn else host
        elif kind == RECORD:
            sync = trace.syncs[number]
            recorded[sync.event] = max([streams[sync.stream], *pending[sync.stream]])
            pending[sync.stream].clear()
        elif kind == WAIT:
            sync = trace.syncs[number]
            if sync.stream == HOST:
                host = max(host, recorded[sync.event])
            else:
                streams[sync.stream] = max(streams[sync.stream], recorded[sync.event])
        elif kind == ACTION:
            action = trace.actions[number]
            actions.append((number, streams[0]))
    return replace(_sum_up(trace, timeline, host, actions), launch=launch, on_host=on_host)


def is_transfer(op: Op) -> bool:
    """Whether it sends to or receives from another rank."""
    return op.collective is not None and op.collective.operation in ("send", "recv")


def is_kernel(op: Op) -> bool:
    """Whether it computes: it is neither a collective nor a copy between host and device."""
    return op.collective is None and not op.transfer


def _list_links(op: Op, hardware: Hardware) -> tuple[str, ...]:
    """What an operator occupies: the links of one machine, the network, or one way of the bus to
    the host; where cards reach each other by that bus, a collective of one machine takes both of
    its ways.
    """
    if op.transfer:
        return (op.transfer,)
    if op.collective is None:
        return ()
    if len({rank // hardware.ranks_per_node for rank in op.collective.ranks}) > 1:
        return ("network",)
    return ("to_host", "to_device") if hardware.link.kind.startswith("pcie") else ("machine",)


def _sum_up(
    trace: Trace,
    timeline: list[tuple[int, float, float]],
    host: float,
    actions: list[tuple[int, float]],
) -> StepTime:
    collectives = {
        number: end - start for number, start, end in timeline if trace.ops[number].collective
    }
    kernels = [(start, end) for number, start, end in timeline if is_kernel(trace.ops[number])]
    copies = [(start, end) for number, start, end in timeline if trace.ops[number].transfer]
    moving = [(start, end) for number, start, end in timeline if number in collectives]
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
    """Return the seconds in which one of the spans runs, or several."""
    total = begun = ended = 0.0
    for start, end in sorted(spans):
        if start > ended:
            total += ended - begun
            begun = start
        ended = max(ended, end)
    return total + ended - begun


# What a planned step's kernels spend their time on: matmuls, attention, and what moves bytes.
#
# No torch in here. Seconds are those of each operator alone on the device, all micro-batches
# counted; what runs at the same time counts twice, so the sums of kinds are no times of a step. See
# `stream_schedule` for when it all runs.


MATMULS, ATTENTION, MEMORY_BOUND = "matmuls", "attention", "memory-bound kernels"
COPIES, COMMUNICATION = "copies", "communication"
KINDS = (MATMULS, ATTENTION, MEMORY_BOUND, COPIES, COMMUNICATION)


def classify_op(op: Op) -> str:
    """One of KINDS; "" for what takes no time by itself."""
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
    """Seconds by kind, KINDS in order; ValueError if the phase was not traced."""
    found = dict.fromkeys(KINDS, 0.0)
    for op in trace.iterate_ops(phase):
        if kind := classify_op(op):
            found[kind] += op.repeats * compute_op_seconds(op, hardware, calibration)
    return found


def count_launched_operators(trace: Trace, phase: str) -> int:
    """How many operators the host issues, collectives and copies among them; ValueError if the
    phase was not traced.
    """
    return sum(op.repeats for op in trace.iterate_ops(phase) if not is_wait(op))

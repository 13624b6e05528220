"""Memory that is freed while another stream may still use it: FSDP1's record_stream in a plan.

A block that was marked so is active, in torch's sense, until the work issued on those streams
before it was freed is done, and the host finds out when it next asks for memory. So it depends on
how far the host is ahead: the events of a trace are put on a time line here (operators as
`recipe_lib.plan.timing` has them), with the waits of FSDP's own limiter of gathers and all
collectives on NCCL's one stream, whose inputs and outputs c10d marks as well.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.fsdp import _flat_param, _runtime_utils

from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings, Block, CachingAllocator
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.simulated_world.simulated_device import Event
from recipe_lib.plan.timing.cost import HOST_SECONDS, compute_op_seconds
from recipe_lib.plan.tracing import trace_rank as simulate
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, RECORD, WAIT, Op, Trace
from recipe_lib.plan.tracing.tracer import Tracer

NCCL = -1  # its stream, which no program issues on
# A kind of event that other readers of a trace pass over: the host waits for a record.
HOST_WAIT = 100


@dataclass
class MarkedTrace(Trace):
    """A trace with the marks of record_stream."""

    # By storage the streams, other than its own, that it was marked as used on.
    marks: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class _MarkingTracer(Tracer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: MarkedTrace = MarkedTrace()

    def mark(self, tensor: Tensor, stream: int) -> None:
        self.trace.marks[self.find_storage_index(tensor)].add(stream)


@contextmanager
def mark_traces() -> Iterator[None]:
    """Let plans that are made in this context leave `MarkedTrace`s.

    FSDP1 asks what only a real device has: marks on memory, addresses.
    """
    tracers: list[_MarkingTracer] = []

    def make_tracer(*args: Any, **kwargs: Any) -> Tracer:
        tracers.append(_MarkingTracer(*args, **kwargs))
        return tracers[-1]

    def record_stream(tensor: Tensor, stream: Any) -> None:
        tracers[-1].mark(tensor, stream.number)

    def synchronize(event: Event) -> None:
        tracers[-1].trace.events.append((HOST_WAIT, event.number))

    with (
        mock.patch.object(simulate, "Tracer", make_tracer),
        mock.patch.object(Event, "synchronize", synchronize),
        mock.patch.object(_flat_param, "_no_dispatch_record_stream", record_stream),
        mock.patch.object(_runtime_utils, "_no_dispatch_record_stream", record_stream),
        mock.patch.object(_runtime_utils, "_catch_all_reshard", lambda *_: None),
    ):
        yield


class _Clock:
    """The time line of the host and of each stream, seconds."""

    def __init__(self, hardware: Hardware, host_seconds: float):
        self.hardware = hardware
        self.host_seconds = host_seconds  # for issuing an operator
        self.host = 0.0  # when the host is done with what it has issued
        self.streams: dict[int, float] = defaultdict(float)  # when each is done
        self.recorded: dict[int, float] = defaultdict(float)  # when each event is reached

    def issue(self, op: Op) -> None:
        """Put an operator on its stream."""
        self.host += self.host_seconds * op.repeats
        # A collective runs on NCCL's stream, and its own stream waits for it.
        queues = (op.stream, NCCL) if op.collective else (op.stream,)
        start = max(self.host, *(self.streams[stream] for stream in queues), 0.0)
        for stream in queues:
            self.streams[stream] = start + op.repeats * compute_op_seconds(op, self.hardware, None)

    def wait_for_all(self) -> None:
        """Let the host wait for all streams, as where a loss is printed."""
        self.host = max([self.host, *self.streams.values()])


@dataclass
class Held:
    """The peaks of one phase."""

    active: int  # bytes, in torch's sense
    reserved: int  # bytes
    seconds: float  # from its begin to its end


def replay_with_marks(
    trace: MarkedTrace,
    phase: str,
    hardware: Hardware,
    *,
    expandable: bool = False,
    host_seconds: float = HOST_SECONDS,
) -> Held:
    """Replay a phase of a trace with its marks, and return its peaks.

    A marked block comes back when its streams are done and the host asks for memory again.
    """
    allocator = CachingAllocator(AllocatorSettings(expandable=expandable))
    clock = _Clock(hardware, host_seconds)
    blocks: dict[int, Block] = {}  # live ones, by storage
    pending: list[tuple[float, Block]] = []  # freed ones, with the second at which they come back
    peaks = Held(0, 0, 0.0)
    current_phase = ""
    phase_begin = 0.0

    def take_back(until: float) -> None:
        for entry in [entry for entry in pending if entry[0] <= until]:
            pending.remove(entry)
            allocator.free(entry[1])

    for kind, number in [*trace.events, (PHASE, -1)]:
        if kind == ALLOC and trace.storages[number].device and trace.storages[number].bytes:
            take_back(clock.host)
            blocks[number] = allocator.malloc(
                trace.storages[number].bytes, trace.storages[number].stream
            )
        elif kind == FREE and number in blocks:
            block = blocks.pop(number)
            streams = trace.marks.get(number, set()) - {trace.storages[number].stream}
            if streams:
                pending.append((max(clock.streams[stream] for stream in streams), block))
            else:
                allocator.free(block)
        elif kind == OP:
            clock.issue(trace.ops[number])
        elif kind == RECORD:
            clock.recorded[trace.syncs[number].event] = clock.streams[trace.syncs[number].stream]
        elif kind == WAIT:
            sync = trace.syncs[number]
            clock.streams[sync.stream] = max(clock.streams[sync.stream], clock.recorded[sync.event])
        elif kind == HOST_WAIT:
            clock.host = max(clock.host, clock.recorded[number])
        elif kind == PHASE:
            clock.wait_for_all()
            take_back(clock.host)
            if current_phase == phase:
                # A pending block is not given back to the allocator yet: what that calls
                # allocated is active here.
                peaks = Held(
                    active=allocator.peaks.allocated,
                    reserved=allocator.peaks.reserved,
                    seconds=clock.host - phase_begin,
                )
            current_phase = trace.phases[number]
            phase_begin = clock.host
            allocator.reset_peaks()
    return peaks

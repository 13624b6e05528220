"""Memory that is freed while another stream may still use it: FSDP1's record_stream in a plan of
that stack.

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
HOST_WAIT = (
    100  # a kind of event that other readers of a trace pass over: the host waits for a record
)


@dataclass
class MarkedTrace(Trace):
    """marks: by storage the streams, other than its own, that it was marked as used on."""

    marks: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class _MarkingTracer(Tracer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: MarkedTrace = MarkedTrace()

    def mark(self, tensor: Tensor, stream: int) -> None:
        self.trace.marks[self.find_number(tensor)].add(stream)


@contextmanager
def mark_traces() -> Iterator[None]:
    """Plans made in here leave `MarkedTrace`s. FSDP1 asks what only a real device has: marks on
    memory, addresses.
    """
    tracers: list[_MarkingTracer] = []

    def traced(*args: Any, **kwargs: Any) -> Tracer:
        tracers.append(_MarkingTracer(*args, **kwargs))
        return tracers[-1]

    def record_stream(tensor: Tensor, stream: Any) -> None:
        tracers[-1].mark(tensor, stream.number)

    def synchronize(event: Event) -> None:
        tracers[-1].trace.events.append((HOST_WAIT, event.number))

    with (
        mock.patch.object(simulate, "Tracer", traced),
        mock.patch.object(Event, "synchronize", synchronize),
        mock.patch.object(_flat_param, "_no_dispatch_record_stream", record_stream),
        mock.patch.object(_runtime_utils, "_no_dispatch_record_stream", record_stream),
        mock.patch.object(_runtime_utils, "_catch_all_reshard", lambda *_: None),
    ):
        yield


class _Clock:
    """When the host is where, and each stream done with what was issued on it, seconds."""

    def __init__(self, hardware: Hardware, host_seconds: float):
        self.hardware, self.host_seconds, self.host = hardware, host_seconds, 0.0
        self.streams: dict[int, float] = defaultdict(float)
        self.recorded: dict[int, float] = defaultdict(float)

    def issue(self, op: Op) -> None:
        """A collective runs on NCCL's stream, and its own waits for it."""
        self.host += self.host_seconds * op.repeats
        queues = (op.stream, NCCL) if op.collective else (op.stream,)
        start = max(self.host, *(self.streams[stream] for stream in queues), 0.0)
        for stream in queues:
            self.streams[stream] = start + op.repeats * compute_op_seconds(op, self.hardware, None)

    def wait_for_all(self) -> None:
        """As where a loss is printed."""
        self.host = max([self.host, *self.streams.values()])


@dataclass
class Held:
    """The most of one phase, bytes: active in torch's sense, and reserved. seconds: from its begin
    to its end.
    """

    active: int
    reserved: int
    seconds: float


def replay_with_marks(
    trace: MarkedTrace,
    phase: str,
    hardware: Hardware,
    *,
    expandable: bool = False,
    host_seconds: float = HOST_SECONDS,
) -> Held:
    """A replay in which a marked block comes back when its streams are done and the host asks for
    memory again.
    """
    allocator, clock = (
        CachingAllocator(AllocatorSettings(expandable=expandable)),
        _Clock(hardware, host_seconds),
    )
    blocks: dict[int, Block] = {}
    pending: list[tuple[float, Block]] = []
    found, current, begin = Held(0, 0, 0.0), "", 0.0

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
            streams = trace.marks.get(number, set()) - {trace.storages[number].stream}
            pending.append(
                (
                    max((clock.streams[stream] for stream in streams), default=0.0),
                    blocks.pop(number),
                )
            )
            if not streams:
                allocator.free(pending.pop()[1])
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
            if current == phase:
                found = Held(
                    allocator.peaks.allocated, allocator.peaks.reserved, clock.host - begin
                )
            current, begin = trace.phases[number], clock.host
            allocator.reset_peaks()
    return found

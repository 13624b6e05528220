"""Replay traces of FSDP1, which marks memory that another stream uses by `record_stream`.

`planner_rows.py` traces under `mark_traces`; `replay_with_marks` returns the peaks. A marked block
that is freed stays active until those streams have done what was issued before, and the host next
asks for memory. So the peak depends on how far the host is ahead: events are put on a time line.
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

NCCL = -1  # number of the one stream on which all collectives run, beside those of programs
# A kind of trace event that only this file makes and reads: the host waits for a recorded event.
HOST_WAIT = 100


@dataclass
class MarkedTrace(Trace):
    """A trace with the marks of record_stream."""

    # By the index of a storage, the streams that it was marked as used on.
    marks: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class _MarkingTracer(Tracer):
    """A tracer whose trace is a `MarkedTrace`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: MarkedTrace = MarkedTrace()

    def mark(self, tensor: Tensor, stream: int) -> None:
        """Note that a stream uses a tensor's storage."""
        self.trace.marks[self.find_storage_index(tensor)].add(stream)


@contextmanager
def mark_traces() -> Iterator[None]:
    """Make plans in this context leave `MarkedTrace`s.

    What FSDP1 asks of a real device is replaced: marks on memory, waits of the host for an event
    (by which it limits gathers ahead), and `_catch_all_reshard`, which compares addresses.
    """
    # One for each simulated rank; marks are of the last, which is running.
    tracers: list[_MarkingTracer] = []

    def make_tracer(*args: Any, **kwargs: Any) -> Tracer:
        """Stand in for the class `Tracer`."""
        tracers.append(_MarkingTracer(*args, **kwargs))
        return tracers[-1]

    def record_stream(tensor: Tensor, stream: Any) -> None:
        """Stand in for FSDP1's call of `Tensor.record_stream`."""
        tracers[-1].mark(tensor, stream.number)

    def synchronize(event: Event) -> None:
        """Stand in for the host's wait for an event."""
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
    """The time line of the host and of each stream, in seconds."""

    def __init__(self, hardware: Hardware, host_seconds: float):
        self.hardware = hardware
        self.host_seconds = host_seconds  # that the host takes to issue an operator
        self.host = 0.0  # when the host has issued the last operator so far
        self.streams: dict[int, float] = defaultdict(float)  # when each has done what was issued
        self.recorded: dict[int, float] = defaultdict(float)  # when each event is reached

    def issue(self, op: Op) -> None:
        """Put an operator on its stream."""
        self.host += self.host_seconds * op.repeats
        # A collective runs on NCCL's stream, and the stream that issued it waits for it.
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

    active: int  # bytes of blocks that are in use, or freed and still marked
    reserved: int  # bytes that the allocator has taken from the device
    seconds: float  # that the phase takes


def replay_with_marks(
    trace: MarkedTrace,
    phase: str,
    hardware: Hardware,
    *,
    expandable: bool = False,
    host_seconds: float = HOST_SECONDS,
) -> Held:
    """Replay a trace with its marks, and return the peaks of a phase; zeros if it has none.

    expandable: with `expandable_segments:True`. host_seconds: that the host takes to issue an
    operator.
    """
    allocator = CachingAllocator(AllocatorSettings(expandable=expandable))
    clock = _Clock(hardware, host_seconds)
    blocks: dict[int, Block] = {}  # live ones, by storage
    pending: list[tuple[float, Block]] = []  # freed ones, with the second at which they come back
    peaks = Held(0, 0, 0.0)
    current_phase = ""
    phase_begin = 0.0

    def take_back(until: float) -> None:
        """Give the pending blocks that are done by then back to the allocator."""
        for entry in [entry for entry in pending if entry[0] <= until]:
            pending.remove(entry)
            allocator.free(entry[1])

    # All phases are replayed, as blocks stay from one to the next; a last PHASE closes the last.
    for kind, number in [*trace.events, (PHASE, -1)]:
        if kind == ALLOC and trace.storages[number].device and trace.storages[number].bytes:
            take_back(clock.host)  # as torch: only when the host asks for memory
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
                # The allocator still counts a pending block as allocated: its `allocated` is the
                # active bytes here.
                peaks = Held(
                    active=allocator.peaks.allocated,
                    reserved=allocator.peaks.reserved,
                    seconds=clock.host - phase_begin,
                )
            current_phase = trace.phases[number]
            phase_begin = clock.host
            allocator.reset_peaks()
    return peaks

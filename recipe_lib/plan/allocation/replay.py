"""A trace replayed through the caching allocator: what is reserved in each phase, and how little
memory is enough.
"""

from dataclasses import dataclass, field

from recipe_lib.plan.allocation.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemory,
)
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, USE, Trace


@dataclass
class PhaseReplay:
    """The most bytes held at a time in one phase, each for itself.

    requested: asked for and not given back. allocated: in the blocks handed out for it. active:
    those and freed blocks that another stream may still use. reserved: taken from the device, with
    what earlier phases left there. Each is the peak that torch counts as `requested_bytes.all.peak`
    and so on.
    """

    requested: int = 0
    allocated: int = 0
    active: int = 0
    reserved: int = 0


@dataclass
class Replay:
    """phases: by name, in order. retries: how often everything unused was given back to make room.
    events: allocations and frees replayed. survived: memory did not run out; else the phases after
    that are missing.
    """

    phases: dict[str, PhaseReplay] = field(default_factory=dict)
    retries: int = 0
    events: int = 0
    survived: bool = True

    @property
    def reserved(self) -> int:
        """The most that is reserved in any phase, bytes."""
        return max((phase.reserved for phase in self.phases.values()), default=0)

    @property
    def active(self) -> int:
        """The most that is active in any phase, bytes."""
        return max((phase.active for phase in self.phases.values()), default=0)


def replay(
    trace: Trace, settings: AllocatorSettings | None = None, emptied_after: str = ""
) -> Replay:
    """What the allocator does on the device's storages of `trace`.

    emptied_after: the phase at whose end it gives back what is unused, as nothing was freed in its
    place in a run.

    A freed block can be reused at once, but for those that `record_stream` named another stream
    for: when that is done nobody can foretell, so they are held for as long as the host can be
    ahead of that stream (`LAUNCH_QUEUE`), at most to the end of the phase, when a run's host waits
    for all that it has issued, or until memory runs out. An operator counts as one kernel, which is
    the fewest it can be. Empty storages take no memory. What is allocated before the first phase
    counts from there on.
    """
    result, allocator = Replay(), CachingAllocator(settings)
    blocks: dict[int, Block] = {}
    streams = set[int]()
    phase = ""
    for kind, number in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]
            if not storage.device or not storage.bytes:
                continue
            result.events += 1
            try:
                blocks[number] = allocator.malloc(storage.bytes, storage.stream)
            except OutOfMemory:
                result.survived = False
                break
        elif kind == FREE:
            if block := blocks.pop(number, None):
                result.events += 1
                allocator.free(block)
        elif kind == USE:
            used, stream = trace.uses[number]
            if used in blocks:
                allocator.record_stream(blocks[used], stream)
                streams.add(stream)
        elif kind == OP:
            op = trace.ops[number]
            if op.stream in streams and not op.on_host:
                allocator.issue(op.stream, op.repeats)
        elif kind == PHASE:
            for stream in streams:
                allocator.finish(stream)
            _record_peaks(result, allocator, phase)
            if phase and phase == emptied_after:
                allocator.empty_cache()
                allocator.reset_peaks()
            phase = trace.phases[number]
    _record_peaks(result, allocator, phase)
    result.retries = allocator.num_alloc_retries
    return result


def _record_peaks(result: Replay, allocator: CachingAllocator, phase: str) -> None:
    """Notes the peaks of a phase that ends; one that came before keeps the larger ones."""
    if phase:
        peaks = result.phases.setdefault(phase, PhaseReplay())
        peaks.requested = max(peaks.requested, allocator.peak_requested)
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.active = max(peaks.active, allocator.peak_active)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.reset_peaks()

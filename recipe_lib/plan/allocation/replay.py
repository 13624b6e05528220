"""A trace replayed through the caching allocator: what each phase reserves.

With a cap in the settings, `Replay.survived` says whether that much memory is enough.
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
    """Peaks of one phase in bytes, each for itself, as `torch.cuda.memory_stats` counts them."""

    requested: int = 0  # asked for and not given back
    allocated: int = 0  # in the blocks handed out for it
    active: int = 0  # in those and in freed blocks that another stream may still use
    reserved: int = 0  # taken from the device, with what earlier phases left there


@dataclass
class Replay:
    """The memory that a trace takes from the allocator."""

    phases: dict[str, PhaseReplay] = field(default_factory=dict)  # by name, in order
    retries: int = 0  # how often everything unused was given back to make room
    events: int = 0  # allocations and frees replayed
    survived: bool = True  # memory did not run out; else the phases after that are missing

    @property
    def reserved(self) -> int:
        """Return the most that is reserved in any phase, bytes."""
        return max((phase.reserved for phase in self.phases.values()), default=0)

    @property
    def active(self) -> int:
        """Return the most that is active in any phase, bytes."""
        return max((phase.active for phase in self.phases.values()), default=0)


def replay(
    trace: Trace, settings: AllocatorSettings | None = None, emptied_after: str = ""
) -> Replay:
    """Replay the device's storages of a trace through an allocator.

    emptied_after: the phase at whose end the allocator gives back what is unused, for one that no
    run has. What is allocated before the first phase counts from there on.
    """
    result = Replay()
    allocator = CachingAllocator(settings)
    blocks: dict[int, Block] = {}  # by the number of their storage
    streams = set[int]()  # that `record_stream` named
    phase = ""
    for kind, number in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]
            if not storage.device or not storage.bytes:  # empty storages take no memory
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
            # When the named stream is done with the block nobody can foretell. So it is held for as
            # long as the host can be ahead of that stream (`LAUNCH_QUEUE`), or until memory runs
            # out.
            used, stream = trace.uses[number]
            if used in blocks:
                allocator.record_stream(blocks[used], stream)
                streams.add(stream)
        elif kind == OP:
            # It counts as one kernel, which is the fewest that it can be.
            op = trace.ops[number]
            if op.stream in streams and not op.on_host:
                allocator.issue(op.stream, op.repeats)
        elif kind == PHASE:
            # At the end of a phase a run's host waits for all that it has issued.
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
    """Note the peaks of a phase that ends; one that came before keeps the larger ones."""
    if phase:
        peaks = result.phases.setdefault(phase, PhaseReplay())
        peaks.requested = max(peaks.requested, allocator.peak_requested)
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.active = max(peaks.active, allocator.peak_active)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.reset_peaks()

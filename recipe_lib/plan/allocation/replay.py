"""A trace replayed through the caching allocator: what each phase reserves, and a snapshot of it.

With a cap in the settings, `Replay.survived` says whether that much memory is enough.
`write_snapshot` makes a memory snapshot of torch, for the viewers that read those:
https://pytorch.org/memory_viz shows the file, and `python -m torch.cuda._memory_viz
trace_plot|segments|stats path` reads it.
"""

import pickle
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from recipe_lib.files import replace_bytes
from recipe_lib.plan.allocation.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    MemoryPeaks,
    OutOfMemory,
)
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, USE, Trace


@dataclass
class Replay:
    """The memory that a trace takes from the allocator."""

    # By name, in order. What is reserved has what earlier phases left there.
    phases: dict[str, MemoryPeaks] = field(default_factory=dict)
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
        before = result.phases.get(phase, MemoryPeaks())
        result.phases[phase] = MemoryPeaks(*map(max, astuple(before), astuple(allocator.peaks)))
    allocator.reset_peaks()


Frames = list[dict[str, Any]]  # of a stack, the innermost first


def write_snapshot(trace: Trace, path: Path, settings: AllocatorSettings | None = None) -> None:
    """Write what the allocator does on the device's storages of a trace as a memory snapshot.

    The file is as `torch.cuda.memory._dump_snapshot` writes it. Phases are annotations. If memory
    runs out under a cap, the snapshot ends there, with the entry `oom`. Raises StorageError if the
    file cannot be written.
    """
    settings = settings or AllocatorSettings()
    allocator = CachingAllocator(settings)
    allocator.log = []
    # For each entry of the log, (index of the event in the trace, which stands for a time; frames).
    sources: list[tuple[int, Frames]] = []
    annotations: list[dict[str, Any]] = []
    blocks: dict[int, Block] = {}  # by the number of their storage
    block_frames: dict[Block, Frames] = {}
    for time, (kind, number) in enumerate(trace.events):
        if kind == PHASE:
            annotations += [
                _make_annotation(last["name"], "END", time) for last in annotations[-1:]
            ]
            annotations.append(_make_annotation(trace.phases[number], "START", time))
            continue
        storage = trace.storages[number] if kind in (ALLOC, FREE) else None
        if storage is None or not storage.device or not storage.bytes:
            continue
        # What a viewer shows of an allocation in place of a stack of calls.
        lines = (
            ("operator", storage.op or "-"),
            ("module", storage.module or "-"),
            ("part", storage.part),
            ("kind", f"{storage.kind} {storage.label}".rstrip()),
        )
        frames = [{"filename": filename, "line": 0, "name": name} for filename, name in lines]
        is_out_of_memory = False
        if kind == FREE:
            if block := blocks.pop(number, None):
                allocator.free(block)
        else:
            try:
                blocks[number] = allocator.malloc(storage.bytes, storage.stream)
                block_frames[blocks[number]] = frames
            except OutOfMemory:
                is_out_of_memory = True
        # One event may make several entries: of a segment that is taken, of blocks that are freed.
        sources += [(time, frames)] * (len(allocator.log) - len(sources))
        if is_out_of_memory:
            break
    annotations += [
        _make_annotation(last["name"], "END", len(trace.events)) for last in annotations[-1:]
    ]
    entries = [
        _make_entry(event, time, frames, cap=settings.cap or 0)
        for event, (time, frames) in zip(allocator.log, sources, strict=True)
    ]
    snapshot = {
        "segments": _list_segments(allocator, block_frames),
        "device_traces": [entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{settings.expandable}",
            "max_split_size": -1,
            "garbage_collection_threshold": 0,
            "expandable_segments": settings.expandable,
            "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
        },
        "external_annotations": annotations,
    }
    replace_bytes(path, pickle.dumps(snapshot))


def _make_annotation(name: str, stage: str, time: int) -> dict[str, Any]:
    return {"name": name, "stage": stage, "device": 0, "time_us": time}


def _make_entry(
    event: tuple[str, int, int, int], time: int, frames: Frames, *, cap: int
) -> dict[str, Any]:
    action, address, size, stream = event
    # An entry `oom` has in place of an address what the device had free.
    location = {"device_free": cap} if action == "oom" else {"addr": address}
    return {
        "action": action,
        **location,
        "size": size,
        "stream": stream,
        "time_us": time,
        "frames": frames,
    }


def _list_segments(
    allocator: CachingAllocator, block_frames: dict[Block, Frames]
) -> list[dict[str, Any]]:
    """Return the segments at the end: each is made of neighboring blocks with memory."""
    segments: list[dict[str, Any]] = []
    for block in allocator.list_blocks():
        if not block.previous or not block.previous.mapped:
            segments.append(
                {
                    "device": 0,
                    "address": block.address,
                    "total_size": 0,
                    "allocated_size": 0,
                    "active_size": 0,
                    "requested_size": 0,
                    "stream": block.pool.stream,
                    "segment_type": "small" if block.pool.small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": allocator.settings.expandable,
                    "frames": [],
                    "blocks": [],
                }
            )
        segment = segments[-1]
        segment["total_size"] += block.size
        if block.allocated:
            segment["allocated_size"] += block.size
            segment["active_size"] += block.size
            segment["requested_size"] += block.requested
        segment["blocks"].append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.allocated else 0,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": block_frames[block] if block.allocated else [],
            }
        )
    return segments

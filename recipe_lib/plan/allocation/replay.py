"""Replay a trace (the allocations of a simulated run) through a model of the caching allocator.

`replay` returns the memory that each phase of a run (set-up, a step, ...) reserves; a plan is made
from it. `write_snapshot`, for `tune plan`, writes the replay as a memory snapshot of torch:
https://pytorch.org/memory_viz shows the file, and
`python -m torch.cuda._memory_viz trace_plot|segments|stats path` reads it.
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

    # Name of a phase -> its peaks, in order. Segments that earlier phases reserved count too.
    phases: dict[str, MemoryPeaks] = field(default_factory=dict)
    retries: int = 0  # times that unused segments were given back to the device to make room
    events: int = 0  # allocations and releases that were replayed
    # False: memory ran out under the settings' cap; later phases are missing.
    survived: bool = True

    @property
    def reserved(self) -> int:
        return max((phase.reserved for phase in self.phases.values()), default=0)

    @property
    def active(self) -> int:
        return max((phase.active for phase in self.phases.values()), default=0)


def replay(
    trace: Trace, settings: AllocatorSettings | None = None, emptied_after: str = ""
) -> Replay:
    """Replay the device's storages of a trace through an allocator.

    settings: None: those of an allocator without PYTORCH_CUDA_ALLOC_CONF or a cap. emptied_after:
    the phase at whose end the allocator gives back unused segments, for a phase that no real run
    has; "": none. Allocations before the first phase count to the first.
    """
    result = Replay()
    allocator = CachingAllocator(settings)
    blocks: dict[int, Block] = {}  # index of a storage -> its block
    streams = set[int]()  # streams that `record_stream` named
    phase = ""  # name; "": none has begun
    for kind, index in trace.events:
        if kind == ALLOC:
            storage = trace.storages[index]
            if not storage.device or not storage.bytes:  # empty storages take no memory
                continue
            result.events += 1
            try:
                blocks[index] = allocator.malloc(storage.bytes, storage.stream)
            except OutOfMemory:
                result.survived = False
                break
        elif kind == FREE:
            # None: a storage of the host, or without bytes.
            if block := blocks.pop(index, None):
                result.events += 1
                allocator.free(block)
        elif kind == USE:
            # It is not known when the named stream is done with the block. So the block is held for
            # as long as the host can be ahead of that stream (`LAUNCH_QUEUE` kernels), or until
            # memory runs out.
            storage_index, stream = trace.uses[index]
            if storage_index in blocks:
                allocator.record_stream(blocks[storage_index], stream)
                streams.add(stream)
        elif kind == OP:
            # An operator counts as one kernel, which is the fewest that it can be.
            op = trace.ops[index]
            # Only these streams hold blocks that are freed.
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
            phase = trace.phases[index]
    _record_peaks(result, allocator, phase)
    result.retries = allocator.num_alloc_retries
    return result


def _record_peaks(result: Replay, allocator: CachingAllocator, phase: str) -> None:
    """Note the peaks of a phase that ends, or the larger ones if the phase ran before."""
    if phase:
        earlier = result.phases.get(phase, MemoryPeaks())
        result.phases[phase] = MemoryPeaks(*map(max, astuple(earlier), astuple(allocator.peaks)))
    allocator.reset_peaks()


Frames = list[dict[str, Any]]  # frames of a stack as in a snapshot, the innermost first


def write_snapshot(trace: Trace, path: Path, settings: AllocatorSettings | None = None) -> None:
    """Write a memory snapshot of the allocator's work on the device's storages of a trace.

    The file has the format of `torch.cuda.memory._dump_snapshot`. Phases are annotations. If memory
    runs out under a cap, the snapshot ends there, with the entry `oom`. Raises StorageError if the
    file cannot be written.
    """
    settings = settings or AllocatorSettings()
    allocator = CachingAllocator(settings)
    allocator.log = []
    # For each entry of the log: (time, frames). A trace has no times: an event's index stands for
    # its microseconds.
    sources: list[tuple[int, Frames]] = []
    annotations: list[dict[str, Any]] = []  # a START and an END for each phase
    blocks: dict[int, Block] = {}  # index of a storage -> its block
    block_frames: dict[Block, Frames] = {}  # frames of the allocation that took the block
    for time, (kind, index) in enumerate(trace.events):
        if kind == PHASE:
            annotations += [
                _make_annotation(last["name"], "END", time) for last in annotations[-1:]
            ]
            annotations.append(_make_annotation(trace.phases[index], "START", time))
            continue
        storage = trace.storages[index] if kind in (ALLOC, FREE) else None
        if storage is None or not storage.device or not storage.bytes:
            continue
        # A viewer shows these in place of the stack of calls of an allocation.
        lines = (
            ("operator", storage.op or "-"),
            ("module", storage.module or "-"),
            ("part", storage.part),
            ("kind", f"{storage.kind} {storage.label}".rstrip()),
        )
        frames = [{"filename": filename, "line": 0, "name": name} for filename, name in lines]
        is_out_of_memory = False
        if kind == FREE:
            if block := blocks.pop(index, None):
                allocator.free(block)
        else:
            try:
                blocks[index] = allocator.malloc(storage.bytes, storage.stream)
                block_frames[blocks[index]] = frames
            except OutOfMemory:
                is_out_of_memory = True
        # One event may make several entries, such as for a segment that is taken for a block.
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
    # Returns an entry of a snapshot's `device_traces`. event: (action, address, bytes, stream) of
    # the allocator's log. cap: bytes; 0: no limit.
    action, address, size, stream = event
    # In place of an address, an entry `oom` has the bytes that the device had free.
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
    """Return a snapshot's segments at the end: runs of neighboring blocks that have memory.

    block_frames: frames of the blocks that are handed out.
    """
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

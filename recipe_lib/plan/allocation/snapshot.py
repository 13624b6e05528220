"""A simulated run as a memory snapshot of torch, for the viewers that read those."""

import pickle
from pathlib import Path
from typing import Any

from recipe_lib.files import replace_bytes
from recipe_lib.plan.allocation.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemory,
)
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, Storage, Trace

Frames = list[dict[str, Any]]


def write_snapshot(trace: Trace, path: Path, settings: AllocatorSettings | None = None) -> None:
    """Writes what the allocator does on the device's storages of `trace`, as
    `torch.cuda.memory._dump_snapshot` would.

    https://pytorch.org/memory_viz shows the file, and `python -m torch.cuda._memory_viz
    trace_plot|segments|stats path` reads it. Where a real snapshot has a stack of calls, an
    allocation has its operator, its module, its part of the step and its kind of memory; its time
    is its place in the trace; phases are annotations. If memory runs out under a cap, the snapshot
    ends there, with the entry `oom`. StorageError if the file cannot be written.
    """
    settings = settings or AllocatorSettings()
    allocator = CachingAllocator(settings)
    allocator.log = []
    frames_of: dict[int, Frames] = {}  # by entry of the log
    annotations: list[dict[str, Any]] = []
    times: list[int] = []
    blocks: dict[int, Block] = {}
    made_by: dict[Block, Frames] = {}
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
        frames, out_of_memory = _make_frames(storage), False
        if kind == FREE:
            if block := blocks.pop(number, None):
                allocator.free(block)
        else:
            try:
                blocks[number] = allocator.malloc(storage.bytes, storage.stream)
                made_by[blocks[number]] = frames
            except OutOfMemory:
                out_of_memory = True
        frames_of.update((entry, frames) for entry in range(len(times), len(allocator.log)))
        times += [time] * (len(allocator.log) - len(times))
        if out_of_memory:
            break
    annotations += [
        _make_annotation(last["name"], "END", len(trace.events)) for last in annotations[-1:]
    ]
    entries = [
        _make_entry(event, times[at], frames_of[at], allocator.settings.cap or 0)
        for at, event in enumerate(allocator.log)
    ]
    snapshot = {
        "segments": _list_segments(allocator, made_by),
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


def _make_frames(storage: Storage) -> Frames:
    """What a viewer shows of an allocation, innermost first, in place of files, lines and
    functions.
    """
    lines = (
        ("operator", storage.op or "-"),
        ("module", storage.module or "-"),
        ("part", storage.part),
        ("kind", f"{storage.kind} {storage.label}".rstrip()),
    )
    return [{"filename": filename, "line": 0, "name": name} for filename, name in lines]


def _make_entry(
    event: tuple[str, int, int, int], time: int, frames: Frames, cap: int
) -> dict[str, Any]:
    action, address, size, stream = event
    place = {"device_free": cap} if action == "oom" else {"addr": address}
    return {
        "action": action,
        **place,
        "size": size,
        "stream": stream,
        "time_us": time,
        "frames": frames,
    }


def _list_segments(
    allocator: CachingAllocator, made_by: dict[Block, Frames]
) -> list[dict[str, Any]]:
    """The state at the end: neighboring blocks with memory make a segment."""
    segments: list[dict[str, Any]] = []
    for block in allocator.blocks():
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
                "frames": made_by[block] if block.allocated else [],
            }
        )
    return segments

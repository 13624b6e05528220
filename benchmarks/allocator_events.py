"""Recorded event streams of the real caching allocator, their replay through the model of it, and
its smallest cap.

A stream is a dict, stored as JSON, compressed by gzip:

    {"settings": fields of AllocatorSettings,
     "measured": {"reserved": the most bytes reserved at a time; as far as given: "allocated",
     "active", "retries"}, "events": [[action, address, bytes, stream], ...]}

The actions are those of `torch.cuda.memory._snapshot()["device_traces"]`: alloc, free_requested,
free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom; and `free`, for a free
that was completed at once. Addresses count from the lowest one, streams in the order in which they
appear. Recording must start before the process's first allocation on the device, and end without an
entry having been dropped.
"""

import gzip
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recipe_lib.plan.allocation.caching_allocator import (
    SEGMENT_ROUNDING,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemory,
    compute_segment_size,
    round_size,
)
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.tracing.trace import Trace

_TAKEN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_GIVEN_BACK = ("segment_free", "segment_unmap")
_COMPARED = ("oom", *_TAKEN)
_ACTIONS = ("alloc", "free_requested", "free_completed", "oom", *_TAKEN)

Event = list[Any]


@dataclass
class EventReplay:
    """Peaks of a replayed stream, bytes, and what else it shows.

    segments: what was taken from the device and given back, and where memory ran out, as (action,
    bytes, stream). recorded: the same as the stream has it. first_difference: the number of the
    first of these that differ, or None.
    """

    reserved: int
    allocated: int
    active: int
    retries: int
    segments: list[tuple[str, int, int]]
    recorded: list[tuple[str, int, int]]

    @property
    def first_difference(self) -> int | None:
        """See above."""
        if self.segments == self.recorded:
            return None
        pairs = zip(self.segments, self.recorded, strict=False)
        shorter = min(len(self.segments), len(self.recorded))
        return next(
            (number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter
        )


def read_snapshot_events(
    snapshot: dict[str, Any],
    *,
    device: int = 0,
    cap: int | None = None,
    measured: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The stream of one device, from a dict of `torch.cuda.memory._snapshot()`.

    cap: bytes that `torch.cuda.set_per_process_memory_fraction` allowed, if it was called; the dict
    does not have them. measured: peaks that `torch.cuda.memory_stats` gave. ValueError if the
    history is not whole, or disagrees with them.
    """
    entries = [entry for entry in snapshot["device_traces"][device] if entry["action"] in _ACTIONS]
    lowest = min((entry["addr"] for entry in entries if "addr" in entry), default=0)
    streams = {0: 0}
    events: list[Event] = []
    live: set[int] = set()
    for entry in entries:
        action, stream = entry["action"], streams.setdefault(entry["stream"], len(streams))
        address = entry["addr"] - lowest if action != "oom" else 0
        if action == "alloc":
            live.add(address)
        elif action == "free_requested":
            if address not in live:
                raise ValueError(
                    f"the history does not begin before the allocation at {entry['addr']:#x}"
                )
            live.remove(address)
        if action == "free_completed" and events and events[-1][:2] == ["free_requested", address]:
            events[-1][0] = "free"
        else:
            events.append([action, address, entry["size"], stream])
    reserved = peak = 0
    for action, _, size, _ in events:
        reserved += _TAKEN.get(action, 0) * size
        peak = max(peak, reserved)
    figures = {"reserved": peak, **(measured or {})}
    if figures["reserved"] != peak:
        raise ValueError(
            f"the history reserves {peak} bytes at most, {figures['reserved']} were measured"
        )
    held = sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )
    if held != reserved:
        raise ValueError(
            f"the history ends with {reserved} bytes reserved, the segments hold {held}"
        )
    return {
        "settings": asdict(_read_settings(snapshot, cap)),
        "measured": figures,
        "events": events,
    }


def _read_settings(snapshot: dict[str, Any], cap: int | None) -> AllocatorSettings:
    """Return those of the snapshot; ValueError for what the model does not have."""
    found = snapshot.get("allocator_settings", {})
    split = int(found.get("max_split_size", -1))
    others = {
        "max_split_size": 0 < split < 2**63 - 1,
        "roundup_power2_divisions": any(found.get("roundup_power2_divisions", {}).values()),
        "garbage_collection_threshold": bool(found.get("garbage_collection_threshold", 0)),
    }
    if any(others.values()):
        raise ValueError(
            f"not modeled: {', '.join(name for name, is_set in others.items() if is_set)}"
        )
    return AllocatorSettings(
        expandable=bool(found.get("expandable_segments", False)),
        cap=cap,
        by_fraction=cap is not None,
    )


def write_fixture(stream: dict[str, Any], path: Path) -> None:
    """Stores a stream; the same one gives the same bytes."""
    text = json.dumps(stream, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0))


def read_fixture(path: Path) -> dict[str, Any]:
    """The stream that `write_fixture` stored."""
    stream: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    modeled = {field.name for field in fields(AllocatorSettings)}
    stream["settings"] = {
        name: value for name, value in stream["settings"].items() if name in modeled
    }
    return stream


def replay_events(stream: dict[str, Any]) -> EventReplay:
    """The model does what the stream's program asked for; the stream's own segments only say where
    each one lies.

    A stream does not tell `empty_cache` calls: memory given back while the next allocation would
    have fitted under the cap is taken for one. When freed blocks of several streams are complete is
    the device's doing, and read from it; under a cap with an `empty_cache` a stream does not tell
    that exactly. OutOfMemory if the model has no room where the device had.
    """
    events: list[Event] = stream["events"]
    recorded = [(action, size, number) for action, _, size, number in events if action in _COMPARED]
    places = iter(
        [
            (address, size, number)
            for action, address, size, number in events
            if action == "segment_alloc"
        ]
    )

    def place(size: int, number: int) -> int | None:
        address, *found = next(places, (None, 0, 0))
        return address if found == [size, number] else None

    allocator = CachingAllocator(AllocatorSettings(**stream["settings"]), place)
    allocator.log = []
    live: dict[int, Block] = {}
    unfinished: dict[int, int] = {}
    handled = 0
    for index, (action, address, size, number) in enumerate(events):
        if action == "alloc":
            live[address] = allocator.malloc(size, number)
        elif action == "oom":
            try:
                allocator.free(allocator.malloc(size, number))
            except OutOfMemory:
                pass
        elif action in ("free", "free_requested"):
            # Completed only as the next allocation waits for all streams, a free looks as if it had
            # been at once.
            if action == "free_requested" or _is_filling_up(allocator, events, index + 1):
                unfinished[address] = (
                    -1 - index
                )  # a stream of its own, so that it alone can be finished
                allocator.record_stream(live[address], unfinished[address])
            allocator.free(live.pop(address))
        elif action in ("free_completed", *_GIVEN_BACK) and index >= handled:
            if _is_filling_up(allocator, events, index):
                handled = _end_of_run(events, index)  # by the model itself, in that allocation
            elif action == "free_completed":
                allocator.finish(unfinished[address])
            else:
                allocator.empty_cache()
                handled = _end_of_run(events, index)
    segments = [
        (action, size, number) for action, _, size, number in allocator.log if action in _COMPARED
    ]
    return EventReplay(
        allocator.peaks.reserved,
        allocator.peaks.allocated,
        allocator.peaks.active,
        allocator.num_alloc_retries,
        segments,
        recorded,
    )


def _end_of_run(events: list[Event], index: int) -> int:
    """The number of the next event that the program, not the allocator, caused."""
    while index < len(events) and events[index][0] in ("free_completed", *_TAKEN):
        index += 1
    return index


def _is_filling_up(allocator: CachingAllocator, events: list[Event], index: int) -> bool:
    """Here begins what the allocator did for an allocation that comes next and found no room under
    the cap.
    """
    cap = allocator.settings.cap
    if cap is None:
        return False
    end = _end_of_run(events, index)
    if end == len(events) or events[end][0] not in ("alloc", "oom"):
        return False
    size = round_size(events[end][2])
    if allocator.reserved + compute_segment_size(size) <= cap:
        return False
    return events[end][0] == "oom" or _is_giving_back(events[index:end])


def _is_giving_back(events: list[Event]) -> bool:
    return any(action in _GIVEN_BACK for action, *_ in events)


def find_smallest_cap(
    trace: Trace, *, expandable: bool = False, step: int = SEGMENT_ROUNDING
) -> int:
    """The least device memory, in bytes, that the segments can be held to and the run still goes
    through, with retries.

    Found by halving between the most that is asked for at a time, below which nothing goes through,
    and what is reserved without a cap, which always does; a multiple of `step`, or the latter. With
    a little more memory the run can, rarely, fail again, because blocks then come to lie
    differently.
    """
    free_run = replay(trace, AllocatorSettings(expandable=expandable))
    enough = free_run.reserved
    peaks = free_run.phases.values()
    too_little = max((phase.requested for phase in peaks), default=0) // step - 1
    steps = -(-enough // step)
    while steps - too_little > 1:
        middle = (steps + too_little) // 2
        if replay(trace, AllocatorSettings(expandable=expandable, cap=middle * step)).survived:
            steps, enough = middle, middle * step
        else:
            too_little = middle
    return enough

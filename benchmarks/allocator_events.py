"""Read, store and replay recorded events of torch's caching allocator.

`gpu_plan.py` records them on a GPU; tests replay them in the planner's model of the allocator. A
recording (`stream` in the code) is a dict, stored as gzipped JSON: `settings`, the fields of
AllocatorSettings; `measured`, peak bytes `reserved` and as far as known `allocated`, `active` and
`retries`; and `events`. Recording must start before the process's first allocation on the device.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
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

# Sign with which an action's bytes change what is reserved on the device.
_RESERVED_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_GIVEN_BACK = ("segment_free", "segment_unmap")
_COMPARED = ("oom", *_RESERVED_SIGNS)  # what a replay must do as the device did
# Names of `torch.cuda.memory._snapshot()["device_traces"]`. Others, such as snapshots, are skipped.
_ACTIONS = ("alloc", "free_requested", "free_completed", "oom", *_RESERVED_SIGNS)

# Action, address from the lowest one, bytes, number of the stream in the order of appearance. The
# action is one of _ACTIONS, or `free`: a free that was completed at once.
Event = list[Any]


@dataclass
class EventReplay:
    """Hold the peaks of a replayed recording, and what it took from the device."""

    reserved: int  # bytes at the peak, taken from the device
    allocated: int  # bytes at the peak, in blocks that tensors have
    active: int  # bytes at the peak, allocated or freed while a stream still used them
    retries: int  # times that cached memory was given back to find room
    # Events of _COMPARED, as the model had them: (action, bytes, stream).
    segments: list[tuple[str, int, int]]
    recorded: list[tuple[str, int, int]]  # the same, as the device had them

    @property
    def first_difference(self) -> int | None:
        """Return the index of the first of `segments` and `recorded` that differ, or None."""
        if self.segments == self.recorded:
            return None
        # Not strict: if one is longer, they differ where the other ends.
        pairs = zip(self.segments, self.recorded, strict=False)
        for index, (replayed, recorded) in enumerate(pairs):
            if replayed != recorded:
                return index
        return min(len(self.segments), len(self.recorded))


def read_snapshot_events(
    snapshot: dict[str, Any],
    *,
    device: int = 0,
    cap: int | None = None,
    measured: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Make a recording of one device from a dict of `torch.cuda.memory._snapshot()`.

    cap: bytes that `torch.cuda.set_per_process_memory_fraction` allowed, None if it was not called;
    the dict does not have them. measured: peaks of `torch.cuda.memory_stats`. Raises ValueError if
    the history is not whole, or disagrees with them.
    """
    entries = [entry for entry in snapshot["device_traces"][device] if entry["action"] in _ACTIONS]
    lowest_address = min((entry["addr"] for entry in entries if "addr" in entry), default=0)
    stream_numbers = {0: 0}  # torch's stream id -> ours; 0 is the default stream
    events: list[Event] = []
    live_addresses: set[int] = set()
    for entry in entries:
        action = entry["action"]
        stream = stream_numbers.setdefault(entry["stream"], len(stream_numbers))
        address = entry["addr"] - lowest_address if action != "oom" else 0
        if action == "alloc":
            live_addresses.add(address)
        elif action == "free_requested":
            if address not in live_addresses:
                raise ValueError(
                    f"the history does not begin before the allocation at {entry['addr']:#x}"
                )
            live_addresses.remove(address)
        # A free that no other stream delays is completed in the next entry: one event for both.
        if action == "free_completed" and events and events[-1][:2] == ["free_requested", address]:
            events[-1][0] = "free"
        else:
            events.append([action, address, entry["size"], stream])
    reserved = 0
    peak = 0
    for action, _, size, _ in events:
        reserved += _RESERVED_SIGNS.get(action, 0) * size
        peak = max(peak, reserved)
    figures = {"reserved": peak, **(measured or {})}
    if figures["reserved"] != peak:
        raise ValueError(
            f"the history reserves {peak} bytes at most, {figures['reserved']} were measured"
        )
    segment_bytes = sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )
    if segment_bytes != reserved:
        raise ValueError(
            f"the history ends with {reserved} bytes reserved, the segments hold {segment_bytes}"
        )
    return {
        "settings": asdict(_read_settings(snapshot, cap)),
        "measured": figures,
        "events": events,
    }


def _read_settings(snapshot: dict[str, Any], cap: int | None) -> AllocatorSettings:
    """Read the allocator's settings of a snapshot.

    Raises ValueError if one is set that the planner's model does not have.
    """
    settings = snapshot.get("allocator_settings", {})
    max_split_size = int(settings.get("max_split_size", -1))
    not_modeled = []
    if 0 < max_split_size < 2**63 - 1:  # torch's largest number is no limit
        not_modeled.append("max_split_size")
    if any(settings.get("roundup_power2_divisions", {}).values()):
        not_modeled.append("roundup_power2_divisions")
    if settings.get("garbage_collection_threshold", 0):
        not_modeled.append("garbage_collection_threshold")
    if not_modeled:
        raise ValueError(f"not modeled: {', '.join(not_modeled)}")
    return AllocatorSettings(
        expandable=bool(settings.get("expandable_segments", False)),
        cap=cap,
        by_fraction=cap is not None,
    )


def write_fixture(stream: dict[str, Any], path: Path) -> None:
    """Store a recording; the same one gives the same bytes."""
    text = json.dumps(stream, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0))  # gzip's header would have the time


def read_fixture(path: Path) -> dict[str, Any]:
    """Read a recording that `write_fixture` stored."""
    stream: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    # An older fixture may have settings that the model no longer has.
    modeled_names = {field.name for field in fields(AllocatorSettings)}
    stream["settings"] = {
        name: value for name, value in stream["settings"].items() if name in modeled_names
    }
    return stream


def replay_events(stream: dict[str, Any]) -> EventReplay:
    """Replay a program's allocations and frees in the planner's model of the allocator.

    The recorded segments only give the model their addresses. A call of `empty_cache` is not
    recorded: memory that is given back while the next allocation has room under the cap counts as
    one. The time at which a block that several streams used is free depends on the device, so it is
    read from the recording; under a cap with an `empty_cache` that is not exact. Raises OutOfMemory
    if the model has no room where the device had.
    """
    events: list[Event] = stream["events"]
    recorded_segments = iter(
        [
            (address, size, number)
            for action, address, size, number in events
            if action == "segment_alloc"
        ]
    )

    def choose_address(size: int, number: int) -> int | None:
        """Return the next recorded segment's address; None if its size or stream is another."""
        address, recorded_size, recorded_number = next(recorded_segments, (None, 0, 0))
        return address if (recorded_size, recorded_number) == (size, number) else None

    allocator = CachingAllocator(AllocatorSettings(**stream["settings"]), choose_address)
    allocator.log = []
    live_blocks: dict[int, Block] = {}  # by address
    pending_streams: dict[int, int] = {}  # by the address of a freed block that is in use on it
    next_index = 0  # events of the allocator before this one are replayed already
    for index, (action, address, size, number) in enumerate(events):
        if action == "alloc":
            live_blocks[address] = allocator.malloc(size, number)
        elif action == "oom":
            # The device had no room. A model that has room lacks this event, so that they differ.
            try:
                allocator.free(allocator.malloc(size, number))
            except OutOfMemory:
                pass
        elif action in ("free", "free_requested"):
            # A free that is completed only because the next allocation waits for all streams is
            # recorded as if it had been completed at once.
            if action == "free_requested" or _is_filling_up(allocator, events, index + 1):
                # A negative number is a stream of this block alone, so that it can be finished.
                pending_streams[address] = -1 - index
                allocator.record_stream(live_blocks[address], pending_streams[address])
            allocator.free(live_blocks.pop(address))
        elif action in ("free_completed", *_GIVEN_BACK) and index >= next_index:
            if _is_filling_up(allocator, events, index):
                # The model completes frees and gives memory back by itself, in that allocation.
                next_index = _find_next_request(events, index)
            elif action == "free_completed":
                allocator.finish(pending_streams[address])
            else:
                allocator.empty_cache()
                next_index = _find_next_request(events, index)
    return EventReplay(
        reserved=allocator.peaks.reserved,
        allocated=allocator.peaks.allocated,
        active=allocator.peaks.active,
        retries=allocator.num_alloc_retries,
        segments=_select_segments(allocator.log),
        recorded=_select_segments(events),
    )


def _select_segments(events: Iterable[Sequence[Any]]) -> list[tuple[str, int, int]]:
    """Return (action, bytes, stream) of the events of _COMPARED, without their addresses."""
    return [(action, size, number) for action, _, size, number in events if action in _COMPARED]


def _find_next_request(events: list[Event], index: int) -> int:
    """Return the index, from `index` on, of the next event that the program itself caused."""
    while index < len(events) and events[index][0] in ("free_completed", *_RESERVED_SIGNS):
        index += 1
    return index


def _is_filling_up(allocator: CachingAllocator, events: list[Event], index: int) -> bool:
    """Return True if the next allocation finds no room under the cap.

    Then the events from `index` to it are what the allocator did for it.
    """
    cap = allocator.settings.cap
    if cap is None:
        return False
    request_index = _find_next_request(events, index)
    if request_index == len(events):
        return False
    request_action, _, requested_size, _ = events[request_index]
    if request_action not in ("alloc", "oom"):
        return False
    if allocator.reserved + compute_segment_size(round_size(requested_size)) <= cap:
        return False
    gives_back = any(action in _GIVEN_BACK for action, *_ in events[index:request_index])
    return request_action == "oom" or gives_back


def find_smallest_cap(
    trace: Trace, *, expandable: bool = False, step: int = SEGMENT_ROUNDING
) -> int:
    """Find the least device memory, bytes, in which a traced run goes through, with retries.

    The result is a multiple of `step` bytes, or what is reserved without a cap. With a little more
    memory the run can, rarely, fail again, because blocks then lie differently.
    """
    uncapped = replay(trace, AllocatorSettings(expandable=expandable))
    smallest_cap = uncapped.reserved
    # Bisect, in multiples of `step`, between the most that is requested at a time, below which
    # nothing goes through, and what is reserved without a cap, which always does.
    most_requested = max((phase.requested for phase in uncapped.phases.values()), default=0)
    too_little = most_requested // step - 1
    enough = -(-smallest_cap // step)
    while enough - too_little > 1:
        middle = (enough + too_little) // 2
        if replay(trace, AllocatorSettings(expandable=expandable, cap=middle * step)).survived:
            enough = middle
            smallest_cap = middle * step
        else:
            too_little = middle
    return smallest_cap

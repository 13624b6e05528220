"""Event streams of the real allocator, replayed: the model must take and give back the very same
segments.

Streams recorded on a GPU lie in fixtures/ (format: benchmarks/allocator_events.py). What reads them
is tested with streams of the model's own, which say nothing about the real allocator.
"""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.allocator_events import (
    read_fixture,
    read_snapshot_events,
    replay_events,
    write_fixture,
)
from recipe_lib.plan.allocation.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
)
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.allocation.untraced_memory import compute_attention_backward_scratch
from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.timing.kernel_rates import choose_attention_kernel
from recipe_lib.units import MIB
from tests.plan.allocation.test_snapshot import snapshot_of
from tests.plan.made_traces import build_training_steps

RECORDED = sorted((Path(__file__).parent / "fixtures").glob("*.json.gz"))
MISSING = pytest.param(
    None,
    marks=pytest.mark.skip(
        reason="no fixture recorded yet: python benchmarks/gpu_check.py plan writes them"
    ),
    id="none",
)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.name) for path in RECORDED] or [MISSING]
)
def test_the_model_reserves_what_the_real_allocator_did(path):
    stream = read_fixture(path)
    found = replay_events(stream)
    assert found.first_difference is None
    for name, figure in stream["measured"].items():
        assert getattr(found, name) == figure, name


# Rows of 2048 tokens of the demo model, which has 4 layers of 4 heads of width 24 and half as many
# keys.
LAYERS = 4
STEPS = 3
HEADS = 4
TOKENS = 2048
WIDTH = 24
UNPACKED = {"full-demo-4x2048-none": 2, "qlora-demo-2x2048-selective": 1}


@pytest.mark.parametrize(
    "path", [path for path in RECORDED if path.name.startswith(tuple(UNPACKED))], ids=str
)
def test_attention_of_unpacked_rows_is_cudnns_on_hopper(path):
    """Each backward of a layer has cuDNN's workspace: dq in fp32, dk and dv for every head, row
    sums. Flash attention has none of that size: its heads are as wide as 32, and it takes three
    pieces.
    """
    rows = UNPACKED[path.name.removesuffix(".json.gz").removesuffix("-expandable")]
    elements = rows * HEADS * TOKENS
    sizes = [size for action, _, size, _ in read_fixture(path)["events"] if action == "alloc"]
    workspace = elements * (4 * WIDTH + 2 * 2 * WIDTH + 4) + 256
    flash = compute_attention_backward_scratch(
        rows=rows, heads=HEADS, kv_heads=2, queries=TOKENS, keys=TOKENS, head_width=WIDTH
    )
    assert sizes.count(workspace) == LAYERS * STEPS and workspace not in (*flash, sum(flash))
    operator = "aten::_scaled_dot_product_flash_attention"
    assert choose_attention_kernel(HARDWARE["h100"], operator, WIDTH) == "cudnn"


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("share", [None, 0.9])
def test_a_snapshot_comes_back_exactly(tmp_path, expandable, share):
    trace = build_training_steps()
    how = AllocatorSettings(expandable=expandable)
    if share:
        how.cap, how.by_fraction = int(share * replay(trace, how).reserved), True
    expected = replay(trace, how)
    snapshot = snapshot_of(
        trace, tmp_path, expandable=expandable, cap=how.cap, by_fraction=how.by_fraction
    )
    stream = read_snapshot_events(snapshot, cap=how.cap, measured={"retries": expected.retries})
    assert (expected.retries > 0) == (share is not None)
    write_fixture(stream, tmp_path / "run.json.gz")
    stream = read_fixture(tmp_path / "run.json.gz")
    found = replay_events(stream)
    assert found.first_difference is None and found.segments
    assert found.reserved == stream["measured"]["reserved"] == expected.reserved
    assert found.retries == expected.retries
    assert (found.allocated, found.active) == (
        max(phase.allocated for phase in expected.phases.values()),
        expected.active,
    )


def recorded_by(allocator: CachingAllocator) -> dict:
    """What a snapshot of torch would hold, from the model's own log."""
    keys = ("action", "addr", "size", "stream")
    segments = [{"device": 0, "total_size": allocator.reserved}]
    how = {
        "expandable_segments": allocator.settings.expandable,
    }
    entries = [dict(zip(keys, event, strict=True)) for event in allocator.log]
    return {"segments": segments, "device_traces": [entries], "allocator_settings": how}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.none() | st.integers(100 * MIB, 400 * MIB))
def test_streams_with_waiting_blocks_retries_and_emptied_caches_come_back_exactly(
    seed, expandable, cap
):
    rng = random.Random(seed)
    how = AllocatorSettings(expandable=expandable, cap=cap, by_fraction=cap is not None)
    allocator, live = CachingAllocator(how), []
    allocator.log = []
    for _ in range(120):
        chosen = rng.random()
        if chosen < 0.55:
            for waited_for in range(3):  # as the allocator does before it looks for a block
                if rng.random() < 0.3:
                    allocator.finish(waited_for)
            try:
                live.append(allocator.malloc(int(2 ** rng.uniform(6, 26)), rng.randrange(2)))
            except OutOfMemory:
                pass
        elif chosen < 0.98 and live:
            block = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.3:
                allocator.record_stream(block, 2)
            allocator.free(block)
        elif chosen >= 0.98 and cap is None:  # under a cap a stream does not tell it from a retry
            allocator.empty_cache()
    found = replay_events(read_snapshot_events(recorded_by(allocator), cap=cap))
    assert found.first_difference is None
    assert (found.reserved, found.retries) == (
        allocator.peaks.reserved,
        allocator.num_alloc_retries,
    )
    assert (found.allocated, found.active) == (allocator.peaks.allocated, allocator.peaks.active)


@pytest.mark.parametrize("neighbor", [None, 8 * MIB])
def test_a_block_freed_just_before_memory_runs_short_was_still_in_use(neighbor):
    """Else it would have been reused. Alone in its segment it is given back; beside another one
    memory runs out.
    """
    allocator = CachingAllocator(AllocatorSettings(cap=60 * MIB, by_fraction=True))
    allocator.log = []
    allocator.malloc(40 * MIB)
    block = allocator.malloc(10 * MIB - 512 if neighbor else 20 * MIB)
    if neighbor:
        allocator.malloc(neighbor)
    allocator.record_stream(block, 1)
    allocator.free(block)
    if neighbor:
        with pytest.raises(OutOfMemory):
            allocator.malloc(9 * MIB)
    else:
        allocator.malloc(20 * MIB)
    found = replay_events(read_snapshot_events(recorded_by(allocator), cap=60 * MIB))
    assert found.first_difference is None and found.retries == allocator.num_alloc_retries == 1
    assert found.segments[-1][0] == ("oom" if neighbor else "segment_alloc")


def test_a_wrong_stream_is_noticed(tmp_path):
    stream = read_snapshot_events(snapshot_of(build_training_steps(), tmp_path))
    number = next(
        at
        for at, event in enumerate(stream["events"])
        if event[0] == "segment_alloc" and event[2] > 2 * MIB
    )
    stream["events"][number][2] += 2 * MIB
    found = replay_events(stream)
    assert found.first_difference == sum(
        event[0] == "segment_alloc" for event in stream["events"][:number]
    )


def test_a_history_that_is_not_whole_is_refused(tmp_path):
    snapshot = snapshot_of(build_training_steps(), tmp_path)
    with pytest.raises(ValueError, match="bytes at most, 5 were measured"):
        read_snapshot_events(snapshot, measured={"reserved": 5})
    entries = snapshot["device_traces"][0]
    first = next(at for at, entry in enumerate(entries) if entry["action"] == "free_requested")
    snapshot["device_traces"] = [entries[first:]]
    with pytest.raises(ValueError, match="the history does not begin before the allocation at 0x"):
        read_snapshot_events(snapshot)
    snapshot["device_traces"] = [entries[:1]]
    with pytest.raises(ValueError, match="bytes reserved, the segments hold"):
        read_snapshot_events(snapshot)


def test_settings_are_read_from_the_snapshot(tmp_path):
    snapshot = snapshot_of(build_training_steps(), tmp_path, expandable=True)
    stream = read_snapshot_events(snapshot, cap=10**9)
    assert AllocatorSettings(**stream["settings"]) == AllocatorSettings(
        expandable=True, cap=10**9, by_fraction=True
    )
    snapshot["allocator_settings"] |= {
        "roundup_power2_divisions": {"1": 8},
        "max_split_size": 64 * MIB,
    }
    with pytest.raises(ValueError, match="not modeled: max_split_size, roundup_power2_divisions"):
        read_snapshot_events(snapshot)


def test_streams_are_stored_small_and_the_same_each_time(tmp_path):
    stream = read_snapshot_events(snapshot_of(build_training_steps(layers=30), tmp_path))
    write_fixture(stream, tmp_path / "a.json.gz")
    write_fixture(stream, tmp_path / "b.json.gz")
    stored = (tmp_path / "a.json.gz").read_bytes()
    assert (
        stored == (tmp_path / "b.json.gz").read_bytes()
        and len(stored) < len(json.dumps(stream)) / 3
    )

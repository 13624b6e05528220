"""Snapshots of a simulated run, read by torch's own functions."""

import pickle
import re

import pytest
from torch.cuda import _memory_viz

from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay, write_snapshot
from recipe_lib.plan.tracing.trace import ALLOC
from recipe_lib.units import MIB
from tests.plan.made_traces import Writer, build_training_steps


def snapshot_of(trace, folder, **settings):
    write_snapshot(trace, folder / "run.pickle", AllocatorSettings(**settings))
    return pickle.loads((folder / "run.pickle").read_bytes())  # noqa: S301 - written by us


@pytest.mark.parametrize("expandable", [False, True])
def test_torch_reads_it(tmp_path, expandable):
    trace = build_training_steps()
    snapshot = snapshot_of(trace, tmp_path, expandable=expandable)
    replayed = replay(trace, AllocatorSettings(expandable=expandable))
    # These two check themselves that blocks fill their segments.
    summary = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(replayed.reserved)}" in summary
    lines = _memory_viz.segments(snapshot, format_flamegraph=lambda text: text).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == replayed.reserved
    by_memory = _memory_viz.memory(snapshot, format_flamegraph=lambda text: text)
    assert "kind:0:parameters w0;part:0:other;module:0:-;operator:0:-" in by_memory
    text = _memory_viz.trace(snapshot)
    device = [storage for storage in trace.storages if storage.device and storage.bytes]
    assert len(re.findall(r"^\S+ = \S+\[\d+:", text, re.M)) == len(device)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    assert "snapshot.pickle" in _memory_viz.segment_plot(snapshot)


def test_entries_say_what_was_allocated_where_and_when(tmp_path):
    writer = Writer()
    writer.begin_phase("setup")
    weight = writer.allocate(30 * MIB, kind="parameters", label="head.weight")
    writer.begin_phase("step")
    writer.run_op("mm")
    writer.allocate(100, device=False)
    writer.allocate(700, kind="activations", module="layers.0", op="aten.mm", part="forward")
    writer.free(weight)
    snapshot = snapshot_of(writer.trace, tmp_path)
    entries = snapshot["device_traces"][0]
    assert [(entry["action"], entry["size"], entry["time_us"]) for entry in entries] == [
        ("segment_alloc", 30 * MIB, 1),
        ("alloc", 30 * MIB, 1),
        ("segment_alloc", 2 * MIB, 5),
        ("alloc", 700, 5),
        ("free_requested", 30 * MIB, 6),
        ("free_completed", 30 * MIB, 6),
    ]
    frames = [f"{frame['filename']} {frame['name']}" for frame in entries[3]["frames"]]
    assert frames == ["operator aten.mm", "module layers.0", "part forward", "kind activations"]
    assert entries[4]["frames"][-1]["name"] == "parameters head.weight"
    assert [
        (mark["name"], mark["stage"], mark["time_us"]) for mark in snapshot["external_annotations"]
    ] == [
        ("setup", "START", 0),
        ("setup", "END", 2),
        ("step", "START", 2),
        ("step", "END", 7),
    ]
    large, small = snapshot["segments"]
    assert (large["segment_type"], large["total_size"], large["allocated_size"]) == (
        "large",
        30 * MIB,
        0,
    )
    assert [block["state"] for block in small["blocks"]] == ["active_allocated", "inactive"]
    assert (small["allocated_size"], small["requested_size"]) == (1024, 700)


def test_it_ends_where_memory_runs_out(tmp_path):
    writer = Writer()
    writer.begin_phase("step")
    writer.allocate(30 * MIB)
    writer.allocate(40 * MIB, module="layers.7")
    writer.allocate(1)
    snapshot = snapshot_of(writer.trace, tmp_path, cap=50 * MIB)
    *_, last = snapshot["device_traces"][0]
    assert (last["action"], last["size"]) == ("oom", 40 * MIB) and last["frames"][1][
        "name"
    ] == "layers.7"
    assert "raise OutOfMemoryError # 40.0MiB requested" in _memory_viz.trace(snapshot)
    assert sum(kind == ALLOC for kind, _ in writer.trace.events) == 3

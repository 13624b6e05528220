"""A trace replayed: peaks by phase, where memory runs out, and the smallest memory that is
enough.
"""

import pytest

from benchmarks.allocator_events import find_smallest_cap
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import Replay, replay
from recipe_lib.units import MIB
from tests.plan.made_traces import Writer, build_training_steps


def test_peaks_are_by_phase_and_the_pool_stays():
    writer = Writer()
    writer.begin_phase("setup")
    weight = writer.allocate(10 * MIB)
    writer.free(writer.allocate(100 * MIB))
    writer.begin_phase("step")
    writer.free(writer.allocate(20 * MIB + 1))
    writer.allocate(MIB + 1, stream=1)
    writer.allocate(77, device=False)
    writer.allocate(0)
    writer.free(weight)
    found = replay(writer.trace)
    setup, step = found.phases["setup"], found.phases["step"]
    assert list(found.phases) == ["setup", "step"] and found.survived and found.events == 7
    assert (setup.requested, setup.allocated, setup.active, setup.reserved) == (110 * MIB,) * 3 + (
        110 * MIB,
    )
    # Of the free 100 MiB: 20 MiB and 512 B. The other stream takes 20 MiB of its own.
    assert step.requested == 30 * MIB + 1
    assert step.allocated == step.active == 30 * MIB + 512
    assert step.reserved == 130 * MIB == found.reserved
    assert found.active == 110 * MIB


def test_a_phase_that_comes_twice_keeps_its_largest_peaks():
    writer = Writer()
    for size in (10, 30, 20):
        writer.begin_phase("step")
        writer.free(writer.allocate(size * MIB))
    found = replay(writer.trace)
    assert list(found.phases) == ["step"] and found.phases["step"].allocated == 30 * MIB
    assert found.reserved == 40 * MIB  # 10 and 30: the 20 are cut from the 30


def test_requested_peaks_are_those_of_the_trace():
    trace = build_training_steps()
    found = replay(trace)
    assert {
        name: peak.requested for name, peak in found.phases.items()
    } == trace.find_active_peaks()
    for peak in found.phases.values():
        assert peak.requested < peak.allocated == peak.active < peak.reserved


def test_expandable_segments_reserve_little_more_than_is_active():
    trace = build_training_steps(layers=20)
    default, expandable = replay(trace), replay(trace, AllocatorSettings(expandable=True))
    assert expandable.reserved < default.reserved
    assert expandable.active <= default.active  # whose blocks may have unsplit rests
    assert expandable.reserved < 1.1 * expandable.active


def test_a_replay_ends_where_memory_runs_out():
    writer = Writer()
    writer.begin_phase("setup")
    writer.allocate(30 * MIB)
    writer.begin_phase("step")
    writer.run_op("mm")
    writer.allocate(40 * MIB, module="layers.3.mlp", op="aten.mm", part="forward")
    found = replay(writer.trace, AllocatorSettings(cap=60 * MIB))
    assert not found.survived and found.retries == 1
    assert found.phases["step"].reserved == 30 * MIB


def test_the_smallest_cap_by_hand():
    """20 MiB of stream 0 are unused when stream 1 wants 30: with less than 50 they have to be given
    back first.
    """
    writer = Writer()
    writer.begin_phase("step")
    writer.free(writer.allocate(20 * MIB))
    writer.allocate(30 * MIB, stream=1)
    assert replay(writer.trace).reserved == 50 * MIB
    assert find_smallest_cap(writer.trace) == 30 * MIB
    assert find_smallest_cap(writer.trace, expandable=True) == 40 * MIB  # in pages of 20 MiB
    assert replay(writer.trace, AllocatorSettings(cap=30 * MIB)).retries == 1


@pytest.mark.parametrize("expandable", [False, True])
def test_the_smallest_cap_is_enough_and_a_step_less_is_not(expandable):
    trace = build_training_steps()
    cap = find_smallest_cap(trace, expandable=expandable)
    free_run = replay(trace, AllocatorSettings(expandable=expandable))
    assert free_run.phases["step"].requested <= cap < free_run.reserved and free_run.retries == 0

    def at(limit: int) -> Replay:
        return replay(trace, AllocatorSettings(expandable=expandable, cap=limit))

    assert at(cap).survived and at(cap).retries > 0
    assert not at(cap - 2 * MIB).survived


def test_a_trace_without_device_memory():
    writer = Writer()
    writer.begin_phase("setup")
    writer.allocate(100, device=False)
    found = replay(writer.trace)
    assert found.survived and found.reserved == 0 and find_smallest_cap(writer.trace) == 0
    assert replay(Writer().trace).phases == {}

"""The model of CUDA's caching allocator, case by case. Expected sizes follow from the constants in
pytorch's c10/core/AllocatorConfig.h (512 B, 1 MiB, 2 MiB, 10 MiB, 20 MiB) and the rules in
c10/cuda/CUDACachingAllocator.cpp.
"""

import pytest

from recipe_lib.plan.allocation.caching_allocator import (
    LAUNCH_QUEUE,
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    round_size,
)
from recipe_lib.units import GIB, MIB
from tests.plan.allocator_books import check_books

EXPANDABLE = AllocatorSettings(expandable=True)


def allocator_of(**settings) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings(**settings))


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded first, then it is large
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # the rest is less than 1 MiB: handed out with it
        (12 * MIB, 12 * MIB, 12 * MIB),
        (13 * MIB, 14 * MIB, 14 * MIB),  # a rest of 1 MiB is not more than 1 MiB
        (13 * MIB - 512, 13 * MIB - 512, 14 * MIB),  # of 1 MiB and 512 B it is
        (15 * GIB, 15 * GIB, 15 * GIB),
    ],
)
def test_one_allocation(requested, allocated, reserved):
    allocator = CachingAllocator()
    block = allocator.malloc(requested)
    check_books(allocator)
    found = (
        block.size,
        allocator.requested,
        allocator.allocated,
        allocator.active,
        allocator.reserved,
    )
    assert found == (allocated, requested, allocated, allocated, reserved)


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB + 1, 11 * MIB + 512, 20 * MIB),  # always split
        (20 * MIB, 20 * MIB, 20 * MIB),
        (21 * MIB, 21 * MIB, 40 * MIB),  # pages of 20 MiB
    ],
)
def test_one_allocation_in_an_expandable_segment(requested, allocated, reserved):
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(requested)
    check_books(allocator)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("requested", "rounded"), [(1, 512), (512, 512), (1200, 1536), (1200 * 1024, 1200 * 1024)]
)
def test_sizes_are_rounded(requested, rounded):
    assert round_size(requested) == rounded


def test_small_blocks_share_a_segment_and_the_next_one_takes_another():
    allocator = CachingAllocator()
    first, second = allocator.malloc(MIB), allocator.malloc(MIB)
    assert second.address == first.address + MIB and allocator.reserved == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB
    full = CachingAllocator()
    for size in (MIB, MIB - 512, 512):  # a rest of 512 B is a block
        full.malloc(size)
    assert full.reserved == full.allocated == 2 * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_of_two_the_lower_one():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 30, 50)]
    places = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(29 * MIB + 1).address == places[1]  # 30 MiB, all of it
    assert allocator.malloc(30 * MIB).address == places[2]
    assert allocator.malloc(30 * MIB).address == places[0]  # 40 MiB, split
    check_books(allocator)
    assert allocator.reserved == 150 * MIB and allocator.allocated == 90 * MIB


def test_freed_neighbors_merge_in_any_order():
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = CachingAllocator()
        blocks = [allocator.malloc(6 * MIB) for _ in range(3)]
        assert allocator.reserved == 20 * MIB
        for number in order:
            allocator.free(blocks[number])
            check_books(allocator)
        assert [block.size for block in allocator.list_blocks()] == [20 * MIB]
        assert allocator.malloc(20 * MIB).size == 20 * MIB and allocator.reserved == 20 * MIB


def test_streams_and_pools_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, stream=0))
    allocator.malloc(20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
    allocator.malloc(1, stream=0)  # the small pool does not take from a large segment
    assert allocator.reserved == 42 * MIB


def test_a_block_used_by_another_stream_waits_for_it():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB, stream=0)
    allocator.record_stream(block, 0)  # its own: nothing to wait for
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    check_books(allocator)
    assert (allocator.allocated, allocator.active, allocator.reserved) == (0, 20 * MIB, 20 * MIB)
    other = allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.finish(1)
    assert allocator.active == 40 * MIB
    allocator.finish(2)
    check_books(allocator)
    assert allocator.active == 20 * MIB
    assert allocator.malloc(20 * MIB).address != other.address and allocator.reserved == 40 * MIB
    own = allocator.malloc(20 * MIB)
    allocator.record_stream(own, 0)
    allocator.free(own)
    assert allocator.active == 40 * MIB


def test_a_host_is_ahead_of_a_stream_by_no_more_than_its_queue():
    """Of two streams that a block waits for, both must have come so far."""
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB)
    for stream in (1, 2):
        allocator.record_stream(block, stream)
    allocator.issue(1, 7)  # before the block is freed: counts for nothing
    allocator.free(block)
    allocator.issue(1, LAUNCH_QUEUE - 1)
    allocator.issue(2, 3 * LAUNCH_QUEUE)
    assert allocator.active == 20 * MIB
    allocator.issue(1)
    check_books(allocator)
    assert allocator.active == 0
    allocator.finish(1)
    assert allocator.malloc(20 * MIB).address == block.address


def test_an_allocation_without_room_gives_unused_segments_back_and_tries_again():
    allocator = allocator_of(cap=60 * MIB)
    kept = allocator.malloc(5 * MIB)  # its segment of 20 MiB is in use
    allocator.free(allocator.malloc(20 * MIB))
    allocator.free(allocator.malloc(20 * MIB, stream=1))
    waiting = allocator.malloc(15 * MIB, stream=0)  # from the free block of 20 MiB
    allocator.record_stream(waiting, 1)
    allocator.free(waiting)
    allocator.malloc(40 * MIB)  # waits for the stream, gives 2 x 20 MiB back
    check_books(allocator)
    assert (allocator.reserved, allocator.num_alloc_retries) == (60 * MIB, 1)
    with pytest.raises(
        OutOfMemory, match=r"20.00 MiB requested, 60.00 MiB of 60.00 MiB reserved, 45.00 MiB"
    ):
        allocator.malloc(20 * MIB)
    assert allocator.num_alloc_retries == 2
    allocator.free(kept)
    allocator.malloc(20 * MIB)  # goes on after it
    check_books(allocator)


def test_empty_cache_keeps_segments_in_use():
    allocator = CachingAllocator()
    kept = allocator.malloc(512)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB and allocator.peaks.reserved == 102 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    check_books(allocator)
    assert allocator.reserved == 0 and allocator.list_blocks() == []


def test_peaks_start_again_from_what_is_held():
    allocator = CachingAllocator()
    kept, other = allocator.malloc(700), allocator.malloc(30 * MIB)
    allocator.free(other)
    allocator.reset_peaks()
    assert (allocator.peaks.requested, allocator.peaks.allocated, allocator.peaks.active) == (
        700,
        1024,
        1024,
    )
    assert allocator.peaks.reserved == 32 * MIB
    allocator.free(kept)
    assert allocator.peaks.allocated == 1024 and allocator.allocated == 0


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="is not allocated"):
        allocator.free(block)


def test_an_expandable_segment_grows_at_its_end_and_reuses_what_is_free():
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(30 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.malloc(50 * MIB)  # 10 MiB are there, two pages more
    start = first.address
    assert allocator.reserved == 80 * MIB and second.address == start + 30 * MIB
    allocator.free(first)
    assert allocator.malloc(25 * MIB).address == start
    allocator.malloc(60 * MIB)  # the hole of 5 MiB is too small, the end is full
    check_books(allocator)
    assert allocator.reserved == 140 * MIB


def test_a_block_that_can_grow_is_taken_last():
    allocator = CachingAllocator(EXPANDABLE)
    hole, wall = allocator.malloc(15 * MIB), allocator.malloc(MIB + 512)
    assert allocator.reserved == 20 * MIB
    start = hole.address
    allocator.free(hole)
    assert (
        allocator.malloc(3 * MIB).address == start
    )  # although the end, 4 MiB less 512 B, fits better
    allocator.free(wall)
    check_books(allocator)


def test_empty_cache_unmaps_whole_pages_and_they_are_mapped_again():
    allocator = CachingAllocator(EXPANDABLE)
    low, middle, high = (allocator.malloc(size * MIB) for size in (10, 60, 10))
    assert allocator.reserved == 80 * MIB
    start = middle.address
    allocator.free(middle)  # from 10 to 70 MiB: the pages from 20 to 60
    allocator.empty_cache()
    check_books(allocator)
    assert allocator.reserved == 40 * MIB
    again = allocator.malloc(50 * MIB)
    check_books(allocator)
    assert again.address == start and allocator.reserved == 80 * MIB
    for block in (low, high, again):
        allocator.free(block)
    allocator.empty_cache()
    check_books(allocator)
    assert allocator.reserved == 0 and allocator.list_blocks() == []


def test_expandable_segments_under_a_cap():
    """A device's end is met page by page; a fraction of it is compared with the request's own
    segment beforehand.
    """
    device = allocator_of(expandable=True, cap=50 * MIB)
    device.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        device.malloc(20 * MIB)  # a third page would be past the end
    check_books(device)
    device.malloc(10 * MIB)  # in the second page
    assert device.reserved == 40 * MIB
    fraction = allocator_of(expandable=True, cap=50 * MIB, by_fraction=True)
    fraction.malloc(30 * MIB)
    assert fraction.malloc(10 * MIB) and fraction.reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        fraction.malloc(12 * MIB)
    whole = allocator_of(expandable=True, cap=50 * MIB, by_fraction=True)
    whole.malloc(42 * MIB)
    assert whole.reserved == 60 * MIB  # 42 MiB were compared with the cap, three pages taken


def test_another_streams_pages_make_room():
    allocator = allocator_of(expandable=True, cap=60 * MIB)
    allocator.free(allocator.malloc(40 * MIB, stream=1))
    allocator.malloc(40 * MIB, stream=0)
    check_books(allocator)
    assert (allocator.reserved, allocator.num_alloc_retries) == (40 * MIB, 1)

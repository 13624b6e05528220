"""Random programs: the allocator's books are right after every step, and a slow model of the same
rules agrees.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.plan.allocation.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    compute_segment_size,
    round_size,
)
from recipe_lib.units import MIB, format_bytes
from tests.plan.allocator_books import check_books

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 24 * MIB),
    st.integers(1, 90).map(lambda number: number * MIB),
)
STREAMS = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 1000), STREAMS),
        st.tuples(st.just("finish"), st.just(0), STREAMS),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable=st.booleans(),
    cap=st.none() | st.integers(40 * MIB, 300 * MIB),
    by_fraction=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(SETTINGS, STEPS)
def test_the_books_are_right_after_every_step(how, steps):
    allocator = CachingAllocator(how)
    live, peak = [], 0
    for action, number, stream in steps:
        if action == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
            except OutOfMemory as error:
                assert how.cap is not None and str(error).startswith(
                    f"{format_bytes(number)} requested"
                )
                if not how.expandable:
                    assert allocator.reserved + compute_segment_size(round_size(number)) > how.cap
                # All that was unused has gone: the cap could not be met by giving back more.
                before = allocator.reserved
                allocator.empty_cache()
                assert allocator.reserved == before and allocator.active == allocator.allocated
        elif action == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif action == "record" and live:
            allocator.record_stream(live[number % len(live)], stream)
        elif action == "finish":
            allocator.finish(stream)
        elif action == "empty":
            allocator.empty_cache()
        check_books(allocator)
        # Seen from outside: what was handed out does not overlap, and is counted.
        spans = sorted((block.address, block.address + block.requested) for block in live)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert allocator.allocated == sum(block.size for block in live)
        peak = max(peak, allocator.allocated)
        assert allocator.peaks.allocated == peak
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    check_books(allocator)
    assert (allocator.requested, allocator.allocated, allocator.active, allocator.reserved) == (
        0,
        0,
        0,
        0,
    )


class SlowAllocator:
    """The default rules, without a cap, as lists of pieces that are searched from end to end."""

    def __init__(self):
        self.segments = []  # (stream, small, [[bytes, handle or None], ...])

    def malloc(self, handle, num_bytes, stream):
        size = (num_bytes + 511) // 512 * 512
        small = size <= 2**20
        fits = [
            (piece[0], number, place)
            for number, (other, other_small, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if piece[1] is None and (other, other_small) == (stream, small) and piece[0] >= size
        ]
        if fits:
            _, number, place = min(fits)
        else:
            taken = (
                2**21
                if small
                else 20 * 2**20
                if size < 10 * 2**20
                else (size + 2**21 - 1) // 2**21 * 2**21
            )
            self.segments.append((stream, small, [[taken, None]]))
            number, place = len(self.segments) - 1, 0
        pieces = self.segments[number][2]
        rest = pieces[place][0] - size
        if rest >= 512 if small else rest > 2**20:
            pieces[place : place + 1] = [[size, handle], [rest, None]]
        else:
            pieces[place][1] = handle

    def free(self, handle):
        for _, _, pieces in self.segments:
            for piece in pieces:
                if piece[1] == handle:
                    piece[1] = None
            for place in range(len(pieces) - 1, 0, -1):
                if pieces[place][1] is None and pieces[place - 1][1] is None:
                    pieces[place - 1][0] += pieces.pop(place)[0]

    def totals(self):
        pieces = [piece for _, _, segment in self.segments for piece in segment]
        return sum(piece[0] for piece in pieces), sum(
            piece[0] for piece in pieces if piece[1] is not None
        )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans() | st.just(True), SIZES, STREAMS, st.integers(0, 1000)), max_size=60
    )
)
def test_a_slow_model_of_the_rules_agrees(steps):
    allocator, slow, live = CachingAllocator(), SlowAllocator(), []
    for number, (allocates, size, stream, chosen) in enumerate(steps):
        if allocates:
            live.append((number, allocator.malloc(size, stream)))
            slow.malloc(number, size, stream)
        elif live:
            handle, block = live.pop(chosen % len(live))
            allocator.free(block)
            slow.free(handle)
        assert (allocator.reserved, allocator.allocated) == slow.totals()

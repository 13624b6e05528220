"""Packs: best-fit decreasing, each item once, nothing over capacity, near the fewest packs that are
possible.
"""

import time
from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks import packing as benchmark
from recipe_lib.data import pack

CASES = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=80), st.just(capacity)
    )
)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook's: one item after the other into the fullest bin that has room; lengths of each
    bin.
    """
    rooms: list[tuple[int, int]] = []
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = rooms.pop(at)
        bins[number].append(length)
        insort(rooms, (room - length, number))
    return bins


def lengths_of(packs, lengths) -> list[list[int]]:
    return sorted(
        sorted(np.asarray(lengths)[packs[number]].tolist()) for number in range(len(packs))
    )


@settings(max_examples=300, deadline=None)
@given(CASES)
@example(([6, 6, 2, 2], 10))
def test_the_same_packs_as_the_textbook(case):
    lengths, capacity = case
    packs = pack(np.array(lengths), capacity)
    assert sorted(packs.items.tolist()) == list(range(len(lengths)))
    # Bins that are equally full are alike, so the fills are those of the textbook, whichever of
    # them is taken.
    assert sorted(map(sum, lengths_of(packs, lengths))) == sorted(
        map(sum, best_fit_decreasing(lengths, capacity))
    )
    assert max(sum(held) for held in lengths_of(packs, lengths)) <= capacity


@settings(max_examples=100, deadline=None)
@given(CASES, st.randoms(use_true_random=False))
def test_lengths_alone_decide(case, random):
    lengths, capacity = case
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = [lengths[number] for number in order]
    assert lengths_of(pack(np.array(lengths), capacity), lengths) == lengths_of(
        pack(np.array(shuffled), capacity), shuffled
    )


def test_items_of_one_length_go_in_the_order_given():
    packs = pack(np.array([4, 6, 4, 6, 4]), 10)
    assert [packs[number].tolist() for number in range(len(packs))] == [[0, 1], [2, 3], [4]]
    assert packs.offsets.dtype == packs.items.dtype == np.int64


@pytest.mark.parametrize("name", benchmark.MIXES)
def test_within_one_percent_of_the_fewest_possible(name):
    lengths, capacity = benchmark.draw_lengths(name, 50_000, seed=3)
    packs = pack(lengths, capacity)
    filled = np.add.reduceat(lengths[packs.items], packs.offsets[:-1])
    assert filled.max() <= capacity and filled.sum() == lengths.sum()
    assert len(packs) <= 1.01 * benchmark.compute_lower_bound(lengths, capacity)


def test_the_lower_bound_is_one():
    assert benchmark.compute_lower_bound(np.array([6, 6, 6]), 10) == 3  # by the sum it would be 2
    assert benchmark.compute_lower_bound(np.array([6, 6, 4, 4, 1]), 10) == 3
    assert benchmark.compute_lower_bound(np.array([5, 5, 5, 5]), 10) == 2
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(1, 31, 12)
        assert (
            -(-lengths.sum() // 30)
            <= benchmark.compute_lower_bound(lengths, 30)
            <= fewest(lengths.tolist(), 30)
        )


def fewest(lengths: list[int], capacity: int) -> int:
    """The true least number of bins, by trying everything that is not worse already."""
    lengths = sorted(lengths, reverse=True)
    best = len(best_fit_decreasing(lengths, capacity))

    def go(at: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(lengths):
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= lengths[at]:
                left = list(rooms)
                left.remove(room)
                go(at + 1, tuple(sorted([*left, room - lengths[at]])))
        go(at + 1, tuple(sorted([*rooms, capacity - lengths[at]])))

    go(0, ())
    return best


@pytest.mark.parametrize("name", ["chats, 4k", "all sizes, 128k"])
def test_a_million_lengths_in_ten_seconds_of_one_core(name):
    lengths, capacity = benchmark.draw_lengths(name, 1_000_000)
    began = time.process_time()
    packs = pack(lengths, capacity)
    assert time.process_time() - began < 10
    assert len(packs) <= 1.01 * benchmark.compute_lower_bound(lengths, capacity)


def test_the_benchmark_prints_a_line_for_each_mix(capsys):
    benchmark.main(["--items", "2000"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(benchmark.MIXES) and all(line.endswith("%") for line in lines[2:])


def test_no_items_no_packs():
    packs = pack(np.array([], dtype=np.int64), 8)
    assert len(packs) == 0 and packs.offsets.tolist() == [0]


@pytest.mark.parametrize("lengths", [[1, 9], [0, 3], [-1, 2]])
def test_lengths_that_do_not_fit_are_our_mistake(lengths):
    with pytest.raises(ValueError, match=r"expected 1 to 8"):
        pack(np.array(lengths), 8)

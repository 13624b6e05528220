"""Whom a run waits for in vain, from what its ranks say of themselves."""

import pytest

from recipe_lib.parallel.hang_detection import beats
from recipe_lib.parallel.hang_detection.beats import (
    Beat,
    all_stand,
    behind,
    describe_silence,
    is_overdue,
    numbers,
    silent,
)


def entered(**groups: int) -> Beat:
    """A rank that has entered so many collectives of each group."""
    return Beat(groups={name: [0, count] for name, count in groups.items()})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([entered(all=5), entered(all=4)], [1]),
        ([entered(all=5), entered(all=5)], []),
        # Tensor-parallel groups a and b, FSDP's x and y: 0 waits in a for 1, which waits in y for 3, that for 2 in b.
        ([entered(a=8, x=3), entered(a=7, y=4), entered(b=7, x=3), entered(b=8, y=3)], [2]),
        ([Beat(groups={"all": [1, 2]}), Beat(groups={"all": [2, 0]})], [0]),  # counted anew since
    ],
)  # fmt: skip
def test_who_is_behind_all_others(ranks: list[Beat], expected: list[int]) -> None:
    assert behind(dict(enumerate(ranks))) == expected


@pytest.mark.parametrize(
    ("number", "patience", "is_stopped", "seconds"),
    [
        (1, beats.STEP_SECONDS, False, 60),
        (1, beats.FIRST_STEP_SECONDS, False, 300),  # a call may let no thread beat
        (1, beats.LONG_SECONDS, False, 300),
        (0, beats.LONG_SECONDS, False, 1800),  # it may still import
        *((number, patience, True, 60) for number in (0, 1) for patience in (1.0, 10.0, 30.0)),
    ],
)
def test_how_long_a_rank_may_be_silent(number: int, patience: float, is_stopped: bool, seconds: int) -> None:
    for unheard, expected in ((seconds - 1, []), (seconds, [3])):
        ranks = {0: Beat(1), 3: Beat(number, patience=patience, unheard=unheard)}
        assert silent(ranks, 60.0, {3} if is_stopped else ()) == expected


def test_silence_in_words() -> None:
    ranks = {0: Beat(7, unheard=60), 1: Beat(0, unheard=61), 2: Beat(0, unheard=62)}
    assert describe_silence([0], ranks, {0, 1}) == "is stopped for 60 s"
    assert describe_silence([0, 1], ranks, {0}) == "are stopped or unreachable for 61 s"
    assert describe_silence([1, 2], ranks, {1, 2}) == "have not met the others and are stopped for 62 s"


@pytest.mark.parametrize(
    ("beat", "expected"),
    [
        (Beat(patience=beats.STEP_SECONDS, still=0, quiet=60), True),  # an endless loop: it moves, and comes no further
        (Beat(patience=beats.STEP_SECONDS, still=0, quiet=59), False),
        (Beat(patience=beats.FIRST_STEP_SECONDS, still=0, quiet=599), False),
        (Beat(patience=beats.LONG_SECONDS, still=0, quiet=10_000), False),  # it saves, or compiles
        (Beat(patience=beats.LONG_SECONDS, still=1800, quiet=1800), True),
        (Beat(patience=beats.PHASE_TIMEOUTS["in a debugger"], still=1e6, quiet=1e6), False),
    ],
)
def test_who_has_had_the_time(beat: Beat, expected: bool) -> None:
    assert is_overdue(beat, 60.0) is expected


def test_all_stand_only_when_each_one_does() -> None:
    stands, moves = Beat(patience=beats.STEP_SECONDS, still=300), Beat(patience=beats.STEP_SECONDS, still=1)
    assert all_stand({0: stands, 1: stands}, 60.0)
    assert not all_stand({0: stands, 1: moves}, 60.0)
    assert not all_stand({0: stands, 1: Beat(patience=beats.LONG_SECONDS, still=300)}, 60.0)


def test_numbers_of_many_ranks_are_cut() -> None:
    assert [numbers([3]), numbers([0, 2]), numbers([0, 1, 2])] == ["rank 3", "ranks 0 and 2", "ranks 0, 1 and 2"]
    assert numbers(list(range(16))) == "ranks 0, 1, 2 and 13 more"

"""Whom a run waits for in vain, from what its ranks say of themselves."""

import pytest

from recipe_lib.parallel.hang_detection import beats
from recipe_lib.parallel.hang_detection.beats import Beat, all_stand, behind, is_overdue, numbers, silent


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


def test_who_is_not_heard_of_has_less_time_in_a_step() -> None:
    step, long = beats.STEP_SECONDS, beats.LONG_SECONDS
    ranks = {0: Beat(patience=step, unheard=59), 1: Beat(patience=step, unheard=60),
             2: Beat(patience=long, unheard=299), 3: Beat(patience=long, unheard=300)}  # fmt: skip
    assert silent(ranks, 60.0) == [1, 3]


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

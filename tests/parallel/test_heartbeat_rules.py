"""Whom a run waits for in vain, from what its ranks say of themselves."""

import pytest

from recipe_lib.parallel import heartbeat as beats
from recipe_lib.parallel.heartbeat import (
    Beat,
    are_all_stuck,
    find_behind,
    find_silent,
    is_overdue,
    name_ranks,
)


def entered(**groups: int) -> Beat:
    """A rank that has entered so many collectives of each group."""
    return Beat(entered=groups)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([entered(all=5), entered(all=4)], [1]),
        ([entered(all=5), entered(all=5)], []),
        # Tensor-parallel groups a and b, FSDP's x and y: 0 waits in a for 1, which waits in y for
        # 3, that for 2 in b.
        ([entered(a=8, x=3), entered(a=7, y=4), entered(b=7, x=3), entered(b=8, y=3)], [2]),
        # Pipelines of ranks 0 and 2, 1 and 3, stages of 0 and 1, 2 and 3: 0 waits for 2, which
        # waits in b for 3, that for 1.
        ([Beat(entered={"0 with 2": 5}), Beat(entered={"1 with 3": 4}), Beat(entered={"0 with 2": 4, "b": 2}),
          Beat(entered={"1 with 3": 5, "b": 1})], [1]),
        # 0 waits for 2, and 1 for 3: either may wait for the other.
        ([Beat(entered={"0 with 2": 5}), Beat(entered={"1 with 3": 5}), Beat(entered={"0 with 2": 4, "b": 1}),
          Beat(entered={"1 with 3": 4, "b": 1})], [2, 3]),
    ],
)  # fmt: skip
def test_who_is_behind_all_others(ranks: list[Beat], expected: list[int]) -> None:
    assert find_behind(dict(enumerate(ranks))) == expected


@pytest.mark.parametrize(
    ("node", "patience", "is_stopped", "seconds"),
    [
        ("a", beats.STEP_TIMEOUTS, False, 60),
        ("a", beats.FIRST_STEP_TIMEOUTS, False, 300),  # a call may let no thread beat
        ("a", beats.LONG_TIMEOUTS, False, 300),
        ("", beats.LONG_TIMEOUTS, False, 1800),  # it may still import
        *((node, patience, True, 60) for node in ("", "a") for patience in (1.0, 10.0, 30.0)),
    ],
)
def test_how_long_a_rank_may_be_silent(
    node: str, patience: float, is_stopped: bool, seconds: int
) -> None:
    for unheard, expected in ((seconds - 1, []), (seconds, [3])):
        ranks = {0: Beat(node="a"), 3: Beat(node=node, patience=patience, unheard=unheard)}
        assert find_silent(ranks, 60.0, {3} if is_stopped else ()) == expected


@pytest.mark.parametrize(
    ("beat", "expected"),
    [
        (
            Beat(patience=beats.STEP_TIMEOUTS, still=0, quiet=60),
            True,
        ),  # an endless loop: it moves, and comes no further
        (Beat(patience=beats.STEP_TIMEOUTS, still=0, quiet=59), False),
        (Beat(patience=beats.FIRST_STEP_TIMEOUTS, still=0, quiet=599), False),
        (Beat(patience=beats.LONG_TIMEOUTS, still=0, quiet=10_000), False),  # it saves, or compiles
        (Beat(patience=beats.LONG_TIMEOUTS, still=1800, quiet=1800), True),
    ],
)
def test_who_has_had_the_time(beat: Beat, expected: bool) -> None:
    assert is_overdue(beat, 60.0) is expected


def test_all_stand_only_when_each_one_does() -> None:
    stands, moves = (
        Beat(patience=beats.STEP_TIMEOUTS, still=300),
        Beat(patience=beats.STEP_TIMEOUTS, still=1),
    )
    assert are_all_stuck({0: stands, 1: stands}, 60.0)
    assert not are_all_stuck({0: stands, 1: moves}, 60.0)
    assert not are_all_stuck({0: stands, 1: Beat(patience=beats.LONG_TIMEOUTS, still=300)}, 60.0)


def test_numbers_of_many_ranks_are_cut() -> None:
    assert [name_ranks([3]), name_ranks([0, 2])] == ["rank 3 is", "ranks 0, 2 are"]
    assert name_ranks(list(range(16))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... are"

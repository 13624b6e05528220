"""A sequence with loops, continued from two that have fewer turns, against one written out by
hand.
"""

import pytest

from recipe_lib.plan.tracing.trace_deep_model import LoopItems, continue_items


def program(turns: int, *, every_other: bool = False) -> LoopItems:
    """Takes something for each turn forwards, uses and releases it backwards, in between does what
    is done once.

    Keys: 1 takes, 2 uses, 3 releases, 4 between, 5 a sum over all turns.
    """
    items = LoopItems()
    taken = []
    for turn in range(turns):
        taken.append(len(items.keys))
        items.add(1, (turn,))
        if every_other and turn % 2:
            items.add(7)
    items.add(4)
    items.add(5, (10 * turns + 3,))
    for turn in reversed(range(turns)):
        items.add(2, (turn,), taken[turn])
        items.add(3, (), taken[turn])
    items.add(6, (), taken[-1])
    items.add(6, (), taken[0])
    return items


@pytest.mark.parametrize("turns", [5, 6, 40])
def test_numbers_and_targets_go_on_in_both_directions(turns: int) -> None:
    long = program(5)
    found = continue_items(program(4), long, turns - 5)
    expected = program(turns)
    assert found is not None
    assert [long.keys[like] for like in found.keys] == expected.keys
    assert found.numbers == expected.numbers
    assert found.targets == expected.targets


def test_a_loop_of_two_steps_a_turn() -> None:
    found = continue_items(
        program(8, every_other=True), long := program(10, every_other=True), 3, step=2
    )
    expected = program(16, every_other=True)
    assert found is not None
    assert [long.keys[like] for like in found.keys] == expected.keys
    assert (found.numbers, found.targets) == (expected.numbers, expected.targets)


def test_what_is_not_on_a_line_is_not_continued() -> None:
    short, long = program(5), program(6)
    long.numbers[3] = (17,)
    assert continue_items(short, long, 4) is None
    long = program(6)
    long.targets[-7] = long.targets[-5]  # a release of what another turn took
    assert continue_items(short, long, 4) is None


def test_what_is_more_than_a_turn_is_not_continued() -> None:
    short, long = program(5), program(6)
    long.add(9)
    assert continue_items(short, long, 4) is None, "something that happens once came to it"


def test_too_few_turns_show_no_line() -> None:
    assert continue_items(program(2), program(3), 4) is None

"""Change JSON that somebody else has written at random: keys lost or added, values of any kind.

Tests read the changed file, which has to be read or refused in one line.
"""

import random
from typing import Any

# What a value may be replaced by.
VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 2**31, 2**63, 10**18, 10**40, 10**400, 1e308, 1e-308, 0.5, float("inf"), float("nan"), None, True,
    False, "", "x", "a" * 5000, "\u202e", "\0", "../../x", "/etc/passwd", [], [1], {}, {"a": 1}, [[]], "1e9", [None],
    [10**30] * 5, {"type": "x"},
)  # fmt: skip
# Names of a key that may be added.
NAMES = ("x", "", "a" * 5000, "__class__")


def change_json(value: Any, draw: random.Random) -> Any:
    """Return a copy of parsed JSON with one change somewhere inside.

    draw: the random generator; the same seed makes the same change.
    """
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        chance = draw.random()
        if chance < 0.12:
            return {key: inner for key, inner in value.items() if key != name}
        if chance < 0.16:
            return {**value, draw.choice(NAMES): draw.choice(VALUES)}
        return {**value, name: change_json(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        index = draw.randrange(len(value))
        chance = draw.random()
        if chance < 0.15:
            return value[:index] + value[index + 1 :]
        if chance < 0.25:
            return value * draw.choice((2, 100))
        return [*value[:index], change_json(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)

"""Seeded changes of JSON that somebody else has written: keys lost, doubled or put in, values of
any other kind.
"""

import random
from typing import Any

VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 2**31, 2**63, 10**18, 10**40, 10**400, 1e308, 1e-308, 0.5, float("inf"), float("nan"), None, True,
    False, "", "x", "a" * 5000, "\u202e", "\0", "../../x", "/etc/passwd", [], [1], {}, {"a": 1}, [[]], "1e9", [None],
    [10**30] * 5, {"type": "x"},
)  # fmt: skip
NAMES = ("x", "", "a" * 5000, "__class__")


def change_files(value: Any, draw: random.Random) -> Any:
    """A copy with one change somewhere inside."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name, kind = draw.choice(list(value)), draw.random()
        if kind < 0.12:
            return {key: inner for key, inner in value.items() if key != name}
        if kind < 0.16:
            return {**value, draw.choice(NAMES): draw.choice(VALUES)}
        return {**value, name: change_files(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at, kind = draw.randrange(len(value)), draw.random()
        if kind < 0.15:
            return value[:at] + value[at + 1 :]
        if kind < 0.25:
            return value * draw.choice((2, 100))
        return [*value[:at], change_files(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)

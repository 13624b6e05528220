"""What `make test` leaves to `make test-all`: values that are marked slow, and fixtures that make
no more than the selected tests ask for.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_slow_except(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Values for `parametrize`, of which those that are not kept are marked slow."""
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert kept and not unknown, f"kept: {kept}, no values: {unknown}"
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def mark_slow_but(values: Iterable[Any], count: int) -> list[Any]:
    """Values for `parametrize`, all marked slow but `count` of them, evenly spread."""
    values = list(values)
    kept = {round(place * (len(values) - 1) / max(1, count - 1)) for place in range(count)}
    return [
        value if at in kept else pytest.param(*_read_arguments(value), marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def _read_arguments(value: Any) -> tuple[Any, ...]:
    """Return a value of one argument, or the values of several, as `pytest.param` takes them."""
    return value if isinstance(value, tuple) else (value,)


def select_cases(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Each value of a parameter in the tests of this file that are to run; for fixtures that make
    many things at once.

    request: of a fixture, which may be of the module.
    """
    found: list[Any] = []
    for item in request.session.items:
        if item.path == request.path and name in getattr(
            getattr(item, "callspec", None), "params", {}
        ):
            value = item.callspec.params[name]
            if value not in found:
                found.append(value)
    return found

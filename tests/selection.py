"""Choose what `make test` runs and what it leaves to `make test-all`.

`mark_slow_except` and `mark_slow_but` mark values of `pytest.mark.parametrize` as slow;
`select_cases` tells a fixture which values the selected tests ask for, so that it builds no others.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_slow_except(values: Iterable[Any], fast_values: Collection[Any]) -> list[Any]:
    """Return values for `parametrize`, all marked slow except `fast_values`.

    Raises AssertionError for a fast value that is none of the values, or if there is none.
    """
    values = list(values)
    unknown_values = [value for value in fast_values if value not in values]
    assert fast_values and not unknown_values, f"kept: {fast_values}, no values: {unknown_values}"
    return [
        value if value in fast_values else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


def mark_slow_but(values: Iterable[Any], count: int) -> list[Any]:
    """Return values for `parametrize`, all marked slow but `count` of them, evenly spread.

    A value of several arguments is a tuple.
    """
    values = list(values)
    last = len(values) - 1
    fast_indices = {round(number * last / max(1, count - 1)) for number in range(count)}
    return [
        value
        if index in fast_indices
        else pytest.param(*_read_arguments(value), marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]


def _read_arguments(value: Any) -> tuple[Any, ...]:
    """Return a value of one argument, or the values of several, as `pytest.param` takes them."""
    return value if isinstance(value, tuple) else (value,)


def select_cases(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of parameter `name` in the selected tests of a fixture's file, each once.

    It is for fixtures that build many things at once. request: the fixture's, of any scope.
    """
    selected_values: list[Any] = []
    for item in request.session.items:
        if item.path != request.path:
            continue
        # Tests that are not parametrized have no callspec.
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if name in parameters and parameters[name] not in selected_values:
            selected_values.append(parameters[name])
    return selected_values

"""Functions that issue many operators, and whose work follows from the shapes that they are given.

    @follows_from_shapes()
    def dequantize(codes, scales, dtype): ...

A plan runs such a function once for each kind of arguments, and repeats its notes for the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The functions that are marked, each with what gives of its arguments those that matter; None: all of them do.
SHAPED_WORK: dict[Callable[..., Any], Callable[..., Sequence[Any]] | None] = {}


def follows_from_shapes(decisive: Callable[..., Sequence[Any]] | None = None) -> Callable[[_Function], _Function]:
    """Mark a function of a module or class. decisive: as in `SHAPED_WORK`."""

    def mark(function: _Function) -> _Function:
        SHAPED_WORK[function] = decisive
        return function

    return mark

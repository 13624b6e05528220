"""Dotted paths of modules: layers that differ in a number alone, and rows that lie in others.

Plans name modules as PyTorch does (`model.layers.3.mlp`); tables and trees of them are shorter by
the functions here. No torch in here.
"""

import re
from collections.abc import Iterable

from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.units import format_ranges

_NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)((?:\..*)?)", re.DOTALL)


def split_number(name: str) -> tuple[str, int | None, str]:
    """Return (`model.layers.`, 3, `.mlp`) of `model.layers.3.mlp`; (name, None, ``) without one.

    The number is the first segment that is one.
    """
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else (name, None, "")


def join_numbered(names: Iterable[str]) -> str:
    """Return `a.0-2.w, b` of `a.0.w, a.1.w, a.2.w, b`: one name where they differ in a number."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        before, number, after = split_number(name)
        groups.setdefault((before, after), [])
        if number is not None:
            groups[before, after].append(number)
    return ", ".join(
        f"{before}{format_ranges(numbers)}{after}" for (before, after), numbers in groups.items()
    )


def list_outermost(layers: list[LayerRow]) -> list[LayerRow]:
    """Return the rows that lie in no other row's module: what a total counts."""
    names = {row.module for row in layers}
    rows = []
    for row in layers:
        segments = row.module.split(".") if row.module else []
        if not any(".".join(segments[:cut]) in names for cut in range(len(segments))):
            rows.append(row)
    return rows

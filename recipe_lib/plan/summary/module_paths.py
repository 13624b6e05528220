"""Join the dotted paths of modules that differ in a layer's number, and find outermost modules.

The tables and trees of a plan, which name modules as PyTorch does (`model.layers.3.mlp`), are made
shorter by these functions. Imports no torch.
"""

import re
from collections.abc import Iterable

from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.units import format_ranges

# A path of which a segment is a number: (what is before it, the number, what is after it).
_NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)((?:\..*)?)", re.DOTALL)


def split_number(name: str) -> tuple[str, int | None, str]:
    """Split a path at its first number: `model.layers.3.mlp` into `model.layers.`, 3 and `.mlp`.

    Return (name, None, "") for a path without a number.
    """
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else (name, None, "")


def join_numbered(names: Iterable[str]) -> str:
    """Return `a.0-2.w, b` for `a.0.w, a.1.w, a.2.w, b`: names that differ in a number are one."""
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
    """Return the rows whose module lies in no other row's module, so that sums count none twice."""
    names = {row.module for row in layers}
    rows = []
    for row in layers:
        segments = row.module.split(".") if row.module else []
        if not any(".".join(segments[:cut]) in names for cut in range(len(segments))):
            rows.append(row)
    return rows

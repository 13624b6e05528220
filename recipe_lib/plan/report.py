"""A plan as plain text for a terminal of 80 columns and more. No torch in here."""

import os
import shutil
import textwrap
from typing import TextIO

from recipe_lib.errors import visible
from recipe_lib.plan.pipeline_tables import stage_table
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.plan.tables import (
    Table,
    advice_table,
    branches,
    communication_table,
    host_line,
    hundredths,
    layer_table,
    outside_rows,
    phase_table,
    rank_name,
    rank_table,
    run_lines,
    time_lines,
    unit_of,
    verdict_text,
    version_line,
    where_of,
    written,
)
from recipe_lib.plan.tree import alive_tree, shares
from recipe_lib.plan.verdict import next_step

NARROWEST, WIDEST = 80, 120

# (style, line)
Line = tuple[str, str]

# SGR sequences of ECMA-48.
_STYLES = {"heading": "\x1b[1m", "good": "\x1b[1;32m", "bad": "\x1b[1;31m", "warning": "\x1b[1;33m", "soft": "\x1b[2m"}
_END = "\x1b[0m"


def render(plan: Plan, *, depth: int = 2, width: int | None = None, color: bool = False) -> str:
    """The report: verdict, memory, what is alive at the peak, communication, time, advice, assumptions.

    depth: levels of the tree; 1: kinds, 2: layers too, and so on. width: columns, by default those of the terminal
    between 80 and 120. color: styles of a terminal; `wants_color` says whether a stream should get them.
    """
    columns = width or min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    lines = [*headline(plan, columns), ("", "")]
    lines += _pairs(run_lines(plan), columns)
    lines += _table(phase_table(plan), columns)
    lines += _table(stage_table(plan), columns)
    lines += _table(rank_table(plan), columns)
    lines += _tree_lines(plan, depth, columns)
    lines += _outside_lines(plan)
    lines += [*_heading("host memory"), *_wrapped(host_line(plan), columns)]
    lines += _table(layer_table(plan), columns)
    lines += _table(communication_table(plan), columns)
    if plan.time is not None:
        lines += [*_heading("time of a step"), *_pairs(time_lines(plan), columns)]
    lines += _advice_lines(advice_table(plan), columns)
    for title, sentences in (("assumed", plan.assumptions), ("not modeled", plan.not_modeled)):
        if sentences:
            lines += [*_heading(title), *(line for sentence in sentences for line in _bullet(sentence, columns))]
    lines += [("", ""), ("soft", version_line(plan))]
    if after := next_step(plan):
        lines += [("", ""), *(("warning", line) for line in textwrap.wrap(after, columns))]
    return paint(lines, color)


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that is to show styles; NO_COLOR (no-color.org) and TERM=dumb say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(lines: list[Line], color: bool) -> str:
    """The lines as text. What the plan's own texts hold of control characters is written out."""
    text = [(style, visible(line).rstrip()) for style, line in lines]
    return "".join(f"{_STYLES[style]}{line}{_END}\n" if color and style else f"{line}\n" for style, line in text)


def headline(plan: Plan, columns: int) -> list[Line]:
    """The verdict with the sum behind it."""
    text = verdict_text(plan)
    style = {FITS: "good", DOES_NOT_FIT: "bad"}.get(plan.verdict, "warning")
    return [(style, line) for line in textwrap.wrap(visible(text), columns, subsequent_indent="  ")]


def _heading(text: str, columns: int = WIDEST) -> list[Line]:
    wrapped = textwrap.wrap(visible(text), columns, subsequent_indent="  ", break_on_hyphens=False)
    return [("", ""), *(("heading", line) for line in wrapped)]


def _wrapped(text: str, columns: int, first: str = "  ", later: str = "  ") -> list[Line]:
    lines = textwrap.wrap(visible(text), columns, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return [("", line) for line in lines]


def _bullet(text: str, columns: int) -> list[Line]:
    return _wrapped(text, columns, "  - ", "    ")


def _pairs(pairs: list[tuple[str, str]], columns: int) -> list[Line]:
    """Names and values, the values below each other."""
    room = max(len(name) for name, _ in pairs) + 4
    return [line for name, value in pairs for line in _wrapped(value, columns, f"  {name}".ljust(room), " " * room)]


def _table(table: Table | None, columns: int) -> list[Line]:
    return [] if table is None else [*_heading(table.title, columns), *table_lines(table, columns)]


def table_lines(table: Table, columns: int) -> list[Line]:
    """Header, rows and notes. Optional columns go, the first of them first, until what is left fits into the room.

    An optional text column that comes last is cut rather than left out while 12 letters of it fit. Where that does not
    do, the longest text column is cut.
    """
    rows = [[visible(cell) for cell in row] for row in table.rows]
    shown, optional = list(range(len(table.header))), list(table.optional)
    widths = [max(len(row[at]) for row in [table.header, *rows]) for at in shown]
    while (over := 2 + sum(widths[at] + 2 for at in shown) - 2 - columns) > 0 and optional:
        last = shown[-1]
        if table.header[last] == optional[0] and widths[last] - over >= max(12, len(table.header[last])):
            widths[last] -= over
            break
        shown.remove(table.header.index(optional.pop(0)))
    if over > 0 and not optional:
        longest = max((at for at in shown if table.header[at] in table.left), key=lambda at: widths[at])
        widths[longest] = max(12, widths[longest] - over)
    lines: list[Line] = []
    for style, row in [("soft", table.header), *(("", row) for row in rows)]:
        cells = []
        for at in shown:
            cell = row[at] if len(row[at]) <= widths[at] else f"{row[at][: widths[at] - 3]}..."
            cells.append(cell.ljust(widths[at]) if table.header[at] in table.left else cell.rjust(widths[at]))
        lines.append((style, "  " + "  ".join(cells)))
    return lines + [line for note in table.notes for line in _wrapped(note, columns)]


def _tree_lines(plan: Plan, depth: int, columns: int) -> list[Line]:
    rank = plan.heaviest
    root = alive_tree(rank)
    unit = unit_of(root.bytes)
    total = hundredths(root.bytes, unit)
    title = f"alive at the peak of {rank_name(plan, rank)}: phase {rank.peak.phase}, {where_of(rank.peak)}"
    lines = _heading(title, columns)
    rows = [("", root, total), *branches(root, total, unit, max(depth, 1))]
    names = [f"{indent}{node.name}" for indent, node, _ in rows]
    deeper = branches(root, total, unit, max(depth, 1) + 1)
    room = min(max(len(name) for name in names), columns - 42)
    for name, (_, node, number) in zip(names, rows, strict=True):
        name = name if len(name) <= room else f"{name[: room - 3]}..."
        share = f"{node.bytes / root.bytes:7.1%}" if root.bytes else " " * 7
        count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
        lines.append(("", f"  {name.ljust(room)}  {written(number, unit):>13}  {share}  {count}"))
    if len(deeper) > len(rows) - 1:
        lines.append(("soft", f"  --depth {max(depth, 1) + 1} opens the next level"))
    return lines


def _outside_lines(plan: Plan) -> list[Line]:
    rows = outside_rows(plan)
    unit = unit_of(plan.outside.total)
    total = hundredths(plan.outside.total, unit)
    lines = _heading("on the device, not torch's")
    named = [("outside torch", "")] + [(f"  {name}", f"  {option} X replaces it") for name, _, option in rows]
    numbers = [total, *shares(total, [num_bytes for _, num_bytes, _ in rows])]
    room = max(len(name) for name, _ in named)
    for (name, option), number in zip(named, numbers, strict=True):
        lines.append(("", f"  {name.ljust(room)}  {written(number, unit):>13}{option}"))
    return lines


def _advice_lines(table: Table | None, columns: int) -> list[Line]:
    """A lever a line, its note below it."""
    if table is None:
        return []
    bare = Table(table.title, table.header[:-1], [row[:-1] for row in table.rows], table.left)
    header, *levers = table_lines(bare, columns)
    lines = [*_heading(table.title, columns), header]
    for line, row in zip(levers, table.rows, strict=True):
        lines += [line, *_wrapped(row[-1], columns, "      ", "      ")]
    return lines

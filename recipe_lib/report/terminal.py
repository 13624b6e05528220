"""Print sections of `report.view` as text for a terminal, laid out by rich.

Commands call `open_console`, print into it with the functions `put...`, and `read_console` returns
the text. Control characters in what users named are written out (`escape_invisible`): a terminal
would obey them.
"""

import io
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from recipe_lib.errors import escape_invisible
from recipe_lib.logs import wants_color as wants_color  # for those who import it from here
from recipe_lib.report.view import Section, Table, TreeLine

# Least and largest width, in columns of the terminal.
NARROWEST = 60
WIDEST = 120
WIDE_REPORT = 160  # of reports with many columns, where standard output is no terminal
# Styles of rich.
GOOD = "bold green"
BAD = "bold red"
WARNING = "bold yellow"
HEADING = "bold"
SOFT = "dim"
_GAP = 2  # spaces between two columns of a table
_SHORTEST = 12  # letters that a text keeps at least when it is cut
_ENDS = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)  # spaces and styles at a line's end


def get_terminal_width(otherwise: int = 100) -> int:
    """Return the columns of the terminal, between 60 and 120; without a terminal `otherwise`.

    A larger `otherwise` than 120 is the upper limit.
    """
    columns = shutil.get_terminal_size((otherwise, 24)).columns
    return min(max(WIDEST, otherwise), max(NARROWEST, columns))


def open_console(width: int, color: bool = False) -> Console:
    """Return a console that collects what it prints for `read_console`.

    width: in columns. color: False: no colors or styles, whatever the environment says.
    """
    return Console(
        file=io.StringIO(),
        width=width,
        height=25,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def read_console(console: Console) -> str:
    """Return the printed text, without spaces at the ends of lines.

    console: from `open_console`.
    """
    assert isinstance(console.file, io.StringIO)
    # Where a style ended in the spaces that are removed, it is ended all the same.
    return _ENDS.sub(lambda end: "\x1b[0m" if "\x1b" in end[0] else "", console.file.getvalue())


def put(
    console: Console, text: str, style: str = "", indent: int = 0, *, wrap: bool = True
) -> None:
    """Print a paragraph.

    style: of rich; empty: none. indent: columns. wrap: False for text that people copy.
    """
    if wrap:
        console.print(_indent(Text(escape_invisible(text), style), indent))
    else:
        console.print(Text(" " * indent + escape_invisible(text), style), soft_wrap=True)


def put_heading(console: Console, text: str) -> None:
    """Print an empty line and a title."""
    console.print()
    put(console, text, HEADING)


def put_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Print (name, value) a line, the values aligned."""
    grid = rich_table.Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(escape_invisible(name)), Text(escape_invisible(value)))
    console.print(_indent(grid, 2))


def put_list(console: Console, sentences: Iterable[str]) -> None:
    """Print a sentence a line, with a dash before it."""
    grid = rich_table.Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("-", Text(escape_invisible(sentence)))
    console.print(_indent(grid, 2))


def put_section(console: Console, section: Section) -> None:
    """Print a section below an empty line and its title; nothing if it has charts alone."""
    if not any((section.facts, section.table, section.tree, section.items, section.text)):
        return
    put_heading(console, section.title)
    if section.facts:
        put_pairs(console, ((name, str(value)) for name, value in section.facts))
    if section.table and section.table.last_column_below:
        _put_last_column_below(console, section.table)
    elif section.table:
        put_table(console, section.table)
    if section.tree:
        put_table(console, _make_tree_table(section.tree))
    if section.items:
        put_list(console, section.items)
    if section.text:
        put(console, section.text, SOFT if section.tree else "", indent=2)


# Return a tree as a table whose names are indented by their levels.
def _make_tree_table(lines: Sequence[TreeLine]) -> Table:
    rows = [
        [f"{'  ' * line.level}{line.name}", line.number, line.share, line.count] for line in lines
    ]
    return Table(
        title="",
        header=["name", "bytes", "share", "tensors"],
        rows=rows,
        left=("name", "tensors"),
        optional=("tensors",),
        shows_header=False,
    )


def _put_last_column_below(console: Console, table: Table) -> None:
    """Print a table with the last cell of each row below the rest of it."""
    cut_table = replace(table, header=table.header[:-1], rows=[row[:-1] for row in table.rows])
    header, *lines = format_table_lines(cut_table, console.width)
    put(console, header, SOFT)
    for line, row in zip(lines, table.rows, strict=True):
        put(console, line)
        if "…" in line:  # cut: the name is put below once more, to be copied
            put(console, str(row[0]), indent=6, wrap=False)
        put(console, str(row[-1]), indent=6)


def put_table(console: Console, table: Table) -> None:
    """Print header, rows and notes of a table, without its title.

    Optional columns are left out, the first of them first, until the others fit into the console's
    width. An optional text column that comes last is cut rather than left out while 12 letters of
    it fit. If the table is still too wide, the text columns are cut.
    """
    shown_columns, cut_columns = _choose_columns(table, console.width - 2)  # 2: its indent
    grid = rich_table.Table(
        box=None,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
        show_header=table.shows_header,
        header_style=SOFT,
    )
    for index in shown_columns:
        side: Literal["left", "right"] = "left" if table.header[index] in table.left else "right"
        grid.add_column(
            escape_invisible(table.header[index]),
            justify=side,
            no_wrap=index not in cut_columns,
            overflow="fold",
        )
    overflow: Literal["fold", "ellipsis"] = "fold" if table.wraps_cells else "ellipsis"
    for row in table.rows:
        grid.add_row(
            *(
                Text(
                    escape_invisible(str(row[index])),
                    no_wrap=not table.wraps_cells,
                    overflow=overflow,
                )
                for index in shown_columns
            )
        )
    console.print(_indent(grid, 2))
    for note in table.notes:
        put(console, note, indent=2)


def format_table_lines(table: Table, width: int) -> list[str]:
    """Return a table as lines of text: the header, then a line for each row.

    width: in columns.
    """
    console = open_console(width)
    put_table(console, table)
    return read_console(console).splitlines()


def _choose_columns(table: Table, room: int) -> tuple[list[int], list[int]]:
    """Return the indices of the columns that are shown, and of those that may be cut.

    room: columns of the terminal.
    """
    shown = list(range(len(table.header)))
    optional = list(table.optional)
    widths = [
        max(cell_len(escape_invisible(str(row[index]))) for row in [table.header, *table.rows])
        for index in shown
    ]
    while (excess := sum(widths[index] + _GAP for index in shown) - _GAP - room) > 0 and optional:
        last = shown[-1]
        shortest = max(_SHORTEST, len(table.header[last]))
        if table.header[last] == optional[0] and widths[last] - excess >= shortest:
            return shown, [last]
        shown.remove(table.header.index(optional.pop(0)))
    return shown, [index for index in shown if table.header[index] in table.left]


def _indent(block: RenderableType, columns: int) -> RenderableType:
    return Padding(block, (0, 0, 0, columns), expand=False) if columns else block

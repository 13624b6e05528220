"""Define the sections of a document that is shown on a terminal and as an HTML page.

Plans, evaluations and runs build sections. `terminal.put_section` shows one on a terminal,
`page.render_page` all of them as HTML. Cells are text, or numbers with a unit (`Bytes`, `Seconds`,
`Count` of `units.py`), which both show in the same words. No torch in here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Table:
    """A table in which numbers are aligned at the right."""

    title: str
    header: list[str]  # the columns' names
    rows: list[list[Any]]  # each has a cell for each column
    left: tuple[str, ...]  # names of the columns of text, aligned at the left
    # Names of columns to leave out if a terminal is too narrow, the first of them first.
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences below it
    shows_header: bool = True  # False: a terminal shows no header
    wraps_cells: bool = False  # True: a long cell goes on in the next line; False: it is cut
    # True: on a terminal the last cell stands below the rest of its row.
    last_column_below: bool = False


@dataclass
class Figure:
    """A chart."""

    svg: str  # from `chart.render_svg`
    keys: Sequence[tuple[str, str]] = ()  # legend: (class of a color on the page, text)
    note: str = ""  # a sentence below it
    title: str = ""
    wide: bool = False  # True: on a narrow screen it keeps a readable width, and is scrolled


@dataclass
class TreeLine:
    """A line of a tree of bytes; its branches are the lines after it that are one level deeper."""

    level: int  # 0 at the root
    name: str
    number: str  # bytes, as text with a unit
    exact: str  # the same at full precision
    share: str  # of all bytes, in percent
    count: str  # number of tensors
    opens: bool = False  # True: it has branches, whether they are in the tree or not


@dataclass
class Section:
    """A heading and what is below it; a section with nothing below it is False, and left out."""

    title: str
    facts: Sequence[tuple[str, object]] = ()  # (name, value)
    table: Table | None = None
    figures: Sequence[Figure] = ()  # for pages; a terminal shows none
    tree: Sequence[TreeLine] = ()
    items: Sequence[str] = ()  # sentences
    text: str = ""  # a paragraph
    listing: str = ""  # text of a file, for pages; a terminal does not show it
    is_collapsed: bool = False  # True: on a page a click on its heading opens it

    def __bool__(self) -> bool:
        return any(
            (self.facts, self.table, self.figures, self.tree, self.items, self.text, self.listing)
        )


def show_table(table: Table | None) -> Section:
    """Return the section of a table under its own title; None gives a section that is left out."""
    return Section(table.title, table=table) if table else Section("")

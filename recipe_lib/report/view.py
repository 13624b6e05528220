"""A document of what is known, built once and shown twice: on a terminal and as an HTML page.

A section has facts, tables, trees, charts and sentences. `terminal.put_section` shows one on a
terminal, `chart.render_page` all of them as HTML. Cells are text, or numbers with a unit (`Bytes`,
`Seconds`, `Count` of `units.py`), which both show in the same words. No torch in here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Table:
    """A table in which numbers stand at the right."""

    title: str
    header: list[str]
    rows: list[list[Any]]  # a cell for each of the header
    left: tuple[str, ...]  # headers of the columns of text
    # Headers to leave out where the room is short, the first of them first.
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences below it
    headed: bool = True  # the header is shown
    fold: bool = False  # what is too long for its column goes on in the next line
    tells_below: bool = False  # on a terminal the last column stands below the rest of its row


@dataclass
class Figure:
    """A chart."""

    svg: str  # of `report.chart`
    keys: Sequence[tuple[str, str]] = ()  # class of a color, what has it
    note: str = ""  # below it
    title: str = ""
    wide: bool = False  # on a narrow screen it keeps a readable width, and is scrolled


@dataclass
class TreeLine:
    """A line of a tree; what is below it stands behind it, one level deeper."""

    level: int
    name: str
    number: str
    exact: str  # the number at its full precision
    share: str
    count: str
    opens: bool = False  # it has branches, whether they are in the tree or not


@dataclass
class Section:
    """A heading and what is below it; one that has nothing is left out."""

    title: str
    facts: Sequence[tuple[str, object]] = ()  # names and values
    table: Table | None = None
    figures: Sequence[Figure] = ()  # for pages; a terminal shows none
    tree: Sequence[TreeLine] = ()
    items: Sequence[str] = ()  # sentences
    text: str = ""  # a paragraph
    listing: str = ""  # text of a file, for pages
    closed: bool = False  # on a page it is opened by a click on its heading

    def __bool__(self) -> bool:
        return any(
            (self.facts, self.table, self.figures, self.tree, self.items, self.text, self.listing)
        )


def show_table(table: Table | None) -> Section:
    """Return the section of a table under its own title; one that is left out for None."""
    return Section(table.title, table=table) if table else Section("")

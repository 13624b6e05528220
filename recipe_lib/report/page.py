"""An HTML page that needs neither network nor script, rendered with jinja2 from sections; all text is escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import jinja2


class TableLike(Protocol):
    """What the page reads of a table: texts, and which columns are text (numbers stand at the right)."""

    header: list[str]
    rows: list[list[str]]
    left: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class Figure:
    """svg: of `report.chart`. keys: (class of a color, what has it). note: a sentence below it. title: above it.

    log: the same with a logarithmic axis, to choose in place of it; log_first: what is seen first. wide: on a narrow
    screen it keeps a width at which it can be read, and is scrolled.
    """

    svg: str
    keys: Sequence[tuple[str, str]] = ()
    note: str = ""
    title: str = ""
    log: str = ""
    log_first: bool = False
    wide: bool = False


@dataclass
class Branch:
    """A line of a tree that opens. exact: the number at its full precision, shown over it."""

    name: str
    number: str
    exact: str
    share: str
    count: str
    children: list["Branch"] = field(default_factory=list)


@dataclass
class Section:
    """A heading and what is below it; one that has nothing is left out. closed: opened by a click on its heading."""

    title: str
    facts: Sequence[tuple[str, object]] = ()
    table: TableLike | None = None
    figures: Sequence[Figure] = ()
    tree: Branch | None = None
    items: Sequence[str] = ()
    text: str = ""
    closed: bool = False

    def __bool__(self) -> bool:
        return bool(self.facts or self.table or self.figures or self.tree or self.items or self.text)


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("recipe_lib", "report")
    environment = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def render_page(
    kind: str, title: str, name: str, headline: str, sections: Iterable[Section], *, style: str = "", status: str = "",
    footer: str = "",
) -> str:  # fmt: skip
    """The page. kind: `run` or `plan`, by which the file is known again. style:
    `good`, `risky` or `bad` colors the headline. status: a word after the name."""
    shown = [section for section in sections if section]
    return _template().render(
        kind=kind, title=title, name=name, headline=headline, sections=shown, style=style, status=status, footer=footer
    )

"""Render sections of `report.view` as an HTML page.

Runs, plans and evaluations call `render_page`. The page needs neither network nor script, and all
text in it is escaped. Its template, page.html, is beside this file.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from recipe_lib.report.view import Section


def render_page(
    kind: str,
    title: str,
    name: str,
    headline: str,
    sections: Iterable[Section],
    *,
    style: str = "",
    status: str = "",
    footer: str = "",
) -> str:
    """Return the text of an HTML page.

    kind: `run`, `plan` or `evaluation`, a mark by which commands recognize a page that they may
    overwrite. title: of the browser's window. name: the page's heading. headline: a sentence below
    it. style: `good`, `risky` or `bad` colors the headline; empty: no color. status: a word after
    the name; empty: none. footer: a sentence at the end; empty: none.
    """
    return load_page_template().render(
        kind=kind,
        title=title,
        name=name,
        headline=headline,
        sections=[section for section in sections if section],
        style=style,
        status=status,
        footer=footer,
    )


@cache
def load_page_template() -> Any:
    """Return page.html as a compiled template of Jinja.

    Jinja is imported here, since a plan on the terminal does without it.
    """
    import jinja2

    return jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("recipe_lib", "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")

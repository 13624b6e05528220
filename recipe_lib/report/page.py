"""An HTML page that needs neither network nor script, rendered with jinja2 from sections; all text is escaped."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from recipe_lib.report.view import Section


@cache
def load_template(name: str) -> Any:
    """Return a template of this folder."""
    import jinja2  # which a plan on the terminal does without

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("recipe_lib", "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


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
    """Return the page.

    kind: `run`, `plan` or `evaluation`, by which the file is known again. style: `good`, `risky` or `bad` colors the
    headline. status: a word after the name.
    """
    return load_template("page.html").render(
        kind=kind,
        title=title,
        name=name,
        headline=headline,
        sections=[section for section in sections if section],
        style=style,
        status=status,
        footer=footer,
    )

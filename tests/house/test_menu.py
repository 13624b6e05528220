"""The site's menu and the index name every page, and its pages link to what the site has."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.documents import list_documents, list_links
from tests.house.files import ROOT
from tests.house.menu import DOCS, SITE, format_guide_link, format_menu, list_measurements

PAGES = [path for path in list_documents() if path.is_relative_to(DOCS)]
NAMED = [path.relative_to(DOCS).as_posix() for path in PAGES]


def test_the_menu_is_made_from_the_index():
    assert format_menu() in SITE.read_text(encoding="utf-8"), "run `python -m tests.house.menu`"


def test_the_index_lists_every_guide_once():
    listed = list_links(DOCS / "index.md")
    guides = {name for name in NAMED if "/" not in name or name.startswith("design/")} - {
        "index.md"
    }
    assert guides <= set(listed) <= set(NAMED)
    assert sorted(listed) == sorted(set(listed))


def test_the_menu_has_every_page_once():
    pages = re.findall(r"[\w./-]+\.md$", format_menu(), re.MULTILINE)
    assert sorted(pages) == sorted(NAMED)


def test_every_measurement_is_described():
    guide = list_links(DOCS / "measurements" / "README.md")
    assert [page for page in list_measurements() if format_guide_link(page) not in guide] == [
        "measurements/README.md"
    ]


@pytest.mark.parametrize("path", PAGES, ids=NAMED)
def test_pages_link_to_pages_of_the_site(path: Path):
    """A file of the repository outside of docs is named, and not linked: the site has it not."""
    outside = [
        target
        for target in list_links(path)
        if not (path.parent / target).resolve().is_relative_to(DOCS)
    ]
    assert not outside


@pytest.mark.parametrize("path", PAGES, ids=NAMED)
def test_no_brackets_look_like_a_reference(path: Path):
    """`[one] [two]` in running text is taken for a link to what `[two]` defines."""
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert not re.findall(r"(?<!\\)\[[^\]\n]+\] ?(?<!\\)\[[^\]\n]+\]", text)


def test_the_site_is_built_so_that_a_warning_is_an_error():
    """`mkdocs build --quiet` drops warnings before `strict` has counted them."""
    assert re.search(r"^strict: true\b", SITE.read_text(encoding="utf-8"), re.MULTILINE)
    said = subprocess.run(
        ["make", "-n", "docs-site"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    (build,) = [line for line in said.splitlines() if "mkdocs build" in line]
    assert not re.search(r"(?<=\s)(--quiet|-q|--no-strict)\b", build)

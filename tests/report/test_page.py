"""The page: every text is escaped, a section without anything is left out."""

import subprocess
import sys

from recipe_lib.report.page import render_page
from recipe_lib.report.view import Figure, Section, TreeLine

EVIL = "<script>'a' & \"b\"</script>"


def test_every_text_is_escaped_and_drawings_are_not():
    tree = [TreeLine(level, EVIL, EVIL, EVIL, EVIL, EVIL) for level in (0, 1)]
    figure = Figure("<svg><circle/></svg>", [("k0", EVIL)], EVIL)
    sections = [
        Section(EVIL, facts=[(EVIL, EVIL)], figures=[figure], tree=tree, items=[EVIL], listing=EVIL)
    ]
    page = render_page("run", EVIL, EVIL, EVIL, sections, status=EVIL, footer=EVIL)
    assert "<script" not in page and page.count("&lt;script&gt;") == 22
    assert page.count("<svg><circle/></svg>") == 1


def test_empty_sections_are_left_out():
    page = render_page("run", "t", "n", "h", [Section("empty"), Section("held", items=["one"])])
    assert "empty" not in page and "<h2>held</h2>" in page and "<li>one</li>" in page


def test_only_a_page_imports_jinja() -> None:
    """A plan on the terminal has neither a page nor a chat template to render."""
    program = (
        "import sys, recipe_lib.plan.views.report, recipe_lib.tokenizers; assert 'jinja2' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

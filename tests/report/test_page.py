"""The page: every text is escaped, a section without anything is left out."""

from recipe_lib.report.page import Branch, Figure, Section, render_page

EVIL = "<script>'a' & \"b\"</script>"


def test_every_text_is_escaped_and_drawings_are_not():
    branch = Branch(EVIL, EVIL, EVIL, EVIL, EVIL, [Branch(EVIL, EVIL, EVIL, EVIL, EVIL)])
    figure = Figure("<svg><circle/></svg>", [("k0", EVIL)], EVIL)
    sections = [Section(EVIL, facts=[(EVIL, EVIL)], figures=[figure], tree=branch, items=[EVIL], text=EVIL)]
    page = render_page("run", EVIL, EVIL, EVIL, sections, status=EVIL, footer=EVIL)
    assert "<script" not in page and page.count("&lt;script&gt;") == 22
    assert page.count("<svg><circle/></svg>") == 1


def test_empty_sections_are_left_out():
    page = render_page("run", "t", "n", "h", [Section("empty"), Section("held", items=["one"])])
    assert "empty" not in page and "<h2>held</h2>" in page and "<li>one</li>" in page

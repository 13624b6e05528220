"""Tables and paragraphs for a terminal: which columns stay, who gets color, what is written out."""

import io

import pytest

from recipe_lib.report.terminal import (
    format_table_lines,
    get_terminal_width,
    open_console,
    put,
    put_list,
    put_pairs,
    put_table,
    read_console,
    wants_color,
)  # fmt: skip
from recipe_lib.report.view import Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_gets_color(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal()) and not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())


def test_optional_columns_go_in_their_order():
    table = Table("t", ["name", "number", "rare", "last"], [["n" * 20, "1", "r" * 30, "l" * 30]], ("name", "last"),
                  ("rare", "last"))  # fmt: skip
    shown = [format_table_lines(table, width)[1].split() for width in (100, 70, 50, 30, 20)]
    assert shown[0] == ["n" * 20, "1", "r" * 30, "l" * 30]
    assert shown[1] == ["n" * 20, "1", "l" * 30]
    assert shown[2] == ["n" * 20, "1", "l" * (50 - 2 - 20 - 2 - 6 - 2 - 1) + "…"]
    assert shown[3] == ["n" * 20, "1"]
    assert shown[4] == ["n" * 9 + "…", "1"]


def test_control_characters_are_written_out_and_markup_is_text():
    evil = "a\x1b[2Jb [bold]c[/] :smile: "
    console = open_console(100)
    put(console, evil, "bold")
    put_pairs(console, [(evil, evil)])
    put_list(console, [evil])
    put_table(console, Table(evil, [evil], [[evil]], (evil,), notes=(evil,)))
    text = read_console(console)
    assert "\x1b" not in text and text.count("[bold]c[/] :smile:") == 7
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_long_paragraphs_wrap_and_what_is_copied_does_not():
    console = open_console(80)
    put(console, "word " * 40, indent=4)
    put(console, "word " * 40, indent=4, wrap=False)
    *wrapped, copied = read_console(console).splitlines()
    assert len(wrapped) == 3 and max(map(len, wrapped)) <= 80 and len(copied) > 190
    assert all(line.startswith("    word") for line in [*wrapped, copied])


def test_the_width_is_that_of_the_terminal_within_bounds(monkeypatch: pytest.MonkeyPatch):
    for columns, width in (("40", 60), ("97", 97), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert get_terminal_width() == width

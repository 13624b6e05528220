"""Rows on a terminal that leave what others print alone, lines elsewhere, silence where it is asked
for.
"""

import io
import logging
import os
import subprocess
import sys
import time

import pytest
from rich.text import Text

from recipe_lib.logs import VERBOSITY_VARIABLE, get_logger, print_wrapped, set_verbosity
from recipe_lib.report import phases
from recipe_lib.report.phases import phase
from tests.house.files import ROOT
from tests.report.terminal_screen import Terminal, read_lines


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error is a terminal of 60 columns, and rows are drawn at once. Not a fixture: pytest
    sets the stream anew when a test begins.
    """
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(phases, "ROW_SECONDS", 0.0)
    monkeypatch.setattr(phases, "PAUSE_SECONDS", 0.01)
    return stream


def until_shown(stream: Terminal, text: str) -> list[str]:
    """What is on the screen, once `text` is."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if any(text in line for line in read_lines(stream.getvalue())):
            return read_lines(stream.getvalue())
        time.sleep(0.05)  # what has been written is read anew each time
    raise AssertionError(read_lines(stream.getvalue()))


def test_a_row_with_what_is_done_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with phase("loading weights", 8 << 30, "bytes") as going:
        going.advance(2 << 30)
        (row,) = until_shown(terminal, "2.00 GiB of 8.00 GiB, 25%")
        assert row[2:].startswith("loading weights: 2.00 GiB of 8.00 GiB, 25%  0s")
    assert read_lines(terminal.getvalue()) == []
    assert sys.stderr is terminal


def test_the_time_left_is_that_of_what_is_left() -> None:
    going = phases.Phase("loading weights", 8, "files")
    going.advance(2)
    assert going.describe_time(30.0) == "30s, eta 1m30s"
    going.advance(6)
    assert going.describe_time(40.0) == "40s"


def test_the_innermost_phase_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with phase("planning"):
        until_shown(terminal, "planning")
        with phase("trying levers", 12, "settings") as going:
            going.advance(3)
            going.text = "so far: 2 fit"
            (row,) = until_shown(terminal, "trying levers: 3 of 12 settings, 25%: so far: 2 fit")
            assert "planning" not in row
            assert len(row) <= 59
            going.text = "the fastest so far: batch_size=2 and more than a row of this terminal has"
            (row,) = until_shown(
                terminal, "25%: the "
            )  # how much of it depends on the digits of the time
            assert (
                "trying levers: 3 of 12 settings, 25%: the " in row
                and "…" in row
                and len(row) <= 59
            )
        until_shown(terminal, "planning")


def test_lines_of_this_and_of_other_processes_stand_above(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    rows = [Text("one"), Text("two"), Text("three")]
    phases.show_rows(show_all := lambda width: rows)
    until_shown(terminal, "three")
    print("printed", file=sys.stderr)
    get_logger().info("logged")
    until_shown(terminal, "three")
    terminal.write(f"{phases.ERASE}of another process\n")  # as that writes to the same terminal
    deadline = time.monotonic() + 10
    while read_lines(terminal.getvalue()) != [
        "printed",
        "logged",
        "of another process",
        "one",
        "two",
        "three",
    ]:
        assert time.monotonic() < deadline, read_lines(terminal.getvalue())
    print("begun, ", end="", file=sys.stderr)
    time.sleep(0.1)
    assert read_lines(terminal.getvalue())[-1].startswith(
        "begun,"
    )  # nothing is drawn into a line that goes on
    print("ended", file=sys.stderr)
    until_shown(terminal, "three")
    phases.hide_rows(show_all)
    assert read_lines(terminal.getvalue()) == [
        "printed",
        "logged",
        "of another process",
        "begun, ended",
    ]


def test_a_phase_of_more_than_a_second_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(phases, "REPORTED_SECONDS", 0.0)
    with phase("saving"):
        pass
    with phase("planning", leaves_line=False):
        pass
    (line,) = read_lines(terminal.getvalue())
    assert line.startswith("saving: 0.")


def test_an_error_goes_through_and_takes_the_row_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with pytest.raises(KeyError), phase("saving"):
        until_shown(terminal, "saving")
        raise KeyError
    assert read_lines(terminal.getvalue()) == []


def test_off_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(get_logger(), "handlers", [handler])
    monkeypatch.setattr(phases, "LINE_SECONDS", 0.05)
    with phase("tokenizing", 100, "samples") as going:
        going.advance(40)
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said[0] == "tokenizing: 40 of 100 samples, 40%, 0s"
    count = len(said)
    time.sleep(0.15)
    assert len(said) == count


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), (VERBOSITY_VARIABLE, "quiet")])
def test_silence(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    with phase("saving"):
        time.sleep(0.1)
    assert terminal.getvalue() == ""


@pytest.mark.slow
def test_a_fork_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    reader, writer = os.pipe()
    with phase("planning"):
        until_shown(terminal, "planning")
        child = os.fork()
        if not child:
            with phase("simulating"):
                time.sleep(0.05)
            os.write(
                writer,
                (
                    b"yes"
                    if sys.stderr is terminal and "simulating" not in terminal.getvalue()
                    else b"no"
                ),
            )
            os._exit(0)
        assert os.read(reader, 3) == b"yes"
        os.waitpid(child, 0)


def test_levels_have_colors_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    get_logger().warning("careful")
    get_logger().info("a long line of words %s", "word " * 20)
    assert terminal.getvalue().startswith("\x1b[33mcareful\x1b[0m\n")
    lines = read_lines(terminal.getvalue())
    assert lines[1].startswith("a long line of words word") and lines[2].startswith("    word")
    assert max(map(len, lines)) <= 59
    monkeypatch.setenv("NO_COLOR", "1")
    get_logger().warning("careful")
    assert terminal.getvalue().endswith("\ncareful\n")


def test_verbosity(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv(VERBOSITY_VARIABLE, "")
    set_verbosity("quiet")
    get_logger().info("not said")
    get_logger().warning("said")
    assert read_lines(terminal.getvalue()) == ["said"]
    set_verbosity("verbose")
    with phase("a moment"):
        pass
    assert read_lines(terminal.getvalue())[1].startswith("a moment: 0.0")


def test_an_interrupt_ends_an_import_that_swallows_it() -> None:
    program = (
        "import os, signal, time\nfrom recipe_lib.report.phases import"
        " importing\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nwith"
        " importing('torch'):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n       "
        " time.sleep(5)\n    except BaseException:\n        pass\nprint('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_line_on_standard_output_is_broken_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "check: 35 adapted modules are merged, every tensor of the model is there, and so is the"
        " tokenizer"
    )
    for stream, lines in ((Terminal(), 2), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", "60")
        print_wrapped(text)
        said = stream.getvalue().splitlines()
        assert len(said) == lines and " ".join(line.strip() for line in said) == text

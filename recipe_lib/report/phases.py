"""What takes longer than a moment says so: a row on a terminal with what goes on, how far it is, and its seconds.

    with phase("loading weights", total=bytes, unit="bytes") as going:
        going.advance(count)

On a terminal a row is drawn after half a second, and a phase of more than a second leaves a line with its seconds. Off
a terminal one that goes on for long writes a line now and then. Phases may stand in one another; the innermost is
shown. Ranks other than the first show nothing, and nobody does with `--quiet`.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.text import Text

from recipe_lib.errors import end_process
from recipe_lib.logs import get_logger, is_quiet, is_verbose
from recipe_lib.report import screen
from recipe_lib.report.terminal import SOFT
from recipe_lib.units import format_bytes, format_clock, format_seconds

ROW_SECONDS = 0.3  # before a phase has a row
SAID_SECONDS = 1.0  # a phase that took as long leaves a line on a terminal
LINE_SECONDS = 15.0  # off a terminal, before the first line and between two
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "-\\|/"

_open: list["Phase"] = []  # innermost last


class Phase:
    """What goes on between the beginning and the end of a `phase`."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.text, self.began = 0, "", time.monotonic()

    def advance(self, count: int) -> None:
        """So much more of the total is done."""
        self.done += count

    def say(self, text: str) -> None:
        """How far it is, in words: the best answer so far, the part that is worked on."""
        self.text = text

    def rows(self, width: int) -> list[Text]:
        """What is drawn: nothing for a phase that has just begun, or that another one is in. Its words have a row of
        their own where one is too narrow for all."""
        seconds = time.monotonic() - self.began
        if seconds < ROW_SECONDS or not _open or _open[-1] is not self or is_quiet():
            return []
        letters = _SPINNER if screen.has_unicode() else _PLAIN_SPINNER
        row = Text(f"{letters[int(seconds * 10) % len(letters)]} ", style="cyan")
        end = f"  {self.time_of(seconds)}"
        row.append(f"{self.what}{self.reached()}", style="default")
        apart = bool(self.text) and row.cell_len + len(self.text) + 2 + len(end) > width
        if self.text and not apart:
            row.append(f": {self.text}")
        row.truncate(max(width - len(end), 10), overflow="ellipsis")
        row.append(end, style=SOFT)
        if apart:
            below = Text(f"  {self.text}")
            below.truncate(width, overflow="ellipsis")
            return [row, below]
        return [row]

    def reached(self) -> str:
        """How much is done, to stand after its name."""
        parts = []
        if self.total:
            show = format_bytes if self.unit == "bytes" else "{:,}".format
            unit = "" if self.unit == "bytes" else f" {self.unit}".rstrip()
            parts.append(f"{show(self.done)} of {show(self.total)}{unit}, {min(self.done / self.total, 1):.0%}")
        elif self.done:
            parts.append(format_bytes(self.done) if self.unit == "bytes" else f"{self.done:,} {self.unit}".strip())
        return "".join(f": {part}" for part in parts)

    def time_of(self, seconds: float) -> str:
        """The seconds so far, and those left where the total is known."""
        if not self.total or not self.done or self.done >= self.total or seconds < SAID_SECONDS:
            return format_clock(seconds)
        return f"{format_clock(seconds)}, eta {format_clock(seconds / self.done * (self.total - self.done))}"


@contextmanager
def phase(what: str, total: int | None = None, unit: str = "", *, leaves_line: bool = True) -> Iterator[Phase]:
    """See the module. total: of `unit`, if it is known; `bytes` are shown as such. leaves_line: with its seconds."""
    going, end = Phase(what, total, unit), threading.Event()
    shown = screen.speaks_for_all() and not is_quiet()
    live = shown and screen.can_draw()
    if live:
        _open.append(going)
        screen.show(going.rows)
    elif shown:
        threading.Thread(target=_say_now_and_then, args=(going, end), name="phase", daemon=True).start()
    try:
        yield going
    finally:
        end.set()
        if live:
            screen.hide(going.rows)
            _open.remove(going)
    seconds = time.monotonic() - going.began
    if live and leaves_line and (seconds >= SAID_SECONDS or is_verbose()):
        get_logger().info("%s: %s", what, format_seconds(seconds), extra={"style": SOFT})


@contextmanager
def importing(what: str) -> Iterator[None]:
    """A phase for the import of a large library, in which Ctrl-C ends the process at once: in the midst of an import
    the exception of an interrupt may be swallowed by the library, and nothing is lost yet."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.stderr.write(f"{screen.ERASE if screen.can_draw() else ''}interrupted\n")
        end_process(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    catches = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nobody else handles it
    if catches:
        signal.signal(signal.SIGINT, end)
    try:
        with phase(f"importing {what}", leaves_line=False):
            yield
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _say_now_and_then(going: Phase, end: threading.Event) -> None:
    while not end.wait(LINE_SECONDS):
        said = f"{going.reached()}: {going.text}" if going.text else going.reached()
        get_logger().info("%s%s, %s", going.what, said, going.time_of(time.monotonic() - going.began))


def is_in_phase() -> bool:
    """Whether a phase has a row on the terminal now."""
    return bool(_open) and time.monotonic() - _open[-1].began >= ROW_SECONDS

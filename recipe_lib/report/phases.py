"""What takes longer than a moment says so: a row on a terminal with what goes on, how far it is,
and its seconds.

    with phase("loading weights", total=bytes, unit="bytes") as going:
        going.advance(count)

On a terminal a row is drawn after half a second, and a phase of more than a second leaves a line
with its seconds. Off a terminal one that goes on for long writes a line now and then. Phases may
stand in one another; the innermost is shown. Ranks other than the first show nothing, and nobody
does with `--quiet`.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

from rich.text import Text

from recipe_lib.errors import call_at_end, end_process
from recipe_lib.logs import get_logger, is_quiet, is_verbose
from recipe_lib.report.terminal import SOFT, open_console, read_console, wants_color
from recipe_lib.units import format_bytes, format_clock, format_seconds

# What is drawn on a terminal while something goes on: at most three rows at its bottom, everything
# printed above them.
#
# The cursor rests at the beginning of the first row. Who prints erases from there on and ends with
# a new line, and the rows are drawn again below: so also another process can print on the same
# terminal, and nothing has to know its height. A rich.live.Live would count the rows that it has
# drawn upwards from the cursor, and lose what another process printed.

# It erases from the second column on: what is erased from the first place of a screen, tmux keeps
# in its history.
ERASE = "\r\x1b[K\x1b[C\x1b[J\r"  # to be written before a line on a terminal that may be drawn on
PAUSE_SECONDS = 0.1  # between two drawings
NARROWEST = 20  # columns; on less nothing is drawn

Rows = Callable[[int], list[Text]]  # what to draw in so many columns


class _Screen:
    """The terminal of this process. rows: what is to be drawn, asked for again at each drawing."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.lock = threading.RLock()
        self.drawn = False
        self.line_open = False  # somebody's line has no end yet
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._streams: list[tuple[str, TextIO]] = []
        self.in_fork = False

    def add(self, rows: Rows) -> None:
        """Draws these rows below the others, until `remove`."""
        with self.lock:
            self.rows.append(rows)
            if self._thread is None:
                self._streams = [(name, getattr(sys, name)) for name in ("stdout", "stderr")]
                for name, stream in self._streams:
                    if stream.isatty() or name == "stderr":
                        setattr(sys, name, _Above(self, stream))
                self._wake = threading.Event()
                self._thread = threading.Thread(
                    target=self._draw_on, args=(self._wake,), name="screen", daemon=True
                )
                self._thread.start()

    def remove(self, rows: Rows) -> None:
        """Draws these rows no longer; the last of all leaves the terminal as it was."""
        with self.lock:
            if rows in self.rows:
                self.rows.remove(rows)
            self.erase()
            if self.rows or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._wake.set()
            for name, stream in self._streams:
                current = getattr(sys, name)
                if isinstance(current, _Above) and current.stream is stream:
                    setattr(sys, name, stream)
        if thread is not threading.current_thread():
            thread.join(timeout=1)

    def erase(self) -> None:
        """Takes away what is drawn."""
        if self.drawn:
            self._write(ERASE)
            self.drawn = False

    def _draw_on(self, wake: threading.Event) -> None:
        while not wake.wait(PAUSE_SECONDS):
            with self.lock:
                if self._thread is threading.current_thread() and not self.line_open:
                    self.draw()

    def draw(self) -> None:
        """Draws all rows anew."""
        width = shutil.get_terminal_size((80, 24)).columns - 1
        rows = [row for make in self.rows for row in make(width)] if width >= NARROWEST else []
        if not rows:
            self.erase()
            return
        console = open_console(width, wants_color(self.stream()))
        for row in rows:
            row.no_wrap, row.overflow = True, "crop"
            row.truncate(width)
            console.print(row)
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        self._write(f"{ERASE}{read_console(console).rstrip(chr(10))}\r{up}")
        self.drawn = True

    def stream(self) -> TextIO:
        """Where it is drawn: standard error as it was when the first rows came."""
        return next((stream for name, stream in self._streams if name == "stderr"), sys.stderr)

    def _write(self, text: str) -> None:
        try:
            self.stream().write(text)
            self.stream().flush()
        except (OSError, ValueError):  # the terminal is gone; who prints next will say so
            self.rows.clear()

    def after_fork(self) -> None:
        """A fork draws nothing, and writes to the streams themselves."""
        for name, stream in self._streams:
            setattr(sys, name, stream)
        self.__init__()  # type: ignore[misc]
        self.in_fork = True


class _Above:
    """Standard output or error while rows are drawn: what is written to it stands above them."""

    def __init__(self, screen: _Screen, stream: TextIO) -> None:
        self.screen, self.stream = screen, stream

    def write(self, text: str) -> int:
        with self.screen.lock:
            if text:
                self.screen.erase()
                self.screen.line_open = not text.endswith("\n")
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_screen = _Screen()
# Nothing is drawn during a fork, so that the child finds no stream in the middle of a write.
os.register_at_fork(
    before=lambda: _screen.lock.acquire(),
    after_in_parent=lambda: _screen.lock.release(),
    after_in_child=_screen.after_fork,
)


def _close() -> None:
    with _screen.lock:
        _screen.rows.clear()
        _screen.erase()


call_at_end(_close)


def can_draw() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def should_report() -> bool:
    """Whether this process says what goes on: the first of several ranks, and none that was forked
    to help.
    """
    return os.environ.get("RANK", "0") == "0" and not _screen.in_fork


def has_unicode() -> bool:
    """Whether what is drawn may have letters beyond ASCII; also while standard error is turned
    elsewhere.
    """
    return (_screen.stream().encoding or "").lower().startswith("utf")


show_rows = _screen.add  # rows that are drawn below others, ten times a second, until `hide_rows`
hide_rows = _screen.remove  # nothing happens if they are not shown


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
        """What is drawn: nothing for a phase that has just begun, or that another one is in."""
        seconds = time.monotonic() - self.began
        if seconds < ROW_SECONDS or not _open or _open[-1] is not self or is_quiet():
            return []
        letters = _SPINNER if has_unicode() else _PLAIN_SPINNER
        row = Text(f"{letters[int(seconds * 10) % len(letters)]} ", style="cyan")
        end = f"  {self.describe_time(seconds)}"
        row.append(f"{self.what}{self.reached()}", style="default")
        if self.text:
            row.append(f": {self.text}")
        row.truncate(max(width - len(end), 10), overflow="ellipsis")
        row.append(end, style=SOFT)
        return [row]

    def reached(self) -> str:
        """How much is done, to stand after its name."""
        parts = []
        if self.total:
            show = format_bytes if self.unit == "bytes" else "{:,}".format
            unit = "" if self.unit == "bytes" else f" {self.unit}".rstrip()
            parts.append(
                f"{show(self.done)} of {show(self.total)}{unit},"
                f" {min(self.done / self.total, 1):.0%}"
            )
        elif self.done:
            parts.append(
                format_bytes(self.done)
                if self.unit == "bytes"
                else f"{self.done:,} {self.unit}".strip()
            )
        return "".join(f": {part}" for part in parts)

    def describe_time(self, seconds: float) -> str:
        """The seconds so far, and those left where the total is known."""
        if not self.total or not self.done or self.done >= self.total or seconds < SAID_SECONDS:
            return format_clock(seconds)
        return (
            f"{format_clock(seconds)}, eta"
            f" {format_clock(seconds / self.done * (self.total - self.done))}"
        )


@contextmanager
def phase(
    what: str, total: int | None = None, unit: str = "", *, leaves_line: bool = True
) -> Iterator[Phase]:
    """See the module. total: of `unit`, if it is known; `bytes` are shown as such. leaves_line:
    with its seconds.
    """
    going, end = Phase(what, total, unit), threading.Event()
    shown = should_report() and not is_quiet()
    live = shown and can_draw()
    if live:
        _open.append(going)
        show_rows(going.rows)
    elif shown:
        threading.Thread(target=_log_progress, args=(going, end), name="phase", daemon=True).start()
    try:
        yield going
    finally:
        end.set()
        if live:
            hide_rows(going.rows)
            _open.remove(going)
    seconds = time.monotonic() - going.began
    if live and leaves_line and (seconds >= SAID_SECONDS or is_verbose()):
        get_logger().info("%s: %s", what, format_seconds(seconds), extra={"style": SOFT})


@contextmanager
def importing(what: str) -> Iterator[None]:
    """A phase for the import of a large library, in which Ctrl-C ends the process at once: in the
    midst of an import the exception of an interrupt may be swallowed by the library, and nothing is
    lost yet.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.stderr.write(f"{ERASE if can_draw() else ''}interrupted\n")
        end_process(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    catches = (
        is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # nobody else handles it
    if catches:
        signal.signal(signal.SIGINT, end)
    try:
        with phase(f"importing {what}", leaves_line=False):
            yield
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _log_progress(going: Phase, end: threading.Event) -> None:
    while not end.wait(LINE_SECONDS):
        said = f"{going.reached()}: {going.text}" if going.text else going.reached()
        get_logger().info(
            "%s%s, %s", going.what, said, going.describe_time(time.monotonic() - going.began)
        )


def is_in_phase() -> bool:
    """Whether a phase has a row on the terminal now."""
    return bool(_open) and time.monotonic() - _open[-1].began >= ROW_SECONDS

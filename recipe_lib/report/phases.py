"""Progress of what takes longer than a moment: a row on a terminal that says what goes on.

    with phase("loading weights", total=bytes, unit="bytes") as progress:
        progress.advance(count)

On a terminal a row is drawn after ROW_SECONDS, and a phase of more than SAID_SECONDS leaves a line
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
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any, NoReturn, TextIO

from rich.text import Text

from recipe_lib.errors import call_at_end, end_process
from recipe_lib.logs import get_logger, is_quiet, is_verbose
from recipe_lib.report.terminal import SOFT, open_console, read_console, wants_color
from recipe_lib.units import format_bytes, format_clock, format_seconds

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
    """The terminal of this process: at most three rows at its bottom, everything printed above
    them.
    """

    def __init__(self) -> None:
        self.rows: list[Rows] = []  # asked for again at each drawing
        self.lock = threading.RLock()
        self.drawn = False
        self.line_open = False  # somebody's line has no end yet
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._streams: list[tuple[str, TextIO]] = []  # of sys, as they were before any row
        self.in_fork = False

    def add(self, rows: Rows) -> None:
        """Draw these rows below the others, until `remove`."""
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
        """Take these rows away; nothing happens if they are not shown."""
        with self.lock:
            if rows in self.rows:
                self.rows.remove(rows)
            self.erase()
            if self.rows or self._thread is None:
                return
            thread = self._thread
            self._thread = None
            self._wake.set()
            for name, stream in self._streams:
                current = getattr(sys, name)
                if isinstance(current, _Above) and current.stream is stream:
                    setattr(sys, name, stream)
        if thread is not threading.current_thread():  # outside of the lock, which it may wait for
            thread.join(timeout=1)

    def erase(self) -> None:
        """Take away what is drawn."""
        if self.drawn:
            self._write(ERASE)
            self.drawn = False

    def _draw_on(self, wake: threading.Event) -> None:
        while not wake.wait(PAUSE_SECONDS):
            with self.lock:
                if self._thread is threading.current_thread() and not self.line_open:
                    self.draw()

    def draw(self) -> None:
        """Draw all rows anew."""
        width = shutil.get_terminal_size((80, 24)).columns - 1
        all_rows = chain.from_iterable(make_rows(width) for make_rows in self.rows)
        rows = list(all_rows) if width >= NARROWEST else []
        if not rows:
            self.erase()
            return
        console = open_console(width, wants_color(self.stream()))
        for row in rows:
            row.truncate(width)
            console.print(row, no_wrap=True, overflow="crop")
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        self._write(f"{ERASE}{read_console(console).rstrip(chr(10))}\r{up}")
        self.drawn = True

    def stream(self) -> TextIO:
        """Return where it is drawn: standard error as it was when the first rows came."""
        return next((stream for name, stream in self._streams if name == "stderr"), sys.stderr)

    def _write(self, text: str) -> None:
        try:
            self.stream().write(text)
            self.stream().flush()
        except (OSError, ValueError):  # the terminal is gone; who prints next will say so
            self.rows.clear()

    def after_fork(self) -> None:
        """Make a fork draw nothing, and write to the streams themselves."""
        for name, stream in self._streams:
            setattr(sys, name, stream)
        self.__init__()  # type: ignore[misc]
        self.in_fork = True


class _Above:
    """Standard output or error while rows are drawn: what is written to it stands above them."""

    def __init__(self, screen: _Screen, stream: TextIO) -> None:
        self.screen = screen
        self.stream = stream

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
    """Return True if standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def has_unicode() -> bool:
    """Return True if what is drawn may have letters beyond ASCII.

    Also while standard error is redirected.
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


@dataclass(eq=False)
class Phase:
    """The progress of what goes on inside a `phase`."""

    what: str
    total: int | None  # of `unit`, if it is known
    unit: str
    done: int = 0
    text: str = ""  # how far it is, in words
    began: float = field(default_factory=time.monotonic)

    def advance(self, count: int) -> None:
        """Count so much more of the total as done."""
        self.done += count

    def say(self, text: str) -> None:
        """Set how far it is, in words: the best answer so far, the part that is worked on."""
        self.text = text

    def rows(self, width: int) -> list[Text]:
        """Return what is drawn: nothing for a phase that has just begun, or that another one is
        in.
        """
        seconds = time.monotonic() - self.began
        if seconds < ROW_SECONDS or not _open or _open[-1] is not self or is_quiet():
            return []
        letters = _SPINNER if has_unicode() else _PLAIN_SPINNER
        row = Text(f"{letters[int(seconds * 10) % len(letters)]} ", style="cyan")
        end = f"  {self.describe_time(seconds)}"
        row.append(f"{self.what}{self.describe_progress()}", style="default")
        if self.text:
            row.append(f": {self.text}")
        row.truncate(max(width - len(end), 10), overflow="ellipsis")
        row.append(end, style=SOFT)
        return [row]

    def describe_progress(self) -> str:
        """Return how much is done, to stand after its name."""
        show = format_bytes if self.unit == "bytes" else "{:,}".format
        unit = "" if self.unit == "bytes" else f" {self.unit}".rstrip()
        if self.total:
            return (
                f": {show(self.done)} of {show(self.total)}{unit},"
                f" {min(self.done / self.total, 1):.0%}"
            )
        return f": {show(self.done)}{unit}" if self.done else ""

    def describe_time(self, seconds: float) -> str:
        """Return the seconds so far, and those left where the total is known."""
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
    """Show what goes on inside; see the module.

    total: of `unit`, if it is known; `bytes` are shown as such. leaves_line: with its seconds.
    """
    current = Phase(what, total, unit)
    end = threading.Event()
    # The first of several ranks says what goes on, and no process that was forked to help.
    is_reporter = os.environ.get("RANK", "0") == "0" and not _screen.in_fork
    is_shown = is_reporter and not is_quiet()
    is_drawn = is_shown and can_draw()
    if is_drawn:
        _open.append(current)
        show_rows(current.rows)
    elif is_shown:
        threading.Thread(
            target=_log_progress, args=(current, end), name="phase", daemon=True
        ).start()
    try:
        yield current
    finally:
        end.set()
        if is_drawn:
            hide_rows(current.rows)
            _open.remove(current)
    seconds = time.monotonic() - current.began
    if is_drawn and leaves_line and (seconds >= SAID_SECONDS or is_verbose()):
        get_logger().info("%s: %s", what, format_seconds(seconds), extra={"style": SOFT})


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Show the import of a large library, in which Ctrl-C ends the process at once.

    In the midst of an import the exception of an interrupt may be swallowed by the library, and
    nothing is lost yet.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.stderr.write(f"{ERASE if can_draw() else ''}interrupted\n")
        end_process(128 + number)

    # Only where nobody else handles it, and in the main thread, which alone may set a handler.
    catches = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if catches:
        signal.signal(signal.SIGINT, end)
    try:
        with phase(f"importing {what}", leaves_line=False):
            yield
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _log_progress(current: Phase, end: threading.Event) -> None:
    """Write a line every LINE_SECONDS, where there is no terminal to draw on."""
    while not end.wait(LINE_SECONDS):
        get_logger().info(
            "%s%s%s, %s",
            current.what,
            current.describe_progress(),
            f": {current.text}" if current.text else "",
            current.describe_time(time.monotonic() - current.began),
        )


def is_in_phase() -> bool:
    """Return True if a phase has a row on the terminal now."""
    return bool(_open) and time.monotonic() - _open[-1].began >= ROW_SECONDS

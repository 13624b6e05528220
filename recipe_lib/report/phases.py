"""Show the progress of work that takes longer than a moment.

    with phase("loading weights", total=num_bytes, unit="bytes") as progress:
        progress.advance(count)

A phase is such a piece of work. A terminal shows it in a row at its bottom, below all that is
printed; a run adds rows of its own with `show_rows`.
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

# The cursor rests at the beginning of the first row. Whoever prints erases from there on and ends
# with a new line, and the rows are drawn again below. So another process can print on the same
# terminal too, and no terminal height is needed. A rich.live.Live would count the rows that it has
# drawn upwards from the cursor, and lose what another process printed.

# To be written before a line on a terminal that may have rows. After the first line it erases from
# the second column on: tmux keeps in its history what is erased from the first place of a screen.
ERASE = "\r\x1b[K\x1b[C\x1b[J\r"
PAUSE_SECONDS = 0.1  # between two drawings
NARROWEST = 20  # columns; nothing is drawn on a narrower terminal

Rows = Callable[[int], list[Text]]  # given the columns, returns the rows to draw


class _TerminalRows:
    """The terminal of this process: rows at its bottom, everything printed above them."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []  # called again at each drawing
        self.lock = threading.RLock()  # of all that is written to the terminal
        self.drawn = False  # True: there are rows on the terminal now
        self.line_open = False  # True: the last line printed has no end yet
        self._thread: threading.Thread | None = None  # draws; None: there are no rows
        self._wake = threading.Event()  # ends the thread
        # (name in sys, stream) of standard output and error, as they were before any row.
        self._streams: list[tuple[str, TextIO]] = []
        self.in_fork = False  # True: this process was forked, and draws nothing

    def add(self, rows: Rows) -> None:
        """Draw these rows below the others, until `remove`."""
        with self.lock:
            self.rows.append(rows)
            if self._thread is None:
                self._streams = [(name, getattr(sys, name)) for name in ("stdout", "stderr")]
                for name, stream in self._streams:
                    # Standard output only if it is a terminal: a file has nothing to erase.
                    if stream.isatty() or name == "stderr":
                        setattr(sys, name, _StreamAboveRows(self, stream))
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
                if isinstance(current, _StreamAboveRows) and current.stream is stream:
                    setattr(sys, name, stream)
        if thread is not threading.current_thread():  # outside of the lock, which it may wait for
            thread.join(timeout=1)

    def erase(self) -> None:
        if self.drawn:
            self._write(ERASE)
            self.drawn = False

    def _draw_on(self, wake: threading.Event) -> None:
        while not wake.wait(PAUSE_SECONDS):
            with self.lock:
                if self._thread is threading.current_thread() and not self.line_open:
                    self.draw()

    def draw(self) -> None:
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
        """Return the stream that rows are drawn on: standard error as it was before any row."""
        return next((stream for name, stream in self._streams if name == "stderr"), sys.stderr)

    def _write(self, text: str) -> None:
        try:
            self.stream().write(text)
            self.stream().flush()
        except (OSError, ValueError):  # the terminal is gone: the next print raises the same
            self.rows.clear()

    def after_fork(self) -> None:
        """Make a forked process draw nothing, and write to the streams themselves."""
        for name, stream in self._streams:
            setattr(sys, name, stream)
        self.__init__()  # type: ignore[misc]
        self.in_fork = True


class _StreamAboveRows:
    """Standard output or error while rows are drawn: text written to it appears above them."""

    def __init__(self, terminal_rows: _TerminalRows, stream: TextIO) -> None:
        self.terminal_rows = terminal_rows
        self.stream = stream

    def write(self, text: str) -> int:
        with self.terminal_rows.lock:
            if text:
                self.terminal_rows.erase()
                self.terminal_rows.line_open = not text.endswith("\n")
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_terminal_rows = _TerminalRows()
# Nothing is drawn during a fork, so that the child finds no stream in the middle of a write.
os.register_at_fork(
    before=lambda: _terminal_rows.lock.acquire(),
    after_in_parent=lambda: _terminal_rows.lock.release(),
    after_in_child=_terminal_rows.after_fork,
)


def _close() -> None:
    with _terminal_rows.lock:
        _terminal_rows.rows.clear()
        _terminal_rows.erase()


call_at_end(_close)  # so that no row stays on the terminal


def can_draw() -> bool:
    """Return True if standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def has_unicode() -> bool:
    """Return True if the terminal takes letters beyond ASCII.

    It is asked for its own encoding also while `sys.stderr` is replaced.
    """
    return (_terminal_rows.stream().encoding or "").lower().startswith("utf")


show_rows = _terminal_rows.add  # draws rows below others, ten times a second, until `hide_rows`
hide_rows = _terminal_rows.remove  # nothing happens if they are not shown


ROW_SECONDS = 0.3  # how long a phase lasts before it gets a row
REPORTED_SECONDS = 1.0  # a phase that took as long leaves a line on a terminal
LINE_SECONDS = 15.0  # without a terminal: before a phase's first line, and between two
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "-\\|/"  # in ASCII

_open: list["Phase"] = []  # phases that are drawn and have not ended, the innermost last


@dataclass(eq=False)
class Phase:
    """The progress of the work inside a block of `phase`."""

    title: str  # names the work, such as `loading weights`
    total: int | None  # units of work; None: not known
    unit: str  # plural, such as `tensors`; `bytes` are shown as such; empty: plain numbers
    done: int = 0  # units of work
    # How far it is: the best result so far, or the part that is worked on; empty: not said.
    text: str = ""
    began: float = field(default_factory=time.monotonic)  # seconds of the monotonic clock

    def advance(self, count: int) -> None:
        self.done += count

    def rows(self, width: int) -> list[Text]:
        """Return the row to draw; none for a phase that has just begun, or has another one inside.

        width: in columns.
        """
        seconds = time.monotonic() - self.began
        if seconds < ROW_SECONDS or not _open or _open[-1] is not self or is_quiet():
            return []
        letters = _SPINNER if has_unicode() else _PLAIN_SPINNER
        row = Text(f"{letters[int(seconds * 10) % len(letters)]} ", style="cyan")
        time_text = f"  {self.describe_time(seconds)}"
        row.append(f"{self.title}{self.describe_progress()}", style="default")
        if self.text:
            row.append(f": {self.text}")
        row.truncate(max(width - len(time_text), 10), overflow="ellipsis")
        row.append(time_text, style=SOFT)
        return [row]

    def describe_progress(self) -> str:
        """Return the text after the phase's name, `: 3 of 7 tensors, 43%`; empty: nothing done."""
        show = format_bytes if self.unit == "bytes" else "{:,}".format
        unit = "" if self.unit == "bytes" else f" {self.unit}".rstrip()
        if self.total:
            return (
                f": {show(self.done)} of {show(self.total)}{unit},"
                f" {min(self.done / self.total, 1):.0%}"
            )
        return f": {show(self.done)}{unit}" if self.done else ""

    def describe_time(self, seconds: float) -> str:
        """Return the time so far as text, and the time left if the total is known.

        seconds: since the phase began.
        """
        if not self.total or not self.done or self.done >= self.total or seconds < REPORTED_SECONDS:
            return format_clock(seconds)
        return (
            f"{format_clock(seconds)}, eta"
            f" {format_clock(seconds / self.done * (self.total - self.done))}"
        )


@contextmanager
def phase(
    title: str, total: int | None = None, unit: str = "", *, leaves_line: bool = True
) -> Iterator[Phase]:
    """Show what goes on inside the block; the caller advances the `Phase` that it yields.

    On a terminal it has a row after ROW_SECONDS, and leaves a line with its time if it took more
    than REPORTED_SECONDS. Without a terminal it writes a line every LINE_SECONDS. Phases may be
    nested; the innermost is shown. Only the first rank shows anything, and nothing with `--quiet`.

    title, total, unit: as of `Phase`. leaves_line: False: no line with its time.
    """
    current = Phase(title, total, unit)
    end = threading.Event()
    # Processes that were forked to help show nothing either.
    is_reporter = os.environ.get("RANK", "0") == "0" and not _terminal_rows.in_fork
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
    if is_drawn and leaves_line and (seconds >= REPORTED_SECONDS or is_verbose()):
        get_logger().info("%s: %s", title, format_seconds(seconds), extra={"style": SOFT})


@contextmanager
def importing(library: str) -> Iterator[None]:
    """Show the import of a large library as a phase; Ctrl-C in it ends the process at once.

    During an import the library may swallow the exception of an interrupt. No work is lost yet.

    library: name of the library.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.stderr.write(f"{ERASE if can_draw() else ''}interrupted\n")
        end_process(128 + number)

    # Only if no other handler is set, and in the main thread, which alone may set one.
    catches = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if catches:
        signal.signal(signal.SIGINT, end)
    try:
        with phase(f"importing {library}", leaves_line=False):
            yield
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _log_progress(current: Phase, end: threading.Event) -> None:
    """Log a line every LINE_SECONDS until `end` is set, for a process without a terminal."""
    while not end.wait(LINE_SECONDS):
        get_logger().info(
            "%s%s%s, %s",
            current.title,
            current.describe_progress(),
            f": {current.text}" if current.text else "",
            current.describe_time(time.monotonic() - current.began),
        )


def is_in_phase() -> bool:
    """Return True if a phase has a row on the terminal now."""
    return bool(_open) and time.monotonic() - _open[-1].began >= ROW_SECONDS

"""What is drawn on a terminal while something goes on: at most three rows at its bottom, everything printed above them.

The cursor rests at the beginning of the first row. Who prints erases from there on and ends with a new line, and the
rows are drawn again below: so also another process can print on the same terminal, and nothing has to know its height.
A rich.live.Live would count the rows that it has drawn upwards from the cursor, and lose what another process printed.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rich.text import Text

from recipe_lib.errors import at_end
from recipe_lib.report.terminal import open_console, text_of, wants_color

# It erases from the second column on: what is erased from the first place of a screen, tmux keeps in its history.
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
                self._thread = threading.Thread(target=self._draw_on, args=(self._wake,), name="screen", daemon=True)
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
        self._write(f"{ERASE}{text_of(console).rstrip(chr(10))}\r{up}")
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


at_end(_close)


def can_draw() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def speaks_for_all() -> bool:
    """Whether this process says what goes on: the first of several ranks, and none that was forked to help."""
    return os.environ.get("RANK", "0") == "0" and not _screen.in_fork


def has_unicode() -> bool:
    """Whether what is drawn may have letters beyond ASCII; also while standard error is turned elsewhere."""
    return (_screen.stream().encoding or "").lower().startswith("utf")


show = _screen.add  # rows that are drawn below others, ten times a second, until `hide`
hide = _screen.remove  # nothing happens if they are not shown

"""Errors that a user can cause, and the exit codes a run ends with.

A user error is one line: the place (file, line or key), what was found, what was expected and what
to do. `run_for_exit_code` turns it into standard error and an exit code; anything else is our own bug
and keeps its traceback.
"""

import atexit
import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NoReturn, TextIO

from recipe_lib.redaction import redact

# Names the temporary folder that `tune run` shares with the ranks it has launched; unset without a
# launcher.
FOLDER_VARIABLE = "TUNE_LAUNCH_FOLDER"
# Lies in it when a rank has said why the run ends on this machine, in place of the launcher.
SAID_FILE = "said_why_all_end"

DONE = 0
USER_ERROR = 2
STOPPED_AND_SAVED = 3
DIVERGED = 4
OUT_OF_MEMORY = 5
STORAGE = 6
PEER_FAILED = 7  # of a rank that ends because another one has failed or hangs

# Letters to Unicode that show nothing: Hangul fillers, and the supplementary variation selectors.
_BLANKS = re.compile("[\u115f\u1160\u3164\uffa0\U000e0100-\U000e01ef]")
# Format characters with their own shape (Arabic, Syriac and Kaithi number and verse signs).
_SIGNS = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd]")
_JOINERS = "\u200c\u200d"


def escape_invisible(text: str, keep: str = "") -> str:
    """The text with all that a terminal would obey or not show, except what is in `keep`, written
    out: `\\x1b`, `\\n`.

    Control and format characters (also those that turn the direction of writing), line and
    paragraph separators, letters of private use, not in Unicode yet, or blank. A joiner (ZWJ, ZWNJ)
    stays between two characters beyond ASCII, where Persian, the scripts of India and emoji need
    it.
    """
    hidden = "".join(
        letter
        for letter in set(text) - set(keep)
        if not letter.isprintable() or _BLANKS.match(letter)
    )
    if not hidden:
        return text
    return re.sub(f"[{re.escape(hidden)}]", lambda found: _shown(text, found.start()), text)


def _shown(text: str, at: int) -> str:
    """The letter at a place of the text, written out unless it has to stay there."""
    letter = text[at]
    if letter in _JOINERS:
        around = text[max(0, at - 1) : at + 2]
        stays = len(around) == 3 and not any(
            other.isascii() or other in _JOINERS for other in (around[0], around[2])
        )
    else:
        is_wide_space = letter.isspace() and letter > "\x9f" and letter not in "\u2028\u2029"
        stays = is_wide_space or _SIGNS.match(letter) is not None
    return letter if stays else _escape(letter)


def _escape(letter: str) -> str:
    escaped = repr(letter)[1:-1]
    return escaped if escaped != letter else letter.encode("unicode_escape").decode("ascii")


def get_first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of what an error says, so many letters of it; its kind where it says
    nothing.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def find_lines_in(error: BaseException, file: str | os.PathLike[str]) -> list[int]:
    """The lines of a Python file that an error came through, outermost first, however the file's
    path was written.
    """
    wanted = os.path.abspath(file)
    found = traceback.extract_tb(error.__traceback__)
    return [
        frame.lineno
        for frame in found
        if frame.lineno and os.path.abspath(frame.filename) == wanted
    ]


class UserError(Exception):
    """A mistake that the user can correct; `str(error)` is one line, or one line a fault, without
    secrets.
    """

    exit_code = USER_ERROR

    def __init__(self, *faults: str):
        """faults: one line each; several are reported together."""
        self.faults = [redact(escape_invisible(fault)) for fault in faults]
        super().__init__("\n".join(self.faults))


class ConfigError(UserError):
    """A config, an override or a command line that cannot be used."""


class DataError(UserError):
    """A dataset, a row or a tokenizer that cannot be used."""


class CheckpointError(UserError):
    """A model folder or a saved state that cannot be used."""


class SetupError(UserError):
    """A machine, a world size or an environment that does not fit the config."""


class DivergedError(UserError):
    """Loss or gradient norm is no longer a finite number."""

    exit_code = DIVERGED


class OutOfMemoryError(UserError):
    """The device has no room; the line names the phase, the peak and the levers."""

    exit_code = OUT_OF_MEMORY


class StorageError(UserError):
    """The disk is full or refuses a write."""

    exit_code = STORAGE


class StoppedAndSaved(Exception):  # noqa: N818  (an outcome, not an error)
    """A stop signal came; the state was saved at the step boundary and the run ends with exit code
    3.
    """


def raise_faults(kind: type[UserError], faults: Iterable[str | None]) -> None:
    """Raise one error with all faults, a line each; None is no fault, and without any nothing is
    raised.
    """
    lines = [fault for fault in faults if fault is not None]
    if lines:
        raise kind(*lines)


def run_for_exit_code(main: Callable[[], int | None]) -> int:
    """Runs `main`; user errors become lines on standard error and their exit code, without a
    traceback.

    The traceback of anything else carries no secret either.
    """
    sys.excepthook = _show_uncaught
    threading.excepthook = _show_uncaught_of_thread
    try:
        return main() or DONE
    except UserError as error:
        _say_once("".join(f"error: {fault}\n" for fault in error.faults))
        return error.exit_code
    except OSError as error:
        # A name that no file can have, or links in a circle: the user's own value, wherever it was
        # first used.
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) or not isinstance(
            error.filename, str
        ):
            raise
        name = (
            error.filename
            if len(error.filename) <= 80
            else f"{error.filename[:60]}...{error.filename[-17:]}"
        )
        _say_once(f"error: {escape_invisible(name)}: {error.strerror}; choose another name\n")
        return USER_ERROR
    except SystemExit as error:
        if error.code != STOPPED_AND_SAVED:
            raise
        _say_once(
            "error: a part of the run called SystemExit(3), the code of a run that has stopped and"
            " saved\n"
        )
        return USER_ERROR
    except StoppedAndSaved as stopped:
        if os.environ.get("RANK", "0") == "0":  # all ranks have stopped alike
            _say_once(f"{stopped}\n")
        return STOPPED_AND_SAVED


def _show_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _show_uncaught_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit and failed.exc_value is not None:
        _show_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


_at_end: list[Callable[[], None]] = []


def call_at_end(callback: Callable[[], None]) -> None:
    """Has it called when the process ends, by `end_process` or as Python does; not when it is
    killed.
    """
    _at_end.append(callback)
    atexit.register(callback)


def end_process(code: int) -> NoReturn:
    """Ends a rank at once with `code`, its output flushed, what `call_at_end` was given called.

    Without Python's own shutdown, during which a thread of gloo may still drop its last tensor, and
    abort.
    """
    for callback in _at_end:
        callback()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_once(lines: str) -> None:
    """Writes to standard error, unless another rank that `tune run` launched on this machine has
    said the same.
    """
    folder, lines = os.environ.get(FOLDER_VARIABLE), redact(lines)
    if not lines:
        return
    if folder and os.path.isdir(folder):
        try:
            open(
                os.path.join(folder, f"said_{hashlib.sha256(lines.encode()).hexdigest()}"), "x"
            ).close()
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk must not swallow the lines
    say(lines)


def say(text: str) -> None:
    """Writes to standard error; the exit code is not to change where that is closed or on a full
    disk.
    """
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)  # in one piece: ranks share the terminal
        sys.stderr.flush()
    except OSError:
        send_nowhere(sys.stderr)


def send_nowhere(stream: TextIO) -> None:
    """Lets Python's flush at exit succeed: the stream takes no more."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

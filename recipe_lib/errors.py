"""Define the errors that a user can cause, and end a run with its exit code.

A user error is one line: where (file, line or key), what was read, what was expected and what to
do. The entry points of runs call `run_for_exit_code`, which writes it to standard error; any other
exception is a bug of ours and keeps its traceback. A run may have several ranks on a machine: what
all of them have to report is written by one.
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

# Environment variable: path of the temporary folder that `tune run` shares with the ranks that it
# has launched; unset without a launcher.
FOLDER_VARIABLE = "TUNE_LAUNCH_FOLDER"
# File in that folder: a rank has reported why the run ends on this machine, so that the launcher
# need not.
REPORTED_FILE = "said_why_all_end"

# Exit codes. 1 is Python's own, of a traceback.
DONE = 0
USER_ERROR = 2
STOPPED_AND_SAVED = 3  # by a signal; the run can be resumed
DIVERGED = 4
OUT_OF_MEMORY = 5
STORAGE = 6  # the disk is full or refuses a write
PEER_FAILED = 7  # of a rank that ends because another one has failed or hangs

# Printable to str.isprintable(), though they show nothing: Hangul fillers, and the supplementary
# variation selectors.
_BLANKS = re.compile("[\u115f\u1160\u3164\uffa0\U000e0100-\U000e01ef]")
# Format characters with their own shape (Arabic, Syriac and Kaithi number and verse signs).
_SIGNS = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd]")
_JOINERS = "\u200c\u200d"  # zero-width non-joiner and joiner


def escape_invisible(text: str, keep: str = "") -> str:
    """Return the text with all that a terminal would obey or not show written out: `\\x1b`, `\\n`.

    These are control and format characters (also those that turn the direction of writing), line
    and paragraph separators, characters of private use, those not in Unicode yet, and blank ones.
    keep: characters that stay.
    """
    hidden = "".join(
        letter
        for letter in set(text) - set(keep)
        if not letter.isprintable() or _BLANKS.match(letter)
    )
    if not hidden:
        return text
    return re.sub(f"[{re.escape(hidden)}]", lambda match: _escape_at(text, match.start()), text)


def _escape_at(text: str, index: int) -> str:
    """Return the character at `index`, written out unless writing systems need it there."""
    letter = text[index]
    if letter in _JOINERS:
        # Persian, the scripts of India and emoji need a joiner between two characters that are not
        # ASCII.
        neighbors = text[max(0, index - 1) : index] + text[index + 1 : index + 2]
        stays = len(neighbors) == 2 and not any(
            neighbor.isascii() or neighbor in _JOINERS for neighbor in neighbors
        )
    else:
        is_wide_space = letter.isspace() and letter > "\x9f" and letter not in "\u2028\u2029"
        stays = is_wide_space or _SIGNS.match(letter) is not None
    return letter if stays else _escape_letter(letter)


def _escape_letter(letter: str) -> str:
    """Return a character as Python's escape sequence, such as `\\x1b`."""
    escaped = repr(letter)[1:-1]
    # `repr` leaves what `str.isprintable` calls printable as it is.
    return escaped if escaped != letter else letter.encode("unicode_escape").decode("ascii")


def get_first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of an error's text, cut to `most` characters; its type without text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def find_lines_in(error: BaseException, file: str | os.PathLike[str]) -> list[int]:
    """Return the line numbers of a Python file that an error came through, outermost first."""
    # A frame has the file's path as it was given when it was run, so both are made absolute.
    path = os.path.abspath(file)
    return [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.lineno and os.path.abspath(frame.filename) == path
    ]


class UserError(Exception):
    """A mistake that the user can correct; `str(error)` has a line for each fault, no secrets."""

    exit_code = USER_ERROR  # of the process that it ends

    def __init__(self, *faults: str):
        """Take faults, one line each; several are reported together."""
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
    """The device has no room; the line names the phase, the peak and config keys that lower it."""

    exit_code = OUT_OF_MEMORY


class StorageError(UserError):
    """The disk is full or refuses a write."""

    exit_code = STORAGE


class StoppedAndSaved(Exception):  # noqa: N818  (an outcome, not an error)
    """A stop signal came, the state was saved after the step, and the run ends."""


def raise_faults(kind: type[UserError], faults: Iterable[str | None]) -> None:
    """Raise one error of class `kind` with all faults, a line each, if any is not None."""
    lines = [fault for fault in faults if fault is not None]
    if lines:
        raise kind(*lines)


def run_for_exit_code(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit code of the process.

    User errors become lines on standard error and their exit code, without a traceback. Any other
    exception is raised; its traceback is printed without secrets.

    main: returns an exit code; None: DONE.
    """
    sys.excepthook = _show_uncaught
    threading.excepthook = _show_uncaught_of_thread
    try:
        return main() or DONE
    except UserError as error:
        _say_once("".join(f"error: {fault}\n" for fault in error.faults))
        return error.exit_code
    except OSError as error:
        # A name that is too long, or links in a circle: the user has given it, and any part of the
        # code may be the first to use it.
        is_name_fault = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
        if not is_name_fault or not isinstance(error.filename, str):
            raise
        name = error.filename
        shown_name = f"{name[:60]}...{name[-17:]}" if len(name) > 80 else name
        _say_once(f"error: {escape_invisible(shown_name)}: {error.strerror}; choose another name\n")
        return USER_ERROR
    except SystemExit as error:
        if error.code != STOPPED_AND_SAVED:
            raise
        # A launcher would take its code for that of a run that can be resumed.
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
    """Print the traceback of a thread's exception; SystemExit ends a thread silently."""
    if failed.exc_type is not SystemExit and failed.exc_value is not None:
        _show_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


# What `call_at_end` was given. `end_process` calls it, as os._exit runs no function of atexit.
_at_end: list[Callable[[], None]] = []


def call_at_end(callback: Callable[[], None]) -> None:
    """Have `callback` called when the process ends, by `end_process` or in Python's own way."""
    _at_end.append(callback)
    atexit.register(callback)


def end_process(code: int) -> NoReturn:
    """End a rank at once with exit code `code`, after the callbacks of `call_at_end`."""
    # Python's own shutdown is left out: a thread of gloo may drop its last tensor in it, and abort.
    for callback in _at_end:
        callback()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_once(lines: str) -> None:
    """Write lines to standard error, unless another rank on this machine has written the same."""
    folder = os.environ.get(FOLDER_VARIABLE)
    lines = redact(lines)
    if not lines:
        return
    if folder and os.path.isdir(folder):
        digest = hashlib.sha256(lines.encode()).hexdigest()
        try:
            # Exclusive: of all ranks only one can make the file, and it writes the lines.
            open(os.path.join(folder, f"said_{digest}"), "x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk must not swallow the lines
    say(lines)


def say(text: str) -> None:
    """Write to standard error; a failure raises nothing and drops the text."""
    # A closed standard error, or one on a full disk, is not to change the exit code.
    if sys.stderr is None:  # closed before the process began
        return
    try:
        sys.stderr.write(text)  # in one piece: ranks share the terminal
        sys.stderr.flush()
    except OSError:
        send_nowhere(sys.stderr)


def send_nowhere(*outputs: TextIO | int) -> None:
    """Send all further output of streams or descriptors to the null device.

    Python flushes its streams at exit, which then cannot fail. A stream in memory has no descriptor
    and stays as it is.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        with contextlib.suppress(io.UnsupportedOperation):
            os.dup2(devnull, output if isinstance(output, int) else output.fileno())
    os.close(devnull)

"""Errors that a user can cause, and the exit codes a run ends with.

A user error is one line: the place (file, line or key), what was found, what was expected and what to do.
`exit_code_of` turns it into standard error and an exit code; anything else is our own bug and keeps its traceback.
"""

import atexit
import hashlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

# Names the temporary folder that `tune run` shares with the ranks it has launched; unset without a launcher.
FOLDER_VARIABLE = "TUNE_LAUNCH_FOLDER"

DONE = 0
USER_ERROR = 2
STOPPED_AND_SAVED = 3
DIVERGED = 4
OUT_OF_MEMORY = 5
STORAGE = 6
PEER_FAILED = 7  # of a rank that ends because another one has failed or stands still

# What moves a terminal's cursor, changes its colours or ends a line; and halves of characters, which cannot be written.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    """The text with control characters, except those in `keep`, written out: `\\x1b`, `\\n`."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def lines_in(error: BaseException, file: str | os.PathLike[str]) -> list[int]:
    """The lines of a Python file that an error came through, outermost first, however the file's path was written."""
    wanted = os.path.abspath(file)
    found = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in found if frame.lineno and os.path.abspath(frame.filename) == wanted]


class UserError(Exception):
    """A mistake that the user can correct; `str(error)` is one line, or one line a fault."""

    exit_code = USER_ERROR

    def __init__(self, *faults: str):
        """faults: one line each; several are reported together."""
        self.faults = [visible(fault) for fault in faults]
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
    """A stop signal came; the state was saved at the step boundary and the run ends with exit code 3."""


def exit_code_of(main: Callable[[], int | None]) -> int:
    """Runs `main`; user errors become lines on standard error and their exit code, without a traceback."""
    try:
        return main() or DONE
    except UserError as error:
        _say_once("".join(f"error: {fault}\n" for fault in error.faults))
        return error.exit_code
    except StoppedAndSaved as stopped:
        if os.environ.get("RANK", "0") == "0":  # all ranks have stopped alike
            _say_once(f"{stopped}\n")
        return STOPPED_AND_SAVED


_at_end: list[Callable[[], None]] = []


def at_end(callback: Callable[[], None]) -> None:
    """Has it called when the process ends, by `end_process` or as Python does; not when it is killed."""
    _at_end.append(callback)
    atexit.register(callback)


def end_process(code: int) -> NoReturn:
    """Ends a rank at once with `code`, its output flushed, what `at_end` was given called.

    Without Python's own shutdown, during which a thread of gloo may still drop its last tensor, and abort.
    """
    for callback in _at_end:
        callback()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_once(lines: str) -> None:
    """Writes to standard error, unless another rank that `tune run` launched on this machine has said the same."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not lines:
        return
    if folder and os.path.isdir(folder):
        try:
            open(os.path.join(folder, f"said_{hashlib.sha256(lines.encode()).hexdigest()}"), "x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk must not swallow the lines
    sys.stderr.write(lines)  # in one piece: ranks share the terminal
    sys.stderr.flush()

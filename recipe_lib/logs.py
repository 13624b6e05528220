"""Write the log lines of runs and commands: `get_logger().info(...)`.

Rank 0 writes all lines to standard error, other ranks only warnings and errors. Secrets in a line
are replaced. On a terminal warnings and errors have a color, and lines are broken between words.
"""

import logging
import os
import shutil
import sys
import textwrap
from typing import TextIO

from recipe_lib.redaction import redact

# Environment variable that -q and -v set, so that a launcher's ranks have it, too.
VERBOSITY_VARIABLE = "TUNE_VERBOSITY"
QUIET = "quiet"  # warnings and errors alone
VERBOSE = "verbose"  # all lines of all ranks
# Option of a command -> value of the variable.
VERBOSITY = {"-q": QUIET, "--quiet": QUIET, "-v": VERBOSE, "--verbose": VERBOSE}
# A record's `style` or level -> color: parameter of ECMA-48's escape sequence.
_STYLES = {"dim": "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


def is_quiet() -> bool:
    """Return True if warnings and errors alone are shown."""
    return os.environ.get(VERBOSITY_VARIABLE) == QUIET


def is_verbose() -> bool:
    """Return True if all ranks log, phases with their seconds, and errors with tracebacks."""
    return os.environ.get(VERBOSITY_VARIABLE) == VERBOSE


def wants_color(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal that is to show styles."""
    # NO_COLOR is the convention of no-color.org.
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def set_verbosity(verbosity: str) -> None:
    """Set QUIET or VERBOSE, in this process and in those that it starts."""
    os.environ[VERBOSITY_VARIABLE] = verbosity
    logging.getLogger("tune").setLevel(_choose_level())


def _choose_level() -> int:
    speaks = os.environ.get("RANK", "0") == "0" or is_verbose()
    return logging.INFO if speaks and not is_quiet() else logging.WARNING


def wrap_lines(text: str, columns: int) -> str:
    """Return lines broken between words for a terminal; continuation lines are indented.

    columns: of the terminal; lines are one shorter, and not below 40.
    """
    return "\n".join(
        textwrap.fill(
            line,
            max(columns - 1, 40),
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    """Print a line, on standard output by default; on a terminal it is broken between words."""
    file = file or sys.stdout
    if file.isatty():
        text = wrap_lines(text, shutil.get_terminal_size((80, 24)).columns)
    print(text, file=file)


class _Formatter(logging.Formatter):
    """Formats lines without secrets; on a terminal broken between words and in color.

    The color is that of the record's `style`, or of its level. A record with `is_command` stays in
    one piece, to be copied.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        if sys.stderr.isatty() and not hasattr(record, "is_command"):
            text = wrap_lines(text, shutil.get_terminal_size((80, 24)).columns)
        code = _STYLES.get(getattr(record, "style", record.levelno))
        return f"\x1b[{code}m{text}\x1b[0m" if code and wants_color(sys.stderr) else text


class _StandardError(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which is replaced while a progress line is drawn."""

    def __init__(self) -> None:
        # Not the StreamHandler's, which would set `stream`.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def silence_torchao() -> None:
    """Drop the lines that importing torchao logs about kernels that are not used here.

    Call it before the import, also of transformers and PEFT, which import torchao. Other lines of
    the two loggers stay.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_is_useful)  # a second call adds nothing


def _is_useful(record: logging.LogRecord) -> bool:
    """Return False, which drops the record, for lines that torchao's import logs."""
    message = record.getMessage()
    # On libraries of its wheel that were built for another torch or GPU.
    is_library = message.startswith("Failed to load ") and "torchao" in message
    # Torch's warning of a deprecated call that torchao makes for its enums.
    is_enum = "KernelPreference" in message or "ScaleCalculationMode" in message
    is_deprecation = is_enum and "register_constant() on Enum" in message
    return not ((is_library and ".so" in message) or is_deprecation)


def warn_on_first_rank(message: str, *args: object) -> None:
    """Log on rank 0 a warning that all ranks would log alike; it is shown with --quiet, too."""
    if os.environ.get("RANK", "0") == "0":
        get_logger().warning(message, *args)


def get_logger() -> logging.Logger:
    """Return the logger of the project, which writes plain lines to standard error."""
    logger = logging.getLogger("tune")
    # The handler is added by the first call, not on import: the rank is known by then.
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        handler = _StandardError()
        rank = int(os.environ.get("RANK", "0"))
        handler.setFormatter(
            _Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
        )
        logger.addHandler(handler)
        logger.setLevel(_choose_level())
        logger.propagate = False
    return logger

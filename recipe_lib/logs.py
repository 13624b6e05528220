"""Log lines: only the main rank speaks, no line carries a secret; on a terminal warnings and errors
have a color.
"""

import logging
import os
import shutil
import sys
import textwrap
from typing import TextIO

from recipe_lib.redaction import redact

VERBOSITY_VARIABLE = (  # `quiet`: warnings and errors alone; `verbose`: more; set by -q and -v
    "TUNE_VERBOSITY"
)
QUIET, VERBOSE = "quiet", "verbose"
VERBOSITY = {"-q": QUIET, "--quiet": QUIET, "-v": VERBOSE, "--verbose": VERBOSE}
_STYLES = {
    "dim": "2",
    logging.WARNING: "33",
    logging.ERROR: "31",
    logging.CRITICAL: "31",
}  # of ECMA-48


def is_quiet() -> bool:
    """Whether warnings and errors alone are wanted."""
    return os.environ.get(VERBOSITY_VARIABLE) == QUIET


def is_verbose() -> bool:
    """Whether all ranks are to speak, every phase its seconds, and errors their tracebacks."""
    return os.environ.get(VERBOSITY_VARIABLE) == VERBOSE


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that is to show styles; NO_COLOR (no-color.org) and TERM=dumb
    say no.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def set_verbosity(verbosity: str) -> None:
    """`quiet` or `verbose`, in this process and in those that it starts."""
    os.environ[VERBOSITY_VARIABLE] = verbosity
    logging.getLogger("tune").setLevel(_level())


def _level() -> int:
    said = logging.INFO if os.environ.get("RANK", "0") == "0" or is_verbose() else logging.WARNING
    return logging.WARNING if is_quiet() else said


def wrap_lines(text: str, columns: int) -> str:
    """Lines broken between words for a terminal of so many columns; what a line goes on with is
    indented.
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
    print(
        wrap_lines(text, shutil.get_terminal_size((80, 24)).columns) if file.isatty() else text,
        file=file,
    )


class _Formatter(logging.Formatter):
    """Without secrets; on a terminal in the color of the level, or of the record's `style`, and
    broken between words.

    A record with `is_command` stays in one piece, to be copied.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        if sys.stderr.isatty() and not hasattr(record, "is_command"):
            text = wrap_lines(text, shutil.get_terminal_size((80, 24)).columns)
        code = _STYLES.get(getattr(record, "style", record.levelno))
        return f"\x1b[{code}m{text}\x1b[0m" if code and wants_color(sys.stderr) else text


class _StandardError(logging.StreamHandler):
    """Writes to what `sys.stderr` is at that time: while something is drawn, it is another."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def silence_torchao() -> None:
    """Drops the lines that importing torchao, which transformers and PEFT do, prints about kernels
    nobody asked for.

    Libraries of its wheel that were built for another torch or GPU, and a deprecation of torch's
    that it meets: no other line of the two loggers. To be called before the import.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_keep_unless_idle)  # which it adds once


def _keep_unless_idle(record: logging.LogRecord) -> bool:
    """Return False, which drops the record, for a library of torchao's that does not load, and
    torch's on its enums.
    """
    said = record.getMessage()
    is_missing = said.startswith("Failed to load ") and "torchao" in said and ".so" in said
    is_ours = "KernelPreference" in said or "ScaleCalculationMode" in said
    return not is_missing and not (is_ours and "register_constant() on Enum" in said)


def warn_on_first_rank(message: str, *args: object) -> None:
    """A warning of what every rank sees alike: the first one says it, with --quiet too."""
    if os.environ.get("RANK", "0") == "0":
        get_logger().warning(message, *args)


def get_logger() -> logging.Logger:
    """The logger of the project; it writes plain lines to standard error on rank 0 and warnings
    elsewhere.
    """
    logger = logging.getLogger("tune")
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        handler = _StandardError()
        rank = int(os.environ.get("RANK", "0"))
        handler.setFormatter(
            _Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
        )
        logger.addHandler(handler)
        logger.setLevel(_level())
        logger.propagate = False
    return logger

"""Judge what a tool made of a planted fault, by its exit code and its output.

`playing.py` and `states.py` call `judge`. A line counts as a message on the fault if it has the
fault's words (see `words.py`) and is news: not among the lines of the sound run, which has no
fault, no line of metrics, and no echo of the config that the tool was given.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.planted.running import Result

# The outcomes. "Words" are the fault's, "trained on" means exit code 0.
REJECTED = "rejected"  # ended before the first step, without a traceback, with the words
STOPPED = "stopped"  # the same after a step was done
WARNED = "warned"  # trained on, with a line that has the words
HANDLED = "handled"  # trained on without a word, and what was measured shows no harm
FOUND = "found by check"  # the run says nothing, the tool's own check command does
UNNAMED = "ends, unnamed"  # ended without a traceback, and no line has the words
NAMED_TRACEBACK = "traceback, named"  # ended with a traceback, an exception of which has the words
TRACEBACK = "traceback"  # ended with a traceback, none of whose exceptions has them
HANGS = "hangs"  # killed after the time limit
SILENT = "silent"  # trained on without a word
NOT_APPLICABLE = "n/a"

GOOD = (REJECTED, STOPPED, WARNED, HANDLED)  # the run itself dealt with the fault
OUTCOMES = (
    REJECTED,
    STOPPED,
    WARNED,
    HANDLED,
    FOUND,
    NAMED_TRACEBACK,
    UNNAMED,
    TRACEBACK,
    HANGS,
    SILENT,
    NOT_APPLICABLE,
)

_PREFIX = r"(?:\[rank\d+\]: ?)?"  # torchrun's, before each line of a traceback
# The line behind a traceback's frames, as Python prints it: `package.Error`, perhaps with a text.
_EXCEPTION = re.compile(rf"^{_PREFIX}(?:\w+\.)*[A-Za-z_]\w*(?:: .*)?$")
_BEGINS = re.compile(r"Traceback \(most recent call last\)")  # perhaps behind a progress bar
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass
class Outcome:
    """A cell of the table."""

    outcome: str  # of OUTCOMES
    seconds: float = 0.0  # from the start to the line; to the command's end if there is none
    line: str = ""  # the evidence: the message, or the last line; empty: none
    code: int | None = None  # the exit code; None: the command was killed
    steps: int = 0  # optimizer steps that were done
    note: str = ""  # what was measured, or why the fault cannot be planted

    def to_json(self) -> dict[str, object]:
        """Return the outcome as JSON values."""
        return asdict(self) | {"seconds": round(self.seconds, 1)}


def mask_line(line: str) -> str:
    """Return the line without its numbers and blanks, to be compared with those of another run."""
    return " ".join(_NUMBER.sub("#", line).split())


def judge(
    result: Result,
    words: str,
    steps: int,
    sound_lines: Iterable[str] = (),
    metric: str = "",
    given: Sequence[str] = (),
) -> Outcome:
    """Return the outcome of one command; never HANDLED or FOUND, which need more than one.

    words: regular expression of a message on the fault. steps: optimizer steps that were done.
    sound_lines: output of the sound run. metric: regular expression of the tool's lines of metrics.
    given: texts of the config files that the tool was given.
    """
    pattern = re.compile(words, re.IGNORECASE)
    messages = [
        (at, line)
        for at, line in _find_news(result, sound_lines=sound_lines, metric=metric, given=given)
        if pattern.search(line)
    ]
    outcome = Outcome("", seconds=result.seconds, line="", code=result.code, steps=steps)
    if result.timed_out:
        outcome.outcome = HANGS
    elif result.code == 0:
        outcome.outcome = WARNED if messages else SILENT
    else:
        # Seconds at which a traceback begins.
        began = next((at for at, line in result.lines if _BEGINS.search(line)), None)
        if began is not None:
            exceptions = _read_exceptions(result)
            with_words = [text for text in exceptions if pattern.search(text)]
            outcome.outcome = NAMED_TRACEBACK if with_words else TRACEBACK
            outcome.seconds = began
            outcome.line = (with_words or exceptions)[-1].splitlines()[0]
            return outcome
        outcome.outcome = UNNAMED if not messages else STOPPED if steps else REJECTED
        if not messages:
            outcome.line = next((line for _, line in reversed(result.lines)), "")
    if messages:
        outcome.seconds, outcome.line = messages[0]
    return outcome


def _find_news(
    result: Result, sound_lines: Iterable[str], metric: str, given: Sequence[str]
) -> Iterable[tuple[float, str]]:
    """Yield (seconds, line) of the output that is news. The arguments are those of `judge`."""
    known = {mask_line(line) for line in sound_lines}
    echoes = {line.strip() for text in given for line in text.splitlines()}
    measured = re.compile(metric) if metric else None
    for at, line in result.lines:
        if (
            mask_line(line) in known
            or line.strip() in echoes
            or (measured and measured.search(line))
        ):
            continue
        yield at, line


def _read_exceptions(result: Result) -> list[str]:
    """Return the texts of the program's own exceptions, causes first.

    A launcher's are returned only if there is no other; the last line, if there is none at all.
    """
    lines = [line for _, line in result.lines]
    exceptions: list[list[str]] = []  # lines of each exception's text
    inside = False  # a traceback, whose frames are passed over
    for line in lines:
        if _BEGINS.search(line):
            inside = True
        elif inside and _EXCEPTION.match(line):
            exceptions.append([line])
            inside = False
        elif exceptions and not inside and len(exceptions[-1]) < 12:
            exceptions[-1].append(line)  # an exception's text may have several lines
    # What torchrun and `accelerate launch` raise when a process of theirs has failed.
    launchers = ("CalledProcessError", "ChildFailedError")
    own_exceptions = [
        text for text in exceptions if not any(name in text[0] for name in launchers)
    ] or exceptions
    return ["\n".join(text) for text in own_exceptions] or lines[-1:]

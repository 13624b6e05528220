"""What a tool made of a fault, by its exit code, its output and what was written.

A line counts as a message on the fault if it has the fault's words and is news: not among the lines
of the sound run (numbers apart), no line of metrics, no echo of the config that the tool was given.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.planted.running import Result

# Ended before the first step, without a traceback, in a line that has the fault's words
REJECTED = "rejected"
STOPPED = "stopped"  # the same after a step was done
WARNED = "warned"  # trained on, with a line that has the words
HANDLED = "handled"  # trained on without a word, and what was measured shows no harm
FOUND = "found by check"  # the run says nothing, the tool's own check command does
UNNAMED = "ends, unnamed"  # ended without a traceback, and no line has the words
NAMED_TRACEBACK = "traceback, named"  # ended with a traceback, an exception of which has the words
TRACEBACK = "traceback"  # ended with a traceback none of which does
HANGS = "hangs"  # killed after the time limit
SILENT = "silent"  # trained on without a word
NOT_APPLICABLE = "n/a"

GOOD = (REJECTED, STOPPED, WARNED, HANDLED)
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
    seconds: float = 0.0  # from the start to the line; of a silent run, to its end
    line: str = ""  # the evidence
    code: int | None = None  # the exit code
    steps: int = 0  # optimizer steps that were done
    note: str = ""  # what was measured, or why a tool is out of it

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
    """Return the outcome of one command.

    words: regular expression of the fault. steps: optimizer steps that it did. sound_lines: of the
    sound run. metric: regular expression of the tool's lines of metrics. given: the texts of the
    config files it was given.
    """
    pattern = re.compile(words, re.IGNORECASE)
    told = [
        (at, line)
        for at, line in _find_news(result, sound_lines=sound_lines, metric=metric, given=given)
        if pattern.search(line)
    ]
    found = Outcome("", seconds=result.seconds, line="", code=result.code, steps=steps)
    if result.timed_out:
        found.outcome = HANGS
    elif result.code == 0:
        found.outcome = WARNED if told else SILENT
    else:
        began = next((at for at, line in result.lines if _BEGINS.search(line)), None)
        if began is not None:
            raised = _read_exceptions(result)
            named = [text for text in raised if pattern.search(text)]
            found.outcome = NAMED_TRACEBACK if named else TRACEBACK
            found.seconds, found.line = began, (named or raised)[-1].splitlines()[0]
            return found
        found.outcome = UNNAMED if not told else STOPPED if steps else REJECTED
        if not told:
            found.line = next((line for _, line in reversed(result.lines)), "")
    if told:
        found.seconds, found.line = told[0]
    return found


def _find_news(
    result: Result, sound_lines: Iterable[str], metric: str, given: Sequence[str]
) -> Iterable[tuple[float, str]]:
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
    """Read the texts of the program's own exceptions, causes first.

    A launcher's are read only if there is no other.
    """
    lines = [line for _, line in result.lines]
    found: list[list[str]] = []
    inside = False
    for line in lines:
        if _BEGINS.search(line):
            inside = True
        elif inside and _EXCEPTION.match(line):
            found.append([line])
            inside = False
        elif found and not inside and len(found[-1]) < 12:
            found[-1].append(line)  # an exception's text may have several lines
    launchers = ("CalledProcessError", "ChildFailedError")
    own = [text for text in found if not any(name in text[0] for name in launchers)] or found
    return ["\n".join(text) for text in own] or lines[-1:]

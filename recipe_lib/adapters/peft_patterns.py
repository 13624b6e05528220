"""Regular expressions of an adapter's config, matched as PEFT matches them.

They are somebody else's, and some never come to an end, so all but plain names are matched in a process of its own that
has bounded time and memory: this file, run as a program.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

try:
    import resource
except ImportError:  # a system without limits still has the time limit
    resource = None  # type: ignore[assignment]

MAX_CHARACTERS = 10_000  # of a pattern: those that tools write have some hundreds
SECONDS = 10  # that all patterns of a config may take with all names of a file
_START_SECONDS = 60  # that the process may take to start, on a busy machine
_MEMORY = 1 << 30  # bytes
_PLAIN = re.compile(r"\^?(\.\*\\\.)?([\w.]|\\\.)+\$?")  # a name, or the end of one: what it takes grows with its length


class PatternError(ValueError):
    """A pattern that cannot be matched. str() says why, as the end of a sentence about it."""


def first_matches(patterns: Sequence[str], names: Sequence[str], *, whole: bool = False) -> list[int | None]:
    """Return for each name the number of the first pattern that matches it, None without one.

    A pattern of `rank_pattern` matches the end of a name, after a dot; whole: one of `target_modules`, all of the name.
    Raises PatternError for a pattern that is no regular expression, is too long or does not end.
    """
    return list(_first_matches(tuple(patterns), tuple(names), whole))


@lru_cache(maxsize=256)  # a command reads an adapter's config several times
def _first_matches(patterns: tuple[str, ...], names: tuple[str, ...], whole: bool) -> tuple[int | None, ...]:
    for pattern in patterns:
        if len(pattern) > MAX_CHARACTERS:
            raise PatternError(f"has {len(pattern)} characters, expected {MAX_CHARACTERS} at most")
    if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return tuple(_match(patterns, names, whole))
    request = json.dumps([patterns, names, whole, SECONDS])
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=request.encode(),
            capture_output=True,
            timeout=_START_SECONDS + SECONDS,
        )
        answer = json.loads(child.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise PatternError(f"takes more than {SECONDS} s or {_MEMORY >> 20} MiB to match") from None
    except OSError as error:
        raise PatternError(f"could not be matched in a separate process ({error.strerror})") from None
    if isinstance(answer, str):
        raise PatternError(answer)
    return tuple(answer)


def _match(patterns: Sequence[str], names: Sequence[str], whole: bool) -> list[int | None]:
    compiled = []
    for pattern in patterns:
        try:
            # As `peft.utils.other.get_pattern_key` has it: no other spelling is the same for `a)|(b`.
            compiled.append(re.compile(pattern if whole else rf"(.*\.)?({pattern})$"))
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"is no regular expression ({error})") from None
    pattern_numbers: list[int | None] = []
    for name in names:
        matches = (regex.fullmatch(name) if whole else regex.match(name) for regex in compiled)
        pattern_numbers.append(next((number for number, match in enumerate(matches) if match), None))
    return pattern_numbers


def _serve() -> None:
    """Answer one request; the kernel ends the process where that takes too long."""
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):  # a system may know a limit without allowing it
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    patterns, names, whole, seconds = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        answer: object = _match(patterns, names, whole)
    except PatternError as fault:
        answer = str(fault)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _serve()

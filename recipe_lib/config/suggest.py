"""Format what a user wrote for messages, and suggest the nearest valid spelling of it.

Errors end in what `did_you_mean` returns, `; did you mean lr?`. `show` and `quote` make a text of
the user's safe to print: one line, without secrets.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from recipe_lib.redaction import redact

CLOSE_ENOUGH = 0.6  # difflib ratio; below it a suggestion misleads more often than it helps


def find_nearest(written: str, valid: Iterable[str], *, cutoff: float = CLOSE_ENOUGH) -> str | None:
    """Return the valid name that is most like what was written; None if none is close.

    Upper and lower case count as the same. cutoff: the least difflib ratio, 0 to 1, that is close.
    """
    by_lower = {name.lower(): name for name in valid}
    # Cut to 200 characters: difflib's time grows with the square of the length.
    matches = get_close_matches(written.lower()[:200], list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(written: str, valid: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing when no valid name is close."""
    name = find_nearest(written, valid)
    return f"; did you mean {name}?" if name else ""


PATH_LIMIT = 250  # characters of a path that are shown


def show(text: str, limit: int = 80) -> str:
    """Return a user's text as one printable line, the middle of a long one left out.

    limit: most characters; PATH_LIMIT for a path. Control characters are escaped, secrets replaced.
    """
    # Before the cut: a part of a secret would not be recognized as one.
    text = redact(text)
    # A path is to be copied, so that far longer ones stay whole.
    if "/" in text and not any(letter.isspace() for letter in text):
        limit = max(limit, PATH_LIMIT)
    # Only a beginning is escaped: the text may be as large as a file.
    line = "".join(
        letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[: 4 * limit]
    )
    if len(line) <= limit and len(text) <= 4 * limit:
        return line
    # 23 characters are the dots and the end of 20.
    return f"{line[: limit - 23]}...{text[-20:] if text[-20:].isprintable() else ''}"


def quote(text: str) -> str:
    """Return a text as `show` does, in single quotes."""
    return f"'{show(text)}'"


def format_word(value: Any) -> str:
    """Return a scalar as YAML writes it, but without quotes: `null`, `true`, `0.1`, `adamw`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The nearest valid spelling of what a user wrote, for `did you mean ...?`."""

from collections.abc import Iterable
from difflib import get_close_matches

from recipe_lib.redaction import redact

CLOSE_ENOUGH = 0.6  # difflib ratio; below it a suggestion misleads more often than it helps


def find_nearest(found: str, valid: Iterable[str], *, cutoff: float = CLOSE_ENOUGH) -> str | None:
    """The member of `valid` that is most like `found`, upper and lower case alike; None if none is
    close.
    """
    spelled = {name.lower(): name for name in valid}
    close = get_close_matches(found.lower()[:200], list(spelled), n=1, cutoff=cutoff)
    return spelled[close[0]] if close else None


def did_you_mean(found: str, valid: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no valid name is close."""
    name = find_nearest(found, valid)
    return f"; did you mean {name}?" if name else ""


PATH_LIMIT = 250  # letters


def show(text: str, limit: int = 80) -> str:
    """A user's text as one printable line: control characters escaped, the middle of a long one
    left out.

    Secrets go first: the rest of one that is cut would not be known as one. A path is to be copied,
    and far longer ones stay whole.
    """
    text = redact(text)
    if "/" in text and not any(letter.isspace() for letter in text):
        limit = max(limit, PATH_LIMIT)
    line = "".join(
        letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[: 4 * limit]
    )
    if len(line) <= limit and len(text) <= 4 * limit:
        return line
    return f"{line[: limit - 23]}...{text[-20:] if text[-20:].isprintable() else ''}"


def quote(text: str) -> str:
    """The same in single quotes."""
    return f"'{show(text)}'"

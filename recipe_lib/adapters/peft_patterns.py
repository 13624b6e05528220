"""Regular expressions of an adapter's config, matched as PEFT matches them.

They are somebody else's, and some never come to an end, so all but plain names are matched in the
process that renders chat templates, which has bounded time and memory.
"""

import re
from functools import lru_cache

from recipe_lib.tokenizers.template_process import MEMORY, match_patterns
from recipe_lib.tokenizers.tokenizer import Stopped, match_apart

MAX_CHARACTERS = 10_000  # of a pattern: those that tools write have some hundreds
SECONDS = 10  # that all patterns of a config may take with all names of a file
_PLAIN = re.compile(
    r"\^?(\.\*\\\.)?([\w.]|\\\.)+\$?"
)  # a name, or the end of one: what it takes grows with its length


class PatternError(ValueError):
    """A pattern that cannot be matched. str() says why, as the end of a sentence about it."""


@lru_cache(maxsize=256)  # a command reads an adapter's config several times
def find_first_matches(
    patterns: tuple[str, ...], names: tuple[str, ...], *, whole: bool = False
) -> tuple[int | None, ...]:
    """Return for each name the number of the first pattern that matches it, None without one.

    A pattern of `rank_pattern` matches the end of a name, after a dot; whole: one of
    `target_modules`, all of the name. Raises PatternError for a pattern that is no regular
    expression, is too long or does not end.
    """
    for pattern in patterns:
        if len(pattern) > MAX_CHARACTERS:
            raise PatternError(f"has {len(pattern)} characters, expected {MAX_CHARACTERS} at most")
    try:
        if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
            answer = match_patterns(patterns, names, whole)
        else:
            answer = match_apart(patterns, names, whole, SECONDS)
    except Stopped:
        raise PatternError(f"takes more than {SECONDS} s or {MEMORY >> 20} MiB to match") from None
    if isinstance(answer, str):
        raise PatternError(answer)
    return tuple(answer)

"""Special tokens that a sample only writes must stay text: a private-use letter inside each keeps it from being
found."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from recipe_lib.data.samples import SampleFault

# Unicode's private use areas, which no text should hold.
PRIVATE_LETTERS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


def special_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the special tokens in a text, the longest first; None: there are none."""
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def unused_letters(content: Any, template: str, count: int) -> list[str]:
    """Letters that neither the content nor the template holds. Raises SampleFault: there are none left."""
    taken = set(template).union(*texts_of(content))
    free = (letter for letter in map(chr, chain(*PRIVATE_LETTERS)) if letter not in taken)
    letters = list(islice(free, count))
    if len(letters) < count:
        raise SampleFault(
            "too many private letters", "found every letter of Unicode's private use areas, expected text"
        )
    return letters


def escaped(content: Any, special: re.Pattern[str] | None, find_letter: Callable[[], str]) -> tuple[Any, str | None]:
    """The content with a letter after the first character of each special token, and the letter; or the same
    content and None where there is nothing to escape."""
    if special is None or not any(special.search(text) for text in texts_of(content)):
        return content, None
    letter = find_letter()
    return _changed(content, lambda text: special.sub(lambda m: m.group()[0] + letter + m.group()[1:], text)), letter


def texts_of(content: Any) -> Iterator[str]:
    """Every text in nested lists and dicts, keys included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from texts_of(item)
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from texts_of(key)
            yield from texts_of(value)


def _changed(content: Any, change: Callable[[str], str]) -> Any:
    """A copy with each of these texts changed."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [_changed(item, change) for item in content]
    if isinstance(content, dict):
        return {_changed(key, change): _changed(value, change) for key, value in content.items()}
    return content

"""Bounds what a tokenizer.json makes of a text, before the tokenizers library takes the memory for it.

The library has no limit of its own: thirty steps that double a text end the process.
"""

import base64
import binascii
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe_lib.errors import DataError

MOST_CHARACTERS = 2**24  # of a normalized text; a longer one may have up to four times its own length
MOST_GROWTH = 2**20  # of all normalizers together, in characters for one of the text
_MOST_CUT_GROWTH = 16  # of the pre-tokenizers: one that writes bytes as letters makes four of one
_MOST_ADDED_IDS = 2**16  # that a post-processor puts around a text
# Characters that a step makes of one at most, by Unicode's own tables; those that are not here make no more.
_GROWTH = {"BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 3, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}


def read_growth(path: Path, content: Any) -> float:
    """Return the characters that a tokenizer.json's normalizers make of one at most. DataError for one that has no
    bound."""
    content = content if isinstance(content, dict) else {}
    growth = math.prod(map(_step_growth, _steps(content.get("normalizer"))))
    added = sum(len(token["content"]) for token in content.get("added_tokens") or [])  # these are normalized too
    if growth > MOST_GROWTH or growth * added > max(MOST_CHARACTERS, 4 * added):
        raise _refuse(path, "normalizers that make a text longer without bound")
    if math.prod(map(_step_growth, _steps(content.get("pre_tokenizer")))) > _MOST_CUT_GROWTH:
        raise _refuse(path, "pre-tokenizers that make a text longer without bound")
    for step in _steps(content.get("post_processor")):
        _check_template(path, step)
    return growth


def check_length(path: Path, tokenizer: Any, text: str, growth: float) -> None:
    """Raise DataError if the text, as the tokenizer normalizes it, is too long. growth: as of `read_growth`."""
    # The library makes a new object for each look at its normalizer: only a text that could be too long is worth it.
    if len(text) * growth <= MOST_CHARACTERS or tokenizer.normalizer is None:
        return
    normalizer = tokenizer.normalizer
    left, step = max(MOST_CHARACTERS, 4 * len(text)), max(1, int(MOST_CHARACTERS / growth))
    for start in range(0, len(text), step):
        left -= len(normalizer.normalize_str(text[start : start + step]))
        if left < 0:
            raise _refuse(path, f"normalizers that make a text of {len(text)} characters too long to be read")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Return the steps of a part of the file, those of a sequence one after the other."""
    if not isinstance(part, dict):
        return
    inner = [part[name] for name in ("normalizers", "pretokenizers", "processors") if isinstance(part.get(name), list)]
    if not inner:
        yield part
    for step in itertools.chain(*inner):
        yield from _steps(step)


def _step_growth(step: dict[str, Any]) -> float:
    """Return the characters that one step makes of one at most."""
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, len(new) / len(old))
        case {"content": str(new)} | {"prepend": str(new)}:  # a regular expression may match where there is nothing
            return 1 + len(new)
        case {"precompiled_charsmap": str(table)}:
            return 1 + _longest_replacement(table)
        case {"type": str(kind)}:
            return _GROWTH.get(kind, 1)
    return max(_GROWTH.values())  # the library knows some by their other keys


def _longest_replacement(table: str) -> int:
    """Return the length of the longest replacement in sentencepiece's table.

    It has the size of a trie in 4 bytes, the trie, and then the replacements, ended by NUL each.
    """
    try:
        content = base64.b64decode(table)
    except (binascii.Error, ValueError):  # the library refuses it
        return 0
    return max(map(len, content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")))


def _check_template(path: Path, step: dict[str, Any]) -> None:
    """Raise DataError for a post-processor that repeats the text, or puts ids without bound around it."""
    match step:
        case {"single": list(pieces), "special_tokens": dict(tokens)}:
            named = [tokens.get((piece.get("SpecialToken") or {}).get("id")) for piece in pieces]
            ids = sum(len(token["ids"]) for token in named if token)
            if sum("Sequence" in piece for piece in pieces) > 1 or ids > _MOST_ADDED_IDS:
                raise _refuse(path, "a post-processor that makes a text longer without bound")


def _refuse(path: Path, what: str) -> DataError:
    return DataError(f"{path}: found {what}; expected the tokenizer of a model, copy the file again")

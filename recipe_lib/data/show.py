"""Rows as a reader sees them: runs of text that are trained or not, special tokens told apart from text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recipe_lib.data.dataset import Dataset, Row
from recipe_lib.data.inspect import special_tokens
from recipe_lib.data.samples import TextTokenizer


@dataclass(frozen=True)
class Piece:
    """Neighboring tokens of one kind, as text."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class Shown:
    """A row with what is known about it. place: the file and line it came from, and which sequence of a conversation
    it is if that became several. tokens, trained: counts.

    answer: of a pair, whether it is the `chosen` or the `rejected` one; else empty."""

    number: int
    place: str
    answer: str
    tokens: int
    trained: int
    pieces: list[Piece]


def show_item(dataset: Dataset, item: int, tokenizer: TextTokenizer) -> list[Shown]:
    """The rows of an item: one, or a pair's chosen and rejected answer."""
    rows = range(item * dataset.group, (item + 1) * dataset.group)
    return [
        Shown(
            number=row,
            place=_place(dataset, item),
            answer=("chosen", "rejected")[row % 2] if dataset.group == 2 else "",
            tokens=int(dataset.lengths[row]),
            trained=dataset.trained_tokens(row),
            pieces=list(pieces_of(dataset[row], tokenizer)),
        )
        for row in rows
    ]


def _place(dataset: Dataset, item: int) -> str:
    number, count = dataset.sequence_of(item) if dataset.report.split_sequences else (1, 1)
    return dataset.place(item) + (f", sequence {number} of {count}" if count > 1 else "")


def pieces_of(row: Row, tokenizer: TextTokenizer) -> Iterator[Piece]:
    """The text of a row, in order: all tokens, and the last target if it is trained.

    A target is trained if the loss counts it; the first token is never one. Ids of one kind are decoded together, so
    that a letter of several tokens comes out whole.
    """
    targets = row.labels >= 0
    ids = np.append(row.tokens, row.labels[-1:][targets[-1:]])
    trained = np.append(False, targets)[: len(ids)]
    special = np.isin(ids, list(special_tokens(tokenizer)))
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (trained[end], special[end]) != (trained[start], special[start]):
            text = _decode(ids[start:end].tolist(), tokenizer)
            yield Piece(text, bool(trained[start]), bool(special[start]))
            start = end


def _decode(ids: Sequence[int], tokenizer: TextTokenizer) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

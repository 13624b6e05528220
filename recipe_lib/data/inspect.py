"""One look over all rows of a run: what is there, and what is wrong with it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe_lib.data.dataset import Dataset, Row, copies, overlap
from recipe_lib.data.packing import pack
from recipe_lib.data.samples import TextTokenizer

SHOWN = 5  # places that a finding names


@dataclass(frozen=True)
class Finding:
    """Something wrong. name: what `--allow` of `tune data check` takes. rows: how many. places: of the first."""

    name: str
    line: str
    rows: int
    places: Sequence[str] = ()


@dataclass
class Inspection:
    """numbers: what was counted, by name, as JSON values. histogram: (shortest, longest, rows). findings: faults."""

    numbers: dict[str, Any]
    histogram: list[tuple[int, int, int]]
    findings: list[Finding] = field(default_factory=list)


def inspect(
    rows: Dataset, validation: Dataset | None, max_seq_len: int, untrained_tokens: Sequence[str] | None
) -> Inspection:
    """Counts and findings over the training rows, and over those of the validation where both matter.

    untrained_tokens: special tokens in the rows whose embedding was never trained; None: there is no checkpoint.
    """
    report = rows.report
    room = max_seq_len * rows.group  # a pair may fill two rows, and its pack is so long
    packs = len(pack(rows.item_lengths, room))
    numbers = {
        "rows_read": report.rows_read,
        "rows": len(rows),
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "trained_share": report.trained_share,
        "bad_rows": sum(report.bad_rows.values()),
        "bad_rows_by_cause": dict(report.bad_rows),
        "truncated_rows": report.truncated_rows,
        "skipped_long_rows": report.skipped_long_rows,
        "lost_answer_tokens": report.lost_answer_tokens,
        "rows_without_answer_left": report.emptied_rows,
        "untrained_ends": report.untrained_ends,
        "split_rows": report.split_rows,
        "split_sequences": report.split_sequences,
        "split_tokens": report.split_tokens,
        "unsplit_tokens": report.unsplit_tokens,
        "marked_answers": report.marked_answers,
        "marks_with_space_behind": report.marks_behind,
        "marks_differing": report.marks_differing,
        "rows_with_unseen_messages": report.unseen_rows,
        "shortest_row": int(rows.lengths.min()),
        "median_row": int(np.median(rows.lengths)),
        "longest_row": int(rows.lengths.max()),
        "packs": packs,
        "pack_length": room,
        "packing_efficiency": float(rows.item_lengths.sum()) / (packs * room),
        "validation_rows": len(validation) if validation is not None else 0,
    }
    repeats, earlier = copies(rows.digests)
    shared = overlap(rows, validation) if validation is not None else np.array([], dtype=np.int64)
    numbers |= {"duplicate_rows": len(repeats), "overlapping_rows": len(shared)}
    if untrained_tokens is not None:
        numbers["untrained_tokens"] = list(untrained_tokens)
    findings = [
        *_row_findings(rows, max_seq_len),
        *_copy_findings(rows, validation, repeats, earlier, shared),
        *_token_findings(untrained_tokens or ()),
    ]
    return Inspection(numbers, histogram(rows.lengths, max_seq_len), findings)


def histogram(lengths: np.ndarray, max_seq_len: int) -> list[tuple[int, int, int]]:
    """Rows by length: (shortest, longest, rows) of bins that double in width, the last one up to max_seq_len."""
    bins, low = [], 1
    while low <= max_seq_len:
        high = min(2 * low - 1 if low >= 16 else 15, max_seq_len)
        bins.append((low, high, int(((lengths >= low) & (lengths <= high)).sum())))
        low = high + 1
    used = [at for at, (_, _, count) in enumerate(bins) if count]
    return bins[used[0] : used[-1] + 1] if used else []


def _row_findings(rows: Dataset, max_seq_len: int) -> Iterable[Finding]:
    report, unit = rows.report, rows.report.unit
    for cause, count in report.bad_rows.most_common():
        yield Finding("bad-rows", f"{count} bad rows: {cause}", count, [report.first_bad[cause]])
    lost = report.lost_answer_tokens
    if lost:
        share = lost / max(1, report.trained_tokens + lost)
        long = report.truncated_rows + report.skipped_long_rows
        yield Finding(
            "truncation",
            f"{long} {unit} exceed {max_seq_len} tokens; {lost} answer tokens ({share:.1%}) are lost",
            long,
        )
    if report.emptied_rows:
        line = f"{report.emptied_rows} {unit} are left out because their whole answer is behind {max_seq_len} tokens"
        yield Finding("no-answer-left", line, report.emptied_rows)
    if report.untrained_ends:
        line = f"{report.untrained_ends} answers end without a trained end-of-turn token: nothing teaches to stop there"
        yield Finding("untrained-ends", line, report.untrained_ends)
    if report.marks_differing:
        line = f"in {report.marks_differing} answers the chat template marks something else than what is generated"
        yield Finding("generation-marks", line, report.marks_differing, [report.first_mark])
    if report.unseen_rows:
        line = f"in {report.unseen_rows} rows the chat template leaves out a system's or user's message"
        yield Finding("unseen-messages", line, report.unseen_rows)
    for part in report.parts or [report]:
        fault = part.share_fault()
        if fault:
            yield Finding("trained-share", f"{part.source}: {fault}", part.rows)


def _copy_findings(
    rows: Dataset, validation: Dataset | None, repeats: np.ndarray, earlier: np.ndarray, shared: np.ndarray
) -> Iterable[Finding]:
    unit = rows.report.unit
    if len(repeats):
        pairs = zip(repeats[:SHOWN].tolist(), earlier[:SHOWN].tolist(), strict=True)
        places = [f"{rows.place(item)} is {rows.place(first)}" for item, first in pairs]
        yield Finding("duplicates", f"{len(repeats)} {unit} repeat an earlier one", len(repeats), places)
    if len(shared) and validation is not None:
        places = [validation.place(item) for item in shared[:SHOWN].tolist()]
        line = f"{len(shared)} validation {validation.report.unit} are training {unit} as well"
        yield Finding("overlap", line, len(shared), places)


def _token_findings(untrained: Sequence[str]) -> Iterable[Finding]:
    if untrained:
        names = ", ".join(untrained[:SHOWN]) + (", ..." if len(untrained) > SHOWN else "")
        line = f"the rows use {names}, whose embeddings the checkpoint has never trained; train the embedding as well"
        yield Finding("untrained-tokens", line, 0)


def special_tokens(tokenizer: TextTokenizer) -> dict[int, str]:
    """The special tokens: id -> text."""
    texts = tokenizer.special_texts
    return {ids[0]: text for ids, text in zip(tokenizer.encode_pieces(texts), texts, strict=True) if len(ids) == 1}


def ids_used(*datasets: Dataset | None) -> set[int]:
    """Every id that stands in the rows."""
    return {number for rows in datasets if rows is not None for number in np.unique(rows.ids).tolist()}


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

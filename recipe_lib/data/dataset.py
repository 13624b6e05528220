"""A dataset as compact arrays of tokens and labels, with a report of what was read and left out."""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe_lib.config.registry import registered
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.report import DataReport
from recipe_lib.data.samples import Conversation, Document, RowFault, Sample, TextTokenizer
from recipe_lib.data.sources import Located, read_rows
from recipe_lib.data.templates import Encoded, Encoder
from recipe_lib.errors import DataError
from recipe_lib.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class Row:
    """tokens, labels: int32, equally long, at most max_seq_len; labels[i] is the target of tokens[i] or -100."""

    tokens: np.ndarray
    labels: np.ndarray


class Dataset:
    """Rows in three arrays: all ids, where each row begins, and which ids the loss counts as targets.

    A row keeps one id more than it has tokens, because its last id is only a target. lengths, trained_counts: int64
    `[rows]`, tokens and trained targets of each row. fingerprint: SHA-256 of rows and settings, in hex.
    """

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        trained: np.ndarray,
        report: DataReport,
        settings: Mapping[str, Any],
    ) -> None:
        """ids: int32 `[n]`; offsets: int64 `[rows + 1]`; trained: uint8 `[n]`. settings: enter the fingerprint."""
        self._ids, self._offsets, self._trained = ids, offsets, trained
        self.report = report
        self.lengths = np.diff(offsets) - 1
        self.trained_counts = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for part, kind in ((ids, "<i4"), (offsets, "<i8"), (trained, "u1")):
            digest.update(np.ascontiguousarray(part, dtype=kind).data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        ids = self._ids[start:end]
        labels = np.where(self._trained[start + 1 : end], ids[1:], np.int32(IGNORED))
        return Row(ids[:-1], labels)

    def trained_tokens(self, number: int) -> int:
        """How many targets of a row the loss counts."""
        return int(self.trained_counts[number])

    @property
    def largest_id(self) -> int:
        """The largest id in any row."""
        return int(self._ids.max())


def build_dataset(
    cfg: DataConfig,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    *,
    source: str | None = None,
    format: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Reads and encodes all rows.

    source, format: in place of those in `cfg` (for validation; then `max_rows` holds, not `cfg.max_rows`).
    Raises DataError: nothing there, a bad or too long row where those are errors, no row that trains anything.
    """
    if source is None:
        source, max_rows = cfg.source, cfg.max_rows
    if source is None:
        raise DataError("data.source: is not set; set it to a file or folder of rows, or to hub:OWNER/NAME")
    return _Builder(cfg, tokenizer, max_seq_len, source, format or cfg.format, max_rows).build()


def build_validation_dataset(cfg: FullFinetuneConfig, tokenizer: TextTokenizer) -> Dataset | None:
    """The rows of `validation.source`; None: no validation."""
    if cfg.validation.source is None:
        return None
    return build_dataset(
        cfg.data,
        tokenizer,
        cfg.max_seq_len,
        source=cfg.validation.source,
        format=cfg.validation.format,
        max_rows=cfg.validation.max_rows,
    )


class _Builder:
    """One pass over a source."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: TextTokenizer,
        max_seq_len: int,
        source: str,
        format: str,
        max_rows: int | None,
    ) -> None:
        self.cfg, self.tokenizer, self.max_seq_len = cfg, tokenizer, max_seq_len
        self.source, self.format, self.max_rows = source, format, max_rows
        self.read = registered("data.format", format)
        self.required = tuple(getattr(self.read, "required", ()))
        known = (*self.required, *getattr(self.read, "optional", ()))
        for name in cfg.columns:
            if known and name not in known:
                raise DataError(
                    f"data.columns.{name}: the format {format} has no such column, expected one of {', '.join(known)}"
                    f"{did_you_mean(name, known)}"
                )
        self.encoder = Encoder(tokenizer, cfg.template, cfg.train_on, cfg.add_bos)
        self.report = DataReport(
            source,
            format,
            max_seq_len,
            train_on=cfg.train_on,
            adds_bos=self.encoder.add_bos,
        )
        self.ids, self.trained, self.offsets = array("i"), bytearray(), array("q", [0])

    def build(self) -> Dataset:
        for place, sample in self._samples():
            try:
                self._add(place, sample)
            except RowFault as fault:
                self._bad(place, fault)
        report = self.report
        report.rows, report.tokens = len(self.offsets) - 1, len(self.ids) - len(self.offsets) + 1
        report.trained_tokens = self.trained.count(1)
        if not report.rows:
            raise DataError(self._nothing_left())
        return Dataset(
            np.frombuffer(self.ids, dtype=np.int32),
            np.frombuffer(self.offsets, dtype=np.int64),
            np.frombuffer(self.trained, dtype=np.uint8),
            report,
            self._settings(),
        )

    def _samples(self) -> Iterator[tuple[str, Sample]]:
        for place, row in self._limited():
            self.report.rows_read += 1
            try:
                if isinstance(row, RowFault):
                    raise row
                yield place, self.read(self._renamed(row, place))
            except RowFault as fault:
                self._bad(place, fault)

    def _limited(self) -> Iterator[Located]:
        for number, located in enumerate(read_rows(self.source, self.cfg.split)):
            if self.max_rows is not None and number >= self.max_rows:
                return
            yield located

    def _renamed(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The row under the names that the format knows. Raises RowFault for a column that is not there."""
        renamed = dict(row)
        for name, own in self.cfg.columns.items():
            if own in row:
                renamed[name] = row[own]
        missing = [name for name in self.required if self.cfg.columns.get(name, name) not in row]
        if missing:
            if place.endswith(".txt"):
                raise DataError(
                    f"{place}: found a text file, expected .json or .jsonl for the format {self.format}; "
                    "set data.format to text to train on the text itself"
                )
            wanted = ", ".join(self.cfg.columns.get(name, name) for name in missing)
            found = ", ".join(sorted(map(str, row))[:12]) or "none"
            raise RowFault(
                f"no column {wanted}",
                f"found the columns {found}, expected {wanted} (format {self.format}); "
                f"name yours with data.columns.{missing[0]}=NAME",
            )
        return renamed

    def _bad(self, place: str, fault: RowFault) -> None:
        if self.cfg.bad_rows == "error":
            raise DataError(f"{place}: {fault}; correct the row, or set data.bad_rows to skip") from None
        self.report.bad_rows[fault.cause] += 1
        self.report.first_bad.setdefault(fault.cause, f"{place}: {fault}")

    def _add(self, place: str, sample: Sample) -> None:
        if isinstance(sample, Document):
            self._add_document(sample.text)
            return
        if isinstance(sample, Conversation):
            self.report.template = self.encoder.template
        encoded = self.encoder.encode(sample)
        self.report.apart_rows += encoded.apart
        room = self.max_seq_len + 1
        if len(encoded.ids) > room:
            if self.cfg.long_rows == "error":
                raise DataError(
                    f"{place}: found {len(encoded.ids) - 1} tokens, expected at most max_seq_len={self.max_seq_len}; "
                    "raise max_seq_len, or set data.long_rows to truncate or skip"
                )
            if not self._shorten(encoded, room):
                return
        self._append(encoded.ids[:room], encoded.trained[:room])

    def _shorten(self, encoded: Encoded, room: int) -> bool:
        """Counts a row over the limit; true if what is left of it is to be kept."""
        report, kept = self.report, sum(encoded.trained[:room])
        keeps = self.cfg.long_rows == "truncate"
        report.truncated_rows += keeps
        report.skipped_long_rows += not keeps
        report.emptied_rows += keeps and kept == 0
        report.long_answer_tokens += sum(encoded.trained)
        report.lost_answer_tokens += sum(encoded.trained) - (kept if keeps else 0)
        return keeps and kept > 0

    def _add_document(self, text: str) -> None:
        """Cuts a text into rows of max_seq_len + 1 ids; the rest is dropped unless there is nothing else."""
        ids = self.tokenizer.encode(text, add_bos=self.encoder.add_bos)
        if len(ids) < 2:
            raise RowFault("nothing to predict", f"found a text of {len(ids)} tokens, expected at least 2")
        self.report.texts += 1
        room = self.max_seq_len + 1
        for start in range(0, len(ids), room):
            piece = ids[start : start + room]
            if len(piece) < room and start > 0:
                self.report.dropped_pieces += 1
                self.report.dropped_tokens += len(piece)
                return
            self._append(piece, [False] + [True] * (len(piece) - 1))

    def _append(self, ids: list[int], trained: list[bool]) -> None:
        self.ids.extend(ids)
        self.trained.extend(trained)
        self.offsets.append(len(self.ids))

    def _nothing_left(self) -> str:
        report = self.report
        if not report.rows_read:
            return f"{self.source}: found no rows, expected at least one"
        reasons = []
        if report.bad_rows:
            reasons.append(f"{sum(report.bad_rows.values())} bad ({next(iter(report.first_bad.values()))})")
        if report.emptied_rows:
            reasons.append(f"{report.emptied_rows} with the whole answer behind max_seq_len={self.max_seq_len}")
        if report.skipped_long_rows:
            reasons.append(f"{report.skipped_long_rows} longer than max_seq_len={self.max_seq_len}")
        remedy = "raise max_seq_len" if report.emptied_rows or report.skipped_long_rows else "correct the rows"
        return f"{self.source}: found no row to train on among {report.rows_read}: {', '.join(reasons)}; {remedy}"

    def _settings(self) -> dict[str, Any]:
        cfg = self.cfg
        return {
            "format": self.format,
            "template": self.report.template,
            "train_on": cfg.train_on,
            "add_bos": self.encoder.add_bos,
            "max_seq_len": self.max_seq_len,
            "max_rows": self.max_rows,
            "long_rows": cfg.long_rows,
            "vocab_size": self.tokenizer.vocab_size,
        }

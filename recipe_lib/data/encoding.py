"""Turn a run of samples into tokens and labels, as the work of one tokenizing process.

A DatasetBuilder makes a `SourceEncoder` for each source of the config and calls its `encode` for
runs of samples, one `Task` each. It reads each row of a file in the source's format, has it
encoded, cuts what is too long, and returns a `Chunk` with a report, which counts what became of the
samples. A SampleFault makes one sample a bad one; a UserError ends the reading.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipe_lib.config import DataConfig, SourceConfig, get_registered
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.dataset import compute_digest
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.find_format import find_fitting_formats
from recipe_lib.data.label_masks import Encoded, Encoder
from recipe_lib.data.samples import (
    Classified,
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Preference,
    RenamedSample,
    Sample,
    SampleFault,
    find_columns,
    format_overrides,
    get_columns_section,
    list_conversations,
    prefix_place,
)
from recipe_lib.data.sources import SampleFile
from recipe_lib.data.trained_spans import pick_trained
from recipe_lib.data.unread_names import UnreadNames, collect_texts
from recipe_lib.errors import DataError, UserError

# Control characters but tab, line feed and carriage return. Text with LaTeX has them by mistake:
# JSON reads the beginning of `\boxed` as its escape `\b`, a backspace.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Task(NamedTuple):
    """A piece of work: the samples start .. stop (exclusive) of a file."""

    source: int  # index of the source in the config
    file: int  # index of the file among the files of all sources
    start: int  # index of the first sample in the file
    stop: int | None  # None: the samples cannot be counted; reading the file raises the reason


@dataclass
class Chunk:
    """A run of samples in tokens.

    An item is a sequence, or a pair of two (a chosen and a rejected answer).
    """

    report: DataReport  # counts of what became of the samples
    ids: array = field(default_factory=lambda: array("i"))  # int32, of all sequences in order
    # 0 or 1 for each id: whether the loss counts it as a target
    trained: bytearray = field(default_factory=bytearray)
    lengths: array = field(default_factory=lambda: array("q"))  # int64, ids of each sequence
    # int64, for each item the index of its sample in the file
    sample_of: array = field(default_factory=lambda: array("q"))
    # uint64 for each item, equal for items with the same ids and flags (`compute_digest`)
    digests: array = field(default_factory=lambda: array("Q"))
    # fp64 for each item: a pair's margin, a class' index in `classes`, or 1 for a desirable answer
    values: array = field(default_factory=lambda: array("d"))
    classes: list[str] = field(default_factory=list)  # names of classes, in the order of first use
    # The error that ended the reading; nothing is trained then. None: all samples were read
    fault: UserError | None = None

    def append(
        self, sample_index: int, *encoded: tuple[Sequence[int], Sequence[bool]], value: float = 0.0
    ) -> None:
        """Add an item of one sequence, or of two that stay together.

        sample_index: in the file. encoded: (ids, trained flags) of each sequence. value: its
        entry in `values`.
        """
        ids = array("i")
        trained = bytearray()
        for sequence_ids, sequence_trained in encoded:
            ids.extend(sequence_ids)
            trained.extend(sequence_trained)
            self.lengths.append(len(sequence_ids))
        self.ids.extend(ids)
        self.trained.extend(trained)
        self.sample_of.append(sample_index)
        self.values.append(value)
        self.digests.append(compute_digest(ids.tobytes(), bytes(trained)))


class SourceEncoder:
    """An encoder of the samples of one source, which reads them in the source's format."""

    def __init__(
        self,
        cfg: DataConfig,
        source: SourceConfig,
        encoder: Encoder,
        max_seq_len: int,
        section: str = "data",
    ) -> None:
        """Look up the source's format.

        encoder: of all sources, for the tokenizer and the chat template. max_seq_len: tokens that a
        sequence has at most. section: the section of the config that names the source, for error
        lines. Raises DataError for columns that the format does not know.
        """
        self.cfg = cfg
        self.source = source
        self.encoder = encoder
        self.max_seq_len = max_seq_len
        self.section = section
        self.format = source.format or cfg.format
        self.columns = source.columns or {}  # the format's name of a column -> the file's
        self.read = get_registered("data.format", self.format)  # a function from a row to a sample
        self.unread = UnreadNames(self.format, cfg.ignore_columns, encoder.fields)
        self.names = find_columns(self.format)  # the columns that the format reads
        known = self.names.known
        for name in self.columns:
            if known and name not in known:
                raise DataError(
                    f"{get_columns_section(section)}.columns.{name}: the format {self.format} has"
                    f" no such column, expected one of {', '.join(known)}"
                    f"{did_you_mean(name, known)}"
                )

    def build_report(self) -> DataReport:
        cfg = self.cfg
        encoder = self.encoder
        return DataReport(
            self.source.source,
            self.format,
            self.max_seq_len,
            train_on=cfg.train_on,
            adds_bos=encoder.add_bos,
            history=encoder.history,
            falls_back=cfg.template == "auto" and encoder.template == "plain",
            lacks_eos=cfg.add_eos and encoder.tokenizer.eos_id is None,
            ignored=[] if self.section == "validation" else list(cfg.ignore_columns),
        )

    def encode(self, file: SampleFile, start: int, stop: int | None) -> Chunk:
        """Encode the samples start .. stop (exclusive) of a file.

        stop: None reads to the end. No UserError is raised: the one that ends the reading is the
        chunk's `fault`, so that the samples before it are still reported.
        """
        chunk = Chunk(self.build_report())
        try:
            if start == 0:
                chunk.report.add_idle(self.unread.find_beside(file.keys_beside, file.place), "")
            for sample_index, (place, sample) in enumerate(file.read(start, stop), start):
                chunk.report.samples_read += 1
                try:
                    if isinstance(sample, SampleFault):
                        raise sample
                    self._read(chunk, sample_index, place=place, row=sample)
                except SampleFault as fault:
                    # Drop the counts of special tokens, as the sample is left out.
                    self.encoder.special.take()
                    chunk.report.add_bad(fault.cause, prefix_place(place, fault))
        except UserError as error:
            chunk.fault = error
        chunk.report.sequences = len(chunk.lengths)
        chunk.report.tokens = len(chunk.ids) - len(chunk.lengths)  # a last id is only a target
        chunk.report.trained_tokens = chunk.trained.count(1)
        return chunk

    def _read(self, chunk: Chunk, sample_index: int, place: str, row: Mapping[str, Any]) -> None:
        """Add the items of a row to the chunk, and count its columns and keys that are not read.

        sample_index: of the row in the file. place: its file and line. Raises SampleFault for a row
        that cannot be used.
        """
        row, left_out = self.unread.leave_out(row)
        renamed = self._rename_columns(row, place)
        self.unread.tidy_columns(renamed)
        sample = self.read(renamed)
        texts = collect_texts(sample)
        idle_names = self.unread.find(renamed, sample, texts)
        self._add(chunk, sample_index, place=place, sample=sample)
        chunk.report.add_idle(
            (*left_out, *idle_names), place if any(map(_CONTROL.search, texts)) else ""
        )

    def _rename_columns(self, sample: Mapping[str, Any], place: str) -> RenamedSample:
        """Return the sample with its columns under the names that the format knows.

        Raises SampleFault for a missing column, DataError for a text file in a format of columns.
        """
        missing = [
            name
            for name in self.names.required
            if sample.keys().isdisjoint(self.names.list_spellings(name, self.columns))
        ]
        if missing:
            if place.endswith(".txt"):
                raise DataError(
                    f"{place}: found a text file, expected .json or .jsonl for the format"
                    f" {self.format}; set {self.section}.format to text to train on the text itself"
                )
            expected = ", ".join(self.columns.get(name, name) for name in missing)
            found_names = ", ".join(sorted(map(str, sample))[:12]) or "none"
            (override,) = format_overrides(get_columns_section(self.section), {missing[0]: "NAME"})
            remedy = f"name yours with {override}"
            if formats := find_fitting_formats(sample, self.columns):  # none of the labeled formats
                remedy = (
                    f"these are of the format {formats[0]}: set {self.section}.format={formats[0]}"
                )
            raise SampleFault(
                f"no column {expected}",
                f"found the columns {found_names}, expected {expected} (format {self.format});"
                f" {remedy}",
            )
        return RenamedSample(
            sample,
            self.columns,
            section=get_columns_section(self.section),
            required=self.names.required,
        )

    def _add(self, chunk: Chunk, sample_index: int, place: str, sample: Sample) -> None:
        """Add the items of a sample to the chunk, and count them in its report."""
        report = chunk.report
        if isinstance(sample, Document):
            self._add_document(chunk, sample_index, sample.text)
            report.special.note(place, self.encoder.special.take())
            return
        items = self._encode_items(report, place, sample)
        spelled = self.encoder.special.take()
        report.special.note(place, spelled)
        report.preferences += isinstance(sample, Preference)
        report.margins += isinstance(sample, Preference) and sample.margin != 0
        if list_conversations(sample) and not spelled.rendered:
            report.template = self.encoder.template
            report.chats += 1
        report.apart_samples += any(encoded.in_pieces for item in items for encoded in item)
        report.unseen_samples += any(encoded.left_out for item in items for encoded in item)
        report.labels += isinstance(sample, LabeledAnswer)
        report.classified += isinstance(sample, Classified)
        for item in items:
            item = self._truncate_item(report, place, item)
            if item:
                report.pairs += len(item) == 2
                if isinstance(sample, Classified):  # read as a whole, as a text is
                    report.text_tokens += len(item[0].ids) - 1
                report.untrained_ends += sum(encoded.untrained_ends for encoded in item)
                report.prompt_tokens += sum(map(self._count_prompt_tokens, item))
                sequences = ((encoded.ids, encoded.trained) for encoded in item)
                chunk.append(sample_index, *sequences, value=_get_item_value(sample, chunk.classes))

    def _encode_items(
        self,
        report: DataReport,
        place: str,
        sample: Conversation | Completion | Preference | LabeledAnswer | Classified,
    ) -> list[tuple[Encoded, ...]]:
        """Return the items of a sample: for a pair one item of two sequences.

        For any other sample each sequence is an item.
        """
        if isinstance(sample, Preference | LabeledAnswer):
            return [self.encoder.encode_answers(sample)]
        if isinstance(sample, Classified):
            return [(self.encoder.encode_whole(sample.content),)]
        encoded_sample = self.encoder.encode_sample(sample)
        if isinstance(sample, Conversation) and self.cfg.train_on != "all":
            report.openings += sample.messages[0]["role"] == "assistant"
            picked = pick_trained(sample.messages, self.cfg.train_on, sample.places)
            report.endings += not picked[-1]
        if len(encoded_sample.sequences) > 1:
            report.split_samples += 1
            report.split_sequences += len(encoded_sample.sequences)
            report.split_tokens += sum(len(encoded.ids) - 1 for encoded in encoded_sample.sequences)
            report.unsplit_tokens += encoded_sample.whole_tokens - 1
        if encoded_sample.marked is not None:
            report.marked_answers += len(encoded_sample.marked.answers)
            report.marks_differing += len(encoded_sample.marked.differing)
            if encoded_sample.marked.differing and not report.first_mark:
                report.first_mark = prefix_place(place, encoded_sample.marked.differing[0])
        return [(encoded,) for encoded in encoded_sample.sequences]

    def _count_prompt_tokens(self, encoded: Encoded) -> int:
        """Return the number of tokens outside of the answers, BOS not counted."""
        # The first token is never trained, since nothing predicts it. It belongs to no prompt where
        # it is BOS, or the first of an answer.
        is_answer = bool(encoded.answers and encoded.answers[0][0] == 0)
        is_bos = encoded.ids[0] == self.encoder.tokenizer.bos_id
        return encoded.trained.count(False) - (is_answer or is_bos)

    def _truncate_item(
        self, report: DataReport, place: str, sequences: tuple[Encoded, ...]
    ) -> tuple[Encoded, ...]:
        """Return the sequences of an item cut to max_seq_len; none if no label token is left.

        Both sequences of a pair are left out if one has no label token left, or if they become
        equal. An item that needs no cut is returned as it is. Raises DataError for a longer one
        with `data.truncation: error`; `drop` leaves it out.
        """
        max_ids = self.max_seq_len + 1  # ids: the last one is only a target
        longest = max(len(encoded.ids) for encoded in sequences)
        if longest <= max_ids:
            return sequences
        policy = self.cfg.truncation
        if policy == "error":
            raise DataError(
                f"{place}: found {longest - 1} tokens, expected at most"
                f" max_seq_len={self.max_seq_len}; raise max_seq_len, or set data.truncation to"
                " truncate or drop"
            )
        cut_sequences = tuple(encoded.cut(max_ids) for encoded in sequences)
        is_lost = any(not any(encoded.trained) for encoded in cut_sequences) or (
            len(cut_sequences) == 2 and cut_sequences[0].ids == cut_sequences[1].ids
        )
        kept_sequences = () if policy == "drop" or is_lost else cut_sequences
        answer_tokens = sum(sum(encoded.trained) for encoded in sequences)
        report.truncated_sequences += policy == "truncate"
        report.skipped_long_sequences += policy == "drop"
        report.emptied_sequences += policy == "truncate" and is_lost
        report.long_answer_tokens += answer_tokens
        report.lost_answer_tokens += answer_tokens - sum(
            sum(encoded.trained) for encoded in kept_sequences
        )
        return kept_sequences

    def _add_document(self, chunk: Chunk, sample_index: int, text: str) -> None:
        """Add a text, cut into sequences of max_seq_len tokens; the last one may be shorter.

        Each begins with the last target of the one before, so that every id but the first is a
        target once. Raises SampleFault for a text of fewer than two ids.
        """
        report = chunk.report
        ids = self.encoder.encode_document(text)
        if len(ids) < 2:
            raise SampleFault(
                "nothing to predict", f"found a text of {len(ids)} tokens, expected at least 2"
            )
        report.texts += 1
        for start in range(0, len(ids) - 1, self.max_seq_len):
            piece = ids[start : start + self.max_seq_len + 1]
            report.text_tokens += len(piece) - 1
            chunk.append(sample_index, (piece, [False] + [True] * (len(piece) - 1)))


def _get_item_value(sample: Sample, classes: list[str]) -> float:
    """Return the item's entry in `Chunk.values`.

    classes: names of the classes so far; that of a new class is appended.
    """
    if isinstance(sample, Classified):
        if sample.label not in classes:
            classes.append(sample.label)
        return float(classes.index(sample.label))
    if isinstance(sample, LabeledAnswer):
        return float(sample.label)
    return sample.margin if isinstance(sample, Preference) else 0.0

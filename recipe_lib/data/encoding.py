"""Turns samples of a file into tokens and labels, a run of samples at a time: what a tokenizing
process does.
"""

import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any, NamedTuple

from recipe_lib.config.registry import get_registered
from recipe_lib.config.schema import DataConfig, SourceConfig
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.column_names import (
    MESSAGE_READ,
    RENDERED,
    UNWANTED,
    is_idle,
    is_idle_key,
    is_label,
    normalize_name,
    says_nothing,
    says_wanted,
    why_not_column,
    why_not_key,
)
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
    RawSample,
    RenamedSample,
    Sample,
    SampleFault,
    describe_kind,
    find_columns,
    format_overrides,
    format_path,
    get_columns_section,
    get_path,
    is_json_list,
    list_conversations,
    parse_column,
    prefix_place,
)
from recipe_lib.data.sources import SampleFile
from recipe_lib.data.thinking import THOUGHT_KEYS, TemplateFields
from recipe_lib.data.trained_spans import pick_trained
from recipe_lib.errors import DataError, UserError


class Task(NamedTuple):
    """Samples start .. stop (exclusive) of a file; stop None: the file cannot be counted, reading
    it says why.

    source, file: their numbers, that of the file among those of all sources.
    """

    source: int
    file: int
    start: int
    stop: int | None


@dataclass
class Chunk:
    """What a run of samples became. ids int32, trained uint8: of all its sequences in order.
    lengths: ids of each. sample_of, digests, values: of each item. classes: by number, the names of
    those whose numbers are values. fault: why the run stops here; what came before it counts for
    nothing then.
    """

    report: DataReport
    ids: array = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: array = field(default_factory=lambda: array("q"))
    sample_of: array = field(default_factory=lambda: array("q"))
    digests: array = field(default_factory=lambda: array("Q"))
    values: array = field(default_factory=lambda: array("d"))
    classes: list[str] = field(default_factory=list)
    fault: UserError | None = None

    def append(
        self, sample: int, *encoded: tuple[Sequence[int], Sequence[bool]], value: float = 0.0
    ) -> None:
        """Add an item of one sequence, or of two that stay together. sample: its number in the
        file. value: a margin, a class' number in `classes`, or 1 for an answer that is wanted.
        """
        ids, trained = array("i"), bytearray()
        for own_ids, own_trained in encoded:
            ids.extend(own_ids)
            trained.extend(own_trained)
            self.lengths.append(len(own_ids))
        self.ids.extend(ids)
        self.trained.extend(trained)
        self.sample_of.append(sample)
        self.values.append(value)
        self.digests.append(compute_digest(ids.tobytes(), bytes(trained)))


class SourceEncoder:
    """Encodes the samples of one source. section: the section of the config that names its format,
    for error lines.
    """

    def __init__(
        self,
        cfg: DataConfig,
        source: SourceConfig,
        encoder: Encoder,
        max_seq_len: int,
        section: str = "data",
    ) -> None:
        """Look up the source's format. Raises DataError for columns that the source's format does
        not know.
        """
        self.cfg, self.source, self.encoder, self.max_seq_len = cfg, source, encoder, max_seq_len
        self.section = section
        self.format, self.columns = source.format or cfg.format, source.columns or {}
        self.read = get_registered("data.format", self.format)
        self.unread = UnreadNames(self.format, cfg.ignore_columns, encoder.fields)
        self.names = find_columns(self.format)
        known = self.names.known
        for name in self.columns:
            if known and name not in known:
                raise DataError(
                    f"{get_columns_section(section)}.columns.{name}: the format {self.format} has no"
                    f" such column, expected one of {', '.join(known)}{did_you_mean(name, known)}"
                )

    def report(self) -> DataReport:
        """Return an empty report."""
        cfg, encoder = self.cfg, self.encoder
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
        """Return samples start .. stop (exclusive) of a file; a fault that ends the run is kept in
        the chunk.
        """
        chunk = Chunk(self.report())
        try:
            if start == 0:
                chunk.report.add_idle(self.unread.find_beside(file.keys_beside, file.place), "")
            for number, (place, sample) in enumerate(file.read(start, stop), start):
                chunk.report.samples_read += 1
                try:
                    if isinstance(sample, SampleFault):
                        raise sample
                    self._read(chunk, number, place, sample)
                except SampleFault as fault:
                    self.encoder.special.take()
                    chunk.report.add_bad(fault.cause, prefix_place(place, fault))
        except UserError as error:
            chunk.fault = error
        chunk.report.sequences = len(chunk.lengths)
        chunk.report.tokens = len(chunk.ids) - len(chunk.lengths)
        chunk.report.trained_tokens = chunk.trained.count(1)
        return chunk

    def _read(self, chunk: Chunk, number: int, place: str, row: Mapping[str, Any]) -> None:
        """Add what a row becomes, and count what it holds that nobody reads."""
        row, left_out = self.unread.leave_out(row)
        renamed = self._rename_columns(row, place)
        self.unread.tidy_columns(renamed)
        sample = self.read(renamed)
        texts = collect_texts(sample)
        idle_names = self.unread.find(renamed, sample, texts)
        self._add(chunk, number, place, sample)
        chunk.report.add_idle(
            (*left_out, *idle_names), place if any(map(_CONTROL.search, texts)) else ""
        )

    def _rename_columns(self, sample: Mapping[str, Any], place: str) -> RenamedSample:
        """Return the sample under the names that the format knows. Raises SampleFault for a missing
        column.
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
            found = ", ".join(sorted(map(str, sample))[:12]) or "none"
            (one,) = format_overrides(get_columns_section(self.section), {missing[0]: "NAME"})
            others = find_fitting_formats(sample, self.columns)  # of those without labels
            remedy = (
                f"these are of the format {others[0]}: set {self.section}.format={others[0]}"
                if others
                else ""
            )
            raise SampleFault(
                f"no column {expected}",
                f"found the columns {found}, expected {expected} (format {self.format}); "
                + (remedy or f"name yours with {one}"),
            )
        return RenamedSample(
            sample, self.columns, get_columns_section(self.section), self.names.required
        )

    def _add(self, chunk: Chunk, number: int, place: str, sample: Sample) -> None:
        """Add what a sample becomes, and count it."""
        report = chunk.report
        if isinstance(sample, Document):
            self._add_document(chunk, number, sample.text)
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
        report.apart_samples += any(encoded.apart for item in items for encoded in item)
        report.unseen_samples += any(encoded.left_out for item in items for encoded in item)
        report.labels += isinstance(sample, LabeledAnswer)
        report.classified += isinstance(sample, Classified)
        for item in items:
            kept = self._truncate_item(report, place, item)
            if kept:
                report.pairs += len(kept) == 2
                if isinstance(sample, Classified):  # read as a whole, as a text is
                    report.text_tokens += len(kept[0].ids) - 1
                report.untrained_ends += sum(encoded.untrained_ends for encoded in kept)
                report.prompt_tokens += sum(map(self._count_prompt_tokens, kept))
                sequences = ((encoded.ids, encoded.trained) for encoded in kept)
                chunk.append(number, *sequences, value=_get_item_value(sample, chunk.classes))

    def _encode_items(
        self,
        report: DataReport,
        place: str,
        sample: Conversation | Completion | Preference | LabeledAnswer | Classified,
    ) -> list[tuple[Encoded, ...]]:
        """Return what a sample becomes: a pair, or its sequences one by one."""
        if isinstance(sample, Preference | LabeledAnswer):
            return [self.encoder.encode_answers(sample)]
        if isinstance(sample, Classified):
            return [(self.encoder.encode_whole(sample.content),)]
        whole = self.encoder.encode_sample(sample)
        if isinstance(sample, Conversation) and self.cfg.train_on != "all":
            report.openings += sample.messages[0]["role"] == "assistant"
            report.endings += not pick_trained(sample.messages, self.cfg.train_on, sample.places)[
                -1
            ]
        if len(whole.sequences) > 1:
            report.split_samples += 1
            report.split_sequences += len(whole.sequences)
            report.split_tokens += sum(len(encoded.ids) - 1 for encoded in whole.sequences)
            report.unsplit_tokens += whole.whole_tokens - 1
        if whole.marked is not None:
            report.marked_answers += len(whole.marked.answers)
            report.marks_differing += len(whole.marked.differing)
            if whole.marked.differing and not report.first_mark:
                report.first_mark = prefix_place(place, whole.marked.differing[0])
        return [(encoded,) for encoded in whole.sequences]

    def _count_prompt_tokens(self, encoded: Encoded) -> int:
        """Return how many tokens are outside of the answers, BOS left out."""
        first_is_none = bool(encoded.answers and encoded.answers[0][0] == 0)
        first_is_none |= encoded.ids[0] == self.encoder.tokenizer.bos_id
        return encoded.trained.count(False) - first_is_none

    def _truncate_item(
        self, report: DataReport, place: str, sequences: tuple[Encoded, ...]
    ) -> tuple[Encoded, ...]:
        """Return the sequences of an item within the limit; none, if nothing is left to learn from
        it.

        A pair stays one: each of its answers is cut at the same place, and both are left out where
        one is lost, or where they become equal.
        """
        room = self.max_seq_len + 1
        longest = max(len(encoded.ids) for encoded in sequences)
        if longest <= room:
            return sequences
        policy = self.cfg.truncation
        if policy == "error":
            raise DataError(
                f"{place}: found {longest - 1} tokens, expected at most"
                f" max_seq_len={self.max_seq_len}; raise max_seq_len, or set data.truncation to"
                " truncate or drop"
            )
        cut = tuple(encoded.cut(room) for encoded in sequences)
        lost = any(not any(encoded.trained) for encoded in cut) or (
            len(cut) == 2 and cut[0].ids == cut[1].ids
        )
        kept = () if policy == "drop" or lost else cut
        answers = sum(sum(encoded.trained) for encoded in sequences)
        report.truncated_sequences += policy == "truncate"
        report.skipped_long_sequences += policy == "drop"
        report.emptied_sequences += policy == "truncate" and lost
        report.long_answer_tokens += answers
        report.lost_answer_tokens += answers - sum(sum(encoded.trained) for encoded in kept)
        return kept

    def _add_document(self, chunk: Chunk, number: int, text: str) -> None:
        """Cut a text into sequences of max_seq_len tokens, the last one of what is left.

        Each begins with the last target of the one before: every id but the first is a target once.
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
            chunk.append(number, (piece, [False] + [True] * (len(piece) - 1)))


def _get_item_value(sample: Sample, classes: list[str]) -> float:
    """Return the number that an item keeps. classes: names that have a number; a new one is
    added.
    """
    if isinstance(sample, Classified):
        if sample.label not in classes:
            classes.append(sample.label)
        return float(classes.index(sample.label))
    if isinstance(sample, LabeledAnswer):
        return float(sample.label)
    return sample.margin if isinstance(sample, Preference) else 0.0


# Finds columns of a row and keys of its messages that nobody reads: known to change nothing and
# counted, or a fault.
#
# `recipe_lib.data.samples` knows names. Where a name says nothing, a text that only repeats
# what is read of the same row changes nothing either.


_WORD = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)
# Control characters but tab, line feed and carriage return: a text may hold JSON's `\\b` of
# `\\boxed`.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TEXT_KEYS = frozenset(("content", *THOUGHT_KEYS))  # keys of a message whose values are its texts
_LABEL_KEYS = ("role", "from", "type")  # keys of a message whose texts say nothing of their own
_KEYS_BY_ROLE = {
    "assistant": THOUGHT_KEYS,
    "tool": ("tool_call_id",),
}  # keys that are read in one role alone


class UnreadNames:
    """Looks for what one source's rows hold beside what is read."""

    def __init__(self, form: str, ignored: Sequence[str], fields: TemplateFields) -> None:
        """Take what is known of all rows.

        form: the format's name; of one that does not say which columns it reads nothing is looked
        at. ignored: as data.ignore_columns has them.
        """
        columns = find_columns(form)
        self.known = frozenset(columns.known)
        self.ignored = tuple(ignored)
        self._ignored_keys = {name for name in ignored if name.startswith("messages.")}
        self._optional = frozenset(columns.optional)
        self._fields = fields
        self._not_read = f", which the format {form} does not read"
        self._column_by_alias = dict[str, str]()
        for column, aliases in columns.same.items():
            if column in self.known:
                self._column_by_alias |= {
                    alias: column for alias in aliases if alias not in self.known
                }

    def leave_out(self, row: RawSample) -> tuple[RawSample, list[str]]:
        """Return the row without what data.ignore_columns names, and the names of what was left
        out.
        """
        if not self.ignored:
            return row, []
        left_out = {name for name in self.ignored if name in row and not says_nothing(row[name])}
        row = {name: value for name, value in row.items() if name not in self.ignored}
        if self._ignored_keys:
            row = {name: self._leave_out_keys(value, left_out) for name, value in row.items()}
        return row, sorted(left_out)

    def _leave_out_keys(self, value: Any, left_out: set[str]) -> Any:
        """Return a column without the keys of its messages that data.ignore_columns names.

        left_out: they are added to it. A message is what says whose it is: a tool's description may
        have keys of the same names.
        """
        if is_json_list(value):
            try:
                messages = parse_column(value, "", "")
            except SampleFault:
                return value  # a text that begins with a bracket, or a fault that the format names
            kept = self._leave_out_keys(messages, left_out)
            return value if kept == messages else json.dumps(kept, ensure_ascii=False)
        if isinstance(value, list):
            return [self._leave_out_keys(item, left_out) for item in value]
        if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
            return value
        found = {
            name
            for name in self._ignored_keys
            if not says_nothing(value.get(name.removeprefix("messages.")))
        }
        left_out |= found
        return {key: inner for key, inner in value.items() if f"messages.{key}" not in found}

    def tidy_columns(self, row: RenamedSample) -> None:
        """Drop optional columns that say nothing, in place, and put columns of other names under
        the one that the format reads, where the row lacks that.
        """
        for name in self._optional & row.keys():
            if says_nothing(row[name]):
                del row[name]
        for alias in [name for name in self._column_by_alias if name in row]:
            column = self._column_by_alias[alias]
            value = row[alias]
            if says_nothing(value) or not says_nothing(row.get(column)):
                continue
            if column == "tools" and not (isinstance(value, list) or is_json_list(value)):
                continue  # as the name of the one function that was called
            row[column] = row.pop(alias)
            row.own = {**row.own, column: alias}

    def find(self, row: RenamedSample, sample: Sample, texts: Sequence[str]) -> list[str]:
        """Return the names of what the row holds that is known to change nothing; `messages.KEY` is
        that of messages' keys. texts: of the sample.

        Raises SampleFault for anything else that is not read.
        """
        if not self.known:
            return []
        idle_names = list[str]()
        faults = dict[str, str]()
        unread = [(name, value) for name, value in row.items() if name not in self.known]
        for name, value in (*unread, *row.hidden.items()):
            if says_nothing(value):
                continue
            why = self._why_not_idle(
                name=name, value=value, row=row, is_text=isinstance(sample, Document), texts=texts
            )
            if why:
                faults[name] = f"{format_path(name)}: found {why}"
            else:
                idle_names.append(name)
        if faults:
            raise self._build_fault(faults, self._suggest_columns(row, faults))
        if chats := list_conversations(sample):
            idle_names += self._find_keys(chats)
            idle_names += self._find_variables(chats[0].variables, row)
        return idle_names

    def find_beside(self, keys: Mapping[str, str], place: str) -> list[str]:
        """Return the names of what stands beside a file's samples, `file.KEY`, if all of it is
        known to change nothing.

        keys: as SampleFile.keys_beside. Raises DataError for anything else: no sample says it.
        """
        faults = {
            f"file.{key}": f"{format_path(key)}: found {kind}"
            for key, kind in keys.items()
            if kind and f"file.{key}" not in self.ignored
        }
        if faults:
            raise DataError(
                f"{place}: {'; '.join(faults.values())} beside the list of samples, which is not"
                " read; write it into each sample that it is meant for, or"
                f" {self._suggest_ignoring(faults)}"
            )
        return [f"file.{key}" for key in keys]

    def _why_not_idle(
        self, name: str, value: Any, row: RenamedSample, is_text: bool, texts: Sequence[str]
    ) -> str:
        """Return what a column holds that is not read; empty: it changes nothing."""
        column = self._column_by_alias.get(name)
        if column is not None and row.get(column) is not None:
            return (
                ""
                if row[column] == value
                else f"another {column} than the one in {get_path(row, column)}"
            )
        if why := why_not_column(name, value, is_text):
            return why
        word = normalize_name(name)
        if word in UNWANTED:
            chosen = row.get("chosen")
            return (
                ""
                if not says_nothing(chosen) and _repeats(chosen, texts)
                else "an answer that is not wanted"
            )
        if is_idle(name, value) or says_wanted(name, value) or isinstance(value, (date, time)):
            return ""
        if isinstance(value, str) and word in RENDERED:
            # A template may part what a format joins, as an instruction and its input.
            column_texts = [
                text for column in self.known if isinstance(text := row.get(column), str)
            ]
            if any(
                parts and all(text.strip() in value for text in parts)
                for parts in (texts, column_texts)
            ):
                return ""
        if _holds_text(value) and _repeats(value, texts):
            return ""
        return describe_kind(value) + self._not_read

    def _suggest_columns(self, row: RenamedSample, faults: Mapping[str, str]) -> str:
        """Return the remedy for columns that the format may know by another name; empty: there is
        none.
        """
        free_names = [name for name in sorted(self.known) if says_nothing(row.get(name))]
        if not free_names or not any(fault.endswith(self._not_read) for fault in faults.values()):
            return ""
        return f", or say with {row.section}.columns which of {', '.join(free_names)} it is"

    def _suggest_ignoring(self, names: Collection[str]) -> str:
        """Return the remedy for whatever changes nothing."""
        ignored = ",".join(
            name if _WORD.match(name) else json.dumps(name, ensure_ascii=False)
            for name in (*self.ignored, *names)
        )
        return (
            f"set data.ignore_columns=[{ignored}] if"
            f" {'it changes' if len(names) == 1 else 'they change'} nothing"
        )

    def _build_fault(self, faults: Mapping[str, str], other_remedy: str = "") -> SampleFault:
        """Return the fault of a row. faults: for each name what was found. other_remedy: the line's
        end.
        """
        return SampleFault(
            f"{', '.join(faults)} {'is' if len(faults) == 1 else 'are'} not read",
            f"{'; '.join(faults.values())}; {self._suggest_ignoring(faults)}{other_remedy}",
        )

    def _find_keys(self, chats: Sequence[Conversation]) -> list[str]:
        """Return what `find` does, of the messages' keys; those that data.ignore_columns names are
        taken out.
        """
        idle_names = list[str]()
        faults = dict[str, str]()
        for chat in chats:
            for number, message in enumerate(chat.messages):
                if message.keys() <= MESSAGE_READ:  # as nearly every message
                    continue
                role = message["role"]
                for key, value in [
                    (key, value) for key, value in message.items() if key not in MESSAGE_READ
                ]:
                    name = f"messages.{key}"
                    is_part = key.startswith(
                        ("content.", "tool_calls.")
                    )  # no key that a template may see
                    if is_part and isinstance(message, dict):
                        del message[key]  # the reader's own copy
                    elif key in _KEYS_BY_ROLE.get(role, ()) or self._fields.reads_key(
                        role, key, value
                    ):
                        continue
                    elif not is_idle_key(key, value):
                        why = (
                            why_not_key(key)
                            or f"{describe_kind(value)}, which the chat template does not read"
                        )
                        faults.setdefault(name, f"{chat.places.at(number, f'.{key}')}: found {why}")
                    idle_names.append(name)
        if faults:
            raise self._build_fault(faults)
        return idle_names

    def _find_variables(self, variables: Mapping[str, Any], row: RenamedSample) -> Iterator[str]:
        """Yield what `find` returns, of what the row gives the chat template besides messages and
        tools.
        """
        for name, value in variables.items():
            if says_nothing(value) or name in self._fields.names:
                continue
            column = "documents" if name == "documents" else "chat_template_kwargs"
            full_name = name if name == column else f"{column}.{name}"
            if full_name not in self.ignored and (name == column or not is_label(value)):
                fault = (
                    f"{get_path(row, column)}: found {name}, which the chat template does not read"
                )
                raise self._build_fault(
                    {full_name: fault}, ", or tokenizer.chat_template to one that does"
                )
            yield full_name


def collect_texts(sample: Sample) -> list[str]:
    """Return every text that is read of a sample, descriptions of tools left out."""
    content = sample.content if isinstance(sample, Classified) else sample
    if isinstance(content, Document):
        return [content.text]
    if isinstance(content, Completion):
        return [content.prompt, content.completion]
    texts = list[str]()
    for chat in list_conversations(sample):
        for message in chat.messages:
            texts += [
                text for key, text in message.items() if key in _TEXT_KEYS and isinstance(text, str)
            ]
    return texts


def _holds_text(value: Any) -> bool:
    """Return whether there is a text in a value, which numbers alone have none of."""
    if isinstance(value, dict):
        return any(map(_holds_text, value.values()))
    if isinstance(value, list):
        return any(map(_holds_text, value))
    return isinstance(value, str)


def _repeats(value: Any, texts: Sequence[str]) -> bool:
    """Return whether every text in a value stands in one of these."""
    if isinstance(value, str):
        stripped = value.strip()
        return any(stripped in text for text in texts)
    if isinstance(value, dict):
        return all(_repeats(inner, texts) for key, inner in value.items() if key not in _LABEL_KEYS)
    if isinstance(value, list):
        return all(_repeats(item, texts) for item in value)
    return not isinstance(value, bytes)

"""Report what became of the samples of a dataset, as counts and as lines for the log.

A SourceEncoder fills a `DataReport` for each run of samples that it tokenizes; a DatasetBuilder
adds them up by `add`, and the sum is stored with the dataset in the cache. `format_report_lines`
returns the log lines. An item is a sequence, or a pair of two (chosen and rejected). A label token
is a target that the loss counts. A bad sample is one that cannot be used.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from recipe_lib.data.escaping import SpecialCounts
from recipe_lib.errors import DataError
from recipe_lib.units import choose_lines, pluralize

MOST_BAD_LINES = 20  # bad samples that an error names one by one
PLACES = 5  # bad samples of each cause whose places are kept in any case


@dataclass
class DataReport:
    """Counts of one pass over a dataset.

    Tokens are counted as targets: a sequence of n + 1 ids has n. A pair is one sample and two
    sequences; a conversation that becomes n sequences is one sample and n sequences. The int fields
    but `max_seq_len` are summed by `add`.
    """

    source: str  # file, folder or hub name; of several, joined by commas
    format: str  # data.format; of several, joined by commas
    max_seq_len: int  # tokens
    template: str = "none"  # `chat` or `plain`, once that template has rendered a conversation
    train_on: str | list[str] = "assistant"  # data.train_on
    adds_bos: bool = False  # sequences begin with BOS where no chat template decides it
    history: str = "auto"  # data.history
    falls_back: bool = False  # the plain template is used because the tokenizer has none
    samples_read: int = 0  # bad ones included
    sequences: int = 0  # in the dataset; of a pair both
    pairs: int = 0  # in the dataset
    chats: int = 0  # samples that the template has rendered: conversations and preferences
    preferences: int = 0  # pairs that samples became, those left out as too long included
    labels: int = 0  # samples with a label desirable or undesirable
    classified: int = 0  # samples with a class
    classes: list[str] = field(default_factory=list)  # names of classes, by index
    tokens: int = 0  # targets of all sequences
    trained_tokens: int = 0  # tokens that the loss counts
    prompt_tokens: int = 0  # tokens that the loss does not count, without BOS
    bad_samples: Counter[str] = field(default_factory=Counter)  # cause -> bad samples
    # Cause -> place and detail of the first such sample
    first_bad: dict[str, str] = field(default_factory=dict)
    # (cause, place and detail) of the first bad samples, and of the first of each cause
    bad_lines: list[tuple[str, str]] = field(default_factory=list)
    truncated_sequences: int = 0  # items over max_seq_len, with data.truncation=truncate
    skipped_long_sequences: int = 0  # items over max_seq_len, left out with data.truncation=drop
    emptied_sequences: int = 0  # truncated items left out, because no answer token was left
    long_answer_tokens: int = 0  # label tokens of items over max_seq_len, before they are cut
    lost_answer_tokens: int = 0  # label tokens that were cut off
    untrained_ends: int = 0  # answers whose beginning is trained and whose end of turn is not
    margins: int = 0  # pairs with a margin other than 0: by how much the chosen answer is better
    texts: int = 0  # documents, which are cut into sequences
    text_tokens: int = 0  # tokens of sequences that are read or trained as a whole
    lacks_eos: bool = False  # texts should end with EOS, and the tokenizer has none
    # Special tokens that the samples spell out
    special: SpecialCounts = field(default_factory=SpecialCounts)
    # Samples encoded in pieces, as a token would reach over an answer's edge
    apart_samples: int = 0
    unseen_samples: int = 0  # samples with a system or user message that the template leaves out
    # Conversations with messages after the last trained one, which are in no sequence
    endings: int = 0
    openings: int = 0  # conversations that the assistant begins; that message is not trained
    split_samples: int = 0  # conversations that became several sequences
    split_sequences: int = 0  # the sequences that they became, before long ones are cut
    split_tokens: int = 0  # tokens of these sequences
    unsplit_tokens: int = 0  # tokens of the same conversations if each were one sequence
    marked_answers: int = 0  # answers that the template marks by `{% generation %}`
    marks_differing: int = 0  # of these, answers whose marks are not what generation would write
    first_mark: str = ""  # line about the first of the differing ones
    # Name of a column or key that is not read and changes nothing -> samples with it
    idle_names: Counter[str] = field(default_factory=Counter)
    ignored: list[str] = field(default_factory=list)  # data.ignore_columns
    control_characters: int = 0  # samples with a control character in a text
    first_control: str = ""  # place of the first such sample
    duplicate_sequences: int = 0  # items that repeat an earlier one, token by token; they are kept
    # [place of the item, place of the earlier one] of the first PLACES of these
    duplicates: list[list[str]] = field(default_factory=list)
    # A report for each source; empty: there is one source
    parts: list["DataReport"] = field(default_factory=list)

    @property
    def items_made(self) -> int:
        """Return the number of items that samples became, those left out as too long included."""
        return self.sequences - self.pairs + self.emptied_sequences + self.skipped_long_sequences

    @property
    def item_noun(self) -> str:
        return "pair" if self.preferences else "sequence"

    @property
    def label_token_fraction(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def add(self, other: "DataReport") -> None:
        """Add the counts of a pass over later samples."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.template == "none":
            self.template = other.template
        self.first_mark = self.first_mark or other.first_mark
        self.special.add(other.special)
        self.first_control = self.first_control or other.first_control
        self.idle_names.update(other.idle_names)
        self.bad_samples.update(other.bad_samples)
        self.first_bad = other.first_bad | self.first_bad
        for cause, line in other.bad_lines:
            self._keep_line(cause, line)

    def add_idle(self, names: Sequence[str], control: str) -> None:
        """Count the names in a sample that are not read and change nothing.

        control: the sample's place, if a text of it has a control character; else "".
        """
        if names:
            self.idle_names.update(set(names))
        self.control_characters += bool(control)
        self.first_control = self.first_control or control

    def add_bad(self, cause: str, line: str) -> None:
        """Count a bad sample. cause: a few words, to count by. line: its place, and the error."""
        self._keep_line(cause, line)
        self.bad_samples[cause] += 1
        self.first_bad.setdefault(cause, line)

    def _keep_line(self, cause: str, line: str) -> None:
        """Keep the line of a bad sample, if it is one of the first, or of the first of its cause.

        These are the first MOST_BAD_LINES of all, and the first PLACES of each cause.
        """
        if len(self.bad_lines) < MOST_BAD_LINES or len(self.list_places(cause)) < PLACES:
            self.bad_lines.append((cause, line))

    def list_places(self, cause: str) -> list[str]:
        """Return place and detail of the first bad samples of a cause, at most PLACES."""
        return [line for line_cause, line in self.bad_lines if line_cause == cause][:PLACES]

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            "bad_samples": dict(self.bad_samples),
            "idle_names": dict(self.idle_names),
            "special": vars(self.special),
            "parts": [part.to_json() for part in self.parts],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "DataReport":
        """Return the report from the JSON of `to_json`.

        Raises TypeError or KeyError for other JSON.
        """
        restored: dict[str, Any] = {
            "bad_samples": Counter(content["bad_samples"]),
            "bad_lines": [(cause, line) for cause, line in content["bad_lines"]],
            "idle_names": Counter(content["idle_names"]),
            "special": SpecialCounts.from_json(content["special"]),
            "parts": [DataReport.from_json(part) for part in content["parts"]],
        }
        return DataReport(**dict(content) | restored)

    def check_share(self) -> None:
        """Raise DataError if no token of a source, or every one, is a label token.

        Texts, and sources with data.train_on=all, are not checked.
        """
        faults = [
            f"{part.source}: {fault}, or set data.check_label_mask to false if it is meant"
            for part in self.parts or [self]
            if (fault := part.find_share_fault())
        ]
        if faults:
            raise DataError(*faults)

    def list_sample_faults(self) -> list[str]:
        """Return a line for each of the first bad samples, and one with the count of all."""
        lines = [line for _, line in self.bad_lines[:MOST_BAD_LINES]]
        bad = sum(self.bad_samples.values())
        if bad == 0:
            return []
        if bad == 1:
            return [f"{lines[0]}; correct the sample, or set data.on_invalid to skip"]
        if bad == self.samples_read and len(self.bad_samples) == 1:
            return [f"{lines[0]}; the other samples ({bad - 1}) have the same fault"]
        note = "" if bad == len(lines) else f", the first {len(lines)} of which stand above"
        return [
            *lines,
            (
                f"{self.source}: found {bad} samples of {self.samples_read} that cannot be"
                f" used{note}; correct them, or set data.on_invalid to skip (`tune data check`"
                " with the same config and overrides counts them by cause)"
            ),
        ]

    def why_nothing_left(self) -> str | None:
        """Return why no sequence is left of a source; None: there are some."""
        if self.sequences:
            return None
        if not self.samples_read:
            return f"{self.source}: found no samples, expected at least one"
        limit = f"max_seq_len={self.max_seq_len}"
        first_bad = next(iter(self.first_bad.values()), "")
        # Of (count, text) pairs `choose_lines` returns the texts whose count is not 0 or empty.
        reasons = choose_lines(
            (self.bad_samples, f"{sum(self.bad_samples.values())} bad ({first_bad})"),
            (
                self.emptied_sequences,
                f"{self.emptied_sequences} with the whole answer after {limit}",
            ),
            (self.skipped_long_sequences, f"{self.skipped_long_sequences} longer than {limit}"),
        )
        remedy = (
            "raise max_seq_len"
            if self.emptied_sequences or self.skipped_long_sequences
            else "correct the samples"
        )
        return (
            f"{self.source}: found no sample to train on among {self.samples_read}:"
            f" {', '.join(reasons)}; {remedy}"
        )

    def find_share_fault(self) -> str | None:
        """Return the error if all or none of a source's tokens are trained; None: some are.

        Texts are trained as a whole, so they are not counted; with data.train_on=all nothing is
        checked.
        """
        # Every token of a text is a label token.
        tokens = self.tokens - self.text_tokens
        trained = self.trained_tokens - self.text_tokens
        if self.train_on == "all" or not tokens or (trained and self.prompt_tokens):
            return None
        fault = "that every token is a label token" if trained else "no label token"
        expected = "prompts and answers" if trained else "answers"
        return (
            f"found {fault} in {pluralize(self.sequences, 'sequence')}, expected {expected};"
            " correct data.format, data.columns or data.train_on"
        )

    def describe_plain_template(self) -> str | None:
        """Return a warning if the plain template is used without being asked for; else None."""
        if self.template != "plain" or not self.falls_back:
            return None
        return (
            "warning: data.template: the tokenizer has no chat template, so that conversations are"
            " written in the built-in plain one (User:, Assistant:), which exports will carry; for"
            " chats begin with an instruct model, or set tokenizer.chat_template"
        )

    def format_lines(self, *, faults: bool = True) -> list[str]:
        """Return the report as log lines; those that begin with `warning:` are warnings.

        faults: include bad samples, and duplicates.
        """
        lines = [
            f"data: {self._describe_counts()} read from {self.source} (format {self.format},"
            f" template {self.template}), {self.tokens} tokens; label tokens:"
            f" {self._describe_label_tokens()}, {_format_percent(self.label_token_fraction)}"
        ]
        lines += [
            f"data: {part._describe_counts()} from {part.source} (format {part.format}),"
            f" {part.tokens} tokens, {_format_percent(part.label_token_fraction)} trained"
            for part in self.parts
        ]
        if self.sequences:
            lines.append(f"data: {self.describe_bos()}")
        lines += (
            self._describe_sequences()
            + self._describe_losses()
            + self.special.format_lines(self.chats)
            + self._describe_oddities()
        )
        return lines + self._describe_bad_samples() if faults else lines

    def _describe_counts(self) -> str:
        kind = (
            pluralize(self.pairs, "pair")
            if self.preferences
            else pluralize(self.sequences, "sequence")
        )
        if self.texts and not self._others:
            return f"{kind} cut from {pluralize(self.texts, 'text')}"
        texts = (
            f", {self.texts} of them {'a text' if self.texts == 1 else 'texts'},"
            if self.texts
            else ""
        )
        if self.split_sequences:
            return f"{kind} from the {self.samples_read} samples{texts}"
        return f"{kind} of {pluralize(self.samples_read, 'sample')}{texts}"

    @property
    def _others(self) -> int:
        """Return the number of usable samples that are no texts, which are cut into sequences."""
        return self.samples_read - sum(self.bad_samples.values()) - self.texts

    def _describe_label_tokens(self) -> str:
        if self.classified:
            return "whole texts, each of which has a class"
        if self.train_on == "all" or (self.texts and not self._others):
            return "all tokens"
        return (
            "answers incl. end-of-turn, and whole texts"
            if self.texts
            else "answers incl. end-of-turn"
        )

    def _describe_sequences(self) -> list[str]:
        """Return lines on conversations that were split, and on answers that the template marks."""
        why = (
            "as data.history says"
            if self.history == "split"
            else "because the chat template writes earlier turns anew"
        )
        cost = self.split_tokens / max(1, self.unsplit_tokens)
        return choose_lines(
            (
                self.split_samples,
                (
                    f"data: {self.split_samples} conversations became {self.split_sequences}"
                    f" sequences, {why}: each answer follows the prompt that generation is given;"
                    f" {self.split_tokens} tokens in place of {self.unsplit_tokens} ({cost:.2f}"
                    " times as many)"
                ),
            ),
            (
                self.marked_answers,
                (
                    f"data: of {self.marked_answers} answers the chat template itself says what is"
                    f" trained ({{% generation %}}); {self.marks_differing} of them are not what"
                    " generation is asked for"
                ),
            ),
            (self.first_mark, f"data: first that is not: {self.first_mark}"),
        )

    def _describe_losses(self) -> list[str]:
        """Return lines on items over max_seq_len and on answers without a trained end."""
        long = self.truncated_sequences + self.skipped_long_sequences
        share = self.lost_answer_tokens / max(1, self.long_answer_tokens)
        done = "truncated" if self.truncated_sequences else "left out"
        lost = f", {self.emptied_sequences} of them left out because no answer was left"
        empty = lost if self.emptied_sequences else ""
        items = pluralize(self.items_made, self.item_noun)
        long_share = _format_percent(long / max(1, self.items_made))
        return choose_lines(
            (
                long,
                (
                    f"{'warning: data' if share else 'data'}: {long} of {items} ({long_share})"
                    f" exceed {self.max_seq_len} tokens and were {done}{empty};"
                    f" {_format_percent(share)} of their answer tokens lost"
                ),
            ),
            (
                self.untrained_ends,
                (
                    f"warning: data: {self.untrained_ends} answers end without their end-of-turn"
                    " token, so nothing teaches the model to stop there (they were cut, or their"
                    " last token is none that generation stops at)"
                ),
            ),
        )

    def _describe_oddities(self) -> list[str]:
        """Return lines on what is unusual and no fault.

        They include columns that change nothing, and names in data.ignore_columns that no sample
        has.
        """
        idle_counts = ", ".join(
            f"{name} ({count})" for name, count in sorted(self.idle_names.items())
        )
        # The columns of bad samples are not counted, so with one a name may not be missing.
        missing = [
            name for name in self.ignored if name not in self.idle_names and not self.bad_samples
        ]
        return choose_lines(
            (
                self.texts and self.lacks_eos,
                (
                    "warning: data: the tokenizer has no EOS token, so that nothing says where a"
                    " text ends; set eos_token in tokenizer_config.json, or data.add_eos=false"
                ),
            ),
            (
                self.openings,
                (
                    f"data: in {pluralize(self.openings, 'conversation')} the assistant begins; no"
                    " prompt asks for that message, so it is not trained"
                ),
            ),
            (
                self.endings,
                (
                    f"data: in {pluralize(self.endings, 'conversation')} messages follow the last"
                    " one that is trained; they are left out"
                ),
            ),
            (
                self.apart_samples,
                (
                    f"data: in {self.apart_samples} samples an answer's first letters would join"
                    " the prompt's last token; the answer is encoded on its own there, as it is"
                    " generated"
                ),
            ),
            (
                self.unseen_samples,
                (
                    f"warning: data: in {self.unseen_samples} samples the chat template leaves out"
                    " a system's or user's message, which the model is never shown; set"
                    " tokenizer.chat_template to one that writes it"
                ),
            ),
            (idle_counts, f"data: columns that change nothing: {idle_counts}"),
            (
                self.margins,
                (
                    f"data: {pluralize(self.margins, 'pair')} with a margin, which"
                    " reward_distributed alone reads"
                ),
            ),
            (missing, f"warning: data: data.ignore_columns: no sample has {', '.join(missing)}"),
        )

    def _describe_bad_samples(self) -> list[str]:
        """Return lines on samples that are left out, and on duplicates."""
        are = "is" if self.duplicate_sequences == 1 else "are"
        first = ", the same as ".join(self.duplicates[0]) if self.duplicates else ""
        bad = sum(self.bad_samples.values())
        causes = ", ".join(f"{cause} {count}" for cause, count in self.bad_samples.most_common())
        were = "is bad and was" if bad == 1 else "are bad and were"
        return choose_lines(
            (
                self.duplicate_sequences,
                (
                    f"data: {pluralize(self.duplicate_sequences, self.item_noun)} {are} the same"
                    f" as an earlier one, and kept all the same (first: {first})"
                ),
            ),
            (
                bad,
                (
                    f"warning: data: {bad} of {pluralize(self.samples_read, 'sample')} {were} left"
                    f" out: {causes}"
                ),
            ),
        ) + [f"data: first with {cause}: {place}" for cause, place in self.first_bad.items()]

    def describe_bos(self) -> str:
        ours = (
            "each sequence begins with BOS" if self.adds_bos else "no BOS is put before a sequence"
        )
        if self.template != "chat" or not self.chats:  # the plain template leaves it to us
            return ours
        decides = "the chat template decides whether a sequence begins with BOS"
        has_only_chats = self._others == self.chats and not self.texts
        return decides if has_only_chats else f"{decides}; without one {ours}"


def format_report_lines(
    training: DataReport, validation: DataReport | None = None, *, faults: bool = True
) -> list[str]:
    """Return the log lines of training and, if there is one, validation.

    Validation's begin with `validation:`. Its line on BOS is left out if it equals training's.
    faults: include bad samples, and duplicates.
    """
    lines = training.format_lines(faults=faults)
    if validation is not None:
        bos_line = f"data: {training.describe_bos()}"
        new_lines = [line for line in validation.format_lines(faults=faults) if line != bos_line]
        lines += [line.replace("data: ", "validation: ", 1) for line in new_lines]
    return lines


# Names of the fields that `add` sums; max_seq_len is an int too, but a setting
_COUNTS = [
    item.name for item in fields(DataReport) if item.type is int and item.name != "max_seq_len"
]


def _format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"

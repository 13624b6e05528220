"""What became of the samples of a dataset, in numbers and in lines for the log."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from recipe_lib.errors import DataError

MOST_BAD_LINES = 20  # bad samples that an error names one by one


@dataclass
class DataReport:
    """Counts of one pass over a dataset. Tokens are targets: what a sequence's tokens are to predict.

    A pair counts as one sample that was read and as two sequences, a conversation that becomes several sequences as one
    sample and as so many. parts: the same for each source, where there are several.
    """

    source: str
    format: str
    max_seq_len: int
    template: str = "none"
    train_on: str | list[str] = "assistant"
    adds_bos: bool = False
    history: str = "auto"
    falls_back: bool = False  # the plain template is written because the tokenizer has no other
    samples_read: int = 0
    sequences: int = 0
    pairs: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    prompt_tokens: int = 0  # tokens that the loss could count and does not, without BOS
    bad_samples: Counter[str] = field(default_factory=Counter)
    first_bad: dict[str, str] = field(default_factory=dict)  # cause -> the first such sample's place and detail
    bad_lines: list[tuple[str, str]] = field(default_factory=list)  # (cause, place and detail) of the first bad samples
    truncated_sequences: int = 0
    skipped_long_sequences: int = 0
    emptied_sequences: int = 0  # truncated sequences whose whole answer was cut off; they are left out
    long_answer_tokens: int = 0  # trained tokens of sequences over the limit, before anything was cut
    lost_answer_tokens: int = 0
    untrained_ends: int = 0  # answers whose beginning is trained and whose end-of-turn token is not
    texts: int = 0  # documents, which are cut into sequences
    text_tokens: int = 0  # tokens of those sequences
    dropped_pieces: int = 0  # last pieces of documents that do not fill a sequence
    dropped_tokens: int = 0
    apart_samples: int = 0
    unseen_samples: int = 0  # samples with a message of the system or the user that the template does not write
    openings: int = 0  # conversations that the assistant begins; that message is not trained
    split_samples: int = 0  # conversations that became several sequences, and how many; before long ones are cut
    split_sequences: int = 0
    split_tokens: int = 0  # of these sequences, and of the same conversations in one sequence each
    unsplit_tokens: int = 0
    marked_answers: int = 0  # answers of which the template itself says what is trained
    marks_with_space_after: int = 0  # of them, those where it adds white space after the end of the turn
    marks_differing: int = 0  # those where it says something else than what is generated
    first_mark: str = ""
    duplicate_sequences: int = 0  # the same as an earlier one, token by token; they are trained on all the same
    first_duplicate: str = ""
    parts: list["DataReport"] = field(default_factory=list)

    @property
    def sequences_read(self) -> int:
        """Samples that were read, those that became several sequences counted so often."""
        return self.samples_read + self.split_sequences - self.split_samples

    @property
    def label_token_fraction(self) -> float:
        """Share of the tokens that the loss counts, 0 to 1."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def add(self, other: "DataReport") -> None:
        """Adds the counts of another pass, over samples that come later."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.template == "none":
            self.template = other.template
        self.first_mark = self.first_mark or other.first_mark
        self.bad_samples.update(other.bad_samples)
        self.first_bad = other.first_bad | self.first_bad
        self.bad_lines = [*self.bad_lines, *other.bad_lines][:MOST_BAD_LINES]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        parts = [part.to_json() for part in self.parts]
        return vars(self) | {"bad_samples": dict(self.bad_samples), "parts": parts}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "DataReport":
        """The report that `to_json` made into values. Raises TypeError or KeyError for anything else."""
        parts = [DataReport.from_json(part) for part in content["parts"]]
        bad = [(cause, line) for cause, line in content["bad_lines"]]
        restored = {"bad_samples": Counter(content["bad_samples"]), "bad_lines": bad, "parts": parts}
        return DataReport(**dict(content) | restored)

    def check_share(self) -> None:
        """Raises DataError if, from one of the sources, no token or every token is a label token."""
        for part in self.parts or [self]:
            fault = part.share_fault()
            if fault:
                raise DataError(f"{part.source}: {fault}, or set data.check_label_mask to false if it is meant")

    def check_samples(self) -> None:
        """Raises DataError with a line for each bad sample."""
        if not self.bad_lines:
            return
        bad = sum(self.bad_samples.values())
        if bad == 1:
            raise DataError(f"{self.bad_lines[0][1]}; correct the sample, or set data.on_invalid to skip")
        if bad == self.samples_read and len(self.bad_samples) == 1:
            raise DataError(f"{self.bad_lines[0][1]}; the other samples ({bad - 1}) have the same fault")
        more = "" if bad == len(self.bad_lines) else f", the first {len(self.bad_lines)} of which stand above"
        raise DataError(
            *(line for _, line in self.bad_lines),
            f"{self.source}: found {bad} samples of {self.samples_read} that cannot be used{more}; correct them, or "
            "set data.on_invalid to skip (`tune data check` with the same config and overrides counts them by cause)",
        )

    def share_fault(self) -> str | None:
        """What is wrong with the share of trained tokens of one source; None: nothing.

        Texts are learned as a whole, and so is everything where `data.train_on` is all. A sequence's first token is
        never trained, because nothing stands before it; it is a prompt only if it was meant to be one."""
        tokens, trained = self.tokens - self.text_tokens, self.trained_tokens - self.text_tokens
        if self.train_on == "all" or not tokens or (trained and self.prompt_tokens):
            return None
        every, none = ("that every token is a label token", "prompts and answers"), ("no label token", "answers")
        found, wanted = every if trained else none
        sequences = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return f"found {found} in {sequences}, expected {wanted}; correct data.format, data.columns or data.train_on"

    def plain_note(self) -> str | None:
        """That the built-in template is written where nobody asked for it; None: it is not."""
        if self.template != "plain" or not self.falls_back:
            return None
        return (
            "warning: data.template: the tokenizer has no chat template, so that conversations are written in the "
            "built-in plain one (User:, Assistant:), which exports will carry; for chats begin with an instruct model, "
            "or set tokenizer.chat_template"
        )

    def lines(self, *, faults: bool = True) -> list[str]:
        """The report as log lines; one that begins with `warning:` is to be logged as such.

        faults: with samples that are bad, or the same as another one.
        """
        everything = self.train_on == "all" or self.texts > 0
        what = "all tokens" if everything else "answers incl. end-of-turn"
        samples = _counted(self.samples_read, "sample")
        read = f"cut from {_counted(self.texts, 'text')}" if self.texts else f"of {samples}"
        read = f"from the {self.samples_read} samples" if self.split_sequences else read
        kind = _counted(self.pairs, "pair") if self.pairs else _counted(self.sequences, "sequence")
        lines = [
            f"data: {kind} {read} read from {self.source} (format {self.format}, template "
            f"{self.template}), {self.tokens} tokens; label tokens: {what}, "
            f"{_percent(self.label_token_fraction)}",
            *(f"data: {part.part_line()}" for part in self.parts),
            f"data: {self._bos_line()}",
        ]
        lines += self._sequence_lines() + self._lost_lines() + self._odd_lines()
        return lines + self._bad_lines() if faults else lines

    def part_line(self) -> str:
        """One source among several, in a line."""
        kind = _counted(self.pairs, "pair") if self.pairs else _counted(self.sequences, "sequence")
        read = (
            f"from the {self.samples_read} samples of"
            if self.split_sequences
            else f"of {self.samples_read} samples from"
        )
        return (
            f"{kind} {read} {self.source} (format {self.format}), {self.tokens} tokens, "
            f"{_percent(self.label_token_fraction)} trained"
        )

    def _sequence_lines(self) -> list[str]:
        """What became of conversations of several answers, and who says what an answer is."""
        lines = []
        if self.split_samples:
            why = (
                "as data.history says"
                if self.history == "split"
                else "because the chat template writes earlier turns anew"
            )
            cost = self.split_tokens / max(1, self.unsplit_tokens)
            lines.append(
                f"data: {self.split_samples} conversations became {self.split_sequences} sequences, {why}: each answer "
                f"follows the prompt that generation is given; {self.split_tokens} tokens in place of "
                f"{self.unsplit_tokens} ({cost:.2f} times as many)"
            )
        if self.marked_answers:
            lines.append(
                f"data: of {self.marked_answers} answers the chat template itself says what is trained "
                f"({{% generation %}}); {self.marks_differing} of them are not what generation is asked for, and in "
                f"{self.marks_with_space_after} white space after the end of the turn is trained as well"
            )
            lines += [f"data: first that is not: {self.first_mark}"] if self.first_mark else []
        return lines

    def _lost_lines(self) -> list[str]:
        lines = []
        long = self.truncated_sequences + self.skipped_long_sequences
        if long:
            share = self.lost_answer_tokens / max(1, self.long_answer_tokens)
            done = "truncated" if self.truncated_sequences else "left out"
            empty = (
                f", {self.emptied_sequences} of them left out because no answer was left"
                if self.emptied_sequences
                else ""
            )
            before = "warning: data" if share else "data"
            lines.append(
                f"{before}: {long} of {self.sequences_read} sequences ({_percent(long / self.sequences_read)}) exceed "
                f"{self.max_seq_len} tokens and were {done}{empty}; {_percent(share)} of their answer tokens lost"
            )
        if self.untrained_ends:
            lines.append(
                f"warning: data: {self.untrained_ends} answers end without their end-of-turn token, so nothing "
                "teaches the model to stop there (they were cut, or their last token is none that generation stops at)"
            )
        if self.dropped_pieces:
            lines.append(
                f"data: {self.dropped_pieces} last pieces of texts ({self.dropped_tokens} tokens) do not fill a "
                "sequence of "
                f"{self.max_seq_len} tokens and were left out"
            )
        return lines

    def _odd_lines(self) -> list[str]:
        """What is not as most would expect, and no fault."""
        lines = []
        if self.openings:
            lines.append(
                f"data: in {_counted(self.openings, 'conversation')} the assistant begins; no prompt asks for that "
                "message, so it is not trained"
            )
        if self.apart_samples:
            lines.append(
                f"data: in {self.apart_samples} samples an answer's first letters would join the prompt's last token; "
                "the answer is encoded on its own there, as it is generated"
            )
        if self.unseen_samples:
            lines.append(
                f"warning: data: in {self.unseen_samples} samples the chat template leaves out a system's or user's "
                "message, which the model is never shown; set tokenizer.chat_template to one that writes it"
            )
        return lines

    def _bad_lines(self) -> list[str]:
        lines = []
        if self.duplicate_sequences:
            same = "1 sequence is" if self.duplicate_sequences == 1 else f"{self.duplicate_sequences} sequences are"
            lines.append(
                f"data: {same} the same as an earlier one, and trained on all the same (first: {self.first_duplicate})"
            )
        bad = sum(self.bad_samples.values())
        if bad:
            causes = ", ".join(f"{cause} {count}" for cause, count in self.bad_samples.most_common())
            are = "is bad and was" if bad == 1 else "are bad and were"
            lines.append(f"warning: data: {bad} of {_counted(self.samples_read, 'sample')} {are} left out: {causes}")
            lines += [f"data: first with {cause}: {place}" for cause, place in self.first_bad.items()]
        return lines

    def _bos_line(self) -> str:
        if self.template == "chat":
            return "the chat template decides whether a sequence begins with BOS"
        what = "text" if self.texts else "sequence"
        return f"each {what} begins with BOS" if self.adds_bos else f"no BOS is put before a {what}"


_COUNTS = [item.name for item in fields(DataReport) if item.type is int and item.name != "max_seq_len"]


def _counted(count: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

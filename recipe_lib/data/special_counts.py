"""Counts the special tokens that the samples of a dataset spell out, and writes the lines for the log."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.units import counted

MOST_PLACES = 5  # samples that are named
MOST_TOKENS = 5  # special tokens that a line names


@dataclass
class SpecialCounts:
    """Counts by token, of one sample or of many."""

    parsed: Counter[str] = field(default_factory=Counter)  # become tokens
    unparsed: Counter[str] = field(default_factory=Counter)  # stay text
    foreign: Counter[str] = field(default_factory=Counter)  # stay text: tokens of other tokenizers
    samples: int = 0  # with any that stay text
    places: list[str] = field(default_factory=list)  # of the first of these samples, with what they spell out
    rendered: int = 0  # samples that hold the template's own tokens and are encoded as they stand

    def note(self, place: str, spelled: "SpecialCounts") -> None:
        """Add what a sample spells out. place: of the sample."""
        if spelled.is_empty:  # as most are
            return
        if spelled.split:
            spelled.samples = 1
            spelled.places = [f"{place}: found {_name_tokens(spelled.split)}"]
        self.add(spelled)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was noted."""
        return not (self.parsed or self.unparsed or self.foreign or self.rendered)

    @property
    def split(self) -> Counter[str]:
        """Return those that stay text."""
        return self.unparsed + self.foreign

    def add(self, other: "SpecialCounts") -> None:
        """Add the counts over samples that come later."""
        self.parsed.update(other.parsed)
        self.unparsed.update(other.unparsed)
        self.foreign.update(other.foreign)
        self.samples += other.samples
        self.places = [*self.places, *other.places][:MOST_PLACES]
        self.rendered += other.rendered

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "SpecialCounts":
        """Return the counts whose `vars` were made into JSON values. Raises TypeError or KeyError for anything else."""
        counters = {name: Counter(content[name]) for name in ("parsed", "unparsed", "foreign")}
        return SpecialCounts(**dict(content) | counters)

    def lines(self, chats: int) -> list[str]:
        """Return the lines for the log. chats: how many samples the template writes."""
        lines = []
        if self.parsed:
            lines.append(f"data: special tokens that the samples spell out are parsed: {_name_tokens(self.parsed)}")
        if self.rendered:
            before = "warning: data" if chats else "data"
            lines.append(
                f"{before}: {self.rendered} of {counted(self.rendered + chats, 'sample')} hold a chat template's "
                "special tokens: their texts are taken as rendered already, and no template is applied"
            )
        if self.split:
            lines.append(f"warning: data: {self.split_line()}")
        return lines

    def split_line(self) -> str:
        """Return which special tokens stay text, and what to do."""
        spell = "spells" if self.samples == 1 else "spell"
        remedies = []
        if self.unparsed:
            remedies.append(
                "set data.parse_special_tokens=true if whoever wrote the samples is trusted, or take them out of the "
                "samples"
            )
        if self.foreign:
            named = " or ".join(map(repr, list(self.foreign)[:MOST_TOKENS]))
            remedies.append(
                f"this tokenizer has no {named}: give samples of messages, which its own chat "
                "template writes, or the model whose template wrote these"
            )
        return (
            f"{counted(self.samples, 'sample')} {spell} out special tokens that stay text, cut into pieces: "
            f"{_name_tokens(self.split)}; {'; '.join(remedies)}"
        )


def _name_tokens(counts: Counter[str]) -> str:
    """Return `'<|im_end|>' 12 times, '<s>' once`, the most frequent first."""
    named = [
        f"{token!r} {'once' if count == 1 else f'{count} times'}" for token, count in counts.most_common(MOST_TOKENS)
    ]
    return ", ".join(named) + (", ..." if len(counts) > MOST_TOKENS else "")

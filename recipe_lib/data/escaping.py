"""Keep special tokens that a sample's text spells out from being taken for the chat template's.

An `Encoder` calls `SpecialTokens.escape` before a template is rendered: it inserts a private-use
letter (of Unicode) into each such token, so that only the template's own special tokens are found.
Then `encode_escaped` takes the letter out; the tokens stay text, or become tokens with
`data.parse_special_tokens`. `SpecialCounts` counts them for the log. A token is foreign if it is
one of other models' templates.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from recipe_lib.data.samples import Message, SampleFault
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.tokenizers.vocabulary import compile_alternation
from recipe_lib.units import choose_lines, pluralize

MAX_PLACES = 5  # samples that the log names
MAX_TOKENS = 5  # special tokens that a line names


@dataclass
class SpecialCounts:
    """Counts of special tokens that texts spell out, of one sample or of many."""

    # Token -> how often it was spelled out and became a token
    parsed: Counter[str] = field(default_factory=Counter)
    # Token -> how often it was spelled out and stayed text
    unparsed: Counter[str] = field(default_factory=Counter)
    # The same for foreign tokens, which always stay text
    foreign: Counter[str] = field(default_factory=Counter)
    samples: int = 0  # samples with tokens that stay text
    places: list[str] = field(default_factory=list)  # the first of these: place, and tokens found
    rendered: int = 0  # samples whose texts are renderings already and are encoded as they stand

    def note(self, place: str, spelled: "SpecialCounts") -> None:
        """Add the counts of a sample. place: file and line of the sample."""
        if spelled.is_empty:  # true of most samples
            return
        if spelled.split:
            spelled.samples = 1
            spelled.places = [f"{place}: found {_name_tokens(spelled.split)}"]
        self.add(spelled)

    @property
    def is_empty(self) -> bool:
        return not (self.parsed or self.unparsed or self.foreign or self.rendered)

    @property
    def split(self) -> Counter[str]:
        """Return the counts of all tokens that stay text, which is split into several tokens."""
        return self.unparsed + self.foreign

    def add(self, other: "SpecialCounts") -> None:
        """Add the counts of later samples."""
        self.parsed.update(other.parsed)
        self.unparsed.update(other.unparsed)
        self.foreign.update(other.foreign)
        self.samples += other.samples
        self.places = [*self.places, *other.places][:MAX_PLACES]
        self.rendered += other.rendered

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "SpecialCounts":
        """Return the counts from JSON of the fields, by name.

        Raises TypeError or KeyError for other JSON.
        """
        counters = {name: Counter(content[name]) for name in ("parsed", "unparsed", "foreign")}
        return SpecialCounts(**dict(content) | counters)

    def format_lines(self, chats: int) -> list[str]:
        """Return lines for the log. chats: number of samples that the template has rendered."""
        # Of (count, line) pairs `choose_lines` returns the lines whose count is not 0 or empty.
        return choose_lines(
            (
                self.parsed,
                (
                    "data: special tokens that the samples spell out are parsed:"
                    f" {_name_tokens(self.parsed)}"
                ),
            ),
            (
                self.rendered,
                (
                    f"{'warning: data' if chats else 'data'}: {self.rendered} of"
                    f" {pluralize(self.rendered + chats, 'sample')} hold a chat template's special"
                    " tokens: their texts are taken as rendered already, and no template is"
                    " applied"
                ),
            ),
            (self.split, f"warning: data: {self.describe_split()}"),
        )

    def describe_split(self) -> str:
        spell = "spells" if self.samples == 1 else "spell"
        foreign_tokens = " or ".join(map(repr, list(self.foreign)[:MAX_TOKENS]))
        remedies = choose_lines(
            (
                self.unparsed,
                "set data.parse_special_tokens=true if whoever wrote the samples is trusted, or"
                " take them out of the samples",
            ),
            (
                self.foreign,
                f"this tokenizer has no {foreign_tokens}: give samples of messages, which its own"
                " chat template writes, or the model whose template wrote these",
            ),
        )
        return (
            f"{pluralize(self.samples, 'sample')} {spell} out special tokens that stay text, cut"
            f" into pieces: {_name_tokens(self.split)}; {'; '.join(remedies)}"
        )


def _name_tokens(counts: Counter[str]) -> str:
    """Return `'<|im_end|>' 12 times, '<s>' once`, the most frequent first."""
    phrases = [
        f"{token!r} {'once' if count == 1 else f'{count} times'}"
        for token, count in counts.most_common(MAX_TOKENS)
    ]
    return ", ".join(phrases) + (", ..." if len(counts) > MAX_TOKENS else "")


# Code points of Unicode's private use areas, which no text should hold
PRIVATE_LETTERS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))

TAGS = ("<think>", "</think>")  # around the thought of an answer, its reasoning
# Special tokens as chat templates of any model write them
_TEMPLATE_TOKENS = re.compile(r"<\|[a-z][a-z0-9_]*\|>|<(?:start|end)_of_turn>|\[/?INST\]")


class Escape(NamedTuple):
    """How the special tokens in a sample's own text are marked in a rendering."""

    letter: str | None = None  # the letter inserted into each of them; None: there are none
    # Whether they become tokens when the letter is taken out; else they stay text
    parses_special: bool = False


class SpecialTokens:
    """A search for a tokenizer's special tokens in samples, which counts them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.spelled = SpecialCounts()  # of the sample that is being encoded
        # Matches any special token of more than one letter; None: the tokenizer has none
        self.pattern = compile_alternation(
            text for text in tokenizer.special_texts if len(text) > 1
        )
        self._foreign: dict[str, bool] = {}  # results of `_is_foreign`

    def take(self) -> SpecialCounts:
        """Return the counts since the last call, and begin anew."""
        spelled = self.spelled
        if not spelled.is_empty:
            self.spelled = SpecialCounts()
        return spelled

    def note(self, texts: Sequence[str], parses_special: bool) -> None:
        """Count the special tokens of texts that are encoded as they stand.

        parses_special: they become tokens; else they stay text.
        """
        self._add(self._count(texts), parses_special)
        self.note_foreign(texts)

    def note_foreign(self, texts: Sequence[str]) -> None:
        """Count the tokens of other tokenizers' chat templates in texts."""
        for text in texts:
            self.spelled.foreign.update(filter(self._is_foreign, _TEMPLATE_TOKENS.findall(text)))

    def note_once(self, content: list[Any], parses_special: bool) -> None:
        """Subtract the counts of content that was counted twice, such as the prompt of a pair.

        content: nested lists and dicts of texts. parses_special: as it was counted.
        """
        if self.spelled.parsed or self.spelled.unparsed:
            noted = self.spelled.parsed if parses_special else self.spelled.unparsed
            noted -= self._escape_content(content)[2]

    def escape(self, content: list[Any], parses_special: bool = False) -> tuple[Any, Escape]:
        """Return (content with a private letter inside each special token it spells out, Escape).

        The tokens are counted. content: nested lists and dicts of texts. parses_special: see
        `Escape`.
        """
        changed, letter, counts = self._escape_content(content)
        self._add(counts, parses_special)
        return changed, Escape(letter, parses_special)

    def find_unused_letters(self, content: Any, count: int) -> list[str]:
        """Return `count` private-use letters that neither content nor chat template contains.

        Raises SampleFault if there are not so many.
        """
        taken = set(self._tokenizer.chat_template or "").union(*_collect_texts(content))
        free = (letter for letter in map(chr, chain(*PRIVATE_LETTERS)) if letter not in taken)
        letters = list(islice(free, count))
        if len(letters) < count:
            raise SampleFault(
                "too many private letters",
                "found every letter of Unicode's private use areas, expected text",
            )
        return letters

    def _is_foreign(self, token: str) -> bool:
        """Return True if a token is no token of this tokenizer and not in its chat template.

        token: one that looks like a template's, such as `<|im_end|>`.
        """
        if token not in self._foreign:
            is_written = token in (self._tokenizer.chat_template or "")
            is_split = len(self._tokenizer.encode_pieces([token])[0]) > 1
            self._foreign[token] = is_split and not is_written
        return self._foreign[token]

    def _add(self, counts: Mapping[str, int], parses_special: bool) -> None:
        if counts:
            (self.spelled.parsed if parses_special else self.spelled.unparsed).update(counts)

    def _count(self, content: Any) -> Counter[str]:
        """Return how often nested lists and dicts spell out each special token."""
        if self.pattern is None:
            return Counter()
        return Counter(chain.from_iterable(map(self.pattern.findall, _collect_texts(content))))

    def _escape_content(self, content: list[Any]) -> tuple[Any, str | None, Counter[str]]:
        """Return (content with a letter in each special token, the letter, count of each token).

        The letter is None if there is no such token. The tags around an answer's thought are left
        as they are, and not counted.
        """
        counts = self._count(content)
        if self.pattern is None or not counts:
            return content, None, counts
        special = self.pattern
        letter = self.find_unused_letters(content, 1)[0]

        def insert_letter(match: re.Match[str]) -> str:
            return match.group()[0] + letter + match.group()[1:]

        changed = _change_texts(content, lambda text: special.sub(insert_letter, text))
        if isinstance(changed[0], list):  # content is [messages, tools, variables]
            tagged_messages = [restore_tags(message, letter) for message in changed[0]]
            for before, after in zip(changed[0], tagged_messages, strict=True):
                if after is not before:
                    # Each restored tag has lost one letter, so the difference is their number.
                    counts.subtract(TAGS[: len(before["content"]) - len(after["content"])])
            changed[0] = tagged_messages
        return changed, letter, +counts  # `+` drops counts of 0


def restore_tags(message: Message, letter: str) -> Message:
    """Return the message without `letter` in the tags of its thought, where it was inserted.

    Some tokenizers have these tags as special tokens, so `escape` has put the letter into them. At
    the beginning of an answer they are markup, which the template and the model should see.
    """
    content: Any = message.get("content")
    begin = f"<{letter}think>"
    end = f"<{letter}/think>"
    is_answer = message["role"] == "assistant" and isinstance(content, str)
    if not is_answer or not content.lstrip().startswith(begin):
        return message
    return {**message, "content": content.replace(begin, "<think>", 1).replace(end, "</think>", 1)}


def encode_escaped(tokenizer: Tokenizer, parts: Sequence[str], escape: Escape) -> list[list[int]]:
    """Return ids of each part of a rendering, without the letter of the escape.

    Tokens that had the letter in them become tokens with `escape.parses_special`, else they stay
    text.
    """
    if escape.parses_special and escape.letter is not None:
        return tokenizer.encode_pieces([part.replace(escape.letter, "") for part in parts])
    return tokenizer.encode_pieces(parts, literal=escape.letter)


def _collect_texts(content: Any) -> list[str]:
    """Return every text in nested lists and dicts, keys included."""
    values = [content]
    for value in values:  # the list grows during the iteration
        if isinstance(value, dict):
            values += (*value, *value.values())
        elif isinstance(value, list):
            values += value
    return [value for value in values if isinstance(value, str)]


def _change_texts(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [_change_texts(item, change) for item in content]
    if isinstance(content, dict):
        return {
            _change_texts(key, change): _change_texts(value, change)
            for key, value in content.items()
        }
    return content

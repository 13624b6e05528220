"""Encodes texts as they stand, without a template: documents, completions, and rows that are rendered already.

Special tokens that they spell out become tokens unless `data.parse_special_tokens` is false, and an end token is put
behind a text that does not end with one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from recipe_lib.data.encoded import Encoded, encode_spans
from recipe_lib.data.escaping import Escape, SpecialTokens, compile_special_pattern
from recipe_lib.data.plain_template import eos_text
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    LabeledAnswer,
    Message,
    Preference,
    SampleFault,
    TextTokenizer,
    Wanted,
)
from recipe_lib.data.spans import Span
from recipe_lib.data.thoughts import TAGS
from recipe_lib.errors import DataError

_PROMPTS: tuple[list[str], ...] = ([], ["user"], ["system"], ["system", "user"])
_PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}),
)

Renders = Callable[[Sequence[Message], Sequence[Wanted]], Sequence[str | DataError]]


@dataclass(frozen=True)
class TextRow:
    """Holds a row whose prompt and answers are the texts of columns, and no messages."""

    prompt: str  # empty where there is none
    answers: Sequence[str]  # one, the chosen and the rejected one, or none
    beside: str  # a column that the row has besides, which a rendered text would hold; empty: none


class TextEncoder:
    """Encodes texts.

    add_bos, add_eos: put BOS before a text, and EOS behind it. parses: special tokens that they spell out become
    tokens. special: counts those. render: the chat template's renderings; None: there is no template. stops: the tokens
    that generation stops at, as text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        special: SpecialTokens,
        add_bos: bool,
        add_eos: bool,
        parses: bool,
        render: Renders | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._render = render
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.parses = parses
        self.stops = {tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.stop_ids}
        self._ends = self.stops & set(tokenizer.special_texts)

    def encode_text(self, text: str) -> list[int]:
        """Return ids of a text, without an end token."""
        self._special.note([text], self.parses)
        return self._tokenizer.encode(text, add_bos=self.add_bos, allow_special=self.parses)

    def encode_document(self, text: str) -> list[int]:
        """Return ids of a text, and EOS unless it ends with an end token."""
        ids = self.encode_text(text)
        eos = self._tokenizer.eos_id
        is_ended = self.parses and self.find_end(text)
        return ids if is_ended or eos is None or not self.add_eos else [*ids, eos]

    def encode_completion(self, sample: Completion, with_prompt: bool = False) -> Encoded:
        """Return prompt and completion as they stand, and EOS unless they end with an end token; the completion is
        trained.

        with_prompt: all of it is. Raises DataError: there is no EOS. Raises SampleFault: nothing is trained."""
        texts = [sample.prompt, sample.completion]
        escape = Escape()
        if self.parses:
            self._special.note(texts, parses=True)
        else:
            texts, escape = self._special.escape(texts)
        is_ended = self.parses and self.find_end(sample.completion)
        whole_text = "".join(texts) + (eos_text(self._tokenizer) if self.add_eos and not is_ended else "")
        span = Span(0 if with_prompt else len(texts[0]), len(whole_text))
        return encode_spans(self._tokenizer, whole_text, [span], escape, self.add_bos)

    def find_end(self, text: str) -> str:
        """Return the special token at the end of a text, white space left out, that generation stops at; empty:
        none."""
        bare = text.rstrip()
        return max((end for end in self._ends if bare.endswith(end)), key=len, default="")

    def take_end(self, text: str) -> str:
        """Return the text without the end token at its end, if it has one."""
        end = self.find_end(text)
        return text.rstrip().removesuffix(end) if end else text

    def is_rendered(self, row: TextRow) -> bool:
        """Return whether the texts hold special tokens of a template; an end token behind an answer is none.

        Raises SampleFault where something stands beside them that they would have to hold."""
        turns = self._turn_tokens
        if turns is None or not any(map(turns.search, [row.prompt, *map(self.take_end, row.answers)])):
            self._special.note_foreign([row.prompt, *row.answers])
            return False
        if row.beside:
            raise SampleFault(
                f"{row.beside} beside a rendered text",
                f".{row.beside}: found {row.beside} beside texts that spell out the chat template's special tokens and "
                "are not rendered again, expected it within them",
            )
        self._special.spelled.rendered = 1
        return True

    def encode_rendered(self, row: TextRow) -> list[Encoded]:
        """Return each answer behind the prompt, as they stand. Raises SampleFault: two texts that share no beginning.

        The prompt of a pair without one is what the ids of both begin with."""
        prompt = row.prompt
        if prompt or len(row.answers) == 1:
            are_whole = all(answer.startswith(prompt) for answer in row.answers)
            answers = [answer.removeprefix(prompt) for answer in row.answers] if are_whole else row.answers
            encoded = [self.encode_completion(Completion(prompt, answer)) for answer in answers]
            self._special.note_once([prompt] * (len(encoded) - 1), parses=True)
            return encoded
        both = [self.encode_document(answer) for answer in row.answers]
        shared = len(list(takewhile(lambda ids: ids[0] == ids[1], zip(*both, strict=False))))
        if not shared:
            raise SampleFault(
                "no prompt",
                "found two rendered texts that differ from their first token on, expected them to begin alike",
            )
        return [
            Encoded(ids, [False] * shared + [True] * (len(ids) - shared), answers=((shared, len(ids)),)) for ids in both
        ]

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str] | None:
        """Return what finds the special tokens that make a text a rendered one: those that the template writes, BOS,
        and those that end an answer; without a template any. None: there are none."""
        any_special = self._special.pattern
        if self._render is None or any_special is None:
            return any_special
        bos = self._tokenizer.bos_id
        turn_tokens = set(self._ends) if bos is None else {*self._ends, self._tokenizer.token_bytes(bos).decode()}
        for messages in _PROBES:
            for text in self._render(messages, [(len(messages), False, ()), (len(messages) - 1, True, ())]):
                turn_tokens.update(any_special.findall(text) if isinstance(text, str) else ())
        return compile_special_pattern(turn_tokens - set(TAGS))


def read_text_row(sample: Conversation | Preference | LabeledAnswer) -> TextRow | None:
    """Return the texts of a row; None: something in it is a message."""
    prompt = sample.messages if isinstance(sample, Conversation) else sample.prompt
    answers: list[Sequence[Message]] = []
    if isinstance(sample, Preference):
        answers = [sample.chosen, sample.rejected]
    elif isinstance(sample, LabeledAnswer):
        answers = [sample.completion]
    places = sample.places if isinstance(sample, Preference) else (sample.places,)
    roles = [message["role"] for message in prompt]
    are_single = all(len(answer) == 1 for answer in answers)
    if roles not in _PROMPTS or not are_single or not all(answer_places.are_texts for answer_places in places):
        return None
    columns = {"tools": sample.tools, "system": "system" in roles, "chat_template_kwargs": sample.variables}
    return TextRow(
        prompt=prompt[-1]["content"] if "user" in roles else "",
        answers=[answer[0]["content"] for answer in answers],
        beside=next((name for name, value in columns.items() if value), ""),
    )

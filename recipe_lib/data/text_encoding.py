"""Encodes texts as they stand, without a template: documents, completions, and rows that are rendered already.

Special tokens that they spell out become tokens unless `data.parse_special_tokens` is false, and an end token is put
behind a text that does not end with one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, takewhile

from recipe_lib.data.answers import Marked
from recipe_lib.data.escaping import Escape, encode_escaped
from recipe_lib.data.rendering import Template, eos_text
from recipe_lib.data.samples import Completion, Conversation, LabeledAnswer, Message, Preference, SampleFault
from recipe_lib.data.spans import Span
from recipe_lib.data.template_behavior import TAGS
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.vocabulary import compile_alternation

# Makes ids of a text, of which some are trained: of a rendering, or of a text as it stands.


@dataclass(frozen=True)
class Encoded:
    """Holds a sequence before it is cut."""

    ids: list[int]
    trained: list[bool]  # whether the loss counts each id as a target
    apart: bool = False  # a text is encoded apart from what stands before it: a token reached over the border
    answers: tuple[tuple[int, int], ...] = ()  # [start, end) of each trained message, with its end-of-turn token
    untrained_ends: int = 0  # trained messages whose end-of-turn token was cut off, or is none
    left_out: int = 0  # messages of the system and the user that are not written

    def cut(self, room: int) -> "Encoded":
        """Return the first `room` ids; the answers that lose their end are counted."""
        answers = tuple((start, end) for start, end in self.answers if start < room)
        return Encoded(
            ids=self.ids[:room],
            trained=self.trained[:room],
            apart=self.apart,
            answers=answers,
            untrained_ends=self.untrained_ends + sum(end > room for _, end in answers),
            left_out=self.left_out,
        )


@dataclass(frozen=True)
class EncodedSample:
    """Holds a sample's sequences."""

    sequences: Sequence[Encoded]
    whole_tokens: int = 0  # ids of the whole conversation in one, where it became several
    marked: Marked | None = None  # how it differs from the template's own marks, if there are any and they were used


def encode_spans(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span], escape: Escape, add_bos: bool, inside: bool = True
) -> Encoded:
    """Return ids of the whole text, trained inside of the spans, or outside of them. Raises SampleFault: none is
    trained."""
    cuts = [0]
    for span in spans:
        cuts += (span.start, span.end)
    ids, lengths, apart = _encode_between(tokenizer, text, [*cuts, len(text)], escape)
    if add_bos and ids[:1] != [tokenizer.bos_id]:
        ids = put_bos(tokenizer, ids)
        lengths[0] += 1
    trained = list[bool]()
    for number, length in enumerate(lengths):  # those with odd numbers lie inside of a span
        trained += [bool(number % 2) is inside] * length
    trained[:1] = [False] * len(trained[:1])  # nothing stands before the first token to predict it from
    if True not in trained:
        raise SampleFault("no trained token", "found no label token, expected an answer")
    end = len(trained) - trained[::-1].index(True)
    ends = list(accumulate(lengths, initial=0))
    answers = tuple(zip(ends[1::2], ends[2::2], strict=False)) if inside else ((0, end),)
    return Encoded(ids[:end], trained[:end], apart, answers)


def put_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids behind BOS, once."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _encode_between(
    tokenizer: Tokenizer, text: str, cuts: Sequence[int], escape: Escape
) -> tuple[list[int], list[int], bool]:
    """Return ids of a text, how many lie between the cuts, and whether a cut had to be forced through a token."""
    pieces = encode_escaped(tokenizer, [text[start:end] for start, end in pairwise(cuts)], escape)
    piece_ids = list(chain.from_iterable(pieces))
    lengths = [len(piece) for piece in pieces]
    text_ids = encode_escaped(tokenizer, [text], escape)[0]
    if piece_ids == text_ids:
        return piece_ids, lengths, False
    # Pieces can differ from the whole although no token reaches over a cut: one that takes space does.
    ends = [0]
    for cut in cuts[1:]:
        ids_before = encode_escaped(tokenizer, [text[:cut]], escape)[0]
        if text_ids[: len(ids_before)] != ids_before:
            return piece_ids, lengths, True
        ends.append(len(ids_before))
    return text_ids, [end - start for start, end in pairwise(ends)], False


_PROMPTS: tuple[list[str], ...] = ([], ["user"], ["system"], ["system", "user"])
_PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}),
)


@dataclass(frozen=True)
class TextRow:
    """Holds a row whose prompt and answers are the texts of columns, and no messages."""

    prompt: str  # empty where there is none
    answers: Sequence[str]  # one, the chosen and the rejected one, or none
    beside: str  # a column that the row has besides, which a rendered text would hold; empty: none


class TextEncoder:
    """Encodes texts.

    add_bos, add_eos: put BOS before a text, and EOS behind it. parses: special tokens that they spell out become
    tokens, which `template.special` counts.
    """

    def __init__(self, template: Template, add_bos: bool, add_eos: bool, parses: bool) -> None:
        self._template = template
        self._tokenizer = template.tokenizer
        self._special = template.special
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.parses = parses
        self._ends = template.stops & set(self._tokenizer.special_texts)

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
        if not self._template.is_chat or any_special is None:
            return any_special
        bos = self._tokenizer.bos_id
        turn_tokens = set(self._ends) if bos is None else {*self._ends, self._tokenizer.token_bytes(bos).decode()}
        for messages in _PROBES:
            prompt = RenderRequest(len(messages) - 1, add_generation_prompt=True)
            for text in self._template.render(messages, [RenderRequest(len(messages)), prompt]):
                turn_tokens.update(any_special.findall(text) if isinstance(text, str) else ())
        return compile_alternation(token for token in turn_tokens - set(TAGS) if len(token) > 1)


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

"""Turns a sample into ids and says which of them the loss counts.

An answer is trained from the first token after the prompt that generation would be given, up to and
including the token that ends the turn; `recipe_lib.data.trained_spans` finds it in the text, and here it
becomes ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any

from recipe_lib.data.chat_templates import RenderedChat, Template, Tools, get_eos_text
from recipe_lib.data.escaping import TAGS, Escape, SpecialTokens, encode_escaped
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    Preference,
    SampleFault,
)
from recipe_lib.data.thinking import TemplateFields
from recipe_lib.data.trained_spans import (
    MarkedAnswers,
    Span,
    check_in_whole,
    check_system,
    check_tools,
    check_train_on,
    count_left_out,
    find_answer,
    find_marked_answers,
    find_other_spans,
    list_requests,
    pick_trained,
    prepare_message,
    split_sequences,
)
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.vocabulary import compile_alternation

# Encodes texts as they stand, without a template: documents, completions, and rows that are
# rendered already.
#
# Special tokens that they spell out become tokens unless `data.parse_special_tokens` is false, and
# an end token is put behind a text that does not end with one.


# Makes ids of a text, of which some are trained: of a rendering, or of a text as it stands.


@dataclass(frozen=True)
class Encoded:
    """Holds a sequence before it is cut."""

    ids: list[int]
    trained: list[bool]  # whether the loss counts each id as a target
    apart: bool = (
        False  # a text is encoded apart from what stands before it: a token reached over the border
    )
    answers: tuple[
        tuple[int, int], ...
    ] = ()  # [start, end) of each trained message, with its end-of-turn token
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
    marked: MarkedAnswers | None = (
        None  # how it differs from the template's own marks, if there are any and they were used
    )


def encode_spans(
    tokenizer: Tokenizer,
    text: str,
    spans: Sequence[Span],
    escape: Escape,
    add_bos: bool,
    inside: bool = True,
) -> Encoded:
    """Return ids of the whole text, trained inside of the spans, or outside of them. Raises
    SampleFault: none is trained.
    """
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
    trained[:1] = [False] * len(
        trained[:1]
    )  # nothing stands before the first token to predict it from
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
    """Return ids of a text, how many lie between the cuts, and whether a cut had to be forced
    through a token.
    """
    pieces = encode_escaped(tokenizer, [text[start:end] for start, end in pairwise(cuts)], escape)
    piece_ids = list(chain.from_iterable(pieces))
    lengths = [len(piece) for piece in pieces]
    text_ids = encode_escaped(tokenizer, [text], escape)[0]
    if piece_ids == text_ids:
        return piece_ids, lengths, False
    # Pieces can differ from the whole although no token reaches over a cut: one that takes space
    # does.
    ends = [0]
    for cut in cuts[1:]:
        ids_before = encode_escaped(tokenizer, [text[:cut]], escape)[0]
        if text_ids[: len(ids_before)] != ids_before:
            return piece_ids, lengths, True
        ends.append(len(ids_before))
    return text_ids, [end - start for start, end in pairwise(ends)], False


_PROMPT_ROLES: tuple[list[str], ...] = ([], ["user"], ["system"], ["system", "user"])
_PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    (
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ),
)


@dataclass(frozen=True)
class TextRow:
    """Holds a row whose prompt and answers are the texts of columns, and no messages."""

    prompt: str  # empty where there is none
    answers: Sequence[str]  # one, the chosen and the rejected one, or none
    beside: str  # a column that the row has besides, which a rendered text would hold; empty: none


def read_text_row(sample: Conversation | Preference | LabeledAnswer) -> TextRow | None:
    """Return the texts of a row; None: something in it is a message."""
    chats = sample.conversations()
    first = chats[0]
    asked = len(first.messages) if isinstance(sample, Conversation) else first.asked
    prompt = first.messages[:asked]
    answers = [
        list(chat.messages[asked:]) for chat in chats if not isinstance(sample, Conversation)
    ]
    roles = [message["role"] for message in prompt]
    are_single = all(len(answer) == 1 for answer in answers)
    if (
        roles not in _PROMPT_ROLES
        or not are_single
        or not all(chat.places.are_texts for chat in chats)
    ):
        return None
    columns = {
        "tools": first.tools,
        "system": "system" in roles,
        "chat_template_kwargs": first.variables,
    }
    return TextRow(
        prompt=prompt[-1]["content"] if "user" in roles else "",
        answers=[answer[0]["content"] for answer in answers],
        beside=next((name for name, value in columns.items() if value), ""),
    )


class Encoder:
    """Encodes samples for one tokenizer and template.

    template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on:
    `assistant`, `last`, `all`, or a list of roles; a message's own `train` wins. add_bos: begin
    plain text with BOS where the tokenizer does so by itself; a chat template writes its own.
    history: `auto`, `split` or `refuse`, as `share_out` has them. add_eos: put EOS behind texts
    that no template writes. parse_special: special tokens that a sample spells out become tokens;
    None: in the texts of columns, and not in messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        train_on: str | Sequence[str] = "assistant",
        add_bos: bool = True,
        history: str = "auto",
        add_eos: bool = True,
        parse_special: bool | None = None,
    ) -> None:
        """Raises DataError: `chat` without a chat template, or a `train_on` that names no role."""
        check_train_on(train_on)
        self.train_on, self.history = train_on, history
        if template == "chat" and tokenizer.chat_template is None:
            raise DataError(
                f"{tokenizer.place}: data.template is chat, but the tokenizer has no chat template;"
                " set tokenizer.chat_template to a Jinja file, or data.template to plain"
            )
        self.template = (
            "plain" if template == "plain" or tokenizer.chat_template is None else "chat"
        )
        is_chat = self.template == "chat"
        self._template = Template(tokenizer, SpecialTokens(tokenizer), is_chat, add_bos)
        self.tokenizer = tokenizer
        self.special = self._template.special
        self.add_bos = add_bos and tokenizer.bos_id is not None and tokenizer.add_bos_by_default
        self._add_eos = add_eos
        self._parses_texts = parse_special is not False
        self._ends = self._template.stops & set(tokenizer.special_texts)
        self._puts_bos = self.add_bos and not is_chat  # before a rendering
        self._parses = parse_special is True  # in messages
        self.fields = TemplateFields(tokenizer if is_chat else None)

    def encode(self, sample: Conversation | Completion) -> Encoded:
        """The one sequence of a sample. Raises SampleFault for a sample that does not fit the
        template, or that becomes several.
        """
        return _get_only_sequence(self.encode_sample(sample))

    def encode_sample(self, sample: Conversation | Completion) -> EncodedSample:
        """Ids and trained targets of a sample's sequences. Raises SampleFault for one that does not
        fit the template.
        """
        if isinstance(sample, Conversation):
            picked = pick_trained(sample.messages, self.train_on, sample.places)
            if sample.asked and self.train_on != "all":
                picked[: sample.asked] = [
                    message.get("train") is True for message in sample.messages[: sample.asked]
                ]
            return self._encode_conversation(sample, picked)
        return EncodedSample([self.encode_completion(sample, with_prompt=self.train_on == "all")])

    def encode_answers(self, sample: Preference | LabeledAnswer) -> tuple[Encoded, ...]:
        """Return the prompt with each answer; only the answers are trained, whatever `train_on`
        says. Raises SampleFault.
        """
        row = read_text_row(sample) if self._parses_texts else None
        if row is not None and self.is_rendered(row):
            encoded = self.encode_rendered(row)
        elif isinstance(sample, Preference) and sample.no_prompt is not None:
            raise sample.no_prompt
        else:
            parses = self._parses or row is not None
            encoded = [self._encode_answer(chat, parses) for chat in sample.conversations()]
            for _ in encoded[1:]:
                prompt = Conversation(sample.prompt, sample.tools, variables=sample.variables)
                self.special.note_once(self._prepare_content(prompt), parses)
        if len(encoded) == 2 and encoded[0].ids == encoded[1].ids:
            raise SampleFault(
                "nothing to prefer",
                "found the same chosen and rejected answer, expected two that differ",
            )
        return tuple(encoded)

    def _encode_answer(self, chat: Conversation, parses: bool) -> Encoded:
        """Return a prompt with an answer, which alone is trained. parses: special tokens in these
        messages become tokens, as `parse_special` has it for all. Raises SampleFault.
        """
        picked = [
            number >= chat.asked
            and message["role"] == "assistant"
            and message.get("train") is not False
            for number, message in enumerate(chat.messages)
        ]
        return _get_only_sequence(self._encode_conversation(chat, picked, only=True, parses=parses))

    def encode_whole(self, content: Conversation | Document) -> Encoded:
        """A text, or messages up to the end of the last one; all of it is trained. Raises
        SampleFault.
        """
        row = (
            read_text_row(content)
            if isinstance(content, Conversation) and self._parses_texts
            else None
        )
        if row is not None and self.is_rendered(row):
            content = Document(row.prompt)
        if isinstance(content, Document):
            ids = self.encode_text(content.text)
            return Encoded(ids, [False] + [True] * (len(ids) - 1))
        chat = self.open_chat(content, self._parses or row is not None)
        return encode_spans(
            self.tokenizer, chat.whole, [], chat.escape, self._puts_bos, inside=False
        )

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with. Raises DataError."""
        chat = self.open_chat(Conversation(messages, tools), parses=False)
        (text,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
        if isinstance(text, DataError):
            raise text
        ids = encode_escaped(self.tokenizer, [text], chat.escape)[0]
        return put_bos(self.tokenizer, ids) if self._puts_bos else ids

    def _encode_conversation(
        self, sample: Conversation, picked: Sequence[bool], only: bool = False, parses: bool = False
    ) -> EncodedSample:
        """only: the loss counts nothing but the picked messages, `train_on: all` or not. parses: as
        `_encode_answer` has it.
        """
        if not any(picked):
            raise SampleFault(
                "no trained message",
                f"found none of {len(picked)} messages to be trained, expected one that"
                " data.train_on names or that says `train: true`",
            )
        inside = only or self.train_on != "all"
        numbers = [number for number, is_picked in enumerate(picked) if is_picked is inside]
        parses = parses or self._parses
        written = (
            [self._strip_end_token(message) for message in sample.messages]
            if parses
            else sample.messages
        )
        try:
            chat = self.open_chat(replace(sample, messages=written), parses)
            return self._encode_picked(chat, numbers, inside)
        except RecursionError:
            raise SampleFault(
                "nested too deep", "found lists or objects nested too deep, expected plainer ones"
            ) from None

    def _strip_end_token(self, message: Message) -> Message:
        """Return an answer without the end token that its text ends with: the template writes
        it.
        """
        end = self.find_end(message["content"]) if message["role"] == "assistant" else ""
        if not end:
            return message
        self.special.note([end], parses=True)
        return {**message, "content": self.strip_end(message["content"])}

    def _encode_picked(
        self, chat: RenderedChat, numbers: Sequence[int], inside: bool
    ) -> EncodedSample:
        """Return the messages with these numbers in as few sequences as the template allows; inside
        false: everything but them, in one.
        """
        messages = chat.messages
        answers = [number for number in numbers if messages[number]["role"] == "assistant"]
        chat.fetch([RenderRequest(len(messages)), *list_requests(answers)])
        whole = chat.whole
        marked = None
        if inside and len(answers) == len(numbers):
            if self._template.features.marks:
                marked = find_marked_answers(chat, answers)
            found = marked.answers if marked else [find_answer(chat, number) for number in answers]
            sequences = split_sequences(chat, found, self.history)
            has_all = len(answers) == sum(message["role"] == "assistant" for message in messages)
            if marked and len(sequences) == 1 and has_all:
                parts = [marked.whole]
            else:
                parts = [(one.text, one.spans) for one in sequences]
        else:
            sequences = []
            parts = [(whole, self._find_in_whole(chat, numbers))]
        check_tools(chat.tools, whole, chat.places.tools)
        check_system(chat)
        unseen = count_left_out(messages, whole)
        ends = [sum(not answer.ends for answer in one.answers) for one in sequences] or [0]
        encoded = list[Encoded]()
        for (text, trained), untrained_ends in zip(parts, ends, strict=True):
            one = encode_spans(self.tokenizer, text, trained, chat.escape, self._puts_bos, inside)
            encoded.append(replace(one, left_out=unseen, untrained_ends=untrained_ends))
        is_split = len(encoded) > 1
        whole_ids = encode_escaped(self.tokenizer, [whole], chat.escape)[0] if is_split else []
        return EncodedSample(encoded, len(whole_ids), marked)

    def _find_in_whole(self, chat: RenderedChat, numbers: Sequence[int]) -> list[Span]:
        """Return where these messages stand in the one rendering of all."""
        others = [number for number in numbers if chat.messages[number]["role"] != "assistant"]
        by_number = dict(zip(others, find_other_spans(chat, others), strict=True))
        for number in sorted(set(numbers) - set(others)):
            answer = find_answer(chat, number)
            remedy = (
                "data.train_on to assistant or last, or tokenizer.chat_template to one that"
                " does not"
            )
            check_in_whole(chat, answer, remedy)
            (span,) = answer.spans
            by_number[number] = Span(span.start, min(span.end, len(chat.whole)))
        return [by_number[number] for number in numbers]

    def open_chat(self, sample: Conversation, parses: bool) -> RenderedChat:
        """Return a conversation to be rendered, with a letter in the special tokens that it spells
        out; they are noted.

        parses: as `_encode_answer` has it.
        """
        (messages, tools, variables), escape = self.special.escape(
            self._prepare_content(sample), parses
        )
        opened = replace(sample, messages=messages, tools=tools, variables=variables)
        return RenderedChat(self._template, opened, escape)

    def _prepare_content(self, sample: Conversation) -> list[Any]:
        """Return what the template is given: messages, tools, variables."""
        habits = self._template.features
        messages = [
            prepare_message(message, sample.places.at(number), habits)
            for number, message in enumerate(sample.messages)
        ]
        return [messages, list(sample.tools) if sample.tools else None, dict(sample.variables)]

    def encode_text(self, text: str) -> list[int]:
        """Return ids of a text, without an end token."""
        self.special.note([text], self._parses_texts)
        return self.tokenizer.encode(text, add_bos=self.add_bos, allow_special=self._parses_texts)

    def encode_document(self, text: str) -> list[int]:
        """Return ids of a text, and EOS unless it ends with an end token."""
        ids = self.encode_text(text)
        eos = self.tokenizer.eos_id
        is_ended = self._parses_texts and self.find_end(text)
        return ids if is_ended or eos is None or not self._add_eos else [*ids, eos]

    def encode_completion(self, sample: Completion, with_prompt: bool = False) -> Encoded:
        """Return prompt and completion as they stand, and EOS unless they end with an end token;
        the completion is trained.

        with_prompt: all of it is. Raises DataError: there is no EOS. Raises SampleFault: nothing is
        trained.
        """
        texts = [sample.prompt, sample.completion]
        escape = Escape()
        if self._parses_texts:
            self.special.note(texts, parses=True)
        else:
            texts, escape = self.special.escape(texts)
        is_ended = self._parses_texts and self.find_end(sample.completion)
        whole_text = "".join(texts) + (
            get_eos_text(self.tokenizer) if self._add_eos and not is_ended else ""
        )
        span = Span(0 if with_prompt else len(texts[0]), len(whole_text))
        return encode_spans(self.tokenizer, whole_text, [span], escape, self.add_bos)

    def find_end(self, text: str) -> str:
        """Return the special token at the end of a text, white space left out, that generation
        stops at; empty: none.
        """
        bare = text.rstrip()
        return max((end for end in self._ends if bare.endswith(end)), key=len, default="")

    def strip_end(self, text: str) -> str:
        """Return the text without the end token at its end, if it has one."""
        end = self.find_end(text)
        return text.rstrip().removesuffix(end) if end else text

    def is_rendered(self, row: TextRow) -> bool:
        """Return whether the texts hold special tokens of a template; an end token behind an answer
        is none.

        Raises SampleFault where something stands beside them that they would have to hold.
        """
        turns = self._turn_tokens
        if turns is None or not any(
            map(turns.search, [row.prompt, *map(self.strip_end, row.answers)])
        ):
            self.special.note_foreign([row.prompt, *row.answers])
            return False
        if row.beside:
            raise SampleFault(
                f"{row.beside} beside a rendered text",
                f".{row.beside}: found {row.beside} beside texts that spell out the chat template's"
                " special tokens and are not rendered again, expected it within them",
            )
        self.special.spelled.rendered = 1
        return True

    def encode_rendered(self, row: TextRow) -> list[Encoded]:
        """Return each answer behind the prompt, as they stand. Raises SampleFault: two texts that
        share no beginning.

        The prompt of a pair without one is what the ids of both begin with.
        """
        prompt = row.prompt
        if prompt or len(row.answers) == 1:
            are_whole = all(answer.startswith(prompt) for answer in row.answers)
            answers = (
                [answer.removeprefix(prompt) for answer in row.answers]
                if are_whole
                else row.answers
            )
            encoded = [self.encode_completion(Completion(prompt, answer)) for answer in answers]
            self.special.note_once([prompt] * (len(encoded) - 1), parses=True)
            return encoded
        both = [self.encode_document(answer) for answer in row.answers]
        shared = len(list(takewhile(lambda ids: ids[0] == ids[1], zip(*both, strict=False))))
        if not shared:
            raise SampleFault(
                "no prompt",
                "found two rendered texts that differ from their first token on, expected them to"
                " begin alike",
            )
        return [
            Encoded(
                ids, [False] * shared + [True] * (len(ids) - shared), answers=((shared, len(ids)),)
            )
            for ids in both
        ]

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str] | None:
        """Return what finds the special tokens that make a text a rendered one: those that the
        template writes, BOS, and those that end an answer; without a template any. None: there are
        none.
        """
        any_special = self.special.pattern
        if not self._template.is_chat or any_special is None:
            return any_special
        bos = self.tokenizer.bos_id
        turn_tokens = (
            set(self._ends)
            if bos is None
            else {*self._ends, self.tokenizer.get_token_bytes(bos).decode()}
        )
        for messages in _PROBES:
            prompt = RenderRequest(len(messages) - 1, add_generation_prompt=True)
            for text in self._template.render(messages, [RenderRequest(len(messages)), prompt]):
                turn_tokens.update(any_special.findall(text) if isinstance(text, str) else ())
        return compile_alternation(token for token in turn_tokens - set(TAGS) if len(token) > 1)


def _get_only_sequence(sample: EncodedSample) -> Encoded:
    if len(sample.sequences) > 1:
        raise SampleFault(
            "several sequences",
            f"found {len(sample.sequences)} answers that the chat template writes in as many ways,"
            " expected one sequence; set tokenizer.chat_template to one that does not write"
            " earlier answers anew",
        )
    return sample.sequences[0]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str = "auto", add_bos: bool = True
) -> list[int]:
    """Ids to generate an answer from, the same as training puts before that answer. Raises
    DataError.
    """
    return Encoder(tokenizer, template, add_bos=add_bos).prompt(messages)


def why_no_system_message(tokenizer: Tokenizer, text: str) -> str | None:
    """Why a conversation cannot begin with this message of the system; None: it can."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
    chat = Encoder(tokenizer, "auto").open_chat(Conversation(messages), parses=False)
    (written,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
    if isinstance(written, DataError):
        return str(written)
    if count_left_out(chat.messages[:1], written):
        return f"{tokenizer.chat_template_place}: the chat template does not write a system message"
    return None

"""Encode a sample as ids and a label mask, which says which of them the loss counts.

`data.encoding` makes an `Encoder` and calls its `encode_...` methods for each sample;
`render_prompt` makes the prompt of generation by the same rules. The chat template renders a
conversation, in which an answer is trained from the first token after that prompt to the one that
ends its turn. Other texts are encoded as they stand, also rendered ones, which spell out a
template's special tokens already.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from os.path import commonprefix
from typing import Any

from recipe_lib.data.chat_templates import (
    RenderedChat,
    Template,
    TemplateFields,
    Tools,
    get_eos_text,
)
from recipe_lib.data.escaping import TAGS, Escape, SpecialTokens, encode_escaped
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    Preference,
    SampleFault,
    TextRow,
    read_text_row,
)
from recipe_lib.data.trained_spans import (
    MarkedAnswers,
    Span,
    check_in_whole,
    check_train_on,
    find_answer,
    find_marked_answers,
    find_other_spans,
    list_requests,
    pick_trained,
    split_sequences,
)
from recipe_lib.data.written_messages import (
    check_system,
    check_tools,
    count_left_out,
    prepare_message,
)
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.vocabulary import compile_alternation


@dataclass(frozen=True)
class Encoded:
    """A sequence before it is cut to max_seq_len."""

    ids: list[int]
    trained: list[bool]  # for each id, whether the loss counts it as a target
    # Whether the text was encoded in pieces, as a token would reach over the border of a span
    in_pieces: bool = False
    # Indices [start, end) into ids of each trained answer, with its end-of-turn token
    answers: tuple[tuple[int, int], ...] = ()
    # Number of trained answers without a trained end of turn: it was cut off, or there is none
    untrained_ends: int = 0
    # Number of messages of the system and the user that the template does not write
    left_out: int = 0

    def cut(self, room: int) -> "Encoded":
        """Return the sequence cut to its first `room` ids.

        An answer that loses its end counts as one of the `untrained_ends`.
        """
        answers = tuple((start, end) for start, end in self.answers if start < room)
        return Encoded(
            ids=self.ids[:room],
            trained=self.trained[:room],
            in_pieces=self.in_pieces,
            answers=answers,
            untrained_ends=self.untrained_ends + sum(end > room for _, end in answers),
            left_out=self.left_out,
        )


@dataclass(frozen=True)
class EncodedSample:
    """The sequences of a sample.

    A conversation becomes several where the template writes earlier answers differently once later
    messages follow: it drops their thoughts, for example.
    """

    sequences: Sequence[Encoded]
    whole_tokens: int = 0  # ids of the conversation rendered once; 0 if it is one sequence
    # The answers by the template's own marks (`{% generation %}`); None: they were not used
    marked: MarkedAnswers | None = None


def encode_spans(
    tokenizer: Tokenizer,
    text: str,
    *,
    spans: Sequence[Span],
    escape: Escape,
    add_bos: bool,
    inside: bool = True,
) -> Encoded:
    """Return ids of a text up to the last trained one, trained inside of the spans.

    spans: ranges of characters of the text, in order. escape: the letter inside special tokens that
    the sample spells out, and whether they become tokens. add_bos: put BOS first, unless it is
    there. inside: False trains what lies outside of the spans instead. Raises SampleFault if
    nothing is trained.
    """
    cuts = [0, *chain.from_iterable((span.start, span.end) for span in spans), len(text)]
    ids, lengths, in_pieces = _encode_between(tokenizer, text, cuts=cuts, escape=escape)
    if add_bos and ids[:1] != [tokenizer.bos_id]:
        ids = tokenizer.put_bos(ids)
        lengths[0] += 1
    trained = list[bool]()
    for index, length in enumerate(lengths):  # odd pieces lie inside of a span, even ones between
        trained += [bool(index % 2) is inside] * length
    if trained:
        trained[0] = False  # nothing stands before the first token to predict it from
    if True not in trained:
        raise SampleFault("no trained token", "found no label token, expected an answer")
    end = len(trained) - trained[::-1].index(True)  # after the last target nothing is trained
    ends = list(accumulate(lengths, initial=0))  # [0, end of each piece, in ids]
    # strict=False: the first list has one more entry, the end of the text
    answers = tuple(zip(ends[1::2], ends[2::2], strict=False)) if inside else ((0, end),)
    return Encoded(ids[:end], trained[:end], in_pieces=in_pieces, answers=answers)


def _encode_between(
    tokenizer: Tokenizer, text: str, cuts: Sequence[int], escape: Escape
) -> tuple[list[int], list[int], bool]:
    """Return (ids of a text, number of ids between each two cuts, whether it is in pieces).

    cuts: offsets of characters, ascending, the first 0 and the last the text's length. The text is
    encoded in pieces, one from cut to cut, only where one of its tokens would reach over a cut.
    """
    pieces = encode_escaped(tokenizer, [text[start:end] for start, end in pairwise(cuts)], escape)
    piece_ids = list(chain.from_iterable(pieces))
    lengths = [len(piece) for piece in pieces]
    text_ids = encode_escaped(tokenizer, [text], escape)[0]
    if piece_ids == text_ids:
        return piece_ids, lengths, False
    # Pieces can differ from the whole although no token reaches over a cut: a special token may
    # take the white space around it. So the ids up to each cut are compared with the whole text's.
    ends = [0]
    for cut in cuts[1:]:
        ids_before = encode_escaped(tokenizer, [text[:cut]], escape)[0]
        if text_ids[: len(ids_before)] != ids_before:
            return piece_ids, lengths, True
        ends.append(len(ids_before))
    return text_ids, [end - start for start, end in pairwise(ends)], False


# Conversations whose renderings show the special tokens that the template writes
_PROBES: tuple[Sequence[Message], ...] = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    (
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ),
)


class Encoder:
    """An encoder of samples for one tokenizer and template.

    A sample's text may spell out special tokens. In a column of text they become tokens, in a
    message they stay text, unless `parse_special_tokens` decides for both.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        train_on: str | Sequence[str] = "assistant",
        add_bos: bool = True,
        history: str = "auto",
        add_eos: bool = True,
        parse_special_tokens: bool | None = None,
    ) -> None:
        """Take the settings of the section `data`.

        template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on:
        `assistant`, `last` (answer), `all`, or a list of roles; a message's own `train` wins.
        add_bos: begin text that no chat template writes with BOS, if the tokenizer does so by
        default. history: for answers that the template writes differently once messages follow:
        `auto` makes as few sequences as can be, `split` one for each answer, `refuse` one or a
        SampleFault. add_eos: put EOS behind texts that no template writes. parse_special_tokens:
        True encodes special tokens that a sample spells out as tokens, False as text; None: see
        the class.

        Raises DataError for `chat` without a chat template, or a `train_on` that names no role.
        """
        check_train_on(train_on)
        self.train_on = train_on
        self.history = history
        if template == "chat" and tokenizer.chat_template is None:
            raise DataError(
                f"{tokenizer.place}: data.template is chat, but the tokenizer has no chat template;"
                " set tokenizer.chat_template to a Jinja file, or data.template to plain"
            )
        is_chat = template != "plain" and tokenizer.chat_template is not None
        self.template = "chat" if is_chat else "plain"
        self._template = Template(
            tokenizer, SpecialTokens(tokenizer), is_chat=is_chat, add_bos=add_bos
        )
        self.tokenizer = tokenizer
        self.special = self._template.special
        self.add_bos = add_bos and tokenizer.bos_id is not None and tokenizer.add_bos_by_default
        self._add_eos = add_eos
        # Whether special tokens that columns of text spell out become tokens
        self._parses_special_in_texts = parse_special_tokens is not False
        # Special tokens at which generation stops, as text
        self._ends = self._template.stops & set(tokenizer.special_texts)
        self._puts_bos = self.add_bos and not is_chat  # before a conversation
        # The same for messages
        self._parses_special_in_messages = parse_special_tokens is True
        # Which keys of messages the template reads, for the report on keys that change nothing
        self.fields = TemplateFields(tokenizer if is_chat else None)

    def encode(self, sample: Conversation | Completion) -> Encoded:
        """Return the one sequence of a sample.

        Raises SampleFault for a sample that does not fit the template, or becomes several
        sequences.
        """
        return _get_only_sequence(self.encode_sample(sample))

    def encode_sample(self, sample: Conversation | Completion) -> EncodedSample:
        """Return ids and label masks of a sample's sequences.

        Raises SampleFault for a sample that does not fit the template or trains nothing.
        """
        if isinstance(sample, Conversation):
            picked = pick_trained(sample.messages, self.train_on, sample.places)
            # `asked`: number of leading messages that are the sample's prompt; 0: not known
            if sample.asked and self.train_on != "all":
                picked[: sample.asked] = [
                    message.get("train") is True for message in sample.messages[: sample.asked]
                ]
            return self._encode_conversation(sample, picked)
        return EncodedSample([self.encode_completion(sample, with_prompt=self.train_on == "all")])

    def encode_answers(self, sample: Preference | LabeledAnswer) -> tuple[Encoded, ...]:
        """Return one sequence for each answer, behind the prompt: two of a pair, else one.

        Only the answers are trained, whatever `train_on` says. Raises SampleFault for a sample that
        does not fit the template, a pair of equal answers, or one without a prompt.
        """
        # The prompt and answers if they are columns of text; None: messages, or text stays text
        row = read_text_row(sample) if self._parses_special_in_texts else None
        if row is not None and self.is_rendered(row):
            encoded = self.encode_rendered(row)
        elif isinstance(sample, Preference) and sample.no_prompt is not None:
            raise sample.no_prompt
        else:
            parses_special = self._parses_special_in_messages or row is not None
            encoded = [
                self._encode_answer(chat, parses_special) for chat in sample.build_conversations()
            ]
            for _ in encoded[1:]:  # special tokens of a pair's prompt were counted with each answer
                prompt = Conversation(sample.prompt, sample.tools, variables=sample.variables)
                self.special.note_once(self._prepare_content(prompt), parses_special)
        if len(encoded) == 2 and encoded[0].ids == encoded[1].ids:
            raise SampleFault(
                "nothing to prefer",
                "found the same chosen and rejected answer, expected two that differ",
            )
        return tuple(encoded)

    def _encode_answer(self, chat: Conversation, parses_special: bool) -> Encoded:
        """Return a prompt with an answer, which alone is trained.

        parses_special: encode special tokens that these messages spell out as tokens. Raises
        SampleFault if they do not fit the template, or become several sequences.
        """
        picked = [
            message_index >= chat.asked
            and message["role"] == "assistant"
            and message.get("train") is not False
            for message_index, message in enumerate(chat.messages)
        ]
        return _get_only_sequence(
            self._encode_conversation(chat, picked, only=True, parses_special=parses_special)
        )

    def encode_whole(self, content: Conversation | Document) -> Encoded:
        """Return a text, or the rendering of messages, with everything trained.

        It is for classification, where the model reads everything and scores it. Raises SampleFault
        if the template refuses the messages, or a rendered text has something beside it.
        """
        row = (
            read_text_row(content)
            if isinstance(content, Conversation) and self._parses_special_in_texts
            else None
        )
        if row is not None and self.is_rendered(row):
            content = Document(row.prompt)
        if isinstance(content, Document):
            ids = self.encode_text(content.text)
            # Nothing stands before the first token to predict it from.
            return Encoded(ids, [False] + [True] * (len(ids) - 1))
        chat = self.open_chat(content, self._parses_special_in_messages or row is not None)
        return encode_spans(
            self.tokenizer,
            chat.whole,
            spans=[],
            escape=chat.escape,
            add_bos=self._puts_bos,
            inside=False,
        )

    def encode_prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return ids of a conversation with the beginning of the assistant's next answer.

        Raises DataError where the template refuses the conversation.
        """
        chat = self.open_chat(Conversation(messages, tools), parses_special=False)
        (text,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
        if isinstance(text, DataError):
            raise text
        ids = encode_escaped(self.tokenizer, [text], chat.escape)[0]
        return self.tokenizer.put_bos(ids) if self._puts_bos else ids

    def _encode_conversation(
        self,
        sample: Conversation,
        picked: Sequence[bool],
        only: bool = False,
        parses_special: bool = False,
    ) -> EncodedSample:
        """Return the sequences in which the picked messages are trained.

        picked: for each message whether it is trained. only: train the picked messages alone, even
        with `train_on: all`; that otherwise trains all text but the messages that are not picked.
        parses_special: as for `_encode_answer`. Raises SampleFault if no message is picked, or the
        messages do not fit the template.
        """
        if not any(picked):
            raise SampleFault(
                "no trained message",
                f"found none of {len(picked)} messages to be trained, expected one that"
                " data.train_on names or that says `train: true`",
            )
        inside = only or self.train_on != "all"
        # Of the picked messages, or with `train_on: all` of the others, which are left untrained
        indices = [index for index, is_picked in enumerate(picked) if is_picked is inside]
        parses_special = parses_special or self._parses_special_in_messages
        if parses_special:
            messages = [self._strip_end_token(message) for message in sample.messages]
            sample = replace(sample, messages=messages)
        try:
            return self._encode_picked(self.open_chat(sample, parses_special), indices, inside)
        except RecursionError:
            raise SampleFault(
                "nested too deep", "found lists or objects nested too deep, expected plainer ones"
            ) from None

    def _strip_end_token(self, message: Message) -> Message:
        """Return the message, an answer without the end token that its text ends with.

        The template writes that token itself.
        """
        end = self.find_end(message["content"]) if message["role"] == "assistant" else ""
        if not end:
            return message
        self.special.note([end], parses_special=True)
        return {**message, "content": self.strip_end(message["content"])}

    def _encode_picked(
        self, chat: RenderedChat, message_indices: Sequence[int], inside: bool
    ) -> EncodedSample:
        """Return the sequences that train the messages with these indices.

        message_indices: indices into `chat.messages`. inside: True trains these messages, False
        everything but them, in one sequence. Answers alone may take several, as `history` says.
        Raises SampleFault for what the template leaves out or writes in another way.
        """
        messages = chat.messages
        answers = [index for index in message_indices if messages[index]["role"] == "assistant"]
        # In one call, since a tokenizer's template renders in another process
        chat.cache_renderings([RenderRequest(len(messages)), *list_requests(answers)])
        whole = chat.whole
        marked = None
        if inside and len(answers) == len(message_indices):
            if self._template.features.marks:
                marked = find_marked_answers(chat, answers)
            trained_answers = (
                marked.answers if marked else [find_answer(chat, index) for index in answers]
            )
            sequences = split_sequences(chat, trained_answers, self.history)
            has_all = len(answers) == sum(message["role"] == "assistant" for message in messages)
            # With one sequence for all answers, all of the template's marks are kept as they are.
            if marked and len(sequences) == 1 and has_all:
                texts_with_spans = [marked.whole]
            else:
                texts_with_spans = [(sequence.text, sequence.spans) for sequence in sequences]
        else:
            sequences = []
            texts_with_spans = [(whole, self._find_in_whole(chat, message_indices))]
        check_tools(chat.tools, whole, chat.places.tools)
        check_system(chat)
        left_out = count_left_out(messages, whole)
        untrained_ends = [
            sum(not answer.ends for answer in sequence.answers) for sequence in sequences
        ] or [0]
        encode = partial(
            encode_spans,
            self.tokenizer,
            escape=chat.escape,
            add_bos=self._puts_bos,
            inside=inside,
        )
        encoded = [
            replace(encode(text, spans=spans), left_out=left_out, untrained_ends=num_untrained)
            for (text, spans), num_untrained in zip(texts_with_spans, untrained_ends, strict=True)
        ]
        # For the report: the tokens of the conversation if it were one sequence
        is_split = len(encoded) > 1
        whole_ids = encode_escaped(self.tokenizer, [whole], chat.escape)[0] if is_split else []
        return EncodedSample(encoded, len(whole_ids), marked)

    def _find_in_whole(self, chat: RenderedChat, message_indices: Sequence[int]) -> list[Span]:
        """Return the span of each of these messages in the rendering of all.

        Raises SampleFault where the template writes an answer differently once messages follow it.
        """
        other_indices = [
            index for index in message_indices if chat.messages[index]["role"] != "assistant"
        ]
        span_by_index = dict(zip(other_indices, find_other_spans(chat, other_indices), strict=True))
        for message_index in sorted(set(message_indices) - set(other_indices)):  # the answers
            answer = find_answer(chat, message_index)
            check_in_whole(
                chat,
                answer,
                remedy="data.train_on to assistant or last, or tokenizer.chat_template to one that"
                " does not",
            )
            (span,) = answer.spans
            # The answer's text may have an added end, which the rendering of all has not.
            span_by_index[message_index] = Span(span.start, min(span.end, len(chat.whole)))
        return [span_by_index[message_index] for message_index in message_indices]

    def open_chat(self, sample: Conversation, parses_special: bool) -> RenderedChat:
        """Return a conversation to be rendered by the template.

        Special tokens that its texts spell out are counted for the report, and escaped: a letter
        inside them tells them from the template's own. parses_special: as for `_encode_answer`.
        """
        (messages, tools, variables), escape = self.special.escape(
            self._prepare_content(sample), parses_special
        )
        opened = replace(sample, messages=messages, tools=tools, variables=variables)
        return RenderedChat(self._template, opened, escape)

    def _prepare_content(self, sample: Conversation) -> list[Any]:
        """Return the template's inputs: [messages, tools or None, variables]."""
        messages = [
            prepare_message(
                message, sample.places.locate_message(message_index), self._template.features
            )
            for message_index, message in enumerate(sample.messages)
        ]
        return [messages, list(sample.tools) if sample.tools else None, dict(sample.variables)]

    def encode_text(self, text: str) -> list[int]:
        """Return ids of a text, without an end token."""
        self.special.note([text], self._parses_special_in_texts)
        return self.tokenizer.encode(
            text, add_bos=self.add_bos, allow_special=self._parses_special_in_texts
        )

    def encode_document(self, text: str) -> list[int]:
        """Return ids of a text and EOS; no EOS behind an end token, or without `add_eos`."""
        ids = self.encode_text(text)
        eos = self.tokenizer.eos_id
        is_ended = self._parses_special_in_texts and self.find_end(text)
        return ids if is_ended or eos is None or not self._add_eos else [*ids, eos]

    def encode_completion(self, sample: Completion, with_prompt: bool = False) -> Encoded:
        """Return prompt and completion as they stand, and EOS unless they end with an end token.

        with_prompt: train the prompt as well as the completion. Raises DataError if EOS is to be
        added and there is none, SampleFault if nothing is trained.
        """
        texts = [sample.prompt, sample.completion]
        escape = Escape()
        if self._parses_special_in_texts:
            self.special.note(texts, parses_special=True)
        else:
            texts, escape = self.special.escape(texts)
        is_ended = self._parses_special_in_texts and self.find_end(sample.completion)
        whole_text = "".join(texts)
        if self._add_eos and not is_ended:
            whole_text += get_eos_text(self.tokenizer)
        span = Span(0 if with_prompt else len(texts[0]), len(whole_text))
        return encode_spans(
            self.tokenizer, whole_text, spans=[span], escape=escape, add_bos=self.add_bos
        )

    def find_end(self, text: str) -> str:
        """Return the end token that a text ends with, white space after it left out; "": none.

        End tokens are the special tokens at which generation stops. The longest that fits is
        returned.
        """
        bare = text.rstrip()
        return max((end for end in self._ends if bare.endswith(end)), key=len, default="")

    def strip_end(self, text: str) -> str:
        end = self.find_end(text)
        return text.rstrip().removesuffix(end) if end else text

    def is_rendered(self, row: TextRow) -> bool:
        """Return True if a row's texts are renderings already: they spell out a turn's tokens.

        An end token behind an answer does not count. Raises SampleFault if a rendered row has
        something beside the texts, such as tools, that the rendering would have to contain.
        """
        turn_tokens = self._turn_tokens
        texts = [row.prompt, *map(self.strip_end, row.answers)]
        if turn_tokens is None or not any(map(turn_tokens.search, texts)):
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
        """Return a sequence for each answer behind the prompt, as they stand; answers are trained.

        In a pair without a prompt, the ids that both texts begin with are the prompt. Raises
        SampleFault for two texts that share no beginning.
        """
        prompt = row.prompt
        if prompt or len(row.answers) == 1:
            answers = row.answers
            if all(answer.startswith(prompt) for answer in answers):  # they repeat the prompt
                answers = [answer.removeprefix(prompt) for answer in answers]
            encoded = [self.encode_completion(Completion(prompt, answer)) for answer in answers]
            # Special tokens of the prompt were counted with each answer: they count once.
            self.special.note_once([prompt] * (len(encoded) - 1), parses_special=True)
            return encoded
        both_ids = [self.encode_document(answer) for answer in row.answers]
        shared = len(commonprefix(both_ids))
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
            for ids in both_ids
        ]

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str] | None:
        """Return a pattern of the special tokens that show a text to be a rendering; None: none do.

        With a chat template: the tokens that it writes, BOS, and the end tokens. Without one: all
        special tokens.
        """
        any_special = self.special.pattern
        if not self._template.is_chat or any_special is None:
            return any_special
        bos = self.tokenizer.bos_id
        turn_tokens = set(self._ends)
        if bos is not None:
            turn_tokens.add(self.tokenizer.get_token_bytes(bos).decode())
        for messages in _PROBES:
            prompt = RenderRequest(len(messages) - 1, add_generation_prompt=True)
            for text in self._template.render(messages, [RenderRequest(len(messages)), prompt]):
                turn_tokens.update(any_special.findall(text) if isinstance(text, str) else ())
        # A thought's tags may stand in any answer. A token of one letter may be in any text.
        return compile_alternation(token for token in turn_tokens - set(TAGS) if len(token) > 1)


def _get_only_sequence(sample: EncodedSample) -> Encoded:
    """Return the one sequence of a sample; raise SampleFault if there are several."""
    if len(sample.sequences) > 1:
        raise SampleFault(
            "several sequences",
            f"found {len(sample.sequences)} answers that the chat template writes in as many ways,"
            " expected one sequence; set tokenizer.chat_template to one that does not write"
            " earlier answers anew",
        )
    return sample.sequences[0]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str = "auto"
) -> list[int]:
    """Return ids to generate an answer from, the same as training puts before that answer.

    template: `chat`, `plain` or `auto`, as for `Encoder`. Raises DataError for `chat` without a
    chat template, or if the template refuses the conversation.
    """
    return Encoder(tokenizer, template).encode_prompt(messages)


def why_no_system_message(tokenizer: Tokenizer, text: str) -> str | None:
    """Return why a conversation cannot begin with this system message; None: it can."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
    chat = Encoder(tokenizer, "auto").open_chat(Conversation(messages), parses_special=False)
    (rendering,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
    if isinstance(rendering, DataError):
        return str(rendering)
    if count_left_out(chat.messages[:1], rendering):
        return f"{tokenizer.chat_template_place}: the chat template does not write a system message"
    return None

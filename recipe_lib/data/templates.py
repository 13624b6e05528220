"""Turns a sample into ids and says which of them the loss counts.

An answer is trained from the first token after the prompt that generation would be given, up to and including the
token that ends the turn; `recipe_lib.data.answers` finds it in the text, and here it becomes ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipe_lib.data import spans
from recipe_lib.data.answers import check_in_whole, find_answer, find_marked_answers, list_requests, share_out
from recipe_lib.data.escaping import SpecialTokens, encode_escaped
from recipe_lib.data.rendering import RenderedChat, Template, Tools
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    Preference,
    SampleFault,
    SamplePlaces,
)
from recipe_lib.data.spans import Span
from recipe_lib.data.template_behavior import TemplateFields
from recipe_lib.data.text_encoding import Encoded, EncodedSample, TextEncoder, encode_spans, put_bos, read_text_row
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer


class Encoder:
    """Encodes samples for one tokenizer and template.

    template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on: `assistant`, `last`, `all`,
    or a list of roles; a message's own `train` wins. add_bos: begin plain text with BOS where the tokenizer does so
    by itself; a chat template writes its own. history: `auto`, `split` or `refuse`, as `share_out` has them. add_eos:
    put EOS behind texts that no template writes. parse_special: special tokens that a sample spells out become tokens;
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
        spans.check_train_on(train_on)
        self.tokenizer, self.train_on, self.history = tokenizer, train_on, history
        if template == "chat" and tokenizer.chat_template is None:
            raise DataError(
                f"{tokenizer.place}: data.template is chat, but the tokenizer has no chat template; "
                "set tokenizer.chat_template to a Jinja file, or data.template to plain"
            )
        self.template = "plain" if template == "plain" or tokenizer.chat_template is None else "chat"
        is_chat = self.template == "chat"
        self.add_bos = add_bos and tokenizer.bos_id is not None and tokenizer.add_bos_by_default
        self._puts_bos = self.add_bos and not is_chat  # before a rendering
        self.special = SpecialTokens(tokenizer)
        self._writer = Template(tokenizer, self.special, is_chat, add_bos)
        self._parses = parse_special is True  # in messages
        parses_texts = parse_special is not False
        self.texts = TextEncoder(self._writer, self.add_bos, add_eos, parses=parses_texts)
        self.fields = TemplateFields(tokenizer if is_chat else None)

    def encode(self, sample: Conversation | Completion) -> Encoded:
        """The one sequence of a sample. Raises SampleFault for a sample that does not fit the template, or that becomes
        several."""
        return _only(self.encode_sample(sample))

    def encode_sample(self, sample: Conversation | Completion) -> EncodedSample:
        """Ids and trained targets of a sample's sequences. Raises SampleFault for one that does not fit the
        template."""
        if isinstance(sample, Conversation):
            picked = spans.pick_trained(sample.messages, self.train_on, sample.places)
            if sample.asked and self.train_on != "all":
                picked[: sample.asked] = [message.get("train") is True for message in sample.messages[: sample.asked]]
            return self._conversation(sample, picked)
        return EncodedSample([self.texts.encode_completion(sample, with_prompt=self.train_on == "all")])

    def encode_preference(self, sample: Preference) -> tuple[Encoded, Encoded]:
        """The prompt with the chosen answer, and with the rejected one; only the answers are trained, whatever
        `train_on` says. Raises SampleFault."""
        row = read_text_row(sample) if self.texts.parses else None
        if row is not None and self.texts.is_rendered(row):
            chosen, rejected = self.texts.encode_rendered(row)
        elif sample.no_prompt is not None:
            raise sample.no_prompt
        else:
            parses = self._parses or row is not None
            chosen, rejected = (
                self.encode_answer(
                    sample.prompt, answer, sample.tools, places, variables=sample.variables, parses=parses
                )
                for answer, places in zip((sample.chosen, sample.rejected), sample.places, strict=True)
            )
            self.special.note_once(self._prepared(sample.prompt, sample.tools, sample.variables), parses)
        if chosen.ids == rejected.ids:
            raise SampleFault(
                "nothing to prefer", "found the same chosen and rejected answer, expected two that differ"
            )
        return chosen, rejected

    def encode_labeled(self, sample: LabeledAnswer) -> Encoded:
        """Return the prompt with the answer, which alone is trained. Raises SampleFault."""
        row = read_text_row(sample) if self.texts.parses else None
        if row is not None and self.texts.is_rendered(row):
            return self.texts.encode_rendered(row)[0]
        return self.encode_answer(
            sample.prompt,
            sample.completion,
            sample.tools,
            sample.places,
            variables=sample.variables,
            parses=row is not None,
        )

    def encode_answer(
        self,
        prompt: Sequence[Message],
        answer: Sequence[Message],
        tools: Tools,
        places: SamplePlaces,
        *,
        variables: Mapping[str, Any] | None = None,
        parses: bool = False,
    ) -> Encoded:
        """A prompt with an answer, which alone is trained, whatever `train_on` says. parses: special tokens in these
        messages become tokens, as `parse_special` has it for all. Raises SampleFault."""
        ours = [message["role"] == "assistant" and message.get("train") is not False for message in answer]
        whole = Conversation([*prompt, *answer], tools, places, variables or {})
        return _only(self._conversation(whole, [False] * len(prompt) + ours, only=True, parses=parses))

    def encode_whole(self, content: Conversation | Document) -> Encoded:
        """A text, or messages up to the end of the last one; all of it is trained. Raises SampleFault."""
        row = read_text_row(content) if isinstance(content, Conversation) and self.texts.parses else None
        if row is not None and self.texts.is_rendered(row):
            content = Document(row.prompt)
        if isinstance(content, Document):
            ids = self.texts.encode_text(content.text)
            return Encoded(ids, [False] + [True] * (len(ids) - 1))
        chat = self.open_chat(content, self._parses or row is not None)
        return encode_spans(self.tokenizer, chat.whole, [], chat.escape, self._puts_bos, inside=False)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with. Raises DataError."""
        chat = self.open_chat(Conversation(messages, tools), parses=False)
        (text,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
        if isinstance(text, DataError):
            raise text
        ids = encode_escaped(self.tokenizer, [text], chat.escape)[0]
        return put_bos(self.tokenizer, ids) if self._puts_bos else ids

    def _conversation(
        self, sample: Conversation, picked: Sequence[bool], only: bool = False, parses: bool = False
    ) -> EncodedSample:
        """only: the loss counts nothing but the picked messages, `train_on: all` or not. parses: as `encode_answer`
        has it."""
        if not any(picked):
            raise SampleFault(
                "no trained message",
                f"found none of {len(picked)} messages to be trained, expected one that data.train_on names or that "
                "says `train: true`",
            )
        inside = only or self.train_on != "all"
        numbers = [number for number, is_picked in enumerate(picked) if is_picked is inside]
        parses = parses or self._parses
        written = [self._without_end(message) for message in sample.messages] if parses else sample.messages
        try:
            chat = self.open_chat(replace(sample, messages=written), parses)
            return self._shared_out(chat, numbers, inside)
        except RecursionError:
            raise SampleFault(
                "nested too deep", "found lists or objects nested too deep, expected plainer ones"
            ) from None

    def _without_end(self, message: Message) -> Message:
        """Return an answer without the end token that its text ends with: the template writes it."""
        end = self.texts.find_end(message["content"]) if message["role"] == "assistant" else ""
        if not end:
            return message
        self.special.note([end], parses=True)
        return {**message, "content": self.texts.take_end(message["content"])}

    def _shared_out(self, chat: RenderedChat, numbers: Sequence[int], inside: bool) -> EncodedSample:
        """Return the messages with these numbers in as few sequences as the template allows; inside false: everything
        but them, in one."""
        messages = chat.messages
        answers = [number for number in numbers if messages[number]["role"] == "assistant"]
        chat.fetch([RenderRequest(len(messages)), *list_requests(answers)])
        whole = chat.whole
        marked = None
        if inside and len(answers) == len(numbers):
            if self._writer.habits.marks:
                marked = find_marked_answers(chat, answers)
            found = marked.answers if marked else [find_answer(chat, number) for number in answers]
            sequences = share_out(chat, found, self.history)
            has_all = len(answers) == sum(message["role"] == "assistant" for message in messages)
            if marked and len(sequences) == 1 and has_all:
                parts = [marked.whole]
            else:
                parts = [(one.text, one.spans) for one in sequences]
        else:
            sequences = []
            parts = [(whole, self._find_in_whole(chat, numbers))]
        spans.check_tools(chat.tools, whole, chat.places.tools)
        spans.check_system(chat)
        unseen = spans.count_left_out(messages, whole)
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
        by_number = dict(zip(others, spans.find_others(chat, others), strict=True))
        for number in sorted(set(numbers) - set(others)):
            answer = find_answer(chat, number)
            remedy = "data.train_on to assistant or last, or tokenizer.chat_template to one that does not"
            check_in_whole(chat, answer, remedy)
            (span,) = answer.spans
            by_number[number] = Span(span.start, min(span.end, len(chat.whole)))
        return [by_number[number] for number in numbers]

    def open_chat(self, sample: Conversation, parses: bool) -> RenderedChat:
        """Return a conversation to be rendered, with a letter in the special tokens that it spells out; they are noted.

        parses: as `encode_answer` has it."""
        read = self._prepared(sample.messages, sample.tools, sample.variables, sample.places)
        (messages, tools, variables), escape = self.special.escape(read, parses)
        opened = replace(sample, messages=messages, tools=tools, variables=variables)
        return RenderedChat(self._writer, opened, escape)

    def _prepared(
        self,
        messages: Sequence[Message],
        tools: Tools,
        variables: Mapping[str, Any] | None = None,
        places: SamplePlaces | None = None,
    ) -> list[Any]:
        """Return what the template is given: messages, tools, variables."""
        at = (places or SamplePlaces()).at
        habits = self._writer.habits
        read = [spans.prepare_message(message, at(number), habits) for number, message in enumerate(messages)]
        return [read, list(tools) if tools else None, dict(variables or {})]


def _only(sample: EncodedSample) -> Encoded:
    if len(sample.sequences) > 1:
        raise SampleFault(
            "several sequences",
            f"found {len(sample.sequences)} answers that the chat template writes in as many ways, expected one "
            "sequence; "
            "set tokenizer.chat_template to one that does not write earlier answers anew",
        )
    return sample.sequences[0]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str = "auto", add_bos: bool = True
) -> list[int]:
    """Ids to generate an answer from, the same as training puts before that answer. Raises DataError."""
    return Encoder(tokenizer, template, add_bos=add_bos).prompt(messages)


def system_fault(tokenizer: Tokenizer, text: str) -> str | None:
    """Why a conversation cannot begin with this message of the system; None: it can."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
    chat = Encoder(tokenizer, "auto").open_chat(Conversation(messages), parses=False)
    (written,) = chat.render([RenderRequest(len(messages), add_generation_prompt=True)])
    if isinstance(written, DataError):
        return str(written)
    if spans.count_left_out(chat.messages[:1], written):
        return f"{tokenizer.chat_template_place}: the chat template does not write a system message"
    return None

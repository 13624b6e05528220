"""Turns a sample into ids and says which of them the loss counts.

An answer is trained from the first token after the prompt that generation would be given, up to and including the
token that ends the turn; `recipe_lib.data.answers` finds it in the text, and here it becomes ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from recipe_lib.data import spans
from recipe_lib.data.answers import AnswerFinder, Writing, in_whole, shared_out, text_of
from recipe_lib.data.encoded import Encoded, EncodedSample, encode_spans, put_bos
from recipe_lib.data.escaping import Escape, SpecialTokens, encode_escaped
from recipe_lib.data.generation_tags import marked_answers
from recipe_lib.data.plain_template import bos_text, eos_text, plain_or_fault
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    Preference,
    SampleFault,
    SamplePlaces,
    TextTokenizer,
    Wanted,
)
from recipe_lib.data.spans import Span
from recipe_lib.data.template_behavior import Habits, TemplateFields, learn_habits
from recipe_lib.data.text_encoding import TextEncoder, read_text_row
from recipe_lib.errors import DataError

Tools = Sequence[Mapping[str, Any]] | None


class Encoder:
    """Encodes samples for one tokenizer and template.

    template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on: `assistant`, `last`, `all`,
    or a list of roles; a message's own `train` wins. add_bos: begin plain text with BOS where the tokenizer does so
    by itself; a chat template writes its own. history: `auto`, `split` or `refuse`, as `shared_out` has them. add_eos:
    put EOS behind texts that no template writes. parse_special: special tokens that a sample spells out become tokens;
    None: in the texts of columns, and not in messages.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
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
        self.add_bos = add_bos and tokenizer.bos_id is not None and tokenizer.add_bos_by_default
        self._bos = bos_text(tokenizer, add_bos)  # written, so that what follows is encoded as it is after BOS
        self.special = SpecialTokens(tokenizer)
        self._parses = parse_special is True  # in messages
        render = tokenizer.render_chats if self.template == "chat" else None
        self.texts = TextEncoder(
            tokenizer=tokenizer,
            special=self.special,
            add_bos=self.add_bos,
            add_eos=add_eos,
            parses=parse_special is not False,
            render=render,
        )
        self.fields = TemplateFields(tokenizer if self.template == "chat" else None)

    def encode(self, sample: Conversation | Completion) -> Encoded:
        """The one sequence of a sample. Raises SampleFault for a sample that does not fit the template, or that becomes
        several."""
        return _only(self.encode_sample(sample))

    def encode_sample(self, sample: Conversation | Completion) -> EncodedSample:
        """Ids and trained targets of a sample's sequences. Raises SampleFault for one that does not fit the
        template."""
        if isinstance(sample, Conversation):
            picked = spans.picked(sample.messages, self.train_on, sample.places)
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
        read = self._prepared(content.messages, content.tools, content.variables, content.places)
        (messages, tools, variables), escape = self.special.escape(read, self._parses or row is not None)
        text = text_of(self._renders(messages, tools, [(len(messages), False, ())], _given(variables))[0])
        add_bos = self.add_bos and self.template == "plain"
        return encode_spans(self.tokenizer, text, [], escape, add_bos, inside=False)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with. Raises DataError."""
        (messages, tools, _), escape = self.special.escape(self._prepared(messages, tools))
        (text,) = self._renders(messages, tools, [(len(messages), True, ())])
        if isinstance(text, DataError):
            raise text
        ids = encode_escaped(self.tokenizer, [text], escape)[0]
        return put_bos(self.tokenizer, ids) if self.add_bos and self.template == "plain" else ids

    def written(self, messages: Sequence[Message], tools: Tools = None) -> str | DataError:
        """The text of a conversation that the assistant is to go on with, or what the template objects to."""
        read, tools, _ = self._prepared(messages, tools)
        return self._renders(read, tools, [(len(messages), True, ())])[0]

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
            read = self._prepared(written, sample.tools, sample.variables, sample.places)
            (messages, tools, variables), escape = self.special.escape(read, parses)
            whole = Conversation(messages, tools, sample.places, variables)
            return self._shared_out(whole, numbers, escape, inside)
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

    def _shared_out(self, sample: Conversation, numbers: Sequence[int], escape: Escape, inside: bool) -> EncodedSample:
        """Return the messages with these numbers in as few sequences as the template allows; inside false: everything
        but them, in one."""
        messages, tools, places = sample.messages, sample.tools, sample.places

        def renders(
            taken: Sequence[Message], wanted: Sequence[Wanted], options: Mapping[str, Any] | None = None
        ) -> Sequence[str | DataError]:
            return self._renders(taken, tools, wanted, _given(sample.variables, options))

        def letters() -> list[str]:
            return self.special.unused_letters([messages, tools, sample.variables], 2)

        answers = [number for number in numbers if messages[number]["role"] == "assistant"]
        finder = AnswerFinder(renders, messages, answers, self._writing(letters, escape), places)
        marked = None
        if inside and len(answers) == len(numbers):
            if self._habits.marks:
                closing = self.tokenizer.turn_end.closing
                marked = marked_answers(renders, messages, answers, finder, letters(), closing)
            found = marked.answers if marked else [finder.find(number) for number in answers]
            sequences = shared_out(found, self.history, finder)
            everything = len(answers) == sum(message["role"] == "assistant" for message in messages)
            if marked and len(sequences) == 1 and everything:
                texts, at = [marked.whole[0]], [marked.whole[1]]
            else:
                texts, at = [one.text for one in sequences], [one.spans for one in sequences]
        else:
            texts, at, sequences = [finder.whole], [self._in_whole(sample, numbers, finder)], []
        spans.check_tools(tools, finder.whole, places.tools)
        spans.check_system(messages, lambda wanted: text_of(renders(messages, [wanted])[0]), letters, places)
        unseen, add_bos = spans.left_out(messages, finder.whole), self.add_bos and self.template == "plain"
        encoded = [
            encode_spans(self.tokenizer, text, one, escape, add_bos, inside)
            for text, one in zip(texts, at, strict=True)
        ]
        ends = [sum(not answer.ends for answer in one.answers) for one in sequences] or [0]
        return EncodedSample(
            [replace(one, left_out=unseen, untrained_ends=count) for one, count in zip(encoded, ends, strict=True)],
            len(encode_escaped(self.tokenizer, [finder.whole], escape)[0]) if len(encoded) > 1 else 0,
            marked,
        )

    def _in_whole(self, sample: Conversation, numbers: Sequence[int], finder: AnswerFinder) -> list[Span]:
        """Where these messages stand in the one rendering of all."""
        messages, tools = sample.messages, sample.tools
        others = [number for number in numbers if messages[number]["role"] != "assistant"]
        found: dict[int, Span] = {}
        if others:
            letters = self.special.unused_letters([messages, tools, sample.variables], 2)
            where = spans.find_others(
                lambda wanted: self._renders(messages, tools, wanted, _given(sample.variables)),
                messages,
                others,
                self.special.pattern,
                letters,
                sample.places,
            )
            found |= dict(zip(others, where, strict=True))
        for number in sorted(set(numbers) - set(others)):
            answer = finder.find(number)
            in_whole(
                answer, finder, "data.train_on to assistant or last, or tokenizer.chat_template to one that does not"
            )
            found[number] = Span(answer.spans[0].start, min(answer.spans[0].end, len(finder.whole)))
        return [found[number] for number in numbers]

    @cached_property
    def _habits(self) -> Habits:
        source = self.tokenizer.chat_template
        if self.template == "plain" or source is None:
            return Habits()
        return learn_habits(
            lambda messages, wanted, tools: self.tokenizer.render_chats(messages, wanted, tools),
            source,
            self.special.pattern,
            self.special.unused_letters([], 1)[0],
        )

    def _prepared(
        self,
        messages: Sequence[Message],
        tools: Tools,
        variables: Mapping[str, Any] | None = None,
        places: SamplePlaces | None = None,
    ) -> list[Any]:
        """Return what the template is given: messages, tools, variables."""
        at = (places or SamplePlaces()).at
        read = [spans.prepared(message, at(number), self._habits) for number, message in enumerate(messages)]
        return [read, list(tools) if tools else None, dict(variables or {})]

    def _renders(
        self,
        messages: Sequence[Message],
        tools: Tools,
        wanted: Sequence[Wanted],
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        if self.template == "chat":
            return self.tokenizer.render_chats(messages, wanted, tools, options)
        return [plain_or_fault(messages, one, eos_text(self.tokenizer), self._bos) for one in wanted]

    def _writing(self, letters: Callable[[], Sequence[str]], escape: Escape) -> Writing:
        chat, end = self.template == "chat", self.tokenizer.turn_end
        return Writing(
            self.special.pattern,
            self.texts.stops,
            end.closing if chat else "",
            end.next_turn if chat else "",
            self._habits,
            self.tokenizer.chat_template_place,
            lambda text: self._tokens(text, escape),
            letters,
        )

    def _tokens(self, text: str, escape: Escape) -> list[str]:
        ids = encode_escaped(self.tokenizer, [text], escape)[0]
        return [self.tokenizer.token_bytes(i).decode(errors="replace") for i in ids]


def _given(variables: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return the options of a rendering with the variables that a sample gives its template; these win."""
    options = options or {}
    return {**options, "variables": {**options.get("variables", {}), **variables}} if variables else options or None


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
    tokenizer: TextTokenizer, messages: Sequence[Message], template: str = "auto", add_bos: bool = True
) -> list[int]:
    """Ids to generate an answer from, the same as training puts before that answer. Raises DataError."""
    return Encoder(tokenizer, template, add_bos=add_bos).prompt(messages)


def system_fault(tokenizer: TextTokenizer, text: str) -> str | None:
    """Why a conversation cannot begin with this message of the system; None: it can."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
    encoder = Encoder(tokenizer, "auto")
    written = encoder.written(messages)
    if isinstance(written, DataError):
        return str(written)
    if spans.left_out(messages[:1], written):
        return f"{tokenizer.chat_template_place}: the chat template does not write a system message"
    return None

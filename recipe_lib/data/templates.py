"""Turns a sample into ids and says which of them the loss counts.

An answer is trained from the first token after the prompt that generation would be given, up to and including the
token that ends the turn; `recipe_lib.data.answers` finds it in the text, and here it becomes ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from recipe_lib.data import spans
from recipe_lib.data.answers import AnswerFinder, Writing, in_whole, shared_out, text_of
from recipe_lib.data.escaping import escaped, special_pattern, unused_letters
from recipe_lib.data.generation_tags import Marked, marked_answers
from recipe_lib.data.plain_template import bos_text, eos_text, plain_or_fault
from recipe_lib.data.samples import (
    Completion,
    Conversation,
    Document,
    Message,
    Preference,
    SampleFault,
    SamplePlaces,
    TextTokenizer,
    Wanted,
)
from recipe_lib.data.spans import Span
from recipe_lib.data.template_behavior import Habits, TemplateFields, learn_habits
from recipe_lib.data.thoughts import with_tags
from recipe_lib.errors import DataError

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Encoded:
    """A sequence before it is cut: ids, and whether the loss counts each of them as a target.

    apart: text had to be encoded apart from what stands before it because a token reached over the border. answers:
    [start, end) of each trained message among the ids, its end-of-turn token included. untrained_ends: trained
    messages whose end-of-turn token was cut off, or is none. left_out: messages of the system and the user that are not
    written.
    """

    ids: list[int]
    trained: list[bool]
    apart: bool = False
    answers: tuple[tuple[int, int], ...] = ()
    untrained_ends: int = 0
    left_out: int = 0

    def cut(self, room: int) -> "Encoded":
        """The first `room` ids; counts the answers that lose their end."""
        kept = tuple((start, end) for start, end in self.answers if start < room)
        lost = sum(end > room for _, end in kept)
        ends = self.untrained_ends + lost
        return Encoded(self.ids[:room], self.trained[:room], self.apart, kept, ends, self.left_out)


@dataclass(frozen=True)
class EncodedSample:
    """A sample's sequences. whole_tokens: ids of the whole conversation in one, where it became several. marked: how it
    differs from the template's own marks, if the template has any and they were used."""

    sequences: Sequence[Encoded]
    whole_tokens: int = 0
    marked: Marked | None = None


class Encoder:
    """Encodes samples for one tokenizer and template.

    template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on: `assistant`, `last`, `all`,
    or a list of roles; a message's own `train` wins. add_bos: begin plain text with BOS where the tokenizer does so
    by itself; a chat template writes its own. history: `auto`, `split` or `refuse`, as `shared_out` has them.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str,
        train_on: str | Sequence[str] = "assistant",
        add_bos: bool = True,
        history: str = "auto",
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
        self._stops = {tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.stop_ids}
        self._special = special_pattern(tokenizer.special_texts)
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
        (prompt, completion), literal = self._escape([sample.prompt, sample.completion])
        whole = prompt + completion + self._eos()
        found = [Span(0 if self.train_on == "all" else len(prompt), len(whole))]
        return EncodedSample([self._mark(whole, found, literal, self.add_bos)])

    def encode_preference(self, sample: Preference) -> tuple[Encoded, Encoded]:
        """The prompt with the chosen answer, and with the rejected one; only the answers are trained, whatever
        `train_on` says. Raises SampleFault."""
        chosen, rejected = (
            self.encode_answer(sample.prompt, answer, sample.tools, places, sample.variables)
            for answer, places in zip((sample.chosen, sample.rejected), sample.places, strict=True)
        )
        if chosen.ids == rejected.ids:
            raise SampleFault(
                "nothing to prefer", "found the same chosen and rejected answer, expected two that differ"
            )
        return chosen, rejected

    def encode_answer(
        self,
        prompt: Sequence[Message],
        answer: Sequence[Message],
        tools: Tools,
        places: SamplePlaces,
        variables: Mapping[str, Any] | None = None,
    ) -> Encoded:
        """A prompt with an answer, which alone is trained, whatever `train_on` says. Raises SampleFault."""
        ours = [message["role"] == "assistant" and message.get("train") is not False for message in answer]
        whole = Conversation([*prompt, *answer], tools, places, variables or {})
        return _only(self._conversation(whole, [False] * len(prompt) + ours, only=True))

    def encode_whole(self, content: Conversation | Document) -> Encoded:
        """A text, or messages up to the end of the last one; all of it is trained. Raises SampleFault."""
        if isinstance(content, Document):
            ids = self.tokenizer.encode(content.text, add_bos=self.add_bos)
            return Encoded(ids, [False] + [True] * (len(ids) - 1))
        prepared = self._prepared(content.messages, content.tools, content.places)
        (messages, tools, variables), literal = self._escape([*prepared, dict(content.variables)])
        text = text_of(self._renders(messages, tools, [(len(messages), False, ())], _given(variables))[0])
        return self._mark(text, [], literal, self.add_bos and self.template == "plain", inside=False)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with. Raises DataError."""
        (messages, tools), literal = self._escape(self._prepared(messages, tools))
        (text,) = self._renders(messages, tools, [(len(messages), True, ())])
        if isinstance(text, DataError):
            raise text
        ids = self.tokenizer.encode_pieces([text], literal=literal)[0]
        return self._with_bos(ids) if self.add_bos and self.template == "plain" else ids

    def written(self, messages: Sequence[Message], tools: Tools = None) -> str | DataError:
        """The text of a conversation that the assistant is to go on with, or what the template objects to."""
        read, tools = self._prepared(messages, tools)
        return self._renders(read, tools, [(len(messages), True, ())])[0]

    def _conversation(self, sample: Conversation, picked: Sequence[bool], only: bool = False) -> EncodedSample:
        """only: the loss counts nothing but the picked messages, `train_on: all` or not."""
        if not any(picked):
            raise SampleFault(
                "no trained message",
                f"found none of {len(picked)} messages to be trained, expected one that data.train_on names or that "
                "says `train: true`",
            )
        inside = only or self.train_on != "all"
        numbers = [number for number, is_picked in enumerate(picked) if is_picked is inside]
        try:
            prepared = self._prepared(sample.messages, sample.tools, sample.places)
            (messages, tools, variables), literal = self._escape([*prepared, dict(sample.variables)])
            whole = Conversation(messages, tools, sample.places, variables)
            return self._shared_out(whole, numbers, literal, inside)
        except RecursionError:
            raise SampleFault(
                "nested too deep", "found lists or objects nested too deep, expected plainer ones"
            ) from None

    def _shared_out(
        self, sample: Conversation, numbers: Sequence[int], literal: str | None, inside: bool
    ) -> EncodedSample:
        """The messages with these numbers in as few sequences as the template allows; inside false: everything but
        them, in one."""
        messages, tools, places = sample.messages, sample.tools, sample.places

        def renders(
            taken: Sequence[Message], wanted: Sequence[Wanted], options: Mapping[str, Any] | None = None
        ) -> Sequence[str | DataError]:
            return self._renders(taken, tools, wanted, _given(sample.variables, options))

        def letters() -> list[str]:
            return self._letters([messages, tools, sample.variables], 2)

        answers = [number for number in numbers if messages[number]["role"] == "assistant"]
        finder = AnswerFinder(renders, messages, answers, self._writing(letters, literal), places)
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
        encoded = [self._mark(text, one, literal, add_bos, inside) for text, one in zip(texts, at, strict=True)]
        ends = [sum(not answer.ends for answer in one.answers) for one in sequences] or [0]
        return EncodedSample(
            [replace(one, left_out=unseen, untrained_ends=count) for one, count in zip(encoded, ends, strict=True)],
            len(self.tokenizer.encode_pieces([finder.whole], literal=literal)[0]) if len(encoded) > 1 else 0,
            marked,
        )

    def _in_whole(self, sample: Conversation, numbers: Sequence[int], finder: AnswerFinder) -> list[Span]:
        """Where these messages stand in the one rendering of all."""
        messages, tools = sample.messages, sample.tools
        others = [number for number in numbers if messages[number]["role"] != "assistant"]
        found: dict[int, Span] = {}
        if others:
            letters = self._letters([messages, tools, sample.variables], 2)
            where = spans.find_others(
                lambda wanted: self._renders(messages, tools, wanted, _given(sample.variables)),
                messages,
                others,
                self._special,
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
            self._special,
            self._letters([], 1)[0],
        )

    def _prepared(self, messages: Sequence[Message], tools: Tools, places: SamplePlaces | None = None) -> list[Any]:
        """What the template is given."""
        at = (places or SamplePlaces()).at
        read = [spans.prepared(message, at(number), self._habits) for number, message in enumerate(messages)]
        return [read, list(tools) if tools else None]

    def _renders(
        self,
        messages: Sequence[Message],
        tools: Tools,
        wanted: Sequence[Wanted],
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        if self.template == "chat":
            return self.tokenizer.render_chats(messages, wanted, tools, options)
        return [plain_or_fault(messages, one, self._eos(), self._bos) for one in wanted]

    def _writing(self, letters: Callable[[], Sequence[str]], literal: str | None) -> Writing:
        chat, end = self.template == "chat", self.tokenizer.turn_end
        return Writing(
            self._special,
            self._stops,
            end.closing if chat else "",
            end.next_turn if chat else "",
            self._habits,
            self.tokenizer.chat_template_place,
            lambda text: self._tokens(text, literal),
            letters,
        )

    def _tokens(self, text: str, literal: str | None) -> list[str]:
        ids = self.tokenizer.encode_pieces([text], literal=literal)[0]
        return [self.tokenizer.token_bytes(i).decode(errors="replace") for i in ids]

    def _eos(self) -> str:
        return eos_text(self.tokenizer)

    def _letters(self, content: Any, count: int) -> list[str]:
        return unused_letters(content, self.tokenizer.chat_template or "", count)

    def _escape(self, content: list[Any]) -> tuple[Any, str | None]:
        """The same with a private letter inside each special token that is only written in the text.

        Rendering puts the template's own special tokens between; these are found, the others are not.
        """
        changed, letter = escaped(content, self._special, lambda: self._letters(content, 1)[0])
        if letter is not None and isinstance(changed[0], list):
            changed[0] = [with_tags(message, letter) for message in changed[0]]
        return changed, letter

    def _mark(
        self, whole: str, found: Sequence[Span], literal: str | None, add_bos: bool, inside: bool = True
    ) -> Encoded:
        """Ids of the whole text, trained inside of the spans, or outside of them."""
        cuts = [0, *(at for span in found for at in (span.start, span.end)), len(whole)]
        ids, lengths, apart = self._ids(whole, cuts, literal)
        trained = [bool(number % 2) is inside for number, length in enumerate(lengths) for _ in range(length)]
        if add_bos and ids[:1] != [self.tokenizer.bos_id]:
            ids, lengths[0], trained = self._with_bos(ids), lengths[0] + 1, [not inside, *trained]
        trained[:1] = [False] * len(trained[:1])  # nothing stands before the first token to predict it from
        last = max((at for at, is_trained in enumerate(trained) if is_trained), default=-1)
        if last < 0:
            raise SampleFault("no trained token", "found no label token, expected an answer")
        ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        answers = tuple(zip(ends[1::2], ends[2::2], strict=False)) if inside else ((0, last + 1),)
        return Encoded(ids[: last + 1], trained[: last + 1], apart, answers)

    def _ids(self, whole: str, cuts: Sequence[int], literal: str | None) -> tuple[list[int], list[int], bool]:
        """Ids of a text, how many lie between the cuts, and whether a cut had to be forced through a token."""
        parts = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        pieces = self.tokenizer.encode_pieces(parts, literal=literal)
        together = self.tokenizer.encode_pieces([whole], literal=literal)[0]
        ids, lengths = [i for piece in pieces for i in piece], [len(piece) for piece in pieces]
        if ids == together:
            return ids, lengths, False
        found = self._lengths_within(together, whole, cuts, literal)
        return (ids, lengths, True) if found is None else (together, found, False)

    def _lengths_within(
        self, together: list[int], whole: str, cuts: Sequence[int], literal: str | None
    ) -> list[int] | None:
        """Token counts between the cuts if each cut is also a border between tokens of the whole; else None.

        Pieces can differ from the whole although no token reaches over a cut (a token that swallows white space).
        """
        ends = [0]
        for cut in cuts[1:]:
            before = self.tokenizer.encode_pieces([whole[:cut]], literal=literal)[0]
            if together[: len(before)] != before:
                return None
            ends.append(len(before))
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _given(variables: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """The options of a rendering with the variables that a sample gives its template; these win."""
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

"""An answer as it is generated: the prompt that generation is given, and what a model must write after it.

Both are renderings of the chat template: of the conversation before the answer, with the prompt for the next one, and
of the conversation in which the answer comes last.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recipe_lib.data.samples import Message, SampleFault, SamplePlaces, Wanted
from recipe_lib.data.spans import Span, check_written, first_difference
from recipe_lib.data.template_behavior import Habits
from recipe_lib.data.thoughts import CLOSED, OPENED, after_opening, thought_of, without_thought
from recipe_lib.errors import DataError

Renders = Callable[[Sequence[Message], Sequence[Wanted], Mapping[str, Any] | None], Sequence[str | DataError]]

_THINKING = {"variables": {"enable_thinking": True}}


@dataclass(frozen=True)
class Answer:
    """An answer of the conversation's message `number`. prompt: what generation is given. text: the prompt and what is
    generated, to the end of the turn. spans: what is trained of it, characters. added: the end of the text that the
    template does not write where the answer comes last. ends: whether generation stops at its last token."""

    number: int
    prompt: str
    text: str
    spans: tuple[Span, ...]
    added: str
    ends: bool


@dataclass(frozen=True)
class Writing:
    """What must be known of a tokenizer and its template.

    special: finds special tokens in a rendering (None: there are none); stops: those that end answers; closing,
    next_turn: as `TurnEnd` has them; place: the template's file; tokens_of: a text as tokens, for error lines; letters:
    two that no text here holds.
    """

    special: re.Pattern[str] | None
    stops: Collection[str]
    closing: str
    next_turn: str
    habits: Habits
    place: str
    tokens_of: Callable[[str], list[str]]
    letters: Callable[[], Sequence[str]]


class AnswerFinder:
    """The answers of one conversation. whole: its rendering."""

    def __init__(
        self,
        renders: Renders,
        messages: Sequence[Message],
        numbers: Sequence[int],
        writing: Writing,
        places: SamplePlaces,
    ) -> None:
        """numbers: of the messages that will be asked for. Raises SampleFault."""
        self._renders, self._messages, self._writing, self.places = renders, messages, writing, places
        everything: Wanted = (len(messages), False, ())
        wanted = dict.fromkeys([everything, *((n, True, ()) for n in numbers), *((n + 1, False, ()) for n in numbers)])
        self._found = dict(zip(wanted, renders(messages, list(wanted), None), strict=True))
        self.whole = self.text(everything)

    def text(self, wanted: Wanted) -> str:
        """A rendering. A template that objects to a conversation makes the sample a bad one, not the run."""
        return text_of(self._found[wanted])

    def find(self, number: int) -> Answer:
        """The answer with this number. Raises SampleFault: the template does not go on from its own prompt, or leaves a
        part out. Raises DataError: it ends answers with nothing."""
        message, prompt = self._messages[number], self.text((number, True, ()))
        alone = self.text((number + 1, False, ()))
        if not alone.startswith(prompt):
            prompt, alone = self._from_thought(number, prompt, alone)
        text, added = self._to_its_end(alone, len(prompt), number)
        begun = OPENED.search(prompt)
        check_written(message, text[begun.start() if begun else len(prompt) :], self.places.at(number))
        span = Span(len(prompt), len(text))
        return Answer(number, prompt, text, (span,), added, bool(added) or self.ends(text))

    def ends(self, text: str) -> bool:
        """Whether generation stops at the last token of a text, white space left out."""
        return any(text.rstrip().endswith(stop) for stop in self._writing.stops if stop)

    def differs(self, what: str, number: int, expected: str, found: str, remedy: str) -> SampleFault:
        """A rendering that is not as expected. what: `the past` or `an answer`. remedy: what to set."""
        then = "what stands before it differently once it is there" if what == "the past" else "it otherwise later on"
        when = "as when generating" if what == "the past" else "as when the answer comes last"
        difference = first_difference(self._writing.tokens_of(found), self._writing.tokens_of(expected))
        return SampleFault(
            f"template writes {what} anew",
            f"{self.places.at(number)}: the chat template writes {then}: {difference} {when}; set {remedy}",
        )

    @cached_property
    def _letters(self) -> Sequence[str]:
        return self._writing.letters()

    def _from_thought(self, number: int, prompt: str, alone: str) -> tuple[str, str]:
        """(prompt, prompt and answer) where the prompt ends in a thought that the rendered answer does not go on from:
        the model has to end the thought that was begun for it, or is not asked for one."""
        message = self._messages[number]
        thought, _ = thought_of(message)
        closed = CLOSED.search(prompt)
        if closed and thought:  # the template has another prompt for answers with a thought
            (found,) = self._renders(self._messages, [(number, True, ())], _THINKING)
            prompt = text_of(found)
            if alone.startswith(prompt):
                return prompt, alone
        elif closed and alone.startswith(prompt[: closed.start()]):
            return prompt, prompt + without_thought(alone[closed.start() :])
        opened = OPENED.search(prompt)
        if opened is None or not alone.startswith(prompt[: opened.start()]):
            return prompt, prompt + self._behind_its_turn(number, prompt, alone)
        letter, begin = self._letters[0], prompt[: opened.start()]
        rest = after_opening(alone, begin, message, self._writing.habits, letter, lambda m: self._with(number, m))
        return prompt, prompt + rest

    def _behind_its_turn(self, number: int, prompt: str, alone: str) -> str:
        """What is written after the beginning of the answer's turn, where what stands before that differs (a system
        message that goes into the last question, and is left out once the answer is there)."""
        tokens = list(self._writing.special.finditer(prompt)) if self._writing.special else []
        begins = prompt[tokens[-1].start() :] if tokens else ""
        at = alone.rfind(begins) if begins else -1
        if at < 0:
            raise self.differs("the past", number, prompt, alone, "tokenizer.chat_template to one that does not")
        rest = alone[at + len(begins) :]
        check_written(self._messages[number], rest, self.places.at(number))
        return rest

    def _with(self, number: int, message: Message) -> str:
        (found,) = self._renders([*self._messages[:number], message], [(number + 1, False, ())], None)
        return "" if isinstance(found, DataError) else found

    def _to_its_end(self, alone: str, start: int, number: int) -> tuple[str, str]:
        """The text up to the last token that a model must write, and what of it had to be added: where the template
        does not end the turn itself, it is over once the next one begins."""
        writing, is_call = self._writing, bool(self._messages[number].get("tool_calls"))
        body = alone.removesuffix(writing.closing) if len(alone) - len(writing.closing) >= start else alone
        tokens = list(writing.special.finditer(body, start)) if writing.special else []
        end = tokens[-1].end() if tokens and not body[tokens[-1].end() :].strip() else None
        begins = writing.habits.after_call if is_call else writing.next_turn
        if end is not None and (tokens[-1].group() in writing.stops or begins not in writing.stops):
            return body[:end], ""
        if begins:
            return body + begins, begins
        if is_call:
            raise SampleFault(
                "tool call without an end",
                f"{self.places.at(number)}: found a tool call that the chat template writes no end of turn after, "
                "expected one that teaches the model to stop; set tokenizer.chat_template to one that does",
            )
        raise DataError(
            f"{writing.place}: the chat template puts no special token after an answer, so nothing would "
            "teach the model to stop; set tokenizer.chat_template to one that does, or data.template to plain"
        )


def text_of(found: str | DataError) -> str:
    """A rendering. Raises SampleFault for what the template objects to."""
    if isinstance(found, DataError):
        raise SampleFault("refused by the chat template", str(found))
    return found


@dataclass(frozen=True)
class Shared:
    """text: of one sequence, to the end of its last answer. answers: those that are trained in it, in order."""

    text: str
    answers: Sequence[Answer]

    @property
    def spans(self) -> list[Span]:
        """What is trained, characters of the text."""
        return [span for answer in self.answers for span in answer.spans]


def shared_out(answers: Sequence[Answer], history: str, finder: AnswerFinder) -> list[Shared]:
    """The sequences of a conversation, in the order of their last answers.

    history: `auto`: as few as can be; `split`: one for each answer; `refuse`: one, or a SampleFault.
    """
    if history == "split":
        return [Shared(answer.text, [answer]) for answer in answers]
    if history == "refuse":
        for answer in answers:
            in_whole(answer, finder, "data.history to auto, or tokenizer.chat_template to one that does not")
        return [Shared(answers[-1].text, answers)]
    found: list[Shared] = []
    left = list(answers)
    while left:
        text = left[-1].text
        held = [answer for answer in left if text.startswith(answer.text)]
        left = [answer for answer in left if not text.startswith(answer.text)]
        found.append(Shared(text, held))
    return found[::-1]


def in_whole(answer: Answer, finder: AnswerFinder, remedy: str) -> None:
    """Raises SampleFault if the rendering of the whole conversation does not hold the answer as it is generated.
    remedy: what to set."""
    written = answer.text[: len(answer.text) - len(answer.added)]
    if not finder.whole.startswith(answer.prompt):
        raise finder.differs("the past", answer.number, answer.prompt, finder.whole, remedy)
    if not finder.whole.startswith(written):
        raise finder.differs("an answer", answer.number, written, finder.whole, remedy)

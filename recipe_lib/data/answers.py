"""Finds answers as they are generated: the prompt that generation is given, and what a model must write after it.

Both are renderings of the chat template: of the conversation before the answer, with the prompt for the next one, and
of the conversation in which the answer comes last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from recipe_lib.data.rendering import RenderedChat, require_text
from recipe_lib.data.samples import Message, SampleFault
from recipe_lib.data.spans import Span, check_written, first_difference
from recipe_lib.data.template_behavior import CLOSED, OPENED, after_opening, thought_of, without_thought
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest

_THINKING = {"variables": {"enable_thinking": True}}


@dataclass(frozen=True)
class Answer:
    """Holds an answer of a conversation as text."""

    number: int  # of its message
    prompt: str  # what generation is given
    text: str  # the prompt and what is generated, to the end of the turn
    spans: tuple[Span, ...]  # what is trained of it
    added: str  # the end of the text that the template does not write where the answer comes last
    ends: bool  # generation stops at its last token


def list_requests(numbers: Sequence[int]) -> list[RenderRequest]:
    """Return the renderings that finding the answers with these numbers asks for."""
    prompts = [RenderRequest(number, add_generation_prompt=True) for number in numbers]
    return [*prompts, *(RenderRequest(number + 1) for number in numbers)]


def find_answer(chat: RenderedChat, number: int) -> Answer:
    """Return the answer with this number.

    Raises SampleFault: the template does not go on from its own prompt, or leaves a part out. Raises DataError: it ends
    answers with nothing.
    """
    message = chat.messages[number]
    prompt = chat.get_text(RenderRequest(number, add_generation_prompt=True))
    alone = chat.get_text(RenderRequest(number + 1))
    if not alone.startswith(prompt):
        prompt, alone = _go_on_from_thought(chat, number, prompt, alone)
    text, added = _take_to_end(chat, number, alone, len(prompt))
    begun = OPENED.search(prompt)
    check_written(message, text[begun.start() if begun else len(prompt) :], chat.places.at(number))
    span = Span(len(prompt), len(text))
    ends = bool(added) or ends_with_stop(chat, text)
    return Answer(number, prompt, text, spans=(span,), added=added, ends=ends)


def ends_with_stop(chat: RenderedChat, text: str) -> bool:
    """Return whether generation stops at the last token of a text, white space left out."""
    return any(text.rstrip().endswith(stop) for stop in chat.template.stops if stop)


def _build_difference(
    chat: RenderedChat, what: str, number: int, expected: str, found: str, remedy: str
) -> SampleFault:
    """Return the fault of a rendering that is not as expected.

    what: `the past` or `an answer`. remedy: what to set.
    """
    is_past = what == "the past"
    then = "what stands before it differently once it is there" if is_past else "it otherwise later on"
    when = "as when generating" if is_past else "as when the answer comes last"
    difference = first_difference(chat.show_tokens(found), chat.show_tokens(expected))
    return SampleFault(
        f"template writes {what} anew",
        f"{chat.places.at(number)}: the chat template writes {then}: {difference} {when}; set {remedy}",
    )


def _go_on_from_thought(chat: RenderedChat, number: int, prompt: str, alone: str) -> tuple[str, str]:
    """Return (prompt, prompt and answer) where the prompt ends in a thought that the rendered answer does not go on
    from: the model has to end the thought that was begun for it, or is not asked for one."""
    message = chat.messages[number]
    thought, _ = thought_of(message)
    closed = CLOSED.search(prompt)
    if closed and thought:  # the template has another prompt for answers with a thought
        request = RenderRequest(number, add_generation_prompt=True)
        (rendering,) = chat.render([request], options=_THINKING)
        prompt = require_text(rendering)
        if alone.startswith(prompt):
            return prompt, alone
    elif closed and alone.startswith(prompt[: closed.start()]):
        return prompt, prompt + without_thought(alone[closed.start() :])
    opened = OPENED.search(prompt)
    if opened is None or not alone.startswith(prompt[: opened.start()]):
        return prompt, prompt + _take_after_turn_begins(chat, number, prompt, alone)
    letter, begin = chat.letters[0], prompt[: opened.start()]

    def render_with(other: Message) -> str:
        (rendering,) = chat.render([RenderRequest(number + 1)], [*chat.messages[:number], other])
        return "" if isinstance(rendering, DataError) else rendering

    return prompt, prompt + after_opening(
        alone, begin, message, habits=chat.template.habits, letter=letter, render=render_with
    )


def _take_after_turn_begins(chat: RenderedChat, number: int, prompt: str, alone: str) -> str:
    """Return what is written after the beginning of the answer's turn, where what stands before that differs (a system
    message that goes into the last question, and is left out once the answer is there)."""
    special = chat.template.special.pattern
    tokens = list(special.finditer(prompt)) if special else []
    begins = prompt[tokens[-1].start() :] if tokens else ""
    at = alone.rfind(begins) if begins else -1
    if at < 0:
        remedy = "tokenizer.chat_template to one that does not"
        raise _build_difference(chat, "the past", number, expected=prompt, found=alone, remedy=remedy)
    rest = alone[at + len(begins) :]
    check_written(chat.messages[number], rest, chat.places.at(number))
    return rest


def _take_to_end(chat: RenderedChat, number: int, alone: str, start: int) -> tuple[str, str]:
    """Return the text up to the last token that a model must write, and what of it had to be added: where the template
    does not end the turn itself, it is over once the next one begins."""
    template = chat.template
    special = template.special.pattern
    closing = template.end.closing
    is_call = bool(chat.messages[number].get("tool_calls"))
    body = alone.removesuffix(closing) if len(alone) - len(closing) >= start else alone
    tokens = list(special.finditer(body, start)) if special else []
    end = tokens[-1].end() if tokens and not body[tokens[-1].end() :].strip() else None
    begins = template.habits.after_call if is_call else template.end.next_turn
    if end is not None and (tokens[-1].group() in template.stops or begins not in template.stops):
        return body[:end], ""
    if begins:
        return body + begins, begins
    if is_call:
        raise SampleFault(
            "tool call without an end",
            f"{chat.places.at(number)}: found a tool call that the chat template writes no end of turn after, "
            "expected one that teaches the model to stop; set tokenizer.chat_template to one that does",
        )
    raise DataError(
        f"{template.tokenizer.chat_template_place}: the chat template puts no special token after an answer, so "
        "nothing would teach the model to stop; set tokenizer.chat_template to one that does, or data.template to plain"
    )


@dataclass(frozen=True)
class Shared:
    """Holds one sequence as text, to the end of its last answer."""

    text: str
    answers: Sequence[Answer]  # those that are trained in it, in order

    @property
    def spans(self) -> list[Span]:
        """Return what is trained, characters of the text."""
        return [span for answer in self.answers for span in answer.spans]


def share_out(chat: RenderedChat, answers: Sequence[Answer], history: str) -> list[Shared]:
    """Return the sequences of a conversation, in the order of their last answers.

    history: `auto`: as few as can be; `split`: one for each answer; `refuse`: one, or a SampleFault.
    """
    if history == "split":
        return [Shared(answer.text, [answer]) for answer in answers]
    if history == "refuse":
        for answer in answers:
            check_in_whole(chat, answer, "data.history to auto, or tokenizer.chat_template to one that does not")
        return [Shared(answers[-1].text, answers)]
    sequences = list[Shared]()
    left = list(answers)
    while left:
        text = left[-1].text
        sequences.append(Shared(text, [answer for answer in left if text.startswith(answer.text)]))
        left = [answer for answer in left if not text.startswith(answer.text)]
    return sequences[::-1]


def check_in_whole(chat: RenderedChat, answer: Answer, remedy: str) -> None:
    """Raise SampleFault if the rendering of the whole conversation does not hold the answer as it is generated.

    remedy: what to set.
    """
    written = answer.text[: len(answer.text) - len(answer.added)]
    for what, expected in (("the past", answer.prompt), ("an answer", written)):
        if not chat.whole.startswith(expected):
            raise _build_difference(chat, what, answer.number, expected=expected, found=chat.whole, remedy=remedy)


@dataclass(frozen=True)
class Marked:
    """answers: with the template's marks for spans. whole: the rendering and all marks in it. space_after: how many
    answers differ from what would be trained without marks by white space after their end alone. differing: the others,
    in words."""

    answers: list[Answer]
    whole: tuple[str, list[Span]]
    space_after: int
    differing: list[str]


def find_marked_answers(chat: RenderedChat, numbers: Sequence[int]) -> Marked:
    """Return the answers with these numbers as the template marks them. Raises SampleFault: one has no mark."""
    everything = RenderRequest(len(chat.messages))
    requests = [everything, *(RenderRequest(number + 1) for number in numbers)]
    renderings = chat.render(requests, options={"marks": list(chat.letters)})
    by_request = dict(zip(requests, renderings, strict=True))
    closing = chat.template.end.closing  # it comes with the last answer of a conversation alone
    answers = list[Answer]()
    differences = list[str | None]()
    for number in numbers:
        prompt = chat.get_text(RenderRequest(number, add_generation_prompt=True))
        text, spans = _read(by_request[RenderRequest(number + 1)], chat.letters)
        before = len(commonprefix([text, prompt]))  # marks of earlier answers end there
        written = len(text) - (len(closing) if closing.strip() and text.endswith(closing) else 0)
        own_spans = [
            Span(span.start, min(span.end, written)) for span in spans if span.end > before and span.start < written
        ]
        if not own_spans:
            raise SampleFault(
                "answer without a mark",
                f"{chat.places.at(number)}: found nothing that the chat template marks with generation, expected "
                "the answer; set tokenizer.chat_template to one that marks every answer, or none",
            )
        check_written(chat.messages[number], text[before:], chat.places.at(number))
        marked = text[: own_spans[-1].end]
        ends = ends_with_stop(chat, marked)
        prompt = text[: own_spans[0].start]
        answer = Answer(number, prompt, marked, spans=tuple(own_spans), added="", ends=ends)
        answers.append(answer)
        differences.append(_describe_difference(chat, answer))
    return Marked(
        answers=answers,
        whole=_read(by_request[everything], chat.letters),
        space_after=differences.count(""),
        differing=[difference for difference in differences if difference],
    )


def _describe_difference(chat: RenderedChat, marked: Answer) -> str | None:
    """Return in words where the marks are not what is trained without them.

    Empty: only after the end; None: nowhere.
    """
    where = f"{chat.places.at(marked.number)}: the template marks"
    texts = [marked.text[span.start : span.end] for span in marked.spans]
    try:
        found = find_answer(chat, marked.number)
    except (SampleFault, DataError) as fault:
        return f"{where} {_short(texts)}, which is not what generation is asked for ({fault})"
    (span,) = found.spans
    if marked.spans == found.spans and marked.text == found.text:
        return None
    expected = found.text[span.start : span.end]
    if marked.text.rstrip() == found.text and len(texts) == 1 and marked.spans[0].start == span.start:
        return ""
    return f"{where} {_short(texts)}, and what is generated is {_short([expected])}"


def _short(texts: Sequence[str]) -> str:
    return " and ".join(repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}") for text in texts)


def _read(rendered: str | DataError, letters: Sequence[str]) -> tuple[str, list[Span]]:
    """A rendering without the letters around marks, and where these are."""
    begin, end = letters
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, part in enumerate(require_text(rendered).split(begin)):
        held, closed, rest = part.partition(end) if number else ("", "", part)
        if closed and spans and spans[-1].end == length:
            spans[-1] = Span(spans[-1].start, length + len(held))
        elif closed:
            spans.append(Span(length, length + len(held)))
        parts += [held, rest.replace(end, "")]
        length += len(parts[-2]) + len(parts[-1])
    return "".join(parts), spans

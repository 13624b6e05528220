"""What a chat template itself says is an answer, with `{% generation %}`, as transformers reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from recipe_lib.data.answers import Answer, AnswerFinder, Renders
from recipe_lib.data.samples import Message, SampleFault, Wanted
from recipe_lib.data.spans import Span, check_written
from recipe_lib.errors import DataError


@dataclass(frozen=True)
class Marked:
    """answers: with the template's marks for spans. whole: the rendering and all marks in it. space_after: how many
    answers differ from what would be trained without marks by white space after their end alone. differing: the others,
    in words."""

    answers: list[Answer]
    whole: tuple[str, list[Span]]
    space_after: int
    differing: list[str]


def marked_answers(
    renders: Renders,
    messages: Sequence[Message],
    numbers: Sequence[int],
    finder: AnswerFinder,
    letters: Sequence[str],
    closing: str,
) -> Marked:
    """letters: two that neither the messages nor the template hold. closing: as `TurnEnd` has it, which comes with the
    last answer of a conversation alone. Raises SampleFault: an answer has no mark."""
    everything: Wanted = (len(messages), False, ())
    wanted = [everything, *((number + 1, False, ()) for number in numbers)]
    found = dict(zip(wanted, renders(messages, wanted, {"marks": list(letters)}), strict=True))
    answers, space_after, differing = [], 0, []
    for number in numbers:
        prompt = finder.text((number, True, ()))
        text, spans = _read(found[number + 1, False, ()], letters)
        before = len(commonprefix([text, prompt]))  # marks of earlier answers end there
        written = len(text) - (len(closing) if closing.strip() and text.endswith(closing) else 0)
        own = [Span(span.start, min(span.end, written)) for span in spans if span.end > before and span.start < written]
        if not own:
            raise SampleFault(
                "answer without a mark",
                f"{finder.places.at(number)}: found nothing that the chat template marks with generation, expected "
                "the answer; set tokenizer.chat_template to one that marks every answer, or none",
            )
        check_written(messages[number], text[before:], finder.places.at(number))
        marked = text[: own[-1].end]
        answer = Answer(number, text[: own[0].start], marked, tuple(own), "", finder.ends(marked))
        answers.append(answer)
        difference = _difference(answer, finder)
        space_after += difference == ""
        differing += [difference] if difference else []
    return Marked(answers, _read(found[everything], letters), space_after, differing)


def _difference(marked: Answer, finder: AnswerFinder) -> str | None:
    """Where the marks are not what is trained without them: in words; empty: only after the end; None: nowhere."""
    where = f"{finder.places.at(marked.number)}: the template marks"
    texts = [marked.text[span.start : span.end] for span in marked.spans]
    try:
        found = finder.find(marked.number)
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
    if isinstance(rendered, DataError):
        raise SampleFault("refused by the chat template", str(rendered))
    begin, end = letters
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, part in enumerate(rendered.split(begin)):
        held, closed, rest = part.partition(end) if number else ("", "", part)
        if closed and spans and spans[-1].end == length:
            spans[-1] = Span(spans[-1].start, length + len(held))
        elif closed:
            spans.append(Span(length, length + len(held)))
        parts += [held, rest.replace(end, "")]
        length += len(parts[-2]) + len(parts[-1])
    return "".join(parts), spans

"""Find which characters of a rendered conversation are trained.

An `Encoder` (label_masks.py) asks `pick_trained` which messages are trained, and `find_answer` or
`find_marked_answers` where an answer stands: it is what a model must write after the prompt of
generation. Both are renderings: the prompt of the messages before the answer, the answer of the
messages up to and including it; `RenderRequest(n)` renders the first n. `find_other_spans` finds
any other message, by a letter that is rendered in its place. A SampleFault says why a sample cannot
be used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.chat_templates import (
    EMPTY_THOUGHT,
    OPEN_THOUGHT,
    RenderedChat,
    complete_thought,
    require_text,
    split_thought,
    strip_thought,
)
from recipe_lib.data.samples import Message, SampleFault, SamplePlaces, format_value
from recipe_lib.data.written_messages import check_written
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest

ROLES = ("system", "user", "assistant", "tool")  # what a list in data.train_on may name
CHOICES = ("assistant", "last", "all")  # values of data.train_on that are no list


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendering: a message's text and its end-of-turn token, if it
    has one.
    """

    start: int
    end: int


def check_train_on(train_on: str | Sequence[str]) -> None:
    """Raise DataError for a value of data.train_on that is neither a choice nor a list of roles."""
    if train_on in CHOICES:
        return
    for value in [train_on] if isinstance(train_on, str) else train_on or [""]:
        if isinstance(train_on, str) or value not in ROLES:
            raise DataError(
                f"data.train_on: found {value!r}, expected {', '.join(CHOICES)}, or a list of the"
                f" roles {', '.join(ROLES)}{did_you_mean(str(value), (*CHOICES, *ROLES))}"
            )


def pick_trained(
    messages: Sequence[Message], train_on: str | Sequence[str], places: SamplePlaces
) -> list[bool]:
    """Return for each message whether it is trained: by role, unless it has a key `train`.

    An answer that begins the conversation is not trained, as no prompt asks for it, unless
    `train_on` is `all`. places: where each message is in its row, for errors. Raises SampleFault
    for a `train` that is no bool.
    """
    roles = ("assistant",) if isinstance(train_on, str) else tuple(train_on)
    are_trained = [message["role"] in roles for message in messages]
    if messages[0]["role"] == "assistant":
        are_trained[0] = False
    if train_on == "all":
        are_trained = [True] * len(messages)
    elif train_on == "last":
        last = max(
            (message_index for message_index, is_answer in enumerate(are_trained) if is_answer),
            default=-1,
        )
        are_trained = [message_index == last for message_index in range(len(messages))]
    for message_index, message in enumerate(messages):
        train = message.get("train")
        if train is not None and not isinstance(train, bool):
            raise SampleFault(
                "train is no switch",
                f"{places.locate_message(message_index, '.train')}: found {format_value(train)},"
                " expected true or false",
            )
        are_trained[message_index] = are_trained[message_index] if train is None else train
    return are_trained


def find_other_spans(chat: RenderedChat, message_indices: Sequence[int]) -> list[Span]:
    """Return the span of each of these messages, none of them an answer, in the rendering of all.

    Raises SampleFault where the template raises an exception, or does not write a message exactly
    once, with everything around it the same for any text.
    """
    if not message_indices:
        return []
    requests = [RenderRequest(len(chat.messages))]
    for message_index in message_indices:
        requests += _list_requests(chat, message_index)
    chat.cache_renderings(requests)
    return [_find_span(chat, message_index) for message_index in message_indices]


def _list_requests(chat: RenderedChat, message_index: int) -> list[RenderRequest]:
    """Return the renderings that tell where a message stands.

    The first has a letter in place of the message, and tells where its text begins and ends. The
    second tells where the next message begins: it ends with the prompt of the answer that comes
    next, or has a second letter in place of the next message. The last message has no second one.
    """
    num_messages = len(chat.messages)
    first, second = chat.letters
    with_letter = RenderRequest(num_messages, replacements=((message_index, first),))
    if message_index + 1 == num_messages:
        return [with_letter]
    if chat.messages[message_index + 1]["role"] == "assistant":
        return [with_letter, RenderRequest(message_index + 1, add_generation_prompt=True)]
    return [
        with_letter,
        RenderRequest(
            num_messages, replacements=((message_index, first), (message_index + 1, second))
        ),
    ]


def _find_span(chat: RenderedChat, message_index: int) -> Span:
    """Return a message's span, with the special token that ends its turn, if there is one.

    Raises SampleFault as `find_other_spans` does.
    """
    whole = chat.whole
    first, second = chat.letters
    with_letter, *for_next_message = _list_requests(chat, message_index)
    around = chat.get_text(with_letter).split(first)  # [text before the message, text after it]
    if len(around) != 2 or not whole.startswith(around[0]) or not whole.endswith(around[1]):
        raise SampleFault(
            "message not found",
            f"{chat.places.locate_message(message_index)}: found that the chat template writes it"
            f" {len(around) - 1} times or differently by its text, expected once; it cannot be"
            f" trained ({chat.messages[message_index]['role']} in data.train_on)",
        )
    start = len(around[0])
    end = len(whole) - len(around[1])
    while start and whole[start - 1] == " ":  # most tokenizers join a space and the word after it
        start -= 1
    limit = len(whole)  # the end-of-turn token is searched for from `end` up to here
    if for_next_message and for_next_message[0].add_generation_prompt:
        next_prompt = chat.get_text(for_next_message[0])
        limit = len(next_prompt) if whole.startswith(next_prompt) else end
    elif for_next_message:
        next_start = chat.get_text(for_next_message[0]).find(second)
        num_between = next_start - len(around[0]) - len(first)  # characters between the messages
        limit = end + num_between if next_start >= 0 and num_between >= 0 else end
    special = chat.template.special.pattern
    token = special.search(whole, end, limit) if special else None
    return Span(start, token.end() if token else end)


def describe_difference(found: Sequence[str], expected: Sequence[str]) -> str:
    """Describe the first token in which two lists of tokens differ, for an error line.

    found, expected: texts of the tokens.
    """
    num_equal = len(commonprefix([list(found), list(expected)]))
    found_token, expected_token = (
        repr(tokens[num_equal]) if num_equal < len(tokens) else "the end"
        for tokens in (found, expected)
    )
    return f"at token {num_equal + 1} found {found_token}, expected {expected_token}"


# Rendering options for templates with a switch for thoughts, whose prompt for an answer otherwise
# ends in an empty thought.
_THINKING = {"variables": {"enable_thinking": True}}


@dataclass(frozen=True)
class Answer:
    """An answer of a conversation as text."""

    message_index: int  # index of its message
    prompt: str  # the text that generation is given
    text: str  # the prompt and what a model must write after it, to the end of the turn
    spans: tuple[Span, ...]  # the characters of `text` that are trained
    # End of `text` that the template writes only once another message follows; "": there is none
    added: str
    ends: bool  # whether generation stops at the last token of `text`


def list_requests(message_indices: Sequence[int]) -> list[RenderRequest]:
    """Return the renderings that `find_answer` needs for the messages with these indices.

    A caller has them all rendered in one call, as a template renders in another process.
    """
    prompts = [
        RenderRequest(message_index, add_generation_prompt=True)
        for message_index in message_indices
    ]
    return [*prompts, *(RenderRequest(message_index + 1) for message_index in message_indices)]


def find_answer(chat: RenderedChat, message_index: int) -> Answer:
    """Return the answer in the message with this index.

    Raises SampleFault if the prompt cannot be found in its rendering, or if that leaves a part out.
    Raises DataError if the template ends answers with no special token.
    """
    prompt = chat.get_text(RenderRequest(message_index, add_generation_prompt=True))
    up_to_answer = chat.get_text(RenderRequest(message_index + 1))
    if not up_to_answer.startswith(prompt):
        prompt, up_to_answer = _go_on_from_thought(
            chat, message_index, prompt=prompt, up_to_answer=up_to_answer
        )
    text, added = _take_to_end(chat, message_index, up_to_answer=up_to_answer, start=len(prompt))
    # A thought that the prompt begins belongs to the answer.
    open_thought = OPEN_THOUGHT.search(prompt)
    check_written(
        chat.messages[message_index],
        text[open_thought.start() if open_thought else len(prompt) :],
        chat.places.locate_message(message_index),
    )
    span = Span(len(prompt), len(text))
    ends = bool(added) or ends_with_stop(chat, text)
    return Answer(message_index, prompt, text, spans=(span,), added=added, ends=ends)


def ends_with_stop(chat: RenderedChat, text: str) -> bool:
    """Return True if generation stops at the last token of a text, white space left out."""
    return any(text.rstrip().endswith(stop) for stop in chat.template.stops if stop)


def _build_difference(
    chat: RenderedChat, message_index: int, is_past: bool, expected: str, found: str, remedy: str
) -> SampleFault:
    """Return the fault of a rendering that is not as expected.

    is_past: it is the messages before an answer that differ; else the answer. message_index: of the
    answer. expected, found: renderings. remedy: what to set, the end of the error line.
    """
    what = "the past" if is_past else "an answer"
    then = (
        "what stands before it differently once it is there" if is_past else "it otherwise later on"
    )
    when = "as when generating" if is_past else "as when the answer comes last"
    difference = describe_difference(
        chat.split_into_tokens(found), chat.split_into_tokens(expected)
    )
    return SampleFault(
        f"template writes {what} anew",
        f"{chat.places.locate_message(message_index)}: the chat template writes {then}:"
        f" {difference} {when}; set {remedy}",
    )


def _go_on_from_thought(
    chat: RenderedChat, message_index: int, prompt: str, up_to_answer: str
) -> tuple[str, str]:
    """Return (prompt, prompt and answer) where the rendered answer does not begin with the prompt.

    The prompt may end in a begun thought, which the model has to go on with, or in an empty one,
    after which it writes none. up_to_answer: the rendering in which the answer comes last.
    """
    message = chat.messages[message_index]
    thought, _ = split_thought(message)
    empty_thought = EMPTY_THOUGHT.search(prompt)
    if empty_thought and thought:  # the answer has a thought: take the prompt that asks for one
        request = RenderRequest(message_index, add_generation_prompt=True)
        (rendering,) = chat.render([request], options=_THINKING)
        prompt = require_text(rendering)
        if up_to_answer.startswith(prompt):
            return prompt, up_to_answer
    elif empty_thought and up_to_answer.startswith(prompt[: empty_thought.start()]):
        return prompt, prompt + strip_thought(up_to_answer[empty_thought.start() :])
    open_thought = OPEN_THOUGHT.search(prompt)
    if open_thought is None or not up_to_answer.startswith(prompt[: open_thought.start()]):
        return prompt, prompt + _take_after_turn_begins(
            chat, message_index, prompt=prompt, up_to_answer=up_to_answer
        )

    def render_with(replacement: Message) -> str:
        messages = [*chat.messages[:message_index], replacement]
        (rendering,) = chat.render([RenderRequest(message_index + 1)], messages)
        return "" if isinstance(rendering, DataError) else rendering

    return prompt, prompt + complete_thought(
        up_to_answer,
        begin=prompt[: open_thought.start()],
        message=message,
        features=chat.template.features,
        letter=chat.letters[0],
        render=render_with,
    )


def _take_after_turn_begins(
    chat: RenderedChat, message_index: int, prompt: str, up_to_answer: str
) -> str:
    """Return the answer's text where the messages before it are written differently in the prompt.

    Some templates write the system message into the last question, and leave it out once the answer
    follows. The answer begins behind what ends the prompt, from its last special token on, where
    `up_to_answer` has the same. up_to_answer: the rendering in which the answer comes last. Raises
    SampleFault if the end of the prompt is not in it.
    """
    special = chat.template.special.pattern
    tokens = list(special.finditer(prompt)) if special else []
    turn_start = prompt[tokens[-1].start() :] if tokens else ""
    start = up_to_answer.rfind(turn_start) if turn_start else -1
    if start < 0:
        raise _build_difference(
            chat,
            message_index,
            is_past=True,
            expected=prompt,
            found=up_to_answer,
            remedy="tokenizer.chat_template to one that does not",
        )
    answer_text = up_to_answer[start + len(turn_start) :]
    check_written(
        chat.messages[message_index], answer_text, chat.places.locate_message(message_index)
    )
    return answer_text


def _take_to_end(
    chat: RenderedChat, message_index: int, up_to_answer: str, start: int
) -> tuple[str, str]:
    """Return (text to the end of the answer's turn, the end that had to be added to it).

    Where a template does not end the turn itself, the token that begins the next turn is added. If
    none was added, the second text is empty. up_to_answer: the rendering in which the answer comes
    last. start: index of the answer in it. Raises SampleFault for a tool call, DataError for any
    other answer, after which no token could be added.
    """
    template = chat.template
    special = template.special.pattern
    closing = template.end.closing
    has_calls = bool(chat.messages[message_index].get("tool_calls"))
    # `closing` is text after the turn's last token, which only the end of a conversation has.
    body = (
        up_to_answer.removesuffix(closing)
        if len(up_to_answer) - len(closing) >= start
        else up_to_answer
    )
    tokens = list(special.finditer(body, start)) if special else []
    end = tokens[-1].end() if tokens and not body[tokens[-1].end() :].strip() else None
    next_turn = template.features.after_call if has_calls else template.end.next_turn
    # A special token at the end of the answer ends the turn, unless generation does not stop at it
    # but at the token that begins the next turn.
    if end is not None and (
        tokens[-1].group() in template.stops or next_turn not in template.stops
    ):
        return body[:end], ""
    if next_turn:
        return body + next_turn, next_turn
    if has_calls:
        raise SampleFault(
            "tool call without an end",
            f"{chat.places.locate_message(message_index)}: found a tool call that the chat template"
            " writes no end of turn after, expected one that teaches the model to stop; set"
            " tokenizer.chat_template to one that does",
        )
    raise DataError(
        f"{template.tokenizer.chat_template_place}: the chat template puts no special token after"
        " an answer, so nothing would teach the model to stop; set tokenizer.chat_template to one"
        " that does, or data.template to plain"
    )


@dataclass(frozen=True)
class RenderedSequence:
    """One training sequence as text."""

    text: str  # to the end of its last answer
    answers: Sequence[Answer]  # the answers that are trained in it, in order

    @property
    def spans(self) -> list[Span]:
        return [span for answer in self.answers for span in answer.spans]


def split_sequences(
    chat: RenderedChat, answers: Sequence[Answer], history: str
) -> list[RenderedSequence]:
    """Return the sequences of a conversation, in the order of their last answers.

    Several are needed where a template writes an answer differently once messages follow it. A
    sequence holds all answers whose own text it begins with. history: `auto` makes as few sequences
    as can be, `split` one for each answer, `refuse` one, and raises SampleFault if that does not
    hold all.
    """
    if history == "split":
        return [RenderedSequence(answer.text, [answer]) for answer in answers]
    if history == "refuse":
        for answer in answers:
            check_in_whole(
                chat,
                answer,
                "data.history to auto, or tokenizer.chat_template to one that does not",
            )
        return [RenderedSequence(answers[-1].text, answers)]
    sequences = list[RenderedSequence]()
    remaining_answers = list(answers)
    while remaining_answers:
        text = remaining_answers[-1].text
        sequences.append(
            RenderedSequence(
                text, [answer for answer in remaining_answers if text.startswith(answer.text)]
            )
        )
        remaining_answers = [
            answer for answer in remaining_answers if not text.startswith(answer.text)
        ]
    return sequences[::-1]


def check_in_whole(chat: RenderedChat, answer: Answer, remedy: str) -> None:
    """Raise SampleFault if the rendering of all messages does not begin with the answer's text.

    In that rendering the answer would not be trained as it is generated. remedy: which settings
    avoid it, for the error.
    """
    written = answer.text[: len(answer.text) - len(answer.added)]  # by the template itself
    for is_past, expected in ((True, answer.prompt), (False, written)):
        if not chat.whole.startswith(expected):
            raise _build_difference(
                chat,
                answer.message_index,
                is_past=is_past,
                expected=expected,
                found=chat.whole,
                remedy=remedy,
            )


@dataclass(frozen=True)
class MarkedAnswers:
    """The answers of a conversation as the template marks them by `{% generation %}`."""

    answers: list[Answer]  # their spans are the marks
    whole: tuple[str, list[Span]]  # (rendering of all messages, all marks in it)
    # A line for each answer that `find_answer` finds elsewhere; white space at its end not counted
    differing: list[str]


def find_marked_answers(chat: RenderedChat, message_indices: Sequence[int]) -> MarkedAnswers:
    """Return the answers in the messages with these indices as the template marks them.

    Raises SampleFault for an answer without a mark.
    """
    whole_request = RenderRequest(len(chat.messages))
    requests = [
        whole_request,
        *(RenderRequest(message_index + 1) for message_index in message_indices),
    ]
    # Rendered anew, since the marks are asked for by an option: two letters, written around them.
    renderings = chat.render(requests, options={"marks": list(chat.letters)})
    by_request = dict(zip(requests, renderings, strict=True))
    # It comes with the last answer of a conversation alone.
    closing = chat.template.end.closing
    answers = list[Answer]()
    differing = list[str]()
    for message_index in message_indices:
        prompt = chat.get_text(RenderRequest(message_index, add_generation_prompt=True))
        text, spans = _remove_marks(by_request[RenderRequest(message_index + 1)], chat.letters)
        start = len(commonprefix([text, prompt]))  # marks before it are of earlier answers
        text_end = len(text) - (len(closing) if closing.strip() and text.endswith(closing) else 0)
        answer_spans = [
            Span(span.start, min(span.end, text_end))
            for span in spans
            if span.end > start and span.start < text_end
        ]
        if not answer_spans:
            raise SampleFault(
                "answer without a mark",
                f"{chat.places.locate_message(message_index)}: found nothing that the chat template"
                " marks with generation, expected the answer; set tokenizer.chat_template to one"
                " that marks every answer, or none",
            )
        check_written(
            chat.messages[message_index], text[start:], chat.places.locate_message(message_index)
        )
        marked_text = text[: answer_spans[-1].end]
        ends = ends_with_stop(chat, marked_text)
        prompt = text[: answer_spans[0].start]
        answer = Answer(
            message_index, prompt, marked_text, spans=tuple(answer_spans), added="", ends=ends
        )
        answers.append(answer)
        differing += _list_differences(chat, answer)
    return MarkedAnswers(
        answers, whole=_remove_marks(by_request[whole_request], chat.letters), differing=differing
    )


def _list_differences(chat: RenderedChat, marked: Answer) -> list[str]:
    """Return [a line] if the marks are not what a model would have to generate, else []."""
    marks = " and ".join(_quote_ends(marked.text[span.start : span.end]) for span in marked.spans)
    line = f"{chat.places.locate_message(marked.message_index)}: the template marks {marks}"
    try:
        generated = find_answer(chat, marked.message_index)
    except (SampleFault, DataError) as fault:
        return [f"{line}, which is not what generation is asked for ({fault})"]
    (span,) = generated.spans
    starts = [marked_span.start for marked_span in marked.spans]
    if starts == [span.start] and marked.text.rstrip() == generated.text.rstrip():
        return []
    text = generated.text[span.start : span.end]
    return [f"{line}, and what is generated is {_quote_ends(text)}"]


def _quote_ends(text: str) -> str:
    """Return a text in quotes, only both ends of a long one: marks mostly differ in their ends."""
    return repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}")


def _remove_marks(rendered: str | DataError, letters: Sequence[str]) -> tuple[str, list[Span]]:
    """Return (rendering without the letters, spans of what they enclosed).

    letters: the one that begins a mark, and the one that ends it. Raises SampleFault for an error
    in place of a rendering.
    """
    begin, end = letters
    parts = list[str]()
    spans = list[Span]()
    length = 0  # characters of `parts`
    # Each part but the first begins with the text of a mark, which the letter `end` follows.
    for number, part in enumerate(require_text(rendered).split(begin)):
        marked_text, closed, rest = part.partition(end) if number else ("", "", part)
        if closed and spans and spans[-1].end == length:  # two marks that touch are one span
            spans[-1] = Span(spans[-1].start, length + len(marked_text))
        elif closed:
            spans.append(Span(length, length + len(marked_text)))
        parts += [marked_text, rest.replace(end, "")]
        length += len(parts[-2]) + len(parts[-1])
    return "".join(parts), spans

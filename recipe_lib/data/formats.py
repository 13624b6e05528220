"""Read rows of a dataset as samples, by the format that `data.format` names.

A format is a function from a row (column -> value, columns renamed by `data.columns`) to a
Conversation, a Completion, a Document, a Preference, a LabeledAnswer or a Classified text. A
SourceEncoder calls it for each row. It is registered with `@register("data.format", "name")`, by
plugins too, says with `@columns(...)` which columns it reads, and raises SampleFault for a row that
it cannot use.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile

from recipe_lib.config.registry import register
from recipe_lib.data.column_names import SAME_AS, is_blank, read_truth
from recipe_lib.data.messages import (
    CONVERSATION_COLUMNS,
    Turns,
    build_conversation,
    check_answers,
    check_order,
    make_text_turn,
    read_tools,
    read_turns,
)
from recipe_lib.data.read_columns import (
    CHAT_COLUMNS,
    open_request,
    prepend_system,
    read_answer,
    read_column,
    read_history,
    read_question,
    read_variables,
    refuse_beside_text,
)
from recipe_lib.data.samples import (
    OTHER_NAMES,
    Classified,
    Columns,
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Preference,
    RawSample,
    RenamedSample,
    Sample,
    SampleFault,
    SamplePlaces,
    find_column,
    format_overrides,
    format_value,
    get_path,
    read_text_field,
)

# Plugins import these from here (docs/your_recipe.md), two of them under shorter names.
conversation = build_conversation
text_of = read_text_field
__all__ = ["Reader", "RawSample", "columns", "conversation", "text_of"]

Reader = Callable[[RawSample], Sample]  # a format


def columns(
    *required: str,
    optional: Sequence[str] = (),
    instead: Mapping[str, Sequence[str]] | None = None,
    same: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Reader], Reader]:
    """Return a decorator that declares which columns a format reads.

    required: columns that a row must have. optional: columns that it may have. instead: required
    column -> columns that may replace it, which the format reads itself. same: column -> other
    names for it, which are renamed before the format sees the row.
    """

    def add(reader: Reader) -> Reader:
        reader.columns = Columns(  # type: ignore[attr-defined]
            required, optional=tuple(optional), instead=instead or {}, same=same or {}
        )
        return reader

    return add


_columns = partial(columns, same=SAME_AS)  # the decorator of the formats below


def _build_chat(sample: RawSample, turns: Turns, asked: int = 0) -> Conversation:
    """Return the conversation of these turns, with the row's system message, tools and variables.

    asked: number of leading turns that are the prompt; 0: not known. Raises SampleFault for a
    conversation without an answer, or another column that cannot be used.
    """
    all_turns = prepend_system(sample, turns)
    num_added = len(all_turns.messages) - len(turns.messages)
    tools, path = read_tools(sample)
    return build_conversation(
        all_turns.messages,
        tools,
        SamplePlaces(all_turns.places, path),
        variables=read_variables(sample),
        asked=asked + num_added if asked else 0,
    )


@register("data.format", "alpaca")
@_columns("instruction", "output", optional=("input", "history", *CHAT_COLUMNS))
def read_alpaca(sample: RawSample) -> Conversation:
    """Read `instruction`, `output`, and perhaps `input`, `system` and `history`.

    `input` is put under the instruction. `history` has the turns before, as pairs of texts.
    """
    question = read_question(sample, "instruction")
    if not question.messages[0]["content"].strip():
        raise SampleFault(
            "empty instruction",
            f"{get_path(sample, 'instruction')}: found an empty instruction, expected text",
        )
    return _build_chat(
        sample, read_history(sample) + question + make_text_turn(sample, "output", "assistant")
    )


@register("data.format", "sharegpt")
@_columns("conversations", optional=CHAT_COLUMNS)
def read_sharegpt(sample: RawSample) -> Conversation:
    """Read `conversations`, a list of {from, value} or {role, content}.

    `system` and `tools` (a list, or JSON text of one) are optional.
    """
    return _build_chat(sample, read_turns(sample, "conversations"))


@register("data.format", "messages")
@_columns("messages", optional=CHAT_COLUMNS)
def read_messages(sample: RawSample) -> Conversation:
    """Read `messages`, a list of {role, content} as chat APIs have it.

    `system`, and `tools` for the chat template, are optional.
    """
    return _build_chat(sample, read_turns(sample, "messages", names_calls=False))


@register("data.format", "prompt_completion")
@_columns("prompt", "completion", optional=CHAT_COLUMNS)
def read_prompt_completion(sample: RawSample) -> Completion | Conversation:
    """Read `prompt` and `completion`: two texts, put together as they stand, or messages.

    Texts have no template and no space between them. If either column holds messages, the other may
    be a text, and both are one conversation, of which the completion is trained.
    """
    if any(isinstance(sample.get(name), (list, dict)) for name in ("prompt", "completion")):
        asked = read_column(sample, "prompt", "user")
        return _build_chat(
            sample, asked + read_column(sample, "completion", "assistant"), len(asked.messages)
        )
    refuse_beside_text(sample, *CHAT_COLUMNS)
    completion = read_text_field(sample, "completion")
    if not completion:
        raise SampleFault(
            "empty answer",
            f"{get_path(sample, 'completion')}: found an empty completion, expected text to"
            " train on",
        )
    return Completion(read_text_field(sample, "prompt"), completion)


@register("data.format", "text")
@_columns("text")
def read_text(sample: RawSample) -> Document:
    """Read `text`, which for a .txt file is its content."""
    text = read_text_field(sample, "text")
    if not text:
        raise SampleFault(
            "empty text",
            f"{get_path(sample, 'text')}: found an empty text, expected something to train on",
        )
    return Document(text)


@register("data.format", "preference")
@_columns(
    "chosen",
    "rejected",
    optional=(
        "prompt",
        "conversations",
        "instruction",
        "input",
        "history",
        "margin",
        *CHAT_COLUMNS,
    ),
)
def read_preference(sample: RawSample) -> Preference:
    """Read `chosen` and `rejected`: two answers, or two conversations that begin alike.

    An answer is a text or a message. A conversation is a list of messages, or a text of turns of
    `Human:` and `Assistant:`. What comes before them is `prompt` (text, or messages),
    `conversations`, or `instruction` with `input`; conversations that hold it already need none.
    The prompt is all that both have in common, up to the answer in which they differ. `margin` is a
    number, by how much the chosen one is better.
    """
    sample = open_request(sample)
    turns_before = _read_prompt(sample, ("prompt", "conversations", "instruction"))
    chosen = _continue_with(turns_before, read_answer(sample, "chosen"))
    rejected = _continue_with(turns_before, read_answer(sample, "rejected"))
    if chosen.messages == rejected.messages:
        raise SampleFault(
            "equal answers", "found chosen equal to rejected, expected two different answers"
        )
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))  # messages of the prompt
    no_prompt = _why_no_prompt(sample, chosen, rejected=rejected, shared=shared)
    both_texts = isinstance(sample["chosen"], str) and isinstance(sample["rejected"], str)
    if no_prompt and not (both_texts and sample["chosen"][:1] == sample["rejected"][:1]):
        # Of texts that begin alike the encoder raises it, unless it finds them to be renderings of
        # a chat template, in which the prompt stands.
        raise no_prompt
    tools, path = read_tools(sample)
    places = SamplePlaces(chosen.places, path), SamplePlaces(rejected.places, path)
    for name, turns, answer_places in (
        ("chosen", chosen, places[0]),
        ("rejected", rejected, places[1]),
    ):
        _check_end(
            sample,
            name,
            turns=turns,
            asked=shared,
            cause=f"{name} without an answer",
            expected="an answer of its own",
        )
        role = turns.messages[shared]["role"]
        if role != "assistant":
            raise SampleFault(
                "other questions",
                f"{answer_places.locate_message(shared)}: found a message of the {role} that"
                " differs between chosen and rejected, expected them to part in an answer",
            )
        check_order(turns.messages, answer_places)
        check_answers(turns.messages, shared, answer_places)
    return Preference(
        prompt=chosen.messages[:shared],
        chosen=chosen.messages[shared:],
        rejected=rejected.messages[shared:],
        tools=tools,
        places=places,
        margin=_read_margin(sample.get("margin")),
        no_prompt=no_prompt,
        variables=read_variables(sample),
    )


def _check_end(
    sample: RawSample, name: str, turns: Turns, asked: int, cause: str, expected: str
) -> None:
    """Raise SampleFault if a column adds nothing to the prompt, or does not end in an answer.

    turns: of the prompt and the column. asked: number of messages of the prompt. cause: a few words
    to count the fault by. expected: the end of the error line.
    """
    last = turns.messages[-1]["role"] if len(turns.messages) > asked else "nothing"
    if last != "assistant":
        raise SampleFault(
            cause, f"{get_path(sample, name)}: found {last} at its end, expected {expected}"
        )


def _read_prompt(sample: RawSample, names: Sequence[str]) -> Turns:
    """Return what comes before an answer: the system message, earlier turns, and the question.

    names: of the columns that may hold the question. Raises SampleFault if several do, or a column
    has another shape.
    """
    question_columns = [name for name in names if not is_blank(sample.get(name))]
    # A column with blank text counts if there is no other: the fault then names it.
    question_columns = (
        question_columns or [name for name in names if sample.get(name) is not None][:1]
    )
    if len(question_columns) > 1:
        raise SampleFault(
            "two prompts", f"found {' and '.join(question_columns)}, expected one of the two"
        )
    turns = read_history(sample)
    if question_columns or not is_blank(sample.get("input")):
        turns += read_question(sample, question_columns[0] if question_columns else "instruction")
    return prepend_system(sample, turns)


def _read_margin(value: object) -> float:
    """Return a margin as a number: 0 for none, NaN for a value that is no number."""
    if value is None:
        return 0.0
    with suppress(OverflowError, ValueError):
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    return math.nan


@register("data.format", "kto")
@_columns(
    "prompt",
    "completion",
    "label",
    optional=("instruction", "input", "output", "history", *CONVERSATION_COLUMNS, *CHAT_COLUMNS),
    instead={
        "prompt": ("instruction", *CONVERSATION_COLUMNS),
        "completion": ("output", *CONVERSATION_COLUMNS),
    },
)
def read_kto(sample: RawSample) -> LabeledAnswer:
    """Read `prompt` (text, or messages), `completion` and `label`, true for a desirable completion.

    The completion is a text, a message, or several. `instruction` with `input` is a prompt as well,
    `output` a completion. Of `messages` or `conversations` the last message is the completion.
    """
    label = _read_label(sample)
    turns_before = _read_prompt(sample, ("prompt", "instruction", *CONVERSATION_COLUMNS))
    names = [name for name in ("completion", "output") if sample.get(name) is not None]
    if len(names) > 1:
        raise SampleFault(
            "two completions", f"found {' and '.join(names)}, expected one of the two"
        )
    if names or all(sample.get(name) is None for name in CONVERSATION_COLUMNS):
        answer = read_column(sample, names[0] if names else "completion", "assistant")
        turns = _continue_with(turns_before, answer)
        num_asked = len(turns_before.messages)
    else:  # messages whose last one is the completion
        turns = turns_before
        num_asked = max(0, len(turns_before.messages) - 1)
    prompt = turns.messages[:num_asked]
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    if all(message["role"] == "system" for message in prompt):
        raise SampleFault(
            "no prompt",
            f"{get_path(sample, 'prompt')}: found no message of the user, expected what is"
            " answered",
        )
    _check_end(
        sample, "completion", turns=turns, asked=num_asked, cause="no answer", expected="an answer"
    )
    check_order(turns.messages, places)
    check_answers(turns.messages, num_asked, places)
    return LabeledAnswer(
        prompt=prompt,
        completion=turns.messages[num_asked:],
        label=label,
        tools=tools,
        places=places,
        variables=read_variables(sample),
    )


def _read_label(sample: RawSample) -> bool:
    """Return True if the label says that the completion is desirable.

    Raises SampleFault for a label that is not true or false.
    """
    value = sample.get("label")
    label = read_truth(value)
    if label is None:
        raise SampleFault(
            "label is not true or false",
            f"{get_path(sample, 'label')}: found {format_value(value)}, expected true or false",
        )
    return label


@register("data.format", "classification")
@_columns("label", optional=("text", "prompt", "messages", *CHAT_COLUMNS))
def read_classification(sample: RawSample) -> Classified:
    """Read `label`, the name or number (from 0) of a class, and the text that has it.

    That is `text` as it stands, `prompt` (text of the user) or `messages`.
    """
    text_columns = [name for name in ("text", "prompt", "messages") if sample.get(name) is not None]
    if len(text_columns) != 1:
        raise SampleFault(
            "no one text",
            f"found {' and '.join(text_columns) or 'none of them'}, expected one of text, prompt"
            " and messages",
        )
    label = _read_class(sample)
    if text_columns == ["text"]:
        refuse_beside_text(sample, *CHAT_COLUMNS)
        text = read_text_field(sample, "text")
        if not text.strip():
            raise SampleFault(
                "empty text",
                f"{get_path(sample, 'text')}: found an empty text, expected one with a class",
            )
        return Classified(Document(text), label)
    turns = prepend_system(sample, read_column(sample, text_columns[0], "user"))
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    check_order(turns.messages, places)
    return Classified(
        Conversation(turns.messages, tools=tools, places=places, variables=read_variables(sample)),
        label,
    )


def _read_class(sample: RawSample) -> str:
    """Return the name of the row's class; the name of a number is its digits.

    Raises SampleFault for a label that is empty, negative, or neither text nor whole number.
    """
    value = sample.get("label")
    text = str(value).strip() if isinstance(value, (bool, int, str)) else ""
    if not text or (isinstance(value, int) and value < 0):
        raise SampleFault(
            "no class",
            f"{get_path(sample, 'label')}: found {format_value(value)}, expected text or a whole"
            " number from 0 on",
        )
    return text.lower() if isinstance(value, bool) else text


def _why_no_prompt(
    sample: RawSample, chosen: Turns, rejected: Turns, shared: int
) -> SampleFault | None:
    """Return the fault of two answers without a prompt, or with a system message alone.

    None: they have a prompt. chosen, rejected: conversations. shared: number of messages that both
    begin with.
    """
    answers = [turns.messages[shared:] for turns in (chosen, rejected)]
    if any(message["role"] != "system" for message in chosen.messages[:shared]) or not all(
        messages and messages[0]["role"] == "assistant" for messages in answers
    ):
        return None
    column = find_column("prompt", sample, OTHER_NAMES["prompt"])
    section = sample.section if isinstance(sample, RenamedSample) else "data"
    remedy = (
        f"; if {column} is the prompt, set {format_overrides(section, {'prompt': column})[0]}"
        if column
        else ""
    )
    return SampleFault(
        "no prompt",
        "found answers without a prompt, expected prompt, or conversations that begin"
        f" alike{remedy}",
    )


def _continue_with(before: Turns, answer: Turns) -> Turns:
    """Return the conversation of the turns before an answer and the answer.

    The answer may repeat the turns before it, or only continue them. Raises SampleFault if both
    have a system message, and these differ.
    """
    num_before = len(before.messages)
    if answer.messages[:num_before] == before.messages and len(answer.messages) > num_before:
        return answer
    asked = [message for message in before.messages if message["role"] != "system"]
    if any(message["role"] == "system" for message in answer.messages) and len(asked) < num_before:
        raise SampleFault(
            "two system messages",
            f"{answer.places[0].path}: found a system message that differs from the one before,"
            " expected one of them",
        )
    # A dataset may repeat the question of its conversations in a separate column: then only the
    # system messages come before.
    if len(asked) == 1 and asked[0]["role"] == "user" and asked[0] in answer.messages:
        num_system = num_before - 1  # they come first
        return Turns(before.messages[:num_system], before.places[:num_system]) + answer
    return before + answer

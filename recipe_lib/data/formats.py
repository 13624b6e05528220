"""Readers of a dataset's samples, by the name in `data.format`.

A format is a function from a sample (a dict, its columns renamed by `data.columns`) to a
Conversation, a Completion, a Document, a Preference, a LabeledAnswer or a Classified text. A plugin
registers its own with `@register("data.format", "name")`, and says with `@columns(...)` which
columns it reads; it raises SampleFault for a sample that it cannot use.
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
from recipe_lib.data.messages import build_conversation as conversation
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
from recipe_lib.data.samples import read_text_field as text_of

# Plugins import `conversation` and `read_console` from here (docs/your_recipe.md).
__all__ = ["Reader", "RawSample", "columns", "conversation", "text_of"]

Reader = Callable[[RawSample], Sample]


def columns(
    *required: str,
    optional: Sequence[str] = (),
    instead: Mapping[str, Sequence[str]] | None = None,
    same: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Reader], Reader]:
    """Return a decorator that declares which columns a format reads.

    instead: required column -> columns that may replace it, which the format reads itself. same:
    column -> other names for it, which are renamed before the format sees the row.
    """

    def add(reader: Reader) -> Reader:
        reader.columns = Columns(  # type: ignore[attr-defined]
            required, optional=tuple(optional), instead=instead or {}, same=same or {}
        )
        return reader

    return add


_columns = partial(columns, same=SAME_AS)  # of the formats here


def _build_chat(sample: RawSample, turns: Turns, asked: int = 0) -> Conversation:
    """Return the conversation of these turns, with system message, tools and template arguments.

    asked: number of leading turns that are the prompt; 0: not known.
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

    `input` is put under the instruction; `history` is the turns before, as pairs of texts.
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
    """Read `conversations`: a list of {from, value} or {role, content}.

    And perhaps `system`, and `tools` (may be JSON).
    """
    return _build_chat(sample, read_turns(sample, "conversations"))


@register("data.format", "messages")
@_columns("messages", optional=CHAT_COLUMNS)
def read_messages(sample: RawSample) -> Conversation:
    """Read `messages`: a list of {role, content} as chat APIs have it.

    And perhaps `system`, and `tools` for the chat template.
    """
    return _build_chat(sample, read_turns(sample, "messages", names_calls=False))


@register("data.format", "prompt_completion")
@_columns("prompt", "completion", optional=CHAT_COLUMNS)
def read_prompt_completion(sample: RawSample) -> Completion | Conversation:
    """Read `prompt` and `completion`: two texts, put together as they stand.

    There is no template and no space between them. Or messages (one of the two may be text), of
    which the completion is trained.
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
    """Read `text`, or a whole .txt file."""
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

    An answer is a text or a message; a conversation may be a text of Human and Assistant. What
    comes before them is `prompt` (text, or messages), `conversations`, or `instruction` with
    `input`; where the conversations hold it already, none is needed. The prompt is all that both
    have in common, up to the answer in which they part. `margin`: a number, by how much the chosen
    one is better.
    """
    sample = open_request(sample)
    before = _read_prompt(sample, ("prompt", "conversations", "instruction"))
    chosen = _continue_with(before, read_answer(sample, "chosen"))
    rejected = _continue_with(before, read_answer(sample, "rejected"))
    if chosen.messages == rejected.messages:
        raise SampleFault(
            "equal answers", "found chosen equal to rejected, expected two different answers"
        )
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    no_prompt = _why_no_prompt(sample, chosen, rejected=rejected, shared=shared)
    both_texts = isinstance(sample["chosen"], str) and isinstance(sample["rejected"], str)
    if no_prompt and not (both_texts and sample["chosen"][:1] == sample["rejected"][:1]):
        # For texts that begin alike the encoder raises it, unless they are renderings with a
        # prompt, which it can recognize.
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
                f"{answer_places.at(shared)}: found a message of the {role} that differs between"
                " chosen and rejected, expected them to part in an answer",
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
    """Raise SampleFault for a column that adds no message of the assistant at its end.

    asked: messages of the prompt.
    """
    last = turns.messages[-1]["role"] if len(turns.messages) > asked else "nothing"
    if last != "assistant":
        raise SampleFault(
            cause, f"{get_path(sample, name)}: found {last} at its end, expected {expected}"
        )


def _read_prompt(sample: RawSample, names: Sequence[str]) -> Turns:
    """Return what comes before an answer: the system message, earlier turns, and the question.

    names: of the columns that may hold the question.
    """
    given = [name for name in names if not is_blank(sample.get(name))]
    given = given or [name for name in names if sample.get(name) is not None][:1]
    if len(given) > 1:
        raise SampleFault("two prompts", f"found {' and '.join(given)}, expected one of the two")
    before = read_history(sample)
    if given or not is_blank(sample.get("input")):
        before += read_question(sample, given[0] if given else "instruction")
    return prepend_system(sample, before)


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
    """Read `prompt` (text, or messages), `completion` and `label`: true for a completion that is
    wanted.

    The completion is a text, a message, or several. `instruction` with `input` is a prompt as well,
    `output` a completion; of `messages` or `conversations` the last one is the completion.
    """
    label = _read_label(sample)
    before = _read_prompt(sample, ("prompt", "instruction", *CONVERSATION_COLUMNS))
    names = [name for name in ("completion", "output") if sample.get(name) is not None]
    if len(names) > 1:
        raise SampleFault(
            "two completions", f"found {' and '.join(names)}, expected one of the two"
        )
    if names or all(sample.get(name) is None for name in CONVERSATION_COLUMNS):
        answer = read_column(sample, names[0] if names else "completion", "assistant")
        turns = _continue_with(before, answer)
        num_asked = len(before.messages)
    else:  # messages whose last one is the completion
        turns = before
        num_asked = max(0, len(before.messages) - 1)
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
    """Read `label`, a whole number from 0 on or the class' name, and what has it.

    That is `text` as it stands, `prompt` (text of the user) or `messages`.
    """
    given = [name for name in ("text", "prompt", "messages") if sample.get(name) is not None]
    if len(given) != 1:
        raise SampleFault(
            "no one text",
            f"found {' and '.join(given) or 'none of them'}, expected one of text, prompt and"
            " messages",
        )
    label = _read_class(sample)
    if given == ["text"]:
        refuse_beside_text(sample, *CHAT_COLUMNS)
        text = read_text_field(sample, "text")
        if not text.strip():
            raise SampleFault(
                "empty text",
                f"{get_path(sample, 'text')}: found an empty text, expected one with a class",
            )
        return Classified(Document(text), label)
    turns = prepend_system(sample, read_column(sample, given[0], "user"))
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    check_order(turns.messages, places)
    return Classified(
        Conversation(turns.messages, tools=tools, places=places, variables=read_variables(sample)),
        label,
    )


def _read_class(sample: RawSample) -> str:
    """Return the name of a class; that of a number is its digits. Raises SampleFault."""
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

    None: they have a prompt.
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

    The answer may repeat the turns before it, or only continue them.
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
    # A dataset may repeat the question of its conversations in a separate column.
    if len(asked) == 1 and asked[0]["role"] == "user" and asked[0] in answer.messages:
        num_system = num_before - 1  # they come first
        return Turns(before.messages[:num_system], before.places[:num_system]) + answer
    return before + answer

"""How a sample of a dataset is read, by the name in `data.format`.

A format is a function from a sample (a dict, its columns renamed by `data.columns`) to a
Conversation, a Completion, a Document, a Preference, a LabeledAnswer or a Classified text. A plugin
registers its own with `@register("data.format", "name")`, and says with `@columns(...)` which
columns it reads; it raises SampleFault for a sample that it cannot use.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from recipe_lib.config.registry import register
from recipe_lib.data.column_names import SAME_AS, read_truth, says_nothing
from recipe_lib.data.messages import (
    CONVERSATION_COLUMNS,
    Turns,
    build_conversation,
    check_answers,
    check_order,
    make_text_turn,
    place_of_turn,
    read_tools,
    read_turn,
    read_turns,
)
from recipe_lib.data.samples import (
    OTHER_NAMES,
    Classified,
    Columns,
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    MessagePlace,
    Preference,
    RawSample,
    RenamedSample,
    Sample,
    SampleFault,
    SamplePlaces,
    describe_field,
    describe_kind,
    find_column,
    format_overrides,
    format_value,
    get_path,
    open_json_list,
    parse_column,
    read_text_field,
    refuse_keys,
)

# Reads what comes before an answer out of the columns of a row: a system message, earlier turns,
# the question; and what the chat template is given besides messages and tools.


CHAT = (
    "system",
    "tools",
    "chat_template_kwargs",
    "documents",
)  # columns of every format that a template writes
# What `chat_template_kwargs` may not say: it has columns of its own, or the run says it.
_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ ]?")


def with_system(sample: RawSample, turns: Turns) -> Turns:
    """Return the turns after the message of the column `system`. Raises SampleFault: they begin
    with another one.
    """
    if says_nothing(sample.get("system")):
        return turns
    system = make_text_turn(sample, "system", "system")
    system_messages = [message for message in turns.messages if message["role"] == "system"]
    if not system_messages:
        return system + turns
    text = system.messages[0]["content"]
    if turns.messages[0] is system_messages[0] and all(
        message["content"] == text for message in system_messages
    ):
        return turns
    raise SampleFault(
        "two system messages",
        f"{get_path(sample, 'system')}: found text, and a system message among the messages that"
        " differs from it, expected one of them, or both alike",
    )


def read_history(sample: RawSample) -> Turns:
    """Return the turns of the column `history`: pairs of a question and its answer, as a list or
    its JSON text.
    """
    if says_nothing(sample.get("history")):
        return Turns()
    value, path = open_json_list(sample, "history")
    turns = Turns()
    for number, pair in enumerate(value if isinstance(value, list) else [value]):
        where = f"{path}[{number}]" if isinstance(value, list) else path
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else describe_kind(pair)
            raise SampleFault(
                "history is no pairs", f"{where}: found {found}, expected [question, answer]"
            )
        for index, role in enumerate(("user", "assistant")):
            text = read_text_field({str(index): pair[index]}, str(index), where=where)
            turns += Turns(
                [{"role": role, "content": text}], [MessagePlace(where, f"{where}[{index}]")]
            )
    return turns


def read_question(sample: RawSample, name: str) -> Turns:
    """Return the question: the text of a column (or nothing, or messages), and under it that of
    `input`.

    One line end stands between them, as LLaMA-Factory writes it.
    """
    if name != "instruction" and not isinstance(sample.get(name), (str, type(None))):
        turns = read_column(sample, name, "user")
        if not says_nothing(sample.get("input")):
            raise SampleFault(
                "input beside messages",
                f"{get_path(sample, 'input')}: found {describe_field(sample, 'input')} beside {name} of"
                " messages, expected it inside of them",
            )
        return turns
    input_text = read_text_field(sample, "input", may_be_missing=True)
    question = read_text_field(sample, name, may_be_missing=bool(input_text.strip()))
    where = get_path(sample, name if question or name in sample else "input")
    content = "\n".join(text for text in (question, input_text) if text.strip())
    return Turns([{"role": "user", "content": content}], [MessagePlace(where, where)])


def read_column(sample: RawSample, name: str, role: str) -> Turns:
    """Return a column as messages: a list of them, one of them, or a text of the given role."""
    value = sample.get(name)
    if isinstance(value, list):
        return read_turns(sample, name)
    path = get_path(sample, name)
    if isinstance(value, dict):
        return Turns([read_turn(value, path)], [place_of_turn(value, path)])
    if not isinstance(value, str):
        found = describe_field(sample, name)
        raise SampleFault(f"{name} is no text", f"{path}: found {found}, expected text or messages")
    return make_text_turn(sample, name, role)


def open_request(sample: RawSample) -> RawSample:
    """Return the sample with `input` in the columns prompt and tools, where that is a request as
    OpenAI's pairs have it: {messages, tools}. Raises SampleFault.
    """
    request = sample.get("input")
    if not isinstance(request, dict):
        return sample
    path = get_path(sample, "input")
    refuse_keys(
        request, ("messages", "tools"), path, owner="input", expected="expected messages and tools"
    )
    columns = {
        name: request[key]
        for name, key in (("prompt", "messages"), ("tools", "tools"))
        if key in request
    }
    for name in columns:
        if not says_nothing(sample.get(name)):
            raise SampleFault(
                "two prompts",
                f"{get_path(sample, name)}: found it beside input, expected one of the two",
            )
    opened = RenamedSample({**sample, "input": None} | columns, {}, "data")
    own_names = sample.own if isinstance(sample, RenamedSample) else {}
    opened.own = {**own_names, "prompt": f"{path}.messages", "tools": f"{path}.tools"}
    return opened


def read_answer(sample: RawSample, name: str) -> Turns:
    """Return a column as messages of the assistant; a text that begins with `\\n\\nHuman:` is a
    whole conversation.
    """
    text = sample.get(name)
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return read_column(sample, name, "assistant")
    path = get_path(sample, name)
    parts = _SPEAKER.split(read_text_field(sample, name))[1:]  # speaker and words in turn
    roles = ["user" if speaker == "Human" else "assistant" for speaker in parts[::2]]
    messages: list[Message] = [
        {"role": role, "content": words} for role, words in zip(roles, parts[1::2], strict=True)
    ]
    return Turns(
        messages, [MessagePlace(path, f"{path}: turn {number}") for number in range(len(messages))]
    )


def read_variables(sample: RawSample) -> dict[str, Any]:
    """Return what a row gives the chat template: `chat_template_kwargs`, and `documents`. Raises
    SampleFault.
    """
    if "chat_template_kwargs" not in sample and "documents" not in sample:
        return {}
    arguments = sample.get("chat_template_kwargs")
    path = get_path(sample, "chat_template_kwargs")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = parse_column(arguments, "chat_template_kwargs", path, expected="an object")
        path = f"{path}|fromjson|"
    if says_nothing(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        found = describe_kind(arguments)
        raise SampleFault(
            "template arguments", f"{path}: found {found}, expected an object {{name: value}}"
        )
    for name in arguments:
        if name in _RESERVED:
            raise SampleFault(
                "template arguments",
                f"{path}.{name}: found a name that a run gives itself, expected another; the"
                " columns messages and tools hold these",
            )
    documents, _ = open_json_list(sample, "documents")
    variables = {name: value for name, value in arguments.items() if value is not None}
    return variables if says_nothing(documents) else variables | {"documents": documents}


def refuse_beside_text(sample: RawSample, *names: str) -> None:
    """Raise SampleFault for columns of a conversation where the row is a text that no template
    writes.
    """
    for name in names:
        if not says_nothing(sample.get(name)):
            raise SampleFault(
                f"{name} beside text",
                f"{get_path(sample, name)}: found {describe_field(sample, name)} beside a text that no"
                " chat template writes, expected it in the text, or messages in place of the text",
            )


__all__ = ["Reader", "RawSample", "columns", "build_conversation", "read_text_field"]

Reader = Callable[[RawSample], Sample]


def columns(
    *required: str,
    optional: Sequence[str] = (),
    instead: Mapping[str, Sequence[str]] | None = None,
    same: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Reader], Reader]:
    """Return a decorator that says which columns a format reads.

    instead: those that may stand in the place of a required one, which the format looks for itself.
    same: other names of a column, put under its own before the format sees the row.
    """

    def add(reader: Reader) -> Reader:
        reader.columns = Columns(required, tuple(optional), instead or {}, same or {})  # type: ignore[attr-defined]
        return reader

    return add


_columns = partial(columns, same=SAME_AS)  # of the formats here


def _build_chat(sample: RawSample, turns: Turns, asked: int = 0) -> Conversation:
    """Return the conversation of these turns, with the system message, tools and template arguments
    of the row.

    asked: so many of the turns are the prompt; 0: nobody says which.
    """
    all_turns = with_system(sample, turns)
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
@_columns("instruction", "output", optional=("input", "history", *CHAT))
def read_alpaca(sample: RawSample) -> Conversation:
    """Read `instruction`, `output`, and perhaps `input` (put under the instruction), `system`, and
    `history`: the turns before, as pairs of texts.
    """
    asked = read_question(sample, "instruction")
    if not asked.messages[0]["content"].strip():
        raise SampleFault(
            "empty instruction",
            f"{get_path(sample, 'instruction')}: found an empty instruction, expected text",
        )
    return _build_chat(
        sample, read_history(sample) + asked + make_text_turn(sample, "output", "assistant")
    )


@register("data.format", "sharegpt")
@_columns("conversations", optional=CHAT)
def read_sharegpt(sample: RawSample) -> Conversation:
    """Read `conversations`: a list of {from, value} or {role, content}; and perhaps `system`, and
    `tools` (may be JSON).
    """
    return _build_chat(sample, read_turns(sample, "conversations"))


@register("data.format", "messages")
@_columns("messages", optional=CHAT)
def read_messages(sample: RawSample) -> Conversation:
    """Read `messages`: a list of {role, content} as chat APIs have it; and perhaps `system`,
    `tools` for the chat template.
    """
    return _build_chat(sample, read_turns(sample, "messages", names_calls=False))


@register("data.format", "prompt_completion")
@_columns("prompt", "completion", optional=CHAT)
def read_prompt_completion(sample: RawSample) -> Completion | Conversation:
    """Read `prompt` and `completion`: two texts, put together as they stand, with no template and
    no space between them; or messages (one of the two may be text), of which the completion is
    trained.
    """
    if isinstance(sample.get("prompt"), (list, dict)) or isinstance(
        sample.get("completion"), (list, dict)
    ):
        asked = read_column(sample, "prompt", "user")
        return _build_chat(
            sample, asked + read_column(sample, "completion", "assistant"), len(asked.messages)
        )
    refuse_beside_text(sample, *CHAT)
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
    optional=("prompt", "conversations", "instruction", "input", "history", "margin", *CHAT),
)
def read_preference(sample: RawSample) -> Preference:
    """Read `chosen` and `rejected`: two answers (text or a message each), or two conversations that
    begin alike (also as text of Human and Assistant).

    What comes before them is `prompt` (text, or messages), `conversations`, or `instruction` with
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
    no_prompt = _why_no_prompt(sample, chosen, rejected, shared)
    both_texts = isinstance(sample["chosen"], str) and isinstance(sample["rejected"], str)
    if no_prompt and not (both_texts and sample["chosen"][:1] == sample["rejected"][:1]):
        # Of texts that begin alike the encoder raises it: it knows what a rendered prompt looks
        # like
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
            turns,
            shared,
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
    """Raise SampleFault for what a column adds to the prompt of so many messages, if it does not
    end with one of the assistant.
    """
    last = turns.messages[-1]["role"] if len(turns.messages) > asked else "nothing"
    if last != "assistant":
        raise SampleFault(
            cause, f"{get_path(sample, name)}: found {last} at its end, expected {expected}"
        )


def _read_prompt(sample: RawSample, names: Sequence[str]) -> Turns:
    """Return what comes before an answer: the system message, earlier turns, and the question under
    one of these names.
    """
    given = [name for name in names if not says_nothing(sample.get(name))]
    given = given or [name for name in names if sample.get(name) is not None][:1]
    if len(given) > 1:
        raise SampleFault("two prompts", f"found {' and '.join(given)}, expected one of the two")
    before = read_history(sample)
    if given or not says_nothing(sample.get("input")):
        before += read_question(sample, given[0] if given else "instruction")
    return with_system(sample, before)


def _read_margin(value: object) -> float:
    """Return a margin as a number: 0 where there is none, NaN for what is no number."""
    if value is None:
        return 0.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number or isinstance(value, str) else math.nan  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        return math.nan


@register("data.format", "kto")
@_columns(
    "prompt",
    "completion",
    "label",
    optional=("instruction", "input", "output", "history", *CONVERSATION_COLUMNS, *CHAT),
    instead={
        "prompt": ("instruction", *CONVERSATION_COLUMNS),
        "completion": ("output", *CONVERSATION_COLUMNS),
    },
)
def read_kto(sample: RawSample) -> LabeledAnswer:
    """Read `prompt` (text, or messages), `completion` (text, a message, or several) and `label`:
    whether the completion is wanted (true) or not (false).

    `instruction` with `input` is a prompt as well, `output` a completion; of `messages` or
    `conversations` the last one is the completion.
    """
    label = _read_label(sample)
    before = _read_prompt(sample, ("prompt", "instruction", *CONVERSATION_COLUMNS))
    ends = [name for name in ("completion", "output") if sample.get(name) is not None]
    if len(ends) > 1:
        raise SampleFault("two completions", f"found {' and '.join(ends)}, expected one of the two")
    if ends or all(sample.get(name) is None for name in CONVERSATION_COLUMNS):
        answer = read_column(sample, ends[0] if ends else "completion", "assistant")
        turns = _continue_with(before, answer)
        num_asked = len(before.messages)
    else:
        turns = before
        num_asked = max(0, len(before.messages) - 1)
    prompt = turns.messages[:num_asked]
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    if all(message["role"] == "system" for message in prompt):
        where = get_path(sample, "prompt")
        raise SampleFault(
            "no prompt", f"{where}: found no message of the user, expected what is answered"
        )
    _check_end(sample, "completion", turns, num_asked, cause="no answer", expected="an answer")
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
    """Return whether the completion is wanted. Raises SampleFault for a label that is not true or
    false.
    """
    value = sample.get("label")
    label = read_truth(value)
    if label is None:
        where = get_path(sample, "label")
        raise SampleFault(
            "label is not true or false",
            f"{where}: found {format_value(value)}, expected true or false",
        )
    return label


@register("data.format", "classification")
@_columns("label", optional=("text", "prompt", "messages", *CHAT))
def read_classification(sample: RawSample) -> Classified:
    """Read `label`, a whole number from 0 on or the class' name, and what has it: `text` as it
    stands, `prompt` (text of the user) or `messages`.
    """
    given = [name for name in ("text", "prompt", "messages") if sample.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise SampleFault(
            "no one text", f"found {found}, expected one of text, prompt and messages"
        )
    label = _read_class(sample)
    if given == ["text"]:
        refuse_beside_text(sample, *CHAT)
        text = read_text_field(sample, "text")
        if not text.strip():
            raise SampleFault(
                "empty text",
                f"{get_path(sample, 'text')}: found an empty text, expected one with a class",
            )
        return Classified(Document(text), label)
    turns = with_system(sample, read_column(sample, given[0], "user"))
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    check_order(turns.messages, places)
    return Classified(Conversation(turns.messages, tools, places, read_variables(sample)), label)


def _read_class(sample: RawSample) -> str:
    """Return the name of a class; that of a number is its digits. Raises SampleFault."""
    value = sample.get("label")
    text = str(value).strip() if isinstance(value, (bool, int, str)) else ""
    if not text or (isinstance(value, int) and value < 0):
        where = get_path(sample, "label")
        raise SampleFault(
            "no class",
            f"{where}: found {format_value(value)}, expected text or a whole number from 0 on",
        )
    return text.lower() if isinstance(value, bool) else text


def _why_no_prompt(
    sample: RawSample, chosen: Turns, rejected: Turns, shared: int
) -> SampleFault | None:
    """Return what is wrong with two answers that follow nothing, or a message of the system alone;
    None: they do not.
    """
    answers = [turns.messages[shared:] for turns in (chosen, rejected)]
    has_prompt = any(message["role"] != "system" for message in chosen.messages[:shared])
    if has_prompt or not all(
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
    """Return the whole conversation: the answer holds what comes before it already, or goes on from
    it.
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

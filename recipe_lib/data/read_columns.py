"""Read the columns of a row that a conversation is made of, besides its list of messages.

The formats in `data.formats` call these functions for the system message, earlier turns, the
question, one answer, and the variables of the chat template. Most return `Turns` (messages and
their places in the row), which add up with `+`. All raise SampleFault for a column of another
shape. `sample` is a row: column -> value, under the names that a format knows.
"""

import re
from typing import Any

from recipe_lib.data.column_names import is_blank
from recipe_lib.data.messages import Turns, locate_turn, make_text_turn, read_turn, read_turns
from recipe_lib.data.samples import (
    Message,
    MessagePlace,
    RawSample,
    RenamedSample,
    SampleFault,
    describe_field,
    describe_kind,
    get_path,
    open_json_list,
    parse_column,
    read_text_field,
    refuse_keys,
)

# Optional columns of every format of conversations
CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs", "documents")
# Names that `chat_template_kwargs` may not have: they are columns of a row, or set by the run
_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
# Where a turn begins in a conversation that is one text
_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ ]?")


def prepend_system(sample: RawSample, turns: Turns) -> Turns:
    """Return the turns with the message of the column `system` before them, if it has one.

    Raises SampleFault if the turns have another system message already.
    """
    if is_blank(sample.get("system")):
        return turns
    system = make_text_turn(sample, "system", "system")
    system_messages = [message for message in turns.messages if message["role"] == "system"]
    if not system_messages:
        return system + turns
    text = system.messages[0]["content"]
    are_alike = all(message["content"] == text for message in system_messages)
    if are_alike and turns.messages[0] is system_messages[0]:
        return turns
    raise SampleFault(
        "two system messages",
        f"{get_path(sample, 'system')}: found text, and a system message among the messages that"
        " differs from it, expected one of them, or both alike",
    )


def read_history(sample: RawSample) -> Turns:
    """Return the turns of the column `history`: pairs of a question and its answer.

    The column is a list of pairs, or JSON text of one. Raises SampleFault for anything else.
    """
    if is_blank(sample.get("history")):
        return Turns()
    value, path = open_json_list(sample, "history")
    turns = Turns()
    for number, pair in enumerate(value if isinstance(value, list) else [value]):
        where = f"{path}[{number}]" if isinstance(value, list) else path
        if not isinstance(pair, list) or len(pair) != 2:
            found_kind = f"a list of {len(pair)}" if isinstance(pair, list) else describe_kind(pair)
            raise SampleFault(
                "history is no pairs", f"{where}: found {found_kind}, expected [question, answer]"
            )
        for index, role in enumerate(("user", "assistant")):
            # An object with the index as its key, so that a fault has the path of the text
            text = read_text_field({str(index): pair[index]}, str(index), where=where)
            place = MessagePlace(where, f"{where}[{index}]")
            turns += Turns([{"role": role, "content": text}], [place])
    return turns


def read_question(sample: RawSample, name: str) -> Turns:
    """Return the question: the text of a column, and under it the text of `input`.

    One of the two may be missing. They are joined by a line end, as LLaMA-Factory does. Any column
    but `instruction` may also hold messages; `input` has to be blank then.
    """
    if name != "instruction" and not isinstance(sample.get(name), (str, type(None))):
        turns = read_column(sample, name, "user")
        if not is_blank(sample.get("input")):
            raise SampleFault(
                "input beside messages",
                f"{get_path(sample, 'input')}: found {describe_field(sample, 'input')} beside"
                f" {name} of messages, expected it inside of them",
            )
        return turns
    input_text = read_text_field(sample, "input", may_be_missing=True)
    question = read_text_field(sample, name, may_be_missing=bool(input_text.strip()))
    where = get_path(sample, name if question or name in sample else "input")
    content = "\n".join(text for text in (question, input_text) if text.strip())
    return Turns([{"role": "user", "content": content}], [MessagePlace(where, where)])


def read_column(sample: RawSample, name: str, role: str) -> Turns:
    """Return the messages of a column: a list of them, one of them, or a text of the given role."""
    value = sample.get(name)
    if isinstance(value, list):
        return read_turns(sample, name)
    path = get_path(sample, name)
    if isinstance(value, dict):
        return Turns([read_turn(value, path)], [locate_turn(value, path)])
    if not isinstance(value, str):
        found_kind = describe_field(sample, name)
        raise SampleFault(
            f"{name} is no text", f"{path}: found {found_kind}, expected text or messages"
        )
    return make_text_turn(sample, name, role)


def open_request(sample: RawSample) -> RawSample:
    """Return the sample with a request in `input` moved to the columns `prompt` and `tools`.

    OpenAI's preference pairs have one: {messages, tools}. Raises SampleFault for other keys in it,
    or if the row has one of these columns as well.
    """
    request = sample.get("input")
    if not isinstance(request, dict):
        return sample
    path = get_path(sample, "input")
    refuse_keys(
        request, ("messages", "tools"), path, owner="input", expected="expected messages and tools"
    )
    keys = {"prompt": "messages", "tools": "tools"}
    columns = {name: request[key] for name, key in keys.items() if key in request}
    for name in columns:
        if not is_blank(sample.get(name)):
            raise SampleFault(
                "two prompts",
                f"{get_path(sample, name)}: found it beside input, expected one of the two",
            )
    opened = RenamedSample({**sample, "input": None} | columns, columns={}, section="data")
    given_columns = sample.columns if isinstance(sample, RenamedSample) else {}
    # For the paths in faults: the columns are still where they were in the file.
    opened.columns = {**given_columns, "prompt": f"{path}.messages", "tools": f"{path}.tools"}
    return opened


def read_answer(sample: RawSample, name: str) -> Turns:
    """Return the messages of a column that holds an answer; a text is one of the assistant.

    A text that begins with `\\n\\nHuman:` is a whole conversation.
    """
    text = sample.get(name)
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return read_column(sample, name, "assistant")
    path = get_path(sample, name)
    # Speakers and their words in turn; before the first speaker the text is empty.
    parts = _SPEAKER.split(read_text_field(sample, name))[1:]
    roles = ["user" if speaker == "Human" else "assistant" for speaker in parts[::2]]
    messages: list[Message] = [
        {"role": role, "content": words} for role, words in zip(roles, parts[1::2], strict=True)
    ]
    return Turns(
        messages, [MessagePlace(path, f"{path}: turn {number}") for number in range(len(messages))]
    )


def read_variables(sample: RawSample) -> dict[str, Any]:
    """Return the row's variables for the chat template: `chat_template_kwargs` and `documents`.

    Raises SampleFault for arguments that are no object, or have a reserved name.
    """
    if "chat_template_kwargs" not in sample and "documents" not in sample:
        return {}
    arguments = sample.get("chat_template_kwargs")
    path = get_path(sample, "chat_template_kwargs")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = parse_column(arguments, "chat_template_kwargs", path, expected="an object")
        path = f"{path}|fromjson|"
    if is_blank(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        found_kind = describe_kind(arguments)
        raise SampleFault(
            "template arguments", f"{path}: found {found_kind}, expected an object {{name: value}}"
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
    return variables if is_blank(documents) else variables | {"documents": documents}


def refuse_beside_text(sample: RawSample, *names: str) -> None:
    """Raise SampleFault if a row of plain text also has one of these columns of a conversation."""
    for name in names:
        if not is_blank(sample.get(name)):
            raise SampleFault(
                f"{name} beside text",
                f"{get_path(sample, name)}: found {describe_field(sample, name)} beside a text that"
                " no chat template writes, expected it in the text, or messages in place of the"
                " text",
            )

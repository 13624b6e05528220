"""Read messages, in the spellings that samples come in, as messages of chat APIs.

The formats of `data.formats` call `read_turns` for a column of {from, value} or {role, content},
`read_turn` for one message, `read_tools` for descriptions of tools. Tool calls come in several
shapes and leave in that of chat APIs. A row is one sample of a file. A SampleFault says why it
cannot be used; `where` is the path in the row that it begins with. An idle key is one that changes
nothing, which a report counts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipe_lib.data.chat_templates import THOUGHT_KEYS
from recipe_lib.data.column_names import is_blank, is_idle_key, read_truth
from recipe_lib.data.samples import (
    Conversation,
    Message,
    MessagePlace,
    RawSample,
    SampleFault,
    SamplePlaces,
    describe_field,
    describe_kind,
    format_value,
    get_path,
    parse_column,
    read_object_list,
    read_text_field,
    refuse_keys,
)
from recipe_lib.reading import parse_json

ROLES = ("system", "user", "assistant", "tool")
# Speaker as datasets and chat APIs call it, in small letters -> role
SPEAKERS = (
    dict.fromkeys(("system", "developer"), "system")
    | dict.fromkeys(("human", "user", "prompter"), "user")
    | dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot", "ai", "chatbot"), "assistant")
    | dict.fromkeys(("tool", "observation", "function", "ipython"), "tool")
    | dict.fromkeys(("function_response", "tool_response"), "tool")
)
TRAINED = ("train", "training", "loss")  # keys of a message whose `true` says that it is trained
MASKED = ("mask", "masked")  # keys whose `true` says that it is not
_FLAGS = frozenset((*TRAINED, *MASKED, "weight"))  # the weight is 0 or 1
# Columns that hold a conversation up to its last answer
CONVERSATION_COLUMNS = ("messages", "conversations")
# Speakers of an assistant's turn that is a call, or a list of them, as JSON
CALL_ROLES = ("function_call", "tool_call")
# Keys of a message that hold calls; the second is the older one of OpenAI's API
_CALL_KEYS = ("tool_calls", "function_call")
_PARTS = ("text", "input_text", "output_text")  # types of a part where a content is a list of them
_PART_KEYS = ("type", "text")  # keys of a part that are read


@dataclass(frozen=True)
class Turns:
    """Messages, and the place of each of them in its row, for error lines."""

    messages: list[Message] = field(default_factory=list)
    places: list[MessagePlace] = field(default_factory=list)  # one for each message

    def __add__(self, other: "Turns") -> "Turns":
        return Turns([*self.messages, *other.messages], [*self.places, *other.places])


def read_turns(sample: RawSample, name: str, names_calls: bool = True) -> Turns:
    """Return the messages of a column, each {from, value} or {role, content}.

    The column may also be a list of texts, of the user and the assistant in turn. A turn that is a
    tool call joins the assistant's message before it. names_calls: give an id to calls without one;
    False: only if a turn is a call, or has the older key `function_call`. Raises SampleFault for
    a message that cannot be read, or if a call and the message before it differ in a key.
    """
    value = sample.get(name)
    is_list = name in CONVERSATION_COLUMNS and isinstance(value, list)
    if value and is_list and all(isinstance(text, str) for text in value):
        return _read_texts(value, get_path(sample, name))
    messages = list[Message]()
    places = list[MessagePlace]()
    turns, path = read_object_list(sample, name)
    for number, turn in enumerate(turns):
        where = f"{path}[{number}]"
        message = read_turn(turn, where)
        previous = messages[-1] if messages else {}
        turn_is_call = is_call_turn(turn)
        names_calls = names_calls or turn_is_call or "function_call" in turn
        if turn_is_call and previous.get("role") == "assistant":
            messages[-1] = _join_call(previous, message, where)
        else:
            messages.append(message)
            places.append(locate_turn(turn, where))
    return Turns(name_calls(messages) if names_calls else messages, places)


def _join_call(before: Message, call: Message, where: str) -> Message:
    """Return a message of the assistant and the call that comes after it as one message.

    Raises SampleFault if they differ in a key of which one message has one value.
    """
    call_keys = [
        key
        for key in call
        if key not in ("role", "content", "tool_calls") and not is_idle_key(key, call[key])
    ]
    shared_keys = [key for key in call_keys if key in before or key in THOUGHT_KEYS]
    for key in ("train", *shared_keys):
        if before.get(key) != call.get(key):
            raise SampleFault(
                "call apart from its words",
                f"{where}: found a call of which `{key}` is another than of the words before it,"
                " expected the same of both",
            )
    return {**call, **before, "tool_calls": [*before.get("tool_calls", ()), *call["tool_calls"]]}


def _read_texts(texts: Sequence[str], path: str) -> Turns:
    """Return turns that are nothing but texts, the first one of the user.

    path: of the column, in jq's notation.
    """
    turns = Turns()
    for number, text in enumerate(texts):
        where = f"{path}[{number}]"
        content = read_text_field({"text": text}, "text", where=where)
        # `ROLES[1]` is the user, `ROLES[2]` the assistant.
        turns += Turns(
            [{"role": ROLES[1 + number % 2], "content": content}], [MessagePlace(where, where)]
        )
    return turns


def locate_turn(turn: RawSample, where: str) -> MessagePlace:
    """Return where a message of either spelling is, and its content. where: its path."""
    return MessagePlace(where, f"{where}.{'value' if 'from' in turn else 'content'}")


def make_text_turn(sample: RawSample, name: str, role: str) -> Turns:
    """Return the one message that is the text of a column."""
    path = get_path(sample, name)
    return Turns(
        [{"role": role, "content": read_text_field(sample, name)}], [MessagePlace(path, path)]
    )


def read_turn(turn: RawSample, where: str) -> Message:
    """Return one message, {from, value} or {role, content}, as chat APIs have it.

    where: its path in the sample, for faults. content may be a list of text parts, or null next to
    tool_calls. Raises SampleFault for a message of another shape.
    """
    is_api = "from" not in turn  # spelled as chat APIs do
    role_key, text_key = ("role", "content") if is_api else ("from", "value")
    # In the APIs' spelling `role` and `content` stay among the other keys, and are replaced below.
    other_keys = _read_other_keys(turn, where, *(() if is_api else (role_key, text_key)))
    if not is_api and ("role" in other_keys or "content" in other_keys):
        raise SampleFault(
            "message in two spellings",
            f"{where}: found from and {'role' if 'role' in other_keys else 'content'}, expected"
            " {from, value} or {role, content}",
        )
    if is_call_turn(turn):
        return _read_call_turn(turn, text_key, other_keys=other_keys, where=where)
    role = _read_role(turn, role_key, where)
    other_keys = _read_calls(other_keys, role, where)
    content = turn.get(text_key)
    if is_api and isinstance(content, list):
        other_keys |= _collect_part_keys(content)
        content = "".join(
            _read_text_part(part, f"{where}.content[{number}]")
            for number, part in enumerate(content)
        )
    elif is_api and content is None and "tool_calls" in other_keys:
        content = ""
    else:
        content = read_text_field(turn, text_key, where=where)
    return other_keys | {"role": role, "content": content}


def is_call_turn(turn: RawSample) -> bool:
    """Return True if a turn is only tool calls, by its speaker."""
    return turn.get("from", turn.get("role")) in CALL_ROLES


def _read_call_turn(
    turn: RawSample, text_key: str, other_keys: dict[str, Any], where: str
) -> Message:
    """Return a turn that is nothing but calls as a message of the assistant.

    text_key: of the JSON with the calls. other_keys: the turn's other keys, with their values.
    """
    text = read_text_field(turn, text_key, where=where)
    if second := next((key for key in _CALL_KEYS if key in other_keys), None):
        raise SampleFault(
            "calls of a message", f"{where}: found {text_key} and {second}, expected one of the two"
        )
    calls, idle = split_idle_keys(parse_calls(text, f"{where}.{text_key}"))
    return other_keys | idle | {"role": "assistant", "content": "", "tool_calls": calls}


def _read_calls(other_keys: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return the other keys of a message, with its calls as chat APIs have them.

    Raises SampleFault for calls of another shape, of another role, or under both keys.
    """
    keys = [key for key in _CALL_KEYS if key in other_keys]
    if not keys:
        return other_keys
    if len(keys) > 1 or role != "assistant":
        found_words = " and ".join(keys) + ("" if role == "assistant" else f" of the {role}")
        raise SampleFault(
            "calls of a message",
            f"{where}: found {found_words}, expected one of the two, of the assistant",
        )
    (key,) = keys
    path = f"{where}.{key}"
    calls_value = other_keys[key]
    if key == "tool_calls":
        if not isinstance(calls_value, list):
            raise SampleFault(
                _CAUSE,
                f"{path}: found {describe_kind(calls_value)}, expected a list of calls {_CALL}",
            )
        calls = [_read_call(call, f"{path}[{number}]") for number, call in enumerate(calls_value)]
    elif not isinstance(calls_value, dict) or "function" in calls_value:
        # The older key `function_call` holds the function itself.
        is_object = isinstance(calls_value, dict)
        found_words = "an object with function" if is_object else describe_kind(calls_value)
        raise SampleFault(_CAUSE, f"{path}: found {found_words}, expected {_FUNCTION}")
    else:
        calls = [_read_call(calls_value, path)]
    calls, idle = split_idle_keys(calls)
    return (
        {name: value for name, value in other_keys.items() if name != key}
        | idle
        | {"tool_calls": calls}
    )


def _read_role(message: RawSample, key: str, where: str) -> str:
    """Return the role of a message's speaker. Raises SampleFault for an unknown one."""
    role = message.get(key)
    known_role = SPEAKERS.get(role) or SPEAKERS.get(role.lower()) if isinstance(role, str) else None
    if known_role is None:
        expected = "human, gpt, system, tool, function_call or observation"
        if key == "role":
            expected = f"one of {', '.join(ROLES)}"
        raise SampleFault(
            "unknown role",
            f"{where}.{key}: found {format_value(role) if key in message else 'nothing'}, expected"
            f" {expected}",
        )
    return known_role


def _read_other_keys(message: RawSample, where: str, *read_keys: str) -> dict[str, Any]:
    """Return the keys of a message but `read_keys`; blank values are left out.

    Flags of all names become one key `train`. Raises SampleFault for flags that differ.
    """
    other_keys = {
        name: value
        for name, value in message.items()
        if name not in read_keys and not is_blank(value)
    }
    if _FLAGS.isdisjoint(other_keys):
        return other_keys
    flags = {
        name: _read_flag(name, other_keys.pop(name), where)
        for name in sorted(_FLAGS & other_keys.keys())
    }
    if len(set(flags.values())) > 1:
        found_words = " and ".join(f"{name}: {format_value(message[name])}" for name in flags)
        raise SampleFault(
            "flags that differ", f"{where}: found {found_words}, expected them to say the same"
        )
    if False in flags.values():
        return {"train": False} | other_keys
    if flags.keys().isdisjoint(TRAINED):
        # A weight of 1, or no mask, leaves it to the role whether the message is trained.
        return other_keys
    return {"train": True} | other_keys


def _read_flag(name: str, value: Any, where: str) -> bool:
    """Return True if a flag says that its message is trained.

    0 and 1 are false and true, as in tables. Raises SampleFault for another value.
    """
    truth = read_truth(int(value) if name == "weight" and value in (0.0, 1.0) else value)
    if truth is None:
        expected = "0 or 1" if name == "weight" else "true or false"
        raise SampleFault(
            f"{name} is no switch",
            f"{where}.{name}: found {format_value(value)}, expected {expected}",
        )
    return truth is not (name in MASKED)


def build_conversation(
    messages: Sequence[Message],
    tools: Sequence[RawSample] | None = None,
    places: SamplePlaces | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    asked: int = 0,
) -> Conversation:
    """Return a conversation that has an answer, and no tool's result without a call.

    places: where in the row the messages are, for the fault. variables: of the chat template, by
    name. asked: number of leading messages that are the prompt. Raises SampleFault if no answer
    follows the prompt, an answer is empty, or a tool's result follows no answer.
    """
    places = places or SamplePlaces()
    check_order(messages, places)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(index >= asked for index in answers):
        raise SampleFault(
            "no answer",
            f"found no answer among the messages ({len(messages)}), expected one of the assistant",
        )
    check_answers(messages, 0, places)
    return Conversation(
        messages, tools=tools, places=places, variables=variables or {}, asked=asked
    )


def check_order(messages: Sequence[Message], places: SamplePlaces) -> None:
    """Raise SampleFault for a tool's result that follows neither an answer nor another result.

    Any other order is left to the chat template, which raises an exception for one that it cannot
    write.
    """
    previous_role = "the start"  # for the error line
    for message_index, message in enumerate(messages):
        if message["role"] == "tool" and previous_role not in ("assistant", "tool"):
            raise SampleFault(
                "wrong role order",
                f"{places.locate_message(message_index)}: found tool after {previous_role},"
                " expected it after assistant or tool",
            )
        previous_role = message["role"]


def check_answers(messages: Sequence[Message], first: int, places: SamplePlaces) -> None:
    """Raise SampleFault for an answer, from index `first` on, that has nothing to train on."""
    for message_index in range(first, len(messages)):
        message = messages[message_index]
        has_content = message["content"].strip() or message.get("tool_calls")
        if message["role"] == "assistant" and not has_content:
            where = places.locate_content(message_index)
            raise SampleFault(
                "empty answer", f"{where}: found an empty answer, expected text to train on"
            )


def _collect_part_keys(parts: Sequence[Any]) -> dict[str, Any]:
    """Return what the parts of a content hold beside their text, as keys `content.KEY`.

    They are added to the message, so that a checker of unread keys counts them.
    """
    part_keys = dict[str, Any]()
    for part in parts:
        if isinstance(part, dict):
            part_keys |= {f"content.{name}": part[name] for name in part if name not in _PART_KEYS}
    return {name: value for name, value in part_keys.items() if not is_blank(value)}


def _read_text_part(part: Any, where: str) -> str:
    """Return the text of a part of a content. Raises SampleFault for a part of another kind."""
    if isinstance(part, dict) and part.get("type") in _PARTS:
        refuse_keys(
            part,
            _PART_KEYS,
            where,
            owner="a part",
            expected="which is not read, expected a part of type and text",
        )
        return read_text_field(part, "text", where=where)
    found_words = describe_kind(part)
    if isinstance(part, dict):
        found_words = (
            f"a part of the type {format_value(part['type'])}"
            if "type" in part
            else "an object without a type"
        )
    raise SampleFault(
        "not text", f"{where}: found {found_words}, expected a part of the type 'text'"
    )


# Shapes of tool calls, for error lines
_FUNCTION = '{"name": ..., "arguments": {...}}'
_CALL = f'{{"function": {_FUNCTION}}}'
_CALL_FIELDS = ("id", "type", "function")  # keys of a call that are read
_FUNCTION_KEYS = ("name", "arguments")  # keys of its function that are read
_BARE_KEYS = ("name", "arguments", "id", "type")  # keys of a bare call, which is a function itself
_CAUSE = "tool call of another shape"  # by which such faults are counted

# Raises SampleFault for a key of a call that is not read and may matter
_check_keys = partial(
    refuse_keys, owner="a tool call", expected=f"which is not read, expected {_FUNCTION}"
)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Return one call as chat APIs have it. where: its path.

    Raises SampleFault for a call of another shape.
    """
    if not isinstance(call, dict):
        raise SampleFault(_CAUSE, f"{where}: found {describe_kind(call)}, expected a call {_CALL}")
    is_bare = "function" not in call
    function = call if is_bare else call["function"]
    path = where if is_bare else f"{where}.function"
    if not isinstance(function, dict):
        raise SampleFault(_CAUSE, f"{path}: found {describe_kind(function)}, expected {_FUNCTION}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        found_words = (
            "empty text" if function.get("name") == "" else describe_field(function, "name")
        )
        raise SampleFault(
            _CAUSE, f"{path}.name: found {found_words}, expected the function's name, as in {_CALL}"
        )
    check_arguments(function, f"{path}.arguments")
    if not is_bare:
        _check_keys(call, _CALL_FIELDS, where)
        _check_keys(function, _FUNCTION_KEYS, path)
        return call
    _check_keys(call, _BARE_KEYS, where)
    beside = {key: value for key, value in call.items() if key not in _FUNCTION_KEYS}
    return {"type": "function"} | beside | {"function": {key: call[key] for key in _FUNCTION_KEYS}}


def split_idle_keys(calls: Sequence[RawSample]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (calls with the keys that are read alone, {`tool_calls.KEY`: value} of the others).

    The others change nothing: any key that may matter was refused before.
    """
    clean_calls = list[dict[str, Any]]()
    idle = dict[str, Any]()
    for call in calls:
        function = call["function"]
        beside = [(name, value) for name, value in call.items() if name not in _CALL_FIELDS]
        beside += [(name, value) for name, value in function.items() if name not in _FUNCTION_KEYS]
        idle |= {f"tool_calls.{name}": value for name, value in beside if not is_blank(value)}
        clean_function = {name: function[name] for name in function if name in _FUNCTION_KEYS}
        clean_call = {name: call[name] for name in call if name in _CALL_FIELDS}
        clean_calls.append(clean_call | {"function": clean_function})
    return clean_calls, idle


def check_arguments(function: RawSample, where: str) -> None:
    """Raise SampleFault for arguments of a call that are no object, nor JSON text of one."""
    arguments = function.get("arguments")
    if isinstance(arguments, dict) or (
        isinstance(arguments, str) and parse_arguments(arguments) is not None
    ):
        return
    found_words = (
        describe_field(function, "arguments")
        if not isinstance(arguments, str)
        else format_value(arguments)
    )
    raise SampleFault(
        "tool call's arguments are no JSON",
        f"{where}: found {found_words}, expected an object, or JSON text of one ({{}} for none)",
    )


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that are written as JSON; None: it is no JSON object.

    An empty text means no arguments, {}.
    """
    try:
        arguments = parse_json(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def parse_calls(text: str, where: str) -> list[dict[str, Any]]:
    """Return the calls that a `function_call` turn holds as JSON: one {name, arguments}, or a list.

    where: path of the text. Raises SampleFault for another text.
    """
    try:
        content = parse_json(text)
    except ValueError:
        content = None
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(
        isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
    ):
        raise SampleFault(
            "call that is no JSON",
            f"{where}: found a function_call that is no JSON object, expected {_FUNCTION} or a list"
            " of them",
        )
    full_calls = list[dict[str, Any]]()
    for call in calls:
        function = {"name": call["name"], "arguments": call.get("arguments") or {}}
        check_arguments(function, f"{where}: arguments of {format_value(call['name'])}")
        _check_keys(call, _BARE_KEYS, where)
        call_id = {"id": call["id"]} if call.get("id") else {}
        beside = {name: value for name, value in call.items() if name not in _BARE_KEYS}
        full_calls.append({"type": "function"} | call_id | beside | {"function": function})
    return full_calls


def name_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an id for each call that has none, and tools' results with that id.

    Chat APIs give calls an id and some templates write it (Mistral's: 9 letters or digits);
    sharegpt samples have none. An id is made of the call and its position in the conversation.
    """
    named_messages = list[Message]()
    open_calls = list[str]()  # ids of calls of which no result has come yet
    for message_index, message in enumerate(messages):
        calls = [
            call if "id" in call else {"id": _make_call_id(message_index, position, call), **call}
            for position, call in enumerate(message.get("tool_calls") or ())
        ]
        if calls:
            message = {**message, "tool_calls": calls}
            open_calls = [call["id"] for call in calls]
        elif message["role"] == "tool" and "tool_call_id" not in message and open_calls:
            message = {**message, "tool_call_id": open_calls.pop(0)}
        named_messages.append(message)
    return named_messages


def _make_call_id(message_index: int, position: int, call: RawSample) -> str:
    content = json.dumps([message_index, position, call], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[
        :9
    ]  # as many as Mistral's templates ask for


def read_tools(sample: RawSample) -> tuple[list[RawSample] | None, str]:
    """Return (descriptions in the column `tools`, None without any; the column's path).

    The column is a list of descriptions, a list as JSON text, or a list of JSON texts. A bare
    function is put as chat APIs have it. Raises SampleFault for a column of another shape.
    """
    path = get_path(sample, "tools")
    tools: Any = sample.get("tools")
    if is_blank(tools) or (isinstance(tools, str) and tools.strip() == "null"):
        return None, path
    if isinstance(tools, list) and all(
        isinstance(tool, str) and tool.lstrip().startswith("{") for tool in tools
    ):
        # A text that begins so is an object if it is JSON at all.
        described = [
            parse_column(tool, "tools", path=f"{path}[{number}]", expected="an object")
            for number, tool in enumerate(tools)
        ]
    else:
        described, path = read_object_list(sample, "tools")
    return [_read_tool(tool) for tool in described] or None, path


def _read_tool(tool: RawSample) -> RawSample:
    """Return a description as chat APIs have it, {type, function}.

    tool: the same, or a bare function, which may have the key `type`.
    """
    if "name" not in tool or "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type" or value != "function"}
    return {"type": "function", "function": function}

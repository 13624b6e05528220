"""Messages as chat APIs have them, out of the spellings that samples are found in; what cannot be used is a
SampleFault."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from recipe_lib.data.samples import Conversation, Message, SampleFault

RawSample = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
# The speakers of sharegpt samples, and of chat APIs.
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # an assistant's turn that is a call, or a list of them, as JSON


def read_turns(sample: RawSample, name: str, *, where: str = "", places: list[str] | None = None) -> list[Message]:
    """The messages of a column, each {from, value} or {role, content}. where: the column, if it is another one.
    places: gets the path of each message in the sample, as jq has it.

    A call of a tool joins the words of the assistant before it, and calls after each other become one message
    (unless only one of the two is to be trained).
    """
    messages: list[Message] = []
    for number, turn in enumerate(list_of(sample, name)):
        message = read_turn(turn, f".{where or name}[{number}]")
        calls = message.get("tool_calls")
        before = messages[-1] if messages else {}
        same = before.get("role") == "assistant" and before.get("train") == message.get("train")
        if calls and is_call(turn) and same:
            messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *calls]}
        elif calls and is_call(turn) and before.get("role") == "assistant":
            raise SampleFault(
                "call apart from its words",
                f".{where or name}[{number}]: found a call of which `train` is another than of the words before it, "
                "expected the same of both",
            )
        else:
            messages.append(message)
            if places is not None:
                places.append(f".{where or name}[{number}]")
    return name_calls(messages)


def name_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with an id for each call that has none, and the answers of tools with the id of their call.

    Chat APIs give calls an id and some templates write it (Mistral's: 9 letters or digits); sharegpt samples have none.
    An id follows from the call and its place in the conversation.
    """
    named, open_calls = [], []
    for number, message in enumerate(messages):
        calls = [
            call if "id" in call else {"id": _call_id(number, at, call), **call}
            for at, call in enumerate(message.get("tool_calls") or ())
        ]
        if calls:
            message, open_calls = {**message, "tool_calls": calls}, [call["id"] for call in calls]
        elif message["role"] == "tool" and "tool_call_id" not in message and open_calls:
            message = {**message, "tool_call_id": open_calls.pop(0)}
        named.append(message)
    return named


def _call_id(number: int, at: int, call: RawSample) -> str:
    return hashlib.sha256(json.dumps([number, at, call], sort_keys=True).encode()).hexdigest()[:9]


def read_turn(turn: RawSample, where: str) -> Message:
    """One message in either spelling. where: its place in the sample, for faults."""
    if "from" not in turn:
        return read_message(turn, where, SPEAKERS)
    speaker = turn["from"]
    kept = _kept(turn, "from", "value")
    if is_call(turn):
        return kept | {
            "role": "assistant",
            "content": "",
            "tool_calls": _calls(text_of(turn, "value", where=where), where),
        }
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        known = "human, gpt, system, tool, function_call or observation"
        raise SampleFault("unknown role", f"{where}: found the from {speaker!r}, expected {known}")
    return kept | {"role": SPEAKERS[speaker], "content": text_of(turn, "value", where=where)}


def is_call(turn: RawSample) -> bool:
    """A sharegpt turn that is nothing but the call of a tool."""
    return turn.get("from") in CALLS


def read_message(message: RawSample, where: str, roles: Mapping[str, str] | None = None) -> Message:
    """One {role, content}; content may be a list of text parts, or null next to tool_calls.

    roles: what a role is called in the sample -> its name; without it the names of chat APIs.
    """
    known = roles or {role: role for role in ROLES} | {"developer": "system"}
    role = message.get("role")
    if not isinstance(role, str) or role not in known:
        hint = "; samples of {from, value} are read by the format sharegpt" if "from" in message else ""
        raise SampleFault("unknown role", f"{where}: found the role {role!r}, expected one of {', '.join(ROLES)}{hint}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""
    else:
        content = text_of(message, "content", where=where)
    return _kept(message) | {"role": known[role], "content": content}


def _kept(message: RawSample, *others: str) -> dict[str, Any]:
    """What else a message holds; nulls are left out. A `weight` of 0 is `train: false` in other words."""
    kept = {name: value for name, value in message.items() if value is not None and name not in (*others, "weight")}
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise SampleFault("weight of a message", f"found the weight {weight!r} of a message, expected 0 or 1")
    return {"train": False} | kept if weight == 0 and weight is not None else kept


def _calls(text: str, where: str) -> list[dict[str, Any]]:
    """The calls that a `function_call` turn holds as JSON: one {name, arguments}, or a list of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise SampleFault(
            "call that is no JSON",
            f"{where}: found a function_call that is no JSON object, expected "
            '{"name": ..., "arguments": {...}} or a list of them',
        )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def read_tools(sample: RawSample) -> list[RawSample] | None:
    """The column `tools`: a list of descriptions, or one as JSON text; a bare function is put as chat APIs have it."""
    tools = sample.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise SampleFault(
                "tools are no list", "tools: found text that is no JSON, expected a list of objects"
            ) from None
    if tools is None or tools == [] or (isinstance(tools, str) and not tools.strip()):
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise SampleFault("tools are no list", f"tools: found {kind_of(tools)}, expected a list of objects")
    return [{"type": "function", "function": tool} if "name" in tool and "type" not in tool else tool for tool in tools]


def conversation(
    messages: Sequence[Message], tools: Sequence[RawSample] | None = None, places: Sequence[str] = ()
) -> Conversation:
    """Checks the order of the roles and that there is an answer. Raises SampleFault.

    places: where in the sample each message is, as jq has it (`.messages[0]`), for the fault.
    """
    check_order(messages, places)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise SampleFault(
            "no answer",
            f"found no answer among the messages ({len(messages)}), expected one of the assistant",
        )
    for message, place in zip(messages, places, strict=False):
        check_answers([message] if message["role"] == "assistant" else [], f"{place}.content: ")
    check_answers(answers)
    return Conversation(messages, tools)


_AFTER = {
    "system": ("the start",),
    "user": ("the start", "system", "user", "assistant"),
    "assistant": ("the start", "system", "user", "assistant", "tool"),
    "tool": ("assistant", "tool"),
}
# What a template that takes turns can write.
_IN_TURN = _AFTER | {"user": ("the start", "system", "assistant"), "assistant": ("user", "tool")}


def check_order(messages: Sequence[Message], places: Sequence[str] = (), *, in_turn: bool = False) -> None:
    """Raises SampleFault for a message that cannot follow the one before it.

    The assistant may begin, and a speaker may go on: whether that can be written, the chat template says. in_turn:
    user and assistant take turns, and the user begins. places: as for `conversation`.
    """
    before = "the start"
    for number, message in enumerate(messages):
        role = message["role"]
        allowed = (_IN_TURN if in_turn else _AFTER)[role]
        if before not in allowed:
            where = places[number] if number < len(places) else f"message {number} (the first is 0)"
            raise SampleFault(
                "wrong role order", f"{where}: found {role} after {before}, expected it after {' or '.join(allowed)}"
            )
        before = role


def check_answers(answers: Sequence[Message], where: str = "", what: str = "answer") -> None:
    """Raises SampleFault for one with nothing in it to train on. where: it is, before the fault."""
    for message in answers:
        if not message["content"].strip() and not message.get("tool_calls"):
            raise SampleFault("empty answer", f"{where}found an empty {what}, expected text to train on")


def text_of(sample: RawSample, name: str, *, may_be_missing: bool = False, where: str = "") -> str:
    """The text in a column. Raises SampleFault: missing, no text, or not encodable as UTF-8."""
    value = sample.get(name)
    if value is None and may_be_missing:
        return ""
    label = f"{where}.{name}" if where else name
    if not isinstance(value, str):
        raise SampleFault(f"{name} is no text", f"{label}: found {kind_of(value)}, expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleFault(
            "half a character",
            f"{label}: found half a surrogate pair at character {error.start + 1}, expected whole characters",
        ) from None
    return value


def list_of(sample: RawSample, name: str) -> list[RawSample]:
    """The list of objects in a column. Raises SampleFault."""
    value = sample.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise SampleFault(f"{name} is no list", f"{name}: found {kind_of(value)}, expected a list of objects")
    return value


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise SampleFault("not text", f"{where}: found {kind_of(part)} in content, expected parts of the type text")
    return text_of(part, "text", where=where)


def kind_of(value: Any) -> str:
    """A value in words, for error lines."""
    if value is None:
        return "nothing"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

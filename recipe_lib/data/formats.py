"""How a row of a dataset is read, by the name in `data.format`.

A format is a function from a row (a dict, its columns renamed by `data.columns`) to a Conversation, a Completion or
a Document. A plugin registers its own with `@register("data.format", "name")`, and says with `@columns(...)` which
columns it reads; it raises RowFault for a row that it cannot use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipe_lib.config.registry import register
from recipe_lib.data.samples import Completion, Conversation, Document, Message, RowFault, Sample

Row = Mapping[str, Any]
Reader = Callable[[Row], Sample]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


def columns(*required: str, optional: Sequence[str] = ()) -> Callable[[Reader], Reader]:
    """Decorator: the columns that a format reads."""

    def add(reader: Reader) -> Reader:
        reader.required, reader.optional = required, tuple(optional)  # type: ignore[attr-defined]
        return reader

    return add


@register("data.format", "alpaca")
@columns("instruction", "output", optional=("input", "system"))
def read_alpaca(row: Row) -> Conversation:
    """`instruction`, `output`, and perhaps `input` (put under the instruction) and `system`."""
    question = text_of(row, "instruction")
    more = text_of(row, "input", may_be_missing=True)
    system = text_of(row, "system", may_be_missing=True)
    if not (question + more).strip():
        raise RowFault("empty instruction", "found an empty instruction, expected text")
    messages = [
        {"role": "user", "content": f"{question}\n\n{more}" if more else question},
        {"role": "assistant", "content": text_of(row, "output")},
    ]
    return conversation([{"role": "system", "content": system}, *messages] if system else messages)


@register("data.format", "sharegpt")
@columns("conversations", optional=("system",))
def read_sharegpt(row: Row) -> Conversation:
    """`conversations`: a list of {from, value} or {role, content}; and perhaps `system`."""
    messages: list[Message] = []
    system = text_of(row, "system", may_be_missing=True)
    if system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(list_of(row, "conversations"), start=1):
        where = f"conversations[{number}]"
        speaker, text = ("from", "value") if "from" in turn else ("role", "content")
        role = turn.get(speaker)
        if role not in SHAREGPT_ROLES:
            known = "human, gpt, system or tool"
            raise RowFault("unknown role", f"{where}: found the {speaker} {role!r}, expected {known}")
        messages.append({"role": SHAREGPT_ROLES[role], "content": text_of(turn, text, where=where)})
    return conversation(messages)


@register("data.format", "messages")
@columns("messages", optional=("tools",))
def read_messages(row: Row) -> Conversation:
    """`messages`: a list of {role, content} as chat APIs have it; and perhaps `tools` for the chat template."""
    messages: list[Message] = []
    for number, message in enumerate(list_of(row, "messages"), start=1):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in ROLES:
            raise RowFault("unknown role", f"{where}: found the role {role!r}, expected one of {', '.join(ROLES)}")
        calls = message.get("tool_calls")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_part(part, where) for part in content)
        elif content is None and calls:
            content = ""
        else:
            content = text_of(message, "content", where=where)
        kept = {name: value for name, value in message.items() if value is not None}
        messages.append(kept | {"role": role, "content": content})
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowFault("tools are no list", f"tools: found {_kind(tools)}, expected a list of objects")
    return conversation(messages, tools or None)


@register("data.format", "prompt_completion")
@columns("prompt", "completion")
def read_prompt_completion(row: Row) -> Completion:
    """`prompt` and `completion`, put together as they stand: no template, no space between them."""
    completion = text_of(row, "completion")
    if not completion:
        raise RowFault("empty answer", "found an empty completion, expected text to train on")
    return Completion(text_of(row, "prompt"), completion)


@register("data.format", "text")
@columns("text")
def read_text(row: Row) -> Document:
    """`text`, or a whole .txt file."""
    text = text_of(row, "text")
    if not text:
        raise RowFault("empty text", "found an empty text, expected something to train on")
    return Document(text)


def text_of(row: Row, name: str, *, may_be_missing: bool = False, where: str = "") -> str:
    """The text in a column. Raises RowFault: missing, no text, or not encodable as UTF-8."""
    value = row.get(name)
    if value is None and may_be_missing:
        return ""
    label = f"{where}.{name}" if where else name
    if not isinstance(value, str):
        raise RowFault(f"{name} is no text", f"{label}: found {_kind(value)}, expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFault(
            "half a character",
            f"{label}: found half a surrogate pair at character {error.start + 1}, expected whole characters",
        ) from None
    return value


def list_of(row: Row, name: str) -> list[Row]:
    """The list of objects in a column. Raises RowFault."""
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowFault(f"{name} is no list", f"{name}: found {_kind(value)}, expected a list of objects")
    return value


def conversation(messages: Sequence[Message], tools: Sequence[Row] | None = None) -> Conversation:
    """Checks the order of the roles and that there is an answer. Raises RowFault."""
    before = "the start"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        allowed = {"system": ("the start",), "user": ("the start", "system", "assistant")}.get(role)
        allowed = allowed or {"assistant": ("user", "tool"), "tool": ("assistant", "tool")}[role]
        if before not in allowed:
            after = " or ".join(allowed)
            raise RowFault(
                "wrong role order", f"message {number}: found {role} after {before}, expected it after {after}"
            )
        before = role
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise RowFault("no answer", f"found {len(messages)} messages without an answer, expected one of the assistant")
    for message in answers:
        if not message["content"].strip() and not message.get("tool_calls"):
            raise RowFault("empty answer", "found an empty answer, expected text to train on")
    return Conversation(messages, tools)


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise RowFault("not text", f"{where}: found {_kind(part)} in content, expected parts of the type text")
    return text_of(part, "text", where=where)


def _kind(value: Any) -> str:
    """A value in words, for error lines."""
    if value is None:
        return "nothing"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

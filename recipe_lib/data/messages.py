"""Messages as chat APIs have them, out of the spellings that samples are found in; what cannot be used is a
SampleFault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.data.sample_columns import RawSample, list_of, path_of, text_of
from recipe_lib.data.samples import Conversation, Message, MessagePlace, SampleFault, SamplePlaces, kind_of, shown
from recipe_lib.data.tool_calls import calls_in_text, name_calls, read_calls

ROLES = ("system", "user", "assistant", "tool")
# The speakers of sharegpt samples, and of chat APIs.
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # an assistant's turn that is a call, or a list of them, as JSON


@dataclass(frozen=True)
class Turns:
    """Messages, and where in the sample each of them is."""

    messages: list[Message] = field(default_factory=list)
    places: list[MessagePlace] = field(default_factory=list)

    def __add__(self, other: "Turns") -> "Turns":
        return Turns([*self.messages, *other.messages], [*self.places, *other.places])


def read_turns(sample: RawSample, name: str) -> Turns:
    """The messages of a column, each {from, value} or {role, content}.

    A call of a tool joins the words of the assistant before it, and calls after each other become one message
    (unless only one of the two is to be trained).
    """
    messages: list[Message] = []
    places: list[MessagePlace] = []
    items, path = list_of(sample, name)
    for number, turn in enumerate(items):
        where = f"{path}[{number}]"
        message = read_turn(turn, where)
        calls = message.get("tool_calls")
        before = messages[-1] if messages else {}
        same = before.get("role") == "assistant" and before.get("train") == message.get("train")
        if calls and is_call(turn) and same:
            messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *calls]}
        elif calls and is_call(turn) and before.get("role") == "assistant":
            raise SampleFault(
                "call apart from its words",
                f"{where}: found a call of which `train` is another than of the words before it, expected the same of "
                "both",
            )
        else:
            messages.append(message)
            places.append(place_of_turn(turn, where))
    return Turns(name_calls(messages), places)


def place_of_turn(turn: RawSample, where: str) -> MessagePlace:
    """Where a message of either spelling is, and its content."""
    return MessagePlace(where, f"{where}.{'value' if 'from' in turn else 'content'}")


def text_turn(sample: RawSample, name: str, role: str) -> Turns:
    """One message that is the text of a column."""
    path = path_of(sample, name)
    return Turns([{"role": role, "content": text_of(sample, name)}], [MessagePlace(path, path)])


def read_turn(turn: RawSample, where: str) -> Message:
    """One message in either spelling. where: its path in the sample, for faults."""
    if "from" not in turn:
        return read_message(turn, where, SPEAKERS)
    speaker = turn["from"]
    kept = _kept(turn, where, "from", "value")
    if is_call(turn):
        calls = calls_in_text(text_of(turn, "value", where=where), f"{where}.value")
        return kept | {"role": "assistant", "content": "", "tool_calls": calls}
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        known = "human, gpt, system, tool, function_call or observation"
        raise SampleFault("unknown role", f"{where}.from: found {shown(speaker)}, expected {known}")
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
        found = shown(role) if "role" in message else "nothing"
        raise SampleFault("unknown role", f"{where}.role: found {found}, expected one of {', '.join(ROLES)}{hint}")
    kept = _kept(message, where)
    calls = message.get("tool_calls")
    if calls is not None:
        kept["tool_calls"] = read_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    elif content is None and calls:
        content = ""
    else:
        content = text_of(message, "content", where=where)
    return kept | {"role": known[role], "content": content}


def _kept(message: RawSample, where: str, *others: str) -> dict[str, Any]:
    """What else a message holds; nulls are left out. A `weight` of 0 is `train: false` in other words."""
    kept = {name: value for name, value in message.items() if value is not None and name not in (*others, "weight")}
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise SampleFault("weight of a message", f"{where}.weight: found {shown(weight)}, expected 0 or 1")
    return {"train": False} | kept if weight == 0 and weight is not None else kept


def conversation(
    messages: Sequence[Message], tools: Sequence[RawSample] | None = None, places: SamplePlaces | None = None
) -> Conversation:
    """Checks that there is an answer, and no tool's result without a call. Raises SampleFault.

    places: where in the sample the messages are, for the fault.
    """
    places = places or SamplePlaces()
    check_order(messages, places)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise SampleFault(
            "no answer",
            f"found no answer among the messages ({len(messages)}), expected one of the assistant",
        )
    for number in answers:
        check_answer(messages[number], places.text(number))
    return Conversation(messages, tools, places)


def check_order(messages: Sequence[Message], places: SamplePlaces) -> None:
    """Raises SampleFault for a tool's result that neither an answer nor another result comes before.

    Any other order is the chat template's business: whether it can be written, it says itself.
    """
    before = "the start"
    for number, message in enumerate(messages):
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            raise SampleFault(
                "wrong role order",
                f"{places.at(number)}: found tool after {before}, expected it after assistant or tool",
            )
        before = message["role"]


def check_answer(message: Message, where: str) -> None:
    """Raises SampleFault for an answer with nothing in it to train on. where: its content's path."""
    if not message["content"].strip() and not message.get("tool_calls"):
        raise SampleFault("empty answer", f"{where}: found an empty answer, expected text to train on")


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return text_of(part, "text", where=where)
    found = kind_of(part)
    if isinstance(part, dict):
        found = f"a part of the type {shown(part['type'])}" if "type" in part else "an object without a type"
    raise SampleFault("not text", f"{where}: found {found}, expected a part of the type 'text'")

"""How a row of a dataset is read, by the name in `data.format`.

A format is a function from a row (a dict, its columns renamed by `data.columns`) to a Conversation, a Completion, a
Document or a Preference. A plugin registers its own with `@register("data.format", "name")`, and says with
`@columns(...)` which columns it reads; it raises RowFault for a row that it cannot use.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from recipe_lib.config.registry import register
from recipe_lib.data.messages import (
    Row,
    check_answers,
    check_order,
    conversation,
    kind_of,
    list_of,
    read_message,
    read_tools,
    read_turn,
    read_turns,
    text_of,
)
from recipe_lib.data.samples import Completion, Conversation, Document, Message, Preference, RowFault, Sample

__all__ = ["Reader", "Row", "columns", "conversation", "text_of"]

Reader = Callable[[Row], Sample]


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
    if not (question + more).strip():
        raise RowFault("empty instruction", "found an empty instruction, expected text")
    messages = [
        {"role": "user", "content": f"{question}\n\n{more}" if more else question},
        {"role": "assistant", "content": text_of(row, "output")},
    ]
    return conversation([*_system(row), *messages])


@register("data.format", "sharegpt")
@columns("conversations", optional=("system", "tools"))
def read_sharegpt(row: Row) -> Conversation:
    """`conversations`: a list of {from, value} or {role, content}; and perhaps `system`, and `tools` (may be JSON)."""
    return conversation([*_system(row), *read_turns(row, "conversations")], read_tools(row))


@register("data.format", "messages")
@columns("messages", optional=("tools",))
def read_messages(row: Row) -> Conversation:
    """`messages`: a list of {role, content} as chat APIs have it; and perhaps `tools` for the chat template."""
    turns = list_of(row, "messages")
    messages = [read_message(turn, f"messages[{number}]") for number, turn in enumerate(turns, start=1)]
    return conversation(messages, read_tools(row))


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


@register("data.format", "preference")
@columns("chosen", "rejected", optional=("prompt", "conversations", "system", "tools"))
def read_preference(row: Row) -> Preference:
    """`chosen` and `rejected`: two answers (text or a message each), or two conversations that begin alike.

    What comes before them is `prompt` (text, or messages) or `conversations`; where the conversations hold it already,
    neither is needed. The prompt is all that both have in common, up to the answer in which they part.
    """
    if row.get("prompt") is not None and row.get("conversations") is not None:
        raise RowFault("two prompts", "found prompt and conversations, expected one of the two")
    name = "prompt" if row.get("prompt") is not None else "conversations"
    before = [*_system(row), *_messages(row, name, "user")] if row.get(name) is not None else _system(row)
    chosen, rejected = (_continued(before, _messages(row, answer, "assistant")) for answer in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowFault("equal answers", "found chosen equal to rejected, expected two different answers")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    if not shared and all(messages and messages[0]["role"] == "assistant" for messages in (chosen, rejected)):
        raise RowFault(
            "no prompt", "found answers without a prompt, expected prompt, or conversations that begin alike"
        )
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        last = messages[-1]["role"] if len(messages) > shared else "nothing"
        if last != "assistant":
            raise RowFault(
                f"{name} without an answer", f"{name}: found {last} at its end, expected an answer of its own"
            )
        if messages[shared]["role"] != "assistant":
            raise RowFault(
                "other questions",
                f"{name}: message {shared + 1} is of the {messages[shared]['role']} and differs between chosen and "
                "rejected, expected them to part in an answer",
            )
        check_order(messages)
        check_answers([message for message in messages[shared:] if message["role"] == "assistant"], f"answer in {name}")
    return Preference(chosen[:shared], chosen[shared:], rejected[shared:], read_tools(row))


def _continued(before: list[Message], answer: list[Message]) -> list[Message]:
    """The whole conversation: the answer holds what comes before it already, or goes on from it."""
    held = answer[: len(before)] == before and len(answer) > len(before)
    # A dataset may repeat the question of its conversations in a column of its own.
    repeated = len(before) == 1 and before[0]["role"] == "user" and before[0] in answer
    return answer if held or repeated else [*before, *answer]


def _messages(row: Row, name: str, role: str) -> list[Message]:
    """A column as messages: a list of them, one of them, or a text of the given role."""
    value = row.get(name)
    if isinstance(value, list):
        return read_turns(row, name)
    if isinstance(value, dict):
        return [read_turn(value, name)]
    if not isinstance(value, str):
        raise RowFault(f"{name} is no text", f"{name}: found {kind_of(value)}, expected text or messages")
    return [{"role": role, "content": text_of(row, name)}]


def _system(row: Row) -> list[Message]:
    text = text_of(row, "system", may_be_missing=True)
    return [{"role": "system", "content": text}] if text else []

"""How a sample of a dataset is read, by the name in `data.format`.

A format is a function from a sample (a dict, its columns renamed by `data.columns`) to a Conversation, a Completion, a
Document or a Preference. A plugin registers its own with `@register("data.format", "name")`, and says with
`@columns(...)` which columns it reads; it raises SampleFault for a sample that it cannot use.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from recipe_lib.config.registry import register
from recipe_lib.data.messages import (
    RawSample,
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
from recipe_lib.data.samples import Completion, Conversation, Document, Message, Preference, Sample, SampleFault

__all__ = ["Reader", "RawSample", "columns", "conversation", "text_of"]

Reader = Callable[[RawSample], Sample]


def columns(*required: str, optional: Sequence[str] = ()) -> Callable[[Reader], Reader]:
    """Decorator: the columns that a format reads."""

    def add(reader: Reader) -> Reader:
        reader.required, reader.optional = required, tuple(optional)  # type: ignore[attr-defined]
        return reader

    return add


@register("data.format", "alpaca")
@columns("instruction", "output", optional=("input", "system"))
def read_alpaca(sample: RawSample) -> Conversation:
    """`instruction`, `output`, and perhaps `input` (put under the instruction) and `system`."""
    question = text_of(sample, "instruction")
    more = text_of(sample, "input", may_be_missing=True)
    if not (question + more).strip():
        raise SampleFault("empty instruction", "found an empty instruction, expected text")
    messages = [
        {"role": "user", "content": f"{question}\n\n{more}" if more else question},
        {"role": "assistant", "content": text_of(sample, "output")},
    ]
    return conversation([*_system(sample), *messages])


@register("data.format", "sharegpt")
@columns("conversations", optional=("system", "tools"))
def read_sharegpt(sample: RawSample) -> Conversation:
    """`conversations`: a list of {from, value} or {role, content}; and perhaps `system`, and `tools` (may be JSON)."""
    before, places = _system(sample), list[str]()
    turns = read_turns(sample, "conversations", places=places)
    return conversation([*before, *turns], read_tools(sample), [*[".system"] * len(before), *places])


@register("data.format", "messages")
@columns("messages", optional=("tools",))
def read_messages(sample: RawSample) -> Conversation:
    """`messages`: a list of {role, content} as chat APIs have it; and perhaps `tools` for the chat template."""
    turns = list_of(sample, "messages")
    places = [f".messages[{number}]" for number in range(len(turns))]
    messages = [read_message(turn, place) for turn, place in zip(turns, places, strict=True)]
    return conversation(messages, read_tools(sample), places)


@register("data.format", "prompt_completion")
@columns("prompt", "completion")
def read_prompt_completion(sample: RawSample) -> Completion:
    """`prompt` and `completion`, put together as they stand: no template, no space between them."""
    completion = text_of(sample, "completion")
    if not completion:
        raise SampleFault("empty answer", "found an empty completion, expected text to train on")
    return Completion(text_of(sample, "prompt"), completion)


@register("data.format", "text")
@columns("text")
def read_text(sample: RawSample) -> Document:
    """`text`, or a whole .txt file."""
    text = text_of(sample, "text")
    if not text:
        raise SampleFault("empty text", "found an empty text, expected something to train on")
    return Document(text)


@register("data.format", "preference")
@columns("chosen", "rejected", optional=("prompt", "conversations", "system", "tools"))
def read_preference(sample: RawSample) -> Preference:
    """`chosen` and `rejected`: two answers (text or a message each), or two conversations that begin alike.

    What comes before them is `prompt` (text, or messages) or `conversations`; where the conversations hold it already,
    neither is needed. The prompt is all that both have in common, up to the answer in which they part.
    """
    if sample.get("prompt") is not None and sample.get("conversations") is not None:
        raise SampleFault("two prompts", "found prompt and conversations, expected one of the two")
    name = "prompt" if sample.get("prompt") is not None else "conversations"
    before = [*_system(sample), *_messages(sample, name, "user")] if sample.get(name) is not None else _system(sample)
    chosen, rejected = (_continued(before, _messages(sample, answer, "assistant")) for answer in ("chosen", "rejected"))
    if chosen == rejected:
        raise SampleFault("equal answers", "found chosen equal to rejected, expected two different answers")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    if not shared and all(messages and messages[0]["role"] == "assistant" for messages in (chosen, rejected)):
        raise SampleFault(
            "no prompt", "found answers without a prompt, expected prompt, or conversations that begin alike"
        )
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        last = messages[-1]["role"] if len(messages) > shared else "nothing"
        if last != "assistant":
            raise SampleFault(
                f"{name} without an answer", f"{name}: found {last} at its end, expected an answer of its own"
            )
        if messages[shared]["role"] != "assistant":
            raise SampleFault(
                "other questions",
                f"{name}: message {shared} (the first is 0) is of the {messages[shared]['role']} and differs between "
                "chosen and rejected, expected them to part in an answer",
            )
        check_order(messages, [f"{name}: message {number} (the first is 0)" for number in range(len(messages))])
        answers = [message for message in messages[shared:] if message["role"] == "assistant"]
        check_answers(answers, what=f"answer in {name}")
    return Preference(chosen[:shared], chosen[shared:], rejected[shared:], read_tools(sample))


def _continued(before: list[Message], answer: list[Message]) -> list[Message]:
    """The whole conversation: the answer holds what comes before it already, or goes on from it."""
    held = answer[: len(before)] == before and len(answer) > len(before)
    # A dataset may repeat the question of its conversations in a separate column.
    repeated = len(before) == 1 and before[0]["role"] == "user" and before[0] in answer
    return answer if held or repeated else [*before, *answer]


def _messages(sample: RawSample, name: str, role: str) -> list[Message]:
    """A column as messages: a list of them, one of them, or a text of the given role."""
    value = sample.get(name)
    if isinstance(value, list):
        return read_turns(sample, name)
    if isinstance(value, dict):
        return [read_turn(value, name)]
    if not isinstance(value, str):
        raise SampleFault(f"{name} is no text", f"{name}: found {kind_of(value)}, expected text or messages")
    return [{"role": role, "content": text_of(sample, name)}]


def _system(sample: RawSample) -> list[Message]:
    text = text_of(sample, "system", may_be_missing=True)
    return [{"role": "system", "content": text}] if text else []

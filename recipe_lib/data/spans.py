"""Which messages are trained, where those that are no answers stand in a rendering, and what a rendering leaves out.

Such a message is found by writing a private-use letter in its place. `recipe_lib.data.answers` finds answers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.rendering import RenderedChat
from recipe_lib.data.samples import Message, SampleFault, SamplePlaces, shown
from recipe_lib.data.template_behavior import THOUGHT_KEYS, Habits, under_its_name
from recipe_lib.data.tool_calls import parse_arguments
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest

ROLES = ("system", "user", "assistant", "tool")
CHOICES = ("assistant", "last", "all")


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the whole rendering: a message's text and, if it has one, its end-of-turn token."""

    start: int
    end: int


def check_train_on(train_on: str | Sequence[str]) -> None:
    """Raise DataError for a value of data.train_on that says nothing."""
    faulty = [] if train_on in CHOICES else [train_on] if isinstance(train_on, str) else list(train_on) or [""]
    for value in faulty:
        if isinstance(train_on, str) or value not in ROLES:
            raise DataError(
                f"data.train_on: found {value!r}, expected {', '.join(CHOICES)}, or a list of the roles "
                f"{', '.join(ROLES)}{did_you_mean(str(value), (*CHOICES, *ROLES))}"
            )


def pick_trained(messages: Sequence[Message], train_on: str | Sequence[str], places: SamplePlaces) -> list[bool]:
    """Return which messages are trained: by role, unless a message says `train` itself. Raises SampleFault.

    An answer that the conversation begins with is not: no prompt asks for it.
    """
    roles = ("assistant",) if isinstance(train_on, str) else tuple(train_on)
    chosen = [message["role"] in roles for message in messages]
    if messages[0]["role"] == "assistant":
        chosen[0] = False
    if train_on == "all":
        chosen = [True] * len(messages)
    elif train_on == "last":
        last = max((number for number, is_answer in enumerate(chosen) if is_answer), default=-1)
        chosen = [number == last for number in range(len(messages))]
    for number, message in enumerate(messages):
        own = message.get("train")
        if own is not None and not isinstance(own, bool):
            raise SampleFault(
                "train is no switch", f"{places.at(number, '.train')}: found {shown(own)}, expected true or false"
            )
        chosen[number] = chosen[number] if own is None else own
    return chosen


def find_others(chat: RenderedChat, numbers: Sequence[int]) -> list[Span]:
    """Return where the messages with these numbers, none of them an answer, stand in the rendering of all.

    Raises SampleFault: the template objects, or does not write one of them once and by its text.
    """
    if not numbers:
        return []
    requests = [RenderRequest(len(chat.messages))]
    for number in numbers:
        requests += _list_requests(chat, number)
    chat.fetch(requests)
    return [_find_span(chat, number) for number in numbers]


def _list_requests(chat: RenderedChat, number: int) -> list[RenderRequest]:
    """Return the renderings that tell where a message stands: with a letter in its place; and, unless it is the last,
    up to the answer after it, or with a second letter in the place of the next message."""
    count = len(chat.messages)
    first, second = chat.letters
    alone = RenderRequest(count, replacements=((number, first),))
    if number + 1 == count:
        return [alone]
    if chat.messages[number + 1]["role"] == "assistant":
        return [alone, RenderRequest(number + 1, add_generation_prompt=True)]
    return [alone, RenderRequest(count, replacements=((number, first), (number + 1, second)))]


def _find_span(chat: RenderedChat, number: int) -> Span:
    """Return where a message stands: between what is written around a letter in its place."""
    whole = chat.whole
    first, second = chat.letters
    alone, *after = _list_requests(chat, number)
    around = chat.get_text(alone).split(first)
    if len(around) != 2 or not whole.startswith(around[0]) or not whole.endswith(around[1]):
        raise SampleFault(
            "message not found",
            f"{chat.places.at(number)}: found that the chat template writes it {len(around) - 1} times or "
            "differently by its text, expected once; it cannot be trained "
            f"({chat.messages[number]['role']} in data.train_on)",
        )
    start = len(around[0])
    end = len(whole) - len(around[1])
    while start and whole[start - 1] == " ":  # most tokenizers join a space and the word after it
        start -= 1
    limit = len(whole)
    if after and after[0].add_generation_prompt:
        before = chat.get_text(after[0])
        limit = len(before) if whole.startswith(before) else end
    elif after:
        next_at = chat.get_text(after[0]).find(second)
        between = next_at - len(around[0]) - len(first)
        limit = end + between if next_at >= 0 and between >= 0 else end
    special = chat.template.special.pattern
    token = special.search(whole, end, limit) if special else None
    return Span(start, token.end() if token else end)


def check_written(message: Message, written: str, where: str) -> None:
    """Raise SampleFault if the template leaves out text or a call: the model would learn to say nothing in its
    place. where: the message is."""
    squeezed = _squeezed(written)
    for key in ("content", *THOUGHT_KEYS):
        text = message.get(key)
        if isinstance(text, str) and _squeezed(text) not in squeezed:
            raise SampleFault(
                "part of an answer left out",
                f"{where}: found a {key} that the chat template does not write in full "
                f"({text.strip()[:24]!r}), expected a template that does; set tokenizer.chat_template to one",
            )
    for call in message.get("tool_calls") or ():
        name = name_of(call)
        if name is None or name not in written:
            raise SampleFault(
                "tool call left out",
                f"{where}: found a tool call that the chat template does not write, expected a template that knows "
                "tool calls; set tokenizer.chat_template to one",
            )


def count_left_out(messages: Sequence[Message], whole: str) -> int:
    """Return how many messages of the system and the user the template does not write: the model is never shown them.

    No fault of a sample: there are templates for models that were trained without a system message.
    """
    squeezed, count = "", 0
    for message in messages:
        text = message.get("content")
        if message["role"] not in ("system", "user") or not isinstance(text, str) or text in whole:
            continue
        squeezed = squeezed or _squeezed(whole)  # templates strip, and indent
        count += _squeezed(text) not in squeezed
    return count


def check_system(chat: RenderedChat) -> None:
    """Raise SampleFault for a system message that the template does not write where one comes after the first message.

    One alone at the start is counted by `count_left_out`: there are templates that know none.
    """
    messages = chat.messages
    system = [number for number, message in enumerate(messages) if message["role"] == "system"]
    if not any(system):
        return
    letter = chat.letters[0]
    for number in system:
        request = RenderRequest(len(messages), replacements=((number, letter),))
        if messages[number]["content"].strip() and letter not in chat.get_text(request):
            raise SampleFault(
                "system message left out",
                f"{chat.places.at(number)}: found a system message that the chat template does not write, expected one "
                "at most, as the first message; set tokenizer.chat_template to one that writes others",
            )


def check_tools(tools: Sequence[Mapping[str, Any]] | None, whole: str, where: str) -> None:
    """Raise SampleFault if the template leaves out a tool: the model would call what it was never shown. where: they
    are."""
    for number, tool in enumerate(tools or ()):
        name = name_of(tool)
        if name is not None and name not in whole:
            raise SampleFault(
                "tools left out",
                f"{where}[{number}]: found {name!r}, which the chat template does not write, expected a template that "
                "shows tools; set tokenizer.chat_template to one, or leave the tools out of the samples",
            )


def name_of(described: Any) -> str | None:
    """Return the function's name in a tool call or a tool's description; None: there is none."""
    function = described.get("function", described) if isinstance(described, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def prepare_message(message: Message, where: str, habits: Habits) -> dict[str, Any]:
    """Return the message without `train`, and with thoughts and tool calls as the template reads them.

    Most templates write arguments as JSON themselves. where: the message is. Raises SampleFault for text that is no
    JSON object.
    """
    changed = under_its_name({key: value for key, value in message.items() if key != "train"}, habits)
    if not message.get("tool_calls"):
        return changed
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            given = function["arguments"]
            arguments = parse_arguments(given) if isinstance(given, str) else given
            if arguments is None and isinstance(given, str):
                raise SampleFault(
                    "tool call's arguments are no JSON",
                    f"{where}: found the arguments {shown(given)} of a tool call, expected a JSON object",
                )
            if habits.text_arguments:
                arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return changed | {"tool_calls": calls}


def first_difference(found: Sequence[str], expected: Sequence[str]) -> str:
    """Return the first token in which two texts differ, in words."""
    same = 0
    while same < min(len(found), len(expected)) and found[same] == expected[same]:
        same += 1
    left, right = (repr(tokens[same]) if same < len(tokens) else "the end" for tokens in (found, expected))
    return f"at token {same + 1} found {left}, expected {right}"


def _squeezed(text: str) -> str:
    return "".join(text.split())

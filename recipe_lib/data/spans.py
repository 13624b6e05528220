"""Where a conversation's messages stand in its rendering, found by rendering it up to each of them.

An answer begins behind the prompt that generation would be given and ends with the token that ends the turn. The
rendering of everything must go on from that prompt and hold the answer as it is written when it comes last; a
difference refuses the row, with the first token that differs. Other messages are found by writing a letter of our own
in their place.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.samples import Message, RowFault, Wanted
from recipe_lib.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
CHOICES = ("assistant", "last", "all")

Renders = Callable[[Sequence[Wanted]], Sequence[str | DataError]]


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the whole rendering: a message's text and, if it has one, its end-of-turn token."""

    start: int
    end: int


@dataclass(frozen=True)
class Writing:
    """What the finder must know of a tokenizer and its template.

    special: finds special tokens in a rendering (None: there are none); stops: those that end answers; place: the
    template's file; tokens_of: a text as tokens, for error lines; free: two letters that no text here holds.
    """

    special: re.Pattern[str] | None
    stops: Collection[str]
    place: str
    tokens_of: Callable[[str], list[str]]
    free: tuple[str, str]


def check_train_on(train_on: str | Sequence[str]) -> None:
    """Raises DataError for a value of data.train_on that says nothing."""
    faulty = [] if train_on in CHOICES else [train_on] if isinstance(train_on, str) else list(train_on) or [""]
    for value in faulty:
        if isinstance(train_on, str) or value not in ROLES:
            raise DataError(
                f"data.train_on: found {value!r}, expected {', '.join(CHOICES)}, or a list of the roles "
                f"{', '.join(ROLES)}{did_you_mean(str(value), (*CHOICES, *ROLES))}"
            )


def picked(messages: Sequence[Message], train_on: str | Sequence[str]) -> list[bool]:
    """Which messages are trained: by role, unless a message says `train` itself. Raises RowFault."""
    roles = ("assistant",) if isinstance(train_on, str) else tuple(train_on)
    chosen = [message["role"] in roles for message in messages]
    if train_on == "all":
        chosen = [True] * len(messages)
    elif train_on == "last":
        last = max((number for number, is_answer in enumerate(chosen) if is_answer), default=-1)
        chosen = [number == last for number in range(len(messages))]
    for number, message in enumerate(messages):
        own = message.get("train")
        if own is not None and not isinstance(own, bool):
            raise RowFault("train is no switch", f"message {number + 1}: found train {own!r}, expected true or false")
        chosen[number] = chosen[number] if own is None else own
    return chosen


def find_spans(
    renders: Renders, messages: Sequence[Message], wanted: Sequence[int], writing: Writing
) -> tuple[str, list[Span]]:
    """The whole rendering, and where the messages with the numbers `wanted` stand in it.

    Raises RowFault: the template objects, writes something anew or leaves something out. Raises DataError: it ends
    answers with nothing.
    """
    finder = _Finder(renders, messages, wanted, writing)
    return finder.whole, [finder.span(number) for number in wanted]


class _Finder:
    """The renderings of one conversation, all made in one go."""

    def __init__(self, renders: Renders, messages: Sequence[Message], wanted: Sequence[int], writing: Writing) -> None:
        self._renders, self._messages, self._writing = renders, messages, writing
        everything: Wanted = (len(messages), False, ())
        needed = [everything]
        for number in wanted:
            needed += self._needed(number)
        unique = list(dict.fromkeys(needed))
        self._found = dict(zip(unique, renders(unique), strict=True))
        self.whole = self._text(everything)

    def span(self, number: int) -> Span:
        """Where a message stands."""
        return self._answer(number) if self._messages[number]["role"] == "assistant" else self._other(number)

    def _needed(self, number: int) -> list[Wanted]:
        count, (first, second) = len(self._messages), self._writing.free
        if self._messages[number]["role"] == "assistant":
            return [(number, True, ()), (number + 1, False, ())]
        alone: Wanted = (count, False, ((number, first),))
        if number + 1 == count:
            return [alone]
        if self._messages[number + 1]["role"] == "assistant":
            return [alone, (number + 1, True, ())]
        return [alone, (count, False, ((number, first), (number + 1, second)))]

    def _text(self, wanted: Wanted) -> str:
        """A template that objects to a conversation makes the row a bad one, not the run."""
        found = self._found[wanted]
        if isinstance(found, DataError):
            raise RowFault("refused by the chat template", str(found))
        return found

    def _answer(self, number: int) -> Span:
        before, alone = self._text((number, True, ())), self._text((number + 1, False, ()))
        if not (self.whole.startswith(before) and alone.startswith(before)):
            other = self.whole if alone.startswith(before) else alone
            raise self._differs("the past", number, before, other, "as when generating")
        start = len(before)
        check_written(self._messages[number], alone[start:], number + 1)
        end = self._end_of_answer(alone, start, self._messages[number])
        if not self.whole.startswith(alone[:end]):
            raise self._differs("an answer", number, alone[:end], self.whole, "as when the answer comes last")
        return Span(start, end)

    def _differs(self, what: str, number: int, expected: str, found: str, when: str) -> RowFault:
        then = "what stands before it differently once it is there" if what == "the past" else "it otherwise later on"
        remedy = "data.train_on to last, or " if self._last_would_do(number) else ""
        return RowFault(
            f"template writes {what} anew",
            f"message {number + 1}: the chat template writes {then}: "
            f"{first_difference(self._writing.tokens_of(found), self._writing.tokens_of(expected))} {when}; "
            f"set {remedy}tokenizer.chat_template to one that does not",
        )

    def _last_would_do(self, number: int) -> bool:
        """Whether the last answer could be trained where the one with this number cannot."""
        last = max(n for n, message in enumerate(self._messages) if message["role"] == "assistant")
        if last == number:
            return False
        try:
            find_spans(self._renders, self._messages, [last], self._writing)
        except (RowFault, DataError):
            return False
        return True

    def _end_of_answer(self, alone: str, start: int, message: Message) -> int:
        """The end of the first special token behind the answer's text; where the template writes something else than
        the text (a tool call, an answer without its thoughts), the end of the first token that ends answers."""
        tokens = list(self._writing.special.finditer(alone, start)) if self._writing.special else []
        stops = [token for token in tokens if token.group() in self._writing.stops]
        said = message["content"].strip()
        at = alone.find(said, start)
        known = bool(said) and at >= 0 and not any(token.end() <= at for token in stops)
        if known and not message.get("tool_calls"):
            behind = [token for token in tokens if token.start() >= at + len(said)]
        else:
            behind = stops or tokens[-1:]
        if not behind:
            raise DataError(
                f"{self._writing.place}: the chat template puts no special token behind an answer, so nothing would "
                "teach the model to stop; set tokenizer.chat_template to one that does, or data.template to plain"
            )
        return behind[0].end()

    def _other(self, number: int) -> Span:
        """Where a message of another role stands: between what is written around a letter in its place."""
        count, (first, second) = len(self._messages), self._writing.free
        around = self._text((count, False, ((number, first),))).split(first)
        if len(around) != 2 or not self.whole.startswith(around[0]) or not self.whole.endswith(around[1]):
            raise RowFault(
                "message not found",
                f"message {number + 1}: found that the chat template writes it {len(around) - 1} times or differently "
                f"by its text, expected once; it cannot be trained ({self._messages[number]['role']} in data.train_on)",
            )
        start, end = len(around[0]), len(self.whole) - len(around[1])
        while start and self.whole[start - 1] == " ":  # most tokenizers join a space and the word behind it
            start -= 1
        limit = len(self.whole)
        if number + 1 < count and self._messages[number + 1]["role"] == "assistant":
            before = self._text((number + 1, True, ()))
            limit = len(before) if self.whole.startswith(before) else end
        elif number + 1 < count:
            next_at = self._text((count, False, ((number, first), (number + 1, second)))).find(second)
            between = next_at - len(around[0]) - len(first)
            limit = end + between if next_at >= 0 and between >= 0 else end
        token = self._writing.special.search(self.whole, end, limit) if self._writing.special else None
        return Span(start, token.end() if token else end)


def check_written(message: Message, written: str, number: int) -> None:
    """Raises RowFault if the template leaves out text or a call: the model would learn to say nothing in its place."""
    squeezed = _squeezed(written)
    for key in ("content", "reasoning_content"):
        text = message.get(key)
        if isinstance(text, str) and _squeezed(text) not in squeezed:
            raise RowFault(
                "part of an answer left out",
                f"message {number}: found a {key} that the chat template does not write in full "
                f"({text.strip()[:24]!r}), expected a template that does; set tokenizer.chat_template to one",
            )
    for call in message.get("tool_calls") or ():
        name = name_of(call)
        if name is None or name not in written:
            raise RowFault(
                "tool call left out",
                f"message {number}: found a tool call that the chat template does not write, expected a template that "
                "knows tool calls; set tokenizer.chat_template to one",
            )


def left_out(messages: Sequence[Message], whole: str) -> int:
    """How many messages of the system and the user the template does not write: the model is never shown them.

    No fault of a row: there are templates for models that were trained without a system message.
    """
    squeezed, count = "", 0
    for message in messages:
        text = message.get("content")
        if message["role"] not in ("system", "user") or not isinstance(text, str) or text in whole:
            continue
        squeezed = squeezed or _squeezed(whole)  # templates strip, and indent
        count += _squeezed(text) not in squeezed
    return count


def check_tools(tools: Sequence[Mapping[str, Any]] | None, whole: str) -> None:
    """Raises RowFault if the template leaves out a tool: the model would call what it was never shown."""
    for number, tool in enumerate(tools or (), start=1):
        name = name_of(tool)
        if name is not None and name not in whole:
            raise RowFault(
                "tools left out",
                f"tools[{number}]: found {name!r}, which the chat template does not write, expected a template that "
                "shows tools; set tokenizer.chat_template to one, or leave the tools out of the rows",
            )


def name_of(described: Any) -> str | None:
    """The function's name in a tool call or a tool's description; None: there is none."""
    function = described.get("function", described) if isinstance(described, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def parse_arguments(message: Message, number: int) -> Message:
    """The message without `train`, and with arguments of tool calls that are JSON text read: templates write them as
    JSON themselves. Raises RowFault for text that is no JSON object."""
    changed = {key: value for key, value in message.items() if key != "train"}
    if not message.get("tool_calls"):
        return changed
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _object(function["arguments"], number)}
            call = {**call, "function": function}
        calls.append(call)
    return changed | {"tool_calls": calls}


def _object(text: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RowFault(
            "tool call's arguments are no JSON",
            f"message {number}: found the arguments {text[:40]!r} of a tool call, expected a JSON object",
        )
    return found


def first_difference(found: Sequence[str], expected: Sequence[str]) -> str:
    """The first token in which two texts differ, in words."""
    same = 0
    while same < min(len(found), len(expected)) and found[same] == expected[same]:
        same += 1
    left, right = (repr(tokens[same]) if same < len(tokens) else "the end" for tokens in (found, expected))
    return f"at token {same + 1} found {left}, expected {right}"


def _squeezed(text: str) -> str:
    return "".join(text.split())

"""What a chat template makes of thoughts and tool calls, found by rendering small conversations once."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.data.samples import Message, TextTokenizer, Wanted
from recipe_lib.errors import DataError

# Where samples have the thought of an answer apart from its words.
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ASK = {"role": "user", "content": "a"}
_RESULT = {"role": "tool", "content": "b", "name": "f", "tool_call_id": "call00001"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}

# Jinja's blocks of a template, texts in quotes, and names that are no attributes.
_BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_NAMES = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_UNUSED = "zqj"  # a text that no template holds

Render = Callable[[Sequence[Message], Sequence[Wanted], Sequence[Mapping[str, Any]] | None], Sequence[str | DataError]]


@dataclass(frozen=True)
class Habits:
    """thought_key: the field of an answer that the template reads a thought from; empty: none. tags: it reads one from
    between `<think>` and `</think>` as well. text_arguments: it wants the arguments of a tool call as JSON text, not as
    an object. after_call: the special token that follows a call at once, if there is one. marks: it says with
    `{% generation %}` what an answer is."""

    thought_key: str = ""
    tags: bool = True
    text_arguments: bool = False
    after_call: str = ""
    marks: bool = False


def learn_habits(render: Render, source: str, special: re.Pattern[str] | None, letter: str) -> Habits:
    """render: renderings of messages, with tools. source: the template's Jinja. letter: one that it does not hold."""
    text, followed = False, ["", ""]
    for as_text in (False, True):
        messages = [_ASK, _call(letter, as_text), _RESULT]
        found = [_text(one) for one in render(messages, [(2, False, ()), (3, False, ())], [_TOOL])]
        if letter in found[0]:
            text, followed = as_text, found
            break
    key = next((key for key in THOUGHT_KEYS if _reads(render, key, letter, text)), "")
    return Habits(
        key,
        not key or _reads_tags(render, key, letter),
        text,
        _next_token(followed[0], followed[1], special),
        has_marks(source),
    )


class TemplateFields:
    """Which keys of a message, and which variables, a chat template has a use for. names: all that it speaks of."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        """tokenizer: the one that has the template; None: no template reads anything but roles and contents."""
        self._tokenizer = tokenizer
        source = (tokenizer.chat_template if tokenizer else None) or ""
        code = " ".join(_TEXTS.sub("", block) for block in _BLOCKS.findall(source))
        self.names = frozenset(_NAMES.findall(code))
        self._keys = dict[tuple[str, str, Any], bool]()

    def reads_key(self, role: str, key: str, value: Any) -> bool:
        """Return whether the template writes another text for a message of this role with this key, or refuses it."""
        if self._tokenizer is None:
            return False
        asked = role, key, value if isinstance(value, bool) else type(value)
        if asked not in self._keys:
            self._keys[asked] = self._writes(role, key, _UNUSED if isinstance(value, str) else value)
        return self._keys[asked]

    def _writes(self, role: str, key: str, value: Any) -> bool:
        """The message is tried as the last one of its role and as an earlier one, an answer also as a call."""
        assert self._tokenizer is not None
        answer, call = {"role": "assistant", "content": "b"}, _call("c", text=False)
        chats: dict[str, list[tuple[list[Message], int]]] = {
            "system": [([{"role": "system", "content": "s"}, _ASK, answer], 0)],
            "user": [([_ASK, answer, _ASK, answer], at) for at in (0, 2)],
            "assistant": [([_ASK, answer, _ASK, answer], at) for at in (1, 3)] + [([_ASK, call, _RESULT], 1)],
            "tool": [([_ASK, call, _RESULT, answer], 2)],
        }
        for messages, at in chats[role]:
            bare = {name: held for name, held in messages[at].items() if name != key}
            texts = []
            for one in (bare, {**bare, key: value}):
                changed = [*messages[:at], one, *messages[at + 1 :]]
                texts.append(_text(self._tokenizer.render_chats(changed, [(len(changed), False, ())], [_TOOL])[0]))
            if texts[0] != texts[1]:
                return True
        return False


def has_marks(source: str) -> bool:
    """Whether a template says with `{% generation %}` what an answer is."""
    return bool(_GENERATION.search(source))


def _call(letter: str, text: bool) -> dict[str, Any]:
    arguments: Any = {"x": letter}
    function = {"name": "f", "arguments": json.dumps(arguments, ensure_ascii=False) if text else arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _reads(render: Render, key: str, letter: str, text: bool) -> bool:
    """Whether a thought in this field is written, after a question or before a tool call."""
    answers = ({"role": "assistant", "content": "b"}, _call("c", text))
    found = [render([_ASK, answer | {key: letter}], [(2, False, ())], [_TOOL])[0] for answer in answers]
    return any(letter in _text(one) for one in found)


def _reads_tags(render: Render, key: str, letter: str) -> bool:
    """Whether a thought between tags is written as one in its field is, but for white space; yes, if that is not."""
    apart = {"role": "assistant", "content": "b", key: letter}
    tagged = {"role": "assistant", "content": f"<think>\n{letter}\n</think>\n\nb"}
    shown = [_text(render([_ASK, answer], [(2, False, ())], None)[0]) for answer in (apart, tagged)]
    return letter not in shown[0] or "".join(shown[0].split()) == "".join(shown[1].split())


def _next_token(last: str, followed: str, special: re.Pattern[str] | None) -> str:
    found = special.match(followed, len(last)) if special and last and followed.startswith(last) else None
    return found.group() if found else ""


def _text(found: str | DataError) -> str:
    return "" if isinstance(found, DataError) else found

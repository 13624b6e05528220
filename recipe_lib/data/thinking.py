"""Thoughts and tool calls as a chat template reads and writes them.

Samples have the thought of an answer in a field of its own or between `<think>` tags; templates
read it from one of these, from none, or leave it to the prompt. `probe_template` finds out which,
by rendering small conversations, and `TemplateFields` which keys of messages a template reads. The
functions below put a thought where the template reads it, and complete an answer whose prompt ends
in a thought that was begun.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.data.samples import Message
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer

# Where samples have the thought of an answer apart from its words.
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ASK = {"role": "user", "content": "a"}
_RESULT = {"role": "tool", "content": "b", "name": "f", "tool_call_id": "call00001"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}

# Jinja's blocks of a template, texts in quotes, and names that are no attributes.
_BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_NAMES = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_UNUSED = "zqj"  # a text that no template holds

Render = Callable[
    [Sequence[Message], Sequence[RenderRequest], Sequence[Mapping[str, Any]] | None],
    Sequence[str | DataError],
]


@dataclass(frozen=True)
class TemplateFeatures:
    """The ways in which a chat template treats thoughts and tool calls."""

    thought_key: str = ""  # the field of an answer that it reads a thought from; empty: none
    tags: bool = True  # it reads one from between `<think>` and `</think>` as well
    text_arguments: bool = False  # it wants a call's arguments as JSON text, not as an object
    after_call: str = ""  # the special token that follows a call at once, if there is one
    marks: bool = False  # it says with `{% generation %}` what an answer is


def probe_template(
    render: Render, source: str, special: re.Pattern[str] | None, letter: str
) -> TemplateFeatures:
    """Return what a template makes of thoughts and tool calls.

    render: renders messages, with tools. source: the template's Jinja. letter: one that it does not
    hold.
    """
    text_arguments = False
    renderings = ["", ""]  # up to a call, and up to its result
    for as_text in (False, True):
        messages = [_ASK, _build_call(letter, as_text), _RESULT]
        texts = [
            _get_text(rendering)
            for rendering in render(messages, [RenderRequest(2), RenderRequest(3)], [_TOOL])
        ]
        if letter in texts[0]:
            text_arguments = as_text
            renderings = texts
            break
    key = next(
        (
            key
            for key in THOUGHT_KEYS
            if _can_read_thought(render, key, letter=letter, text_arguments=text_arguments)
        ),
        "",
    )
    return TemplateFeatures(
        thought_key=key,
        tags=not key or _can_read_tags(render, key, letter),
        text_arguments=text_arguments,
        after_call=_find_next_token(renderings[0], renderings[1], special),
        marks=bool(_GENERATION.search(source)),
    )


class TemplateFields:
    """The keys of messages, and the variables, that a chat template reads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Take the tokenizer that has the template.

        None: no template reads anything but roles and contents.
        """
        self._tokenizer = tokenizer
        source = (tokenizer.chat_template if tokenizer else None) or ""
        code = " ".join(_TEXTS.sub("", block) for block in _BLOCKS.findall(source))
        self.names = frozenset(_NAMES.findall(code))  # all that the template speaks of
        self._reads_key = dict[tuple[str, str, Any], bool]()

    def reads_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if the template writes a message of this role otherwise with this key, or
        refuses it.
        """
        if self._tokenizer is None:
            return False
        # Each kind of value is tried once, by one that no template holds.
        case = role, key, value if isinstance(value, bool) else type(value)
        if case not in self._reads_key:
            self._reads_key[case] = self._writes_key(
                role, key, _UNUSED if isinstance(value, str) else value
            )
        return self._reads_key[case]

    def _writes_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if a rendering changes with the key.

        The message is tried as the last one of its role and as an earlier one, an answer also as a
        call.
        """
        assert self._tokenizer is not None
        answer = {"role": "assistant", "content": "b"}
        call = _build_call("c", as_text=False)
        chats: dict[str, list[tuple[list[Message], int]]] = {
            "system": [([{"role": "system", "content": "s"}, _ASK, answer], 0)],
            "user": [([_ASK, answer, _ASK, answer], at) for at in (0, 2)],
            "assistant": (
                [([_ASK, answer, _ASK, answer], at) for at in (1, 3)] + [([_ASK, call, _RESULT], 1)]
            ),
            "tool": [([_ASK, call, _RESULT, answer], 2)],
        }
        for messages, at in chats[role]:
            without_key = {name: field for name, field in messages[at].items() if name != key}
            texts = set[str]()
            for message in (without_key, {**without_key, key: value}):
                chat = [*messages[:at], message, *messages[at + 1 :]]
                (rendering,) = self._tokenizer.render_chats(
                    chat, [RenderRequest(len(chat))], [_TOOL]
                )
                texts.add(_get_text(rendering))
            if len(texts) > 1:
                return True
        return False


def _build_call(letter: str, as_text: bool) -> dict[str, Any]:
    """Return an answer that calls the tool with this letter. as_text: the arguments are JSON
    text.
    """
    arguments: Any = {"x": letter}
    function = {
        "name": "f",
        "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
    }
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _can_read_thought(render: Render, key: str, letter: str, text_arguments: bool) -> bool:
    """Return True if a thought in this field is written, after a question or before a tool call."""
    answers = ({"role": "assistant", "content": "b"}, _build_call("c", text_arguments))
    renderings = [
        render([_ASK, answer | {key: letter}], [RenderRequest(2)], [_TOOL])[0] for answer in answers
    ]
    return any(letter in _get_text(rendering) for rendering in renderings)


def _can_read_tags(render: Render, key: str, letter: str) -> bool:
    """Return True if a thought between tags is written as one in its field is, but for white space.

    Also if a thought in its field is not written at all.
    """
    apart = {"role": "assistant", "content": "b", key: letter}
    tagged = {"role": "assistant", "content": f"<think>\n{letter}\n</think>\n\nb"}
    texts = [
        _get_text(render([_ASK, answer], [RenderRequest(2)], None)[0]) for answer in (apart, tagged)
    ]
    return letter not in texts[0] or "".join(texts[0].split()) == "".join(texts[1].split())


def _find_next_token(last: str, followed: str, special: re.Pattern[str] | None) -> str:
    """Return the special token at which `followed` goes on from `last`; empty: none."""
    token = (
        special.match(followed, len(last))
        if special and last and followed.startswith(last)
        else None
    )
    return token.group() if token else ""


def _get_text(rendering: str | DataError) -> str:
    """Return a rendering; empty where the template objects."""
    return "" if isinstance(rendering, DataError) else rendering


# A prompt for an answer may end with a thought that is begun, or with one that is over.
OPENED = re.compile(r"<think>\s*\Z")
CLOSED = re.compile(r"<think>\s*</think>\s*\Z")
_WRITTEN = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def split_thought(message: Message) -> tuple[str | None, str]:
    """Return the thought of an answer, None if there is none, and its words."""
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip("\n"), message["content"]
    written = _WRITTEN.match(message["content"])
    if written is None:
        return None, message["content"]
    return written.group(1).strip("\n"), message["content"][written.end() :].lstrip("\n")


def move_thought(message: dict[str, Any], features: TemplateFeatures) -> dict[str, Any]:
    """Return the message with its thought in the field that the template reads, if it reads one."""
    key = next((name for name in THOUGHT_KEYS if isinstance(message.get(name), str)), None)
    if message["role"] != "assistant" or not features.thought_key or key == features.thought_key:
        return message
    thought, words = split_thought(message)
    if thought is None or (key is None and features.tags):
        return message
    other_keys = {name: value for name, value in message.items() if name != key}
    return other_keys | {
        features.thought_key: thought if key is None else message[key],
        "content": words,
    }


def complete_thought(
    alone: str,
    *,
    begin: str,
    message: Message,
    features: TemplateFeatures,
    letter: str,
    render: Callable[[Message], str],
) -> str:
    """Return what a model must write after a prompt that has begun a thought.

    That is the thought, its end, and the answer. The template's own words are taken where it writes
    thoughts, else those of DeepSeek-R1, whose template does not.

    alone: the rendering in which the answer comes last and its thought is missing or written in
    another way. begin: the prompt without the beginning of a thought, which `alone` goes on from.
    letter: one that nothing holds. render: the rendering up to this message, with another in its
    place; empty if there is none.
    """
    thought, words = split_thought(message)
    if features.thought_key:
        rendering = render({**message, "content": words, features.thought_key: letter})
        if rendering.startswith(begin) and letter in rendering:
            return (thought or "") + rendering[rendering.index(letter) + 1 :]
    rest = strip_thought(alone[len(begin) :])
    return (thought or "") + "\n</think>\n\n" + (rest if thought is None else rest.lstrip("\n"))


def strip_thought(written: str) -> str:
    """Return an answer as a template writes it, without the thought at its beginning."""
    thought = _WRITTEN.match(written)
    return written[thought.end() :].lstrip("\n") if thought else written

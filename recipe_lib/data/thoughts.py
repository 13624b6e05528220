"""The thought that an answer may begin with: apart from its words, or between `<think>` and `</think>` before them."""

import re
from collections.abc import Callable
from typing import Any

from recipe_lib.data.samples import Message
from recipe_lib.data.template_behavior import THOUGHT_KEYS, Habits

# A prompt for an answer may end with a thought that is begun, or with one that is over.
OPENED = re.compile(r"<think>\s*\Z")
CLOSED = re.compile(r"<think>\s*</think>\s*\Z")
TAGS = ("<think>", "</think>")
_WRITTEN = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def thought_of(message: Message) -> tuple[str | None, str]:
    """The thought of an answer, None if there is none, and its words."""
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip("\n"), message["content"]
    written = _WRITTEN.match(message["content"])
    if written is None:
        return None, message["content"]
    return written.group(1).strip("\n"), message["content"][written.end() :].lstrip("\n")


def under_its_name(message: dict[str, Any], habits: Habits) -> dict[str, Any]:
    """The message with its thought in the field that the template reads, if it reads one."""
    found = next((key for key in THOUGHT_KEYS if isinstance(message.get(key), str)), None)
    if message["role"] != "assistant" or not habits.thought_key or found == habits.thought_key:
        return message
    thought, words = thought_of(message)
    if thought is None or (found is None and habits.tags):
        return message
    kept = {key: value for key, value in message.items() if key != found}
    return kept | {habits.thought_key: thought if found is None else message[found], "content": words}


def with_tags(message: Message, letter: str) -> Message:
    """The message with the tags of its thought as they were, where `letter` was written into them: they are no words.

    Some tokenizers have the tags as special tokens, and those that a sample only writes are kept from being found.
    """
    content, begin, end = message.get("content"), f"<{letter}think>", f"<{letter}/think>"
    if message["role"] != "assistant" or not isinstance(content, str) or not content.lstrip().startswith(begin):
        return message
    return {**message, "content": content.replace(begin, "<think>", 1).replace(end, "</think>", 1)}


def after_opening(
    alone: str, begin: str, message: Message, habits: Habits, letter: str, render: Callable[[Message], str]
) -> str:
    """What a model must write after a prompt that has begun a thought: the thought, its end, and the answer.

    alone: the rendering in which the answer comes last and its thought is missing or written in another way. begin: the
    prompt without the beginning of a thought, which `alone` goes on from. render: the rendering up to this message,
    with another in its place; empty if there is none.

    The template's own words are taken where it writes thoughts, else those of DeepSeek-R1, whose template does not.
    """
    thought, words = thought_of(message)
    if habits.thought_key:
        shown = render({**message, "content": words, habits.thought_key: letter})
        if shown.startswith(begin) and letter in shown:
            return (thought or "") + shown[shown.index(letter) + 1 :]
    rest = without_thought(alone[len(begin) :])
    return (thought or "") + "\n</think>\n\n" + (rest if thought is None else rest.lstrip("\n"))


def without_thought(written: str) -> str:
    """An answer as a template writes it, without the thought at its beginning."""
    found = _WRITTEN.match(written)
    return written[found.end() :].lstrip("\n") if found else written

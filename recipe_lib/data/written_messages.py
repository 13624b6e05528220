"""Prepare messages for a chat template, and check that it writes all of them.

An `Encoder` (label_masks.py) calls `prepare_message` before it renders a conversation, and the
checks on the rendering; trained_spans.py calls `check_written` for each answer. What a template
leaves out of an answer a model would learn not to write. A SampleFault says what is left out;
`count_left_out` counts where that is no fault.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from recipe_lib.data.chat_templates import (
    THOUGHT_KEYS,
    RenderedChat,
    TemplateFeatures,
    move_thought,
)
from recipe_lib.data.messages import parse_arguments
from recipe_lib.data.samples import Message, SampleFault, format_value
from recipe_lib.tokenizers import RenderRequest


def prepare_message(message: Message, where: str, features: TemplateFeatures) -> dict[str, Any]:
    """Return the message as the template reads it.

    The key `train` is dropped. A thought (an answer's reasoning) goes into the key that the
    template reads. Arguments of tool calls become objects, since most templates write the JSON
    themselves, or text where `features` says so. where: path of the message in its row. Raises
    SampleFault for arguments that are text and no JSON object.
    """
    changed = move_thought(
        {key: value for key, value in message.items() if key != "train"}, features
    )
    if not message.get("tool_calls"):
        return changed
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            raw_arguments = function["arguments"]
            arguments = (
                parse_arguments(raw_arguments) if isinstance(raw_arguments, str) else raw_arguments
            )
            if arguments is None and isinstance(raw_arguments, str):
                raise SampleFault(
                    "tool call's arguments are no JSON",
                    f"{where}: found the arguments {format_value(raw_arguments)} of a tool call,"
                    " expected a JSON object",
                )
            if features.text_arguments:
                arguments = (
                    raw_arguments
                    if isinstance(raw_arguments, str)
                    else json.dumps(raw_arguments, ensure_ascii=False)
                )
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return changed | {"tool_calls": calls}


def check_written(message: Message, written: str, where: str) -> None:
    """Raise SampleFault if the template leaves out text, a thought or a tool call of an answer.

    The model would learn to write nothing in its place. written: the part of the rendering that
    holds the message. where: path of the message in its row, which begins the error line.
    """
    squeezed = _remove_white_space(written)
    for key in ("content", *THOUGHT_KEYS):
        text = message.get(key)
        if isinstance(text, str) and _remove_white_space(text) not in squeezed:
            raise SampleFault(
                "part of an answer left out",
                f"{where}: found a {key} that the chat template does not write in full"
                f" ({text.strip()[:24]!r}), expected a template that does; set"
                " tokenizer.chat_template to one",
            )
    for call in message.get("tool_calls") or ():
        name = get_function_name(call)
        if name is None or name not in written:
            raise SampleFault(
                "tool call left out",
                f"{where}: found a tool call that the chat template does not write, expected a"
                " template that knows tool calls; set tokenizer.chat_template to one",
            )


def count_left_out(messages: Sequence[Message], whole: str) -> int:
    """Count the messages of the system and the user that the template does not write.

    It is no SampleFault: some models were trained without a system message, and their templates
    write none. whole: the rendering of all messages.
    """
    squeezed = ""  # `whole` without white space; made only where a text is not in `whole` as it is
    num_left_out = 0
    for message in messages:
        text = message.get("content")
        if message["role"] not in ("system", "user") or not isinstance(text, str) or text in whole:
            continue
        squeezed = squeezed or _remove_white_space(whole)  # templates strip and indent
        num_left_out += _remove_white_space(text) not in squeezed  # a bool
    return num_left_out


def check_system(chat: RenderedChat) -> None:
    """Raise SampleFault for a system message that is not written, if any is not the first message.

    A single one at the start is no fault, since some templates write none: `count_left_out` counts
    it.
    """
    messages = chat.messages
    system_indices = [
        index for index, message in enumerate(messages) if message["role"] == "system"
    ]
    if not any(system_indices):  # none, or only index 0
        return
    letter = chat.letters[0]
    for index in system_indices:
        request = RenderRequest(len(messages), replacements=((index, letter),))
        if messages[index]["content"].strip() and letter not in chat.get_text(request):
            raise SampleFault(
                "system message left out",
                f"{chat.places.locate_message(index)}: found a system message that the chat"
                " template does not write, expected one at most, as the first message; set"
                " tokenizer.chat_template to one that writes others",
            )


def check_tools(tools: Sequence[Mapping[str, Any]] | None, whole: str, where: str) -> None:
    """Raise SampleFault if the template leaves out a tool, which the model would not know to call.

    whole: the rendering of all messages. where: path of the tools in the row, for the error.
    """
    for number, tool in enumerate(tools or ()):
        name = get_function_name(tool)
        if name is not None and name not in whole:
            raise SampleFault(
                "tools left out",
                f"{where}[{number}]: found {name!r}, which the chat template does not write,"
                " expected a template that shows tools; set tokenizer.chat_template to one, or"
                " leave the tools out of the samples",
            )


def get_function_name(described: Any) -> str | None:
    """Return the function's name in a tool call or a tool's description; None: there is none."""
    function = described.get("function", described) if isinstance(described, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _remove_white_space(text: str) -> str:
    return "".join(text.split())

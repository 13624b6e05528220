"""Reads calls of tools and descriptions of tools as chat APIs have them, out of the spellings of samples."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from recipe_lib.data.column_names import says_nothing
from recipe_lib.data.samples import (
    Message,
    RawSample,
    SampleFault,
    found_in,
    kind_of,
    list_of,
    parse_column,
    path_of,
    refuse_keys,
    shown,
)
from recipe_lib.reading import parse_json

_FUNCTION = '{"name": ..., "arguments": {...}}'
_CALL = f'{{"function": {_FUNCTION}}}'
_CALL_KEYS = ("id", "type", "function")
_FUNCTION_KEYS = ("name", "arguments")
_BARE_KEYS = ("name", "arguments", "id", "type")  # of a call that is a function itself
_CAUSE = "tool call of another shape"

_check_keys = partial(refuse_keys, owner="a tool call", expected=f"which is not read, expected {_FUNCTION}")


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of the field `tool_calls` of a message. A bare {name, arguments} is put as chat APIs have it.

    where: its path. Raises SampleFault for what is no list of calls with a name and arguments.
    """
    if not isinstance(calls, list):
        raise SampleFault(_CAUSE, f"{where}: found {kind_of(calls)}, expected a list of calls {_CALL}")
    return [_read_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Return one call as chat APIs have it. Raises SampleFault."""
    if not isinstance(call, dict):
        raise SampleFault(_CAUSE, f"{where}: found {kind_of(call)}, expected a call {_CALL}")
    is_bare = "function" not in call
    function, path = (call, where) if is_bare else (call["function"], f"{where}.function")
    if not isinstance(function, dict):
        raise SampleFault(_CAUSE, f"{path}: found {kind_of(function)}, expected {_FUNCTION}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        found = "empty text" if function.get("name") == "" else found_in(function, "name")
        raise SampleFault(_CAUSE, f"{path}.name: found {found}, expected the function's name, as in {_CALL}")
    check_arguments(function, f"{path}.arguments")
    if not is_bare:
        _check_keys(call, _CALL_KEYS, where)
        _check_keys(function, _FUNCTION_KEYS, path)
        return call
    _check_keys(call, _BARE_KEYS, where)
    beside = {key: value for key, value in call.items() if key not in _FUNCTION_KEYS}
    return {"type": "function"} | beside | {"function": {key: call[key] for key in _FUNCTION_KEYS}}


def read_function_call(call: Any, where: str) -> dict[str, Any]:
    """Return the older field `function_call` of a message as a call of today. Raises SampleFault."""
    if not isinstance(call, dict) or "function" in call:
        found = kind_of(call) if not isinstance(call, dict) else "an object with function"
        raise SampleFault(_CAUSE, f"{where}: found {found}, expected {_FUNCTION}")
    return _read_call(call, where)


def take_idle(calls: Sequence[RawSample]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return calls with nothing in them but what is read, and what else they held, which changes nothing, as
    `tool_calls.KEY`."""
    clean_calls = list[dict[str, Any]]()
    idle = dict[str, Any]()
    for call in calls:
        function = call["function"]
        beside = [(name, value) for name, value in call.items() if name not in _CALL_KEYS]
        beside += [(name, value) for name, value in function.items() if name not in _FUNCTION_KEYS]
        idle |= {f"tool_calls.{name}": value for name, value in beside if not says_nothing(value)}
        clean_call = {name: value for name, value in call.items() if name in _CALL_KEYS}
        clean_call["function"] = {name: value for name, value in function.items() if name in _FUNCTION_KEYS}
        clean_calls.append(clean_call)
    return clean_calls, idle


def check_arguments(function: RawSample, where: str) -> None:
    """Raise SampleFault for arguments of a call that are no object, nor JSON text of one."""
    given = function.get("arguments")
    if isinstance(given, dict) or (isinstance(given, str) and parse_arguments(given) is not None):
        return
    found = found_in(function, "arguments") if not isinstance(given, str) else shown(given)
    raise SampleFault(
        "tool call's arguments are no JSON",
        f"{where}: found {found}, expected an object, or JSON text of one ({{}} for none)",
    )


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call that are written as JSON, an empty text for none; None: it is no object."""
    try:
        arguments = parse_json(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def calls_in_text(text: str, where: str) -> list[dict[str, Any]]:
    """Return the calls that a `function_call` turn holds as JSON: one {name, arguments}, or a list of them."""
    try:
        content = parse_json(text)
    except ValueError:
        content = None
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise SampleFault(
            "call that is no JSON",
            f"{where}: found a function_call that is no JSON object, expected {_FUNCTION} or a list of them",
        )
    full_calls = list[dict[str, Any]]()
    for call in calls:
        function = {"name": call["name"], "arguments": call.get("arguments") or {}}
        check_arguments(function, f"{where}: arguments of {shown(call['name'])}")
        _check_keys(call, _BARE_KEYS, where)
        call_id = {"id": call["id"]} if call.get("id") else {}
        beside = {name: value for name, value in call.items() if name not in _BARE_KEYS}
        full_calls.append({"type": "function"} | call_id | beside | {"function": function})
    return full_calls


def name_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an id for each call that has none, and the answers of tools with the id of their call.

    Chat APIs give calls an id and some templates write it (Mistral's: 9 letters or digits); sharegpt samples have none.
    An id follows from the call and its place in the conversation.
    """
    named_messages = list[Message]()
    open_calls = list[str]()
    for number, message in enumerate(messages):
        calls = [
            call if "id" in call else {"id": _make_call_id(number, position, call), **call}
            for position, call in enumerate(message.get("tool_calls") or ())
        ]
        if calls:
            message = {**message, "tool_calls": calls}
            open_calls = [call["id"] for call in calls]
        elif message["role"] == "tool" and "tool_call_id" not in message and open_calls:
            message = {**message, "tool_call_id": open_calls.pop(0)}
        named_messages.append(message)
    return named_messages


def _make_call_id(number: int, position: int, call: RawSample) -> str:
    """Return an id for a message's call. position: of the call among those of the message."""
    return hashlib.sha256(json.dumps([number, position, call], sort_keys=True).encode()).hexdigest()[:9]


def read_tools(sample: RawSample) -> tuple[list[RawSample] | None, str]:
    """Return the column `tools`, and its path: a list of descriptions, or one as JSON text; a bare function is put as
    chat APIs have it. Raises SampleFault."""
    path = path_of(sample, "tools")
    tools: Any = sample.get("tools")
    if says_nothing(tools) or (isinstance(tools, str) and tools.strip() == "null"):
        return None, path
    if isinstance(tools, list) and all(isinstance(tool, str) and tool.lstrip().startswith("{") for tool in tools):
        tools = [parse_column(tool, "tools", f"{path}[{number}]", "an object") for number, tool in enumerate(tools)]
        sample = {"tools": tools}
    described, path = list_of(sample, "tools")
    return [_read_tool(tool) for tool in described] or None, path


def _read_tool(tool: RawSample) -> RawSample:
    """Return a description as chat APIs have it; of a bare function, or of one with its type beside its name."""
    if "name" not in tool or "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type" or value != "function"}
    return {"type": "function", "function": function}

"""From the text of a value to the type of its key, or a line that says what was found and what was
expected.
"""

import dataclasses
import math
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe_lib.config import registry
from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.flat_schema import Key
from recipe_lib.config.paths import find_example_file
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import did_you_mean, quote, show

LARGEST_INTEGER = 2**63 - 1
LONGEST_NAME, LONGEST_PATH = 255, 4000  # bytes; what lies inside a folder has longer paths than it

_NULL = ("null", "Null", "NULL", "~")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(?:nan|inf|infinity)", re.IGNORECASE)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class MismatchError(Exception):
    """The value does not fit its key; the text is `found ..., expected ...` with the remedy."""


def convert(node: YamlNode, key: Key, *, typed: bool = False) -> Any:
    """The value of a node as its key wants it; MismatchError if it does not fit.

    typed: it was typed on a command line, where a number may stand for text without quotes.
    """
    _refuse_interpolation(node)
    if is_null(node) and not (typed and node.empty):
        if key.optional:
            return None
        raise MismatchError(
            f"found {'nothing' if node.empty else 'null'}, expected {describe_expected(key)}"
        )
    if node.kind == "scalar" and not node.quoted and node.text.lower() == "none" and key.optional:
        raise MismatchError(
            f"found {quote(node.text)}, expected {describe_expected(key)}; write null"
        )
    trouble: MismatchError | None = None
    for kind in _by_likeness(node, key.kinds):
        try:
            value = _convert(node, kind, key, typed)
            return _to_path(value, key) if key.limits.get("path") else value
        except MismatchError as mismatch:
            trouble = trouble or mismatch
    raise trouble or MismatchError(
        f"found {describe_node(node)}, expected {describe_expected(key)}"
    )


def _to_path(value: str, key: Key) -> str:
    """With the user's home in place of `~`, and the demo's files found from any folder;
    MismatchError for what no file system takes as a name.
    """
    path = find_example_file(os.path.expanduser(value))
    longest = max(len(os.fsencode(part)) for part in path.split("/"))
    if longest > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
        said = (
            f"a name of {longest} bytes"
            if longest > LONGEST_NAME
            else f"{len(os.fsencode(path))} bytes"
        )
        raise MismatchError(
            f"found {quote(value)} with {said}, expected {describe_expected(key)}; a name has at most"
            f" {LONGEST_NAME} bytes, a path {LONGEST_PATH}"
        )
    return path


def _convert(node: YamlNode, kind: Any, key: Key, typed: bool) -> Any:
    origin = typing.get_origin(kind)
    if origin is list:
        return _convert_list(node, typing.get_args(kind)[0], key, typed)
    if origin is dict:
        return _convert_mapping(node, typing.get_args(kind)[1], key, typed)
    if kind is Any:
        return read_untyped(node)
    value = _convert_scalar(node, kind, key, typed, is_choice=True)
    if kind is bool:  # choices and bounds are those of the other kinds
        return value
    if len(key.kinds) == 1 or not isinstance(value, str):
        _check_limits(value, key, node.text)
    elif "choices" in key.limits:
        _check_choice(value, key.limits["choices"], key)
    return value


def _convert_scalar(node: YamlNode, kind: Any, key: Key, typed: bool, *, is_choice: bool) -> Any:
    """is_choice: a text is one of the key's choices, if it has any, and not a free one."""
    if node.kind != "scalar":
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    if kind is bool:
        return _to_bool(node, key)
    if kind is int:
        return _to_int(node, key)
    if kind is float:
        return _to_float(node, key)
    text = _to_text(
        node, key, typed or (is_choice and ("choices" in key.limits or "kind" in key.limits))
    )
    return Path(text) if kind is Path else text


def _to_bool(node: YamlNode, key: Key) -> bool:
    if not node.quoted and node.text.lower() in (*_TRUE, *_FALSE):
        return node.text.lower() in _TRUE
    raise _unfit(node, key, node.text.lower() in (*_TRUE, *_FALSE))


def _to_int(node: YamlNode, key: Key) -> int:
    if node.quoted or not _INTEGER.fullmatch(node.text):
        raise _unfit(node, key, _INTEGER.fullmatch(node.text) is not None)
    digits = node.text.lstrip("-+").replace("_", "")
    if len(digits) > 1 and digits[0] == "0":
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; write it without leading zeros"
        )
    if len(digits) > 19 or int(digits) > LARGEST_INTEGER:
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; at most {LARGEST_INTEGER} (2^63"
            " - 1)"
        )
    return int(node.text)


def _to_float(node: YamlNode, key: Key) -> float:
    # `1e-5` is text to YAML 1.1, and people have learned to quote it: with or without quotes it is
    # the number.
    if _NOT_FINITE.fullmatch(node.text):
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; it has to be finite"
        )
    if not _NUMBER.fullmatch(node.text) or len(node.text) > 400:
        raise _unfit(node, key, False)
    value = float(node.text)
    if not math.isfinite(value):
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; it has to be finite"
        )
    return value


def _to_text(node: YamlNode, key: Key, any_word: bool) -> str:
    """any_word: a number or a truth value is text too; a choice is compared with the choices, which
    says more.
    """
    text = node.text
    if not text:
        raise MismatchError(f"found an empty text, expected {describe_expected(key)}")
    if text == "???":
        raise MismatchError(
            f"found {quote(text)}, expected {describe_expected(key)}; put a value in its place"
        )
    if _UNPRINTABLE.search(text):
        raise MismatchError(
            f"found {quote(text)}, expected {describe_expected(key)}; a text is one line of printable"
            " letters"
        )
    if (
        not node.quoted
        and not any_word
        and (_NUMBER.fullmatch(text) or text.lower() in ("true", "false"))
    ):
        raise MismatchError(
            f"found {show(text)}, expected {describe_expected(key)}; if it is meant as text, put it in"
            " quotes"
        )
    return text


def _convert_list(node: YamlNode, item_kind: Any, key: Key, typed: bool) -> list[Any]:
    if dataclasses.is_dataclass(item_kind):
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    if node.kind != "list":
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    only = len(key.kinds) == 1
    values = [_convert_scalar(item, item_kind, key, typed, is_choice=only) for item in node.items]
    if "items" in key.limits:
        for value in values:
            _check_choice(value, key.limits["items"], key)
    for value, item in zip(values, node.items, strict=True):
        if only:
            _check_limits(value, key, item.text)
    length = key.limits.get("length")
    if (length is not None and len(values) != length) or (not values and len(key.kinds) > 1):
        raise MismatchError(
            f"found {describe_node(node)} of {len(values)}, expected {describe_expected(key)}"
        )
    return values


def _convert_mapping(node: YamlNode, value_kind: Any, key: Key, typed: bool) -> dict[str, Any]:
    if node.kind != "mapping":
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    for name in node.entries:
        if not name or _UNPRINTABLE.search(name):
            raise MismatchError(f"found the name {quote(name)}, expected {describe_expected(key)}")
    return {
        name: _convert_scalar(value, value_kind, key, typed, is_choice=False)
        for name, (_, value) in node.entries.items()
    }


def read_untyped(node: YamlNode) -> Any:
    """Return a value whose key takes anything, as YAML reads it; `1e-5` is a number."""
    if node.kind == "list":
        return [read_untyped(item) for item in node.items]
    if node.kind == "mapping":
        return {name: read_untyped(value) for name, (_, value) in node.entries.items()}
    if node.quoted or _UNPRINTABLE.search(node.text):
        return node.text
    if is_null(node):
        return None
    if node.text.lower() in (*_TRUE, *_FALSE):
        return node.text.lower() in _TRUE
    if _INTEGER.fullmatch(node.text) and len(node.text) < 100:
        return int(node.text)
    return float(node.text) if _NUMBER.fullmatch(node.text) else node.text


def _check_limits(value: Any, key: Key, written: str) -> None:
    limits, choices = key.limits, _list_choices(key.kinds[0], key)
    if choices is not None:
        _check_choice(value, choices, key)
    elif isinstance(value, (int, float)) and value > limits.get("most", math.inf):
        raise MismatchError(f"found {show(written)}, expected at most {limits['most']}")
    elif not _within(value, key):
        raise MismatchError(f"found {show(written)}, expected {describe_expected(key)}")


def _list_choices(kind: Any, key: Key) -> list[Any] | None:
    """Return the only values that a key has, where it has such."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if "choices" in key.limits:
        return list(key.limits["choices"])
    return (
        [*key.limits.get("also", ()), *registry.list_names(key.limits["kind"])]
        if "kind" in key.limits
        else None
    )


def _check_choice(value: Any, choices: typing.Iterable[Any], key: Key) -> None:
    if value in (choices := list(choices)):
        return
    choices = list(map(str, choices))
    alias = CHOICE_ALIASES.get(str(value).lower(), "")
    alike = [choice for choice in choices if _outline(choice) == _outline(str(value))]
    hint = (
        f"; did you mean {alias}?"
        if alias.split(" with ")[0] in choices
        else did_you_mean(str(value), alike)
    )
    if value in key.limits.get("items", ()) or (
        len(key.kinds) > 1 and ("." in str(value) or "*" in str(value))
    ):
        hint = f"; write [{show(str(value))}]"  # a pattern, where a list of them may stand
    raise MismatchError(f"found {quote(str(value))}, expected {describe_expected(key)}{hint}")


def _outline(word: str) -> tuple[str, list[str]]:
    """First letter and digits, which a misspelling has too: `fp16` is none of `fp64`, nor `xpu` of
    `cpu`.
    """
    return word[:1].lower(), sorted(filter(str.isdigit, word))


def _within(value: Any, key: Key) -> bool:
    limits = key.limits
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if value in limits.get("also", ()):
        return True
    return (
        value >= limits.get("minimum", -math.inf)
        and value > limits.get("above", -math.inf)
        and value <= limits.get("maximum", math.inf)
        and value < limits.get("below", math.inf)
    )


def describe_expected(key: Key) -> str:
    """What a key takes, in words: `an integer >= 1, or null`."""
    words = [_expected_kind(kind, key) for kind in key.kinds]
    if key.optional and Any not in key.kinds:
        words.append("null")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def _expected_kind(kind: Any, key: Key) -> str:
    origin, limits = typing.get_origin(kind), key.limits
    if origin is list:
        only = len(key.kinds) == 1
        return _expected_list(typing.get_args(kind)[0], key, only)
    if origin is dict:
        return f"a mapping {{name: {_NOUNS[typing.get_args(kind)[1]][0]}}}"
    choices = _list_choices(kind, key)
    if choices is not None and (kind in (str, int) or origin is typing.Literal):
        several = "" if len(limits.get("choices", (1, 2))) == 1 else "one of "
        return several + ", ".join(map(str, choices))
    if kind is Any:
        return "a value"
    singular, _ = _NOUNS[kind]
    return singular + (describe_bounds(limits) if kind in (int, float) else "")


def _expected_list(item: Any, key: Key, only: bool) -> str:
    limits = key.limits
    if dataclasses.is_dataclass(item):
        return f"a list of sections ({', '.join(field.name for field in dataclasses.fields(item))})"
    if only and (choices := _list_choices(item, key)) is not None:
        return f"a list [...] of {', '.join(choices)}"
    if "items" in limits:
        return f"a list [...] of {', '.join(limits['items'])}"
    length = f"{limits['length']} " if "length" in limits else ""
    each = describe_bounds(limits) if only else ""
    return f"a list [...] of {length}{_NOUNS[item][1]}{f', each{each}' if each else ''}"


_NOUNS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
}


def describe_bounds(limits: typing.Mapping[str, Any]) -> str:
    """` >= 0 and < 1`; empty without bounds."""
    signs = (("minimum", ">="), ("above", ">"), ("maximum", "<="), ("below", "<"))
    parts = [f"{sign} {limits[name]}" for name, sign in signs if name in limits]
    also = "".join(f", or {value}" for value in limits.get("also", ()))
    return f" {' and '.join(parts)}{also}" if parts else ""


def describe_node(node: YamlNode) -> str:
    """What was found, in words."""
    if node.kind == "list":
        return "a list"
    if node.kind == "mapping":
        return "a section of keys"
    if node.empty:
        return "nothing"
    if not node.quoted and (
        _NUMBER.fullmatch(node.text) or node.text.lower() in ("true", "false", *_NULL)
    ):
        return show(node.text)
    return quote(node.text)


def _unfit(node: YamlNode, key: Key, only_the_quotes: bool) -> MismatchError:
    if node.quoted and only_the_quotes:
        return MismatchError(
            f"found {quote(node.text)} in quotes, expected {describe_expected(key)}; remove the quotes"
        )
    return MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")


def is_null(node: YamlNode) -> bool:
    """Nothing, `null` or `~` is written, without quotes."""
    return node.kind == "scalar" and not node.quoted and (not node.text or node.text in _NULL)


def _refuse_interpolation(node: YamlNode) -> None:
    """`${...}` stands for values (`recipe_lib.config.interpolation`), not for names."""
    for item in node.items:
        _refuse_interpolation(item)
    for name, (_, value) in node.entries.items():
        if "${" in name:
            raise MismatchError(
                f"found {quote(name)}; interpolation is refused, write the name itself"
            )
        _refuse_interpolation(value)


def _by_likeness(node: YamlNode, kinds: tuple[Any, ...]) -> list[Any]:
    """The kinds of a union, those first whose shape is that of the node, numbers before text."""
    order: list[Callable[[Any], bool]] = [
        lambda kind: (typing.get_origin(kind) is list) == (node.kind == "list"),
        lambda kind: (typing.get_origin(kind) is dict) == (node.kind == "mapping"),
        lambda kind: kind is not str and kind is not Path,
    ]
    return sorted(kinds, key=lambda kind: [not test(kind) for test in order])

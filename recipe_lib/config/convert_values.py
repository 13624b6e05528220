"""Convert the text of a config value to the type of its key, or report what was expected.

`check_settings.py` calls `convert(node, key)` for each value of a YAML file or command line. A node
is a value as written (`YamlNode`), a key declares its types and limits (`flat_schema.key`). A
reference to another key (`${section.key}`) has been filled in before, see `references.py`.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from recipe_lib.config import registry
from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.flat_schema import Key
from recipe_lib.config.paths import find_example_file
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import did_you_mean, quote, show

LARGEST_INTEGER = 2**63 - 1  # of int64
# Bytes of a file's name and of a path. Linux allows paths of 4,096 bytes; the rest is for files
# inside a folder that the config names.
LONGEST_NAME = 255
LONGEST_PATH = 4000

# Spellings without quotes. Truth values, in any case of letters, are those of YAML 1.1; they are
# read where true or false is expected, and in `read_untyped`.
_NULL = ("null", "Null", "NULL", "~")
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(?:nan|inf|infinity)", re.IGNORECASE)
# Control characters, Unicode's line separators, and surrogates (bytes that are no UTF-8).
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# Entries of `Key.limits` that this module reads, each only if given:
#   choices           the legal values; of a list, of each item
#   kind              the registry whose names are the legal values, such as `optimizer.name`
#   also              further legal values, out of the bounds or beside a registry's names
#   items             legal items of the list that may stand in place of a choice
#   minimum, maximum  inclusive bounds; `above` and `below` are exclusive ones
#   most              upper bound far above sensible values, told only when it is exceeded
#   length            number of items of a list
#   path              True: the text is a file or folder


class MismatchError(Exception):
    """A value does not fit its key. The text is `found ..., expected ...`, and often a remedy."""


def convert(node: YamlNode, key: Key, *, from_override: bool = False) -> Any:
    """Return the value of a node in the type of its key. Raises MismatchError if it does not fit.

    from_override: the value is from a command line, or was filled in: text that looks like a number
    needs no quotes.
    None is returned for null, if the key may be null.
    """
    _refuse_references_in_names(node)
    # `key:` in a file is null, as in YAML; `key=` on a command line is an empty text.
    if is_null(node) and not (from_override and node.is_empty):
        if key.optional:
            return None
        raise MismatchError(
            f"found {'nothing' if node.is_empty else 'null'}, expected {describe_expected(key)}"
        )
    if key.optional and node.kind == "scalar" and not node.quoted and node.text.lower() == "none":
        # "none" is Python's word for null; refused, as other keys have a choice of that name.
        raise MismatchError(
            f"found {quote(node.text)}, expected {describe_expected(key)}; write null"
        )
    first_mismatch: MismatchError | None = None
    for kind in _sort_by_likeness(node, key.kinds):
        try:
            value = _convert_to_kind(node, kind=kind, key=key, from_override=from_override)
            return _convert_path(value, key) if key.limits.get("path") else value
        except MismatchError as mismatch:
            # The error of the likeliest type says the most.
            first_mismatch = first_mismatch or mismatch
    raise first_mismatch or MismatchError(
        f"found {describe_node(node)}, expected {describe_expected(key)}"
    )


def _convert_path(value: str, key: Key) -> str:
    """Return a path with `~` expanded.

    A path of the shipped examples (`examples/...`) that is not here is one of the installed
    package. Raises MismatchError for a path that is too long for a file system.
    """
    path = find_example_file(os.path.expanduser(value))
    longest_name = max(len(os.fsencode(part)) for part in path.split("/"))
    size_text = f"{len(os.fsencode(path))} bytes"
    if longest_name > LONGEST_NAME:
        size_text = f"a name of {longest_name} bytes"
    elif len(os.fsencode(path)) <= LONGEST_PATH:
        return path
    raise MismatchError(
        f"found {quote(value)} with {size_text}, expected {describe_expected(key)}; a name has at"
        f" most {LONGEST_NAME} bytes, a path {LONGEST_PATH}"
    )


def _convert_to_kind(node: YamlNode, kind: Any, key: Key, from_override: bool) -> Any:
    """Return the value of a node as one of the key's types, `kind`.

    from_override: as for `convert`, also in the functions below. Each raises MismatchError if the
    node does not fit.
    """
    origin = get_origin(kind)
    if origin is list:
        return _convert_list(
            node, item_kind=get_args(kind)[0], key=key, from_override=from_override
        )
    if origin is dict:
        return _convert_mapping(
            node, value_kind=get_args(kind)[1], key=key, from_override=from_override
        )
    if kind is Any:
        return read_untyped(node)
    value = _convert_scalar(node, kind=kind, key=key, from_override=from_override, is_choice=True)
    if kind is bool:  # choices and bounds belong to the key's other types
        return value
    # Of a key that takes text or a number, bounds are the number's.
    if len(key.kinds) == 1 or not isinstance(value, str):
        _check_limits(value, key, node.text)
    elif "choices" in key.limits:
        _check_choice(value, key.limits["choices"], key)
    return value


def _convert_scalar(
    node: YamlNode, kind: Any, key: Key, from_override: bool, *, is_choice: bool
) -> Any:
    """Return the value of a scalar node, of type `kind`; its limits are not checked here.

    is_choice: False for a part of a value, to which the key's choices do not apply. Where they do,
    a text that looks like a number needs no quotes.
    """
    if node.kind != "scalar":
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    if kind in _CONVERTERS:
        return _CONVERTERS[kind](node, key)
    has_choices = is_choice and ("choices" in key.limits or "kind" in key.limits)
    text = _convert_text(node, key, from_override or has_choices)
    return Path(text) if kind is Path else text


def _convert_bool(node: YamlNode, key: Key) -> bool:
    # Quoted, it is a text.
    is_word = node.text.lower() in (*_TRUE, *_FALSE)
    if node.quoted or not is_word:
        raise _build_mismatch(node, key, only_the_quotes=is_word)
    return node.text.lower() in _TRUE


def _convert_int(node: YamlNode, key: Key) -> int:
    is_integer = _INTEGER.fullmatch(node.text) is not None
    if node.quoted or not is_integer:
        raise _build_mismatch(node, key, only_the_quotes=is_integer)
    digits = node.text.lstrip("-+").replace("_", "")
    if len(digits) > 1 and digits[0] == "0":
        # YAML 1.1 reads an octal number, `int` a decimal one: the user must say which.
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; write it without leading"
            " zeros"
        )
    # The number of digits first (2^63 has 19): `int` raises ValueError for more than 4,300 of them.
    if len(digits) > 19 or int(digits) > LARGEST_INTEGER:
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; at most {LARGEST_INTEGER}"
            " (2^63 - 1)"
        )
    return int(node.text)


def _convert_float(node: YamlNode, key: Key) -> float:
    # Quotes are allowed: YAML 1.1 reads `1e-5` as text either way, and people quote it.
    is_number = _NUMBER.fullmatch(node.text) and len(node.text) <= 400
    if not is_number and not _NOT_FINITE.fullmatch(node.text):
        raise _build_mismatch(node, key)
    value = float(node.text) if is_number else math.nan
    if not math.isfinite(value):  # also for 1e999, which float() makes infinite
        raise MismatchError(
            f"found {show(node.text)}, expected {describe_expected(key)}; it has to be finite"
        )
    return value


# Type -> the function that converts a scalar to it; `_convert_text` does for texts and paths.
_CONVERTERS: dict[type, Callable[[YamlNode, Key], Any]] = {
    bool: _convert_bool,
    int: _convert_int,
    float: _convert_float,
}


def _convert_text(node: YamlNode, key: Key, any_word: bool) -> str:
    """Return the text of a node.

    any_word: text that looks like a number or truth value is allowed without quotes. It is for keys
    with choices too: an error that lists them helps more than one that asks for quotes.
    """
    text = node.text
    if not text:
        raise MismatchError(f"found an empty text, expected {describe_expected(key)}")
    if text == "???":  # OmegaConf's and Hydra's mark of a missing value
        raise MismatchError(
            f"found {quote(text)}, expected {describe_expected(key)}; put a value in its place"
        )
    if _UNPRINTABLE.search(text):
        raise MismatchError(
            f"found {quote(text)}, expected {describe_expected(key)}; a text is one line of"
            " printable letters"
        )
    is_other_type = _NUMBER.fullmatch(text) or text.lower() in ("true", "false")
    if is_other_type and not node.quoted and not any_word:
        raise MismatchError(
            f"found {show(text)}, expected {describe_expected(key)}; if it is meant as text, put it"
            " in quotes"
        )
    return text


def _convert_list(node: YamlNode, item_kind: Any, key: Key, from_override: bool) -> list[Any]:
    # A list of sections is not converted here, but by `check_settings.check_items`.
    if node.kind != "list" or dataclasses.is_dataclass(item_kind):
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    # If the key takes a scalar as well as a list, its choices and bounds belong to the scalar.
    is_only_type = len(key.kinds) == 1
    values = [
        _convert_scalar(
            item, kind=item_kind, key=key, from_override=from_override, is_choice=is_only_type
        )
        for item in node.items
    ]
    for value, item in zip(values, node.items, strict=True):
        if "items" in key.limits:
            _check_choice(value, key.limits["items"], key)
        if is_only_type:
            _check_limits(value, key, item.text)
    length = key.limits.get("length")
    # Where a scalar may stand in its place, an empty list is refused.
    if (length is not None and len(values) != length) or (not values and len(key.kinds) > 1):
        raise MismatchError(
            f"found {describe_node(node)} of {len(values)}, expected {describe_expected(key)}"
        )
    return values


def _convert_mapping(
    node: YamlNode, value_kind: Any, key: Key, from_override: bool
) -> dict[str, Any]:
    # A node's entries are name -> (line, value).
    if node.kind != "mapping":
        raise MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")
    for name in node.entries:
        if not name or _UNPRINTABLE.search(name):
            raise MismatchError(f"found the name {quote(name)}, expected {describe_expected(key)}")
    return {
        name: _convert_scalar(
            value, kind=value_kind, key=key, from_override=from_override, is_choice=False
        )
        for name, (_, value) in node.entries.items()
    }


def read_untyped(node: YamlNode) -> Any:
    """Return a value for a key of any type, as YAML 1.1 reads it, with two exceptions.

    `1e-5` is a number, not text, and `010` is decimal, not octal.
    """
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
    # A longer integer is a float here.
    return float(node.text) if _NUMBER.fullmatch(node.text) else node.text


def _check_limits(value: Any, key: Key, written: str) -> None:
    """Raise MismatchError for a value that is no choice of its key, or outside its bounds.

    written: the value's text, as errors quote it.
    """
    limits = key.limits
    choices = _list_choices(key.kinds[0], key)
    if choices is not None:
        _check_choice(value, choices, key)
    elif isinstance(value, (int, float)) and value > limits.get("most", math.inf):
        raise MismatchError(f"found {show(written)}, expected at most {limits['most']}")
    elif not _is_within_bounds(value, key):
        raise MismatchError(f"found {show(written)}, expected {describe_expected(key)}")


def _list_choices(kind: Any, key: Key) -> list[Any] | None:
    """Return the only values of type `kind` that a key allows; None: any of that type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if "choices" in key.limits:
        return list(key.limits["choices"])
    if "kind" in key.limits:
        # Looked up now, not when the key was declared: plugins register further names.
        return [*key.limits.get("also", ()), *registry.list_names(key.limits["kind"])]
    return None


def _check_choice(value: Any, choices: Iterable[Any], key: Key) -> None:
    """Raise MismatchError, with the choice that was probably meant, if a value is none of them."""
    choices = list(choices)
    if value in choices:
        return
    choice_texts = [str(choice) for choice in choices]
    written = str(value)
    # What other tools call a choice, such as `adamw` or `adamw with optimizer.state_bits=8`.
    alias = CHOICE_ALIASES.get(written.lower(), "")
    # Of a key that takes a word or a list of module names, such as `layers.*.mlp`.
    is_pattern = len(key.kinds) > 1 and ("." in written or "*" in written)
    if is_pattern or value in key.limits.get("items", ()):
        hint = f"; write [{show(written)}]"  # it is an item of a list that the key takes as well
    elif alias.split(" with ")[0] in choice_texts:
        hint = f"; did you mean {alias}?"
    else:
        outline = _outline_word(written)
        hint = did_you_mean(
            written, [text for text in choice_texts if _outline_word(text) == outline]
        )
    raise MismatchError(f"found {quote(written)}, expected {describe_expected(key)}{hint}")


def _outline_word(word: str) -> tuple[str, list[str]]:
    """Return the first letter and the digits of a word, which a misspelling has in common with it.

    So `fp16` is not offered for `fp64`, nor `cpu` for `xpu`.
    """
    return word[:1].lower(), sorted(filter(str.isdigit, word))


def _is_within_bounds(value: Any, key: Key) -> bool:
    # What is no number has no bounds.
    limits = key.limits
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value in limits.get("also", ()):
        return True
    return (
        value >= limits.get("minimum", -math.inf)
        and value > limits.get("above", -math.inf)
        and value <= limits.get("maximum", math.inf)
        and value < limits.get("below", math.inf)
    )


def describe_expected(key: Key) -> str:
    """Return a text on the values that a key takes: `an integer >= 1, or null`."""
    texts = [_describe_kind(kind, key) for kind in key.kinds]
    if key.optional and Any not in key.kinds:
        texts.append("null")
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])}, or {texts[-1]}"


def _describe_kind(kind: Any, key: Key) -> str:
    origin = get_origin(kind)
    if origin is list:
        return _describe_list(get_args(kind)[0], key, is_only_type=len(key.kinds) == 1)
    if origin is dict:
        return f"a mapping {{name: {_NOUNS[get_args(kind)[1]][0]}}}"
    choices = _list_choices(kind, key)
    if choices is not None and (kind in (str, int) or origin is Literal):
        one_of = "" if len(key.limits.get("choices", ())) == 1 else "one of "
        return one_of + ", ".join(map(str, choices))
    if kind is Any:
        return "a value"
    singular, _ = _NOUNS[kind]
    return singular + (describe_bounds(key.limits) if kind in (int, float) else "")


def _describe_list(item: Any, key: Key, *, is_only_type: bool) -> str:
    """Return a text on the lists that a key takes.

    item: the type of the list's items. is_only_type: the key takes nothing but a list.
    """
    limits = key.limits
    if dataclasses.is_dataclass(item):
        return f"a list of sections ({', '.join(field.name for field in dataclasses.fields(item))})"
    if is_only_type and (choices := _list_choices(item, key)) is not None:
        return f"a list [...] of {', '.join(choices)}"
    if "items" in limits:
        return f"a list [...] of {', '.join(limits['items'])}"
    length = f"{limits['length']} " if "length" in limits else ""
    bounds = describe_bounds(limits) if is_only_type else ""
    return f"a list [...] of {length}{_NOUNS[item][1]}{f', each{bounds}' if bounds else ''}"


# Type -> its noun in texts: (singular, plural).
_NOUNS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
}


def describe_bounds(limits: Mapping[str, Any]) -> str:
    """Return a text on bounds, such as ` >= 0 and < 1`; empty without bounds.

    limits: those of a key, see above.
    """
    signs = (("minimum", ">="), ("above", ">"), ("maximum", "<="), ("below", "<"))
    parts = [f"{sign} {limits[name]}" for name, sign in signs if name in limits]
    also = "".join(f", or {value}" for value in limits.get("also", ()))
    return f" {' and '.join(parts)}{also}" if parts else ""


def describe_node(node: YamlNode) -> str:
    """Return a text on what a node holds, for `found ...` in errors."""
    if node.kind == "list":
        return "a list"
    if node.kind == "mapping":
        return "a section of keys"
    if node.is_empty:
        return "nothing"
    is_other_type = _NUMBER.fullmatch(node.text) or node.text.lower() in ("true", "false", *_NULL)
    return show(node.text) if is_other_type and not node.quoted else quote(node.text)


def _build_mismatch(node: YamlNode, key: Key, *, only_the_quotes: bool = False) -> MismatchError:
    """Return the error of a node that does not fit its key.

    only_the_quotes: the node would fit without its quotes, if it has any.
    """
    if node.quoted and only_the_quotes:
        return MismatchError(
            f"found {quote(node.text)} in quotes, expected {describe_expected(key)}; remove the"
            " quotes"
        )
    return MismatchError(f"found {describe_node(node)}, expected {describe_expected(key)}")


def is_null(node: YamlNode) -> bool:
    """Return True if a node is empty, `null` or `~`, without quotes."""
    return node.kind == "scalar" and not node.quoted and (not node.text or node.text in _NULL)


def _refuse_references_in_names(node: YamlNode) -> None:
    """Raise MismatchError for `${...}` in a name of a mapping: only values may have references."""
    for item in node.items:
        _refuse_references_in_names(item)
    for name, (_, value) in node.entries.items():
        if "${" in name:
            raise MismatchError(
                f"found {quote(name)}; interpolation is refused, write the name itself"
            )
        _refuse_references_in_names(value)


def _sort_by_likeness(node: YamlNode, kinds: tuple[Any, ...]) -> list[Any]:
    """Return the types of a union, those first that have the node's shape (list, mapping, scalar).

    Text is last, as every scalar is text.
    """
    # Sorted by the first test that tells two types apart.
    tests: list[Callable[[Any], bool]] = [
        lambda kind: (get_origin(kind) is list) == (node.kind == "list"),
        lambda kind: (get_origin(kind) is dict) == (node.kind == "mapping"),
        lambda kind: kind is not str and kind is not Path,
    ]
    return sorted(kinds, key=lambda kind: [not test(kind) for test in tests])

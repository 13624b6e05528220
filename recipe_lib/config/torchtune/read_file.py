"""A YAML file of torchtune's as values by dotted key: `optimizer.lr`, `dataset[0].source`.

Read by the same parser as ours: no tag, alias or second document. Values have the types that YAML 1.1 gives them,
and numbers such as `1e-5` are numbers. `${other.key}` is filled in; resolvers are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.config.interpolation import Interpolation, InterpolationError, NameFault
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import read_text

_WORDS = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")


@dataclass
class TheirFile:
    """A file of torchtune's, read."""

    path: Path
    shown: str
    """Its name in errors."""
    values: dict[str, Any]
    """By dotted key, in the file's order."""
    lines: dict[str, int]
    """Where each stands."""
    comments: list[str]
    """A line each, without `#`."""

    def place(self, key: str) -> str:
        """Return `theirs.yaml:12`, of a key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def under(self, section: str) -> list[str]:
        """Return the keys of a section, in the file's order; of a section that is one value, its name."""
        return [key for key in self.values if key == section or key.startswith((f"{section}.", f"{section}["))]


def read_their_file(path: str) -> TheirFile:
    """Raise ConfigError, a line a fault, for what is no YAML file with keys."""
    file = expand(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}")
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of torchtune's")
    shown = quote(path)[1:-1]
    document = read_file(file, shown)
    if document.faults:
        raise ConfigError(*(f"{shown}:{line}: {what}" for line, what in document.faults))
    if document.top.kind != "mapping":
        raise ConfigError(f"{shown}: expected keys with values")
    lines = [line.lstrip(" \t") for line in read_text(file, MAX_BYTES).splitlines()]
    theirs = TheirFile(file, shown, {}, {}, [line[1:].strip() for line in lines if line.startswith("#")])
    for key, value, line in _leaves("", document.top):
        theirs.values[key] = value
        theirs.lines[key] = line
    _fill_names(theirs)
    for key, value in theirs.values.items():
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(f"{theirs.place(key)}: {show(key)}: found a list in a list, expected plain values")
    return theirs


def _leaves(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every value; a list of plain values is one."""
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _leaves(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _leaves(f"{name}[{number}]", item)
    else:
        yield name, _convert_node(node), node.line


def _convert_node(node: YamlNode) -> Any:
    if node.kind == "mapping":
        return {word: _convert_node(inner) for word, (_, inner) in node.entries.items()}
    if node.kind == "list":
        return [_convert_node(item) for item in node.items]
    return node.text if node.quoted else _convert_word(node.text)


def _convert_word(text: str) -> Any:
    """Return a word of YAML as a value."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _NUMBER.fullmatch(text) else text


def _fill_names(theirs: TheirFile) -> None:
    """Put the values of other keys into those that name them."""
    names, values = Interpolation(), theirs.values

    def fill(key: str) -> None:
        value = values[key]
        try:
            with names.inside(key):
                if isinstance(value, list):
                    values[key] = [names.fill_text(item, look_up) if isinstance(item, str) else item for item in value]
                elif isinstance(value, str):
                    values[key] = names.fill_text(value, look_up)
        except InterpolationError as fault:
            raise ConfigError(f"{theirs.place(key)}: {show(key)}: {fault}") from fault

    def look_up(name: str) -> Any:
        if name not in values:
            raise NameFault(", expected ${section.key} of this file; write the value itself")
        fill(name)
        return values[name]

    for key in values:
        fill(key)

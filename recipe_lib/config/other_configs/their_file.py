"""Another tool's YAML as values by dotted key: `optimizer.lr`, `datasets[0].path`.

Read by the same parser as ours: no tag, alias or second document. Values have the types that YAML 1.1 gives them,
and numbers such as `1e-5` are numbers. `${other.key}` is filled in; resolvers are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.config.paths import CONFIG_SUFFIXES, expand
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import read_text

_NULL = ("", "~", "null")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*\}")
_MOST_NESTED = 10  # names of keys within names of keys
_LONGEST = 2**16  # characters of a value once it is filled in


@dataclass
class TheirFile:
    """path: of the file; shown: its name in errors. values: by dotted key, in the file's order; lines: where each
    stands. comments: the file's comments, a line each, without `#`."""

    path: Path
    shown: str
    values: dict[str, Any]
    lines: dict[str, int]
    comments: list[str]

    def place(self, key: str) -> str:
        """`theirs.yaml:12`, of a key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def under(self, section: str) -> list[str]:
        """The keys of a section, in the file's order; of a section that is one value, its name."""
        return [key for key in self.values if key == section or key.startswith((f"{section}.", f"{section}["))]


def read_their_file(path: str) -> TheirFile:
    """Raises ConfigError, a line a fault, for what is no YAML file with keys."""
    file = expand(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}")
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of another tool")
    shown = quote(path)[1:-1]
    document = read_file(file, shown)
    if document.faults:
        raise ConfigError(*(f"{shown}:{line}: {what}" for line, what in document.faults))
    if document.top.kind != "mapping":
        raise ConfigError(f"{shown}: expected keys with values")
    found = list(_leaves("", document.top))
    for key, value, line in found:
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(f"{shown}:{line}: {show(key)}: found a list in a list, expected plain values")
    comments = [
        line.lstrip(" \t")[1:].strip()
        for line in read_text(file, MAX_BYTES).splitlines()
        if line.lstrip(" \t").startswith("#")
    ]
    theirs = TheirFile(file, shown, {key: value for key, value, _ in found}, {k: n for k, _, n in found}, comments)
    for key, value in theirs.values.items():
        theirs.values[key] = _filled(theirs, key, value, 0)
    return theirs


def _fill_key(theirs: TheirFile, key: str, depth: int) -> Any:
    """Return the value of a key that another one names, which keeps it: filled in anew each time, it could grow for
    ever."""
    theirs.values[key] = _filled(theirs, key, theirs.values[key], depth)
    return theirs.values[key]


def _leaves(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, value, line) of every value; a list of plain values is one."""
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _leaves(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _leaves(f"{name}[{number}]", item)
    else:
        yield name, _plain(node), node.line


def _plain(node: YamlNode) -> Any:
    if node.kind == "mapping":
        return {word: _plain(inner) for word, (_, inner) in node.entries.items()}
    if node.kind == "list":
        return [_plain(item) for item in node.items]
    return node.text if node.quoted else typed(node.text)


def typed(text: str) -> Any:
    """A word of YAML as a value."""
    if text.lower() in _NULL:
        return None
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _NUMBER.fullmatch(text) else text


def _filled(theirs: TheirFile, key: str, value: Any, depth: int) -> Any:
    """The value with `${...}` filled in."""
    if isinstance(value, list):
        filled = [_filled(theirs, key, item, depth) for item in value]
        if any(isinstance(item, list) for item in filled):
            raise ConfigError(f"{theirs.place(key)}: {show(key)}: found a list in a list, expected plain values")
        _check_length(theirs, key, filled)
        return filled
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _MOST_NESTED:
        raise ConfigError(f"{theirs.place(key)}: {show(key)}: the keys in {quote(value)} name each other in a circle")
    unknown = [name for name in _NAME.findall(value) if name not in theirs.values]
    if unknown or "${" in _NAME.sub("", value):
        raise ConfigError(
            f"{theirs.place(key)}: {show(key)}: found {quote(value)}, expected ${{section.key}} of this file; "
            "write the value itself"
        )
    whole = _NAME.fullmatch(value)
    if whole:
        return _fill_key(theirs, whole[1], depth + 1)
    pieces = [str(_fill_key(theirs, name, depth + 1)) for name in dict.fromkeys(_NAME.findall(value))]
    _check_length(theirs, key, pieces * max(1, value.count("${")))
    return _NAME.sub(lambda found: str(theirs.values[found[1]]), value)


def _check_length(theirs: TheirFile, key: str, pieces: list[Any]) -> None:
    if sum(len(str(piece)) for piece in pieces) > _LONGEST:
        raise ConfigError(
            f"{theirs.place(key)}: {show(key)}: is longer than {_LONGEST} characters once its names are filled in; "
            "write the value itself"
        )

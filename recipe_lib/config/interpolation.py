"""`${section.key}` in a value: the value of another key, filled in once all files and overrides are read.

Names are those of the config's own keys, also relative (`${.lr}`). Resolvers, environment variables among them, are
refused: what a config means is to be read in its files.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import quote

_NAME = re.compile(r"\$\{\s*(\.*[\w-]+(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")

MOST_CHARACTERS = 2**18  # that all names of a config are filled in with
MOST_NESTED = 20  # names of values with names
_LEAST = 256  # that a name counts for, even if its value is shorter: each costs time

LookUp = Callable[[str], Any]


class InterpolationError(Exception):
    """A value cannot be filled in; the text is `found ..; remedy`."""

    def __init__(self, text: str, line: int = 0) -> None:
        """text: as above. line: of the value, in its file."""
        super().__init__(text)
        self.line = line


class NameFault(Exception):  # noqa: N818 - no error yet: `fill_text` makes one of it, with the text that has the name
    """A name has no value; the text is the remedy."""


class Interpolation:
    """The names of one config while they are filled in."""

    def __init__(self) -> None:
        """Begin with all of the room."""
        self.left = MOST_CHARACTERS
        self.open: list[str] = []

    @contextmanager
    def inside(self, key: str) -> Iterator[None]:
        """Mark a key whose value is being filled in. Raises NameFault if it is already: it names itself."""
        if key in self.open or len(self.open) == MOST_NESTED:
            raise NameFault(": the keys name each other in a circle; write one value itself")
        self.open.append(key)
        try:
            yield
        finally:
            self.open.pop()

    def take(self, value: Any) -> Any:
        """Return the value of a name. Raises NameFault where it is one too many: ten names of ten names of ten are a
        thousand."""
        self.left -= max(_LEAST, len(str(value)))
        if self.left < 0:
            raise NameFault(f": the names of the config grow beyond {MOST_CHARACTERS} characters; write it out")
        return value

    def fill_text(self, text: str, look_up: LookUp) -> Any:
        """Return a text with the values of the keys that it names; of one that is a name alone, the value itself.

        look_up: the value of a name; raises NameFault where there is none.
        """
        if "${" not in text:
            return text
        _check_form(text)
        alone = _NAME.fullmatch(text.strip())
        try:
            if alone:
                return self.take(look_up(alone[1]))
            return _NAME.sub(lambda name: _to_word(self.take(look_up(name[1]))), text)
        except NameFault as fault:
            raise InterpolationError(f"found {quote(text)}{fault}") from fault

    def fill_node(self, node: YamlNode, look_up: LookUp) -> YamlNode:
        """Return a value of a file with those of the keys that it names, as if they had been written there."""
        if node.kind == "list":
            return dataclasses.replace(node, items=[self.fill_node(item, look_up) for item in node.items])
        if node.kind == "mapping":
            entries = {word: (line, self.fill_node(inner, look_up)) for word, (line, inner) in node.entries.items()}
            return dataclasses.replace(node, entries=entries)
        if not is_interpolated(node):
            return node
        try:
            value = self.fill_text(node.text, look_up)
        except InterpolationError as fault:
            raise InterpolationError(str(fault), node.line) from fault
        if _NAME.fullmatch(node.text.strip()):
            return _write_node(value, node)
        return dataclasses.replace(node, text=value)  # a part of a text is no number, whatever it looks like


def is_interpolated(node: YamlNode) -> bool:
    """Return whether a value, or a part of it, names another key."""
    inner = [*node.items, *(value for _, value in node.entries.values())]
    return (node.kind == "scalar" and "${" in node.text) or any(is_interpolated(part) for part in inner)


def complete_name(name: str, key: str) -> str:
    """Return the name without dots in front: `${.lr}` in the value of `optimizer.eps` is `optimizer.lr`."""
    dots = len(name) - len(name.lstrip("."))
    sections = key.split(".")[:-dots] if dots else []
    return ".".join([*sections, name.lstrip(".")])


def are_related(name: str, key: str) -> bool:
    """Return whether a name is a key, a section that holds it, or a part of its value."""
    return name == key or key.startswith(f"{name}.") or name.startswith((f"{key}.", f"{key}["))


def step_into(value: Any, path: str) -> Any:
    """Return a part of a value. path: `.word` and `[number]`, one after the other. Raises LookupError for none."""
    for word in re.findall(r"[\w-]+", path):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, list):
            if not word.isdigit():
                raise LookupError(word)
            value = value[int(word)]
        elif isinstance(value, dict):
            value = value[word]
        else:
            raise LookupError(word)
    return value


def _check_form(text: str) -> None:
    """Raise InterpolationError for a text whose `${...}` is no name of a key."""
    if _RESOLVER.search(text):
        remedy = "environment variables and resolvers are refused, write the value itself"
        raise InterpolationError(f"found {quote(text)}, expected ${{section.key}} of this config; {remedy}")
    if "\\${" in text:
        raise InterpolationError(f"found {quote(text)}, expected no ${{ that is meant as text")
    if "${" in _NAME.sub("", text):
        raise InterpolationError(f"found {quote(text)}, expected ${{section.key}}")


def _to_word(value: Any) -> str:
    """Return a value as configs have it within a text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_node(value: Any, written: YamlNode) -> YamlNode:
    """Return a value as if it had been written in the place of `written`."""
    if isinstance(value, (list, tuple)):
        return YamlNode("list", written.line, items=[_write_node(item, written) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        entries = {str(word): (written.line, _write_node(item, written)) for word, item in value.items()}
        return YamlNode("mapping", written.line, entries=entries)
    if value is None or isinstance(value, bool):
        return YamlNode("scalar", written.line, _to_word(value))
    quoted = isinstance(value, str) and (value == "" or value.lower() in ("null", "true", "false", "~"))
    return YamlNode("scalar", written.line, str(value), quoted=quoted)

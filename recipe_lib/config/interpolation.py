"""`${section.key}` in a value: the value of another key, filled in by OmegaConf once all files and overrides are read.

Names are those of the config's own keys, also relative (`${.lr}`). Resolvers, environment variables among them, are
refused: what a config means is to be read in its files.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from recipe_lib.config.hints import hint_for
from recipe_lib.config.keys import Schema
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import quote, show
from recipe_lib.config.values import is_null

_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")
_PLAIN = re.compile(r"\$\{[^${}]*\}")
_SCRATCH = "value being filled in"


MOST_CHARACTERS = 2**18  # that all names of a config are filled in with
_LEAST = 256  # that a name counts for, even if its value is shorter: each costs time


def is_interpolated(node: YamlNode) -> bool:
    """Whether a value, or a part of it, names another key."""
    inner = [*node.items, *(value for _, value in node.entries.values())]
    return (node.kind == "scalar" and "${" in node.text) or any(is_interpolated(part) for part in inner)


def names_in(node: YamlNode, key: str) -> set[str]:
    """Return the keys and sections that a value names. key: whose value it is, for relative names."""
    inner = [*node.items, *(value for _, value in node.entries.values())]
    names = {_full_name(found[2:-1].strip(), key) for found in _PLAIN.findall(node.text)}
    return names.union(*(names_in(part, key) for part in inner))


def _full_name(name: str, key: str) -> str:
    """`${.lr}` of `optimizer.eps` is `optimizer.lr`; of `data.sources[0].weight` only the key counts."""
    dots = len(name) - len(name.lstrip("."))
    sections = key.split(".")[:-dots] if dots else []
    return ".".join([*sections, name.lstrip(".").partition("[")[0]])


def are_related(name: str, key: str) -> bool:
    """Return whether a name is a key, a section that holds it, or a part of its value."""
    return name == key or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def in_order(pending: Mapping[str, YamlNode]) -> list[str]:
    """Return the keys whose values name others, each after those that it names; of a circle in any order."""
    order: dict[str, None] = {}
    begun: set[str] = set()

    def visit(key: str) -> None:
        if key in begun:
            return
        begun.add(key)
        for name in names_in(pending[key], key):
            for other in pending:
                if are_related(name, other):
                    visit(other)
        order[key] = None

    for key in pending:
        visit(key)
    return list(order)


class OmegaConfError(Exception):
    """OmegaConf's own complaint."""


class Room:
    """What is left of the characters that the names of a config may be filled in with."""

    def __init__(self) -> None:
        self.left = MOST_CHARACTERS

    def take(self, value: Any) -> None:
        """Counts a value. Raises OmegaConfError where it is one too many."""
        self.left -= max(_LEAST, len(str(value)))
        if self.left < 0:
            raise OmegaConfError("too long")


class InterpolationError(Exception):
    """A value cannot be filled in; the text is `found ..; remedy`. line: that it stands on."""

    def __init__(self, text: str, line: int) -> None:
        """text: as above."""
        super().__init__(text)
        self.line = line


def check_form(node: YamlNode) -> None:
    """InterpolationError for a text whose `${...}` is no name of a key."""
    for part in (*node.items, *(value for _, value in node.entries.values())):
        check_form(part)
    if node.kind != "scalar" or "${" not in node.text:
        return
    if _RESOLVER.search(node.text):
        raise InterpolationError(
            f"found {quote(node.text)}, expected ${{section.key}} of this config; environment variables and resolvers "
            "are refused, write the value itself",
            node.line,
        )
    if "\\${" in node.text:
        raise InterpolationError(f"found {quote(node.text)}, expected no ${{ that is meant as text", node.line)
    if "${" in _PLAIN.sub("", node.text):
        raise InterpolationError(f"found {quote(node.text)}, expected ${{section.key}}", node.line)
    import omegaconf  # 0.1 s of CPU, a third of `tune ls`; few configs name other keys

    try:
        omegaconf.OmegaConf.create([node.text])
    except omegaconf.errors.OmegaConfBaseException as error:
        raise InterpolationError(f"found {quote(node.text)}, expected ${{section.key}}", node.line) from error


def tree_of(values: dict[str, Any], pending: dict[str, YamlNode]) -> Any:
    """All keys as OmegaConf's tree. values: by dotted key; pending: those that name other keys, as written."""
    import omegaconf

    tree: dict[str, Any] = {}
    for name, value in {**values, **{name: _raw(node) for name, node in pending.items()}}.items():
        *sections, word = name.split(".")
        functools.reduce(lambda inner, section: inner.setdefault(section, {}), sections, tree)[word] = _plain(value)
    return omegaconf.OmegaConf.create(tree, flags={"allow_objects": True})


def put(tree: Any, key: str, value: Any) -> None:
    """Sets a key of the tree to its value, in place of a text that names others."""
    section, _, word = key.rpartition(".")
    (tree[section] if section else tree)[word] = _plain(value)


def fill_in(tree: Any, node: YamlNode, key: str, schema: Schema, room: Room) -> YamlNode:
    """Return the node with the values of the keys that it names. key: whose value it is, for relative names (`${.lr}`).

    What those name in turn has to be in the tree already: filled in anew each time, it could grow without bound.
    """
    if not is_interpolated(node):
        return node
    if node.kind == "list":
        return dataclasses.replace(node, items=[fill_in(tree, item, key, schema, room) for item in node.items])
    if node.kind == "mapping":
        entries = {
            word: (line, fill_in(tree, value, key, schema, room)) for word, (line, value) in node.entries.items()
        }
        return dataclasses.replace(node, entries=entries)
    try:
        if not _PLAIN.fullmatch(node.text.strip()):  # a part of a text: null and true as configs have them
            text = _PLAIN.sub(lambda found: _word(_resolved(tree, found[0], key, room)), node.text)
            return dataclasses.replace(node, text=text)
        return _node_of(_resolved(tree, node.text, key, room), node)
    except OmegaConfError as failed:
        raise InterpolationError(_plainly(node.text, failed, schema), node.line) from failed


def _word(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _resolved(tree: Any, text: str, key: str, room: Room) -> Any:
    import omegaconf

    section = key.rpartition(".")[0]
    inner = omegaconf.OmegaConf.select(tree, section) if section else tree
    try:
        inner[_SCRATCH] = text
        value = inner[_SCRATCH]
        if omegaconf.OmegaConf.is_config(value):
            value = omegaconf.OmegaConf.to_container(value, resolve=True)
        room.take(value)
        return value
    except (omegaconf.errors.OmegaConfBaseException, RecursionError) as error:
        raise OmegaConfError(str(error) or "RecursionError") from error
    finally:
        del inner[_SCRATCH]


def _plainly(text: str, failed: Exception, schema: Schema) -> str:
    said = str(failed)
    if "recurs" in said.lower():
        return f"found {quote(text)}: the keys name each other in a circle; write one value itself"
    if said == "too long":
        return f"found {quote(text)}: the names of the config grow beyond {MOST_CHARACTERS} characters; write it out"
    unknown = re.search(r"Interpolation key '([^']*)' not found", said)
    if unknown:
        hint, _ = hint_for(unknown[1], "", schema, in_file=False)
        return f"found {quote(text)}: there is no key {show(unknown[1])}{hint}"
    return f"found {quote(text)}, expected ${{section.key}}"


def _raw(node: YamlNode) -> Any:
    if node.kind == "list":
        return [_raw(item) for item in node.items]
    if node.kind == "mapping":
        return {word: _raw(value) for word, (_, value) in node.entries.items()}
    return None if is_null(node) else node.text


def _plain(value: Any) -> Any:
    """As OmegaConf holds it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value if value is None or isinstance(value, (bool, int, float, str, dict)) else str(value)


def _node_of(value: Any, written: YamlNode) -> YamlNode:
    """A value as if it had been written in the place of `written`."""
    if isinstance(value, list):
        return YamlNode("list", written.line, items=[_node_of(item, written) for item in value])
    if isinstance(value, dict):
        entries = {str(word): (written.line, _node_of(item, written)) for word, item in value.items()}
        return YamlNode("mapping", written.line, entries=entries)
    if value is None or isinstance(value, bool):
        return YamlNode("scalar", written.line, _word(value))
    quoted = isinstance(value, str) and (value == "" or value.lower() in ("null", "true", "false", "~"))
    return YamlNode("scalar", written.line, str(value), quoted=quoted)

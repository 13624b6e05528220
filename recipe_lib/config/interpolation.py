"""`${section.key}` in a value: the value of another key, filled in by OmegaConf once all files and overrides are read.

Names are those of the config's own keys, also relative (`${.lr}`). Resolvers, environment variables among them, are
refused: what a config means is to be read in its files.
"""

import dataclasses
import functools
import re
from typing import Any

from recipe_lib.config.hints import hint_for
from recipe_lib.config.keys import Schema
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import quote, show
from recipe_lib.config.values import is_null

_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")
_NAME = re.compile(r"\$\{\s*([A-Za-z_]\w*(?:\.\w+|\[\w+\])*)\s*\}")
_PLAIN = re.compile(r"\$\{[^${}]*\}")
_SCRATCH = "value being filled in"


def is_interpolated(node: YamlNode) -> bool:
    """Whether a value, or a part of it, names another key."""
    inner = [*node.items, *(value for _, value in node.entries.values())]
    return (node.kind == "scalar" and "${" in node.text) or any(is_interpolated(part) for part in inner)


def names_in(node: YamlNode) -> set[str]:
    """The keys that a value names, but for relative ones."""
    inner = [*node.items, *(value for _, value in node.entries.values())]
    return set(_NAME.findall(node.text)).union(*(names_in(part) for part in inner))


class OmegaConfError(Exception):
    """OmegaConf's own complaint."""


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


def fill_in(tree: Any, node: YamlNode, key: str, schema: Schema) -> YamlNode:
    """The node with the values of the keys that it names. key: whose value it is, for relative names (`${.lr}`)."""
    if not is_interpolated(node):
        return node
    if node.kind == "list":
        return dataclasses.replace(node, items=[fill_in(tree, item, key, schema) for item in node.items])
    if node.kind == "mapping":
        entries = {word: (line, fill_in(tree, value, key, schema)) for word, (line, value) in node.entries.items()}
        return dataclasses.replace(node, entries=entries)
    try:
        if not _PLAIN.fullmatch(node.text.strip()):  # a part of a text: null and true as configs have them
            text = _PLAIN.sub(lambda found: _word(_resolved(tree, found[0], key)), node.text)
            return dataclasses.replace(node, text=text if "${" not in text else _resolved(tree, text, key))
        return _node_of(_resolved(tree, node.text, key), node)
    except OmegaConfError as failed:
        raise InterpolationError(_plainly(node.text, failed, schema), node.line) from failed


def _word(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _resolved(tree: Any, text: str, key: str) -> Any:
    import omegaconf

    section = key.rpartition(".")[0]
    inner = omegaconf.OmegaConf.select(tree, section) if section else tree
    try:
        inner[_SCRATCH] = text
        value = inner[_SCRATCH]
        return omegaconf.OmegaConf.to_container(value, resolve=True) if omegaconf.OmegaConf.is_config(value) else value
    except (omegaconf.errors.OmegaConfBaseException, RecursionError) as error:
        raise OmegaConfError(str(error) or "RecursionError") from error
    finally:
        del inner[_SCRATCH]


def _plainly(text: str, failed: Exception, schema: Schema) -> str:
    said = str(failed)
    if "recurs" in said.lower():
        return f"found {quote(text)}: the keys name each other in a circle; write one value itself"
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

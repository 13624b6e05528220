"""YAML as a tree of text with line numbers; what a value means is decided later, by the type of its
key.

Reading by type ends YAML's surprises (`1e-5` is a number where one is expected, `on` is text where
text is). Tags, anchors, aliases, duplicate keys and a second document are refused: none has a use
in a config, and each has let a config run code, grow without bound or hide a value.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import open_regular

MAX_BYTES = 1024**2
MAX_DEPTH = 20

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")

# What a parser complains of (both of PyYAML's parsers) -> what to look for.
_PLAIN_WORDS = (
    (
        "mapping values are not allowed",
        "a second `: ` in a value, or a line indented too far; quote text with `: `",
    ),
    (
        "could not find expected ':'",
        "a key without `: ` after it, or a quote or bracket that is not closed",
    ),
    ("while scanning a quoted scalar", "a quote is not closed"),
    ("flow sequence", "a list `[...]` is not closed, or lacks a comma"),
    ("flow mapping", "a mapping `{...}` is not closed, or lacks a comma"),
    ("flow node", "a list or mapping with an empty place; put the value in quotes"),
    ("block mapping", "the indentation does not fit the lines above"),
    ("block collection", "the indentation does not fit the lines above"),
    ("cannot start any token", "a value that begins with a special letter; put it in quotes"),
    (
        "<document start>",
        "the indentation does not fit the lines above, or text follows a closed value",
    ),
    ("escape", "an unknown escape after a backslash; use single quotes"),
)


@dataclass
class YamlNode:
    """A value as written. kind: `scalar`, `list`, `mapping`, or `broken` (already reported, to be
    skipped).
    """

    kind: str
    line: int
    text: str = ""
    quoted: bool = False
    items: list["YamlNode"] = field(default_factory=list)
    entries: dict[str, tuple[int, "YamlNode"]] = field(
        default_factory=dict
    )  # key -> (its line, its value)

    @property
    def empty(self) -> bool:
        """Nothing was written."""
        return self.kind == "scalar" and not self.text and not self.quoted

    @property
    def is_interpolated(self) -> bool:
        """Whether it, or a part of it, names another key."""
        return any("${" in text for text in self.texts())

    def inner(self) -> list["YamlNode"]:
        """Return what it holds."""
        return [*self.items, *(value for _, value in self.entries.values())]

    def texts(self) -> Iterator[str]:
        """Yield the text of it, or of all that it holds, at any depth."""
        yield self.text
        for node in self.inner():
            yield from node.texts()


@dataclass
class YamlDocument:
    """The top of a file or a value; faults are (line, what is wrong)."""

    top: YamlNode
    faults: list[tuple[int, str]]


def read_file(path: Path, shown: str) -> YamlDocument:
    """Reads a config file. shown: its name in errors. Raises ConfigError if it is no text or no
    YAML at all.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{shown}: larger than 1 MiB; a config holds a few dozen lines (is this a data file?)"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{shown}:{line}: not UTF-8 text: found the byte 0x{data[error.start]:02x}; save the"
            " file as UTF-8"
        ) from error
    try:
        return parse(text)
    except YamlError as fault:
        raise ConfigError(f"{shown}:{fault.line}: {fault}") from fault


class YamlError(Exception):
    """Not YAML; `line` counts from 1."""

    def __init__(self, line: int, what: str) -> None:
        self.line = line
        super().__init__(what)


def parse(text: str) -> YamlDocument:
    """Text to a tree; YamlError where it stops being YAML."""
    control = _CONTROL.search(text)
    if control:
        line = text.count("\n", 0, control.start()) + 1
        raise YamlError(
            line, f"not valid YAML: found the control character 0x{ord(control[0]):02x}; remove it"
        )
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return _Builder(iter(yaml.parse(text, Loader=loader))).document()
    except yaml.MarkedYAMLError as error:
        raise _plainly(error, text) from error
    except yaml.YAMLError as error:
        raise YamlError(1, f"not valid YAML: {show(str(error))}") from error


def _plainly(error: Any, text: str) -> YamlError:
    """A parser's error in plain words, at the line a user has to look at."""
    said = f"{error.context or ''} {error.problem or ''}"
    if "flow node" in said and (opened := _open_bracket(text)):
        what = (
            "a list `[...]`"
            if isinstance(opened, yaml.FlowSequenceStartToken)
            else "a mapping `{...}`"
        )
        return YamlError(
            opened.start_mark.line + 1, f"not valid YAML: {what} is not closed, or lacks a comma"
        )
    unclosed = any(sign in said for sign in ("quoted scalar", "flow ", "simple key"))
    mark = (error.context_mark if unclosed else None) or error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.split("\n")
    at = lines[min(line, len(lines)) - 1]
    if "\t" in at[: len(at) - len(at.lstrip())]:
        return YamlError(line, "not valid YAML: indented with a tab; use spaces")
    if "${" in at and "flow " in said:
        return YamlError(
            line, "not valid YAML: inside a list or mapping ${...} has to be in quotes"
        )
    for sign, words in _PLAIN_WORDS:
        if sign in said:
            return YamlError(line, f"not valid YAML: {words}")
    return YamlError(line, f"not valid YAML: {show(str(error.problem))}")


def _open_bracket(text: str) -> Any:
    """The token of the innermost bracket that is still open where the text ends; None if there is
    none.
    """
    opened: list[Any] = []
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                opened.append(token)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken) and opened:
                opened.pop()
    except yaml.YAMLError:
        return None
    return opened[-1] if opened else None


class _Builder:
    """Builds the tree from parser events, one at a time, so that depth is bounded before memory is
    taken.
    """

    def __init__(self, events: Iterator[Any]) -> None:
        self.events = events
        self.faults: list[tuple[int, str]] = []

    def document(self) -> YamlDocument:
        top: YamlNode | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and top is not None:
                self.faults.append(
                    (
                        _line(event),
                        "a second document begins here (`---`); a config is one document",
                    )
                )
                break
            if isinstance(event, yaml.NodeEvent):
                top = self.node(event, 1, "")
        return YamlDocument(top or YamlNode("scalar", 1), self.faults)

    def node(self, event: Any, depth: int, key: str) -> YamlNode:
        """The value that begins with this event. key: its dotted name, empty at the top and for a
        key itself.
        """
        line = _line(event)
        if depth > MAX_DEPTH:
            raise YamlError(
                line, f"nested more than {MAX_DEPTH} deep; a config has sections of keys"
            )
        if isinstance(event, yaml.AliasEvent):
            self.refuse(
                line,
                key,
                f"found the alias *{event.anchor}; aliases are refused, write the value again",
            )
            return YamlNode("broken", line)
        if event.anchor:
            self.refuse(
                line, key, f"found the anchor &{event.anchor}; anchors are refused, remove it"
            )
        if event.tag:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            self.refuse(line, key, f"found the tag {show(tag)}; tags are refused, remove it")
        node = self.content(event, line, depth, key)
        return YamlNode("broken", line) if event.anchor or event.tag else node

    def refuse(self, line: int, key: str, what: str) -> None:
        self.faults.append((line, f"{show(key)}: {what}" if key else what))

    def content(self, event: Any, line: int, depth: int, name: str) -> YamlNode:
        if isinstance(event, yaml.ScalarEvent):
            return YamlNode("scalar", line, event.value, quoted=not event.implicit[0])
        if isinstance(event, yaml.SequenceStartEvent):
            node = YamlNode("list", line)
            for inner in self.events:
                if isinstance(inner, yaml.SequenceEndEvent):
                    break
                node.items.append(
                    self.node(inner, depth + 1, f"{name}[{len(node.items)}]" if name else "")
                )
            return node
        node = YamlNode("mapping", line)
        for inner in self.events:
            if isinstance(inner, yaml.MappingEndEvent):
                break
            key = self.node(inner, depth + 1, name)
            full_name = f"{name}.{key.text}" if name else key.text
            value = self.node(next(self.events), depth + 1, full_name)
            self.enter(node, key, value, full_name)
        return node

    def enter(self, mapping: YamlNode, key: YamlNode, value: YamlNode, full_name: str) -> None:
        if key.kind == "broken" or (key.text == "<<" and value.kind == "broken"):
            return
        if key.kind != "scalar":
            self.faults.append((key.line, f"found a {key.kind} as a key; a key is a word"))
        elif key.text in mapping.entries:
            first = mapping.entries[key.text][0]
            self.refuse(
                key.line, full_name, f"set twice, first on line {first}; remove one of the two"
            )
            mapping.entries[key.text] = (first, YamlNode("broken", key.line))
        else:
            mapping.entries[key.text] = (key.line, value)


def _line(event: Any) -> int:
    return event.start_mark.line + 1

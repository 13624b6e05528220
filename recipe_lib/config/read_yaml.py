"""Read YAML into a tree of texts with line numbers: `read_file` a config, `parse` an override.

What a value means is decided later, by the type of its key (`convert_values`). That ends YAML's
surprises: `1e-5` is a number where one is expected, `on` is text where text is. Tags, anchors,
aliases, duplicate keys and a second document are refused: none has a use in a config, and each has
let a config run code, grow without bound or hide a value.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import open_regular

MAX_BYTES = 1024**2  # of a file
# Bounds the recursion of the builder and of all that walks the tree.
MAX_DEPTH = 20

# Characters that YAML allows nowhere. The parser says so too, but not at which line.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")

# (part of an error of PyYAML's or libyaml's parser, what to look for); the first that fits counts.
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
    """A value as written."""

    # `scalar`, `list`, `mapping`, or `broken`: its fault is reported already, it is to be skipped.
    kind: str
    # Where the value begins, counted from 1.
    line: int
    # Of a scalar, without its quotes.
    text: str = ""
    # Whether a scalar has quotes, or is a block (`|`, `>`): it is text, whatever it looks like.
    quoted: bool = False
    # Of a list.
    items: list["YamlNode"] = field(default_factory=list)
    # Of a mapping: key -> (its line, its value).
    entries: dict[str, tuple[int, "YamlNode"]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.kind == "scalar" and not self.text and not self.quoted

    @property
    def has_reference(self) -> bool:
        return any("${" in text for text in self.collect_texts())

    def list_inner(self) -> list["YamlNode"]:
        return [*self.items, *(value for _, value in self.entries.values())]

    def collect_texts(self) -> Iterator[str]:
        yield self.text
        for node in self.list_inner():
            yield from node.collect_texts()


@dataclass
class YamlDocument:
    """The tree of a file or of an override's value, with its faults."""

    # An empty scalar for an empty text.
    top: YamlNode
    # (line, fault) of what is YAML but refused in a config, such as an alias.
    faults: list[tuple[int, str]]


def read_file(path: Path, shown: str) -> YamlDocument:
    """Read a config file.

    shown: its name in errors. Raises ConfigError if it cannot be read, is larger than MAX_BYTES, or
    is no UTF-8 text or no YAML at all. Lesser faults are in the document.
    """
    try:
        # One byte more than is allowed tells that the file is larger.
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{shown}: larger than 1 MiB; a config holds a few dozen lines (is this a data file?)"
        )
    try:
        text = data.decode("utf-8-sig")  # with or without a byte order mark
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
    """A text is not YAML; `line` counts from 1."""

    def __init__(self, line: int, fault: str) -> None:
        self.line = line
        super().__init__(fault)


def parse(text: str) -> YamlDocument:
    """Return the tree of a text. Raises YamlError, with the line, if it is not YAML."""
    control = _CONTROL.search(text)
    if control:
        raise YamlError(
            text.count("\n", 0, control.start()) + 1,
            f"not valid YAML: found the control character 0x{ord(control[0]):02x}; remove it",
        )
    # libyaml is four times as fast; PyYAML may have been built without it.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return _Builder(iter(yaml.parse(text, Loader=loader))).build_document()
    except yaml.MarkedYAMLError as error:
        raise _explain_error(error, text) from error
    except yaml.YAMLError as error:
        raise YamlError(1, f"not valid YAML: {show(str(error))}") from error


def _explain_error(error: Any, text: str) -> YamlError:
    # PyYAML says what it was doing (`context`) and what is wrong (`problem`), each with a place.
    message = f"{error.context or ''} {error.problem or ''}"
    opened = _find_open_bracket(text) if "flow node" in message else None
    if opened is not None:
        is_list = isinstance(opened, yaml.FlowSequenceStartToken)
        kind = "a list `[...]`" if is_list else "a mapping `{...}`"
        line = opened.start_mark.line + 1
        return YamlError(line, f"not valid YAML: {kind} is not closed, or lacks a comma")
    # What is not closed is told where it begins, not where the parser gave up.
    unclosed = any(sign in message for sign in ("quoted scalar", "flow ", "simple key"))
    mark = (error.context_mark if unclosed else None) or error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.split("\n")
    faulty_line = lines[min(line, len(lines)) - 1]
    if "\t" in faulty_line[: len(faulty_line) - len(faulty_line.lstrip())]:
        return YamlError(line, "not valid YAML: indented with a tab; use spaces")
    if "${" in faulty_line and "flow " in message:
        # The brace of `${` opens a mapping.
        return YamlError(
            line, "not valid YAML: inside a list or mapping ${...} has to be in quotes"
        )
    for sign, words in _PLAIN_WORDS:
        if sign in message:
            return YamlError(line, f"not valid YAML: {words}")
    return YamlError(line, f"not valid YAML: {show(str(error.problem))}")


def _find_open_bracket(text: str) -> Any:
    """Return the token of the innermost bracket that is open where the text ends.

    None: every bracket is closed, or the text cannot be divided into tokens.
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
    """Build the tree from parser events, one at a time.

    So the depth is bounded before memory is taken, which PyYAML's own composer does not do.
    """

    def __init__(self, events: Iterator[Any]) -> None:
        self.events = events  # one iterator for all methods: each goes on where another stopped
        self.faults: list[tuple[int, str]] = []

    def build_document(self) -> YamlDocument:
        # Stream and document marks among the events are passed over, but for a second document.
        top: YamlNode | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and top is not None:
                self.refuse(
                    event.start_mark.line + 1,
                    "",
                    "a second document begins here (`---`); a config is one document",
                )
                break
            if isinstance(event, yaml.NodeEvent):
                top = self.build_node(event, 1, "")
        return YamlDocument(top or YamlNode("scalar", 1), self.faults)

    def build_node(self, event: Any, depth: int, name: str) -> YamlNode:
        """Return the value that begins with this event. Raises YamlError if it is nested too deep.

        depth: 1 for the whole document. name: of its key, dotted, for faults; empty at the top.
        """
        line = event.start_mark.line + 1  # the parser counts from 0
        if depth > MAX_DEPTH:
            raise YamlError(
                line, f"nested more than {MAX_DEPTH} deep; a config has sections of keys"
            )
        if isinstance(event, yaml.AliasEvent):
            self.refuse(
                line,
                name,
                f"found the alias *{event.anchor}; aliases are refused, write the value again",
            )
            return YamlNode("broken", line)
        if event.anchor:
            self.refuse(
                line, name, f"found the anchor &{event.anchor}; anchors are refused, remove it"
            )
        if event.tag:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            self.refuse(line, name, f"found the tag {show(tag)}; tags are refused, remove it")
        # Built even if refused: its events have to be taken, and may hold further faults.
        node = self.build_content(event, line=line, depth=depth, name=name)
        return YamlNode("broken", line) if event.anchor or event.tag else node

    def refuse(self, line: int, name: str, fault: str) -> None:
        """Note a fault. name: of the key, dotted; empty: the line needs none."""
        self.faults.append((line, f"{show(name)}: {fault}" if name else fault))

    def build_content(self, event: Any, line: int, depth: int, name: str) -> YamlNode:
        """Return a node without its tag and anchor, and take its events up to its end.

        The arguments are those of `build_node`.
        """
        if isinstance(event, yaml.ScalarEvent):
            # The first of `implicit` is True for a plain scalar alone.
            return YamlNode("scalar", line, event.value, quoted=not event.implicit[0])
        inner_events = takewhile(lambda e: not isinstance(e, yaml.CollectionEndEvent), self.events)
        if isinstance(event, yaml.SequenceStartEvent):
            node = YamlNode("list", line)
            for inner in inner_events:
                item_name = f"{name}[{len(node.items)}]" if name else ""
                node.items.append(self.build_node(inner, depth + 1, item_name))
            return node
        node = YamlNode("mapping", line)
        for inner in inner_events:
            key = self.build_node(inner, depth + 1, name)
            full_name = f"{name}.{key.text}" if name else key.text
            value = self.build_node(next(self.events), depth + 1, full_name)
            self.add_entry(node, key, value, full_name=full_name)
        return node

    def add_entry(self, mapping: YamlNode, key: YamlNode, value: YamlNode, full_name: str) -> None:
        # `<<: *defaults`: the alias is refused already, and `<<` alone would be an unknown key.
        if key.kind == "broken" or (key.text == "<<" and value.kind == "broken"):
            return
        if key.kind != "scalar":
            self.refuse(key.line, "", f"found a {key.kind} as a key; a key is a word")
        elif key.text in mapping.entries:
            first_line = mapping.entries[key.text][0]
            self.refuse(
                key.line, full_name, f"set twice, first on line {first_line}; remove one of the two"
            )
            # Which of the two is meant is not known.
            mapping.entries[key.text] = (first_line, YamlNode("broken", key.line))
        else:
            mapping.entries[key.text] = (key.line, value)

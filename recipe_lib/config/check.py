"""Compares what a file and a command line set with the schema, and gathers every fault instead of the first."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.hints import hint_for
from recipe_lib.config.interpolation import InterpolationError, check_form, fill_in, is_interpolated, names_in, tree_of
from recipe_lib.config.keys import Key, Schema, item_schema
from recipe_lib.config.read_yaml import YamlError, YamlNode, parse
from recipe_lib.config.suggest import show
from recipe_lib.config.values import MismatchError, convert, describe, expected, is_null

# Enough to correct a file in one go; a file of another kind is not answered with a thousand lines.
MAX_FAULTS = 50

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Setting:
    """A value that was set, and where: `configs/demo/full.yaml:7`, `command line` or `default`."""

    value: Any
    where: str


@dataclass(frozen=True)
class Pending:
    """A value that names other keys, and what `check_value` is called with once it is filled in."""

    node: YamlNode
    place: str
    where: str
    typed: bool


@dataclass
class Checked:
    """What sources and overrides came to.

    settings: dotted key -> what was set. pending: dotted key -> a value with `${key}` in it. doubtful: keys that a
    fault has touched; they keep their default here, so that no combination is judged by them. full: there are more
    faults than are kept.
    """

    schema: Schema
    settings: dict[str, Setting] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    full: bool = False

    def fault(self, place: str, name: str, what: str, *, doubt: bool = True) -> None:
        """Notes a fault, and unless `doubt` is false doubts its key (no name: nothing, the line says all)."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{place}: {show(name)}: {what}" if name else f"{place}: {what}")
        else:
            self.full = True
        if doubt and name:
            self.doubt(name)

    def doubt(self, name: str) -> None:
        """Marks a key, or all keys of a section."""
        prefix = f"{name}." if name else ""
        self.doubtful.update(key for key in self.schema.keys if key == name or key.startswith(prefix))

    def sort_by_line(self, file: str, start: int) -> None:
        """Puts the faults noted from `start` on, all of one file, in its order."""
        self.faults[start:] = sorted(
            self.faults[start:], key=lambda fault: int(fault.removeprefix(f"{file}:").partition(":")[0])
        )

    def all_faults(self) -> list[str]:
        """The lines to show."""
        more = [f"the first {MAX_FAULTS} faults are shown; there are more"] if self.full else []
        return [*self.faults, *more]

    def judged(self) -> set[str]:
        """The keys that no fault has touched."""
        return set(self.schema.keys) - self.doubtful

    def place_of(self, names: Iterable[str], otherwise: str) -> str:
        """Where the last of these keys was set in each file, and the command line, if one was set there."""
        last: dict[str, int] = {}
        for name in names:
            for place in self.settings[name].where.split(", ") if name in self.settings else ():
                file, _, line = place.rpartition(":")
                last[file] = max(last.get(file, 0), int(line) if file else 0)
        return (
            ", ".join(f"{file}:{line}" if file else COMMAND_LINE for file, line in sorted(last.items(), reverse=True))
            or otherwise
        )

    def set(self, name: str, value: Any, where: str) -> None:
        """Takes a value."""
        self.pending.pop(name, None)
        self.settings[name] = Setting(value, where)


def check_file(checked: Checked, top: YamlNode, file: str) -> None:
    """Checks the tree of a whole file. file: its name in errors."""
    if top.empty or top.kind == "broken":
        if top.kind == "broken":
            checked.doubt("")
        return
    if top.kind != "mapping":
        checked.fault(f"{file}:{top.line}", "", f"found {describe(top)}, expected lines of `key: value`")
        checked.doubt("")
        return
    check_section(checked, "", top, file)


def check_section(checked: Checked, section: str, node: YamlNode, file: str) -> None:
    """Checks the entries of a section, sections inside it too."""
    schema = checked.schema
    for word, (line, value) in node.entries.items():
        if checked.full:
            return
        name = f"{section}.{word}" if section else word
        place = f"{file}:{line}"
        if name in schema.sections and word:
            check_section_value(checked, name, value, place, file)
        elif name in schema.keys and "." not in word:
            check_value(checked, schema.keys[name], value, place)
        else:
            unknown_key(checked, place, name, section)


def check_section_value(checked: Checked, name: str, value: YamlNode, place: str, file: str) -> None:
    """What stands under a section's name."""
    if value.kind == "mapping":
        check_section(checked, name, value, file)
    elif value.kind == "broken":
        checked.doubt(name)
    elif not value.empty:
        inside = [child.removeprefix(f"{name}.") for child in checked.schema.children(name)]
        main = next((word for word in ("name", "kind", "path", "source") if word in inside), None)
        is_word = value.kind == "scalar" and not is_null(value)
        hint = f"; did you mean {name}.{main}?" if main and is_word else ""
        checked.fault(place, name, f"found {describe(value)}, expected a section of keys ({', '.join(inside)}){hint}")


def check_value(
    checked: Checked,
    key: Key,
    value: YamlNode,
    place: str,
    *,
    where: str = "",
    typed: bool = False,
    filled: bool = False,
) -> None:
    """Checks a key's value and takes it. where: how the setting is named later, if not by the place.

    A value that names other keys waits for `fill_pending`; filled: it has been there.
    """
    if not filled and is_interpolated(value):
        checked.pending[key.name] = Pending(value, place, where, typed)
        return
    if key.section_class is not None and value.kind == "list":
        check_items(checked, key, value, place, where, typed)
        return
    if _is_broken(value):
        checked.doubt(key.name)
        return
    try:
        checked.set(key.name, convert(value, key, typed=typed), where or place)
    except MismatchError as mismatch:
        checked.fault(place, "" if typed else key.name, str(mismatch))
        checked.doubt(key.name)


def fill_pending(checked: Checked) -> None:
    """Checks the values that name other keys, once all others are known."""
    if not checked.pending:
        return
    keys, waiting = checked.schema.keys, checked.pending
    for name, one in list(waiting.items()):
        try:
            check_form(one.node)
        except InterpolationError as fault:
            del waiting[name]
            checked.fault(one.place, "" if one.typed else name, str(fault))
    values = {name: key.default for name, key in keys.items() if not key.required}
    values |= {name: setting.value for name, setting in checked.settings.items()}
    tree = tree_of(values, {name: one.node for name, one in waiting.items()})
    for name, one in list(waiting.items()):
        try:
            if names_in(one.node) & checked.doubtful:
                raise MismatchError("")
            node = fill_in(tree, one.node, name)
            check_value(checked, keys[name], node, one.place, where=one.where, typed=one.typed, filled=True)
        except InterpolationError as fault:
            checked.fault(one.place, "" if one.typed else name, str(fault))
            checked.doubt(name)
        except MismatchError:
            checked.doubt(name)


def check_items(checked: Checked, key: Key, value: YamlNode, place: str, where: str, typed: bool) -> None:
    """Checks a list of sections and takes it if all are right; a fault names its own line and key inside."""
    items = []
    for number, node in enumerate(value.items):
        inner = Checked(item_schema(key, number))
        name = next(iter(inner.schema.sections))
        file = COMMAND_LINE if typed else place.rpartition(":")[0]
        line = f"{file}:{node.line}"
        if node.kind == "broken":
            inner.doubt(name)
        elif node.kind != "mapping":
            words = ", ".join(word.rpartition(".")[2] for word in inner.schema.keys)
            inner.fault(line, name, f"found {describe(node)}, expected a section of keys ({words})")
        else:
            check_section(inner, name, node, file)
            for inside in inner.schema.keys.values():
                if inside.required and inside.name not in inner.settings and inside.name not in inner.doubtful:
                    inner.fault(line, inside.name, f"is not set, expected {expected(inside)}")
        for fault in inner.faults:
            shown_at, _, what = fault.partition(": ")
            checked.fault(place if typed else shown_at, "", what)
        if inner.faults or inner.doubtful:
            checked.doubt(key.name)
        else:
            set_here = {word.rpartition(".")[2]: setting.value for word, setting in inner.settings.items()}
            items.append(inner.schema.config_class(**set_here))
    if key.name not in checked.doubtful:
        checked.set(key.name, items, where or place)


def check_required(checked: Checked, place: str) -> None:
    """Notes a fault for each key without a default that nothing has set."""
    for name, key in checked.schema.keys.items():
        if key.required and name not in checked.settings and name not in checked.doubtful:
            checked.fault(place, name, f"is not set, expected {expected(key)}")


def unknown_key(checked: Checked, place: str, name: str, section: str, *, typed: bool = False) -> None:
    """Notes a key that the schema does not have, with the nearest that it has."""
    hint, meant = hint_for(name, section, checked.schema, in_file=not typed)
    checked.fault(place, "" if typed else (name or "''"), f"unknown key{hint}", doubt=False)
    for key in meant:
        checked.doubt(key)


def _is_broken(node: YamlNode) -> bool:
    inner = [*node.items, *(value for _, value in node.entries.values())]
    return node.kind == "broken" or any(_is_broken(part) for part in inner)


_ITEM = re.compile(r"(.+)\[([0-9]{1,4})\]\.([^.\[\]]+)")
_OPENS_YAML = ("[", "{", '"', "'")


def apply_overrides(checked: Checked, overrides: Sequence[str]) -> None:
    """Checks each override and takes its value; later ones win."""
    for override in overrides:
        if checked.full:
            return
        place = f"{COMMAND_LINE}: {show(override)}"
        if override.startswith("~"):
            _reset(checked, override[1:], place)
        elif "=" not in override:
            checked.fault(place, "", _how_to_write(override, checked.schema))
        else:
            name, _, text = override.partition("=")
            _set(checked, name, text, place)


def _set(checked: Checked, name: str, text: str, place: str) -> None:
    schema = checked.schema
    try:
        value = _read_value(checked, text, place)
    except YamlError as fault:
        checked.fault(place, "", str(fault))
        return
    outer = schema.mapping_of(name)
    if is_interpolated(value) and (outer or _ITEM.fullmatch(name)):
        checked.fault(
            place, "", "a part of a value cannot name other keys here; write it in a file, or the value itself"
        )
        return
    if name in schema.sections and name:
        _set_section(checked, name, value, place)
    elif name in schema.keys:
        check_value(checked, schema.keys[name], value, place, where=COMMAND_LINE, typed=True)
    elif item := _ITEM.fullmatch(name):
        _set_in_item(checked, item, value, place)
    elif outer:
        _set_entry(checked, outer, name.removeprefix(f"{outer}."), value, place)
    elif name.startswith(("-", "+")) and name.lstrip("-+"):
        checked.fault(place, "", f"overrides have no {name[0]} in front; write {show(name.lstrip('-+'))}={show(text)}")
    else:
        section = name.rpartition(".")[0]
        unknown_key(checked, place, name, section if section in schema.sections else "", typed=True)


def _read_value(checked: Checked, text: str, place: str) -> YamlNode:
    """A list, mapping or quoted text is read as YAML; all else is one word as it stands, `#`, `*` and `: ` included."""
    if not text.startswith(_OPENS_YAML):
        return YamlNode("scalar", 1, text.strip())
    document = parse(text)
    for _, what in document.faults:
        checked.fault(place, "", what)
    return document.top if not document.faults else YamlNode("broken", 1)


def _set_section(checked: Checked, name: str, value: YamlNode, place: str) -> None:
    """`data={source: x}` sets keys of a section one by one; the others stay as they are."""
    if value.kind == "broken":
        checked.doubt(name)
    elif value.kind != "mapping":
        keys = [key for key in checked.schema.children(name) if key in checked.schema.keys]
        checked.fault(place, "", f"found {describe(value)}, expected keys of the section, as in {keys[0]}=VALUE")
        checked.doubt(name)
    else:
        inner = Checked(checked.schema)
        check_section(inner, name, value, COMMAND_LINE)
        for fault in inner.faults:
            checked.fault(place, "", fault.partition(": ")[2])
        for key, setting in inner.settings.items():
            checked.set(key, setting.value, COMMAND_LINE)
        for key, one in inner.pending.items():
            checked.pending[key] = dataclasses.replace(one, place=place, where=COMMAND_LINE)
        checked.doubtful |= inner.doubtful


def _set_entry(checked: Checked, outer: str, inner: str, value: YamlNode, place: str) -> None:
    """`data.columns.instruction=question` adds one entry to a mapping."""
    before = checked.settings.get(outer)
    check_value(
        checked,
        checked.schema.keys[outer],
        YamlNode("mapping", 1, entries={inner: (1, value)}),
        place,
        where=COMMAND_LINE,
        typed=True,
    )
    after = checked.settings.get(outer)
    if after is not before and after is not None:
        earlier = before.value if before else checked.schema.keys[outer].default
        where = f"{before.where}, {COMMAND_LINE}" if before and before.where != COMMAND_LINE else COMMAND_LINE
        checked.set(outer, {**(earlier or {}), **after.value}, where)


def _set_in_item(checked: Checked, item: re.Match[str], value: YamlNode, place: str) -> None:
    """`data.sources[1].weight=2` sets one key of one section of a list."""
    name, number, word = item[1], int(item[2]), item[3]
    key = checked.schema.keys.get(name)
    if key is None or key.section_class is None:
        unknown_key(checked, place, item[0], "", typed=True)
        return
    before = checked.settings.get(name)
    items = list(before.value if before else key.default)
    inner = Checked(item_schema(key, number))
    if number >= len(items):
        if name not in checked.doubtful:
            has = f"the last one is {name}[{len(items) - 1}]" if items else "the list is empty"
            checked.fault(place, "", f"{name}[{number}] is not there, {has}; write {name}=[...] for another list")
        return
    if f"{name}[{number}].{word}" in inner.schema.keys:
        check_value(inner, inner.schema.keys[f"{name}[{number}].{word}"], value, place, where=COMMAND_LINE, typed=True)
    else:
        unknown_key(inner, place, item[0], f"{name}[{number}]", typed=True)
    checked.faults += inner.faults
    if inner.faults:
        checked.doubt(name)
        return
    for setting in inner.settings.values():
        items[number] = dataclasses.replace(items[number], **{word: setting.value})
    where = f"{before.where}, {COMMAND_LINE}" if before and COMMAND_LINE not in before.where else COMMAND_LINE
    checked.set(name, items, where)


def _reset(checked: Checked, name: str, place: str) -> None:
    """`~key` and `~section`: back to the schema's default."""
    schema = checked.schema
    if "=" in name:
        bare = show(name.partition("=")[0])
        checked.fault(place, "", f"~ goes back to the default and takes no value; write ~{bare}")
    elif name not in schema.keys and (name not in schema.sections or not name):
        section = name.rpartition(".")[0]
        unknown_key(checked, place, name, section if section in schema.sections else "", typed=True)
    else:
        for values in (checked.settings, checked.pending):
            for key in [key for key in values if key == name or key.startswith(f"{name}.")]:
                del values[key]


def _how_to_write(override: str, schema: Schema) -> str:
    name = override.lstrip("-+").rstrip(":")
    if name in schema.keys and override.lstrip("-+") == name:
        return f"a value is missing; write {name}=VALUE (or ~{name} for the default)"
    if ": " in override and override.partition(": ")[0] in schema.keys:
        key, _, value = override.partition(": ")
        return f"expected key=value; write {show(key)}={show(value)}"
    return "expected key=value or ~key"

"""`key=value`, `section.key=value`, `list[1].key=value` and `~key`: overrides of a config, checked and taken."""

import dataclasses
import re
from collections.abc import Sequence

from recipe_lib.config.check import COMMAND_LINE, Checked, check_section, check_value, unknown_key
from recipe_lib.config.interpolation import is_interpolated
from recipe_lib.config.keys import Schema, item_schema
from recipe_lib.config.read_yaml import YamlError, YamlNode, parse
from recipe_lib.config.suggest import show
from recipe_lib.config.values import describe

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
        unknown_key(checked, place, name, section if section in schema.sections else "", value, typed=True)


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
    if override.endswith((".yaml", ".yml")):
        return f"expected key=value or ~key; a further config is --config {show(override)}"
    return "expected key=value or ~key"

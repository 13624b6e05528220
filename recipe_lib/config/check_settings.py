"""Compares what a file and a command line set with the schema, and gathers every fault instead of
the first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from graphlib import CycleError
from typing import Any

from recipe_lib.config.aliases import (
    ANSWERS,
    GENERIC,
    KEY_ALIASES,
    NOTHING_LIKE_IT,
    OF_PAIRS,
    SECTION_ALIASES,
)
from recipe_lib.config.convert_values import (
    MismatchError,
    convert,
    describe_expected,
    describe_node,
)
from recipe_lib.config.flat_schema import Key, Schema, build_item_schema, read_schema
from recipe_lib.config.interpolation import (
    IN_A_CIRCLE,
    InterpolationError,
    NamedValues,
    are_related,
    format_word,
    list_names,
    order_keys,
)
from recipe_lib.config.paths import RECIPE_CONFIGS
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.suggest import find_nearest, quote, show

# Enough to correct a file in one go; a file of another kind is not answered with a thousand lines.
MAX_FAULTS = 50

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Setting:
    """A value that was set, and where: `configs/demo/full.yaml:7`, `command line` or `default`."""

    value: Any
    where: str


@dataclass(frozen=True)
class Source:
    """Where values are from. name: of a file, as in errors, or COMMAND_LINE. override: as in
    errors.
    """

    name: str
    override: str = ""

    def at(self, line: int) -> str:
        """Return how an error begins: `configs/demo/full.yaml:7`, `command line: seed=x`."""
        return self.override or f"{self.name}:{line}"

    def where(self, line: int) -> str:
        """Return how a setting's place is named."""
        return self.name if self.override else f"{self.name}:{line}"


@dataclass(frozen=True)
class Pending:
    """A value that names other keys, and what `check_value` is called with once it is filled in."""

    node: YamlNode
    source: Source
    line: int
    typed: bool


@dataclass
class CollectedSettings:
    """What sources and overrides came to.

    settings: dotted key -> what was set. pending: dotted key -> a value with `${key}` in it.
    doubtful: keys that a fault has touched; they keep their default here, so that no combination is
    judged by them. full: there are more faults than are kept.
    """

    schema: Schema
    settings: dict[str, Setting] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    full: bool = False

    def fault(self, place: str, name: str, what: str, *, doubt: bool = True) -> None:
        """Notes a fault, and unless `doubt` is false doubts its key (no name: nothing, the line
        says all).
        """
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{place}: {show(name)}: {what}" if name else f"{place}: {what}")
        else:
            self.full = True
        if doubt and name:
            self.doubt(name)

    def doubt(self, name: str) -> None:
        """Marks a key, or all keys of a section."""
        prefix = f"{name}." if name else ""
        self.doubtful.update(
            key for key in self.schema.keys if key == name or key.startswith(prefix)
        )

    def sort_by_line(self, file: str, start: int) -> None:
        """Puts the faults noted from `start` on, all of one file, in its order."""
        self.faults[start:] = sorted(
            self.faults[start:],
            key=lambda fault: int(fault.removeprefix(f"{file}:").partition(":")[0]),
        )

    def all_faults(self) -> list[str]:
        """The lines to show."""
        more = [f"the first {MAX_FAULTS} faults are shown; there are more"] if self.full else []
        return [*self.faults, *more]

    def judged(self) -> set[str]:
        """The keys that no fault has touched."""
        return set(self.schema.keys) - self.doubtful

    def place_of(self, names: Iterable[str], otherwise: str) -> str:
        """Where the last of these keys was set in each file, and the command line, if one was set
        there.
        """
        last: dict[str, int] = {}
        for name in names:
            for place in self.settings[name].where.split(", ") if name in self.settings else ():
                file, _, line = place.rpartition(":")
                last[file] = max(last.get(file, 0), int(line) if file else 0)
        return (
            ", ".join(
                f"{file}:{line}" if file else COMMAND_LINE
                for file, line in sorted(last.items(), reverse=True)
            )
            or otherwise
        )

    def set(self, name: str, value: Any, where: str) -> None:
        """Takes a value."""
        self.pending.pop(name, None)
        self.settings[name] = Setting(value, where)


def check_file(checked: CollectedSettings, top: YamlNode, file: Source) -> None:
    """Checks the tree of a whole file."""
    if top.empty or top.kind == "broken":
        if top.kind == "broken":
            checked.doubt("")
        return
    if top.kind != "mapping":
        checked.fault(
            file.at(top.line), "", f"found {describe_node(top)}, expected lines of `key: value`"
        )
        checked.doubt("")
        return
    check_section(checked, "", top, file)


def check_section(checked: CollectedSettings, section: str, node: YamlNode, source: Source) -> None:
    """Checks the entries of a section, sections inside it too."""
    schema = checked.schema
    for word, (line, value) in node.entries.items():
        if checked.full:
            return
        name = f"{section}.{word}" if section else word
        if name in schema.sections and word:
            check_section_value(checked, name, value, source, line)
        elif name in schema.keys and "." not in word:
            check_value(checked, schema.keys[name], value, source, line)
        else:
            report_unknown_key(checked, source, line, name, value)


def check_section_value(
    checked: CollectedSettings, name: str, value: YamlNode, source: Source, line: int
) -> None:
    """What stands under a section's name."""
    if value.kind == "mapping":
        check_section(checked, name, value, source)
    elif value.kind == "broken":
        checked.doubt(name)
    elif not value.empty:
        inside = [child.removeprefix(f"{name}.") for child in checked.schema.children(name)]
        what = f"found {describe_node(value)}, expected a section of keys ({', '.join(inside)})"
        checked.fault(source.at(line), name, what)


def check_value(
    checked: CollectedSettings,
    key: Key,
    value: YamlNode,
    source: Source,
    line: int = 1,
    *,
    typed: bool = False,
    written: str | None = None,
) -> None:
    """Checks a key's value and takes it. typed: it is an override's own, whose text says the key.

    A value that names other keys waits for `fill_pending`, which gives it filled in, and as it was
    written.
    """
    if written is None and value.is_interpolated:
        checked.pending[key.name] = Pending(value, source, line, typed)
        return
    if key.section_class is not None and value.kind == "list":
        check_items(checked, key, value, source, line)
        return
    if _is_broken(value):
        checked.doubt(key.name)
        return
    try:
        checked.set(
            key.name, convert(value, key, typed=typed or written is not None), source.where(line)
        )
    except MismatchError as mismatch:
        what = f"found {quote(written)}, which is " if written else "found "
        checked.fault(
            source.at(line), "" if typed else key.name, str(mismatch).replace("found ", what, 1)
        )
        checked.doubt(key.name)


def fill_pending(checked: CollectedSettings) -> None:
    """Check the values that name other keys, each after those that it names."""
    if not checked.pending:
        return
    schema, pending = checked.schema, dict(checked.pending)
    names = {key: list_names(one.node.texts(), key) for key, one in pending.items()}
    order: list[str] | None = None
    while order is None:
        try:
            order = order_keys(names)
        except CycleError as error:
            circle = set(error.args[1])
            last = [key for key in names if key in circle][-1]
            text = next(text for text in pending[last].node.texts() if "${" in text)
            what = f"found {quote(text)}{IN_A_CIRCLE}"
            _refuse_pending(checked, last, pending[last], what, pending[last].node.line)
            for key in circle:  # the faults of all other keys are told as well
                checked.doubt(key)
                checked.pending.pop(key)
                names.pop(key)
    values = {name: key.default for name, key in schema.keys.items() if name not in pending}
    values |= {name: setting.value for name, setting in checked.settings.items() if name in values}
    named = NamedValues(
        values, lambda name: f": there is no key {show(name)}{find_hint(name, schema)[0]}"
    )
    for key in order:
        one = checked.pending.pop(key)
        if any(are_related(name, other) for name in names[key] for other in checked.doubtful):
            checked.doubt(key)  # the fault is told there
            continue
        try:
            node = _fill_node(one.node, key, named)
        except InterpolationError as fault:
            _refuse_pending(checked, key, one, str(fault), fault.line)
            continue
        check_value(
            checked,
            schema.keys[key],
            node,
            one.source,
            one.line,
            typed=one.typed,
            written=one.node.text,
        )
        if key in checked.settings:
            named.put(key, checked.settings[key].value)


def _refuse_pending(
    checked: CollectedSettings, key: str, one: Pending, what: str, line: int
) -> None:
    checked.fault(one.source.at(line), "" if one.typed else key, what)
    checked.doubt(key)


def _fill_node(node: YamlNode, key: str, named: NamedValues) -> YamlNode:
    """Return a value of a file with those of the keys that it names, as if they had been written
    there.
    """
    if node.kind == "list":
        return replace(node, items=[_fill_node(item, key, named) for item in node.items])
    if node.kind == "mapping":
        entries = {
            word: (line, _fill_node(inner, key, named))
            for word, (line, inner) in node.entries.items()
        }
        return replace(node, entries=entries)
    if not node.is_interpolated:
        return node
    try:
        return _write_node(named.fill(node.text, key), node.line)
    except InterpolationError as fault:
        fault.line = node.line
        raise


def _write_node(value: Any, line: int) -> YamlNode:
    if isinstance(value, list):
        return YamlNode("list", line, items=[_write_node(item, line) for item in value])
    if isinstance(value, dict):
        return YamlNode(
            "mapping",
            line,
            entries={word: (line, _write_node(item, line)) for word, item in value.items()},
        )
    quoted = isinstance(value, str) and (
        value == "" or value.lower() in ("null", "true", "false", "~")
    )
    return YamlNode("scalar", line, format_word(value), quoted=quoted)


def check_items(
    checked: CollectedSettings, key: Key, value: YamlNode, source: Source, line: int
) -> None:
    """Checks a list of sections and takes it if all are right; a fault names its own line and key
    inside.
    """
    items = []
    for number, node in enumerate(value.items):
        inner = CollectedSettings(build_item_schema(key, number), faults=checked.faults)
        name = next(iter(inner.schema.sections))
        before = len(checked.faults)
        if node.kind == "broken":
            inner.doubt(name)
        elif node.kind != "mapping":
            words = ", ".join(word.rpartition(".")[2] for word in inner.schema.keys)
            inner.fault(
                source.at(node.line),
                name,
                f"found {describe_node(node)}, expected a section of keys ({words})",
            )
        else:
            check_section(inner, name, node, source)
            check_required(inner, source.at(node.line))
        checked.full |= inner.full
        if len(checked.faults) > before or inner.doubtful:
            checked.doubt(key.name)
        else:
            set_here = {
                word.rpartition(".")[2]: setting.value for word, setting in inner.settings.items()
            }
            items.append(inner.schema.config_class(**set_here))
    if key.name not in checked.doubtful:
        checked.set(key.name, items, source.where(line))


def check_required(checked: CollectedSettings, place: str) -> None:
    """Notes a fault for each key without a default that nothing has set."""
    for name, key in checked.schema.keys.items():
        if key.required and name not in checked.settings and name not in checked.doubtful:
            checked.fault(place, name, f"is not set, expected {describe_expected(key)}")


def report_unknown_key(
    checked: CollectedSettings,
    source: Source,
    line: int,
    name: str,
    value: YamlNode | None = None,
    *,
    typed: bool = False,
) -> None:
    """Notes a key that the schema does not have, with the nearest that it has.

    value: what stands there. A section that only other tools have, as torchtitan's `training`, is
    gone through.
    """
    if (
        value is not None
        and value.kind == "mapping"
        and value.entries
        and _plain(name) in SECTION_ALIASES
    ):
        for word, (inner_line, inner) in value.entries.items():
            report_unknown_key(checked, source, inner_line, f"{name}.{word}", inner, typed=typed)
        return
    hint, meant = find_hint(name, checked.schema, in_file=not typed)
    checked.fault(
        source.at(line), "" if typed else (name or "''"), f"unknown key{hint}", doubt=False
    )
    for key in meant:
        checked.doubt(key)


def _is_broken(node: YamlNode) -> bool:
    return node.kind == "broken" or any(_is_broken(part) for part in node.inner())


# What to say of a key that there is not: the name that it has here, the nearest spelling, or
# nothing.
#
# Nothing rather than something far: another tool's name leads to ours only where both mean the
# same, and a spelling only where each word of it is near.


def find_hint(name: str, schema: Schema, *, in_file: bool = False) -> tuple[str, list[str]]:
    """(`; did you mean X?` or another hint, the keys it names)."""
    meant = find_meant_keys(name, schema)
    section, _, word = name.rpartition(".")
    if meant == [name] and section and in_file:
        return f"; write {word}: under {section}:", meant
    answer = ANSWERS.get(_plain(name)) or (
        None if meant else ANSWERS.get(_plain(word)) or _owner(name, schema)
    )
    if answer:
        return f"; {answer}", []
    if meant:
        return f"; did you mean {' or '.join(meant)}?", meant
    ours = _section_for(section, schema)
    if ours:
        inside = ", ".join(child.removeprefix(f"{ours}.") for child in schema.children(ours))
        return f"; the keys of {ours} are {inside}", []
    return "; `tune cat CONFIG --describe` lists all keys", []


def find_meant_keys(name: str, schema: Schema) -> list[str]:
    """Our names for an unknown one: another tool's word, the right section, or the nearest
    spelling; mostly one.
    """
    valid = [name for name in (*schema.keys, *schema.sections) if name]
    alias = KEY_ALIASES.get(_plain(name), name)
    section, _, word = name.rpartition(".")
    ours = _section_for(section, schema)
    plain = _plain(word)
    if alias in valid:
        return [alias]
    if plain in NOTHING_LIKE_IT or ours is None:
        return []
    if section.endswith(
        "]"
    ):  # of a list of sections, whose keys are mostly those of the section around it
        alias = KEY_ALIASES.get(f"{section.partition('.')[0]}.{plain}", "")
        inside = f"{section}.{alias.rpartition('.')[2]}"
        if inside in valid:
            return [inside]
    scopes = [(f"{ours}.{plain}", schema.children(ours))] if ours else []
    if not section or plain not in GENERIC:
        scopes.append((plain, valid))
    for other_name, keys in scopes:
        alias = KEY_ALIASES.get(other_name, "")
        if alias in valid:
            return [alias]
        words = [key.rpartition(".")[2] for key in keys]
        close = plain if plain in words or plain in GENERIC else find_misspelled_name(plain, words)
        found = [
            key
            for key in keys
            if key.rpartition(".")[2] == close and (ours or close not in ("name", "type"))
        ]
        if found:
            return [key for key in found if "." not in key] or found[:3]
    return []


def find_misspelled_name(found: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that `found` is a misspelling of: nearer than for a choice, as there
    are many keys.
    """
    swapped = [
        name for name in valid if sorted(name) == sorted(found)
    ]  # which difflib takes for two mistakes
    return (
        swapped[0]
        if swapped
        else find_nearest(found, valid, cutoff=0.85 if len(found) > 4 else 0.8)
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _section_for(section: str, schema: Schema) -> str | None:
    """Our section for one as written: itself, another tool's (empty: the top level here), or a
    misspelling of ours.
    """
    outer = _plain(section.partition(".")[0])
    ours = section if section in schema.sections else SECTION_ALIASES.get(outer)
    if ours is None:
        ours = find_misspelled_name(outer, [name for name in schema.sections if name])
    return ours if ours in schema.sections else None


def _owner(name: str, schema: Schema) -> str:
    """`lora.rank is a key of the recipe lora_finetune_distributed`, if that is nothing in this
    schema.
    """
    if _plain(name) in OF_PAIRS or "[" in name:
        return ""
    for recipe, config_class in RECIPE_CONFIGS.items():
        view = read_schema(config_class)
        found = find_meant_keys(name, view)
        if len(found) == 1 and found[0] not in schema.keys and found[0] not in schema.sections:
            return (
                f"{found[0]} is a {'key' if found[0] in view.keys else 'section'} of the recipe"
                f" {recipe}"
            )
    return ""

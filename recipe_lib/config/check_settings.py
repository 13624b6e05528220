"""Check the values of config files and overrides against the schema, and collect all faults.

`load.py` makes a `CollectedSettings` and fills it by `check_section`, `check_value` and the like
from the tree of `YamlNode`s of each file and override (`key=value` on the command line). A value
with a reference to another key (`${optimizer.lr}`) waits in `pending` until everything is read
(`fill_pending`). `find_hint` suggests a key in place of an unknown one.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from graphlib import CycleError
from typing import Any

from recipe_lib.config.aliases import GENERIC, NOTHING_LIKE_IT
from recipe_lib.config.convert_values import (
    MismatchError,
    convert,
    describe_expected,
    describe_node,
)
from recipe_lib.config.flat_schema import Key, Schema, build_item_schema, read_schema
from recipe_lib.config.paths import read_aliases, read_recipe_configs
from recipe_lib.config.read_yaml import YamlNode
from recipe_lib.config.references import (
    CIRCLE_REMEDY,
    BadReferenceError,
    ReferencedValues,
    are_related,
    list_references,
    order_keys,
)
from recipe_lib.config.suggest import find_nearest, format_word, quote, show

# Enough to correct a file at once; a file that is no config at all does not give a thousand lines.
MAX_FAULTS = 50

# The place of overrides in errors, and in `Setting.where`.
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Setting:
    """A value that a file or an override has set for a key."""

    # Converted to the key's type.
    value: Any
    # Where it was set: `configs/demo/full.yaml:7` or `command line`; both, joined by a comma, if an
    # override changed a part of the value.
    where: str


@dataclass(frozen=True)
class Source:
    """The origin of values: a file, or an override."""

    # Name of the file in errors; or COMMAND_LINE.
    name: str
    # Beginning of an error about the override, `command line: seed=x`; empty for a file.
    override: str = ""

    def format_fault_place(self, line: int) -> str:
        """Return the beginning of an error: `configs/demo/full.yaml:7`, `command line: seed=x`."""
        return self.override or f"{self.name}:{line}"

    def format_place(self, line: int) -> str:
        """Return `Setting.where` of a value: `configs/demo/full.yaml:7`, `command line`."""
        return self.name if self.override else f"{self.name}:{line}"


@dataclass(frozen=True)
class Pending:
    """A value with references to other keys, and the arguments of `check_value` for it."""

    # The value with its references.
    node: YamlNode
    source: Source
    # Of its key in the file, counted from 1; 1 for an override.
    line: int
    # Whether it is from an override. Errors begin with the override's text, which names the key.
    from_override: bool


@dataclass
class CollectedSettings:
    """The settings of files and overrides, and the faults among them.

    A key is doubtful if it has a fault, or an unknown key was probably meant to be it: it keeps its
    default, and no combination of settings with it is checked.
    """

    # The keys and sections that the config may have.
    schema: Schema
    # Dotted key -> its value, converted; a key that is not set has no entry.
    settings: dict[str, Setting] = field(default_factory=dict)
    # Dotted key -> a value with references (`${key}`) that are not filled in yet.
    pending: dict[str, Pending] = field(default_factory=dict)
    # Lines of the error, at most MAX_FAULTS.
    faults: list[str] = field(default_factory=list)
    # Dotted keys, see above.
    doubtful: set[str] = field(default_factory=set)
    # Whether there are more faults than are kept; checks end early then.
    full: bool = False

    def add_fault(self, place: str, name: str, fault: str, *, doubt: bool = True) -> None:
        """Add a fault.

        place: beginning of the line. name: the dotted key or section; empty if the line needs none.
        doubt: mark it as doubtful.
        """
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{place}: {show(name)}: {fault}" if name else f"{place}: {fault}")
        else:
            self.full = True
        if doubt and name:
            self.mark_doubtful(name)

    def refuse_value(self, place: str, name: str, fault: str, *, is_named: bool = False) -> None:
        """Add a fault of a key's or section's value, and mark it as doubtful.

        is_named: the place, an override's text, names it already.
        """
        self.add_fault(place, "" if is_named else name, fault)
        self.mark_doubtful(name)

    def mark_doubtful(self, name: str) -> None:
        """Mark a key, or all keys of a section, as doubtful; `""` is the top level."""
        prefix = f"{name}." if name else ""
        self.doubtful.update(
            key for key in self.schema.keys if key == name or key.startswith(prefix)
        )

    def sort_by_line(self, file: str, start: int) -> None:
        """Sort the faults from index `start` on by line; all have to begin with `FILE:LINE:`."""
        # The parser's faults were added before those of the schema.
        self.faults[start:] = sorted(
            self.faults[start:],
            key=lambda fault: int(fault.removeprefix(f"{file}:").partition(":")[0]),
        )

    def list_faults(self) -> list[str]:
        ending = [f"the first {MAX_FAULTS} faults are shown; there are more"] if self.full else []
        return [*self.faults, *ending]

    def list_judged_keys(self) -> set[str]:
        """Return all keys that are not doubtful; combinations of these are checked."""
        return set(self.schema.keys) - self.doubtful

    def format_last_places(self, names: Iterable[str], default: str) -> str:
        """Return where these keys were set: the last of their lines in each file, the command line.

        default: returned if none of them was set.
        """
        last_lines: dict[str, int] = {}
        for name in names:
            # A mapping may be set in a file and by an override: `c.yaml:3, command line`.
            places = self.settings[name].where.split(", ") if name in self.settings else []
            for place in places:
                # `command line` has no colon: its file is empty.
                file, _, line = place.rpartition(":")
                last_lines[file] = max(last_lines.get(file, 0), int(line) if file else 0)
        # Reverse order puts the command line, whose file is empty, last.
        places = [
            f"{file}:{line}" if file else COMMAND_LINE
            for file, line in sorted(last_lines.items(), reverse=True)
        ]
        return ", ".join(places) or default

    def store(self, name: str, value: Any, where: str) -> None:
        self.pending.pop(name, None)
        self.settings[name] = Setting(value, where)


def check_section(checked: CollectedSettings, section: str, node: YamlNode, source: Source) -> None:
    """Check the entries of a section, sections inside it too.

    section: its dotted name; empty for the top level. node: a mapping.
    """
    schema = checked.schema
    for word, (line, value) in node.entries.items():
        if checked.full:
            return
        name = f"{section}.{word}" if section else word
        # The empty name is the section of the top level, never one inside it.
        if name in schema.sections and word:
            check_section_value(checked, name, value, source=source, line=line)
        # A dotted name in a file is an error that `report_unknown_key` explains.
        elif name in schema.keys and "." not in word:
            check_value(checked, schema.keys[name], value, source=source, line=line)
        else:
            report_unknown_key(checked, name, value, source=source, line=line)


def check_section_value(
    checked: CollectedSettings, name: str, value: YamlNode, *, source: Source, line: int
) -> None:
    """Check the value of a section, which has to be a mapping or empty; `""` is the whole file."""
    if value.kind == "mapping":
        check_section(checked, section=name, node=value, source=source)
    elif value.kind == "broken":
        checked.mark_doubtful(name)
    elif not value.is_empty:
        children = [child.removeprefix(f"{name}.") for child in checked.schema.list_children(name)]
        expected = f"a section of keys ({', '.join(children)})" if name else "lines of `key: value`"
        checked.refuse_value(
            source.format_fault_place(line),
            name,
            f"found {describe_node(value)}, expected {expected}",
        )


def check_value(
    checked: CollectedSettings,
    key: Key,
    value: YamlNode,
    *,
    source: Source,
    line: int = 1,
    from_override: bool = False,
    written: str | None = None,
) -> None:
    """Check a key's value and store it; one with references waits for `fill_pending`.

    from_override: the value is an override's, whose text in an error names the key. written: text
    of the value before its references were filled in, empty for a list or mapping; None: it had
    none.
    """
    if written is None and value.has_reference:
        checked.pending[key.name] = Pending(
            value, source=source, line=line, from_override=from_override
        )
        return
    if key.section_class is not None and value.kind == "list":
        check_items(checked, key, value, source=source, line=line)
        return
    if _is_broken(value):
        checked.mark_doubtful(key.name)
        return
    try:
        # A value that was filled in has lost its quotes: it is read like one of the command line.
        converted = convert(value, key, from_override=from_override or written is not None)
    except MismatchError as mismatch:
        beginning = f"found {quote(written)}, which is " if written else "found "
        checked.refuse_value(
            source.format_fault_place(line),
            key.name,
            str(mismatch).replace("found ", beginning, 1),
            is_named=from_override,
        )
    else:
        checked.store(key.name, converted, source.format_place(line))


def fill_pending(checked: CollectedSettings) -> None:
    """Fill in and check the values with references, each after the keys that it refers to."""
    if not checked.pending:
        return
    schema = checked.schema
    pending = dict(checked.pending)
    # Key -> the full names that its value refers to.
    referenced_keys = {
        key: list_references(value.node.collect_texts(), key) for key, value in pending.items()
    }
    order = _order_pending(checked, pending, referenced_keys)
    # A reference to a key that is not set is to its default.
    values = {name: key.default for name, key in schema.keys.items() if name not in pending}
    values |= {name: setting.value for name, setting in checked.settings.items() if name in values}
    referenced_values = ReferencedValues(
        values, lambda name: f": there is no key {show(name)}{find_hint(name, schema)[0]}"
    )
    for key in order:
        value = checked.pending.pop(key)
        if _refers_to_doubtful_key(checked, referenced_keys[key]):
            checked.mark_doubtful(key)  # the other key has the fault
            continue
        try:
            node = _fill_node(value.node, key, referenced_values)
        except BadReferenceError as fault:
            checked.refuse_value(
                value.source.format_fault_place(fault.line),
                key,
                str(fault),
                is_named=value.from_override,
            )
            continue
        check_value(
            checked,
            schema.keys[key],
            node,
            source=value.source,
            line=value.line,
            from_override=value.from_override,
            written=value.node.text,
        )
        if key in checked.settings:
            referenced_values.put(key, checked.settings[key].value)


def _order_pending(
    checked: CollectedSettings, pending: dict[str, Pending], referenced_keys: dict[str, list[str]]
) -> list[str]:
    """Return the pending keys, each after those that it refers to.

    Keys that refer to each other in a circle are refused, and removed from `checked.pending` and
    `referenced_keys`.
    """
    while True:
        try:
            return order_keys(referenced_keys)
        except CycleError as error:
            circle = set(error.args[1])
            # One line for the circle, at the key that was set last.
            last = [key for key in referenced_keys if key in circle][-1]
            node = pending[last].node
            text = next(text for text in node.collect_texts() if "${" in text)
            checked.refuse_value(
                pending[last].source.format_fault_place(node.line),
                last,
                f"found {quote(text)}{CIRCLE_REMEDY}",
                is_named=pending[last].from_override,
            )
            # Removed, so that the faults of all other keys are found as well.
            for key in circle:
                checked.mark_doubtful(key)
                checked.pending.pop(key)
                referenced_keys.pop(key)


def _refers_to_doubtful_key(checked: CollectedSettings, names: list[str]) -> bool:
    # A reference may be to a section that holds a doubtful key, or a part of its value.
    return any(any(are_related(name, doubtful) for doubtful in checked.doubtful) for name in names)


def _fill_node(node: YamlNode, key: str, values: ReferencedValues) -> YamlNode:
    """Return a value with its references filled in, as if their values had been written there."""
    if node.kind == "list":
        return replace(node, items=[_fill_node(item, key, values) for item in node.items])
    if node.kind == "mapping":
        entries = {
            word: (line, _fill_node(inner, key, values))
            for word, (line, inner) in node.entries.items()
        }
        return replace(node, entries=entries)
    if not node.has_reference:
        return node
    try:
        return _write_node(values.fill(node.text, key), node.line)
    except BadReferenceError as fault:
        fault.line = node.line
        raise


def _write_node(value: Any, line: int) -> YamlNode:
    """Return the node of a value that a reference stands for, as if written at that line."""
    if isinstance(value, list):
        return YamlNode("list", line, items=[_write_node(item, line) for item in value])
    if isinstance(value, dict):
        entries = {word: (line, _write_node(item, line)) for word, item in value.items()}
        return YamlNode("mapping", line, entries=entries)
    # These texts would be read as null or a truth value without quotes.
    quoted = isinstance(value, str) and value.lower() in ("", "null", "true", "false", "~")
    return YamlNode("scalar", line, format_word(value), quoted=quoted)


def check_items(
    checked: CollectedSettings, key: Key, value: YamlNode, *, source: Source, line: int
) -> None:
    """Check a list of sections, as `data.sources`, and store it if none has a fault.

    A fault has its own line and the full key: `data.sources[1].weight`.
    """
    items = []  # objects of the sections' class
    for index, node in enumerate(value.items):
        # A schema with the keys of this item, and the common list of faults.
        inner = CollectedSettings(build_item_schema(key, index), faults=checked.faults)
        name = next(iter(inner.schema.sections))  # the only one, `data.sources[1]`
        num_faults = len(checked.faults)
        fault_place = source.format_fault_place(node.line)
        if node.kind == "broken":
            inner.mark_doubtful(name)
        elif node.kind != "mapping":
            children = ", ".join(key_name.rpartition(".")[2] for key_name in inner.schema.keys)
            inner.add_fault(
                fault_place,
                name,
                f"found {describe_node(node)}, expected a section of keys ({children})",
            )
        else:
            check_section(inner, section=name, node=node, source=source)
            check_required(inner, fault_place)
        checked.full |= inner.full
        if len(checked.faults) > num_faults or inner.doubtful:
            checked.mark_doubtful(key.name)
        else:
            arguments = {
                word.rpartition(".")[2]: setting.value for word, setting in inner.settings.items()
            }
            items.append(inner.schema.config_class(**arguments))
    if key.name not in checked.doubtful:
        checked.store(key.name, items, source.format_place(line))


def check_required(checked: CollectedSettings, place: str) -> None:
    """Add a fault for each key without a default that is neither set nor doubtful.

    place: beginning of its line.
    """
    for name, key in checked.schema.keys.items():
        if key.required and name not in checked.settings and name not in checked.doubtful:
            checked.add_fault(place, name, f"is not set, expected {describe_expected(key)}")


def report_unknown_key(
    checked: CollectedSettings,
    name: str,
    value: YamlNode | None = None,
    *,
    source: Source,
    line: int = 1,
    from_override: bool = False,
) -> None:
    """Add a fault for a key that the schema does not have, with a hint at the key that was meant.

    value: of the key; None: of no use for a hint. from_override: the key is an override's.
    """
    if value is not None and value.entries and _normalize(name) in read_aliases().sections:
        # A section of other tools, such as torchtitan's `training`: its keys may have a name here,
        # the section itself has none.
        for word, (inner_line, inner) in value.entries.items():
            report_unknown_key(
                checked,
                f"{name}.{word}",
                inner,
                source=source,
                line=inner_line,
                from_override=from_override,
            )
        return
    hint, meant_keys = find_hint(name, checked.schema, in_file=not from_override)
    checked.add_fault(
        source.format_fault_place(line),
        "" if from_override else (name or "''"),
        f"unknown key{hint}",
        doubt=False,
    )
    # The key that was probably meant is not set: rules about it must not be reported as well.
    for key in meant_keys:
        checked.mark_doubtful(key)


def _is_broken(node: YamlNode) -> bool:
    """Return True if a part of a node was refused, and reported, when the YAML was read."""
    return node.kind == "broken" or any(_is_broken(part) for part in node.list_inner())


# Hints for an unknown key: its name here, the nearest spelling, or nothing. A wrong hint is worse
# than none: another tool's name leads to ours only if both mean the same, and a spelling only if
# its section is one of ours too. `read_aliases` has other tools' names of keys and sections, and
# answers (texts) on keys that have no counterpart here.


def find_hint(name: str, schema: Schema, *, in_file: bool = False) -> tuple[str, list[str]]:
    """Return (hint for an error line, such as `; did you mean X?`; the keys that it names).

    in_file: the key is from a file, not from an override. The keys are empty if the hint names none
    that was probably meant.
    """
    meant_keys = find_meant_keys(name, schema)
    section, _, word = name.rpartition(".")
    if meant_keys == [name] and section and in_file:
        # The dotted name is right in an override; in a file keys are indented under the section.
        return f"; write {word}: under {section}:", meant_keys
    answer = read_aliases().answers.get(_normalize(name))
    if not answer and not meant_keys:
        answer = read_aliases().answers.get(_normalize(word)) or _describe_owner(name, schema)
    if answer:
        return f"; {answer}", []
    if meant_keys:
        return f"; did you mean {' or '.join(meant_keys)}?", meant_keys
    if ours := _find_section(section, schema):
        children = [child.removeprefix(f"{ours}.") for child in schema.list_children(ours)]
        return f"; the keys of {ours} are {', '.join(children)}", []
    return "; `tune cat CONFIG --describe` lists all keys", []


def find_meant_keys(name: str, schema: Schema) -> list[str]:
    """Return the keys that an unknown name may mean, mostly one or none.

    They are found, in this order, by another tool's name for the whole key, by the keys of its own
    section, and among all keys; in a scope, another tool's name goes before a spelling.
    """
    valid = [name for name in (*schema.keys, *schema.sections) if name]
    alias = read_aliases().keys.get(_normalize(name), name)
    section, _, word = name.rpartition(".")
    word = _normalize(word)
    ours = _find_section(section, schema)
    if alias in valid:
        return [alias]
    # NOTHING_LIKE_IT: other tools' words whose nearest spelling here means something else.
    if word in NOTHING_LIKE_IT or ours is None:
        return []
    if section.endswith("]"):
        # The items of a list, such as data.sources[0], have mostly the keys of the outer section.
        alias = read_aliases().keys.get(f"{section.partition('.')[0]}.{word}", "")
        item_key = f"{section}.{alias.rpartition('.')[2]}"
        if item_key in valid:
            return [item_key]
    # Its own section first, then all keys: (the name by which aliases may have it, keys to search).
    scopes = [(f"{ours}.{word}", schema.list_children(ours))] if ours else []
    # GENERIC: words such as `name` that say little without their section.
    if not section or word not in GENERIC:
        scopes.append((word, valid))
    for scoped_name, keys in scopes:
        alias = read_aliases().keys.get(scoped_name, "")
        if alias in valid:
            return [alias]
        if similar_keys := _find_similar_keys(word, keys, in_section=bool(ours)):
            # A key of the top level is the likeliest.
            return [key for key in similar_keys if "." not in key] or similar_keys[:3]
    return []


def _find_similar_keys(word: str, keys: list[str], *, in_section: bool) -> list[str]:
    """Return those of `keys` whose last word is `word`, or its nearest spelling.

    in_section: the unknown key stands in a section of ours.
    """
    last_words = [key.rpartition(".")[2] for key in keys]
    # Of a generic word no misspelling is sought.
    is_exact = word in last_words or word in GENERIC
    similar_word = word if is_exact else find_misspelled_name(word, last_words)
    if similar_word in ("name", "type") and not in_section:
        return []  # many sections have such a key
    return [key for key in keys if key.rpartition(".")[2] == similar_word]


def find_misspelled_name(written: str, valid: Collection[str]) -> str | None:
    """Return the valid name that `written` is a misspelling of; None: of none.

    The cutoff, a ratio of difflib, is higher than for choices: among so many keys, one is always
    similar.
    """
    # difflib counts two swapped letters as two mistakes.
    anagram = next((name for name in valid if sorted(name) == sorted(written)), None)
    # Of a short word one letter is a larger share.
    return anagram or find_nearest(written, valid, cutoff=0.85 if len(written) > 4 else 0.8)


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")


def _find_section(section: str, schema: Schema) -> str | None:
    """Return the section of ours that a written one means; None: none.

    It may be written as ours, by another tool's name, or misspelled. `""`: its keys are at the top
    level here.
    """
    outer = _normalize(section.partition(".")[0])
    ours = section if section in schema.sections else read_aliases().sections.get(outer)
    if ours is None:
        ours = find_misspelled_name(outer, [name for name in schema.sections if name])
    return ours if ours in schema.sections else None


def _describe_owner(name: str, schema: Schema) -> str:
    """Return a text such as `lora.rank is a key of the recipe X` for a key of another recipe.

    Return an empty text if no other recipe has such a key.
    """
    if _normalize(name) in read_aliases().ambiguous or "[" in name:
        return ""
    for recipe, config_class in read_recipe_configs().items():
        owner = read_schema(config_class)
        meant_keys = find_meant_keys(name, owner)
        if len(meant_keys) != 1:
            continue
        key = meant_keys[0]
        if key not in schema.keys and key not in schema.sections:
            return f"{key} is a {'key' if key in owner.keys else 'section'} of the recipe {recipe}"
    return ""

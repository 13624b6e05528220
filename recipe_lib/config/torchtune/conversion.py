"""A config of torchtune's on its way to one of ours.

`read_torchtune_file` reads the file. `ConfigImport` has our keys so far, and what became of each of
theirs (`KeyFate`); a table gives a `Meaning` to the values of a key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError
from pathlib import Path
from typing import Any

from recipe_lib.config.convert_values import (
    IN_A_CIRCLE,
    InterpolationError,
    NamedValues,
    list_names,
    order_keys,
    read_untyped,
)
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand_home
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError, raise_faults
from recipe_lib.reading import read_text


@dataclass
class TorchtuneFile:
    """A YAML file of torchtune's as values by dotted key: `optimizer.lr`, `dataset[0].source`.

    Read by the same parser as ours: no tag, alias or second document. Values have the types that
    YAML 1.1 gives them, and numbers such as `1e-5` are numbers. `${other.key}` is filled in;
    resolvers are refused.
    """

    path: Path
    # Its name in errors.
    shown: str
    # By dotted key, in the file's order.
    values: dict[str, Any]
    # Key -> the line where its value stands.
    lines: dict[str, int]
    # A line each, without `#`. The commands in them name models on the hub.
    comments: list[str]

    def format_place(self, key: str) -> str:
        """Return `theirs.yaml:12`, of a key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def list_keys(self, section: str) -> list[str]:
        """Return the keys of a section, in the file's order; its name if it is one value."""
        return [
            key
            for key in self.values
            if key == section or key.startswith((f"{section}.", f"{section}["))
        ]


def read_torchtune_file(path: str) -> TorchtuneFile:
    """Read a file of torchtune's.

    Raises ConfigError, a line a fault, for what is no YAML file with keys.
    """
    file = expand_home(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}"
        )
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of torchtune's")
    shown = quote(path)[1:-1]
    document = read_file(file, shown)
    raise_faults(ConfigError, (f"{shown}:{line}: {fault}" for line, fault in document.faults))
    if document.top.kind != "mapping":
        raise ConfigError(f"{shown}: expected keys with values")
    lines = [line.lstrip(" \t") for line in read_text(file, MAX_BYTES).splitlines()]
    rows = list(_list_values("", document.top))
    theirs = TorchtuneFile(
        path=file,
        shown=shown,
        values={key: value for key, value, _ in rows},
        lines={key: line for key, _, line in rows},
        comments=[line[1:].strip() for line in lines if line.startswith("#")],
    )
    _fill_names(theirs)
    for key, value in theirs.values.items():
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(
                f"{theirs.format_place(key)}: {show(key)}: found a list in a list, expected plain"
                " values"
            )
    return theirs


def _list_values(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every value; a list of plain values is one."""
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _list_values(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _list_values(f"{name}[{number}]", item)
    else:
        yield name, read_untyped(node), node.line


def _fill_names(theirs: TorchtuneFile) -> None:
    """Put the values of other keys into those that name them."""
    values = theirs.values
    texts = {
        key: [text for text in (value if isinstance(value, list) else [value]) if "${" in str(text)]
        for key, value in values.items()
    }
    names = {key: list_names(inside, key) for key, inside in texts.items() if inside}
    if not names:
        return
    try:
        order = order_keys(names)
    except CycleError as error:
        key = error.args[1][0]
        raise ConfigError(
            f"{theirs.format_place(key)}: {show(key)}: found {quote(texts[key][0])}{IN_A_CIRCLE}"
        ) from None
    remedy = ", expected ${section.key} of this file; write the value itself"
    plain_values = {key: value for key, value in values.items() if key not in names}
    named_values = NamedValues(plain_values, lambda name: remedy)
    for key in order:
        value = values[key]
        try:
            if isinstance(value, list):
                values[key] = [
                    named_values.fill(item, key) if item in texts[key] else item for item in value
                ]
            else:
                values[key] = named_values.fill(value, key)
        except InterpolationError as fault:
            raise ConfigError(f"{theirs.format_place(key)}: {show(key)}: {fault}") from fault
        named_values.put(key, values[key])


# Kinds of `KeyFate`, as the table of `tune import` has them.
CARRIED = "carried"
CHANGED = "other effect"
DROPPED = "dropped"
DEFAULT = "their default"

# In a `Meaning`: the value that the file has.
VALUE = "the value of theirs"

# Keys whose null says something of its own.
NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")


@dataclass(frozen=True)
class KeyFate:
    """The fate of a key of theirs: what became of it here."""

    # CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT: what torchtune takes for
    # a key that is not in the file.
    kind: str
    # Our keys, with the values that come of it.
    ours: Mapping[str, Any]
    # For the reader.
    why: str = ""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a value of a key of theirs: what it says here."""

    # Our keys with their values; VALUE: theirs.
    ours: Mapping[str, Any] = field(default_factory=dict)
    # For the reader.
    why: str = ""
    # The effect here is another one.
    differs: bool = False
    # What torchtune takes with it for other keys that are left out.
    defaults: Mapping[str, Any] = field(default_factory=dict)


class ConfigImport:
    """Their file, our keys so far, and what became of each of theirs.

    Each key of the file is noted once: a second time is a fault of a table, not of a user.
    """

    def __init__(self, theirs: TorchtuneFile, defaults: Mapping[str, Any]) -> None:
        """Begin with no key of ours.

        defaults: what torchtune takes for keys that are absent or null.
        """
        self.theirs = theirs
        self.defaults = dict(defaults)
        self.recipe = ""  # ours, once it is known
        self.ours: dict[str, Any] = {}
        self.fates: dict[str, KeyFate] = {}
        self.faults: list[str] = []
        # Keys with a default of theirs of which nothing comes.
        self.ignored: set[str] = set()

    def get_value(self, key: str) -> Any:
        """Return what torchtune uses; None for what is neither set nor has a default."""
        value = self.theirs.values.get(key)
        if value is None and not (key in self.theirs.values and key in NULL_MEANS):
            return self.defaults.get(key)
        return value

    def read_component(self, section: str) -> str:
        """Return the class or function that a section names, without its module; empty if it names
        none.
        """
        return str(self.get_value(f"{section}._component_") or "").rpartition(".")[2]

    def is_on(self, key: str) -> bool:
        """Return True if a key is set to something."""
        return not is_off(self.get_value(key))

    def is_any_on(self, section: str) -> bool:
        """Return True if a key, or one of a section, is set to something."""
        return any(self.is_on(key) for key in self.theirs.list_keys(section))

    def carry(
        self, key: str, ours: Mapping[str, Any], why: str = "", *, differs: bool = False
    ) -> None:
        """Note that these keys of ours do what theirs does.

        differs: they do something else, which `why` says.
        """
        kind = CHANGED if differs else CARRIED
        self._note(key, KeyFate(kind if key in self.theirs.values else DEFAULT, ours, why))

    def take(self, key: str, meaning: Meaning) -> None:
        """Note what a value says here, and the defaults that it brings."""
        self.defaults |= meaning.defaults
        ours = {
            name: self.get_value(key) if value == VALUE else value
            for name, value in meaning.ours.items()
        }
        self.carry(key, ours, meaning.why, differs=meaning.differs)

    def drop(self, key: str, why: str) -> None:
        """Note that nothing comes of it, and why nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Note a fault: without this key the run would not be what was asked."""
        setting = f"{show(key)}: {quote(str(self.get_value(key)))}"
        remedy = ""
        if may_be_left_out:
            # A `?` ends a hint: `did you mean X?`.
            end = "" if why.endswith("?") else ";"
            remedy = f"{end} --without {show(key)} imports the rest"
        self.faults.append(f"{self.theirs.format_place(key)}: {setting}: {why}{remedy}")
        if key not in self.fates:
            self.drop(key, why)

    def build_error(self, why: str, key: str = "") -> ConfigError:
        """Return the error of a file that cannot become a config of ours, in one line.

        key: whose line it names, or the section whose first line.
        """
        keys = self.theirs.list_keys(key) if key else []
        return ConfigError(
            f"{self.theirs.format_place(keys[0]) if keys else self.theirs.shown}: {why}"
        )

    def is_noted(self, key: str) -> bool:
        """Return True if it is known what became of a key."""
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{key} is noted twice")
        if fate.kind == DEFAULT:
            # What the file says under another name stands.
            ours = {name: value for name, value in fate.ours.items() if name not in self.ours}
            fate = KeyFate(DEFAULT, ours, fate.why)
        self.fates[key] = fate
        self.ours.update(fate.ours)


def is_off(value: Any) -> bool:
    """Return True if a value asks for nothing."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")


def omit_keys(keys: Iterable[str], theirs: TorchtuneFile) -> dict[str, KeyFate]:
    """Take keys and sections out of the file, as the user has asked; return what became of them.

    Raises ConfigError for one that the file does not have.
    """
    fates = {}
    for key in keys:
        names = theirs.list_keys(key)
        if not names:
            raise ConfigError(f"--without: {theirs.shown} has no key {quote(key)}")
        for name in names:
            del theirs.values[name]
            fates[name] = KeyFate(DROPPED, {}, "left out by --without")
    return fates

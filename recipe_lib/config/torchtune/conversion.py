"""Convert a torchtune config (0.6.1, "theirs") to a config of this project ("ours"), key by key.

`import_file.py` calls `read_torchtune_file`, then notes each key of it in a `ConfigImport`: it is
carried to keys of ours, dropped with a reason, or refused, which is a fault. `datasets.py` does so
for `dataset` and `dataset_val`; `key_tables.py` gives each value of other keys a `Meaning`.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from graphlib import CycleError
from pathlib import Path
from typing import Any

from recipe_lib.config.convert_values import read_untyped
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand_home
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.references import (
    CIRCLE_REMEDY,
    BadReferenceError,
    ReferencedValues,
    list_references,
    order_keys,
)
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
    # Dotted key -> the line where its value stands, counted from 1.
    lines: dict[str, int]
    # Text of each comment line, without `#`. Their `tune download` commands name models on the hub.
    comments: list[str]

    def format_place(self, key: str) -> str:
        """Return the file and line of a key: `theirs.yaml:12`, without a line for an absent key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def list_keys(self, section: str) -> list[str]:
        """Return the dotted keys inside a section or list, in the file's order.

        A name that holds a plain value is returned itself. Empty: the file has nothing there.
        """
        return [
            key
            for key in self.values
            if key == section or key.startswith((f"{section}.", f"{section}["))
        ]


def read_torchtune_file(path: str) -> TorchtuneFile:
    """Read a file of torchtune's.

    Raises ConfigError, with a line for each fault, if there is no such .yaml or .yml file, if it is
    not YAML with keys, holds a list in a list, or refers to a key that it does not have.
    """
    file = expand_home(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}"
        )
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of torchtune's")
    shown = show(path)
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
    _fill_references(theirs)
    for key, value in theirs.values.items():
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(
                f"{theirs.format_place(key)}: {show(key)}: found a list in a list, expected plain"
                " values"
            )
    return theirs


def _list_values(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every value at or below a node.

    A list of plain values is one value. name: dotted key of the node; empty for the whole file.
    """
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _list_values(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _list_values(f"{name}[{number}]", item)
    else:
        yield name, read_untyped(node), node.line


def _fill_references(theirs: TorchtuneFile) -> None:
    """Fill in references such as `${other.key}`, in place.

    Raises ConfigError for a reference to no key, or keys that refer to each other in a circle.
    """
    values = theirs.values
    # Key -> its texts that hold a reference.
    texts = {
        key: [text for text in (value if isinstance(value, list) else [value]) if "${" in str(text)]
        for key, value in values.items()
    }
    references = {
        key: list_references(with_references, key)
        for key, with_references in texts.items()
        if with_references
    }
    if not references:
        return
    try:
        order = order_keys(references)
    except CycleError as error:
        key = error.args[1][0]  # graphlib gives the keys of the circle
        raise ConfigError(
            f"{theirs.format_place(key)}: {show(key)}: found {quote(texts[key][0])}{CIRCLE_REMEDY}"
        ) from None
    remedy = ", expected ${section.key} of this file; write the value itself"
    # Keys with references are added one by one, each before those that refer to it.
    plain_values = {key: value for key, value in values.items() if key not in references}
    referenced_values = ReferencedValues(plain_values, lambda name: remedy)
    for key in order:
        value = values[key]
        try:
            if isinstance(value, list):
                values[key] = [
                    referenced_values.fill(item, key) if item in texts[key] else item
                    for item in value
                ]
            else:
                values[key] = referenced_values.fill(value, key)
        except BadReferenceError as fault:
            raise ConfigError(f"{theirs.format_place(key)}: {show(key)}: {fault}") from fault
        referenced_values.put(key, values[key])


# Values of `KeyFate.kind`, and headings in the table that `tune import` prints.
CARRIED = "carried"
CHANGED = "other effect"
DROPPED = "dropped"
DEFAULT = "their default"

# In `Meaning.ours`, stands for the value that the file has.
VALUE = object()

# Keys whose null has a meaning: no clipping, a random seed, no limit. Others count as absent.
NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")


@dataclass(frozen=True)
class KeyFate:
    """The fate of a key of theirs: what became of it here."""

    # CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT: the key is not in the
    # file, and torchtune's default for it is carried.
    kind: str
    # Our dotted keys -> their values. Empty: no key of ours is needed.
    ours: Mapping[str, Any]
    # Reason or difference, for the user.
    why: str = ""


@dataclass(frozen=True)
class Meaning:
    """The meaning of one value of a key of theirs: the settings here that do the same."""

    # Our dotted keys -> their values; VALUE itself: the value that the file has.
    ours: Mapping[str, Any] = field(default_factory=dict)
    # Reason or difference, for the user.
    why: str = ""
    # True: the settings here have another effect, which `why` names.
    differs: bool = False
    # Other keys of theirs -> the defaults that torchtune takes for them beside this value, such as
    # the weight decay of an optimizer's class.
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ConfigImport:
    """Their file, our keys so far, and what became of each of theirs.

    `carry`, `carry_meaning`, `drop` and `refuse` note a key. A key carried or dropped after it was
    noted is a mistake in the tables, not the user's, and raises AssertionError.
    """

    theirs: TorchtuneFile
    # Key of theirs -> what torchtune takes for it if it is absent or null.
    defaults: dict[str, Any]
    # Our keys that the user sets, whatever the file has.
    given: Set[str]
    # Our recipe's name, set by `import_file.convert`.
    recipe: str = ""
    # Our dotted key -> value.
    ours: dict[str, Any] = field(default_factory=dict)
    # By key of theirs.
    fates: dict[str, KeyFate] = field(default_factory=dict)
    # Lines of the error.
    faults: list[str] = field(default_factory=list)
    # Keys that the file lacks, whose torchtune default needs no key of ours.
    ignored: set[str] = field(default_factory=set)

    def get_value(self, key: str) -> Any:
        """Return the value that torchtune uses for a key of theirs: the file's, or the default.

        None: it is neither set nor has a default.
        """
        value = self.theirs.values.get(key)
        if value is None and not (key in self.theirs.values and key in NULL_MEANS):
            return self.defaults.get(key)
        return value

    def read_component(self, section: str) -> str:
        """Return the class or function of a section's `_component_`, without its module.

        Empty if the section names none.
        """
        return str(self.get_value(f"{section}._component_") or "").rpartition(".")[2]

    def is_on(self, key: str) -> bool:
        """Return True if torchtune's value of a key asks for something (see `is_off`)."""
        return not is_off(self.get_value(key))

    def is_any_on(self, section: str) -> bool:
        return any(self.is_on(key) for key in self.theirs.list_keys(section))

    def carry(
        self, key: str, ours: Mapping[str, Any], why: str = "", *, differs: bool = False
    ) -> None:
        """Note the settings of ours that stand for a key of theirs.

        ours: our dotted keys -> values; empty: nothing needs to be set. differs: they have another
        effect, which `why` names.
        """
        kind = CHANGED if differs else CARRIED
        self._note(key, KeyFate(kind if key in self.theirs.values else DEFAULT, ours, why))

    def carry_meaning(self, key: str, meaning: Meaning) -> None:
        self.defaults |= meaning.defaults
        ours = {
            name: self.get_value(key) if value is VALUE else value
            for name, value in meaning.ours.items()
        }
        self.carry(key, ours, meaning.why, differs=meaning.differs)

    def drop(self, key: str, why: str) -> None:
        """Note a key that needs no key of ours. why: the reason that nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Note a fault: without this key the run would not be what was asked.

        why: the fault, with a remedy. may_be_left_out: the error also offers `--without KEY`.
        """
        setting = f"{show(key)}: {quote(str(self.get_value(key)))}" + (
            "" if key in self.theirs.values else ", torchtune's default"
        )
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

        key: the key, or the section, whose line it names; empty: the file alone.
        """
        keys = self.theirs.list_keys(key) if key else []
        return ConfigError(
            f"{self.theirs.format_place(keys[0]) if keys else self.theirs.shown}: {why}"
        )

    def is_noted(self, key: str) -> bool:
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{key} is noted twice")
        if fate.kind == DEFAULT:
            # Several keys of theirs may lead to one of ours: what the file sets has precedence.
            ours = {name: value for name, value in fate.ours.items() if name not in self.ours}
            fate = KeyFate(DEFAULT, ours, fate.why)
        self.fates[key] = fate
        self.ours.update(fate.ours)


def is_off(value: Any) -> bool:
    """Return True if a value asks for nothing: null, false, 0, empty or `none`."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")

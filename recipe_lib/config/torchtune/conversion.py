"""A config of torchtune's on its way to one of ours: our keys so far, and what became of each of theirs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.suggest import quote, show
from recipe_lib.config.torchtune.read_file import TheirFile
from recipe_lib.errors import ConfigError

CARRIED, CHANGED, DROPPED, DEFAULT = "carried", "other effect", "dropped", "their default"

# Keys whose null says something of its own.
NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")


@dataclass(frozen=True)
class KeyFate:
    """What became of a key of theirs."""

    kind: str
    """CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT: not in the file, what torchtune takes."""
    ours: Mapping[str, Any]
    """Our keys, with the values that come of it."""
    why: str = ""
    """For the reader."""


@dataclass(frozen=True)
class Meaning:
    """What a value of a key of theirs says here."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with their values."""
    why: str = ""
    """For the reader."""
    differs: bool = False
    """The effect here is another one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What torchtune takes with it for other keys that are left out."""


class ConfigImport:
    """Theirs and ours. Each key of the file is noted once: a second time is a fault of a table, not of a user."""

    def __init__(self, theirs: TheirFile, defaults: Mapping[str, Any]) -> None:
        """defaults: what torchtune takes for keys that are absent or null."""
        self.theirs = theirs
        self.defaults = dict(defaults)
        self.recipe = ""
        self.ours: dict[str, Any] = {}
        self.fates: dict[str, KeyFate] = {}
        self.faults: list[str] = []
        self.ignored: set[str] = set()
        self.notes: list[str] = []

    def value(self, key: str) -> Any:
        """Return what torchtune uses; None for what is neither set nor has a default."""
        value = self.theirs.values.get(key)
        if value is None and not (key in self.theirs.values and key in NULL_MEANS):
            return self.defaults.get(key)
        return value

    def read_component(self, section: str) -> str:
        """Return the class or function that a section names, without its module; empty if it names none."""
        return str(self.value(f"{section}._component_") or "").rpartition(".")[2]

    def is_on(self, key: str) -> bool:
        """Return whether it is set to something."""
        return not is_off(self.value(key))

    def asks_for(self, section: str) -> bool:
        """Return whether a key, or one of a section, is set to something."""
        return any(self.is_on(key) for key in self.theirs.under(section))

    def carry(self, key: str, ours: Mapping[str, Any], why: str = "") -> None:
        """Note that these keys of ours do what theirs does."""
        self._note(key, KeyFate(CARRIED if key in self.theirs.values else DEFAULT, ours, why))

    def change(self, key: str, ours: Mapping[str, Any], why: str) -> None:
        """Note that something is different here, and what."""
        self._note(key, KeyFate(CHANGED if key in self.theirs.values else DEFAULT, ours, why))

    def take(self, key: str, meaning: Meaning) -> None:
        """Note what a value says here, and the defaults that it brings."""
        self.defaults |= meaning.defaults
        note = self.change if meaning.differs else self.carry
        note(key, meaning.ours, meaning.why)

    def drop(self, key: str, why: str) -> None:
        """Note that nothing comes of it, and why nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)  # a default of theirs

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Note a fault: without this key the run would not be what was asked."""
        said = f"{show(key)}: {quote(str(self.value(key)))}"
        if may_be_left_out:
            why_and_remedy = f"{why}{'' if why.endswith('?') else ';'} --without {show(key)} imports the rest"
        else:
            why_and_remedy = why
        self.faults.append(f"{self.theirs.place(key)}: {said}: {why_and_remedy}")
        if key not in self.fates:
            self.drop(key, why)

    def stop(self, why: str, key: str = "") -> ConfigError:
        """Return the error of a file that cannot become a config of ours, in one line; key: whose line it names, or
        the section whose first line."""
        keys = self.theirs.under(key) if key else []
        return ConfigError(f"{self.theirs.place(keys[0]) if keys else self.theirs.shown}: {why}")

    def is_noted(self, key: str) -> bool:
        """Return whether it is known what became of it."""
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{key} is noted twice")
        if fate.kind == DEFAULT:  # what the file says under another name stands
            ours = {name: value for name, value in fate.ours.items() if name not in self.ours}
            fate = KeyFate(DEFAULT, ours, fate.why)
        self.fates[key] = fate
        self.ours.update(fate.ours)


def is_off(value: Any) -> bool:
    """Return whether a value asks for nothing."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")


def leave_out(keys: Iterable[str], theirs: TheirFile) -> dict[str, KeyFate]:
    """Take keys and sections out of the file as the user has asked; return what became of them. ConfigError for one
    that the file does not have."""
    fates = {}
    for key in keys:
        names = theirs.under(key)
        if not names:
            raise ConfigError(f"--without: {theirs.shown} has no key {quote(key)}")
        for name in names:
            del theirs.values[name]
            fates[name] = KeyFate(DROPPED, {}, "left out by --without")
    return fates

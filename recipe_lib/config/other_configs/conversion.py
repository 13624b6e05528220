"""A config of another tool on its way to one of ours: our keys so far, and what became of each of theirs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.other_configs.their_file import TheirFile
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError

CARRIED, CHANGED, DROPPED, DEFAULT = "carried", "other effect", "dropped", "their default"


@dataclass(frozen=True)
class KeyFate:
    """What became of a key of theirs. kind: CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT (not
    in the file: what their tool takes then). ours: our keys with the values that come of it. why: for the reader."""

    kind: str
    ours: Mapping[str, Any]
    why: str = ""


class ConfigImport:
    """Theirs and ours. Each key of the file is noted once: a second time is a fault of a table, not of a user."""

    def __init__(
        self, theirs: TheirFile, tool: str, defaults: Mapping[str, Any], null_means: Iterable[str] = ()
    ) -> None:
        """defaults: what their tool takes for keys that are absent or null. null_means: keys whose null says
        something of its own. Our keys so far are `ours`; `given` are those that the user sets."""
        self.theirs, self.tool, self.null_means = theirs, tool, frozenset(null_means)
        self.defaults = dict(defaults)
        self.recipe = ""
        self.ours: dict[str, Any] = {}
        self.fates: dict[str, KeyFate] = {}
        self.faults: list[str] = []
        self.ignored: set[str] = set()
        self.notes: list[str] = []
        self.given: set[str] = set()

    def keys(self) -> list[str]:
        """Of the file, and those with a default of their tool."""
        return list(dict.fromkeys([*self.theirs.values, *self.defaults]))

    def has(self, key: str) -> bool:
        """Whether the file sets it, to whatever, or their tool has a default for it."""
        return key in self.theirs.values or key in self.defaults

    def value(self, key: str) -> Any:
        """What their tool uses; None for what is neither set nor has a default."""
        found = self.theirs.values.get(key)
        if found is None and not (key in self.theirs.values and key in self.null_means):
            return self.defaults.get(key)
        return found

    def is_on(self, key: str) -> bool:
        """Whether it is set to something."""
        return not is_off(self.value(key))

    def asks_for(self, section: str) -> bool:
        """Whether a key, or one of a section, is set to something."""
        return any(self.is_on(key) for key in self.theirs.under(section))

    def carry(self, key: str, ours: Mapping[str, Any], why: str = "") -> None:
        """Notes that these keys of ours do what theirs does."""
        self._note(key, KeyFate(CARRIED if key in self.theirs.values else DEFAULT, ours, why))

    def change(self, key: str, ours: Mapping[str, Any], why: str) -> None:
        """Notes that something is different here, and what."""
        self._note(key, KeyFate(CHANGED if key in self.theirs.values else DEFAULT, ours, why))

    def drop(self, key: str, why: str) -> None:
        """Notes that nothing comes of it, and why nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)  # a default of theirs

    def drop_once(self, key: str, why: str) -> None:
        """The same, of a key that may have been noted."""
        if key not in self.fates:
            self.drop(key, why)

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Notes a fault: without this key the run would not be what was asked."""
        said = f"{show(key)}: {quote(str(self.value(key)))}"
        remedy = f"{'' if why.endswith('?') else ';'} --without {show(key)} imports the rest" if may_be_left_out else ""
        self.faults.append(f"{self.theirs.place(key)}: {said}: {why}{remedy}")
        self.drop_once(key, why)

    def names_samples(self) -> bool:
        """Whether the user names samples, in place of those of the file."""
        return bool(self.given & {"data.source", "data.sources"})

    def stop(self, why: str, section: str = "") -> ConfigError:
        """The error of a file that cannot become a config of ours, in one line; section: whose line it names."""
        keys = self.theirs.under(section) if section else []
        return ConfigError(f"{self.theirs.place(keys[0]) if keys else self.theirs.shown}: {why}")

    def noted(self, key: str) -> bool:
        """Whether it is known what became of it."""
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{self.tool}: {key} is noted twice")
        if fate.kind == DEFAULT:  # what the file says under another name stands
            fate = KeyFate(
                DEFAULT, {name: value for name, value in fate.ours.items() if name not in self.ours}, fate.why
            )
        self.fates[key] = fate
        self.ours.update(fate.ours)


Convert = Callable[[ConfigImport, str], None]


@dataclass(frozen=True)
class KeyTable:
    """The keys of a tool. In `without` and `refused` a name is that of a key, of a section, or ends in `*`.

    same: theirs -> ours, with the same values. converted: theirs -> what carries it, in this order. without: theirs ->
    why nothing is missed. refused: theirs -> what is missing here; such a key is an error unless it is off.
    """

    same: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Convert] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def apply(self, conversion: ConfigImport) -> None:
        """Notes every key of the file. Raises ConfigError, a line a key, for those that cannot be carried."""
        for key, convert in self.converted.items():
            if conversion.has(key) and not conversion.noted(key):
                if conversion.value(key) is None and key not in conversion.null_means:
                    conversion.drop(key, "not set")
                else:
                    _convert(conversion, key, convert)
        for key in conversion.keys():
            if not conversion.noted(key):
                self._apply_row(conversion, key)
        if conversion.faults:
            raise ConfigError(*conversion.faults)

    def _apply_row(self, conversion: ConfigImport, key: str) -> None:
        value = conversion.value(key)
        reason, missing = of_section(self.without, key), of_section(self.refused, key)
        if key in self.same and value is not None:
            conversion.carry(key, {self.same[key]: value})
        elif key in self.same:
            conversion.drop(key, "not set")
        elif reason is not None:
            conversion.drop(key, reason)
        elif missing is not None and not is_off(value):
            conversion.refuse(key, missing)
        elif is_off(value):
            conversion.drop(key, "is off, as here")
        else:
            hint = did_you_mean(key, [*self.same, *self.converted, *self.without, *self.refused])
            conversion.refuse(key, f"is no key of {conversion.tool} that is known here{hint}")


def _convert(conversion: ConfigImport, key: str, convert: Convert) -> None:
    try:
        convert(conversion, key)
    except (AttributeError, TypeError, ValueError):  # text where a number is expected, a list where text is
        conversion.refuse(key, "is no value of this key", may_be_left_out=False)


def of_section(table: Mapping[str, str], key: str) -> str | None:
    """The row of a key, of the section that it is in, or of names that begin like it (`liger_*`)."""
    name = key
    while name:
        if name in table:
            return table[name]
        cut = max(name.rfind("."), name.rfind("["))
        name = name[:cut] if cut > 0 else ""
    return next((why for row, why in table.items() if row.endswith("*") and key.startswith(row[:-1])), None)


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")


def leave_out(keys: Iterable[str], theirs: TheirFile) -> dict[str, KeyFate]:
    """Takes keys and sections out of the file as the user has asked; what became of them. ConfigError for one that the
    file does not have."""
    fates = {}
    for key in keys:
        found = theirs.under(key)
        if not found:
            raise ConfigError(f"--without: {theirs.shown} has no key {quote(key)}")
        for name in found:
            del theirs.values[name]
            fates[name] = KeyFate(DROPPED, {}, "left out by --without")
    return fates

"""A file of another tool as a config of ours: checked, and as YAML in the shape of the shipped ones."""

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.check import COMMAND_LINE
from recipe_lib.config.describe import value_text
from recipe_lib.config.keys import read_schema
from recipe_lib.config.load import ALTERNATIVES, Loaded, load
from recipe_lib.config.local_files import is_hub_id
from recipe_lib.config.other_configs.conversion import (
    CARRIED,
    CHANGED,
    DEFAULT,
    DROPPED,
    ConfigImport,
    KeyFate,
    leave_out,
)
from recipe_lib.config.other_configs.their_file import read_their_file
from recipe_lib.config.other_configs.tools import tool_of
from recipe_lib.config.recipes import RECIPE_CONFIGS
from recipe_lib.config.stalled_means import describe_stalled_means
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError

_SOURCE = re.compile(r"data\.sources\[(\d+)\]\.(\w+)")
_LEAST_WIDTH = 20


@dataclass(frozen=True)
class Imported:
    """tool: whose file it was. recipe: of ours. cfg: the config. fates: what became of each key of the file, and of
    what their tool takes for keys that the file leaves out. settings: our keys that differ from the defaults. notes:
    what to know of the config, and commands that help further."""

    tool: str
    recipe: str
    source: str
    cfg: Any
    fates: dict[str, KeyFate]
    settings: dict[str, Any]
    notes: list[str]

    def counts(self) -> dict[str, int]:
        """Keys of the file that were carried, that have another effect, and that were dropped."""
        found = Counter(fate.kind for fate in self.fates.values())
        return {kind: found[kind] for kind in (CARRIED, CHANGED, DROPPED)}

    def yaml(self, name: str) -> str:
        """The config as text. name: of its file, for the command in its header."""
        counts = self.counts()
        about = (
            f"Imported from {show(self.source)} of {self.tool}: {counts[CARRIED]} keys carried, {counts[CHANGED]} with "
            f"another effect, {counts[DROPPED]} dropped; `tune import` says which and why."
        )
        header = [f"# {line}" for line in textwrap.wrap(about, 116)]
        models = [self.settings.get(name) for name in ("model.path", "distill.teacher")]
        commands = [f"tune download {name}" for name in models if name and is_hub_id(name)]
        commands.append(f"tune run {self.recipe} --config {show(name)}")
        return "\n".join([*header, "#", *(f"#   {line}" for line in commands), *self._body()]) + "\n"

    def _body(self) -> list[str]:
        """The recipe, sections in the schema's order, then what has no section."""
        lines, section = [f"recipe: {self.recipe}"], ""
        inside = [name for name in self.settings if "." in name]
        for name in inside:
            outer, _, word = name.partition(".")
            if outer != section:
                section = outer
                lines.append(f"{section}:")
            lines += _key_lines(word, self.settings[name], "  ")
        for name in self.settings:
            if name not in inside and name != "recipe":
                lines += _key_lines(name, self.settings[name], "")
        return lines

    def table(self) -> str:
        """A line for each key of the file, and for defaults of theirs that are not ours."""
        rows: list[tuple[str, str]] = []
        for kind in (CARRIED, CHANGED, DEFAULT, DROPPED):
            found = {key: fate for key, fate in self.fates.items() if fate.kind == kind and self._is_shown(fate)}
            if found:
                rows.append((f"{kind} ({len(found)})", ""))
                rows += [(f"  {show(name)}", text) for name, text in _grouped(found)]
        width = max([_LEAST_WIDTH, *(len(key) for key, _ in rows)])
        return "".join(f"{f'{key:{width}}  {text}'.rstrip()}\n" for key, text in rows)

    def _is_shown(self, fate: KeyFate) -> bool:
        is_ours = not any(name in self.settings for name in fate.ours) if fate.ours else not fate.why
        return fate.kind != DEFAULT or not is_ours


def import_file(
    path: str, *, tool: str | None = None, overrides: Sequence[str] = (), omitted: Sequence[str] = ()
) -> Imported:
    """The config of ours that a file of another tool asks for.

    tool: whose it is; None: its keys say. overrides: of our keys, as on the command line; they win. omitted: keys of
    the file to do without. Raises ConfigError, a line a fault: for a file that no recipe of ours trains, a key that
    cannot be carried, a config that would not run.
    """
    theirs = read_their_file(path)
    module = tool_of(theirs, tool)
    left_out = leave_out(omitted, theirs)
    conversion = ConfigImport(theirs, module.NAME, module.DEFAULTS, module.NULL_MEANS)
    conversion.given = {word.removeprefix("~").partition("=")[0] for word in overrides}
    module.convert(conversion)
    missing = [key for key in theirs.values if not conversion.noted(key)]
    if missing:
        raise AssertionError(f"{module.NAME}: nothing is said about {', '.join(missing)}")
    loaded = _load(conversion, overrides)
    fates = _without_effect(conversion, loaded) | left_out
    settings = _settings(loaded, conversion.recipe)
    notes = [*(f"note: {line}" for line in describe_stalled_means(loaded.cfg)), *conversion.notes]
    return Imported(module.NAME, conversion.recipe, theirs.path.name, loaded.cfg, fates, settings, notes)


def _load(conversion: ConfigImport, overrides: Sequence[str]) -> Loaded:
    """Checks the config as `tune validate` does; our keys are handed over as if they had been typed."""
    taken = dict(conversion.ours)
    for pair in ALTERNATIVES:  # what the user sets takes the place of its alternative
        for one, other in (pair, pair[::-1]):
            if one in conversion.given:
                taken = {name: value for name, value in taken.items() if not name.startswith(other)}
    words = [f"{name}={value_text(value)}" for name, value in _in_lists(taken).items()]
    try:
        return load((), [*words, *overrides], RECIPE_CONFIGS[conversion.recipe])
    except ConfigError as error:
        own = f"{COMMAND_LINE}: "
        theirs = {name: key for key, fate in conversion.fates.items() for name in fate.ours}

        def placed(line: str) -> str:
            said = line.removeprefix(own)
            key = theirs.get(said.partition("=")[0])
            where = f"{conversion.theirs.place(key)}: {show(key)}" if key else conversion.theirs.shown
            return f"{where}: as ours: {said}"

        typed = tuple(f"{own}{show(word)}" for word in overrides)
        faults = (line if typed and line.startswith(typed) else placed(line) for line in error.faults)
        raise ConfigError(*faults) from error


def _in_lists(ours: dict[str, Any]) -> dict[str, Any]:
    """`data.sources[0].source` and its like as one list."""
    sources: dict[int, dict[str, Any]] = {}
    for name, value in ours.items():
        if found := _SOURCE.fullmatch(name):
            sources.setdefault(int(found[1]), {})[found[2]] = value
    rest = {name: value for name, value in ours.items() if not _SOURCE.fullmatch(name)}
    return rest | ({"data.sources": [sources[number] for number in sorted(sources)]} if sources else {})


def _without_effect(conversion: ConfigImport, loaded: Loaded) -> dict[str, KeyFate]:
    """Keys whose counterpart has no effect in this config, or is set by the user, are dropped with the reason."""
    reasons = {line.partition(" has no effect: ")[0]: line for line in loaded.idle}
    reasons |= {name: f"{name} is set on the command line" for name in conversion.given}
    fates = dict(conversion.fates)
    for key, fate in fates.items():
        if fate.kind in (CARRIED, CHANGED) and fate.ours and set(fate.ours) <= set(reasons):
            fates[key] = KeyFate(DROPPED, {}, reasons[next(iter(fate.ours))])
    return fates


def _settings(loaded: Loaded, recipe: str) -> dict[str, Any]:
    """Our keys that differ from the defaults and have an effect, in the schema's order."""
    keys = read_schema(RECIPE_CONFIGS[recipe]).keys
    effective = {name: value for name, value, where in loaded.rows if "no effect" not in where}
    return {name: value for name, value in effective.items() if value != keys[name].default}


def _key_lines(word: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        items = [
            {field.name: getattr(item, field.name) for field in dataclasses.fields(item)
             if getattr(item, field.name) != field.default} for item in value
        ]  # fmt: skip
        return [f"{indent}{word}:", *(f"{indent}  - {value_text(item)}" for item in items)]
    return [f"{indent}{word}: {value_text(value)}"]


def _grouped(fates: dict[str, KeyFate]) -> Iterator[tuple[str, str]]:
    """(key, what became of it); keys of a section that are dropped for one reason stand in one line."""
    together: dict[tuple[str, str], list[str]] = {}
    for key, fate in fates.items():
        section = key.rpartition(".")[0] if fate.kind == DROPPED else ""
        together.setdefault((section or key, _said(fate)), []).append(key)
    for (section, said), keys in together.items():
        if len(keys) == 1:
            yield keys[0], said
        else:
            words = ", ".join(key.removeprefix(f"{section}.") for key in keys)
            yield f"{section}.*", f"{words}: {said}"


def _said(fate: KeyFate) -> str:
    ours = ", ".join(f"{name}: {value_text(value)}" for name, value in fate.ours.items())
    return "; ".join(part for part in (f"-> {ours}" if ours else "", fate.why) if part) or "as here"

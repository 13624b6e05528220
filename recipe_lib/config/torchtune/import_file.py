"""A file of torchtune's as a config of ours: checked, and as YAML in the shape of the shipped ones."""

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
from recipe_lib.config.recipes import RECIPE_CONFIGS
from recipe_lib.config.stalled_means import describe_stalled_means
from recipe_lib.config.suggest import show
from recipe_lib.config.torchtune.conversion import (
    CARRIED,
    CHANGED,
    DEFAULT,
    DROPPED,
    ConfigImport,
    KeyFate,
    leave_out,
)
from recipe_lib.config.torchtune.convert_keys import convert
from recipe_lib.config.torchtune.key_tables import DEFAULTS
from recipe_lib.config.torchtune.read_file import TheirFile, read_their_file
from recipe_lib.errors import ConfigError

_SOURCE = re.compile(r"data\.sources\[(\d+)\]\.(\w+)")
_LEAST_WIDTH = 20


@dataclass(frozen=True)
class Imported:
    """A config of ours, and what it came of."""

    recipe: str
    """Of ours."""
    source: str
    """The name of the file."""
    cfg: Any
    """The config object."""
    fates: dict[str, KeyFate]
    """What became of each key of the file, and of what torchtune takes for keys that the file leaves out."""
    settings: dict[str, Any]
    """Our keys that differ from the defaults."""
    notes: list[str]
    """What to know of the config, and commands that help further."""

    def counts(self) -> dict[str, int]:
        """Count the keys of the file that were carried, that have another effect, and that were dropped."""
        kinds = Counter(fate.kind for fate in self.fates.values())
        return {kind: kinds[kind] for kind in (CARRIED, CHANGED, DROPPED)}

    def yaml(self, name: str) -> str:
        """Return the config as text. name: of its file, for the command in its header."""
        counts = self.counts()
        about = (
            f"Imported from {show(self.source)} of torchtune: {counts[CARRIED]} keys carried, {counts[CHANGED]} with "
            f"another effect, {counts[DROPPED]} dropped; `tune import` says which and why."
        )
        header = [f"# {line}" for line in textwrap.wrap(about, 116)]
        models = [self.settings.get(name) for name in ("model.path", "distill.teacher")]
        commands = [f"tune download {name}" for name in models if name and is_hub_id(name)]
        commands.append(f"tune run {self.recipe} --config {show(name)}")
        return "\n".join([*header, "#", *(f"#   {line}" for line in commands), *self._body()]) + "\n"

    def _body(self) -> list[str]:
        """Write the recipe, sections in the schema's order, then what has no section."""
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
        """Write a line for each key of the file, and for defaults of theirs that are not ours."""
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


def import_file(path: str, *, overrides: Sequence[str] = (), omitted: Sequence[str] = ()) -> Imported:
    """Return the config of ours that a file of torchtune's asks for.

    overrides: of our keys, as on the command line; they win. omitted: keys of the file to do without. Raises
    ConfigError, a line a fault: for a file that no recipe of ours trains, a key that cannot be carried, a config that
    would not run.
    """
    theirs = read_their_file(path)
    _check_tool(theirs)
    left_out = leave_out(omitted, theirs)
    conversion = ConfigImport(theirs, DEFAULTS)
    convert(conversion)
    given = {word.removeprefix("~").partition("=")[0] for word in overrides}
    loaded = _load(conversion, overrides, given)
    fates = _drop_idle(conversion, loaded, given) | left_out
    settings = _select_settings(loaded, conversion.recipe)
    notes = [*(f"note: {line}" for line in describe_stalled_means(loaded.cfg)), *conversion.notes]
    return Imported(conversion.recipe, theirs.path.name, loaded.cfg, fates, settings, notes)


# Other tools, and keys that only their configs have.
_OTHER_TOOLS = {
    "Axolotl": ("base_model", "micro_batch_size", "sequence_len"),
    "LLaMA-Factory": ("model_name_or_path", "finetuning_type", "cutoff_len", "dataset_dir"),
}


def _check_tool(theirs: TheirFile) -> None:
    """Raise ConfigError for a file that is not torchtune's: its configs alone name Python code."""
    if any(key.rpartition(".")[2] == "_component_" for key in theirs.values):
        return
    if "recipe" in theirs.values:
        raise ConfigError(f"{theirs.shown}: has a key recipe, as configs of ours have: `tune validate` checks it")
    only = "configs of torchtune's are imported"
    for tool, names in _OTHER_TOOLS.items():
        keys = [key for key in names if key in theirs.values]
        if keys:
            remedy = f"{only}; `tune validate {theirs.shown}` has our key for each of these"
            raise ConfigError(f"{theirs.shown}: has keys of {tool}'s ({', '.join(keys)}); {remedy}")
    raise ConfigError(f"{theirs.shown}: has no key _component_, as torchtune's configs have; {only}")


def _load(conversion: ConfigImport, overrides: Sequence[str], given: set[str]) -> Loaded:
    """Check the config as `tune validate` does; our keys are handed over as if they had been typed."""
    taken = dict(conversion.ours)
    for pair in ALTERNATIVES:  # what the user sets takes the place of its alternative
        for one, other in (pair, pair[::-1]):
            if one in given:
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
    """Put `data.sources[0].source` and its like into one list."""
    sources: dict[int, dict[str, Any]] = {}
    for name, value in ours.items():
        if found := _SOURCE.fullmatch(name):
            sources.setdefault(int(found[1]), {})[found[2]] = value
    rest = {name: value for name, value in ours.items() if not _SOURCE.fullmatch(name)}
    return rest | ({"data.sources": [sources[number] for number in sorted(sources)]} if sources else {})


def _drop_idle(conversion: ConfigImport, loaded: Loaded, given: set[str]) -> dict[str, KeyFate]:
    """Return the fates; keys whose counterpart has no effect in this config, or is given by the user, are dropped."""
    reasons = {line.partition(" has no effect: ")[0]: line for line in loaded.idle}
    reasons |= {name: f"{name} is set on the command line" for name in given}
    fates = dict(conversion.fates)
    for key, fate in fates.items():
        if fate.kind in (CARRIED, CHANGED) and fate.ours and set(fate.ours) <= set(reasons):
            fates[key] = KeyFate(DROPPED, {}, reasons[next(iter(fate.ours))])
    return fates


def _select_settings(loaded: Loaded, recipe: str) -> dict[str, Any]:
    """Return our keys that differ from the defaults and have an effect, in the schema's order."""
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
    """Yield (key, what became of it); keys of a section that are dropped for one reason stand in one line."""
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

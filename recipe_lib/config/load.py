"""Reads a config, checks all of it at once, and hands on a typed object.

`load_config` takes files and overrides, `parse_arguments` a recipe's command line. Both raise one
ConfigError with every fault, a line each, and leave keys that have no effect at their defaults.
"""

import argparse
import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from recipe_lib.config.check_settings import (
    COMMAND_LINE,
    CollectedSettings,
    Setting,
    Source,
    check_required,
    check_section,
    check_section_value,
    check_value,
    fill_pending,
    report_unknown_key,
)
from recipe_lib.config.compatibility.table import find_broken_rules
from recipe_lib.config.convert_values import describe_node
from recipe_lib.config.flat_schema import Schema, build_item_schema, read_schema
from recipe_lib.config.key_conditions import reset_idle_keys
from recipe_lib.config.paths import expand_home, find_config, read_recipe_configs
from recipe_lib.config.read_yaml import YamlError, YamlNode, parse, read_file
from recipe_lib.config.registry import load_plugin
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError, raise_faults
from recipe_lib.logs import get_logger
from recipe_lib.redaction import has_secret

Sources = str | Path | Sequence[str | Path]
# Keys for the same thing: what is set later, on the command line or in a later file, takes the
# place of the other, so that an override need not also reset what the config has.
ALTERNATIVES = (
    ("data.source", "data.sources"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_ratio"),
)


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where its values are from."""

    cfg: Any
    # (dotted key, value that is used, where it was set), in the schema's order; where is
    # `configs/demo/full.yaml:7`, `command line` or `default`.
    rows: list[tuple[str, Any, str]]
    # A line for each key that was set and has no effect, so that it has its default in cfg.
    idle: list[str]


def load_config(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> Any:
    """Return the config as an object of the class `schema`.

    sources: a shipped name (`llama3/8B_full`) or a path; or several, of which the later ones win,
    key by key.
    overrides: `key=value`, `section.key=value`, or `~key` for the default; later ones win.
    schema: FullFinetuneConfig or a subclass, with additional keys and sections.
    Raises ConfigError with every fault of the files and the overrides, a line each.
    """
    return load_with_origins(sources, overrides, schema).cfg


def parse_arguments(
    argv: list[str] | None, schema: type = FullFinetuneConfig, *, quiet: bool = False
) -> Any:
    """Return the config of a recipe's command line.

    It is `--config NAME_OR_PATH ... [--plugin FILE ...] [key=value ...] [~key ...]`.

    argv: None for the arguments of the process, in which no key may be given twice; of a list the
    later ones win.
    quiet: do not log the keys that were set and have no effect.
    Raises ConfigError, also where argparse would print its usage.
    """
    if argv is None:
        refuse_repeated(sys.argv[1:])
    # Intermixed: overrides may stand before, between and after the options.
    arguments = _build_parser().parse_intermixed_args(argv)
    # Before the config, which may use names that a plugin registers.
    for plugin in arguments.plugin:
        load_plugin(plugin)
    loaded = load_with_origins(arguments.config, arguments.overrides, schema)
    if not quiet:
        for line in loaded.idle:
            get_logger().info(line)
    return loaded.cfg


def _build_parser() -> argparse.ArgumentParser:
    # Without abbreviations: `--con` would be a misspelled option that is taken without a word.
    parser = _Parser(
        allow_abbrev=False, description="Overrides are key=value, section.key=value, or ~key."
    )
    parser.register("action", None, StoreOnce)
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="NAME_OR_PATH",
        help="`tune ls` lists the names",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a .py file that registers names",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are one line of ours."""

    def error(self, message: str) -> NoReturn:
        missing = "the following arguments are required: --config"
        fault = message.replace(missing, "--config is missing")
        if "twice" not in fault:
            fault += "; expected --config NAME_OR_PATH [--plugin FILE] [key=value ...]"
        raise ConfigError(f"command line: {fault}")


def load_with_origins(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> LoadedConfig:
    """Load a config as `load_config` does, with where each value is from and which are idle."""
    checked, files = _read_settings(sources, overrides, schema)
    _check_recipe(checked)
    loaded = _finish(checked, files)
    raise_faults(ConfigError, checked.list_faults())
    return loaded


def _finish(checked: CollectedSettings, files: list[str]) -> LoadedConfig:
    """Make the config of what was set, and note what is missing and what does not go together."""
    last_file = files[-1] if files else ""
    replaced = _drop_replaced(checked, [*files, COMMAND_LINE])
    check_required(checked, last_file)
    cfg = _build_config(checked, last_file)
    idle = [f"{name} has no effect: {why}" for name, (_, why) in replaced.items()]
    # Before the rules: a key that has no effect breaks none.
    idle += reset_idle_keys(cfg, checked.schema.keys.values(), checked.list_judged_keys())
    for rule in find_broken_rules(cfg, checked.list_judged_keys()):
        checked.add_fault(
            checked.format_last_places(rule.keys, last_file), "", rule.format_line(cfg), doubt=False
        )
    # Back, for the rows that say where each key was set.
    checked.settings.update({name: setting for name, (setting, _) in replaced.items()})
    return LoadedConfig(cfg, _list_rows(checked, idle), idle)


def _read_settings(
    sources: Sources, overrides: Sequence[str], schema: type
) -> tuple[CollectedSettings, list[str]]:
    """Return what files and overrides set, with their faults, and the files' names in errors.

    Raises ConfigError for a file that is not there or no YAML at all.
    """
    checked = CollectedSettings(read_schema(schema))
    files = []
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        path = find_config(source)
        shown = _format_file(source, path)
        files.append(shown)
        document = read_file(path, shown)
        num_faults = len(checked.faults)
        for line, fault in document.faults:
            checked.add_fault(f"{shown}:{line}", "", fault, doubt=False)
        check_section_value(checked, "", document.top, source=Source(shown), line=document.top.line)
        checked.sort_by_line(shown, num_faults)
    apply_overrides(checked, overrides)
    fill_pending(checked)
    # After the names are filled in: a value may be put together of harmless parts.
    for name, setting in checked.settings.items():
        if _is_secret(name, setting.value):
            checked.add_fault(setting.where, name, _SECRET_REFUSED)
    return checked, files


def _drop_replaced(checked: CollectedSettings, layers: list[str]) -> dict[str, tuple[Setting, str]]:
    """Take away the settings whose alternative is set later.

    layers: the files in their order, and the command line. Returns (setting, why it has no effect)
    by name.
    """
    replaced = {}
    for pair in ALTERNATIVES:
        settings = [checked.settings[name] for name in pair if name in checked.settings]
        settings = [setting for setting in settings if setting.value not in (None, [])]
        if len(settings) < 2:
            continue
        first, second = (
            layers.index(setting.where.rpartition(":")[0] or COMMAND_LINE) for setting in settings
        )
        # Both in one layer: a rule refuses them, or one is idle by `needs`.
        if first != second:
            earlier, later = pair if first < second else pair[::-1]
            why = f"{later} takes its place ({checked.settings[later].where})"
            replaced[earlier] = (checked.settings.pop(earlier), why)
    return replaced


def _list_rows(checked: CollectedSettings, idle: list[str]) -> list[tuple[str, Any, str]]:
    reasons = dict(line.split(" has no effect: ", 1) for line in idle)
    rows = []
    for name, key in checked.schema.keys.items():
        setting = checked.settings.get(name)
        if setting is None:
            rows.append((name, key.default, "default"))
        elif name in reasons:
            rows.append((name, key.default, f"{setting.where}; no effect: {reasons[name]}"))
        else:
            rows.append((name, setting.value, setting.where))
    return rows


def _check_recipe(checked: CollectedSettings) -> None:
    """Note a fault if the config is for another recipe.

    A class of the user's own takes configs of the recipes that its parents are of, too.
    """
    setting = checked.settings.get("recipe")
    if setting is None:
        return
    config_class = checked.schema.config_class
    owners = [owner for owner in config_class.__mro__ if "recipe" in vars(owner)]
    legal = list(dict.fromkeys(vars(owner)["recipe"] for owner in owners))
    if config_class in read_recipe_configs().values():
        # A shipped class takes only its own: another method's config has other settings, or lacks
        # those that matter here.
        legal = legal[:1]
    if setting.value not in legal:
        hint = (
            f"; run it with that recipe: tune run {setting.value}, or override it:"
            f" recipe={legal[0]}"
            if setting.value in read_recipe_configs()
            else did_you_mean(setting.value, legal)
        )
        checked.add_fault(
            setting.where,
            "recipe",
            f"found {quote(setting.value)}, expected {' or '.join(legal)}{hint}",
        )


def _build_config(checked: CollectedSettings, file: str) -> Any:
    """Return the config's class, filled with what was set without a fault.

    A key in doubt has its default, so that all rules about other keys can still be judged.
    """
    values = {
        name: copy.deepcopy(setting.value)
        for name, setting in checked.settings.items()
        if name not in checked.doubtful
    }
    try:
        return _build_section(checked.schema, "", values)
    except ValueError as error:  # a `__post_init__` of a user's own class
        fault = str(error).partition("\n")[0] or "refused by the config's class"
        raise ConfigError(*checked.list_faults(), f"{file}: {fault}") from error


def _build_section(schema: Schema, section: str, values: dict[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for name in schema.list_children(section):
        word = name.rpartition(".")[2]
        if name in schema.sections:
            arguments[word] = _build_section(schema, name, values)
        else:
            # Of a required key the default is None, and its fault is noted already.
            default = copy.deepcopy(schema.keys[name].default)
            arguments[word] = values.get(name, default)
    return schema.sections[section](**arguments)


def _format_file(source: str | Path, path: Path) -> str:
    """Return the file's name in errors: as the user gave it.

    Of a shipped config it is the path, from the working folder if it is inside.
    """
    if path == expand_home(source):
        return quote(str(source))[1:-1]
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def refuse_repeated(words: Iterable[str]) -> None:
    """Raise ConfigError, a line each, for keys given twice among `key=value` and `~key`."""
    first_words: dict[str, str] = {}
    faults = []
    for word in words:
        if word.startswith("-") or not (word.startswith("~") or "=" in word):
            continue
        name = word.removeprefix("~").partition("=")[0]
        if name in first_words:
            both = f"{show(first_words[name])} and {show(word)}"
            faults.append(
                f"command line: {show(name)}: given twice, as {both}; remove one of the two"
            )
        first_words.setdefault(name, word)
    raise_faults(ConfigError, faults)


class StoreOnce(argparse.Action):
    """argparse's `store`, which refuses an option that has been given before.

    A parser registers it as the action of options that name none:
    `parser.register("action", None, StoreOnce)`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        # In the namespace: an action has no state of one parse, and is used for several.
        earlier_values = namespace.__dict__.setdefault("_given", {})
        # Positional arguments come without an option string, and are counted by argparse.
        if option_string is not None and self.dest in earlier_values:
            parser.error(
                f"{option_string} is given twice, as {show(str(earlier_values[self.dest]))} and"
                f" {show(str(values))}; remove one of the two"
            )
        earlier_values[self.dest] = values
        setattr(namespace, self.dest, values)


_SECRET_REFUSED = (
    "holds what looks like a token or a password, and configs are written to disk; remove it, and"
    " set it as an environment variable (HF_TOKEN, WANDB_API_KEY) or use `hf auth login`"
)


def check_no_secrets(cfg: Any) -> None:
    """Raise ConfigError if a key of a config object holds a secret.

    For configs that are made without a file; `load_config` refuses secrets itself.
    """
    secret_keys = [name for name, value in _list_texts("", cfg) if _is_secret(name, value)]
    raise_faults(ConfigError, (f"{name}: {_SECRET_REFUSED}" for name in secret_keys))


def _is_secret(name: str, value: Any) -> bool:
    """Return True if a value, or anything in it, is a secret."""
    # With the name, which makes a bare hash a secret, as in `api_key: 0123...`.
    return any(has_secret(f"{inner}={text}") for inner, text in _list_texts(name, value))


def _list_texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every text in a value, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _list_texts(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _list_texts(f"{name}[{number}]", inner)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield name, str(value)


# Overrides: `key=value`, `section.key=value`, `list[1].key=value` and `~key`.

_ITEM = re.compile(r"(.+)\[([0-9]{1,4})\]\.([^.\[\]]+)")
_OPENS_YAML = ("[", "{", '"', "'")


def apply_overrides(checked: CollectedSettings, overrides: Sequence[str]) -> None:
    """Check each override and take its value; later ones win."""
    for override in overrides:
        if checked.full:
            return
        place = f"{COMMAND_LINE}: {show(override)}"
        source = Source(COMMAND_LINE, place)
        if override.startswith("~"):
            _reset_key(checked, override[1:], source)
        elif "=" not in override:
            checked.add_fault(
                place,
                "",
                "expected key=value, or ~key for the default; a further config is --config FILE",
            )
        else:
            name, _, text = override.partition("=")
            _set_key(checked, name, text, source=source)


def _set_key(checked: CollectedSettings, name: str, text: str, *, source: Source) -> None:
    schema = checked.schema
    place = source.override
    try:
        value = _read_value(checked, text, place)
    except YamlError as error:
        checked.add_fault(place, "", str(error))
        return
    outer = schema.find_outer_mapping(name)
    if value.is_interpolated and (outer or _ITEM.fullmatch(name)):
        checked.add_fault(
            place,
            "",
            "a part of a value cannot name other keys here; write it in a file, or the value"
            " itself",
        )
    elif name in schema.sections and name:
        _set_section(checked, name, value, source=source)
    elif name in schema.keys:
        check_value(checked, schema.keys[name], value, source=source, typed=True)
    elif item := _ITEM.fullmatch(name):
        _set_in_item(checked, item, value, source=source)
    elif outer:
        _set_entry(checked, outer, name.removeprefix(f"{outer}."), value=value, source=source)
    elif name.startswith(("-", "+")) and name.lstrip("-+"):
        # Hydra's `+key=value`, argparse's `--key=value`.
        checked.add_fault(
            place,
            "",
            f"overrides have no {name[0]} in front; write {show(name.lstrip('-+'))}={show(text)}",
        )
    else:
        report_unknown_key(checked, name, value, source=source, typed=True)


def _read_value(checked: CollectedSettings, text: str, place: str) -> YamlNode:
    """Return the value of an override.

    A list, mapping or quoted text is read as YAML. All else is one word as it stands: a shell user
    does not expect `#`, `*` and `: ` to mean something.
    """
    if not text.startswith(_OPENS_YAML):
        return YamlNode("scalar", 1, text.strip())
    document = parse(text)
    for _, fault in document.faults:
        checked.add_fault(place, "", fault)
    return document.top if not document.faults else YamlNode("broken", 1)


def _set_section(checked: CollectedSettings, name: str, value: YamlNode, *, source: Source) -> None:
    """Set keys of a section, as in `data={source: x}`; the others stay as they are."""
    if value.kind == "broken":
        checked.mark_doubtful(name)
    elif value.kind != "mapping":
        keys = [key for key in checked.schema.list_children(name) if key in checked.schema.keys]
        checked.add_fault(
            source.override,
            "",
            f"found {describe_node(value)}, expected keys of the section, as in {keys[0]}=VALUE",
        )
        checked.mark_doubtful(name)
    else:
        check_section(checked, section=name, node=value, source=source)


def _set_entry(
    checked: CollectedSettings, outer: str, inner: str, *, value: YamlNode, source: Source
) -> None:
    """Add one entry to a mapping, as in `data.columns.instruction=question`."""
    before = checked.settings.get(outer)
    node = YamlNode("mapping", 1, entries={inner: (1, value)})
    check_value(checked, checked.schema.keys[outer], node, source=source, typed=True)
    after = checked.settings.get(outer)
    # The same object: the value had a fault and was not taken.
    if after is not None and after is not before:
        entries = before.value if before else checked.schema.keys[outer].default
        checked.store(outer, {**(entries or {}), **after.value}, _add_command_line(before))


def _set_in_item(
    checked: CollectedSettings, item: re.Match[str], value: YamlNode, *, source: Source
) -> None:
    """Set one key of one section of a list, as in `data.sources[1].weight=2`."""
    name, index, word = item.groups()
    number = int(index)
    key = checked.schema.keys.get(name)
    if key is None or key.section_class is None:
        report_unknown_key(checked, item[0], source=source, typed=True)
        return
    before = checked.settings.get(name)
    items = list(before.value if before else key.default)
    if number >= len(items):
        # A list in doubt has its default, and may be longer in the file.
        if name not in checked.doubtful:
            has = f"the last one is {name}[{len(items) - 1}]" if items else "the list is empty"
            checked.add_fault(
                source.override,
                "",
                f"{name}[{number}] is not there, {has}; write {name}=[...] for another list",
            )
        return
    inner = CollectedSettings(build_item_schema(key, number), faults=checked.faults)
    num_faults = len(checked.faults)
    if item[0] in inner.schema.keys:
        check_value(inner, inner.schema.keys[item[0]], value, source=source, typed=True)
    else:
        report_unknown_key(inner, item[0], source=source, typed=True)
    if len(checked.faults) > num_faults:
        checked.mark_doubtful(name)
        return
    for setting in inner.settings.values():
        items[number] = replace(items[number], **{word: setting.value})
    checked.store(name, items, _add_command_line(before))


def _add_command_line(before: Setting | None) -> str:
    """Return where a value was set of which an override has changed a part: in both places."""
    if before is None or COMMAND_LINE in before.where:
        return before.where if before else COMMAND_LINE
    return f"{before.where}, {COMMAND_LINE}"


def _reset_key(checked: CollectedSettings, name: str, source: Source) -> None:
    """Put a key or section back to the schema's default, as in `~key`."""
    schema = checked.schema
    if "=" in name:
        bare = show(name.partition("=")[0])
        checked.add_fault(
            source.override,
            "",
            f"~ goes back to the default and takes no value; write ~{bare}",
        )
    elif name not in schema.keys and (name not in schema.sections or not name):
        report_unknown_key(checked, name, source=source, typed=True)
    else:
        for values in (checked.settings, checked.pending):
            for key in [key for key in values if key == name or key.startswith(f"{name}.")]:
                del values[key]

"""Load a config: read files and overrides, check all of it, and make a typed object.

A recipe calls `parse_arguments` for its command line; other programs call `load_config(sources,
overrides)`. Both raise one ConfigError with a line for each fault. An override is `key=value` on
the command line; an idle key, one that another key's value robs of its effect, gets its default; a
rule refuses a combination of settings.
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

Sources = str | Path | Sequence[str | Path]  # names or paths of config files, see `load_config`
# Pairs of keys for the same thing: the one that is set later, on the command line or in a later
# file, replaces the other, so that an override need not also reset the config's.
ALTERNATIVES = (
    ("data.source", "data.sources"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_ratio"),
)


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where its values are from."""

    # An object of the schema's class, without references or idle values.
    cfg: Any
    # (dotted key, value, where it was set), in the schema's order. A key that is not set, or idle,
    # has its default. Where: `configs/demo/full.yaml:7`, `command line` or `default`; of an idle
    # key also why.
    rows: list[tuple[str, Any, str]]
    # Idle key that was set -> why it has no effect.
    idle: dict[str, str]

    def describe_idle_keys(self) -> list[str]:
        """Return a line for each idle key that was set: `KEY has no effect: WHY`."""
        return [f"{name} has no effect: {why}" for name, why in self.idle.items()]


def load_config(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> Any:
    """Return the config as an object of the class `schema`.

    Args:
        sources: a shipped name (`llama3/8B_full`) or a path; or several, of which later ones win,
            key by key.
        overrides: `key=value`, `section.key=value`, or `~key` for the default; later ones win.
        schema: FullFinetuneConfig or a subclass, with additional keys and sections.

    Raises ConfigError with a line for each fault of the files and the overrides, and of their
    combination.
    """
    return load_with_origins(sources, overrides, schema).cfg


def parse_arguments(
    argv: list[str] | None, schema: type = FullFinetuneConfig, *, quiet: bool = False
) -> Any:
    """Return the config that a recipe's command line asks for.

    The command line is `--config NAME_OR_PATH ... [--plugin FILE ...] [key=value ...] [~key ...]`.

    argv: words of the command line, of which later ones win; None: those of the process, among
    which no key may be given twice. quiet: do not log idle keys that were set. Raises ConfigError
    for faults of the command line, where argparse would print its usage and exit, of a plugin and
    of the config.
    """
    if argv is None:
        refuse_repeated(sys.argv[1:])
    # Intermixed: overrides may stand before, between and after options.
    arguments = _build_parser().parse_intermixed_args(argv)
    # Before the config is read, which may use names that a plugin registers.
    for plugin in arguments.plugin:
        load_plugin(plugin)
    loaded = load_with_origins(arguments.config, arguments.overrides, schema)
    if not quiet:
        for line in loaded.describe_idle_keys():
            get_logger().info(line)
    return loaded.cfg


def _build_parser() -> argparse.ArgumentParser:
    # Without abbreviations: a misspelled `--con` would be taken silently for `--config`.
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
    """An argparse parser that raises ConfigError with one line, instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        # Called by argparse, and by StoreOnce, whose line ends with a remedy of its own.
        missing = "the following arguments are required: --config"
        fault = message.replace(missing, "--config is missing")
        if not fault.endswith(_REPEATED_REMEDY):
            fault += "; expected --config NAME_OR_PATH [--plugin FILE] [key=value ...]"
        raise ConfigError(f"command line: {fault}")


def load_with_origins(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> LoadedConfig:
    """Load a config as `load_config` does; return also where each value is from, and idle keys.

    Raises ConfigError as `load_config` does.
    """
    checked, files = _read_settings(sources, overrides, schema)
    _check_recipe(checked)
    loaded = _finish(checked, files)
    raise_faults(ConfigError, checked.list_faults())
    return loaded


def _finish(checked: CollectedSettings, files: list[str]) -> LoadedConfig:
    """Make the config of the settings; add faults for missing keys and broken rules to `checked`.

    files: names of the config files in errors.
    """
    last_file = files[-1] if files else ""  # named by faults about keys that are set nowhere
    replaced = _drop_replaced(checked, [*files, COMMAND_LINE])
    check_required(checked, last_file)
    cfg = _build_config(checked, last_file)
    idle = {name: why for name, (_, why) in replaced.items()}
    # Before the rules are checked: a key without effect must not break one.
    idle |= reset_idle_keys(cfg, checked.schema.keys.values(), checked.list_judged_keys())
    for rule in find_broken_rules(cfg, checked.list_judged_keys()):
        checked.add_fault(
            checked.format_last_places(rule.keys, last_file), "", rule.format_line(cfg), doubt=False
        )
    # Put back after the config was made without them: the rows say where each key was set.
    checked.settings.update({name: setting for name, (setting, _) in replaced.items()})
    return LoadedConfig(cfg, _list_rows(checked, idle), idle)


def _read_settings(
    sources: Sources, overrides: Sequence[str], schema: type
) -> tuple[CollectedSettings, list[str]]:
    """Return the settings of files and overrides with their faults, and the files' names in errors.

    Raises ConfigError for a file that does not exist or is not YAML at all; other faults are
    collected.
    """
    checked = CollectedSettings(read_schema(schema))
    files = []
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        path = find_config(source)
        shown = _format_file(source, path)
        files.append(shown)
        document = read_file(path, shown)
        num_faults = len(checked.faults)  # before this file's
        for line, fault in document.faults:
            checked.add_fault(f"{shown}:{line}", "", fault, doubt=False)
        check_section_value(checked, "", document.top, source=Source(shown), line=document.top.line)
        checked.sort_by_line(shown, num_faults)
    apply_overrides(checked, overrides)
    fill_pending(checked)
    # After references are filled in: a secret may be put together from harmless parts.
    for name, setting in checked.settings.items():
        if _is_secret(name, setting.value):
            checked.add_fault(setting.where, name, _SECRET_REFUSED)
    return checked, files


def _drop_replaced(checked: CollectedSettings, layers: list[str]) -> dict[str, tuple[Setting, str]]:
    """Remove the settings of `ALTERNATIVES` whose other key is set later.

    layers: names of the files in their order, then COMMAND_LINE. Returns the removed ones: key ->
    (its setting, why it has no effect).
    """
    replaced = {}
    for pair in ALTERNATIVES:
        settings = [checked.settings[name] for name in pair if name in checked.settings]
        # Null or an empty list takes no other key's place.
        settings = [setting for setting in settings if setting.value not in (None, [])]
        if len(settings) < 2:
            continue
        # `where` is `FILE:LINE`, or `command line` without a colon.
        first, second = (
            layers.index(setting.where.rpartition(":")[0] or COMMAND_LINE) for setting in settings
        )
        # If one file sets both, a rule refuses them, or one has no effect by the schema's `needs`.
        if first != second:
            earlier, later = pair if first < second else pair[::-1]
            why = f"{later} takes its place ({checked.settings[later].where})"
            replaced[earlier] = (checked.settings.pop(earlier), why)
    return replaced


def _list_rows(checked: CollectedSettings, idle: dict[str, str]) -> list[tuple[str, Any, str]]:
    rows = []
    for name, key in checked.schema.keys.items():
        setting = checked.settings.get(name)
        if setting is None:
            rows.append((name, key.default, "default"))
        elif name in idle:
            rows.append((name, key.default, f"{setting.where}; no effect: {idle[name]}"))
        else:
            rows.append((name, setting.value, setting.where))
    return rows


def _check_recipe(checked: CollectedSettings) -> None:
    """Add a fault if the config is for another recipe.

    A user's own config class accepts the recipes of its parent classes too. `recipe` in a class is
    the name of the recipe that it is for.
    """
    setting = checked.settings.get("recipe")
    if setting is None:
        return
    config_class = checked.schema.config_class
    owners = [owner for owner in config_class.__mro__ if "recipe" in vars(owner)]
    accepted_recipes = list(dict.fromkeys(vars(owner)["recipe"] for owner in owners))
    if config_class in read_recipe_configs().values():
        # A shipped class accepts only its own recipe: the config of another method has other keys,
        # or lacks those that matter here.
        accepted_recipes = accepted_recipes[:1]
    if setting.value not in accepted_recipes:
        hint = (
            f"; run it with that recipe: tune run {setting.value}, or override it:"
            f" recipe={accepted_recipes[0]}"
            if setting.value in read_recipe_configs()
            else did_you_mean(setting.value, accepted_recipes)
        )
        checked.add_fault(
            setting.where,
            "recipe",
            f"found {quote(setting.value)}, expected {' or '.join(accepted_recipes)}{hint}",
        )


def _build_config(checked: CollectedSettings, file: str) -> Any:
    """Return an object of the config's class with all settings that have no fault.

    A key with a fault gets its default, so that rules about other keys can still be checked.
    """
    values = {
        name: copy.deepcopy(setting.value)
        for name, setting in checked.settings.items()
        if name not in checked.doubtful
    }
    try:
        return _build_section(checked.schema, "", values)
    except ValueError as error:  # a `__post_init__` of a user's own class
        # No config can be made, so that rules cannot be checked: the faults so far are raised.
        fault = str(error).partition("\n")[0] or "refused by the config's class"
        raise ConfigError(*checked.list_faults(), f"{file}: {fault}") from error


def _build_section(schema: Schema, section: str, values: dict[str, Any]) -> Any:
    """Return an object of the section's dataclass; the section "" is the whole config.

    values: dotted key -> value.
    """
    arguments: dict[str, Any] = {}
    for name in schema.list_children(section):
        word = name.rpartition(".")[2]
        if name in schema.sections:
            arguments[word] = _build_section(schema, name, values)
        else:
            # A required key that is not set has a fault already; its default here is None.
            default = copy.deepcopy(schema.keys[name].default)
            arguments[word] = values.get(name, default)
    return schema.sections[section](**arguments)


def _format_file(source: str | Path, path: Path) -> str:
    """Return a file's name for errors.

    source: what the user gave; path: the file that it stands for. A path is named as it was given,
    a shipped name by its file, relative if that is inside the current folder.
    """
    if path == expand_home(source):
        return show(str(source))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def refuse_repeated(words: Iterable[str]) -> None:
    """Raise ConfigError with a line for each key given twice, as `key=value` or `~key`."""
    first_words: dict[str, str] = {}  # key -> the first word that sets it
    faults = []
    for word in words:
        if word.startswith("-") or not (word.startswith("~") or "=" in word):
            continue
        name = word.removeprefix("~").partition("=")[0]
        if name in first_words:
            both = f"{show(first_words[name])} and {show(word)}"
            faults.append(f"command line: {show(name)}: given twice, as {both}{_REPEATED_REMEDY}")
        first_words.setdefault(name, word)
    raise_faults(ConfigError, faults)


# Ends the error of an option that is given twice.
_REPEATED_REMEDY = "; remove one of the two"


class StoreOnce(argparse.Action):
    """argparse's action `store`, which refuses an option that is given twice.

    `parser.register("action", None, StoreOnce)` makes it the default action of a parser's options.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        # Earlier values are kept in the namespace: an action object is used for several parses.
        earlier_values = namespace.__dict__.setdefault("_given", {})
        # Positional arguments come without an option string, and are counted by argparse.
        if option_string is not None and self.dest in earlier_values:
            parser.error(
                f"{option_string} is given twice, as {show(str(earlier_values[self.dest]))} and"
                f" {show(str(values))}{_REPEATED_REMEDY}"
            )
        earlier_values[self.dest] = values
        setattr(namespace, self.dest, values)


# The fault of a key that holds a secret.
_SECRET_REFUSED = (
    "holds what looks like a token or a password, and configs are written to disk; remove it, and"
    " set it as an environment variable (HF_TOKEN, WANDB_API_KEY) or use `hf auth login`"
)


def check_no_secrets(cfg: Any) -> None:
    """Raise ConfigError if a key of a config object holds a secret, such as an access token.

    For configs that are made in Python; `load_config` refuses secrets itself.
    """
    secret_keys = [name for name, value in _list_texts("", cfg) if _is_secret(name, value)]
    raise_faults(ConfigError, (f"{name}: {_SECRET_REFUSED}" for name in secret_keys))


def _is_secret(name: str, value: Any) -> bool:
    # Judged with the key's name: a bare hash is a secret if the key is `api_key`.
    return any(has_secret(f"{inner}={text}") for inner, text in _list_texts(name, value))


def _list_texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every text in a value, at any depth.

    name: of the value; empty for a whole config. Numbers, truth values and None are no texts.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _list_texts(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _list_texts(f"{name}[{index}]", inner)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield name, str(value)


# Overrides: `key=value`, `section.key=value`, `list[1].key=value` and `~key`.

# `data.sources[1].weight`: (key of the list, index, key of its section).
_ITEM = re.compile(r"(.+)\[([0-9]{1,4})\]\.([^.\[\]]+)")
# Beginnings of a value that is read as YAML.
_OPENS_YAML = ("[", "{", '"', "'")


def apply_overrides(checked: CollectedSettings, overrides: Sequence[str]) -> None:
    """Check each override and store its value; later ones win."""
    for override in overrides:
        if checked.full:
            return
        fault_place = f"{COMMAND_LINE}: {show(override)}"  # beginning of its faults
        source = Source(COMMAND_LINE, fault_place)
        if override.startswith("~"):
            _reset_key(checked, override[1:], source)
        elif "=" not in override:
            checked.add_fault(
                fault_place,
                "",
                "expected key=value, or ~key for the default; a further config is --config FILE",
            )
        else:
            name, _, text = override.partition("=")
            _set_key(checked, name, text, source=source)


def _set_key(checked: CollectedSettings, name: str, text: str, *, source: Source) -> None:
    """Set what an override `name=text` names.

    It is a key, a section, one key of a list's item, or one entry of a mapping.
    """
    schema = checked.schema
    fault_place = source.override
    try:
        value = _read_value(checked, text, fault_place)
    except YamlError as error:
        checked.add_fault(fault_place, "", str(error))
        return
    outer = schema.find_outer_mapping(name)  # `data.columns` of `data.columns.instruction`
    # References are filled in after all overrides, when the parts have been put together.
    if value.has_reference and (outer or _ITEM.fullmatch(name)):
        checked.add_fault(
            fault_place,
            "",
            "a part of a value cannot name other keys here; write it in a file, or the value"
            " itself",
        )
    elif name in schema.sections and name:
        _set_section(checked, name, value, source=source)
    elif name in schema.keys:
        check_value(checked, schema.keys[name], value, source=source, from_override=True)
    elif item := _ITEM.fullmatch(name):
        _set_in_item(checked, item, value, source=source)
    elif outer:
        _set_entry(checked, outer, name.removeprefix(f"{outer}."), value=value, source=source)
    elif name.startswith(("-", "+")) and name.lstrip("-+"):
        # Hydra's `+key=value`, argparse's `--key=value`.
        checked.add_fault(
            fault_place,
            "",
            f"overrides have no {name[0]} in front; write {show(name.lstrip('-+'))}={show(text)}",
        )
    else:
        report_unknown_key(checked, name, value, source=source, from_override=True)


def _read_value(checked: CollectedSettings, text: str, place: str) -> YamlNode:
    """Return the value of an override as a node.

    A list, mapping or quoted text is read as YAML. Anything else is taken literally: on a command
    line nobody expects `#`, `*` and `: ` to have a meaning. Raises YamlError if it is not YAML;
    lesser faults, such as an alias, are added to `checked`, and give a node `broken`.
    """
    if not text.startswith(_OPENS_YAML):
        return YamlNode("scalar", 1, text.strip())
    document = parse(text)
    for _, fault in document.faults:
        checked.add_fault(place, "", fault)
    return document.top if not document.faults else YamlNode("broken", 1)


def _set_section(checked: CollectedSettings, name: str, value: YamlNode, *, source: Source) -> None:
    """Set keys of a section, as in `data={source: x}`; its other keys stay as they are."""
    if value.kind == "broken":
        checked.mark_doubtful(name)
    elif value.kind != "mapping":
        # One of them is the example in the error.
        keys = [key for key in checked.schema.list_children(name) if key in checked.schema.keys]
        checked.refuse_value(
            source.override,
            name,
            f"found {describe_node(value)}, expected keys of the section, as in {keys[0]}=VALUE",
            is_named=True,
        )
    else:
        check_section(checked, section=name, node=value, source=source)


def _set_entry(
    checked: CollectedSettings, outer: str, inner: str, *, value: YamlNode, source: Source
) -> None:
    """Add one entry to a mapping, as in `data.columns.instruction=question`.

    outer: dotted key of the mapping. inner: name of the entry.
    """
    earlier_setting = checked.settings.get(outer)
    node = YamlNode("mapping", 1, entries={inner: (1, value)})
    check_value(checked, checked.schema.keys[outer], node, source=source, from_override=True)
    new_setting = checked.settings.get(outer)
    # If it is the same object, the value had a fault and was not stored.
    if new_setting is not None and new_setting is not earlier_setting:
        entries = earlier_setting.value if earlier_setting else checked.schema.keys[outer].default
        checked.store(
            outer, {**(entries or {}), **new_setting.value}, _add_command_line(earlier_setting)
        )


def _set_in_item(
    checked: CollectedSettings, item: re.Match[str], value: YamlNode, *, source: Source
) -> None:
    """Set one key of one section of a list, as in `data.sources[1].weight=2`."""
    name, index, word = item.groups()  # of _ITEM
    number = int(index)
    key = checked.schema.keys.get(name)
    if key is None or key.section_class is None:
        report_unknown_key(checked, item[0], source=source, from_override=True)
        return
    earlier_setting = checked.settings.get(name)
    items = list(earlier_setting.value if earlier_setting else key.default)
    if number >= len(items):
        # A list with a fault has its default here, and may be longer in the file.
        if name not in checked.doubtful:
            has = f"the last one is {name}[{len(items) - 1}]" if items else "the list is empty"
            checked.add_fault(
                source.override,
                "",
                f"{name}[{number}] is not there, {has}; write {name}=[...] for another list",
            )
        return
    # A schema with the keys of this item, `data.sources[1].weight`, and the common list of faults.
    inner = CollectedSettings(build_item_schema(key, number), faults=checked.faults)
    num_faults = len(checked.faults)
    if item[0] in inner.schema.keys:
        check_value(inner, inner.schema.keys[item[0]], value, source=source, from_override=True)
    else:
        report_unknown_key(inner, item[0], source=source, from_override=True)
    if len(checked.faults) > num_faults:
        checked.mark_doubtful(name)
        return
    # A copy of the item: the list of an earlier setting, or the schema's default, may share it.
    for setting in inner.settings.values():
        items[number] = replace(items[number], **{word: setting.value})
    checked.store(name, items, _add_command_line(earlier_setting))


def _add_command_line(before: Setting | None) -> str:
    """Return where a value was set after an override changed a part of it: both places.

    before: the setting that it changed; None: the key had its default.
    """
    where = before.where if before else COMMAND_LINE
    return where if COMMAND_LINE in where else f"{where}, {COMMAND_LINE}"


def _reset_key(checked: CollectedSettings, name: str, source: Source) -> None:
    """Reset a key or section to the schema's default, for `~key`.

    name: what follows the `~`.
    """
    schema = checked.schema
    if "=" in name:
        bare = show(name.partition("=")[0])
        checked.add_fault(
            source.override,
            "",
            f"~ goes back to the default and takes no value; write ~{bare}",
        )
    elif name not in schema.keys and (name not in schema.sections or not name):
        report_unknown_key(checked, name, source=source, from_override=True)
    else:
        for values in (checked.settings, checked.pending):
            for key in [key for key in values if key == name or key.startswith(f"{name}.")]:
                del values[key]

"""Reads a config, checks all of it at once, and hands on a typed object."""

import argparse
import copy
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from recipe_lib.config.check_settings import (
    COMMAND_LINE,
    CollectedSettings,
    Setting,
    Source,
    check_file,
    check_required,
    check_section,
    check_value,
    fill_pending,
    report_unknown_key,
)
from recipe_lib.config.compatibility.table import find_broken_rules
from recipe_lib.config.convert_values import describe_node
from recipe_lib.config.flat_schema import build_item_schema, read_schema
from recipe_lib.config.key_conditions import reset_idle_keys
from recipe_lib.config.paths import RECIPE_CONFIGS, expand_home, find_config
from recipe_lib.config.read_yaml import YamlError, YamlNode, parse, read_file
from recipe_lib.config.registry import load_plugin
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.redaction import has_secret

Sources = str | Path | Sequence[str | Path]
# Keys for the same thing: what is set later, on the command line or in a later file, takes the
# place of the other.
ALTERNATIVES = (
    ("data.source", "data.sources"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_ratio"),
)


@dataclass(frozen=True)
class LoadedConfig:
    """cfg: the config object. rows: (dotted key, value that is used, where it was set), in the
    schema's order; where is `configs/demo/full.yaml:7`, `command line` or `default`. idle: a line
    for each key that was set and has no effect, which is why it has its default in cfg.
    """

    cfg: Any
    rows: list[tuple[str, Any, str]]
    idle: list[str]


def load_config(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> Any:
    """The config as an object of the class `schema`.

    sources: a shipped name (`llama3/8B_full`) or a path; or several, of which the later ones win,
    key by key. overrides: `key=value`, `section.key=value`, or `~key` for the default; later ones
    win. schema: FullFinetuneConfig or a subclass, with additional keys and sections. Raises
    ConfigError with every fault of the files and the overrides, a line each.
    """
    return load_with_origins(sources, overrides, schema).cfg


def parse_arguments(
    argv: list[str] | None, schema: type = FullFinetuneConfig, *, quiet: bool = False
) -> Any:
    """A recipe's command line: `--config NAME_OR_PATH ... [--plugin FILE ...] [key=value ...] [~key
    ...]`.

    argv: None for the arguments of the process, in which no key may be given twice; of a list the
    later ones win. Plugins are imported first, so that a config may use their names. A key that was
    set and has no effect is logged, unless quiet. Raises ConfigError, also where argparse would
    print its usage.
    """
    if argv is None:
        refuse_repeated(sys.argv[1:])
    arguments = _parser().parse_intermixed_args(argv)
    for plugin in arguments.plugin:
        load_plugin(plugin)
    loaded = load_with_origins(arguments.config, arguments.overrides, schema)
    if not quiet:
        for line in loaded.idle:
            get_logger().info(line)
    return loaded.cfg


def _parser() -> argparse.ArgumentParser:
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
    """argparse whose complaints are one line of ours."""

    def error(self, message: str) -> NoReturn:
        said = message.replace(
            "the following arguments are required: --config", "--config is missing"
        )
        usage = (
            ""
            if "twice" in said
            else "; expected --config NAME_OR_PATH [--plugin FILE] [key=value ...]"
        )
        raise ConfigError(f"command line: {said}{usage}")


def load_with_origins(
    sources: Sources, overrides: Sequence[str] = (), schema: type = FullFinetuneConfig
) -> LoadedConfig:
    """As `load_config`, with where each value is from and which have no effect."""
    checked, files = _read(sources, overrides, schema)
    _check_recipe(checked)
    loaded = _finish(checked, files)
    if checked.faults:
        raise ConfigError(*checked.all_faults())
    return loaded


def _finish(checked: CollectedSettings, files: list[str]) -> LoadedConfig:
    """Make the config of what was set, and note what is missing and what does not go together."""
    shown = files[-1] if files else ""
    replaced = _take_later(checked, [*files, COMMAND_LINE])
    check_required(checked, shown)
    cfg = _build(checked, shown)
    idle = [f"{name} has no effect: {why}" for name, (_, why) in replaced.items()]
    idle += reset_idle_keys(cfg, checked.schema.keys.values(), checked.judged())
    for rule in find_broken_rules(cfg, checked.judged()):
        checked.fault(checked.place_of(rule.keys, shown), "", rule.line(cfg), doubt=False)
    checked.settings.update({name: setting for name, (setting, _) in replaced.items()})
    return LoadedConfig(cfg, _rows(checked, cfg, idle), idle)


def _read(
    sources: Sources, overrides: Sequence[str], schema: type
) -> tuple[CollectedSettings, list[str]]:
    """What files and overrides set, with their faults, and the files' names in errors. ConfigError
    for no such file.
    """
    checked, files = CollectedSettings(read_schema(schema)), list[str]()
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        path, start = find_config(source), len(checked.faults)
        shown = _shown(source, path)
        files.append(shown)
        document = read_file(path, shown)
        for line, what in document.faults:
            checked.fault(f"{shown}:{line}", "", what, doubt=False)
        check_file(checked, document.top, Source(shown))
        checked.sort_by_line(shown, start)
    apply_overrides(checked, overrides)
    fill_pending(checked)
    for name, setting in checked.settings.items():
        if _is_secret(name, setting.value):
            checked.fault(setting.where, name, _REFUSED)
    return checked, files


def _take_later(checked: CollectedSettings, layers: list[str]) -> dict[str, tuple[Setting, str]]:
    """Takes away the settings whose alternative is set later: (setting, why it has no effect) by
    their names. layers: the files in their order, and the command line.
    """
    found = {}
    for pair in ALTERNATIVES:
        both = [checked.settings.get(name) for name in pair]
        if not all(setting and setting.value not in (None, []) for setting in both):
            continue
        at = [
            layers.index(setting.where.rpartition(":")[0] or COMMAND_LINE)
            for setting in both
            if setting
        ]
        if at[0] != at[1]:
            earlier, later = pair if at[0] < at[1] else pair[::-1]
            why = f"{later} takes its place ({checked.settings[later].where})"
            found[earlier] = (checked.settings.pop(earlier), why)
    return found


def _rows(checked: Any, cfg: Any, idle: list[str]) -> list[tuple[str, Any, str]]:
    reasons = dict(line.split(" has no effect: ", 1) for line in idle)
    rows = []
    for name, key in checked.schema.keys.items():
        setting = checked.settings.get(name)
        if setting is None or name in reasons:
            where = "default" if setting is None else f"{setting.where}; no effect: {reasons[name]}"
            rows.append((name, key.default, where))
        else:
            rows.append((name, setting.value, setting.where))
    return rows


def _check_recipe(checked: Any) -> None:
    """A config is for one recipe. Of a class of the user's own, also for those that its parents are
    of.

    A shipped class takes only its own: another method's config has other settings, or lacks those
    that matter here.
    """
    setting = checked.settings.get("recipe")
    if setting is None:
        return
    config_class = checked.schema.config_class
    owners = [owner for owner in config_class.__mro__ if "recipe" in vars(owner)]
    legal = list(dict.fromkeys(vars(owner)["recipe"] for owner in owners))
    if config_class in RECIPE_CONFIGS.values():
        legal = legal[:1]
    if setting.value not in legal:
        other = setting.value in RECIPE_CONFIGS
        hint = did_you_mean(setting.value, legal)
        if other:
            hint = (
                f"; run it with that recipe: tune run {setting.value}, or override it:"
                f" recipe={legal[0]}"
            )
        what = f"found {quote(setting.value)}, expected {' or '.join(legal)}{hint}"
        checked.fault(setting.where, "recipe", what)


def _build(checked: Any, source: str) -> Any:
    """The config's class, filled with what was set without a fault; a key in doubt has its
    default.
    """
    values = {
        name: copy.deepcopy(setting.value)
        for name, setting in checked.settings.items()
        if name not in checked.doubtful
    }
    try:
        return _section(checked.schema, "", values)
    except ValueError as error:  # a `__post_init__` of a user's own class
        said = str(error).partition("\n")[0] or "refused by the config's class"
        raise ConfigError(*checked.all_faults(), f"{source}: {said}") from error


def _section(schema: Any, section: str, values: dict[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for name in schema.children(section):
        word = name.rpartition(".")[2]
        if name in schema.sections:
            given[word] = _section(schema, name, values)
        elif name in values:
            given[word] = values[name]
        else:
            given[word] = (
                None if schema.keys[name].required else copy.deepcopy(schema.keys[name].default)
            )
    return schema.sections[section](**given)


def _shown(source: str | Path, path: Path) -> str:
    """The file's name in errors: as the user gave it; of a shipped config, from the working folder
    if it is inside.
    """
    if path == expand_home(source):
        return quote(str(source))[1:-1]
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def refuse_repeated(words: Iterable[str]) -> None:
    """ConfigError, a line each, for the keys that are set or reset twice among `key=value` and
    `~key`.
    """
    first: dict[str, str] = {}
    faults = []
    for word in words:
        if word.startswith("-") or not (word.startswith("~") or "=" in word):
            continue
        name = word.removeprefix("~").partition("=")[0]
        if name in first:
            both = f"{show(first[name])} and {show(word)}"
            faults.append(
                f"command line: {show(name)}: given twice, as {both}; remove one of the two"
            )
        first.setdefault(name, word)
    if faults:
        raise ConfigError(*faults)


class StoreOnce(argparse.Action):
    """argparse's `store`, which refuses an option that has been given before (positional arguments
    are counted by it).

    A parser registers it as the action of options that name none.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Stores the value."""
        given = namespace.__dict__.setdefault("_given", {})
        if option_string is not None and self.dest in given:
            parser.error(
                f"{option_string} is given twice, as {show(str(given[self.dest]))} and"
                f" {show(str(values))}; remove one of the two"
            )
        given[self.dest] = values
        setattr(namespace, self.dest, values)


_REFUSED = (
    "holds what looks like a token or a password, and configs are written to disk; remove it, and"
    " set it as an environment variable (HF_TOKEN, WANDB_API_KEY) or use `hf auth login`"
)


def check_no_secrets(cfg: Any) -> None:
    """ConfigError if a key of a config object holds a secret: a config may also be made without a
    file.
    """
    faults = [f"{name}: {_REFUSED}" for name, value in _leaves("", cfg) if _is_secret(name, value)]
    if faults:
        raise ConfigError(*faults)


def _is_secret(name: str, value: Any) -> bool:
    """Whether a value, or anything in it, is a secret; the name is a context, as in `api_key:
    0123...`.
    """
    return any(has_secret(f"{inner}={text}") for inner, text in _leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every text in a value, at any depth; the keys of a mapping are texts
    too.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name}[{number}]", inner)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield name, str(value)


# `key=value`, `section.key=value`, `list[1].key=value` and `~key`: overrides of a config, checked
# and taken.


_ITEM = re.compile(r"(.+)\[([0-9]{1,4})\]\.([^.\[\]]+)")
_OPENS_YAML = ("[", "{", '"', "'")


def apply_overrides(checked: CollectedSettings, overrides: Sequence[str]) -> None:
    """Checks each override and takes its value; later ones win."""
    for override in overrides:
        if checked.full:
            return
        place = f"{COMMAND_LINE}: {show(override)}"
        source = Source(COMMAND_LINE, place)
        if override.startswith("~"):
            _reset(checked, override[1:], source)
        elif "=" not in override:
            checked.fault(
                place,
                "",
                "expected key=value, or ~key for the default; a further config is --config FILE",
            )
        else:
            name, _, text = override.partition("=")
            _set(checked, name, text, source)


def _set(checked: CollectedSettings, name: str, text: str, source: Source) -> None:
    schema, place = checked.schema, source.override
    try:
        value = _read_value(checked, text, place)
    except YamlError as fault:
        checked.fault(place, "", str(fault))
        return
    outer = schema.mapping_of(name)
    if value.is_interpolated and (outer or _ITEM.fullmatch(name)):
        checked.fault(
            place,
            "",
            "a part of a value cannot name other keys here; write it in a file, or the value"
            " itself",
        )
        return
    if name in schema.sections and name:
        _set_section(checked, name, value, source)
    elif name in schema.keys:
        check_value(checked, schema.keys[name], value, source, typed=True)
    elif item := _ITEM.fullmatch(name):
        _set_in_item(checked, item, value, source)
    elif outer:
        _set_entry(checked, outer, name.removeprefix(f"{outer}."), value, source)
    elif name.startswith(("-", "+")) and name.lstrip("-+"):
        checked.fault(
            place,
            "",
            f"overrides have no {name[0]} in front; write {show(name.lstrip('-+'))}={show(text)}",
        )
    else:
        report_unknown_key(checked, source, 1, name, value, typed=True)


def _read_value(checked: CollectedSettings, text: str, place: str) -> YamlNode:
    """A list, mapping or quoted text is read as YAML; all else is one word as it stands, `#`, `*`
    and `: ` included.
    """
    if not text.startswith(_OPENS_YAML):
        return YamlNode("scalar", 1, text.strip())
    document = parse(text)
    for _, what in document.faults:
        checked.fault(place, "", what)
    return document.top if not document.faults else YamlNode("broken", 1)


def _set_section(checked: CollectedSettings, name: str, value: YamlNode, source: Source) -> None:
    """`data={source: x}` sets keys of a section one by one; the others stay as they are."""
    if value.kind == "broken":
        checked.doubt(name)
    elif value.kind != "mapping":
        keys = [key for key in checked.schema.children(name) if key in checked.schema.keys]
        what = f"found {describe_node(value)}, expected keys of the section, as in {keys[0]}=VALUE"
        checked.fault(source.override, "", what)
        checked.doubt(name)
    else:
        check_section(checked, name, value, source)


def _set_entry(
    checked: CollectedSettings, outer: str, inner: str, value: YamlNode, source: Source
) -> None:
    """`data.columns.instruction=question` adds one entry to a mapping."""
    before = checked.settings.get(outer)
    node = YamlNode("mapping", 1, entries={inner: (1, value)})
    check_value(checked, checked.schema.keys[outer], node, source, typed=True)
    after = checked.settings.get(outer)
    if after is not before and after is not None:
        earlier = before.value if before else checked.schema.keys[outer].default
        where = (
            f"{before.where}, {COMMAND_LINE}"
            if before and before.where != COMMAND_LINE
            else COMMAND_LINE
        )
        checked.set(outer, {**(earlier or {}), **after.value}, where)


def _set_in_item(
    checked: CollectedSettings, item: re.Match[str], value: YamlNode, source: Source
) -> None:
    """`data.sources[1].weight=2` sets one key of one section of a list."""
    name, number, word = item[1], int(item[2]), item[3]
    key = checked.schema.keys.get(name)
    if key is None or key.section_class is None:
        report_unknown_key(checked, source, 1, item[0], typed=True)
        return
    before = checked.settings.get(name)
    items = list(before.value if before else key.default)
    if number >= len(items):
        if name not in checked.doubtful:
            has = f"the last one is {name}[{len(items) - 1}]" if items else "the list is empty"
            what = f"{name}[{number}] is not there, {has}; write {name}=[...] for another list"
            checked.fault(source.override, "", what)
        return
    inner, faults = (
        CollectedSettings(build_item_schema(key, number), faults=checked.faults),
        len(checked.faults),
    )
    if item[0] in inner.schema.keys:
        check_value(inner, inner.schema.keys[item[0]], value, source, typed=True)
    else:
        report_unknown_key(inner, source, 1, item[0], typed=True)
    if len(checked.faults) > faults:
        checked.doubt(name)
        return
    for setting in inner.settings.values():
        items[number] = dataclasses.replace(items[number], **{word: setting.value})
    where = (
        f"{before.where}, {COMMAND_LINE}"
        if before and COMMAND_LINE not in before.where
        else COMMAND_LINE
    )
    checked.set(name, items, where)


def _reset(checked: CollectedSettings, name: str, source: Source) -> None:
    """`~key` and `~section`: back to the schema's default."""
    schema = checked.schema
    if "=" in name:
        bare = show(name.partition("=")[0])
        checked.fault(
            source.override, "", f"~ goes back to the default and takes no value; write ~{bare}"
        )
    elif name not in schema.keys and (name not in schema.sections or not name):
        report_unknown_key(checked, source, 1, name, typed=True)
    else:
        for values in (checked.settings, checked.pending):
            for key in [key for key in values if key == name or key.startswith(f"{name}.")]:
                del values[key]

"""The config reference, made from the schema: `docs/config.md`, `tune cat --describe`, and a config
as YAML.

`python -m recipe_lib.config.describe > docs/config.md` writes the page.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from recipe_lib.config.compatibility.table import RULES
from recipe_lib.config.convert_values import describe_expected
from recipe_lib.config.flat_schema import Key, Schema, build_item_schema, read_schema
from recipe_lib.config.key_conditions import Condition, describe_needs
from recipe_lib.config.paths import RECIPE_CONFIGS
from recipe_lib.config.schema import FullFinetuneConfig

_INTRODUCTION = """\
# Config reference

Generated from `recipe_lib/config/schema.py` by `python -m recipe_lib.config.describe`; do not edit it by hand.

A config is a YAML file with the keys below. It holds only what differs from the defaults; a key inside a section
is indented under the section's name. `tune cat NAME --resolved` prints every value that will be used and where it
was set, `tune validate NAME` names every fault at once, with its line and the nearest valid key.

On the command line: `key=value`, `section.key=value`, `section={key: value, ...}`, and `~key` for the default.
A list is written `[a, b]`, one of sections `[{key: value}, {key: value}]`, where `name[0].key=value` sets one key of
the first; a value may contain `=`. A text that looks like a number or like true, false or null
has to be quoted in a file. `${section.key}` is the value of another key of the config, also
inside a text or, relative, `${.key}`; in a list or mapping written with brackets it has to be in quotes. Of several
files (`--config base.yaml --config mine.yaml`) the later ones win, key by key. A key that another one makes idle
(`Only with ...` below) is named in one line of `tune validate` and at the start of a run, which uses its default.
Refused: tags, anchors, aliases, duplicate keys, environment variables and resolvers in `${...}`, one name inside
another, more than 1024 names or 256 K characters filled in, more than one document, more than 1 MiB. No key takes a
Python import path; names of your own come from `--plugin FILE`.
"""

_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?:[:+][A-Za-z0-9_./-]+)*")
_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def format_markdown(*schemas: type) -> str:
    """The page `docs/config.md`: the keys of all these config classes; none given: of every shipped
    recipe's.
    """
    views = [read_schema(schema) for schema in schemas or RECIPE_CONFIGS.values()]
    parts, done = [_INTRODUCTION], set()
    for view in views:
        for section, title, keys in _sections(view):
            if section not in done:
                heading = (
                    f"## `{section}`\n\n{title}{_owners(section, views)}\n"
                    if section
                    else "## Top level\n"
                )
                parts += [heading, _table(keys)]
            done.add(section)
    parts.append("## Incompatible settings\n\nEach is refused before anything is loaded.\n")
    rows = ["| keys | why | instead |", "|---|---|---|"]
    for entry in RULES:
        rows.append(
            f"| {', '.join(f'`{key}`' for key in entry.keys)} | {entry.reason} | {entry.remedy} |"
        )
    parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _table(keys: list[Key]) -> str:
    rows = ["| key | default | legal values | what it does | elsewhere |", "|---|---|---|---|---|"]
    for key in keys:
        cells = (
            f"`{key.name}`",
            f"`{_default_text(key)}`",
            describe_expected(key),
            describe_key(key),
            key.limits.get("known_as", ""),
        )
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def describe_key(key: Key, schema: Schema | None = None) -> str:
    """The key's line of description, and what it needs to have an effect; not what a recipe's
    schema does not have.
    """
    needs = key.limits.get("needs")
    if schema is not None and needs:
        each = needs if isinstance(needs, tuple) else (needs,)
        needs = tuple(
            one
            for one in each
            if isinstance(one, Condition) or one.partition(" ")[0] in schema.keys
        )
    return f"{key.help} Only with {describe_needs(needs)}." if needs else key.help


def _owners(section: str, views: list[Schema]) -> str:
    """Which recipes have a section, unless all of them do."""
    inside = section.partition("[")[0]
    owners = [view for view in views if inside in view.sections or inside in view.keys]
    if len(owners) == len(views):
        return ""
    names = ", ".join(f"`{view.keys['recipe'].default}`" for view in owners)
    return f" Recipes: {names}."


def describe_text(schema: type = FullFinetuneConfig) -> str:
    """Every key for a terminal: name, default, legal values, then its line of description,
    indented.
    """
    lines: list[str] = []
    view = read_schema(schema)
    for section, title, keys in _sections(view):
        if section:
            lines += ["", f"{section}: {title}"]
        for key in keys:
            lines.append(f"  {key.name} = {_default_text(key)}   ({describe_expected(key)})")
            if key.help:
                lines.append(f"      {describe_key(key, view)}")
    return "\n".join(lines) + "\n"


def format_config(cfg: Any) -> str:
    """A config object as YAML with every value; `load_config` reads it back as the same object."""
    schema: type = type(cfg)
    keys = read_schema(schema).keys
    return format_settings({name: attrgetter(name)(cfg) for name in keys}, keys)


def format_settings(settings: Mapping[str, Any], keys: Mapping[str, Key]) -> str:
    """Return settings, by dotted key, as a config; those of a section follow each other."""
    lines: list[str] = []
    above: list[str] = []  # sections that are open
    for name, value in settings.items():
        *sections, word = name.split(".")
        shared = len(os.path.commonprefix([above, sections]))
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        above = sections
        indent = "  " * len(sections)
        if (
            isinstance(value, list)
            and value
            and (dataclasses.is_dataclass(value[0]) or isinstance(value[0], dict))
        ):
            lines += [f"{indent}{word}:", *(f"{indent}  - {format_value(item)}" for item in value)]
            continue
        # A bare `none` is refused where null is legal; elsewhere it is a choice like any other.
        is_word = (
            isinstance(value, str)
            and value.lower() == "none"
            and "choices" not in keys[name].limits
        )
        lines.append(f"{indent}{word}: {json.dumps(value) if is_word else format_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def format_value(value: Any) -> str:
    """A value as it is written in a config: `null`, `1e-05`, `[0.9, 0.95]`, text quoted only where
    it must be.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return f"{{{', '.join(f'{format_value(name)}: {format_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, (str, Path)):
        text = str(value)
        plain = _PLAIN_TEXT.fullmatch(text) and text.lower() not in _NOT_TEXT
        return text if plain else json.dumps(text, ensure_ascii=False)
    return repr(value)


def _default_text(key: Key) -> str:
    return "required" if key.required else format_value(key.default)


def _sections(view: Schema) -> Iterator[tuple[str, str, list[Key]]]:
    """(section, its first line of description, its keys), the top level first."""
    for section, section_class in view.sections.items():
        keys = [view.keys[name] for name in view.children(section) if name in view.keys]
        written = (section_class.__doc__ or "").strip().partition("\n")[0]
        # A dataclass without a docstring gets its signature as one.
        yield section, "" if written.startswith(f"{section_class.__name__}(") else written, keys
        for key in keys:
            if key.section_class is not None:
                inner = build_item_schema(key, 0)
                about = (key.section_class.__doc__ or "").strip().partition("\n")[0]
                yield from ((name, about, list(inner.keys.values())) for name in inner.sections)


if __name__ == "__main__":
    print(format_markdown(), end="")


# Which keys change the memory of a run.


# Sections, and single keys of others.
LEVER_SECTIONS = ("lora", "dpo", "distill", "memory", "parallel")
LEVERS = (
    "compile", "fused_kernels", "matmul_dtype", "qat", "qat_group_size", "loss", "model.implementation", "data.packing",
    "data.pad_to_multiple_of", "optimizer.name", "optimizer.momentum", "optimizer.state_bits",
    "optimizer.master_weights", "optimizer.stochastic_rounding", "optimizer.implementation",
)  # fmt: skip
# Of those sections what changes no peak of a step, and what the mesh says.
NO_LEVERS = (
    "lora.alpha", "lora.rslora", "lora.adapter_path", "lora.merge_on_save",
    "dpo.beta", "dpo.label_smoothing", "dpo.simpo_gamma",
    "distill.teacher", "distill.teacher_preset", "distill.beta", "distill.temperature",
    "distill.weight", "memory.host_memory_limit_gib",
    "parallel.data_shard", "parallel.data_replicate", "parallel.context", "parallel.tensor",
    "parallel.pipeline",
    "parallel.heartbeat_timeout_seconds",
)  # fmt: skip


def list_changed_levers(cfg: Any) -> dict[str, str]:
    """Key to value, as a config has it, of those that are not at their defaults."""
    schema: type = type(cfg)
    found = {}
    for name, key in read_schema(schema).keys.items():
        if name in NO_LEVERS or not (name in LEVERS or name.partition(".")[0] in LEVER_SECTIONS):
            continue
        value = attrgetter(name)(cfg)
        if value != key.default:
            found[name] = format_value(value)
    return found

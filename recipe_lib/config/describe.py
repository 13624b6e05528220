"""Write the keys of a config for users: `docs/config.md`, `tune cat --describe`, a config as YAML.

`python -m recipe_lib.config.describe > docs/config.md` writes the page. `list_changed_levers`
returns the levers of a config: keys that trade memory for time or precision, at other values than
their defaults. A key is a dotted name of the schema, `optimizer.lr`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from recipe_lib.config.compatibility.table import list_rules
from recipe_lib.config.convert_values import describe_expected
from recipe_lib.config.flat_schema import Key, Schema, build_item_schema, read_schema
from recipe_lib.config.key_conditions import Condition, describe_needs
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import format_word

# Beginning of docs/config.md. Its lines are wider than those of this file: a backslash joins two.
_INTRODUCTION = """\
# Config reference

For those who write a config, or look for the key that does something.

```bash
tune validate demo/full
tune cat demo/full --resolved
```

The first names every fault at once, with its line and the nearest valid key. The second prints \
every value that
will be used, and where it was set.

A config is a YAML file with the keys below. It holds only what differs from the defaults. A key \
inside a section
is indented under the section's name. No key takes a Python import path; names of your own come \
from `--plugin FILE`.

| to write | this |
|---|---|
| a key on the command line | `key=value`, `section.key=value`; the value may contain `=` |
| a section on the command line | `section={key: value, ...}` |
| the default on the command line | `~key` |
| a list | `[a, b]` |
| a list of sections | `[{key: value}, {key: value}]`; `name[0].key=value` sets one key of the \
first |
| a text like a number, true, false or null | quoted, in a file |
| the value of another key | `${section.key}`, or, relative, `${.key}`; also inside a text; in \
quotes where a list or mapping is written with brackets |
| several files | `--config base.yaml --config mine.yaml`: the later ones win, key by key |

A key that another one makes idle (`Only with ...` below) is named in one line of `tune validate` \
and at the start of
a run, which uses its default.

Refused:

- tags, anchors, aliases and duplicate keys
- in `${...}`: environment variables, resolvers and one name inside another
- more than 1024 names, or 256 K characters, filled in
- more than one document, or more than 1 MiB

Do not edit this page: `python -m recipe_lib.config.describe` generates it from \
`recipe_lib/config/schema.py`.
"""

# Text that means itself without quotes, here and in YAML 1.1; but for these words.
_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?:[:+][A-Za-z0-9_./-]+)*")
_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def format_markdown(*config_classes: type) -> str:
    """Return the page `docs/config.md`, with the keys of these config classes.

    Without an argument they are those of every shipped recipe.
    """
    schemas = [
        read_schema(config_class)
        for config_class in config_classes or read_recipe_configs().values()
    ]
    parts = [_INTRODUCTION]
    written_sections = set()
    for schema in schemas:
        for section, title, keys in _list_sections(schema):
            # Sections of the same name have the same keys in all recipes.
            if section in written_sections:
                continue
            written_sections.add(section)
            heading = (
                f"## `{section}`\n\n{title}{_describe_owners(section, schemas)}\n"
                if section
                else "## Top level\n"
            )
            parts += [heading, _format_table(keys)]
    # A rule refuses a combination of settings.
    parts.append("## Incompatible settings\n\nEach is refused before anything is loaded.\n")
    rows = ["| keys | why | instead |", "|---|---|---|"]
    for rule in list_rules():
        names = ", ".join(f"`{key}`" for key in rule.keys)
        rows.append(f"| {names} | {rule.reason} | {rule.remedy} |")
    parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _format_table(keys: list[Key]) -> str:
    rows = ["| key | default | legal values | what it does | elsewhere |", "|---|---|---|---|---|"]
    for key in keys:
        cells = (
            f"`{key.name}`",
            f"`{_format_default(key)}`",
            describe_expected(key),
            describe_key(key),
            # `limits` has all arguments of the field's `key(...)`: what other tools call the key.
            key.limits.get("known_as", ""),
        )
        # A bar in a text would end its cell.
        escaped = [cell.replace("|", "\\|") for cell in cells]
        rows.append(f"| {' | '.join(escaped)} |")
    return "\n".join(rows) + "\n"


def describe_key(key: Key, schema: Schema | None = None) -> str:
    """Return the key's line of description, and what it needs to have an effect.

    schema: of one recipe; conditions on keys that it does not have are left out. None: of all.
    """
    needs = [
        need
        for need in key.limits.get("needs", ())
        # A condition is an object, or a line that begins with a key: `parallel.pipeline > 1`.
        if schema is None or isinstance(need, Condition) or need.partition(" ")[0] in schema.keys
    ]
    return f"{key.help} Only with {describe_needs(needs)}." if needs else key.help


def _describe_owners(section: str, schemas: list[Schema]) -> str:
    """Return ` Recipes: ...`, of those that have a section; empty if all of them do."""
    name = section.partition("[")[0]  # `data.sources` of the section `data.sources[0]`
    owners = [schema for schema in schemas if name in schema.sections or name in schema.keys]
    if len(owners) == len(schemas):
        return ""
    names = ", ".join(f"`{schema.keys['recipe'].default}`" for schema in owners)
    return f" Recipes: {names}."


def format_terminal_reference(config_class: type = FullFinetuneConfig) -> str:
    """Return a config class' keys for a terminal: name, default, legal values, description."""
    lines: list[str] = []
    schema = read_schema(config_class)
    for section, title, keys in _list_sections(schema):
        if section:
            lines += ["", f"{section}: {title}"]
        for key in keys:
            lines.append(f"  {key.name} = {_format_default(key)}   ({describe_expected(key)})")
            if key.help:
                lines.append(f"      {describe_key(key, schema)}")
    return "\n".join(lines) + "\n"


def format_config(cfg: Any) -> str:
    """Return a config object as YAML with every value; `load_config` reads back the same object."""
    config_class: type = type(cfg)
    keys = read_schema(config_class).keys
    return format_settings({name: attrgetter(name)(cfg) for name in keys}, keys)


def format_settings(settings: Mapping[str, Any], keys: Mapping[str, Key]) -> str:
    """Return settings as the YAML text of a config.

    settings: dotted key -> value; those of a section have to follow each other. keys: of the
    schema.
    """
    lines: list[str] = []
    open_sections: list[str] = []  # of the line before, the outermost first
    for name, value in settings.items():
        *sections, leaf_name = name.split(".")
        # commonprefix compares the items of any sequences, not only letters.
        num_shared = len(os.path.commonprefix([open_sections, sections]))
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(num_shared, len(sections))]
        open_sections = sections
        indent = "  " * len(sections)
        first_item = value[0] if isinstance(value, list) and value else None
        if isinstance(first_item, dict) or dataclasses.is_dataclass(first_item):
            lines.append(f"{indent}{leaf_name}:")
            lines += [f"{indent}  - {format_value(item)}" for item in value]
            continue
        text = format_value(value)
        # `none` without quotes is refused where null is legal; as one of a key's choices it is not.
        is_none = isinstance(value, str) and value.lower() == "none"
        if is_none and "choices" not in keys[name].limits:
            text = json.dumps(value)
        lines.append(f"{indent}{leaf_name}: {text}")
    return "".join(f"{line}\n" for line in lines)


def format_value(value: Any) -> str:
    """Return a value as it is written in a config: `null`, `1e-05`, `[0.9, 0.95]`.

    Text is quoted only where it must be. A section object becomes `{key: value, ...}`.
    """
    if value is None or isinstance(value, bool):
        return format_word(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        entries = (f"{format_value(name)}: {format_value(item)}" for name, item in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (str, Path)):
        text = str(value)
        is_plain = _PLAIN_TEXT.fullmatch(text) and text.lower() not in _NOT_TEXT
        return text if is_plain else json.dumps(text, ensure_ascii=False)
    return repr(value)


def _format_default(key: Key) -> str:
    return "required" if key.required else format_value(key.default)


def _list_sections(schema: Schema) -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (name of a section, the line that describes it, its keys), the top level first.

    The section of a list's items, `data.sources[0]`, comes after the section that holds the list.
    """
    for section, section_class in schema.sections.items():
        keys = [schema.keys[name] for name in schema.list_children(section) if name in schema.keys]
        yield section, _read_title(section_class), keys
        for key in keys:
            if key.section_class is not None:
                # All items of the list have the same keys: those of the first stand for them.
                yield (
                    f"{key.name}[0]",
                    _read_title(key.section_class),
                    list(build_item_schema(key, 0).keys.values()),
                )


def _read_title(section_class: type) -> str:
    first_line = (section_class.__doc__ or "").strip().partition("\n")[0]
    # A dataclass without a docstring gets its signature as one.
    return "" if first_line.startswith(f"{section_class.__name__}(") else first_line


# The levers: all keys of these sections but NO_LEVERS, and single keys of others. Those of the
# sections `dpo`, `reward` and `distill` are the `memory_keys` of their recipes' config classes.
LEVER_SECTIONS = ("lora", "memory", "parallel")
LEVERS = (
    "compile",
    "fused_kernels",
    "matmul_dtype",
    "qat",
    "qat_group_size",
    "loss",
    "model.implementation",
    "data.packing",
    "data.pad_to_multiple_of",
    "optimizer.name",
    "optimizer.momentum",
    "optimizer.state_bits",
    "optimizer.master_weights",
    "optimizer.stochastic_rounding",
    "optimizer.implementation",
)
# Keys of LEVER_SECTIONS that change no peak of a step, and the sizes of the mesh.
NO_LEVERS = (
    "lora.alpha",
    "lora.rslora",
    "lora.adapter_path",
    "lora.merge_on_save",
    "memory.host_memory_limit_gib",
    "parallel.data_shard",
    "parallel.data_replicate",
    "parallel.context",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.heartbeat_timeout_seconds",
)


def list_changed_levers(cfg: Any) -> dict[str, str]:
    """Return the levers of a config that are not at their defaults: key -> value as in a config."""
    config_class: type = type(cfg)
    single_keys = {*LEVERS, *cfg.memory_keys}
    levers = {}
    for name, key in read_schema(config_class).keys.items():
        is_lever = name in single_keys or name.partition(".")[0] in LEVER_SECTIONS
        value = attrgetter(name)(cfg)
        if is_lever and name not in NO_LEVERS and value != key.default:
            levers[name] = format_value(value)
    return levers


if __name__ == "__main__":
    print(format_markdown(), end="")

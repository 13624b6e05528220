"""Declare the keys of a config, and flatten a config class to a table of dotted keys.

A config class is a dataclass, and so is each of its sections; their fields are made by `key`.
`read_schema` flattens it into a `Schema`: every dotted key (`optimizer.lr`) with its types, its
default and its limits. Files, command lines, errors and docs/config.md are checked or made by it.
"""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from recipe_lib.errors import ConfigError


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | tuple[int, ...] | None = None,
    kind: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] | tuple[str, ...] | None = None,
    length: int | None = None,
    items: tuple[str, ...] | None = None,
    path: bool | None = None,
    most: float | None = None,
    needs: Any = None,
    known_as: str | None = None,
) -> Any:
    """Return the dataclass field of one key of a section. Limits that are None do not apply.

    default: its value when the config does not set it.
    help: one line, with the unit, as users see it.
    choices: the only legal values; on a list, choices and bounds are those of each item.
    kind: the registry whose names are legal, such as `optimizer.name`
    (`recipe_lib.config.registry`); plugins add names to it.
    minimum, maximum: inclusive bounds. above, below: exclusive bounds.
    also: legal values outside of the bounds, or besides the names of a kind.
    length: number of items of a list.
    items: the only legal items of a list, for a key that takes a choice or a list.
    path: True for a file or folder, in which a `~` at the beginning is the user's home.
    most: an upper bound far above every sensible value, named only in the error for a larger one.
    needs: a condition, or a tuple of them, without which the key has no effect: a line such as
    `parallel.pipeline > 1`, or a `recipe_lib.config.key_conditions.Condition`.
    known_as: what torch, HF, PEFT, TRL, torchtitan, Megatron, torchtune or another tool calls it;
    or `none has it: ` and why.
    """
    limits = {
        "choices": choices,
        "kind": kind,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "also": also,
        "length": length,
        "items": items,
        "path": path,
        "most": most,
        "needs": needs if needs is None or isinstance(needs, tuple) else (needs,),
        "known_as": known_as,
    }
    metadata = {"help": help} | {name: value for name, value in limits.items() if value is not None}
    if isinstance(default, (list, dict)):
        # A copy for each config: dataclasses refuse a mutable default.
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Types that a list's items, or a mapping's values, may have.
SCALARS = (bool, int, float, str, Path)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config."""

    # Dotted: `data.sources[1].weight`.
    name: str
    # The types that it may hold: the members of a union, without None.
    kinds: tuple[Any, ...]
    # Whether null is legal.
    optional: bool
    # None for a required key.
    default: Any
    # Whether the config has to set it, since there is no default.
    required: bool
    # The arguments of `key` that were not None, by their names, `help` too; `needs` is a tuple.
    limits: Mapping[str, Any]

    @property
    def help(self) -> str:
        """Return the line that describes the key to users; empty if its field has none."""
        return self.limits.get("help", "")

    @property
    def section_class(self) -> type | None:
        """Return the dataclass of its items if the key holds a list of sections, else None."""
        inner = get_args(self.kinds[0]) if len(self.kinds) == 1 else ()
        if inner and isinstance(inner[0], type) and dataclasses.is_dataclass(inner[0]):
            return inner[0]
        return None


@dataclasses.dataclass(frozen=True)
class Schema:
    """The keys and sections of a config class, by dotted name."""

    # A dataclass; of `build_item_schema` that of one item of a list.
    config_class: type
    # By dotted name, in the order of the classes' fields.
    keys: Mapping[str, Key]
    # Dotted name -> dataclass; `""` is the top level.
    sections: Mapping[str, type]

    def list_children(self, section: str) -> list[str]:
        """Return the dotted names of the keys and sections directly inside a section."""
        prefix = f"{section}." if section else ""
        names = [*self.keys, *(name for name in self.sections if name)]
        return [
            name for name in names if name.startswith(prefix) and "." not in name[len(prefix) :]
        ]

    def find_outer_mapping(self, name: str) -> str | None:
        """Return the key of the mapping that a dotted name lies inside; None: it lies in none.

        `data.columns.x` lies in the mapping `data.columns`.
        """
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            outer = ".".join(parts[:length])
            kinds = self.keys[outer].kinds if outer in self.keys else ()
            if any(get_origin(kind) is dict for kind in kinds):
                return outer
        return None


@cache
def read_schema(config_class: type) -> Schema:
    """Return the keys and sections of a config class.

    Raises ConfigError for what is no dataclass, or has a field of a type that a config file cannot
    write; it may be the class of a user's own recipe.
    """
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise ConfigError(
            f"{config_class!r}: a recipe's Config is a dataclass, best a subclass of"
            " FullFinetuneConfig"
        )
    keys: dict[str, Key] = {}
    sections: dict[str, type] = {}
    _collect_keys("", config_class, None, keys=keys, sections=sections)
    return Schema(config_class, keys, sections)


def build_item_schema(key: Key, number: int) -> Schema:
    """Return the schema of one section of a list, by full names: `data.sources[1].weight`.

    key: of the list. number: the index of the section. Raises TypeError if the key is no list of
    sections.
    """
    if key.section_class is None:
        raise TypeError(f"{key.name} is no list of sections")
    class_schema = read_schema(key.section_class)
    name = f"{key.name}[{number}]"
    keys = {
        f"{name}.{word}": dataclasses.replace(inner, name=f"{name}.{word}")
        for word, inner in class_schema.keys.items()
    }
    return Schema(class_schema.config_class, keys, {name: class_schema.config_class})


def _collect_keys(
    section: str,
    section_class: type,
    instance: Any,
    *,
    keys: dict[str, Key],
    sections: dict[str, type],
) -> None:
    """Add a section's keys, and those of the sections inside, to `keys` and `sections`.

    section: its dotted name; empty for the config class. instance: the section as its owner's
    default makes it, whose values are the defaults of the keys; None: the fields' own defaults.
    """
    sections[section] = section_class
    # Not the fields' `type`, which is a text where a module postpones annotations.
    try:
        annotations = get_type_hints(section_class)
    except NameError as error:
        raise ConfigError(
            f"{section_class.__name__}: a type of its keys is unknown ({error})"
        ) from error
    for field in dataclasses.fields(section_class):
        if not field.init:  # its class computes it
            continue
        name = f"{section}.{field.name}" if section else field.name
        required, default = _read_default(field, instance)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            # The class of the default, which a recipe's Config may have subclassed.
            _collect_keys(name, type(default), default, keys=keys, sections=sections)
        elif dataclasses.is_dataclass(annotation):
            section_type = cast(type, annotation)
            _collect_keys(name, section_type, None, keys=keys, sections=sections)
        else:
            is_union = get_origin(annotation) in (Union, types.UnionType)
            # get_args flattens nested unions already.
            kinds = get_args(annotation) if is_union else (annotation,)
            for kind in kinds:
                _check_kind(kind, f"{section_class.__name__}.{field.name}")
            keys[name] = Key(
                name=name,
                kinds=tuple(kind for kind in kinds if kind is not type(None)),
                optional=type(None) in kinds or Any in kinds,
                default=default,
                required=required,
                limits=field.metadata,
            )


def _read_default(field: dataclasses.Field[Any], instance: Any) -> tuple[bool, Any]:
    """Return (True if there is no default, the default value or None). instance: see above."""
    if instance is not None:
        return False, getattr(instance, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return False, field.default_factory()
    is_required = field.default is dataclasses.MISSING
    return is_required, None if is_required else field.default


def _check_kind(kind: Any, where: str) -> None:
    """Raise ConfigError if a config file has no way to write this type.

    where: class and field, for the error.
    """
    origin = get_origin(kind)
    inner = get_args(kind)
    item = inner[0] if origin is list else None
    is_legal = (
        kind in (*SCALARS, Any, type(None))
        or (origin is Literal and all(isinstance(choice, str) for choice in inner))
        or (origin is list and item in SCALARS)
        # A list of sections without sections inside: overrides name `data.sources[0].key` alone.
        or (
            isinstance(item, type)
            and dataclasses.is_dataclass(item)
            and set(read_schema(item).sections) == {""}
        )
        or (origin is dict and inner[0] is str and inner[1] in SCALARS)
    )
    if not is_legal:
        raise ConfigError(
            f"{where}: a config cannot hold the type {getattr(kind, '__name__', kind)}; use bool,"
            " int, float, str, Path, Literal of texts, list[...] or dict[str, ...] of these, a"
            " dataclass, or one of them `| None`; or a list of a dataclass of such keys"
        )

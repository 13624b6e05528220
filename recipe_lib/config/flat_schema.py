"""How a key is declared, and the flat view of a schema: every dotted key with its type, default and
limits.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
    """One key of a section.

    default: its value when the config does not set it. help: one line, with the unit. choices: the
    only legal values. kind: the registry (`recipe_lib.config.registry`) its names live in. minimum,
    maximum: inclusive bounds. above, below: exclusive bounds. also: legal values outside of them,
    and of the names of a kind. length: how many items a list has. On a list, choices and bounds are
    those of each item. items: the only legal items of the list that may stand in place of a choice.
    path: a file or folder, in which a `~` at the beginning is the user's home. needs: what has to
    hold for it to have an effect (`recipe_lib.config.key_conditions`). most: a bound far above every sensible
    value, which only an error over it names. known_as: what torch, HF, PEFT, TRL, torchtitan,
    Megatron, torchtune or another tool calls it; or `none has it: ` and why.
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
        "needs": needs,
        "known_as": known_as,
    }
    metadata = {"help": help} | {name: value for name, value in limits.items() if value is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


SCALARS = (bool, int, float, str, Path)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key. `kinds` are the types it may hold (a union taken apart), None left out and said by
    `optional`.
    """

    name: str
    kinds: tuple[Any, ...]
    optional: bool
    default: Any
    required: bool
    limits: Mapping[str, Any]

    @property
    def help(self) -> str:
        """The one line that describes the key."""
        return self.limits.get("help", "")

    @property
    def section_class(self) -> type | None:
        """The dataclass of its items, if the key holds a list of sections."""
        inner = typing.get_args(self.kinds[0]) if len(self.kinds) == 1 else ()
        return (
            inner[0]
            if inner and isinstance(inner[0], type) and dataclasses.is_dataclass(inner[0])
            else None
        )


@dataclasses.dataclass(frozen=True)
class Schema:
    """A config class as `keys` by dotted name and `sections` (dotted name -> dataclass; `""` is the
    top).
    """

    config_class: type
    keys: Mapping[str, Key]
    sections: Mapping[str, type]

    def children(self, section: str) -> list[str]:
        """Dotted names of the keys and sections directly inside a section."""
        prefix = f"{section}." if section else ""
        names = [*self.keys, *(name for name in self.sections if name)]
        return [
            name for name in names if name.startswith(prefix) and "." not in name[len(prefix) :]
        ]

    def mapping_of(self, name: str) -> str | None:
        """The mapping key that a name lies inside: `data.columns.instruction` -> `data.columns`."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            outer = ".".join(parts[:length])
            if outer in self.keys and any(
                typing.get_origin(kind) is dict for kind in self.keys[outer].kinds
            ):
                return outer
        return None


@cache
def read_schema(config_class: type) -> Schema:
    """The keys of a config class; ConfigError for a class of a user's that a config cannot
    express.
    """
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise ConfigError(
            f"{config_class!r}: a recipe's Config is a dataclass, best a subclass of"
            " FullFinetuneConfig"
        )
    keys: dict[str, Key] = {}
    sections: dict[str, type] = {}
    _collect("", config_class, None, keys, sections)
    return Schema(config_class, keys, sections)


def build_item_schema(key: Key, number: int) -> Schema:
    """The keys of one section of a list, under their full names: `data.sources[1].weight`."""
    if key.section_class is None:
        raise TypeError(f"{key.name} is no list of sections")
    view, name = read_schema(key.section_class), f"{key.name}[{number}]"
    keys = {
        f"{name}.{word}": dataclasses.replace(inner, name=f"{name}.{word}")
        for word, inner in view.keys.items()
    }
    return Schema(view.config_class, keys, {name: view.config_class})


def _collect(
    section: str,
    section_class: type,
    instance: Any,
    keys: dict[str, Key],
    sections: dict[str, type],
) -> None:
    """Adds a section's keys. instance: the section as its owner makes it, whose values are the
    defaults.
    """
    sections[section] = section_class
    try:
        annotations = typing.get_type_hints(section_class)
    except NameError as error:
        raise ConfigError(
            f"{section_class.__name__}: a type of its keys is unknown ({error})"
        ) from error
    for field in dataclasses.fields(section_class):
        if not field.init:
            continue
        name = f"{section}.{field.name}" if section else field.name
        required, default = _default(field, instance)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            _collect(name, type(default), default, keys, sections)
        elif dataclasses.is_dataclass(annotation):
            _collect(name, typing.cast(type, annotation), None, keys, sections)
        else:
            kinds = _alternatives(annotation)
            for kind in kinds:
                _check_kind(kind, f"{section_class.__name__}.{field.name}")
            optional = type(None) in kinds or Any in kinds
            kept = tuple(kind for kind in kinds if kind is not type(None))
            keys[name] = Key(name, kept, optional, default, required, field.metadata)


def _default(field: dataclasses.Field[Any], instance: Any) -> tuple[bool, Any]:
    """(no default, the default value)."""
    if instance is not None:
        return False, getattr(instance, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return False, field.default_factory()
    if field.default is not dataclasses.MISSING:
        return False, field.default
    return True, None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(annotation) for kind in _alternatives(part))
    return (annotation,)


def _check_kind(kind: Any, where: str) -> None:
    """ConfigError if a config file has no way to write this type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS or kind is Any or kind is type(None):
        return
    if origin is typing.Literal and all(isinstance(choice, str) for choice in inner):
        return
    if origin is list and inner[0] in SCALARS:
        return
    item = inner[0] if origin is list else None
    # A dataclass without sections inside.
    if (
        isinstance(item, type)
        and dataclasses.is_dataclass(item)
        and set(read_schema(item).sections) == {""}
    ):
        return
    if origin is dict and inner[0] is str and inner[1] in SCALARS:
        return
    raise ConfigError(
        f"{where}: a config cannot hold the type {getattr(kind, '__name__', kind)}; use bool, int,"
        " float, str, Path, Literal of texts, list[...] or dict[str, ...] of these, a dataclass,"
        " or one of them `| None`; or a list of a dataclass of such keys"
    )

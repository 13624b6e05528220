"""JSON as the dataclasses that it was written from: every value of the type that its field is declared with."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError

_LARGEST = 2**63  # no size that is planned or measured is larger, nor is NaN less


def read_typed(wanted: Any, value: Any, place: str) -> Any:
    """A JSON value as the type that a field is declared with. Keys that a dataclass does not have are passed over.

    place: of the value, for errors. ConfigError for a value of another type, and a key without a default that is
    missing.
    """
    origin, arguments = get_origin(wanted), get_args(wanted)
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise ConfigError(f"{place}: found {show(str(value))}, expected a number below 2^63")
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        kind = next(part for part in arguments if part is not type(None))
        return None if value is None else read_typed(kind, value, place)
    if is_dataclass(wanted) and isinstance(value, Mapping):
        return _read_fields(wanted, value, place)
    if origin is list and isinstance(value, list):
        return [read_typed(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): read_typed(arguments[1], item, f"{place}.{name}") for name, item in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    name = getattr(origin or wanted, "__name__", str(wanted))
    raise ConfigError(f"{place}: found {quote(str(value))}, expected {'an object' if is_dataclass(wanted) else name}")


def _read_fields(wanted: Any, value: Mapping[str, Any], place: str) -> Any:
    declared, found = get_type_hints(wanted), {}
    for entry in fields(wanted):
        if entry.name in value:
            found[entry.name] = read_typed(declared[entry.name], value[entry.name], f"{place}: {entry.name}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"{place}: found no `{entry.name}`; expected all keys of {wanted.__name__}")
    return wanted(**found)

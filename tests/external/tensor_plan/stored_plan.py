"""Read a tensor plan that was written as plain data, as another program would.

A tensor plan says how ranks divide each tensor of a model; `tune tp-plan` writes it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from recipe_lib.errors import ConfigError
from recipe_lib.external.tensor_plan.sharding_plan import (
    Axis,
    Boundary,
    ParameterPlan,
    Rewrite,
    ShardingPlan,
)


def read_stored_plan(stored: Mapping[str, Any]) -> ShardingPlan:
    """Return the plan that `ShardingPlan.to_dict` wrote.

    Raises ConfigError, naming the entry, for anything else.
    """
    # Field -> class of its entries; the other fields have plain values.
    kinds = {"axes": Axis, "parameters": ParameterPlan, "boundaries": Boundary, "rewrites": Rewrite}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(ShardingPlan):
        if field.name == "shared_tokens":
            fields[field.name] = stored.get(field.name, 0.0)
            continue
        if not isinstance(stored.get(field.name), (list, tuple)):
            raise ConfigError(
                f"tensor plan: found no list {field.name}, expected what to_dict wrote; write it"
                " anew"
            )
        if field.name in kinds:
            fields[field.name] = tuple(
                _build_entry(kinds[field.name], item, field.name) for item in stored[field.name]
            )
        else:
            fields[field.name] = tuple(stored[field.name])
    return ShardingPlan(**fields)


def _build_entry(kind: Any, item: Any, section: str) -> Any:
    """Return an object of class `kind` with the item's fields.

    section: the field of the plan, for messages. Raises ConfigError if the fields are others.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(item, Mapping) or not set(item) <= names:
        raise ConfigError(
            f"tensor plan, {section}: found {item!r}, expected the keys {sorted(names)}; write it"
            " anew"
        )
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in item.items()
    }
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigError(
            f"tensor plan, {section}: {error}, expected what to_dict wrote; write it anew"
        ) from None

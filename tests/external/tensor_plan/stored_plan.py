"""Reads a plan that was written as plain data, as another program would."""

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


def plan_from(held: Mapping[str, Any]) -> ShardingPlan:
    """The plan that `to_dict` wrote. Raises ConfigError, naming the entry, for anything else."""
    kinds = {"axes": Axis, "parameters": ParameterPlan, "boundaries": Boundary, "rewrites": Rewrite}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(ShardingPlan):
        if field.name == "shared_tokens":
            found[field.name] = held.get(field.name, 0.0)
            continue
        if not isinstance(held.get(field.name), (list, tuple)):
            raise ConfigError(
                f"tensor plan: found no list {field.name}, expected what to_dict wrote; write it"
                " anew"
            )
        if field.name in kinds:
            found[field.name] = tuple(
                _build_plan(kinds[field.name], item, field.name) for item in held[field.name]
            )
        else:
            found[field.name] = tuple(held[field.name])
    return ShardingPlan(**found)


def _build_plan(kind: Any, item: Any, section: str) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(item, Mapping) or not set(item) <= names:
        raise ConfigError(
            f"tensor plan, {section}: found {item!r}, expected the keys {sorted(names)}; write it"
            " anew"
        )
    try:
        return kind(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in item.items()
            }
        )
    except TypeError as error:
        raise ConfigError(
            f"tensor plan, {section}: {error}, expected what to_dict wrote; write it anew"
        ) from None

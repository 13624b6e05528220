"""The ranks of a run and how a model is divided among them; torch is imported with the first name that needs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_lib.parallel.apply import DTYPES, compile_layers, materialize, shard_model
    from recipe_lib.parallel.world import World, start_world
    from recipe_lib.parallel.wrapping import Unit, describe_units, resolve_wrapping

__all__ = [
    "DTYPES",
    "Unit",
    "World",
    "compile_layers",
    "describe_units",
    "materialize",
    "resolve_wrapping",
    "shard_model",
    "start_world",
]

_HOMES = {
    "DTYPES": "apply",
    "Unit": "wrapping",
    "World": "world",
    "compile_layers": "apply",
    "describe_units": "wrapping",
    "materialize": "apply",
    "resolve_wrapping": "wrapping",
    "shard_model": "apply",
    "start_world": "world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

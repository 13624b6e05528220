"""Which methods are here: those whose keys a recipe has."""

from functools import cache

from recipe_lib.config.keys import read_schema
from recipe_lib.config.other_configs.conversion import ConfigImport
from recipe_lib.config.recipes import RECIPE_CONFIGS


@cache
def is_here(key: str) -> bool:
    """Whether a recipe has this key of ours."""
    return any(key in read_schema(config_class).keys for config_class in RECIPE_CONFIGS.values())


def refuse_missing(conversion: ConfigImport, methods: tuple[tuple[str, str, str], ...]) -> None:
    """ConfigError for a file that asks for a method without a recipe. methods: (a key or section of theirs that asks
    for it, the key of ours that it needs, empty if there is none, what is missing)."""
    for key, ours, why in methods:
        if conversion.asks_for(key) and not (ours and is_here(ours)):
            raise conversion.stop(f"{key}: {why}", key)

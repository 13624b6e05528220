"""Configs to plan, checked against the class of the recipe that they name."""

from typing import Any

from recipe_lib.cli.recipes import recipe_for
from recipe_lib.config import load_config

SMALL = "demo/full"


def load(name: str, *overrides: str) -> Any:
    """A config with overrides."""
    return load_config(name, overrides, recipe_for(name).schema())

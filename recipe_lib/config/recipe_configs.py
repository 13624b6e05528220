"""The config class of each shipped recipe. No torch.

Those of full fine-tuning and of LoRA are in the schema. That of a method is in its folder,
`recipe_lib/methods/<name>/config.py`: the class there whose `recipe` is the name of its recipe.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from recipe_lib.config.aliases import ANSWERS, KEY_ALIASES, SECTION_ALIASES, invert_aliases
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig

_METHODS = "recipe_lib.methods"


# When it is first asked for, not before: a method's config imports this package, which may be what
# imports it.
@cache
def read_recipe_configs() -> dict[str, type]:
    """Return the config class of each recipe by its name, those that others build on first."""
    (methods,) = import_module(_METHODS).__path__
    names = sorted(path.parent.name for path in Path(methods).glob("*/config.py"))
    classes = [_find_config_class(import_module(f"{_METHODS}.{name}.config")) for name in names]
    classes.sort(key=lambda config_class: len(config_class.__mro__))
    every: list[type] = [FullFinetuneConfig, LoraFinetuneConfig, *classes]
    return {vars(config_class)["recipe"]: config_class for config_class in every}


@dataclass(frozen=True)
class Aliases:
    """What keys are called elsewhere, those of all recipes' sections among them."""

    keys: dict[str, str]
    """A name of another tool -> our key."""
    sections: dict[str, str]
    """A section of another tool -> ours."""
    answers: dict[str, str]
    """A key that there is not -> what there is in its place."""
    ambiguous: frozenset[str]
    """Names of one recipe's keys that mean something else in others."""


@cache
def read_aliases() -> Aliases:
    """Return the tables of `aliases`, and those of the recipes' config classes."""
    keys = dict(KEY_ALIASES)
    sections = dict(SECTION_ALIASES)
    answers = dict(ANSWERS)
    ambiguous: frozenset[str] = frozenset()
    config_class: Any
    for config_class in read_recipe_configs().values():
        keys |= invert_aliases(config_class.key_aliases)
        sections |= config_class.section_aliases
        answers |= config_class.key_answers
        ambiguous |= config_class.ambiguous_names
    return Aliases(keys, sections, answers, ambiguous)


def _find_config_class(module: ModuleType) -> type[FullFinetuneConfig]:
    for value in vars(module).values():
        is_config = isinstance(value, type) and issubclass(value, FullFinetuneConfig)
        if is_config and value.__module__ == module.__name__:
            return value
    raise TypeError(f"{module.__file__}: has no subclass of FullFinetuneConfig")

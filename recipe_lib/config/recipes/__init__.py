"""The config class of each shipped recipe: a file of the recipe's name here, with a class whose
`recipe` is that name.

`FullFinetuneConfig`, which all of them build on, is the schema itself. No torch.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from recipe_lib.config.schema import FullFinetuneConfig


def _config_in(module: ModuleType, recipe: str) -> type:
    for value in vars(module).values():
        if isinstance(value, type) and vars(value).get("recipe") == recipe:
            return value
    raise TypeError(
        f"{module.__file__}: has no dataclass whose key `recipe` is {recipe!r} by default"
    )


_found = [
    _config_in(import_module(f"{__name__}.{each.name}"), each.name)
    for each in iter_modules(__path__)
]
# By recipe, those that others build on first.
RECIPE_CONFIGS: dict[str, type] = {FullFinetuneConfig.recipe: FullFinetuneConfig} | {
    vars(found)["recipe"]: found for found in sorted(_found, key=lambda found: len(found.__mro__))
}

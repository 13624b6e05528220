"""Find recipes, configs and presets: in a checkout, in the installed package, or at a user's path.

Shipped ones have names (`llama3/8B_full`); `find_config` and `find_recipe` take a name or a path. A
preset is an architecture, a config.json. `read_recipe_configs` returns the config class of each
shipped recipe without importing torch: those of full fine-tuning and LoRA are in `config.schema`,
that of a method (dpo, reward, distill) in `recipe_lib/methods/<name>/config.py`.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from recipe_lib.config.aliases import ANSWERS, KEY_ALIASES, SECTION_ALIASES, invert_aliases
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError

_METHODS = "recipe_lib.methods"


CONFIG_SUFFIXES = (".yaml", ".yml")

_PACKAGE = Path(__file__).resolve().parent.parent  # the folder recipe_lib
PRESETS = _PACKAGE / "models" / "presets"  # the folder of the architectures, a config.json each
# The line of a config that names its recipe.
_RECIPE_LINE = re.compile(r"^recipe:[ \t]*(\w+)", re.MULTILINE)

# Folder of a family's configs -> year and month in which its weights were published; those that
# are not here, the demo's, are listed first.
_RELEASED = {
    "llama2": "2023-07",
    "mistral": "2023-09",
    "mixtral": "2023-12",
    "llama3": "2024-04",
    "phi3": "2024-04",
    "gemma2": "2024-06",
    "llama3_1": "2024-07",
    "llama3_2": "2024-09",
    "olmoe": "2024-09",
    "qwen2_5": "2024-09",
    "smollm2": "2024-11",
    "llama3_3": "2024-12",
    "phi4": "2024-12",
    "gemma3": "2025-03",
    "qwen3": "2025-04",
    "qwen3_moe": "2025-04",
    "smollm3": "2025-07",
    "gpt_oss": "2025-08",
    "qwen3_next": "2025-09",
    "granite4": "2025-10",
    "lfm2": "2025-10",
    "olmo3": "2025-11",
    "ministral3": "2025-12",
    "nemotron3": "2025-12",
    "glm4": "2026-01",
    "qwen3_5": "2026-02",
    "gemma4": "2026-04",
    "qwen3_6": "2026-04",
}


def get_recipes_folder() -> Path:
    """Return the folder of the shipped recipes."""
    return _find_shipped_folder("recipes")


def get_configs_folder() -> Path:
    """Return the folder of the shipped configs."""
    return _find_shipped_folder("configs")


def find_example_file(path: str) -> str:
    """Return a path unchanged, or the installed package's copy of a shipped example.

    The copy is returned for a path in `examples/` that does not exist here.
    """
    first, _, rest = path.partition("/")
    if first != "examples" or not rest or os.path.lexists(path):
        return path
    shipped = _find_shipped_folder(first) / rest
    return str(shipped) if shipped.exists() else path


def find_config(name_or_path: str | Path) -> Path:
    """Return the YAML file that a name (`llama3/8B_full`) or a path stands for.

    Raises ConfigError, with the nearest name, if there is none, or for a path of another suffix.
    """
    return _find_file(
        name_or_path, "config", shipped=_list_config_files(), suffixes=CONFIG_SUFFIXES
    )


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the Python file that a recipe's name or a path stands for.

    Raises ConfigError, with the nearest name, if there is none, or for a path of another suffix.
    """
    files = {name: get_recipes_folder() / f"{name}.py" for name in list_recipes()}
    return _find_file(name_or_path, "recipe", shipped=files, suffixes=(".py",))


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(
        path.stem for path in get_recipes_folder().glob("*.py") if not path.stem.startswith("_")
    )


def list_configs() -> dict[str, list[str]]:
    """Return recipe -> names of the shipped configs for it, newest family first, then by size.

    A recipe without a config has an empty list.
    """
    by_recipe: dict[str, list[str]] = {
        name: [] for name in sorted({*list_recipes(), *read_recipe_configs()})
    }
    files = _list_config_files()
    for name in sorted(files, key=_get_sort_key):
        # Found by one line, without loading the config, which would check all of it.
        line = _RECIPE_LINE.search(files[name].read_text(encoding="utf-8"))
        recipe = line[1] if line else FullFinetuneConfig.recipe
        by_recipe.setdefault(recipe, []).append(name)
    return by_recipe


def _get_sort_key(config: str) -> tuple[int, str, float, str]:
    """Return (minus the month of release, family, billions of parameters, name)."""
    family, _, name = config.partition("/")
    year, month = map(int, _RELEASED.get(family, "9999-12").split("-"))
    size = re.search(r"(\d+(?:\.\d+)?)([MB])(?![a-zA-Z])", name)
    billions = float(size[1]) / (1000 if size[2] == "M" else 1) if size else 0.0
    return -(12 * year + month), family, billions, name


def list_presets() -> list[str]:
    """Return the names of the shipped architectures (`llama3/8B`), for `model.preset`."""
    return sorted(_get_name(PRESETS, path) for path in PRESETS.rglob("*.json"))


def expand_home(path: str | Path) -> Path:
    """Return a user's path with `~` at its beginning expanded."""
    # Not Path.expanduser, which raises for the home of a user that does not exist.
    return Path(os.path.expanduser(path))


def _list_config_files() -> dict[str, Path]:
    folder = get_configs_folder()
    return {_get_name(folder, path): path for path in folder.rglob("*.yaml")}


def _get_name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


@cache
def _find_shipped_folder(kind: str) -> Path:
    # A wheel carries them inside the package; a checkout has them next to it.
    in_wheel = _PACKAGE / f"_{kind}"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / kind


def _find_file(
    name_or_path: str | Path, kind: str, *, shipped: dict[str, Path], suffixes: tuple[str, ...]
) -> Path:
    """Return a shipped or a user's file. Raises ConfigError if there is none, or it cannot be one.

    kind: `config` or `recipe`, for errors. shipped: name -> file. suffixes: of a user's files.
    """
    text = str(name_or_path)
    if text in shipped:
        return shipped[text]
    if not text or not text.isprintable():
        raise ConfigError(f"{kind} {quote(text)}: expected a name (`tune ls` lists them) or a path")
    path = expand_home(text)
    endings = " or ".join(suffixes)
    if os.path.isfile(path):
        if path.suffix not in suffixes:
            raise ConfigError(f"{show(text)}: not a {kind}: expected a file ending in {endings}")
        return path
    if os.path.isdir(path):
        raise ConfigError(f"{show(text)}: is a folder; expected a {kind} file ending in {endings}")
    name = path.with_suffix("").as_posix() if path.suffix in suffixes else text
    # An absolute path is no misspelled name.
    hint = "" if text.startswith("/") else suggest_config(name.removeprefix(f"{kind}s/"), shipped)
    raise ConfigError(
        f"{show(text)}: no such"
        f" {kind}{hint or '; `tune ls` lists the names, or give a path to a file'}"
    )


def suggest_config(name: str, shipped: Iterable[str]) -> str:
    """Return the end of an error for a name that is not shipped, or an empty text.

    It is `; did you mean X?`, or for a family (`llama3`) or a size of one (`llama3/8B`), how to
    list its configs.
    """
    shipped = list(shipped)
    beginnings = (f"{name.lower()}/", f"{name.lower()}_")
    family = [config for config in shipped if config.lower().startswith(beginnings)]
    if len(family) > 1:
        return f"; `tune ls {name}` lists its {len(family)} configs"
    return did_you_mean(name, shipped)


# Not when this module is imported: the configs of methods import this package, so that the imports
# would go in a circle.
@cache
def read_recipe_configs() -> dict[str, type]:
    """Return name -> config class of each shipped recipe, base classes before subclasses."""
    (methods,) = import_module(_METHODS).__path__
    names = sorted(path.parent.name for path in Path(methods).glob("*/config.py"))
    classes = [_find_config_class(import_module(f"{_METHODS}.{name}.config")) for name in names]
    classes.sort(key=lambda config_class: len(config_class.__mro__))
    config_classes: list[type] = [FullFinetuneConfig, LoraFinetuneConfig, *classes]
    return {vars(config_class)["recipe"]: config_class for config_class in config_classes}


def _find_config_class(module: ModuleType) -> type[FullFinetuneConfig]:
    for value in vars(module).values():
        is_config = isinstance(value, type) and issubclass(value, FullFinetuneConfig)
        # A base of several recipes' classes has no `recipe` of its own.
        if is_config and value.__module__ == module.__name__ and "recipe" in vars(value):
            return value
    raise TypeError(f"{module.__file__}: has no subclass of FullFinetuneConfig with a `recipe`")


@dataclass(frozen=True)
class Aliases:
    """What other tools call keys and sections of all recipes, for hints in errors."""

    # Another tool's name of a key -> our dotted key.
    keys: dict[str, str]
    # Another tool's section -> ours; empty: our keys of that kind stand at the top level.
    sections: dict[str, str]
    # Key that does not exist here -> what there is in its place, which ends the error.
    answers: dict[str, str]
    # Names in `keys` for one recipe's keys that mean something else in other recipes.
    ambiguous: frozenset[str]


@cache
def read_aliases() -> Aliases:
    """Return the tables of `config.aliases`, joined with those of the recipes' config classes."""
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
    return Aliases(keys, sections=sections, answers=answers, ambiguous=ambiguous)

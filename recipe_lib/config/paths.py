"""Where recipes, configs and presets are: in a checkout, in the installed package, or at a user's
path.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from recipe_lib.config.recipes import RECIPE_CONFIGS
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError

CONFIG_SUFFIXES = (".yaml", ".yml")

_PACKAGE = Path(__file__).resolve().parent.parent
_RECIPE_LINE = re.compile(r"^recipe:[ \t]*(\w+)", re.MULTILINE)


def get_recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return _shipped_folder("recipes")


def get_configs_folder() -> Path:
    """The folder of the shipped configs."""
    return _shipped_folder("configs")


def find_example_file(path: str) -> str:
    """The path; for one of `examples/` that is not there, as outside of a clone, where the
    installed package has it.
    """
    first, _, rest = path.partition("/")
    if first != "examples" or not rest or os.path.lexists(path):
        return path
    shipped = _shipped_folder(first) / rest
    return str(shipped) if shipped.exists() else path


def get_presets_folder() -> Path:
    """The folder of the shipped architectures (a config.json each)."""
    return _PACKAGE / "models" / "presets"


def find_config(name_or_path: str | Path) -> Path:
    """The YAML file that a name (`llama3/8B_full`) or a path stands for; ConfigError with the
    nearest name if none.
    """
    return _find(name_or_path, "config", _config_files(), CONFIG_SUFFIXES)


def find_recipe(name_or_path: str | Path) -> Path:
    """The Python file that a recipe's name or a path stands for; ConfigError with the nearest name
    if none.
    """
    files = {name: get_recipes_folder() / f"{name}.py" for name in list_recipes()}
    return _find(name_or_path, "recipe", files, (".py",))


def list_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(
        path.stem for path in get_recipes_folder().glob("*.py") if not path.stem.startswith("_")
    )


def list_configs() -> dict[str, list[str]]:
    """Recipe name -> names of the shipped configs that say `recipe: <that name>`, by family and
    then by size.
    """
    by_recipe: dict[str, list[str]] = {
        name: [] for name in sorted({*list_recipes(), *RECIPE_CONFIGS})
    }
    for name, path in sorted(_config_files().items(), key=lambda item: _family_and_size(item[0])):
        line = _RECIPE_LINE.search(path.read_text(encoding="utf-8"))
        recipe = line[1] if line else FullFinetuneConfig.recipe
        by_recipe.setdefault(recipe, []).append(name)
    return by_recipe


def _family_and_size(config: str) -> tuple[str, float, str]:
    """What `qwen3/14B_lora` stands by in a list: after 4B; sizes of fewer than a billion (`135M`)
    come first.
    """
    family, _, name = config.partition("/")
    size = re.search(r"(\d+(?:\.\d+)?)([MB])(?![a-zA-Z])", name)
    return family, float(size[1]) / (1000 if size[2] == "M" else 1) if size else 0.0, name


def list_presets() -> list[str]:
    """Names of the shipped architectures (`llama3/8B`), for `model.preset`."""
    return sorted(
        _name_in(get_presets_folder(), path) for path in get_presets_folder().rglob("*.json")
    )


def expand_home(path: str | Path) -> Path:
    """A user's path with `~` filled in. Like os.path.isfile and unlike pathlib, it refuses no
    text.
    """
    return Path(os.path.expanduser(path))


def _config_files() -> dict[str, Path]:
    folder = get_configs_folder()
    return {_name_in(folder, path): path for path in folder.rglob("*.yaml")}


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


@cache
def _shipped_folder(kind: str) -> Path:
    # A wheel carries them inside the package; a checkout has them next to it.
    in_wheel = _PACKAGE / f"_{kind}"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / kind


def _find(
    name_or_path: str | Path, what: str, shipped: dict[str, Path], suffixes: tuple[str, ...]
) -> Path:
    text = str(name_or_path)
    if text in shipped:
        return shipped[text]
    if not text or not text.isprintable():
        raise ConfigError(f"{what} {quote(text)}: expected a name (`tune ls` lists them) or a path")
    path = expand_home(text)
    if os.path.isfile(path):
        if path.suffix not in suffixes:
            raise ConfigError(
                f"{show(text)}: not a {what}: expected a file ending in {' or '.join(suffixes)}"
            )
        return path
    if os.path.isdir(path):
        raise ConfigError(
            f"{show(text)}: is a folder; expected a {what} file ending in {' or '.join(suffixes)}"
        )
    name = path.with_suffix("").as_posix() if path.suffix in suffixes else text
    hint = "" if text.startswith("/") else suggest_config(name.removeprefix(f"{what}s/"), shipped)
    raise ConfigError(
        f"{show(text)}: no such"
        f" {what}{hint or '; `tune ls` lists the names, or give a path to a file'}"
    )


def suggest_config(name: str, shipped: Iterable[str]) -> str:
    """`; did you mean X?`; for a family, or a size of one, that there are several configs of, how
    to list them.
    """
    shipped = list(shipped)
    begun = [
        one for one in shipped if one.lower().startswith((f"{name.lower()}/", f"{name.lower()}_"))
    ]
    return (
        f"; `tune ls {name}` lists its {len(begun)} configs"
        if len(begun) > 1
        else did_you_mean(name, shipped)
    )

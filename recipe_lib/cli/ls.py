"""`tune ls [WORD ...]`: the recipes, what each does, and their configs, with the memory that they
are planned to take.

The figures are those that each config's file has at its head.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from recipe_lib.cli.arguments import Options, Parser
from recipe_lib.config.paths import find_recipe, get_configs_folder, list_configs, list_recipes
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, ConfigError

DESCRIPTION = """Lists the recipes and the configs of each, with the memory that a GPU is planned to reserve.

  tune ls qwen3 8B lora     configs whose name has all these words
  tune ls dpo_distributed   those of a recipe"""

_PLANNED = re.compile(
    r"Planned peak of a rank: [\d.]+ \w+ active, ([\d.]+ \w+) reserved \((\d+) ranks?,"
)
_MEANT = re.compile(r"Meant for ([^:]+):")

OPTIONS: Options = {
    "words": {"nargs": "*", "metavar": "WORD", "help": "a recipe, a family, a size, a method"},
}


def parser() -> Parser:
    """Return the options of the verb."""
    return Parser("ls", DESCRIPTION, OPTIONS)


def run(words: list[str]) -> int:
    """Prints the table."""
    asked = parser().parse(words).words
    recipes = [word for word in asked if word in list_recipes()]
    filters = [word for word in asked if word not in recipes]
    found = {
        name: [config for config in configs if all(matches(config, word) for word in filters)]
        for name, configs in list_configs().items()
        if name in (recipes or list_recipes())
    }
    if filters and not any(found.values()):
        raise ConfigError(_none_of(filters))
    shown = {name: configs for name, configs in found.items() if configs or not filters}
    width = max((len(config) for configs in shown.values() for config in configs), default=0)
    for number, (name, configs) in enumerate(shown.items()):
        if number:
            print()
        print(f"{name}: {first_line(find_recipe(name))}")
        for config in configs:
            print(
                f"  {config:{width}}  {planned(get_configs_folder() / f'{config}.yaml')}".rstrip()
            )
    return DONE


def matches(config: str, word: str) -> bool:
    """Whether a part of the config's name begins with the word: `qwen3/8B_lora` has qwen3, 8B and
    lora; with `qwen3/` begins no other family than that.
    """
    name, wanted = config.lower().replace(".", "_"), word.lower().replace(".", "_").lstrip("/")
    return any(
        part.startswith(wanted) for part in (name, *name.split("/"), *re.split(r"[/_]", name))
    )


def planned(config: Path) -> str:
    """What stands at the head of the file: `6.84 GiB a GPU, 1 GPU of 24 GB`; nothing where it has
    no plan.
    """
    text = config.read_text(encoding="utf-8").partition("\nrecipe:")[0].replace("\n# ", " ")
    size, cards = _PLANNED.search(text), _MEANT.search(text)
    if not size:
        return ""
    number, unit = size[1].split()
    ranks = "" if cards else f"{size[2]} rank{'s' if size[2] != '1' else ''}"
    return f"{number:>6} {unit} planned  {cards[1] if cards else ranks}"


def _none_of(words: Sequence[str]) -> str:
    names = [name for configs in list_configs().values() for name in configs]
    parts = {part for name in names for part in (*name.split("/"), *re.split(r"[/_]", name))}
    unknown = next((word for word in words if not any(matches(name, word) for name in names)), None)
    if unknown is None:
        return f"no config has {' and '.join(show(word) for word in words)}; `tune ls` lists all"
    return (
        f"{show(unknown)}: no such recipe, and no config with"
        f" it{did_you_mean(unknown, [*list_recipes(), *parts])}"
    )


def first_line(recipe: Path) -> str:
    """The first line of a recipe's docstring, read without running the file."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or "no description"
    return docstring.splitlines()[0]

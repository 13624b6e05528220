"""`tune ls [WORD ...]`: list the recipes and their configs, with the memory that each is planned to
take.

The figures are those at the head of each config's file, so that nothing is planned here.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.paths import find_recipe, get_configs_folder, list_configs, list_recipes
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, ConfigError

DESCRIPTION = """Lists the recipes and the configs of each, with the memory that a GPU is planned \
to reserve.

  tune ls qwen3 8B lora     configs whose name has all these words
  tune ls dpo_distributed   those of a recipe"""

_PLANNED = re.compile(
    r"Planned peak of a rank: [\d.]+ \w+ active, ([\d.]+ \w+) reserved \((\d+) ranks?,"
)
_MEANT = re.compile(r"Meant for ([^:]+):")

PARSER = Parser(
    "ls",
    DESCRIPTION,
    {
        "words": {"nargs": "*", "metavar": "WORD", "help": "a recipe, a family, a size, a method"},
    },
)


def run(words: list[str]) -> int:
    """Print the recipes and configs that the words name."""
    words = PARSER.parse(words).words
    recipes = [word for word in words if word in list_recipes()]
    filters = [word for word in words if word not in recipes]
    shown = {
        name: [config for config in configs if all(is_match(config, word) for word in filters)]
        for name, configs in list_configs().items()
        if name in (recipes or list_recipes())
    }
    if filters:
        # A recipe without configs is listed too, unless configs were asked for.
        shown = {name: configs for name, configs in shown.items() if configs}
    if filters and not shown:
        raise ConfigError(_describe_no_match(filters))
    width = max((len(config) for configs in shown.values() for config in configs), default=0)
    for number, (name, configs) in enumerate(shown.items()):
        if number:
            print()
        # Without importing the recipe and its torch.
        tree = ast.parse(find_recipe(name).read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree) or "no description"
        print(f"{name}: {docstring.splitlines()[0]}")
        for config in configs:
            memory = read_planned_memory(get_configs_folder() / f"{config}.yaml")
            print(f"  {config:{width}}  {memory}".rstrip())
    return DONE


def is_match(config: str, word: str) -> bool:
    """Return True if a part of the config's name begins with the word.

    `qwen3/8B_lora` has the parts qwen3, 8B and lora; `qwen3/` matches that family alone.
    """
    name = config.lower().replace(".", "_")
    prefix = word.lower().replace(".", "_").lstrip("/")
    return any(
        part.startswith(prefix) for part in (name, *name.split("/"), *re.split(r"[/_]", name))
    )


def read_planned_memory(config: Path) -> str:
    """Return the plan at the head of a config: `6.84 GiB planned  1 GPU of 24 GB`, or nothing."""
    # The header is comments, broken between words.
    header = config.read_text(encoding="utf-8").partition("\nrecipe:")[0].replace("\n# ", " ")
    peak = _PLANNED.search(header)
    if not peak:
        return ""
    number, unit = peak[1].split()
    cards = _MEANT.search(header)
    ranks = f"{peak[2]} rank{'s' if peak[2] != '1' else ''}"
    return f"{number:>6} {unit} planned  {cards[1] if cards else ranks}"


def _describe_no_match(words: Sequence[str]) -> str:
    names = [name for configs in list_configs().values() for name in configs]
    parts = {part for name in names for part in (*name.split("/"), *re.split(r"[/_]", name))}
    unknown = next(
        (word for word in words if not any(is_match(name, word) for name in names)), None
    )
    if unknown is None:
        return f"no config has {' and '.join(show(word) for word in words)}; `tune ls` lists all"
    return (
        f"{show(unknown)}: no such recipe, and no config with"
        f" it{did_you_mean(unknown, [*list_recipes(), *parts])}"
    )

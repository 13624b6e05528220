"""List the recipes and their configs, with the memory that each is planned to take: `tune ls`.

main.py calls `run(words)`. The figures are read from the comments at the head of each config's
file, so that nothing is planned here.
"""

import ast
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.paths import find_recipe, get_configs_folder, list_configs, list_recipes
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, ConfigError

DESCRIPTION = """Lists the recipes and the configs of each, with the memory that a GPU is planned \
to reserve.

  tune ls qwen3 8B lora     configs whose name has all these words
  tune ls 2x24GB lora       those that are planned to fit 2 GPUs of 24 GB; 24GB: one of them
  tune ls dpo_distributed   those of a recipe"""

# Groups: reserved memory, its unit, number of ranks.
_PLANNED = re.compile(
    r"Planned peak of a rank: [\d.]+ \w+ active, ([\d.]+) (\w+) reserved \((\d+) ranks?,"
)
# Such as `Meant for 1 GPU of 24 GB, or 1 of 16 GB:`.
_INTENDED_GPUS = re.compile(r"Meant for ([^:]+):")
_GPUS = re.compile(r"(\d+)(?: GPUs?)? of (\d+) GB")  # groups: number of GPUs, GB of each
_ROOM = re.compile(r"(?:(\d+)x)?(\d+)GB", re.IGNORECASE)  # a word such as 2x24GB or 24GB

PARSER = Parser(
    "ls",
    DESCRIPTION,
    {
        "words": {"nargs": "*", "metavar": "WORD", "help": "a recipe, a family, a size, a method"},
    },
)


def run(words: list[str]) -> int:
    """Print the recipes and configs that the words name; without words all of them.

    Raises ConfigError if no config has all of the words.
    """
    words = PARSER.parse(words).words
    recipes = [word for word in words if word in list_recipes()]
    filters = [word for word in words if word not in recipes]
    configs_by_recipe: dict[str, list[str]] = {}
    for name, configs in list_configs().items():
        matches = [
            config for config in configs if all(_is_listed(config, word) for word in filters)
        ]
        # A recipe without configs is listed too, unless configs were asked for.
        if name in (recipes or list_recipes()) and (matches or not filters):
            configs_by_recipe[name] = matches
    if filters and not configs_by_recipe:
        raise ConfigError(_describe_no_match(filters))
    width = max(
        (len(config) for config in chain.from_iterable(configs_by_recipe.values())), default=0
    )
    for index, (name, configs) in enumerate(configs_by_recipe.items()):
        if index:
            print()
        # Parsed, as importing a recipe imports torch, which takes seconds.
        tree = ast.parse(find_recipe(name).read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree) or "no description"
        print(f"{name}: {docstring.splitlines()[0]}")
        for config in configs:
            memory = read_planned_memory(get_configs_folder() / f"{config}.yaml")
            print(f"  {config:{width}}  {memory}".rstrip())
    return DONE


def _is_listed(config: str, word: str) -> bool:
    """Return True if a config fits the GPUs that a word names, or its name has the word."""
    room = _ROOM.fullmatch(word)
    if room is None:
        return is_match(config, word)
    num_gpus = int(room[1] or 1)
    planned = _GPUS.findall(read_planned_memory(get_configs_folder() / f"{config}.yaml"))
    return any(int(count) <= num_gpus and int(size) <= int(room[2]) for count, size in planned)


def is_match(config: str, word: str) -> bool:
    """Return True if a part of the config's name begins with the word.

    `qwen3/8B_lora` has the parts qwen3, 8B and lora; `qwen3/` matches that family alone.
    """
    # The configs of Llama 3.1 are called llama3_1. No part begins with a slash, so one is dropped.
    name = config.lower().replace(".", "_")
    prefix = word.lower().replace(".", "_").lstrip("/")
    return any(part.startswith(prefix) for part in _split_name(name))


def _split_name(name: str) -> list[str]:
    """Return what a word may match: `qwen3/8B_lora`, `qwen3`, `8B_lora`, and `8B` and `lora`."""
    return [name, *name.split("/"), *re.split(r"[/_]", name)]


def read_planned_memory(config: Path) -> str:
    """Return the plan at the head of a config, `6.84 GiB planned  1 GPU of 24 GB`; empty: none."""
    # The head is comments up to the first key, `recipe`, with lines broken between words.
    header = config.read_text(encoding="utf-8").partition("\nrecipe:")[0].replace("\n# ", " ")
    plan_match = _PLANNED.search(header)
    if not plan_match:
        return ""
    amount, unit, num_ranks = plan_match.groups()
    gpus_match = _INTENDED_GPUS.search(header)
    ranks = "1 rank" if num_ranks == "1" else f"{num_ranks} ranks"
    return f"{amount:>6} {unit} planned  {gpus_match[1] if gpus_match else ranks}"


def _describe_no_match(words: Sequence[str]) -> str:
    names = list(chain.from_iterable(list_configs().values()))
    # Suggestions are parts of names, such as a family or a size, and never a whole name.
    parts = set(chain.from_iterable(map(_split_name, names))).difference(names)
    unknown = next(
        (word for word in words if not any(_is_listed(name, word) for name in names)), None
    )
    if unknown is None:
        return f"no config has {' and '.join(show(word) for word in words)}; `tune ls` lists all"
    return (
        f"{show(unknown)}: no such recipe, and no config with"
        f" it{did_you_mean(unknown, [*list_recipes(), *parts])}"
    )

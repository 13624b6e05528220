"""What `tune import` makes of other tools' configs: `python -m benchmarks.imported_configs FOLDER
... [--counts]`.

Prints a Markdown table with a row for each YAML file under the folders: the recipe, and how many of
its keys were carried, carried with another effect, or dropped; or the line that refuses it.
--counts: a row for each recipe, and how many files were refused for what. --keys: a row for each
key. No folder: the configs of torchtune's wheel, installed or in the folder that TORCHTUNE_CONFIGS
names.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from recipe_lib.config.torchtune import ImportedConfig, import_file
from recipe_lib.config.torchtune.conversion import KeyFate
from recipe_lib.errors import ConfigError

KINDS = ("carried", "other effect", "dropped")
# Words of refusals -> what the table of counts calls them.
REASONS = ("there are no images here", "it measures a model", "it generates", "it quantizes a model",
           "reinforcement learning")  # fmt: skip


def find_torchtune_configs() -> Path | None:
    """The folder of torchtune's configs, named by TORCHTUNE_CONFIGS or of the installed wheel; None
    if it is not here.

    The wheel puts them into a folder `recipes` at the top, which is not imported: that would be
    another one's here.
    """
    named = os.environ.get("TORCHTUNE_CONFIGS")
    if named:
        return Path(named) if Path(named).is_dir() else None
    try:
        folder = Path(str(distribution("torchtune").locate_file("recipes/configs")))
    except PackageNotFoundError:
        return None
    return folder if folder.is_dir() else None


def import_all(folder: Path) -> Iterator[tuple[str, ImportedConfig | str]]:
    """(name, what was imported, or why it was refused) of every config in a folder."""
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        name = path.relative_to(folder).as_posix()
        try:
            yield name, import_file(str(path))
        except ConfigError as error:
            yield name, str(error).replace(f"{path}: ", "").replace(f"{path}:", "line ")


def format_table(found: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """A row a file. found: what `import_all` gives."""
    lines = ["| config | recipe | carried | other effect | dropped |", "|---|---|---|---|---|"]
    for name, outcome in found:
        if isinstance(outcome, str):
            lines.append(f"| {name} | refused: {outcome.partition(chr(10))[0]} | | | |")
        else:
            counts = Counter(fate.kind for fate in outcome.fates.values())
            lines.append(
                f"| {name} | {outcome.recipe} | {' | '.join(str(counts[kind]) for kind in KINDS)} |"
            )
    return "\n".join(lines) + "\n"


def format_count_table(found: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """A row a recipe, then one a reason of refusal. found: what `import_all` gives."""
    files: Counter[str] = Counter()
    keys: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    for _, outcome in found:
        if isinstance(outcome, str):
            refused[next((reason for reason in REASONS if reason in outcome), outcome)] += 1
            continue
        files[outcome.recipe] += 1
        kinds = (fate.kind for fate in outcome.fates.values())
        keys.setdefault(outcome.recipe, Counter()).update(kinds)
    lines = ["| recipe | files | keys carried | other effect | dropped |", "|---|---|---|---|---|"]
    for recipe in sorted(files):
        counts = " | ".join(str(keys[recipe][name]) for name in KINDS)
        lines.append(f"| `{recipe}` | {files[recipe]} | {counts} |")
    lines += [f"| refused: {reason} | {count} | | | |" for reason, count in sorted(refused.items())]
    return "\n".join(lines) + "\n"


def format_key_table(found: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """A row a key of the files that are imported: in how many it was carried or dropped, and the
    line that is said of it most often. found: what `import_all` gives.
    """
    kinds: dict[str, Counter[str]] = {}
    said: dict[str, Counter[str]] = {}
    for _, outcome in found:
        if isinstance(outcome, str):
            continue
        for key, fate in outcome.fates.items():
            if fate.kind in KINDS:
                kinds.setdefault(key, Counter())[fate.kind] += 1
                said.setdefault(key, Counter())[_describe_fate(fate)] += 1
    lines = ["| key | carried | other effect | dropped | ours, or why |", "|---|---|---|---|---|"]
    for key in sorted(kinds):
        words = max(said[key].items(), key=lambda pair: (pair[1], pair[0]))[0]
        lines.append(
            f"| `{key}` | {' | '.join(str(kinds[key][kind]) for kind in KINDS)} | {words} |"
        )
    return "\n".join(lines) + "\n"


def _describe_fate(fate: KeyFate) -> str:
    """Our keys, without the values that each file has, and why."""
    ours = ", ".join(f"`{name}`" for name in sorted(fate.ours))
    return "; ".join(part for part in (ours, fate.why) if part).replace("|", "\\|")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--counts", action="store_true", help="a row for each recipe")
    parser.add_argument("--keys", action="store_true", help="a row for each key")
    arguments = parser.parse_args()
    folders = arguments.folders or [folder for folder in [find_torchtune_configs()] if folder]
    if not folders:
        parser.error("torchtune's configs are not here: name a folder, or set TORCHTUNE_CONFIGS")
    found = [pair for folder in folders for pair in import_all(folder)]
    shown = (
        format_key_table
        if arguments.keys
        else format_count_table
        if arguments.counts
        else format_table
    )
    print(shown(found), end="")


if __name__ == "__main__":
    main()

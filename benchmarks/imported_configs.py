"""Show what `tune import` makes of torchtune's configs, as a Markdown table.

Run `python -m benchmarks.imported_configs [FOLDER ...]`; tests call the functions. Without a folder
the configs of torchtune's wheel are read. An outcome is what a file was imported to, or why it was
refused. The fate of a key is `carried` to one of ours, carried with `other effect`, or `dropped`.
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

KINDS = ("carried", "other effect", "dropped")  # what becomes of a key
# Words of refusals; files whose refusals have the same words are counted together.
REASONS = (
    "there are no images here",
    "it measures a model",
    "it generates",
    "it quantizes a model",
    "reinforcement learning",
)


def find_torchtune_configs() -> Path | None:
    """Return the folder of torchtune's configs, or None if there is none.

    It is the one that TORCHTUNE_CONFIGS names, or that of the installed wheel.
    """
    environment_path = os.environ.get("TORCHTUNE_CONFIGS")
    if environment_path:
        return Path(environment_path) if Path(environment_path).is_dir() else None
    try:
        # Not by importing `recipes`, where the wheel puts them: here that is another package.
        folder = Path(str(distribution("torchtune").locate_file("recipes/configs")))
    except PackageNotFoundError:
        return None
    return folder if folder.is_dir() else None


def import_all(folder: Path) -> Iterator[tuple[str, ImportedConfig | str]]:
    """Yield (name, outcome) of every config in a folder.

    An outcome is the imported config, or the lines of its refusal without the file's path.
    """
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        name = path.relative_to(folder).as_posix()
        try:
            yield name, import_file(str(path))
        except ConfigError as error:
            yield name, str(error).replace(f"{path}: ", "").replace(f"{path}:", "line ")


def format_table(outcomes: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """Return a table with a row for each file. outcomes: what `import_all` yields."""
    lines = ["| config | recipe | carried | other effect | dropped |", "|---|---|---|---|---|"]
    for name, outcome in outcomes:
        if isinstance(outcome, str):
            # The first line of the refusal.
            lines.append(f"| {name} | refused: {outcome.partition(chr(10))[0]} | | | |")
        else:
            counts = Counter(fate.kind for fate in outcome.fates.values())
            cells = [name, outcome.recipe, *(str(counts[kind]) for kind in KINDS)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_count_table(outcomes: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """Return a table with a row for each recipe, then one for each reason of refusal.

    outcomes: what `import_all` yields.
    """
    files: Counter[str] = Counter()  # by recipe
    keys: dict[str, Counter[str]] = {}  # recipe -> number of keys by kind of fate
    refused: Counter[str] = Counter()  # by reason
    for _, outcome in outcomes:
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


def format_key_table(outcomes: Iterable[tuple[str, ImportedConfig | str]]) -> str:
    """Return a table with a row for each key: in how many files it had which fate, and which most.

    outcomes: what `import_all` yields.
    """
    # Both by key: number of files by kind of fate, and by description.
    kinds: dict[str, Counter[str]] = {}
    descriptions: dict[str, Counter[str]] = {}
    for _, outcome in outcomes:
        if isinstance(outcome, str):
            continue
        for key, fate in outcome.fates.items():
            if (
                fate.kind in KINDS
            ):  # else it is torchtune's default of a key that is not in the file
                kinds.setdefault(key, Counter())[fate.kind] += 1
                descriptions.setdefault(key, Counter())[_describe_fate(fate)] += 1
    lines = ["| key | carried | other effect | dropped | ours, or why |", "|---|---|---|---|---|"]
    for key in sorted(kinds):
        # The most frequent; of equally frequent ones the last in alphabetical order.
        description = max(descriptions[key].items(), key=lambda pair: (pair[1], pair[0]))[0]
        cells = [f"`{key}`", *(str(kinds[key][kind]) for kind in KINDS), description]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _describe_fate(fate: KeyFate) -> str:
    """Return our keys that a key was carried to, without their values, and why it differs.

    Escaped for a table's cell.
    """
    ours = ", ".join(f"`{name}`" for name in sorted(fate.ours))
    return "; ".join(part for part in (ours, fate.why) if part).replace("|", "\\|")


def main() -> None:
    """Import the configs that the command line names, and print a table."""
    parser = argparse.ArgumentParser(
        description="Show what `tune import` makes of torchtune's configs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--counts", action="store_true", help="a row for each recipe")
    parser.add_argument("--keys", action="store_true", help="a row for each key")
    arguments = parser.parse_args()
    folders = arguments.folders
    if not folders and (torchtune_configs := find_torchtune_configs()):
        folders = [torchtune_configs]
    if not folders:
        parser.error("torchtune's configs are not here: name a folder, or set TORCHTUNE_CONFIGS")
    outcomes: list[tuple[str, ImportedConfig | str]] = []
    for folder in folders:
        outcomes += import_all(folder)
    if arguments.keys:
        table = format_key_table(outcomes)
    elif arguments.counts:
        table = format_count_table(outcomes)
    else:
        table = format_table(outcomes)
    print(table, end="")


if __name__ == "__main__":
    main()

"""Copy a shipped recipe or config, to make it yours: `tune cp RECIPE|CONFIG DEST`.

main.py calls `run(words)`.
"""

import os
from pathlib import Path

from recipe_lib.cli.arguments import SWITCH, Parser, check_replaceable
from recipe_lib.config.paths import (
    CONFIG_SUFFIXES,
    find_config,
    find_recipe,
    list_configs,
    list_recipes,
    suggest_config,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, ConfigError, StorageError
from recipe_lib.files import write_aside, write_bytes
from recipe_lib.reading import TEXT_LIMIT, read_bytes

DESCRIPTION = """Copies a recipe or a config.

A copied recipe runs from anywhere: tune run ./mine.py --config ./mine.yaml"""

PARSER = Parser(
    "cp",
    DESCRIPTION,
    {
        "source": {"metavar": "RECIPE|CONFIG", "help": "a name that `tune ls` shows, or a path"},
        "destination": {
            "metavar": "DEST",
            "help": "a file (its suffix may be left out) or a folder",
        },
        "--force": SWITCH | {"help": "replace a file that is there"},
        "--make-parents": SWITCH | {"help": "create missing folders"},
    },
)


def run(words: list[str]) -> int:
    """Copy the file, and print where to.

    Raises ConfigError for a name or a path that cannot be used, and StorageError if the copy cannot
    be written.
    """
    arguments = PARSER.parse(words)
    source = find_recipe_or_config(arguments.source)
    target = choose_target(source, arguments.destination)
    check_replaceable(show(str(target)), target)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{show(str(target))}: is the file to copy; give another name")
    if target.exists() and not arguments.force:
        raise ConfigError(f"{show(str(target))}: exists already; --force replaces it")
    if not target.parent.is_dir() and not arguments.make_parents:
        raise ConfigError(f"{show(str(target.parent))}: no such folder; --make-parents creates it")
    try:
        content = read_bytes(source, TEXT_LIMIT)
    except OSError as error:
        raise ConfigError(f"{show(str(source))}: cannot be read: {error.strerror}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and then renamed: a copy is whole or not there, and without --force it
        # replaces no file that has come since the check above.
        with write_aside(target, replace=arguments.force) as temporary:
            write_bytes(temporary, content)
    except OSError as error:
        raise StorageError(f"{show(str(target))}: cannot be written: {error.strerror}") from error
    print(target)
    return DONE


def find_recipe_or_config(name: str) -> Path:
    """Return the file of a recipe or a config, by name or by path.

    Raises ConfigError if there is none, with the nearest name.
    """
    recipes = list_recipes()
    configs = [config for group in list_configs().values() for config in group]
    if name in recipes or name.endswith(".py"):
        return find_recipe(name)
    if name in configs or name.endswith(CONFIG_SUFFIXES):
        return find_config(name)
    hint = suggest_config(name, [*recipes, *configs]) or "; `tune ls` lists both"
    raise ConfigError(f"{show(name)}: no such recipe or config{hint}")


def choose_target(source: Path, destination: str) -> Path:
    """Return the path of the copy: in a folder under its own name, or a file with its suffix.

    Raises ConfigError for a suffix that such a file cannot have.
    """
    target = Path(destination).expanduser()
    if target.is_dir() or destination.endswith(os.sep):
        return target / source.name
    is_recipe = source.suffix == ".py"
    suffixes = (".py",) if is_recipe else CONFIG_SUFFIXES
    if target.suffix in suffixes:
        return target
    if target.suffix in (".py", *CONFIG_SUFFIXES):
        raise ConfigError(
            f"{show(destination)}: the copy of a {'recipe' if is_recipe else 'config'} ends in"
            f" {' or '.join(suffixes)}"
        )
    # Any other suffix is a part of the name: `8B_v1.2`.
    return target.with_name(target.name + source.suffix)

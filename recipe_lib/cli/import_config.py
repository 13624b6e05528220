"""Convert a torchtune config into one of ours, with a line on each key: `tune import FILE.yaml`.

main.py calls `run(words)`. `import` is a word of Python's own, so the module has another name.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from recipe_lib.cli.arguments import Parser, check_output_path
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand_home
from recipe_lib.config.suggest import show
from recipe_lib.config.torchtune import ImportedConfig, import_file
from recipe_lib.errors import DONE, ConfigError, say
from recipe_lib.files import replace_bytes
from recipe_lib.logs import is_quiet, wrap_lines

DESCRIPTION = """Turns a config of torchtune's into one of ours.

The config goes to standard output, or to --out. Standard error has what became of each key of the \
file: carried, with
another effect here, or dropped, and why."""

PARSER = Parser(
    "import",
    DESCRIPTION,
    {
        "file": {"metavar": "FILE", "help": "a YAML file of torchtune's"},
        "overrides": {"nargs": "*", "metavar": "key=value", "help": "keys of ours, which win"},
        # Accepted for those who write it. There is nothing to choose, so --help leaves it out.
        "--from": {"choices": ("torchtune",), "help": argparse.SUPPRESS},
        "--out": {"metavar": "FILE", "help": "write the config there; no file is replaced"},
        "--model": {"metavar": "MODEL", "help": "model.path: a folder, or a name on the hub"},
        "--without": {
            "metavar": "KEY",
            "action": "append",
            "default": [],
            "help": "a key of the file to leave out",
        },
    },
)


def run(words: list[str]) -> int:
    """Print the config and the table of keys; write nothing unless the whole file is converted.

    Raises ConfigError for a file that cannot be converted, and an --out that cannot be written.
    """
    arguments = PARSER.parse(words)
    out = None if arguments.out is None else _check_target(arguments.out)
    model_override = [f"model.path={arguments.model}"] if arguments.model else []
    imported = import_file(
        arguments.file, overrides=model_override + arguments.overrides, omitted=arguments.without
    )
    # The config's first lines have the command that runs it, with the file's name; `mine.yaml`
    # stands for it on standard output.
    text = imported.format_yaml("mine.yaml" if arguments.out is None else arguments.out)
    if not is_quiet():
        say(_format_explanation(imported))
    if out is None:
        sys.stdout.write(text)
        return DONE
    # Whole or not at all. replace=False: a file that has come since the check above stays.
    replace_bytes(out, text.encode(), replace=False)
    print(out)
    return DONE


def _check_target(name: str) -> Path:
    path = expand_home(name)
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"--out: {show(name)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}"
        )
    if os.path.lexists(path):
        raise ConfigError(f"--out: {show(name)} is there already; choose another name")
    check_output_path("--out", str(path))  # that its folder is there and can be written to
    return path


def _format_explanation(imported: ImportedConfig) -> str:
    lines = [
        f"{imported.source}: a config of torchtune's",
        *imported.format_table().splitlines(),
        *imported.notes,
    ]
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size((80, 24)).columns
        lines = [wrap_lines(line, columns) for line in lines]
    return "\n".join(lines) + "\n"

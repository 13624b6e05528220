"""Print the script by which a shell completes verbs, options and names: `tune completion SHELL`.

main.py calls `run(words)`. A verb is the word after `tune`; each verb's module has a PARSER, from
which shtab (https://docs.iterative.ai/shtab) writes the script.
"""

import argparse
import importlib
from typing import Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.paths import list_configs, list_recipes
from recipe_lib.errors import DONE, ConfigError

DESCRIPTION = """Prints what a shell completes after `tune`. For a session, or in the file that it \
starts with:

  bash: eval "$(tune completion bash)"
  zsh:  eval "$(tune completion zsh)"   after compinit"""

SHELLS = ("bash", "zsh")
# Shell -> a function that completes names of configs and recipes, and files; compgen prints nothing
# for a word that begins none of them. A format string: doubled braces stand for one.
_NAME_FUNCTIONS = {
    "bash": '_tune_names() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_tune_names() {{ _alternative 'names:name:({names})' 'files:file:_files' }}",
}

PARSER = Parser(
    "completion",
    DESCRIPTION,
    {
        "shell": {"metavar": "|".join(SHELLS), "choices": SHELLS, "help": "the shell"},
    },
)


def run(words: list[str]) -> int:
    """Print the script. Raises ConfigError without shtab."""
    shell = PARSER.parse(words).shell
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "tune completion: shtab is not installed; pip install 'shtab>=1.7,<2'"
        ) from error
    names = sorted(
        {*list_recipes(), *(name for configs in list_configs().values() for name in configs)}
    )
    # Shell -> its function that completes the names.
    preamble: Any = {
        name: text.format(names=" ".join(names)) for name, text in _NAME_FUNCTIONS.items()
    }
    print(shtab.complete(build_parser_tree(), shell, preamble=preamble))
    return DONE


def build_parser_tree() -> argparse.ArgumentParser:
    """Return the parser of `tune` with those of all verbs as subparsers, for shtab."""
    from recipe_lib.cli.main import VERBS, get_module_name

    tune_parser = argparse.ArgumentParser(
        prog="tune", description="Fine-tunes language models by recipes that you own."
    )
    tune_parser.add_argument("-V", "--version", action="store_true", help="the version")
    verbs = tune_parser.add_subparsers()
    for verb, text in VERBS.items():
        verb_parser = importlib.import_module(get_module_name(verb)).PARSER
        for action in verb_parser.list_arguments():
            _set_completion(action)
        verbs.add_parser(
            verb, help=text, parents=[verb_parser], conflict_handler="resolve", add_help=False
        )
    return tune_parser


def _set_completion(action: argparse.Action) -> None:
    """Set what completes an argument's value, by its metavar: names, files or folders.

    shtab reads it from the attribute `complete`.
    """
    import shtab

    name = str(action.metavar or "")
    if "CONFIG" in name or "RECIPE" in name:
        action.complete = dict.fromkeys(SHELLS, "_tune_names")  # type: ignore[attr-defined]
    elif name in ("FILE", "MODEL", "WHAT", "CHECKPOINT", "OTHER", "DEST"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif name in ("FOLDER", "DIR"):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]

"""Read a verb's command line, and check the files that its options name.

A verb is the word after `tune`. Its module has a `PARSER` and a function `run(words)`. `Parser` is
argparse with errors of one line, with the nearest right spelling, in place of the usage text.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recipe_lib.config.load import StoreOnce, refuse_repeated
from recipe_lib.config.local_files import check_folder
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.files import replace_text
from recipe_lib.logs import QUIET, VERBOSE, set_verbosity
from recipe_lib.reading import JSON_LIMIT, check_regular, parse_json, read_bytes
from recipe_lib.units import choose_lines

# Names of an option, with spaces between them, or of a positional argument -> keyword arguments of
# `add_argument`.
Options = Mapping[str, Mapping[str, Any]]
SWITCH = {"action": "store_true"}
# Options of every verb.
COMMON_OPTIONS: dict[str, Mapping[str, Any]] = {
    "-q --quiet": SWITCH | {"help": "say warnings and errors alone"},
    "-v --verbose": SWITCH | {"help": "say more: all ranks, the seconds of each part"},
}
# Options of the verbs that generate text; `find_draw_faults` checks their values.
DRAW_OPTIONS: Options = {
    "--max-new-tokens": {
        "type": int,
        "default": 256,
        "metavar": "N",
        "help": "of an answer; default: 256",
    },
    "--temperature": {
        "type": float,
        "default": 0.0,
        "metavar": "T",
        "help": "0 (default): always the likeliest token; 1: draw as the model was trained",
    },
    "--top-k": {"type": int, "metavar": "K", "help": "draw from the K likeliest tokens only"},
    "--top-p": {
        "type": float,
        "metavar": "P",
        "help": "draw from the fewest likeliest that sum to P",
    },
    "--seed": {"type": int, "default": 42, "help": "of the draws; default: 42"},
}


STORAGES = ("auto", "none", "nf4", "int8")  # of --quantize-base


class Parser(argparse.ArgumentParser):
    """The parser of one verb. Options and positional arguments may come in any order."""

    def __init__(self, verb: str, description: str, options: Options) -> None:
        """Add the verb's options, and those that every verb has.

        verb: as typed after `tune`. description: what the verb does, for `--help`.
        """
        super().__init__(
            prog=f"tune {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._hint = f"; see `{self.prog} --help`"
        # The action of an option that names none: an option given twice is an error.
        self.register("action", None, StoreOnce)
        for names, settings in {**COMMON_OPTIONS, **options}.items():
            self.add_argument(*names.split(), **settings)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments; set the log's verbosity by -q and -v.

        Raises ConfigError for a word that is none of the verb's, a missing or unusable value, and a
        config key that is overridden twice.
        """
        self._words = list(words)  # for `error`, which argparse calls
        arguments, unknown_words = self.parse_known_intermixed_args(list(words))
        if unknown_words:
            self._refuse(unknown_words[0])
        if arguments.quiet or arguments.verbose:
            set_verbosity(VERBOSE if arguments.verbose else QUIET)
        # Verbs keep their overrides `key=value` under one of these names, if they take any.
        refuse_repeated(
            getattr(arguments, "overrides", None) or getattr(arguments, "words", None) or ()
        )
        return arguments

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            raise ConfigError(f"{self.prog}: unexpected argument {show(word)}{self._hint}")
        name = word.split("=", 1)[0]
        raise ConfigError(
            f"{self.prog}: unknown option"
            f" {show(name)}{did_you_mean(name, self._list_long_options()) or self._hint}"
        )

    def print_help(self, file: Any = None) -> None:
        # argparse's own ignores OSError: on a full disk the exit code would be 0.
        (file or sys.stdout).write(self.format_help())

    def list_arguments(self) -> list[argparse.Action]:
        """Return the options and the positional arguments, of which argparse has no public list."""
        return self._actions

    def _list_long_options(self) -> list[str]:
        return [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ConfigError of one line, without the usage text."""
        text, required, names = message.replace("\n", " ").partition(
            "the following arguments are required: "
        )
        if required:
            # A misspelled option is the likelier mistake: its value was taken for a positional one.
            for word in self._words:
                is_option = word.startswith("--") and word != "--"
                if is_option and word.split("=", 1)[0] not in self._list_long_options():
                    self._refuse(word)
            # argparse also names positional arguments that may be absent, when options stand
            # between others.
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            missing = [name for name in names.split(", ") if name not in optional]
            text = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ConfigError(f"{self.prog}: {text}{self._hint}")


class ConfigParser(Parser):
    """The parser of a verb that looks at a config: CONFIG, `--config` and overrides."""

    def __init__(
        self,
        verb: str,
        description: str,
        options: Options,
        about: str = "as for `tune run`; ~key: its default",
    ) -> None:
        """Add the arguments that name a config. about: the text of --help on the overrides."""
        super().__init__(verb, description, options)
        self._config = self.add_argument(
            "config", metavar="CONFIG", help="a name of `tune ls`, or a path"
        )
        self.add_argument(
            "--config",
            dest="further_configs",
            action="append",
            default=[],
            metavar="CONFIG",
            help="further ones, of which the later win, key by key",
        )
        self.add_argument("overrides", nargs="*", metavar="key=value", help=about)
        # A verb without --recipe takes the recipe that the config names.
        self.set_defaults(recipe=None)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments; `configs` has all configs, first to last."""
        # With --config the positional one may be absent, and argparse has to know before it parses.
        self._config.required = not any(
            word == "--config" or word.startswith("--config=") for word in words
        )
        self._config.nargs = None if self._config.required else "?"
        arguments = super().parse(words)
        first = [] if arguments.config is None else [arguments.config]
        # With all configs given by --config, argparse takes the first override for the positional
        # one.
        if first and arguments.further_configs and (first[0].startswith("~") or "=" in first[0]):
            arguments.overrides = first + arguments.overrides
            first = []
        arguments.configs = first + arguments.further_configs
        return arguments


# A file that an option names is checked before the work is done, and never written over a file that
# this program has not written.
_CALIBRATION_KEYS = ({"matmul", "device", "version"},)  # keys of a calibration file
# Option or file name -> sets of keys, of which a JSON file of ours (of .jsonl its first line) has
# one.
_OUTPUT_KEYS: dict[str, tuple[set[str], ...]] = {
    # A plan, a tensor-parallel plan, a list of receipts.
    "--json": (
        {"schema", "verdict"},
        {"model", "tokens", "legal_sizes"},
        {"receipts", "unreadable"},
    ),
    "--calibrate": _CALIBRATION_KEYS,
    "--write": _CALIBRATION_KEYS,
    "summary.json": ({"models", "sequences", "label_tokens"},),
    "examples.jsonl": ({"sequence", "place"},),
}
# Option or file name -> (first bytes of such a file of ours, bytes that are in its first 4096). In
# a snapshot, which is a pickle, these may be anywhere.
_OUTPUT_MARKS = {
    "--html": (b"<!DOCTYPE html>", b'content="tune-recipes: plan"'),
    "report.html": (b"<!DOCTYPE html>", b'content="tune-recipes: evaluation"'),
    "--snapshot": (b"\x80", b"device_traces"),
}


def check_output(
    option: str,
    path: str | None,
    inputs: Iterable[tuple[str, str | None]] = (),
    kind: str | None = None,
) -> None:
    """Raise ConfigError for a file that cannot be written, is an input, or is not ours.

    A file that is there may be replaced if this program has written it. A path of None, and `-` of
    --json, is right.

    option: names the file in errors. inputs: option and path of each file that the command reads,
    or writes elsewhere. kind: key of `_OUTPUT_KEYS` or `_OUTPUT_MARKS` by which a file of ours is
    recognized; None: the option.
    """
    if path is None or (option == "--json" and path == "-"):
        return
    check_output_path(option, path, inputs)
    if os.path.exists(path) and not _is_own_output(kind or option, path):
        raise ConfigError(
            f"{option}: {show(path)} is there already and is no file that {option} writes; move it"
            " away, or choose another name"
        )


def check_output_path(
    option: str,
    path: str,
    inputs: Iterable[tuple[str, str | None]] = (),
    *,
    makes_folders: bool = False,
) -> None:
    """Raise ConfigError for a path that no file can be written to, or that of an input.

    option, inputs: as of `check_output`. makes_folders: the command makes the folders of the path.
    """
    check_replaceable(f"{option}: {show(path)}", path)
    folder = os.path.dirname(path) or "."
    if not makes_folders and not os.path.isdir(folder):
        raise ConfigError(
            f"{option}: {show(folder)}: no such folder; make it, or choose another name"
        )
    for input_option, input_path in inputs:
        if input_path is not None and _is_same_file(path, input_path):
            raise ConfigError(
                f"{option}: {show(path)} is the file of {input_option} too; choose another name"
            )
    check_folder(Path(folder), option)


def check_replaceable(path_text: str, path: Path | str) -> None:
    """Raise ConfigError for a folder, a FIFO, a device or a socket in the place of a file.

    path_text: the path as the error shows it, perhaps with the option. No file there is right.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"{path_text}: lies under a file; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path_text}: {error.strerror}; choose another name") from None


def check_output_folder(option: str, folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError for a folder that cannot be written to, or has other files of these names.

    names: of the files to write, each a key of `_OUTPUT_KEYS` or `_OUTPUT_MARKS`.
    """
    check_folder(folder, option)
    for name in names:
        if os.path.lexists(folder / name):
            check_output(option, str(folder / name), kind=name)


def _is_same_file(path: str, input_path: str) -> bool:
    """Return True if two paths, which need not exist yet, are of one file."""
    input_path = os.path.expanduser(input_path)
    # samefile also sees hard links, but wants both to exist.
    if os.path.exists(path) and os.path.exists(input_path):
        return os.path.samefile(path, input_path)
    return os.path.realpath(path) == os.path.realpath(input_path)


def _is_own_output(kind: str, path: str) -> bool:
    try:
        content = read_bytes(path, JSON_LIMIT)  # a larger file is none of ours
        if kind in _OUTPUT_MARKS:
            beginning, word = _OUTPUT_MARKS[kind]
            searched = content if kind == "--snapshot" else content[:4096]
            return content.startswith(beginning) and word in searched
        value = parse_json(content.partition(b"\n")[0] if kind.endswith(".jsonl") else content)
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and any(keys <= value.keys() for keys in _OUTPUT_KEYS[kind])


def find_draw_faults(arguments: argparse.Namespace) -> list[str]:
    """Return what is wrong with the values of `DRAW_OPTIONS`, a line each."""
    idle = [  # options that temperature 0 makes useless
        f"--{name.replace('_', '-')}"
        for name in ("top_k", "top_p")
        if getattr(arguments, name) is not None
    ]
    return find_low_numbers(arguments, max_new_tokens=1, top_k=1) + choose_lines(
        (
            not 0 <= arguments.temperature < float("inf"),
            f"--temperature: found {arguments.temperature}, expected a number >= 0",
        ),
        (
            arguments.top_p is not None and not 0 < arguments.top_p <= 1,
            f"--top-p: found {arguments.top_p}, expected a number above 0 and up to 1",
        ),
        (
            arguments.temperature == 0 and idle,
            f"{' and '.join(idle)}: without effect at temperature 0, which takes the likeliest"
            " token; add --temperature 1",
        ),
        (
            not 0 <= arguments.seed < 2**63,
            f"--seed: found {arguments.seed}, expected a number from 0 to 2^63 - 1",
        ),
    )


def find_low_numbers(arguments: argparse.Namespace, **least: int) -> list[str]:
    """Return a line for each option that is given and below its least value.

    least: attribute of `arguments` -> least value.
    """
    values = {name: getattr(arguments, name) for name in least}
    return [
        f"--{name.replace('_', '-')}: found {value}, expected a number >= {least[name]}"
        for name, value in values.items()
        if value is not None and value < least[name]
    ]


def read_numbers(option: str, text: str, legal: range, expected: str) -> tuple[int, ...]:
    """Return the numbers of a text such as `2,4`, each once.

    Raises ConfigError, which says what was expected, for a part that is no legal number.
    """
    parts = text.split(",")
    # isdigit alone would take superscripts and other scripts' digits.
    if not all(part.isascii() and part.isdigit() and int(part) in legal for part in parts):
        raise ConfigError(f"{option}: found {quote(text)}, expected {expected}")
    return tuple(dict.fromkeys(map(int, parts)))


def find_lone_options(names: Iterable[str], option: str) -> list[str]:
    """Return a line for each option that is given without the option that it belongs to.

    names: attributes of those options. option: the one that is missing.
    """
    return [f"--{name.replace('_', '-')}: is of {option}, which is missing" for name in names]


def write_json(path: str, value: Any) -> None:
    """Write indented JSON to standard output for `-`, else to a file, whole or not at all.

    Raises StorageError if the file cannot be written.
    """
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        replace_text(Path(path), text)

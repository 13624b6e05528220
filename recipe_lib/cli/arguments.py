"""An argparse parser whose mistakes are one line with the nearest right spelling, and whose help is plain."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from recipe_lib.config.load import StoreOnce, refuse_repeated
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import ConfigError
from recipe_lib.logs import QUIET, VERBOSE, set_verbosity


def add_configs(parser: "Parser", words: Sequence[str], about: str = "as for `tune run`; ~key: its default") -> None:
    """The config that a verb looks at, by position or as `--config`, several of which are merged, and its overrides."""
    named = any(word == "--config" or word.startswith("--config=") for word in words)
    parser.add_argument("config", nargs="?" if named else None, metavar="CONFIG", help="a name of `tune ls`, or a path")
    parser.add_argument("--config", dest="more", action="append", default=[], metavar="CONFIG",
                        help="further ones, of which the later win, key by key")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=about)


def take_configs(arguments: argparse.Namespace) -> list[str]:
    """The configs of `add_configs`, first to last; with all of them named, the first word is an override."""
    first = [] if arguments.config is None else [arguments.config]
    if first and arguments.more and (first[0].startswith("~") or "=" in first[0]):
        arguments.overrides, first = [*first, *arguments.overrides], []
    return [*first, *arguments.more]


class Parser(argparse.ArgumentParser):
    """Parser of one verb. `parse` is what a verb calls; options and positional arguments may come in any order."""

    def __init__(self, verb: str, description: str, **options: Any) -> None:
        """verb: as typed after `tune`. description: what the verb does, for `--help`."""
        super().__init__(
            prog=f"tune {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        self.register("action", None, StoreOnce)
        self.add_argument("-q", "--quiet", action="store_true", help="say warnings and errors alone")
        self.add_argument("-v", "--verbose", action="store_true", help="say more: all ranks, the seconds of each part")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; ConfigError for anything that is not one."""
        self._words = list(words)
        arguments, extra = self.parse_known_intermixed_args(list(words))
        if extra:
            self._refuse(extra[0])
        if arguments.quiet or arguments.verbose:
            set_verbosity(VERBOSE if arguments.verbose else QUIET)
        refuse_repeated(getattr(arguments, "overrides", None) or getattr(arguments, "words", None) or ())
        return arguments

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            raise ConfigError(f"{self.prog}: unexpected argument {show(word)}; see `{self.prog} --help`")
        name = word.split("=", 1)[0]
        raise ConfigError(
            f"{self.prog}: unknown option {show(name)}{did_you_mean(name, self.options()) or self.hint()}"
        )

    def print_help(self, file: Any = None) -> None:
        """Writes the help; unlike argparse, not as if it were written where the disk is full."""
        (file or sys.stdout).write(self.format_help())

    def options(self) -> list[str]:
        """The long options of the verb."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def hint(self) -> str:
        """Where to look when no spelling is near."""
        return f"; see `{self.prog} --help`"

    def error(self, message: str) -> NoReturn:
        """argparse found a mistake: its message as one line, without the usage text."""
        said, required, names = message.replace("\n", " ").partition("the following arguments are required: ")
        if required:  # a misspelled option may be why
            options = [word for word in self._words if word.startswith("--") and word != "--"]
            unknown = [word for word in options if word.split("=", 1)[0] not in self.options()]
            if unknown:
                self._refuse(unknown[0])
            # argparse counts positional arguments that may be absent when options stand between others
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            missing = [name for name in names.split(", ") if name not in optional]
            said = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ConfigError(f"{self.prog}: {said}; see `{self.prog} --help`")

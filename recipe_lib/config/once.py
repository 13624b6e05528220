"""What stands on a command line twice is refused: the last one would win, and nobody would be told."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError


def refuse_repeated(words: Iterable[str]) -> None:
    """ConfigError, a line each, for the keys that are set or reset twice among `key=value` and `~key`."""
    first: dict[str, str] = {}
    faults = []
    for word in words:
        if word.startswith("-") or not (word.startswith("~") or "=" in word):
            continue
        name = word.removeprefix("~").partition("=")[0]
        if name in first:
            both = f"{show(first[name])} and {show(word)}"
            faults.append(f"command line: {show(name)}: given twice, as {both}; remove one of the two")
        first.setdefault(name, word)
    if faults:
        raise ConfigError(*faults)


class StoreOnce(argparse.Action):
    """argparse's `store`, which refuses an option that has been given before (positional arguments are counted by it).

    A parser registers it as the action of options that name none.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Stores the value."""
        given = namespace.__dict__.setdefault("_given", {})
        if option_string is not None and self.dest in given:
            parser.error(
                f"{option_string} is given twice, as {show(str(given[self.dest]))} and {show(str(values))}; "
                "remove one of the two"
            )
        given[self.dest] = values
        setattr(namespace, self.dest, values)

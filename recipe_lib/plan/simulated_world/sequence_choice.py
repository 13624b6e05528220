"""Check the value of `tune plan --sequence`, which `planned_data.choose_sequence` takes.

No torch in here: a wrong command line is refused before the import of torch, which takes long.
"""

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError

PERCENTILES = ("p50", "p90", "p99")  # of the lengths of the sequences


def check_choice(choice: str) -> None:
    """Raise ConfigError for a text that is no choice, whatever the config.

    choice: `auto`, `max`, a percentile of PERCENTILES or a number of tokens from 1 on.
    """
    if choice not in ("auto", "max", *PERCENTILES) and not (
        choice.isascii() and choice.isdigit() and int(choice)
    ):
        raise ConfigError(
            f"--sequence: found {show(choice)!r}, expected auto, max, {', '.join(PERCENTILES)} or a"
            " number of tokens"
        )

"""Report every fault of a config, and what a run of it would miss: `tune validate CONFIG`.

main.py calls `run(words)`. Trains nothing, and imports torch only for a model that is on this disk
or that ranks share (`check_model`). A schema is the class that has the config's keys and their
types.
"""

from recipe_lib.cli.arguments import ConfigParser
from recipe_lib.cli.recipes import open_config
from recipe_lib.cli.start_checks import check_model, check_start
from recipe_lib.config.paths import list_recipes
from recipe_lib.config.precision import describe_stalled_means
from recipe_lib.errors import DONE
from recipe_lib.logs import print_wrapped

PARSER = ConfigParser(
    "validate",
    "Checks a config against its recipe and reports every fault.",
    {
        "--recipe": {
            "help": "check against this recipe (name or path), not the one that the config names"
        },
        "--plugin": {
            "metavar": "FILE",
            "action": "append",
            "default": [],
            "help": "as for `tune run`",
        },
    },
)


def run(words: list[str]) -> int:
    """Print one line if the config is right; raise ConfigError with all its faults if not."""
    arguments = PARSER.parse(words)
    configs = arguments.configs
    # RECIPE --config CONFIG, as it is typed after `tune run`.
    if len(configs) > 1 and configs[0] in list_recipes():
        arguments.recipe = arguments.recipe or configs[0]
        del configs[0]
    recipe, loaded = open_config(configs, arguments)
    notes = check_start(loaded.cfg)
    check_model(loaded.cfg)
    print_wrapped(f"{', '.join(configs)}: a valid config of {recipe.name}")
    # Keys without effect; optimizer states that lose their updates to rounding; missing files.
    for note in (*loaded.describe_idle_keys(), *describe_stalled_means(loaded.cfg), *notes):
        print_wrapped(f"note: {note}")
    return DONE

"""`tune validate CONFIG`: report every fault of a config, and what a run of it would miss.

Runs nothing; imports torch only where ranks share a model (`check_shape`).
"""

from collections.abc import Sequence

from recipe_lib.cli.arguments import Options, Parser, add_configs, take_configs
from recipe_lib.cli.recipes import open_config
from recipe_lib.cli.start_checks import check_shape, check_start
from recipe_lib.config.optimizer_precision import describe_stalled_means
from recipe_lib.config.paths import list_recipes
from recipe_lib.errors import DONE
from recipe_lib.logs import print_wrapped

OPTIONS: Options = {
    "--recipe": {
        "help": "check against this recipe (name or path), not the one that the config names"
    },
    "--plugin": {"metavar": "FILE", "action": "append", "default": [], "help": "as for `tune run`"},
}


def parser(words: Sequence[str] = ()) -> Parser:
    """Return the options of the verb."""
    options = Parser(
        "validate", "Checks a config against its recipe and reports every fault.", OPTIONS
    )
    add_configs(options, words)
    return options


def run(words: list[str]) -> int:
    """Print one line if the config is right; raise ConfigError with all its faults if not."""
    arguments = parser(words).parse(words)
    configs = take_configs(arguments)
    # RECIPE --config CONFIG, as it is typed after `tune run`.
    if len(configs) > 1 and configs[0] in list_recipes():
        arguments.recipe = arguments.recipe or configs[0]
        del configs[0]
    recipe, loaded = open_config(configs, arguments)
    notes = check_start(loaded.cfg)
    check_shape(loaded.cfg)
    print_wrapped(f"{', '.join(configs)}: a valid config of {recipe.name}")
    for note in (*loaded.idle, *describe_stalled_means(loaded.cfg), *notes):
        print_wrapped(f"note: {note}")
    return DONE

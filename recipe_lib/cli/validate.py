"""`tune validate CONFIG`: every fault of a config, and what a run of it would miss, without running anything."""

from recipe_lib.cli.arguments import Parser
from recipe_lib.cli.recipes import recipe_for
from recipe_lib.cli.start_checks import check_shape, check_start
from recipe_lib.config import load_config
from recipe_lib.config.plugins import load_plugin
from recipe_lib.errors import DONE


def run(words: list[str]) -> int:
    """Prints one line if the config is right; raises ConfigError with all its faults if not."""
    parser = Parser("validate", "Checks a config against its recipe and reports every fault.")
    parser.add_argument("config", metavar="CONFIG", help="a name that `tune ls` shows, or a path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`; ~key: its default")
    parser.add_argument("--recipe", help="check against this recipe (name or path), not the one that the config names")
    parser.add_argument("--plugin", metavar="FILE", action="append", default=[], help="as for `tune run`")
    arguments = parser.parse(words)
    for plugin in arguments.plugin:
        load_plugin(plugin)
    recipe = recipe_for(arguments.config, arguments.recipe)
    cfg = load_config(arguments.config, arguments.overrides, recipe.schema())
    notes = check_start(cfg)
    check_shape(cfg)
    print(f"{arguments.config}: a valid config of {recipe.name}")
    for note in notes:
        print(f"note: {note}")
    return DONE

"""Show a config's file, every value that will be used, or every key explained: `tune cat CONFIG`.

main.py calls `run(words)`. Imports no torch, which takes seconds.
"""

from recipe_lib.cli.arguments import SWITCH, ConfigParser
from recipe_lib.cli.recipes import find_config_recipe, open_config
from recipe_lib.config import LoadedConfig, load_plugin
from recipe_lib.config.paths import find_config, list_recipes
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, ConfigError
from recipe_lib.reading import describe_fault, read_text

PARSER = ConfigParser(
    "cat",
    description="Shows a config: its file, or with an option what it means.",
    options={
        "--resolved": SWITCH | {"help": "every value that will be used, and where it was set"},
        "--describe": SWITCH | {"help": "every key: type, default, legal values, meaning"},
        "--plugin": {
            "metavar": "FILE",
            "action": "append",
            "default": [],
            "help": "as for `tune run`",
        },
    },
    about="applied last, for --resolved",
)


def run(words: list[str]) -> int:
    """Print the config in the form asked for.

    Raises ConfigError for options that exclude each other, and a config that cannot be read.
    """
    arguments = PARSER.parse(words)
    if arguments.resolved and arguments.describe:
        raise ConfigError(
            "tune cat: --resolved and --describe are two different views; give one of them"
        )
    if arguments.overrides and not arguments.resolved:
        raise ConfigError("tune cat: overrides change the resolved values only; add --resolved")
    configs = arguments.configs
    if len(configs) > 1 and not arguments.resolved:
        raise ConfigError(
            "tune cat: several configs are merged for --resolved only; give one, or add --resolved"
        )
    if name := next((name for name in configs if name in list_recipes()), None):
        raise ConfigError(f"{name}: is a recipe, not a config; `tune ls {name}` lists its configs")
    if arguments.resolved:
        print_resolved(open_config(configs, arguments)[1])
        return DONE
    path = find_config(configs[0])
    # A plugin registers formats, losses and optimizers, which --describe lists.
    for plugin in arguments.plugin:
        load_plugin(plugin)
    if arguments.describe:
        from recipe_lib.config.describe import format_terminal_reference

        print(format_terminal_reference(find_config_recipe(configs[0]).load_schema()))
    else:
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{show(str(path))}: cannot be read: {describe_fault(error)}"
            ) from error
        print(text, end="")
    return DONE


def print_resolved(loaded: LoadedConfig) -> None:
    """Print a line `key: value  # where it was set` for each key."""
    from recipe_lib.config.describe import format_value

    # An origin is a file and line, `command line` or `default`.
    lines = [(f"{key}: {format_value(value)}", origin) for key, value, origin in loaded.rows]
    # One long value must not push all the origins off the screen.
    width = min(max(len(line) for line, _ in lines), 60)
    for line, origin in lines:
        print(f"{line:{width}}  # {origin}")

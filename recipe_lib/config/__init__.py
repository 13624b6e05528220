"""Load, check and describe the typed config of every recipe. Imports no torch.

`load_config` reads files and overrides (`key=value`), `parse_arguments` a recipe's command line.
`register` gives a plugin's code a name that a config may use, `get_registered` finds it. HUB begins
the name of a dataset on the hub, `resolve_sources` returns a config's training data.
"""

from recipe_lib.config.key_conditions import HUB, is_hub
from recipe_lib.config.load import LoadedConfig, load_config, parse_arguments
from recipe_lib.config.registry import get_registered, list_loaded_plugins, load_plugin, register
from recipe_lib.config.schema import (
    DataConfig,
    FullFinetuneConfig,
    LogConfig,
    LoraConfig,
    LoraFinetuneConfig,
    OptimizerConfig,
    ParallelConfig,
    SourceConfig,
)
from recipe_lib.config.schema_data import resolve_sources

__all__ = [
    "DataConfig",
    "FullFinetuneConfig",
    "HUB",
    "LoadedConfig",
    "LogConfig",
    "LoraConfig",
    "LoraFinetuneConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SourceConfig",
    "get_registered",
    "is_hub",
    "list_loaded_plugins",
    "load_config",
    "load_plugin",
    "parse_arguments",
    "register",
    "resolve_sources",
]

"""The typed config of every recipe: its schema, loading, checks, and the names that it may use.

`load_config` reads files and overrides, `parse_arguments` a recipe's command line. No torch.
"""

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
from recipe_lib.config.schema_data import HUB, is_hub, resolve_sources

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

"""The typed config of every recipe: its schema, loading, checks, and the names that it may use.

`load_config` reads files and overrides, `parse_arguments` a recipe's command line. No torch.
"""

from recipe_lib.config.load import load_config, parse_arguments
from recipe_lib.config.registry import get_registered, register
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.schema_data import resolve_sources

__all__ = [
    "FullFinetuneConfig",
    "LoraFinetuneConfig",
    "load_config",
    "parse_arguments",
    "register",
    "get_registered",
    "resolve_sources",
]

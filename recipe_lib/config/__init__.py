"""The typed config of every recipe: its schema, loading, checks, and the names a config may use. No torch."""

from recipe_lib.config.load import load_config, parse_arguments
from recipe_lib.config.registry import register, registered
from recipe_lib.config.schema import FullFinetuneConfig

__all__ = ["FullFinetuneConfig", "load_config", "parse_arguments", "register", "registered"]

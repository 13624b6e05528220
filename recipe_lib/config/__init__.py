"""The typed config of every recipe: its schema, loading, checks, and the names that it may use.

`load_config` reads files and overrides, `parse_arguments` a recipe's command line. No torch.
"""

from recipe_lib.config.load import load_config, parse_arguments
from recipe_lib.config.recipes.distill_distributed import DistillFinetuneConfig
from recipe_lib.config.recipes.dpo_distributed import DpoFinetuneConfig
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.recipes.reward_distributed import RewardFinetuneConfig
from recipe_lib.config.registry import get_registered, register
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.schema_data import resolve_sources

__all__ = [
    "DistillFinetuneConfig",
    "DpoFinetuneConfig",
    "FullFinetuneConfig",
    "LoraFinetuneConfig",
    "RewardFinetuneConfig",
    "load_config",
    "parse_arguments",
    "register",
    "get_registered",
    "resolve_sources",
]

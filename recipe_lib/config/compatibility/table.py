"""List all combinations of settings that are refused (`Rule`), and find those of a config.

`load_config` calls `find_broken_rules`, `docs/config.md` prints the list, and the tests walk it.
The rules of a method (dpo, reward, distill) are with its config class. A combination that only
ranks, devices or files can decide is checked where these are known. A key that another one makes
useless is not refused: `needs` at the key in the schema says so.
"""

from collections.abc import Collection
from typing import Any

from recipe_lib.config.compatibility import (
    data_rules,
    memory_rules,
    model_rules,
    parallel_rules,
)
from recipe_lib.config.compatibility.rule import Rule
from recipe_lib.config.paths import read_recipe_configs

# In the order in which docs/config.md lists them, and lines of one error follow each other.
RULES: tuple[Rule, ...] = (
    *model_rules.MODEL_RULES,
    *memory_rules.MEMORY_RULES,
    model_rules.UNKNOWN_TARGET,
    parallel_rules.COMPILED_INFERRED_PLAN,
    *model_rules.MIXTURE_ADAPTER_RULES,
    *model_rules.ROUTER_LOSS_RULES,
    *memory_rules.STREAMING_RULES,
    parallel_rules.DORA_BY_INFERRED_PLAN,
    *data_rules.DATA_RULES,
    data_rules.UNUSED_TEMPLATE,
    *parallel_rules.SHARED_TENSOR_RULES,
    *model_rules.MATMUL_RULES,
    *model_rules.QAT_RULES,
    *parallel_rules.PIPELINE_RULES,
    *model_rules.ADAPTER_RULES,
    *data_rules.VALIDATION_RULES,
)


def list_rules() -> list[Rule]:
    """Return the rules that hold for all recipes, then those of each method's config class."""
    rules = list(RULES)
    config_class: Any
    for config_class in read_recipe_configs().values():
        rules += [rule for rule in config_class.rules if rule not in rules]
    return rules


def find_broken_rules(cfg: Any, judged_keys: Collection[str]) -> list[Rule]:
    """Return the rules that a config breaks: of those for all recipes, and of its own class.

    judged_keys: dotted keys of the config without a fault of their own. A rule about any other key
    is skipped: the config lacks the key, or its value stands for one that was refused already.
    """
    return [
        rule
        # The class of a user's own recipe may lack `rules`.
        for rule in (*RULES, *getattr(cfg, "rules", ()))
        if all(key in judged_keys for key in (*rule.keys, *rule.reads)) and rule.applies(cfg)
    ]

"""Settings that do not go together, with the reason and the remedy: the table of all rules, but for
those of a method, which are with its config class.

`load_config` refuses by this table, `docs/config.md` prints it, and the tests walk it. A
combination that only the world (ranks, devices, files) can decide is not here: it is checked where
the world is known. A key that another one makes idle is no fault: `needs` at the key in the schema
says so.
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

# In the order in which docs/config.md lists them, and errors of one config follow each other.
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
    """Return the rules of all recipes, then those of each method."""
    rules = list(RULES)
    config_class: Any
    for config_class in read_recipe_configs().values():
        rules += [rule for rule in config_class.rules if rule not in rules]
    return rules


def find_broken_rules(cfg: Any, judged_keys: Collection[str]) -> list[Rule]:
    """Return the rules that a config breaks, of all recipes' and of its own.

    judged_keys: dotted keys that may be judged; a rule about another one is skipped, so that a
    fault that is told already is not told a second time.
    """
    return [
        rule
        for rule in (*RULES, *getattr(cfg, "rules", ()))
        if all(key in judged_keys for key in (*rule.keys, *rule.reads)) and rule.applies(cfg)
    ]

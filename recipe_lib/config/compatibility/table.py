"""Settings that do not go together, with the reason and the remedy: the table of all rules.

`load_config` refuses by this table, `docs/config.md` prints it, and the tests walk it. A
combination that only the world (ranks, devices, files) can decide is not here: it is checked where
the world is known. A key that another one makes idle is no fault: `needs` at the key in the schema
says so.
"""

from collections.abc import Collection
from typing import Any

from recipe_lib.config.compatibility import (
    adapter_rules,
    data_rules,
    memory_rules,
    model_rules,
    parallel_rules,
    precision_rules,
)
from recipe_lib.config.compatibility.data_rules import FORMAT_KEYS, list_unused_formats
from recipe_lib.config.compatibility.rule import (
    DISTILL_RECIPE,
    DPO_RECIPE,
    EXTERNAL_MODEL,
    REWARD_RECIPE,
    TWO_STAGES,
    Rule,
    is_external_model,
)
from recipe_lib.config.compatibility.validation_rules import VALIDATION_RULES


def find_broken_rules(cfg: Any, judged_keys: Collection[str]) -> list[Rule]:
    """Return the rules that a config breaks.

    judged_keys: dotted keys that may be judged; a rule about another one is skipped, so that a
    fault that is told already is not told a second time.
    """
    return [
        rule
        for rule in RULES
        if all(key in judged_keys for key in (*rule.keys, *rule.reads)) and rule.applies(cfg)
    ]


def _find_several_teachers(cfg: Any) -> str | None:
    """Return the fault of a distillation with no teacher, or with more than one."""
    keys = cfg.distill.sources
    if len(keys) == 1:
        return None
    return (
        f"found {' and '.join(keys) or 'none of them'}, expected one; set distill.teacher to a"
        " checkpoint with the model's tokenizer, and no other (~KEY removes KEY)"
    )


# Rules of single methods: their sections, and what a method's recipe does not take.
METHOD_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("dpo.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "pairs"),
        reason=(
            "the loss compares a chosen with a rejected answer, which samples of this format do not"
            " have"
        ),
        remedy="set data.format to preference",
        example=("data.format=alpaca",),
        recipe=DPO_RECIPE,
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("dpo.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "labeled answers"),
        reason=(
            "the loss is one of answers that are wanted or not, which samples of this format do not"
            " say"
        ),
        remedy="set data.format to kto, or to preference, whose pairs are taken apart",
        example=("dpo.loss=kto", "data.format=alpaca"),
        recipe=DPO_RECIPE,
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("reward.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "pairs"),
        reason=(
            "the loss compares a chosen with a rejected answer, which samples of this format do not"
            " have"
        ),
        remedy="set data.format to preference, or reward.loss=classification",
        example=("data.format=alpaca",),
        recipe=REWARD_RECIPE,
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("reward.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "classes"),
        reason="samples of this format have no class",
        remedy="set data.format to classification, or reward.loss=pairwise",
        example=("reward.loss=classification", "data.format=preference"),
        recipe=REWARD_RECIPE,
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("model.implementation", "reward.loss"),
        applies=is_external_model,
        reason="the score head is one of our own decoder",
        remedy="set model.implementation=native",
        example=(EXTERNAL_MODEL,),
        recipe=REWARD_RECIPE,
    ),
    Rule(
        keys=("lora.target_modules", "reward.loss"),
        applies=lambda cfg: "head" in cfg.lora.target_modules,
        reason="a score head is in the place of the output head, and is trained whole",
        remedy="leave head out of lora.target_modules",
        example=("lora.target_modules=[q, head]",),
        recipe=REWARD_RECIPE,
    ),
    Rule(
        keys=("distill.teacher", "distill.teacher_preset"),
        applies=_find_several_teachers,
        reason="there is one teacher",
        remedy="set one",
        example=("distill.teacher_preset=llama3/8B",),
        recipe=DISTILL_RECIPE,
    ),
    Rule(
        keys=("distill.divergence", "parallel.pipeline"),
        applies=lambda cfg: cfg.parallel.pipeline > 1,
        reason="the teacher would need stages and a schedule of its own",
        remedy=(
            "set parallel.pipeline=1; a teacher that is too large is smaller with"
            " distill.quantize_teacher, and on the host with distill.stream_teacher"
        ),
        example=TWO_STAGES,
        recipe=DISTILL_RECIPE,
    ),
    Rule(
        keys=("distill.divergence", "model.implementation"),
        applies=is_external_model,
        reason=(
            "teacher and model hand hidden states to each other's output heads, which those of"
            " model.implementation=native do"
        ),
        remedy="remove model.implementation",
        example=(EXTERNAL_MODEL,),
        recipe=DISTILL_RECIPE,
    ),
    Rule(
        keys=("dtype", "distill.quantize_teacher"),
        applies=lambda cfg: cfg.distill.quantize_teacher != "none" and cfg.dtype == "fp64",
        reason="rounding the teacher's weights would undo what fp64 is for",
        remedy="remove distill.quantize_teacher, or choose bf16 or fp32",
        example=("dtype=fp64", "distill.quantize_teacher=nf4"),
        recipe=DISTILL_RECIPE,
    ),
)

# In the order in which docs/config.md lists them, and errors of one config follow each other.
RULES: tuple[Rule, ...] = (
    *model_rules.MODEL_RULES,
    *memory_rules.MEMORY_RULES,
    adapter_rules.UNKNOWN_TARGET,
    parallel_rules.COMPILED_INFERRED_PLAN,
    *adapter_rules.MIXTURE_ADAPTER_RULES,
    *model_rules.ROUTER_LOSS_RULES,
    *memory_rules.STREAMING_RULES,
    parallel_rules.DORA_BY_INFERRED_PLAN,
    *data_rules.DATA_RULES,
    *METHOD_RULES,
    data_rules.UNUSED_TEMPLATE,
    *parallel_rules.SHARED_TENSOR_RULES,
    *precision_rules.MATMUL_RULES,
    *precision_rules.QAT_RULES,
    *parallel_rules.PIPELINE_RULES,
    *adapter_rules.ADAPTER_RULES,
    *VALIDATION_RULES,
)

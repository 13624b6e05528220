"""Rules of validation, and of what follows from it: the best step, stopping early."""

from typing import Any

from recipe_lib.config.compatibility.rule import DPO_RECIPE, TWO_STAGES, Rule
from recipe_lib.config.key_conditions import list_generated_metrics
from recipe_lib.config.suggest import did_you_mean, quote


def _compares_steps(cfg: Any) -> bool:
    """Return True if `checkpoint.best_metric` is read."""
    return cfg.checkpoint.keep_best or cfg.validation.patience is not None


def _find_unknown_metric(cfg: Any) -> str | None:
    """Return the fault of a `checkpoint.best_metric` that validation does not give."""
    metric = cfg.checkpoint.best_metric
    known = [*cfg.validation_numbers, *(f"validation_{name}" for name in cfg.validation.metrics)]
    if not _compares_steps(cfg) or metric in known:
        return None
    hint = did_you_mean(metric, known)
    return (
        f"found {quote(metric)}, expected {' or '.join(known)}{hint}; the Config of a recipe of"
        " your own names others as its validation_numbers"
    )


def _refuse_generation(dimension: str) -> Rule:
    """Return the rule that a plugin's metric and a mesh dimension exclude each other."""
    example = ["validation.metrics=[mine]", "validation.source=held_out.jsonl"]
    example += TWO_STAGES if dimension == "pipeline" else [f"parallel.{dimension}=2"]
    return Rule(
        keys=("validation.metrics", f"parallel.{dimension}"),
        applies=lambda cfg: (
            bool(list_generated_metrics(cfg)) and getattr(cfg.parallel, dimension) > 1
        ),
        reason=(
            "a plugin's metric is measured of generated answers, which takes whole layers on each"
            " rank"
        ),
        remedy=f"set parallel.{dimension}=1, or measure after training with `tune eval`",
        example=tuple(example),
    )


VALIDATION_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("validation.metrics", "data.format"),
        applies=lambda cfg: bool(cfg.validation.metrics) and cfg.own_loss is not None,
        reason="the recipe's validation has numbers of its own, and no single answers to measure",
        remedy="remove validation.metrics",
        example=("validation.metrics=[exact_match]", "validation.source=held_out.jsonl"),
        recipe=DPO_RECIPE,
    ),
    _refuse_generation("tensor"),
    _refuse_generation("context"),
    _refuse_generation("pipeline"),
    Rule(
        keys=("checkpoint.keep_best", "validation.patience", "validation.source"),
        applies=lambda cfg: _compares_steps(cfg) and cfg.validation.source is None,
        reason="which step is best is found by validation, and there is none",
        remedy="set validation.source to samples that are not trained on, or remove the others",
        example=("checkpoint.keep_best=true",),
    ),
    Rule(
        keys=("checkpoint.best_metric",),
        applies=_find_unknown_metric,
        reason="validation gives no such number",
        remedy="choose one that it gives",
        example=(
            "checkpoint.keep_best=true",
            "validation.source=own.jsonl",
            "checkpoint.best_metric=eval_loss",
        ),
        reads=("checkpoint.keep_best", "validation.patience", "validation.source"),
    ),
    Rule(
        keys=("validation.metrics", "compile"),
        applies=lambda cfg: bool(list_generated_metrics(cfg)) and cfg.compile,
        reason=(
            "answers are generated token by token, for which compiled layers would be compiled anew"
            " again and again"
        ),
        remedy="set compile=false, or measure after training with `tune eval`",
        example=("validation.metrics=[mine]", "validation.source=held_out.jsonl", "compile=true"),
    ),
)

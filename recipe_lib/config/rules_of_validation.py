"""Settings of validation that do not go together, as entries of `recipe_lib.config.rules`."""

from collections.abc import Callable
from typing import Any

from recipe_lib.config.idle import generated_metrics
from recipe_lib.config.rule import Rule
from recipe_lib.config.suggest import did_you_mean, quote


def _divides_layers(name: str) -> Callable[[Any], bool]:
    return lambda cfg: bool(generated_metrics(cfg)) and getattr(cfg.parallel, name) > 1


def _judges_steps(cfg: Any) -> bool:
    return cfg.checkpoint.keep_best or cfg.validation.patience is not None


def _validation_numbers(cfg: Any) -> list[str]:
    return [*cfg.validation_numbers, *(f"validation_{name}" for name in cfg.validation.metrics)]


def _unknown_metric(cfg: Any) -> bool:
    return _judges_steps(cfg) and cfg.checkpoint.best_metric not in _validation_numbers(cfg)


def _metric_words(cfg: Any) -> str:
    found, names = cfg.checkpoint.best_metric, _validation_numbers(cfg)
    own = "the Config of a recipe of your own names others as its validation_numbers"
    return f"found {quote(found)}, expected {' or '.join(names)}{did_you_mean(found, names)}; {own}"


# fmt: off
VALIDATION_RULES: tuple[Rule, ...] = (
    Rule(("validation.metrics", "data.format"), lambda cfg: bool(cfg.validation.metrics) and cfg.own_loss is not None,
         "the recipe's validation has numbers of its own, and no single answers to measure",
         "remove validation.metrics", ("validation.metrics=[exact_match]", "validation.source=held_out.jsonl"),
         recipe="dpo_distributed"),
    *(Rule(("validation.metrics", f"parallel.{name}"), _divides_layers(name),
           "a plugin's metric is measured of generated answers, which takes whole layers on each rank",
           f"set parallel.{name}=1, or measure after training with `tune eval`",
           ("validation.metrics=[mine]", "validation.source=held_out.jsonl", f"parallel.{name}=2",
            *(["gradient_accumulation_steps=4"] if name == "pipeline" else [])))
      for name in ("tensor", "context", "pipeline")),
    Rule(("checkpoint.keep_best", "validation.patience", "validation.source"),
         lambda cfg: _judges_steps(cfg) and cfg.validation.source is None,
         "which step is best is found by validation, and there is none",
         "set validation.source to samples that are not trained on, or remove the others",
         ("checkpoint.keep_best=true",)),
    Rule(("checkpoint.best_metric",), _unknown_metric, "validation gives no such number", "choose one that it gives",
         ("checkpoint.keep_best=true", "validation.source=own.jsonl", "checkpoint.best_metric=eval_loss"),
         reads=("checkpoint.keep_best", "validation.patience", "validation.source"), found=_metric_words),
    Rule(("validation.metrics", "compile"), lambda cfg: bool(generated_metrics(cfg)) and cfg.compile,
         "answers are generated token by token, for which compiled layers would be compiled anew again and again",
         "set compile=false, or measure after training with `tune eval`",
         ("validation.metrics=[mine]", "validation.source=held_out.jsonl", "compile=true")),
)
# fmt: on

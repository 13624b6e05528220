"""Settings of validation that do not go together, as entries of `recipe_lib.config.rules`."""

from collections.abc import Callable
from typing import Any

from recipe_lib.config.idle import generated_metrics
from recipe_lib.config.rule import Rule


def _divides_layers(name: str) -> Callable[[Any], bool]:
    return lambda cfg: bool(generated_metrics(cfg)) and getattr(cfg.parallel, name) > 1


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
    Rule(("validation.metrics", "compile"), lambda cfg: bool(generated_metrics(cfg)) and cfg.compile,
         "answers are generated token by token, for which compiled layers would be compiled anew again and again",
         "set compile=false, or measure after training with `tune eval`",
         ("validation.metrics=[mine]", "validation.source=held_out.jsonl", "compile=true")),
)
# fmt: on

"""Define `Rule`, a combination of settings that is refused, and what several rules share.

The rules are in the modules beside this one, by subject; `table.py` has them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LORA_RECIPE = "lora_finetune_distributed"
DPO_RECIPE = "dpo_distributed"

# Overrides (`key=value` of the command line) for `Rule.example`. All schedules of a pipeline but
# gpipe need as many micro-batches a step as it has ranks.
EXTERNAL_MODEL = "model.implementation=transformers"
TWO_STAGES = ("parallel.pipeline=2", "gradient_accumulation_steps=4")


@dataclass(frozen=True)
class Rule:
    """One combination of settings that is refused."""

    # Dotted keys that the rule is about; an error names the places where they were set.
    keys: tuple[str, ...]
    # Called with a config object that has all of `keys` and `reads`. The result is true, or not
    # empty, if it has the combination. A text takes the place of reason and remedy in the error,
    # with the values of this config: `found ..., expected ...; remedy`.
    applies: Callable[[Any], Any]
    # Why it is refused, for the error and docs/config.md.
    reason: str
    # What to do instead, for the same.
    remedy: str
    # Overrides that bring it about, on a config of `recipe` with a checkpoint and local data; the
    # tests run each.
    example: tuple[str, ...]
    # The recipe of `example`. The rule holds for all recipes that have its keys.
    recipe: str = "full_finetune_distributed"
    # Further keys that `applies` looks at. If one has a fault of its own, the rule is not checked.
    reads: tuple[str, ...] = ()

    def format_line(self, cfg: Any) -> str:
        """Return the error's line: `model.path, model.preset: both are set; keep one ...`.

        cfg: a config that has the combination.
        """
        finding = self.applies(cfg)
        text = finding if isinstance(finding, str) else f"{self.reason}; {self.remedy}"
        return f"{', '.join(self.keys)}: {text}"


def is_external_model(cfg: Any) -> bool:
    """Return True if the model's module is another library's, not this project's own decoder."""
    return bool(cfg.model.implementation != "native")

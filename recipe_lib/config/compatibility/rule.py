"""The class of a refused combination of settings, and the words that several rules share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LORA_RECIPE = "lora_finetune_distributed"
DPO_RECIPE = "dpo_distributed"

# Overrides for examples. A pipeline needs as many micro-batches a step as it has ranks.
EXTERNAL_MODEL = "model.implementation=transformers"
TWO_STAGES = ("parallel.pipeline=2", "gradient_accumulation_steps=4")


@dataclass(frozen=True)
class Rule:
    """One combination of settings that is refused."""

    # Keys that the rule is about; an error names the places where they were set.
    keys: tuple[str, ...]
    # Called with a config: true if it has the combination. A text where reason and remedy do not
    # say all: `found ..., expected ...; remedy`, with the numbers of this config.
    applies: Callable[[Any], Any]
    # Why it is refused, and what to do instead: columns of docs/config.md.
    reason: str
    remedy: str
    # Overrides that bring it about, on a config of `recipe` with a checkpoint and local data.
    example: tuple[str, ...]
    recipe: str = "full_finetune_distributed"
    # Further keys that `applies` looks at. With a fault in one of them the rule is not judged.
    reads: tuple[str, ...] = ()

    def format_line(self, cfg: Any) -> str:
        """Return `model.path, model.preset: both are set; keep ...`, for a config that has it."""
        finding = self.applies(cfg)
        text = finding if isinstance(finding, str) else f"{self.reason}; {self.remedy}"
        return f"{', '.join(self.keys)}: {text}"


def is_external_model(cfg: Any) -> bool:
    """Return True if the model is another library's."""
    return bool(cfg.model.implementation != "native")

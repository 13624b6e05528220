"""What one entry of the table of settings that do not go together is (`recipe_lib.config.rules`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One combination of settings that is refused.

    keys: those it is about, whose places an error names. applies: true for a config that has it. example: overrides
    that bring it about on a config of `recipe` with a checkpoint and local data. reads: further keys that it looks at.
    found: what it has found, with its numbers and the remedy; None: reason and remedy say all.
    """

    keys: tuple[str, ...]
    applies: Callable[[Any], Any]
    reason: str
    remedy: str
    example: tuple[str, ...]
    recipe: str = "full_finetune_distributed"
    reads: tuple[str, ...] = ()
    found: Callable[[Any], str] | None = None

    def line(self, cfg: Any) -> str:
        """`model.path, model.preset: both are set; keep ...`, for a config that has it."""
        what = f"{self.reason}; {self.remedy}" if self.found is None else self.found(cfg)
        return f"{', '.join(self.keys)}: {what}"

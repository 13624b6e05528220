"""What one combination of settings that do not go together is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Incompatible:
    """One combination.

    applies: true for a config that has it. keys: those it is about; an error names the line of the last one set.
    unread: the key that would have no effect; if given, the combination is one only where that key is not left
    at its default. example: overrides that bring it about on a config of `recipe` with a checkpoint and local data.
    reads: further keys that it looks at without being about them. told: what it has found, with its numbers and the
    remedy, of a config that has it; None: reason and remedy say all.
    """

    name: str
    applies: Callable[[Any], bool]
    keys: tuple[str, ...]
    reason: str
    remedy: str
    example: tuple[str, ...]
    unread: str | None = None
    recipe: str = "full_finetune_distributed"
    reads: tuple[str, ...] = ()
    told: Callable[[Any], str] | None = None

    def line(self, cfg: Any) -> str:
        """`model.path, model.preset: both are set; keep ...`, for a config that has it."""
        what = f"{self.reason}; {self.remedy}" if self.told is None else self.told(cfg)
        return f"{', '.join(self.keys)}: {what}"

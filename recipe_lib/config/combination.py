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
    reads: further keys that it looks at without being about them.
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

    @property
    def line(self) -> str:
        """`model.path, model.preset: both are set; keep ...`."""
        return f"{', '.join(self.keys)}: {self.reason}; {self.remedy}"

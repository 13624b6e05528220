"""Settings that may fit, with their estimates, and how they are made from a config."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.estimate import IN_LAYERS, Estimate
from recipe_lib.plan.search.trials import Changes, changed, override_text, try_quick, usable_bytes, value_of

# Settings that cost little time, and are tried together where the peak is outside of the layers.
OUTSIDE_LAYERS = {"parallel.fsdp_wrap_policy": "memory_efficient", "memory.loss_chunks": 64}
OUTSIDE_SHARE = 0.1
# Estimates of reserved memory are some percent off: what is beyond the device by less than this is planned in full.
RESERVED_TOLERANCE = 0.06
ACTIVE_TOLERANCE = 0.01  # of active memory, which they say within 0.5 %


@dataclass(frozen=True)
class Candidate:
    """Settings and their estimate. short: bytes that they lack, by it; negative: to spare. may_fit: whether a whole
    plan could find that they fit."""

    changes: Changes
    quick: Estimate
    short: int
    may_fit: bool

    @property
    def speed(self) -> float:
        """Tokens per second; 0 where it does not matter, as the settings do not fit."""
        return self.quick.tokens / self.quick.seconds if self.quick.seconds else 0.0


def doubt(settings: PlanSettings) -> int:
    """Bytes beyond the device up to which an estimate does not say whether settings fit."""
    return int(RESERVED_TOLERANCE * settings.hardware.memory)


def key_of(changes: Changes) -> str:
    """The same for the same changes in any order."""
    return override_text(dict(sorted(changes.items())))


def differing(cfg: Any, changes: Changes) -> Changes:
    """Those of the changes that change the config."""
    return {key: value for key, value in changes.items() if value_of(cfg, key) != value}


def try_settings(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str]
) -> Candidate | None:
    """The estimate; where it does not fit and the peak is outside of the layers, with what makes less of that. None
    for what the recipe or the simulation refuses."""
    less = {key: value for key, value in differing(cfg, OUTSIDE_LAYERS).items() if key not in fixed}
    if isinstance(value_of(cfg, "parallel.fsdp_wrap_policy"), list):
        less.pop("parallel.fsdp_wrap_policy", None)
    best = None
    for more in ({}, less):
        other = changed(cfg, changes | more)
        if other is None:
            break
        usable = usable_bytes(other, settings)
        found = try_quick(recipe_class, other, settings, int(usable / (1 - ACTIVE_TOLERANCE)))
        if found is None:
            break
        short = found.reserved_expandable - usable
        if best is None or short < best.short:
            may_fit = short <= doubt(settings) and found.active * (1 - ACTIVE_TOLERANCE) <= usable
            best = Candidate(changes | more, found, short, may_fit)
        # More than this, logits and gathered embeddings do not make up for.
        if short <= 0 or IN_LAYERS in found.module or short > OUTSIDE_SHARE * settings.hardware.memory:
            break
    return best

"""`parallel.strategy: auto`: shards or whole models on every data rank, whichever is estimated to be faster and to fit.

Whole models gather nothing, and sum the trained gradients once a step: adapters, and models that are small for the
device, are faster so. Shards are what fits where whole models do not.
"""

from dataclasses import dataclass
from typing import Any

from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.estimate import Estimate
from recipe_lib.plan.search.trials import Changes, changed, in_processes, try_quick, usable_bytes
from recipe_lib.units import format_bytes, format_duration

STRATEGY_KEY = "parallel.strategy"
AUTO, SHARDS, WHOLE = "auto", "fsdp", "ddp"
RESERVED_TOLERANCE = 0.06  # share that an estimate of reserved memory may be off


@dataclass(frozen=True)
class StrategyChoice:
    """strategy: `fsdp` or `ddp`. reason: why, without a full stop."""

    strategy: str
    reason: str

    @property
    def changes(self) -> Changes:
        """Of the config."""
        return {STRATEGY_KEY: self.strategy}

    def __str__(self) -> str:
        return f"{STRATEGY_KEY}=auto: {self.strategy}; {self.reason}"


def choose(recipe_class: type, cfg: Any, settings: PlanSettings, *, expandable: bool = False) -> StrategyChoice:
    """The strategy of a plannable config whose `parallel.strategy` is `auto`.

    Of those that fit the device with room for an estimate's error, the one with the shorter step; `fsdp` where neither
    does, or where `ddp` does not go with the other settings. expandable: whether the run's allocator has expandable
    segments. Raises UserErrors of recipe and config.
    """
    configs = {name: changed(cfg, {STRATEGY_KEY: name}) for name in (SHARDS, WHOLE)}
    if configs[WHOLE] is None:
        return StrategyChoice(SHARDS, "ddp does not go with other settings of the run")
    pairs = [(name, config) for name, config in configs.items() if config is not None]
    found = dict(
        zip(
            [name for name, _ in pairs],
            in_processes(lambda pair: try_quick(recipe_class, pair[1], settings), pairs, "planning fsdp and ddp"),
            strict=True,
        )
    )
    return decide(found, usable_bytes(configs[WHOLE], settings), settings, expandable=expandable)


def decide(
    found: dict[str, Estimate | None], usable: int, settings: PlanSettings, *, expandable: bool
) -> StrategyChoice:
    """The choice between estimates by strategy; None: there is none. usable: bytes for the allocator."""
    where = f"{settings.ranks} x {settings.hardware.name}"
    if any(found.get(name) is None for name in (SHARDS, WHOLE)):
        return StrategyChoice(SHARDS, f"no estimate could be made of both for {where}")
    estimates = {name: one for name, one in found.items() if one is not None}
    reserved = {name: one.reserved_expandable if expandable else one.reserved for name, one in estimates.items()}
    fitting = [name for name in (SHARDS, WHOLE) if reserved[name] <= usable * (1 - RESERVED_TOLERANCE)]
    of = f"{format_bytes(usable)} that {where} can give each rank"
    if not fitting:
        return StrategyChoice(
            SHARDS, f"it takes least, about {format_bytes(reserved[SHARDS])} of the {of}, which is tight"
        )
    if WHOLE not in fitting:
        return StrategyChoice(SHARDS, f"ddp would take about {format_bytes(reserved[WHOLE])} of the {of}")
    best = min(fitting, key=lambda name: estimates[name].seconds)
    other = WHOLE if best == SHARDS else SHARDS
    return StrategyChoice(
        best,
        f"a step is estimated at {format_duration(estimates[best].seconds)}, with {other} at "
        f"{format_duration(estimates[other].seconds)}; about {format_bytes(reserved[best])} of the {of}",
    )

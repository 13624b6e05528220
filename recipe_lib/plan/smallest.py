"""The least that a config fits on: the smallest card for its ranks, and the fewest ranks of its card."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from recipe_lib.config.card_limits import card_faults
from recipe_lib.config.mesh import same_batch_ranks
from recipe_lib.errors import UserError
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.rank_plans import has_room
from recipe_lib.plan.result import FITS, Plan
from recipe_lib.plan.verdict import planned_reserved
from recipe_lib.report.phases import phase

_MOST_LARGER = 3  # numbers of ranks tried beyond a run's own, each twice as many


def smallest_cards(plan: Plan, cfg: Any) -> list[str]:
    """Known cards of the least memory that has room for the plan's peak; more than one where several have as much.

    Nothing is planned anew: kernels of another card may take another workspace.
    """
    if plan.device.architecture == "cpu":
        return []
    cards = [card for card in HARDWARE.values() if card.capability and not card_faults(cfg, card.name, card.capability)]
    outside = plan.outside.total
    fitting = [card for card in cards if has_room(planned_reserved(plan), card.memory - outside, card)]
    least = min((card.memory for card in fitting), default=0)
    return [card.name for card in fitting if card.memory == least]


def add_fewest_ranks(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Sets `fewest_ranks` and `tried_ranks`: whole plans of the same micro-batches on fewer ranks, or more of them."""

    def fits(ranks: int) -> bool:
        with phase(f"planning {ranks} rank{'s' if ranks > 1 else ''}", leaves_line=False):
            tried.append(ranks)
            other = copy.deepcopy(cfg)
            other.parallel.data_shard = -1
            wanted = replace(settings, ranks=ranks, traced_ranks=(), timed=False, outside=None)
            try:
                return make_plan(recipe_class, other, wanted)[0].verdict == FITS
            except UserError:  # so many ranks cannot have it
                return False

    tried: list[int] = []
    found = fewest(plan.ranks, least_ranks(cfg), plan.verdict == FITS, fits)
    plan.fewest_ranks, plan.tried_ranks = found, sorted(tried)


def least_ranks(cfg: Any) -> int:
    """Ranks of the smallest mesh that divides the model as the config says; FSDP then shards over one rank."""
    copies = 1 if cfg.parallel.strategy == "ddp" else cfg.parallel.data_replicate
    return int(same_batch_ranks(cfg.parallel) * copies)


def fewest(ranks: int, least: int, good: bool, fits: Callable[[int], bool]) -> int | None:
    """The first of `least`, twice as many and so on that `fits`, given whether `ranks` do: more never take more memory.

    So that a few of them have to be tried: half of what is left at a time, or some larger ones.
    """
    if good:
        smaller = [number for number in _doubled(least, ranks) if number < ranks]
        begin, end = 0, len(smaller)
        while begin < end:
            middle = (begin + end - 1) // 2
            begin, end = (begin, middle) if fits(smaller[middle]) else (middle + 1, end)
        return [*smaller, ranks][begin]
    larger = [number for number in _doubled(least, ranks << _MOST_LARGER) if number > ranks][:_MOST_LARGER]
    return next((number for number in larger if fits(number)), None)


def _doubled(least: int, most: int) -> Sequence[int]:
    numbers = [least]
    while numbers[-1] * 2 <= most:
        numbers.append(numbers[-1] * 2)
    return numbers

"""The fastest settings of a config that fit a device: estimated by `quick`, the first of them confirmed by whole plans.

For each way to share the model between ranks (pipelines too, where their link is slow) and each kind of activation
checkpointing, the largest micro-batch that fits is looked for; it divides the global batch, which stays as the
config asks for. What one setting rules out is not tried with another: if a micro-batch does not fit, a larger one does
not, nor does the same with less checkpointing; and `trial_order` has what is decided without a simulation.
"""

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.result import DOES_NOT_FIT
from recipe_lib.plan.search.candidates import Candidate, differing, key_of, try_settings
from recipe_lib.plan.search.found_settings import PlannedSettings, Search
from recipe_lib.plan.search.search_space import batch_per_step, data_ranks, pipelines, sharings, variants
from recipe_lib.plan.search.trial_order import (
    Trials,
    leanest,
    other_kinds,
    run_ways,
    try_all,
    variant_key,
    way,
    worth_trying,
)
from recipe_lib.plan.search.trials import Changes, changed, side_by_side
from recipe_lib.report.phases import phase

MAX_PLANS = 10


def search(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    *,
    want: int = 3,
    fixed: Collection[str] = (),
    splits: bool = True,
    processes: int | None = None,
) -> Search:
    """The fastest settings of a plannable config that fit `settings.hardware` on `settings.ranks` ranks.

    want: as many as are confirmed by a whole plan: the fastest, and of what was tried on the way the next. fixed:
    dotted keys that stay as the config has them. splits: whether a pipeline's backward may be cut in two, which
    compiled layers cannot. processes: to work with, None: one for each core; here alone if something has been simulated
    in this one. Frozen weights and optimizer states are only rounded more, and parameters only kept in host memory or
    streamed from it, where nothing fits without. Raises UserErrors of recipe and config.
    """
    began = time.monotonic()
    found: list[PlannedSettings] = []
    refused: list[PlannedSettings] = []

    def work(job: Changes | Candidate) -> Any:
        if isinstance(job, Candidate):
            return _plan(recipe_class, cfg, settings, job)
        return try_settings(recipe_class, cfg, settings, job, fixed)

    trying = phase("trying settings", unit="settings", leaves_line=False)
    with side_by_side(work, processes) as (submit, workers), trying as going:
        trials = Trials(cfg, settings, fixed, submit, workers, going)
        for group in variants(cfg, fixed):
            _try_group(trials, group, splits)
            fits, too_large = _confirm(trials, group, splits, submit, want)
            found, refused = found + fits, refused + too_large
            if found:
                break
        if not found:
            refused += [future.result() for future in [submit(one) for one in _doubted(trials)]]
            found = [one for one in refused if one.verdict != DOES_NOT_FIT]
    closest = None if found else max(refused, key=lambda one: one.margin, default=None)
    return Search(
        found=found,
        closest=closest,
        device=settings.hardware.name,
        ranks=settings.ranks,
        global_batch_size=batch_per_step(cfg) * data_ranks(cfg, settings.ranks),
        tried=len(trials.tried),
        planned=len(found) + len(refused),
        took=time.monotonic() - began,
        skipped=len(trials.skipped),
    )


def _try_group(trials: Trials, group: list[Changes], splits: bool) -> None:
    """Tries a group of variants, each with every way of sharing that could fit and be the fastest. Tried before, it
    goes on where what was the fastest has turned out not to fit."""
    cfg, settings, fixed = trials.cfg, trials.settings, trials.fixed
    begun = [leanest(trials, variant | next(sharings(cfg, settings.ranks, fixed))) for variant in group]
    try_all(trials, begun)
    # The settings are refused otherwise, by the recipe or the simulation.
    left = [(variant, one) for variant, one in zip(group, begun, strict=True) if trials.tried.get(key_of(one))]
    for _, one in left:
        trials.leanest[variant_key(one)] = trials.tried[key_of(one)]
    if left:
        try_all(trials, other_kinds(trials, left[0][1]))
    ways = [*sharings(cfg, settings.ranks, fixed), *pipelines(cfg, settings, fixed, splits=splits)]
    possible = worth_trying(trials, [variant | sharing for variant, _ in left for sharing in ways])
    run_ways(trials, [way(trials, one) for one in possible])


def _confirm(
    trials: Trials, group: list[Changes], splits: bool, submit: Any, want: int
) -> tuple[list[PlannedSettings], list[PlannedSettings]]:
    """(what fits by its whole plan, what does not), the fastest estimates first, until there are enough."""
    fits: list[PlannedSettings] = []
    refused: list[PlannedSettings] = []
    done: set[str] = set()
    while len(fits) < want and len(fits) + len(refused) < MAX_PLANS:
        waiting = [one for one in trials.fitting() if key_of(one.changes) not in done]
        now = waiting[: want - len(fits)]
        if not now:
            break
        trials.going.what = "planning the fastest in full"
        futures: list[Future[PlannedSettings]] = [submit(one) for one in now]
        for one, future in zip(now, futures, strict=True):
            done.add(key_of(one.changes))
            if future.result().verdict == DOES_NOT_FIT:
                refused.append(future.result())
                trials.refused.add(key_of(one.changes))
            else:
                fits.append(future.result())
        if trials.refused:
            _try_group(trials, group, splits)
    return sorted(fits, key=lambda one: -one.tokens_per_second), refused


def _doubted(trials: Trials) -> list[Candidate]:
    """The settings that lack least, where no plan of them was made."""
    tried = [one for one in trials.tried.values() if one is not None]
    nearest = sorted(tried, key=lambda one: one.short)[:1]
    return [one for one in nearest if not one.may_fit]


def _plan(recipe_class: type, cfg: Any, settings: PlanSettings, one: Candidate) -> PlannedSettings:
    """The whole plan of a candidate."""
    other = changed(cfg, one.changes)
    assert other is not None
    plan, _ = make_plan(recipe_class, other, replace(settings, timed=False))
    rank = plan.heaviest
    changes = differing(cfg, one.changes)
    if changes.get("optimizer.implementation") == "auto" and cfg.optimizer.implementation == "fused":
        del changes["optimizer.implementation"]
    return PlannedSettings(
        changes=changes,
        verdict=plan.verdict,
        active=rank.peak.active,
        reserved=rank.reserved,
        reserved_expandable=rank.reserved_expandable,
        host=plan.heaviest.host,
        margin=plan.device.usable - min(rank.reserved, rank.reserved_expandable),
        seconds=one.quick.seconds,
        tokens_per_second=one.speed,
    )

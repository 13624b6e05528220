"""The fastest settings of a config that fit a device: estimated by `quick`, the first of them
confirmed by whole plans.

For each way to share the model between ranks (pipelines too, where their link is slow) and each
kind of activation checkpointing, the largest micro-batch that fits is looked for; it divides the
global batch, which stays as the config asks for. What one setting rules out is not tried with
another: if a micro-batch does not fit, a larger one does not, nor does the same with less
checkpointing; and `trial_order` has what is decided without a simulation.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.plan_schema import DOES_NOT_FIT
from recipe_lib.plan.search.trial_order import (
    SearchState,
    count_sequences,
    explain_too_large,
    list_groups,
    list_pipelines,
    list_sharings,
    make_key,
    make_leanest,
    make_variant_key,
    run_trials,
    skip_trial,
    yield_micro_batches,
    yield_one,
)
from recipe_lib.plan.search.trials import (
    CHECKPOINTING,
    CHECKPOINTING_KEY,
    Candidate,
    Changes,
    apply_changes,
    count_data_ranks,
    find_differing,
    format_overrides,
    open_workers,
    set_checkpointing,
    try_settings,
)
from recipe_lib.report.phases import phase
from recipe_lib.report.terminal import (
    WIDEST,
    Table,
    get_terminal_width,
    open_console,
    put,
    put_table,
    read_console,
)
from recipe_lib.units import format_bytes, format_count, format_duration

MAX_PLANS = 10


@dataclass(frozen=True)
class SearchResult:
    """found: what fits, confirmed, fastest first. closest: where nothing does, what lacks least.
    device, ranks: to fit. global_batch_size: sequences of a step, all ranks. tried: settings that
    were estimated; planned: in full; skipped: settings, each for more of its kind, that no
    simulation was needed for; took: seconds.
    """

    found: list[Candidate]
    closest: Candidate | None
    device: str
    ranks: int
    global_batch_size: int
    tried: int
    planned: int
    skipped: int
    took: float


def search(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    *,
    want: int = 3,
    fixed: Collection[str] = (),
    splits: bool = True,
    processes: int | None = None,
) -> SearchResult:
    """The fastest settings of a plannable config that fit `settings.hardware` on `settings.ranks`
    ranks.

    want: as many as are confirmed by a whole plan: the fastest, and of what was tried on the way
    the next. fixed: dotted keys that stay as the config has them. splits: whether a pipeline's
    backward may be cut in two, which compiled layers cannot. processes: to work with, None: one for
    each core; here alone if something has been simulated in this one. Frozen weights and optimizer
    states are only rounded more, and parameters only kept in host memory or streamed from it, where
    nothing fits without. Raises UserErrors of recipe and config.
    """
    began = time.monotonic()

    def work(job: Changes | Candidate) -> Any:
        if isinstance(job, Candidate):
            return _plan_candidate(recipe_class, cfg, settings, job)
        return try_settings(recipe_class, cfg, settings, job, fixed)

    trying = phase("trying settings", unit="settings", leaves_line=False)
    with open_workers(work, processes) as (submit, workers), trying as going:
        trials = SearchState(cfg, settings, fixed, submit, workers, going)
        for group in list_groups(cfg, settings, fixed):
            _try_group(trials, group, splits)
            _confirm_fastest(trials, group, splits, want)
            if trials.confirmed():
                break
        nearest = min(filter(None, trials.tried.values()), key=lambda one: one.short, default=None)
        if not trials.confirmed() and nearest is not None and not nearest.may_fit:
            trials.plan([nearest])
    found = trials.confirmed()
    return SearchResult(
        found=found,
        closest=(
            None if found else min(trials.plans.values(), key=lambda one: one.short, default=None)
        ),
        device=settings.hardware.name,
        ranks=settings.ranks,
        global_batch_size=count_sequences(cfg) * count_data_ranks(cfg, settings.ranks),
        tried=len(trials.tried),
        planned=len(trials.plans),
        skipped=len(trials.skipped),
        took=time.monotonic() - began,
    )


def _try_group(trials: SearchState, group: list[Changes], splits: bool) -> None:
    """Tries a group of variants, each with every way of sharing that could fit and be the fastest.
    Tried before, it goes on where what was the fastest has turned out not to fit.
    """
    cfg, settings, fixed = trials.cfg, trials.settings, trials.fixed
    begun = [
        make_leanest(trials, variant | next(list_sharings(cfg, settings.ranks, fixed)))
        for variant in group
    ]
    run_trials(trials, map(yield_one, begun))
    # The settings are refused otherwise, by the recipe or the simulation.
    left = [
        (variant, one)
        for variant, one in zip(group, begun, strict=True)
        if trials.tried.get(make_key(one))
    ]
    for _, one in left:
        trials.leanest[make_variant_key(one)] = trials.tried[make_key(one)]
    if left and CHECKPOINTING_KEY not in fixed:  # what each kind keeps and computes
        kinds = [left[0][1] | set_checkpointing(cfg, kind) for kind in reversed(CHECKPOINTING[1:])]
        run_trials(trials, map(yield_one, kinds))
    ways = [
        *list_sharings(cfg, settings.ranks, fixed),
        *list_pipelines(cfg, settings, fixed, splits=splits),
    ]
    possible = []
    for (variant, _), sharing in product(left, ways):
        if why := explain_too_large(trials, make_leanest(trials, variant | sharing)):
            skip_trial(trials, variant | sharing, f"{why}, however activations are kept")
        else:
            possible.append(yield_micro_batches(trials, variant | sharing))
    run_trials(trials, possible)


def _confirm_fastest(trials: SearchState, group: list[Changes], splits: bool, want: int) -> None:
    """Plan the fastest estimates until there are enough that fit."""
    most = len(trials.plans) + MAX_PLANS
    while len(trials.confirmed()) < want and len(trials.plans) < most:
        waiting = [one for one in trials.fitting() if make_key(one.changes) not in trials.plans]
        if not waiting:
            break
        trials.going.what = "planning the fastest in full"
        trials.plan(waiting[: want - len(trials.confirmed())])
        if len(trials.confirmed()) < len(trials.plans):
            _try_group(trials, group, splits)


def _plan_candidate(
    recipe_class: type, cfg: Any, settings: PlanSettings, one: Candidate
) -> Candidate:
    """Return a candidate with the figures of its whole plan."""
    other = apply_changes(cfg, one.changes)
    assert other is not None
    plan, _ = make_plan(recipe_class, other, replace(settings, timed=False))
    rank = plan.heaviest
    changes = find_differing(cfg, one.changes)
    if (
        changes.get("optimizer.implementation") == "auto"
        and cfg.optimizer.implementation == "fused"
    ):
        del changes["optimizer.implementation"]
    exact = replace(
        one.quick,
        active=rank.peak.active,
        reserved=rank.reserved,
        reserved_expandable=rank.reserved_expandable,
        host=rank.host,
        usable=plan.device.usable,
    )
    return Candidate(changes, exact, plan.verdict != DOES_NOT_FIT, plan.verdict)


def render_search(result: SearchResult) -> str:
    """The settings as a table: the overrides, planned peak, tokens per second, verdict."""
    where = f"{result.ranks} x {result.device}"
    batch = f"{result.global_batch_size} sequences a step"
    shown = result.found or ([result.closest] if result.closest else [])
    if result.found:
        title = f"FOUND  settings that fit {where}, {batch}, fastest first"
    else:
        lacking = f"; closest, short of {format_bytes(shown[0].short)}:" if shown else ""
        title = f"DOES NOT FIT  {where}, {batch}, with none of the settings tried{lacking}"
    header = ["planned active", "reserved", "expandable", "step", "tokens/s", "verdict"]
    console = open_console(get_terminal_width(WIDEST))
    put(console, title)
    for number, one in enumerate(shown, 1):
        sizes = map(
            format_bytes, (one.quick.active, one.quick.reserved, one.quick.reserved_expandable)
        )
        cells = [*sizes, format_duration(one.quick.seconds), format_count(one.speed), one.verdict]
        console.print()
        put(
            console,
            f"{number}. {format_overrides(one.changes) or 'as the config has it'}",
            indent=2,
            wrap=False,
        )
        put_table(console, Table("", header, [cells], ("verdict",), ("expandable", "step")))
    how = (
        f"{result.tried} settings estimated, {result.planned} planned in full, {result.took:.0f} s"
    )
    others = (
        "; after the first: the fastest of those that were estimated"
        if len(result.found) > 1
        else ""
    )
    console.print()
    put(console, f"tokens/s are for ranking{others}; {how}", indent=2)
    return read_console(console).rstrip("\n")

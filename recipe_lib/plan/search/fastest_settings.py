"""Search for the fastest settings of a config that fit a device.

`tune plan --search` calls `search`, which estimates settings and confirms the fastest by whole
plans, and `render_search`, which formats them. For each way to share the model between ranks and
each kind of activation checkpointing, the largest micro-batch that fits is looked for. The global
batch stays as it is. `trial_order` chooses what is tried next, `trials` estimates it. A variant is
changes that decide how large the model's states are; a group is variants that cost alike.
"""

import time
from collections.abc import Collection, Iterable
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
    make_leanest,
    run_trials,
    skip_trial,
    yield_fewer_chunks,
    yield_micro_batches,
    yield_one,
    yield_smaller_micro_batch,
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
    make_key,
    make_variant_key,
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
from recipe_lib.units import Bytes, Count, Seconds, format_bytes

# Whole plans (all phases of a run) that are made for a group. More are made, until one fits, of
# settings that fit by their estimate without its tolerance: a later group costs more.
MAX_PLANS = 10


@dataclass(frozen=True)
class SearchResult:
    """The settings that fit by a search, and how much it tried."""

    # Settings that fit by their whole plans, fastest first.
    fitting: list[Candidate]
    # The settings that lack the fewest bytes; None if some fit, or if all were refused.
    closest: Candidate | None
    # Name of the device.
    device: str
    # Number of ranks.
    ranks: int
    # Sequences of a step on all ranks.
    global_batch_size: int
    # Number of settings that were estimated.
    tried: int
    # Number of settings that were planned in full.
    planned: int
    # Number of settings that were not simulated, as a lower bound ruled them out.
    skipped: int
    # Seconds that the search took.
    seconds: float


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
    """Find the fastest settings of a config that fit `settings.hardware`.

    Frozen weights and optimizer states are quantized further, and parameters kept in host memory or
    streamed from it, only if nothing fits without. The fastest found are never slower than the
    config as it is, if that fits.

    Args:
        recipe_class: of the config.
        cfg: a config that can be simulated (`make_plannable`); its global batch stays as it is.
        settings: device and number of ranks.
        want: how many settings are confirmed by a whole plan: the fastest, and the next of those
            that were tried on the way.
        fixed: dotted keys that stay as the config has them.
        splits: whether a pipeline's backward may be split into gradients of inputs and of weights,
            which that of compiled layers cannot.
        processes: number of worker processes; None: one for each core. If something has been
            simulated in this process, it does all the work itself.

    Raises UserErrors of the recipe and of rules on config keys.
    """
    start_seconds = time.monotonic()

    def work(job: Changes | Candidate) -> Any:
        if isinstance(job, Candidate):
            return _plan_candidate(recipe_class, cfg, settings=settings, candidate=job)
        return try_settings(recipe_class, cfg, settings=settings, changes=job, fixed=fixed)

    with (
        open_workers(work, processes) as (submit, workers),
        phase("trying settings", unit="settings", leaves_line=False) as progress,
    ):
        state = SearchState(
            cfg=cfg,
            settings=settings,
            fixed=fixed,
            submit=submit,
            workers=workers,
            progress=progress,
        )
        for group in list_groups(cfg, settings, fixed):
            _try_group(state, group, splits)
            _confirm_fastest(state, group, splits=splits, want=want)
            if state.list_confirmed():
                break
        # Sequences pass over the sizes between, where the largest fits, and no group need have all
        # of the config's own values: the config as it is may be faster than all that was found.
        shipped = submit({}).result()
        if (
            state.may_fit(shipped)
            and all(plan.changes for plan in state.plans.values())  # else it was planned already
            and all(shipped.speed > candidate.speed for candidate in state.list_confirmed())
        ):
            state.plan_in_full([shipped])
        nearest = _find_closest(filter(None, state.tried.values()))
        # The closest settings are shown with the figures of their whole plan.
        if not state.list_confirmed() and nearest is not None and not nearest.may_fit:
            state.plan_in_full([nearest])
    fitting = state.list_confirmed()[:want]
    return SearchResult(
        fitting=fitting,
        closest=None if fitting else _find_closest(state.plans.values()),
        device=settings.hardware.name,
        ranks=settings.ranks,
        global_batch_size=count_sequences(cfg) * count_data_ranks(cfg, settings.ranks),
        tried=len(state.tried),
        planned=len(state.plans),
        skipped=len(state.skipped),
        seconds=time.monotonic() - start_seconds,
    )


def _find_closest(candidates: Iterable[Candidate]) -> Candidate | None:
    return min(candidates, key=lambda candidate: candidate.shortfall, default=None)


def _try_group(state: SearchState, group: list[Changes], splits: bool) -> None:
    """Try a group of variants, each with every way of sharing that could fit and be the fastest.

    Called again for the same group after the fastest settings have turned out not to fit: then the
    slower ones that they had ruled out are tried. splits: as for `search`.
    """
    cfg = state.cfg
    ranks = state.settings.ranks
    # Of each variant the settings with the least memory first: lower bounds are derived from them.
    # The first way of sharing is the one with the least memory.
    leanest_changes = [
        make_leanest(state, variant | next(list_sharings(cfg, ranks, state.fixed)))
        for variant in group
    ]
    run_trials(state, map(yield_one, leanest_changes))
    possible_variants = []
    for variant, changes in zip(group, leanest_changes, strict=True):
        candidate = state.tried.get(make_key(changes))
        if candidate is not None:  # else the recipe or the simulation refuses the settings
            possible_variants.append((variant, changes))
            state.leanest_by_variant[make_variant_key(cfg, changes)] = candidate
    # One trial of each other kind of checkpointing gives the lower bounds of all further trials.
    if possible_variants and CHECKPOINTING_KEY not in state.fixed:
        _, changes = possible_variants[0]
        kinds = [changes | set_checkpointing(cfg, kind) for kind in reversed(CHECKPOINTING[1:])]
        run_trials(state, map(yield_one, kinds))
    sharings = [
        *list_sharings(cfg, ranks, state.fixed),
        *list_pipelines(cfg, state.settings, state.fixed, splits=splits),
    ]
    sequences = []
    for (variant, _), sharing in product(possible_variants, sharings):
        if reason := explain_too_large(state, make_leanest(state, variant | sharing)):
            skip_trial(state, variant | sharing, f"{reason}, however activations are kept")
        else:
            sequences.append(yield_micro_batches(state, variant | sharing))
    run_trials(state, sequences)


def _confirm_fastest(state: SearchState, group: list[Changes], splits: bool, want: int) -> None:
    """Plan candidates in full until the `want` fastest fit, or MAX_PLANS are used up.

    splits: as for `search`.
    """
    limit = len(state.plans) + MAX_PLANS
    while True:
        fastest = state.list_fitting()[:want]
        for yield_alike in (yield_fewer_chunks, yield_smaller_micro_batch):
            run_trials(state, [yield_alike(state, candidate) for candidate in fastest])
        candidates = [
            candidate
            for candidate in state.list_fitting()
            if len(state.plans) < limit or (candidate.shortfall <= 0 and not state.list_confirmed())
        ]
        unplanned = [
            candidate
            for candidate in candidates[:want]
            if make_key(candidate.changes) not in state.plans
        ]
        if not unplanned:
            break
        state.progress.title = "planning the fastest in full"
        state.plan_in_full(unplanned)
        # If one does not fit after all, try the slower settings that it had ruled out.
        if len(state.list_confirmed()) < len(state.plans):
            _try_group(state, group, splits)


def _plan_candidate(
    recipe_class: type, cfg: Any, settings: PlanSettings, candidate: Candidate
) -> Candidate:
    changed_cfg = apply_changes(cfg, candidate.changes)
    assert changed_cfg is not None
    plan, _ = make_plan(recipe_class, changed_cfg, replace(settings, timed=False))
    rank = plan.heaviest
    changes = find_differing(cfg, candidate.changes)
    # `auto` chooses fused kernels wherever they can be used: to a config of `fused` it is no change
    # worth showing.
    if (
        changes.get("optimizer.implementation") == "auto"
        and cfg.optimizer.implementation == "fused"
    ):
        del changes["optimizer.implementation"]
    return Candidate(
        changes=changes,
        estimate=replace(
            candidate.estimate,
            active=rank.peak.active,
            reserved=rank.reserved,
            reserved_expandable=rank.reserved_expandable,
            host=rank.host,
            usable=plan.device.usable,
        ),
        may_fit=plan.verdict != DOES_NOT_FIT,
        verdict=plan.verdict,
    )


def render_search(result: SearchResult) -> str:
    """Return the settings as a table: the overrides, planned peak, tokens per second, verdict."""
    where = f"{result.ranks} x {result.device}"
    batch = f"{result.global_batch_size} sequences a step"
    candidates = result.fitting or ([result.closest] if result.closest else [])
    if result.fitting:
        title = f"FOUND  settings that fit {where}, {batch}, fastest first"
    else:
        lacking = (
            f"; closest, short of {format_bytes(candidates[0].shortfall)}:" if candidates else ""
        )
        title = f"DOES NOT FIT  {where}, {batch}, with none of the settings tried{lacking}"
    console = open_console(get_terminal_width(WIDEST))
    put(console, title)
    for number, candidate in enumerate(candidates, 1):
        estimate = candidate.estimate
        overrides = format_overrides(candidate.changes) or "as the config has it"
        console.print()
        put(console, f"{number}. {overrides}", indent=2, wrap=False)
        put_table(
            console,
            Table(
                title="",
                header=["planned active", "reserved", "expandable", "step", "tokens/s", "verdict"],
                rows=[
                    [
                        Bytes(estimate.active),
                        Bytes(estimate.reserved),
                        Bytes(estimate.reserved_expandable),
                        Seconds(estimate.seconds),
                        Count(candidate.speed),
                        candidate.verdict,
                    ]
                ],
                left=("verdict",),
                optional=("expandable", "step"),
            ),
        )
    note = (
        "; after the first: the fastest of those that were estimated"
        if len(result.fitting) > 1
        else ""
    )
    console.print()
    put(
        console,
        f"tokens/s are for ranking{note}; {result.tried} settings estimated, {result.planned}"
        f" planned in full, {result.seconds:.0f} s",
        indent=2,
    )
    return read_console(console).rstrip("\n")

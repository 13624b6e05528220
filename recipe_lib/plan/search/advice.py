"""What to change of a run: what each lever does, which one is next, and how few ranks or how small
a card suffice.

All of it is asked of the same levers and the same trials. `--advice` estimates the run with each
lever alone; the next lever is named by what a plan itself knows, without a trial;
`parallel.strategy: auto` is a lever of two values, of which the faster that fits is taken.
"""

import bisect
import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recipe_lib.config.compute_capability import find_capability_faults
from recipe_lib.config.mesh import MODEL_DIMS, compute_micro_batches, count_same_batch_ranks
from recipe_lib.errors import UserError
from recipe_lib.plan.build_plan import PlanSettings, make_plan, simulate_rank
from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, Advice, Plan
from recipe_lib.plan.search.lever_table import (
    LENGTH_KEY,
    PACKING_KEY,
    RANKS_KEY,
    TURNS_KEY,
    Lever,
    list_levers,
)
from recipe_lib.plan.search.trials import (
    RESERVED_TOLERANCE,
    STRATEGY_KEY,
    Changes,
    Estimate,
    apply_changes,
    format_overrides,
    run_in_processes,
    try_estimate,
)
from recipe_lib.plan.summary.rank_memory import build_rank_plan, has_room
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY
from recipe_lib.plan.views.verdict_text import compute_planned_reserved
from recipe_lib.report.phases import phase
from recipe_lib.units import format_bytes, format_duration

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
SHARDS, COPIES = "fsdp", "ddp"
MIN_CHANGE = 0.002  # a change of less than this share is none
_MOST_LARGER = 3  # numbers of ranks tried beyond a run's own, each twice as many
# Kinds of memory that a batch's size does not change.
_FIXED = ("parameters", "gradients", "optimizer", "gathered", "communication")


# A lever and what the run takes with it.
Tried = tuple[Lever, Estimate]


def try_levers(
    recipe_class: type, cfg: Any, settings: PlanSettings
) -> tuple[Estimate | None, list[Tried]]:
    """Return the run as it is, None where it could not be tried, and with each lever.

    In several processes if nothing has been simulated in this one yet: before its own plan is made
    is the better time.
    """
    jobs = [(Lever(), cfg, settings)]
    for lever in list_levers(cfg, settings):
        other = apply_changes(
            cfg, {key: value for key, value in lever.changes.items() if key != RANKS_KEY}
        )
        if other is not None:
            jobs.append((lever, other, _apply_to_settings(settings, lever.changes, other)))
    estimates = run_in_processes(
        lambda job: try_estimate(recipe_class, job[1], job[2]), jobs, "trying levers"
    )
    tried = [
        (lever, estimate)
        for (lever, *_), estimate in zip(jobs[1:], estimates[1:], strict=True)
        if estimate is not None
    ]
    return estimates[0], tried


def _apply_to_settings(settings: PlanSettings, changes: Changes, cfg: Any) -> PlanSettings:
    """Return the settings with the ranks and the sequences that a lever leads to. cfg: with its
    changes.
    """
    sequence = settings.sequence
    if RANKS_KEY in changes:
        settings = replace(settings, ranks=changes[RANKS_KEY], traced_ranks=())
    if LENGTH_KEY in changes:
        pack = max(1.0, sequence.pack * cfg.max_seq_len / sequence.tokens)
        settings = replace(settings, sequence=replace(sequence, tokens=cfg.max_seq_len, pack=pack))
    if PACKING_KEY in changes and sequence.histogram:
        pack = max(1.0, cfg.max_seq_len / sequence.histogram["p50"])
        settings = replace(settings, sequence=replace(sequence, tokens=cfg.max_seq_len, pack=pack))
    return settings


def advise(plan: Plan, base: Estimate | None, tried: list[Tried]) -> list[Advice]:
    """Return what each lever does to the plan: those that make it fit first, then by the bytes
    gained.

    Before those are the ones that make a plan faster that fits, and ways to have room for a long
    sequence, the fastest first. Bytes are of the active peak, off by 0.5 % of it at most; whether
    it then fits is an estimate, some percent off. What neither lowers the peak nor makes the step
    faster is left out, unless it is `weighed`.
    """
    rank = plan.heaviest
    ranked: list[tuple[tuple[bool, bool, float], Advice]] = []
    gained = rank.reserved_expandable - rank.reserved
    if gained < -MIN_CHANGE * rank.reserved:
        fits = rank.reserved_expandable <= plan.device.usable
        row = Advice(
            EXPANDABLE, gained, 0.0, fits, "an environment variable; less reserved memory lies idle"
        )
        ranked.append(((not fits, True, gained), row))
    for lever, one in tried if base is not None else []:
        assert base is not None
        gained = one.active - base.active
        seconds = one.seconds - base.seconds
        fits = _is_fitting(plan, base, one)
        timed = not {LENGTH_KEY, PACKING_KEY} & set(lever.changes)
        is_faster = (
            timed and fits and plan.verdict != DOES_NOT_FIT and seconds < -MIN_CHANGE * base.seconds
        )
        if not (is_faster or lever.weighed or gained < -MIN_CHANGE * base.active):
            continue
        note = "; ".join(filter(None, [lever.note, *_describe_traffic(lever, one, base)]))
        override = format_overrides(lever.changes).replace(f"{RANKS_KEY}=", f"{RANKS_KEY} ")
        row = Advice(override, gained, seconds if timed else None, fits, note)
        by_time = is_faster or (lever.sends and fits)
        ranked.append(((not fits, not by_time, seconds if by_time else gained), row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _describe_traffic(lever: Lever, one: Estimate, base: Estimate) -> list[str]:
    """Return what is sent, where that is to be said, and what more of it is kept in host memory."""
    texts = []
    if lever.sends:
        texts.append(
            f"sends {format_bytes(one.sent)} a step (without it {format_bytes(base.sent)}), to and"
            f" from the host {format_bytes(one.copied)} ({format_bytes(base.copied)})"
        )
    if one.host > base.host + MIN_CHANGE * base.active:
        texts.append(f"{format_bytes(one.host)} of host memory")
    return texts


def _is_fitting(plan: Plan, base: Estimate, one: Estimate) -> bool:
    """Return whether the run fits with a lever, as the verdict counts it, with expandable segments.

    That is the plan's own peak, and what the lever changes of it; of loading, validation and saving
    what they take beyond what is alive between steps, which the lever may change.
    """
    steps = [
        peak.reserved_expandable for peak in plan.heaviest.peaks if peak.phase in (FIRST, STEADY)
    ]
    others = [peak.active for peak in plan.heaviest.peaks if peak.phase not in (FIRST, STEADY)]
    planned = max(steps, default=0) + one.reserved_expandable - base.reserved_expandable
    beyond = max((peak - base.held for peak in others), default=0)
    return max(planned, one.held + max(beyond, 0)) <= one.usable


def name_next_lever(plan: Plan, cfg: Any, settings: PlanSettings) -> str:
    """Return what to change next, in words; empty where nothing is known to help. cfg: of the plan.

    By what fills the plan's peak, and what the room that is left is for: a lever is named with what
    its kind of memory takes, and a larger batch only where what grows with it would fit several
    times over.
    """
    if plan.verdict == FITS:
        return _name_larger_batch(plan, cfg) or _name_lever(
            plan, cfg, settings, "would make more room"
        )
    if plan.margin < 0 and plan.heaviest.reserved_expandable <= plan.device.usable:
        reserved = format_bytes(plan.heaviest.reserved_expandable)
        return f"{EXPANDABLE} in the environment: {reserved} are reserved then, which fit"
    return _name_lever(plan, cfg, settings, "lowers what takes the most")


def _sum_kinds(plan: Plan) -> Counter[str]:
    """Return the bytes of each kind of memory at the peak of the heaviest rank."""
    kinds: Counter[str] = Counter()
    for alive in plan.heaviest.alive:
        kinds[alive.kind] += alive.bytes
    return kinds


def _name_larger_batch(plan: Plan, cfg: Any) -> str:
    """Return a larger batch_size, where the plan has the room; with gradient accumulation the same
    sequences a step.
    """
    kinds, turns = _sum_kinds(plan), cfg.gradient_accumulation_steps
    growing = compute_planned_reserved(plan) - sum(kinds[kind] for kind in _FIXED)
    room = int(plan.device.usable * (1 - RESERVED_TOLERANCE)) - compute_planned_reserved(plan)
    # Where the optimizer has the peak, little of what a batch needs is in it.
    if (
        plan.heaviest.peak.part not in ("forward", "backward", "recompute")
        or growing <= 0
        or plan.pipeline is not None
    ):
        return ""
    most = room // growing + 1
    if most < 2:
        return ""
    times = math.gcd(1 << most.bit_length() - 1, turns)
    if times > 1:
        changes: Changes = {"batch_size": cfg.batch_size * times, TURNS_KEY: turns // times}
        what = "the same sequences a step, in fewer micro-batches"
    elif plan.time is not None and plan.time.steps == 1:  # there may be no more sequences
        return ""
    else:
        changes, what = {"batch_size": 2 * cfg.batch_size}, "twice the sequences a step"
    if apply_changes(cfg, changes) is None:
        return ""
    return (
        f"{format_overrides(changes)} has room ({what}): {format_bytes(plan.margin)} are left, and"
        f" what grows with batch_size takes {format_bytes(growing)}"
    )


def _name_lever(plan: Plan, cfg: Any, settings: PlanSettings, what: str) -> str:
    """Return the first lever for the kind of memory that takes the most at the peak, of the kinds
    that have one.
    """
    peak, levers = max(1, plan.heaviest.peak.active), list_levers(cfg, settings)
    for kind, num_bytes in _sum_kinds(plan).most_common():
        for lever in levers:
            if num_bytes and kind in lever.lowers and apply_changes(cfg, lever.changes) is not None:
                held = f"{format_bytes(num_bytes)} of {kind}, {num_bytes / peak:.0%} of the peak"
                more = "; alone it is not enough" if -plan.margin > num_bytes else ""
                return f"{format_overrides(lever.changes)} {what} ({held}){more}"
    return ""


def find_smallest_cards(plan: Plan, cfg: Any) -> list[str]:
    """Return the known cards of the least memory that has room for the plan's peak; several may
    have as much.

    Nothing is planned anew: kernels of another card may take another workspace.
    """
    if plan.device.architecture == "cpu":
        return []
    cards = [
        card
        for card in HARDWARE.values()
        if card.capability and not find_capability_faults(cfg, card.name, card.capability)
    ]
    fitting = [
        card
        for card in cards
        if has_room(compute_planned_reserved(plan), card.memory - plan.outside.total, card)
    ]
    least = min((card.memory for card in fitting), default=0)
    return [card.name for card in fitting if card.memory == least]


def add_fewest_ranks(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Set `fewest_ranks` and `tried_ranks`: whole plans of the same micro-batches on fewer ranks,
    or more of them.
    """
    other = copy.deepcopy(cfg)
    other.parallel.data_shard = -1

    def fits(ranks: int) -> bool:
        tried.append(ranks)
        wanted = replace(settings, ranks=ranks, traced_ranks=(), timed=False, outside=None)
        with phase(f"planning {ranks} rank{'s' if ranks > 1 else ''}", leaves_line=False):
            try:
                return make_plan(recipe_class, other, wanted)[0].verdict == FITS
            except UserError:  # so many ranks cannot have it
                return False

    tried: list[int] = []
    plan.fewest_ranks = find_fewest(plan.ranks, count_least_ranks(cfg), plan.verdict == FITS, fits)
    plan.tried_ranks = sorted(tried)


def count_least_ranks(cfg: Any) -> int:
    """Return the ranks of the smallest mesh that divides the model as the config says; FSDP then
    has one shard.
    """
    copies = 1 if cfg.parallel.strategy == "ddp" else cfg.parallel.data_replicate
    return int(count_same_batch_ranks(cfg.parallel) * copies)


def find_fewest(ranks: int, least: int, good: bool, fits: Callable[[int], bool]) -> int | None:
    """Return the first of `least`, twice as many and so on that `fits`. good: whether `ranks` do.

    More ranks never take more memory, so that a few have to be tried: half of what is left at a
    time, or some larger.
    """
    numbers = [least << power for power in range(32)]
    if good:
        smaller = [number for number in numbers if number < ranks]
        return [*smaller, ranks][bisect.bisect_left(smaller, True, key=fits)]
    larger = [number for number in numbers if number > ranks][:_MOST_LARGER]
    return next((number for number in larger if fits(number)), None)


def add_alone(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Set `alone` of a plan, the full model on one device.

    It costs about as much as planning a rank. Where the run is one rank it is that already.
    """
    if settings.ranks == 1:
        return
    other = copy.deepcopy(cfg)
    other.batch_size, other.gradient_accumulation_steps = compute_micro_batches(cfg)
    sizes = dict.fromkeys(("data_replicate", *MODEL_DIMS), 1) | {
        "data_shard": -1,
        "pipeline_microbatches": None,
    }
    other.parallel = replace(other.parallel, strategy=SHARDS, **sizes)
    with phase("simulating the full model on one device", leaves_line=False):
        simulated = simulate_rank(
            recipe_class, other, replace(settings, ranks=1, traced_ranks=(), phases=()), 0
        )
    plan.alone = build_rank_plan(0, simulated)


def choose_strategy(
    recipe_class: type, cfg: Any, settings: PlanSettings, *, expandable: bool = False
) -> tuple[str, str]:
    """Return (strategy, the line that says so) of a plannable config whose `parallel.strategy` is
    `auto`.

    Of shards and copies that fit the device with room for an estimate's error, the one with the
    shorter step; shards where neither does, or where copies do not go with the other settings.
    Copies gather nothing, and sum the trained gradients once a step. expandable: whether the run's
    allocator has expandable segments. Raises UserErrors of recipe and config.
    """
    configs = {name: apply_changes(cfg, {STRATEGY_KEY: name}) for name in (SHARDS, COPIES)}
    strategy, reason = SHARDS, f"{COPIES} does not go with other settings of the run"
    if configs[COPIES] is not None:
        sharded, copied = run_in_processes(
            lambda name: try_estimate(recipe_class, configs[name], settings),
            list(configs),
            "planning fsdp and ddp",
        )
        strategy, reason = decide_strategy(sharded, copied, settings, expandable=expandable)
    return strategy, f"{STRATEGY_KEY}=auto: {strategy}; {reason}"


def decide_strategy(
    sharded: Estimate | None, copied: Estimate | None, settings: PlanSettings, *, expandable: bool
) -> tuple[str, str]:
    """Return (strategy, why) by the estimates of both; None: there is none."""
    where = f"{settings.ranks} x {settings.hardware.name}"
    if sharded is None or copied is None:
        return SHARDS, f"no estimate could be made of both for {where}"
    taken = [one.reserved_expandable if expandable else one.reserved for one in (sharded, copied)]
    fits = [size <= copied.usable * (1 - RESERVED_TOLERANCE) for size in taken]
    share = f"of the {format_bytes(copied.usable)} that {where} can give each rank"
    if not any(fits):
        return SHARDS, f"it takes least, about {format_bytes(taken[0])} {share}, which is tight"
    if not fits[1]:
        return SHARDS, f"{COPIES} would take about {format_bytes(taken[1])} {share}"
    steps = [format_duration(sharded.seconds), format_duration(copied.seconds)]
    if fits[0] and sharded.seconds <= copied.seconds:
        return (
            SHARDS,
            (
                f"a step is estimated at {steps[0]}, with {COPIES} at {steps[1]}; about"
                f" {format_bytes(taken[0])} {share}"
            ),
        )
    return (
        COPIES,
        (
            f"a step is estimated at {steps[1]}, with {SHARDS} at {steps[0]}; about"
            f" {format_bytes(taken[1])} {share}"
        ),
    )

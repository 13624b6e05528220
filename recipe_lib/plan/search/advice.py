"""Advice on a run: what each lever does, which one is next, how few ranks or how small a card do.

`tune plan --advice` estimates the run with each lever alone (`try_levers`, `advise`). The next
lever is named by what a plan itself knows, without a trial (`name_next_lever`).
`parallel.strategy: auto` is a lever of two values, of which the faster that fits is taken
(`choose_strategy`).
"""

import bisect
import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recipe_lib.config.mesh import MODEL_DIMS, compute_micro_batches, count_same_batch_ranks
from recipe_lib.config.precision import find_capability_faults
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
SHARDS = "fsdp"
COPIES = "ddp"
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

    It takes several processes only if nothing has been simulated in this one yet: call it before
    the run's own plan is made.
    """
    jobs = [(Lever(), cfg, settings)]
    for lever in list_levers(cfg, settings):
        # The number of ranks is the launcher's, no key of the config.
        changes = {key: value for key, value in lever.changes.items() if key != RANKS_KEY}
        changed_cfg = apply_changes(cfg, changes)
        if changed_cfg is not None:
            jobs.append(
                (lever, changed_cfg, _apply_to_settings(settings, lever.changes, changed_cfg))
            )
    base, *estimates = run_in_processes(
        lambda job: try_estimate(recipe_class, job[1], job[2]), jobs, "trying levers"
    )
    tried = zip(jobs[1:], estimates, strict=True)
    return base, [(lever, estimate) for (lever, _, _), estimate in tried if estimate]


def _apply_to_settings(settings: PlanSettings, changes: Changes, cfg: Any) -> PlanSettings:
    """Return the settings with the ranks and sequences of a lever; cfg has its changes already."""
    sequence = settings.sequence
    if RANKS_KEY in changes:
        settings = replace(settings, ranks=changes[RANKS_KEY], traced_ranks=())
    if LENGTH_KEY in changes:
        pack = sequence.pack * cfg.max_seq_len / sequence.tokens
    elif PACKING_KEY in changes and sequence.histogram:
        pack = cfg.max_seq_len / sequence.histogram["p50"]
    else:
        return settings
    sequence = replace(sequence, tokens=cfg.max_seq_len, pack=max(1.0, pack))
    return replace(settings, sequence=sequence)


def advise(plan: Plan, base: Estimate | None, tried: list[Tried]) -> list[Advice]:
    """Return what each lever does to the plan, the most useful first.

    Levers that make it fit come first. Among them those lead that make a plan faster that fits,
    and ways to have room for a long sequence, by seconds; others follow by the bytes gained.
    What neither lowers the peak nor makes the step faster is left out, unless it is `weighed`.

    Args:
        plan: of the run as it is.
        base: the estimate of the same; None: no lever can be compared with it.
        tried: as `try_levers` returns them. Bytes are of the active peak, off by 0.5 % of it at
            most; whether it then fits is an estimate, some percent off.
    """
    rank = plan.heaviest
    # The key that advice is sorted by: (does not fit, is not for time, seconds or bytes).
    ranked: list[tuple[tuple[bool, bool, float], Advice]] = []
    gained = rank.reserved_expandable - rank.reserved
    if gained < -MIN_CHANGE * rank.reserved:
        fits = rank.reserved_expandable <= plan.device.usable
        row = Advice(
            override=EXPANDABLE,
            bytes=gained,
            seconds=0.0,
            fits=fits,
            note="an environment variable; less reserved memory lies idle",
        )
        ranked.append(((not fits, True, gained), row))
    for lever, estimate in tried if base is not None else []:
        assert base is not None
        gained = estimate.active - base.active
        seconds = estimate.seconds - base.seconds
        fits = _is_fitting(plan, base, estimate)
        # A step of other sequences has other work: its seconds are not compared.
        is_timed = not {LENGTH_KEY, PACKING_KEY} & set(lever.changes)
        is_faster = (
            is_timed
            and fits
            and plan.verdict != DOES_NOT_FIT
            and seconds < -MIN_CHANGE * base.seconds
        )
        if not (is_faster or lever.weighed or gained < -MIN_CHANGE * base.active):
            continue
        row = Advice(
            override=format_overrides(lever.changes).replace(f"{RANKS_KEY}=", f"{RANKS_KEY} "),
            bytes=gained,
            seconds=seconds if is_timed else None,
            fits=fits,
            note="; ".join(filter(None, [lever.note, *_describe_traffic(lever, estimate, base)])),
        )
        by_time = is_faster or (lever.sends and fits)
        ranked.append(((not fits, not by_time, seconds if by_time else gained), row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _describe_traffic(lever: Lever, estimate: Estimate, base: Estimate) -> list[str]:
    """Return what a lever sends, where that is to be said, and what more it keeps on the host."""
    texts = []
    if lever.sends:
        texts.append(
            f"sends {format_bytes(estimate.sent)} a step (without it {format_bytes(base.sent)}), to"
            f" and from the host {format_bytes(estimate.copied)} ({format_bytes(base.copied)})"
        )
    if estimate.host > base.host + MIN_CHANGE * base.active:
        texts.append(f"{format_bytes(estimate.host)} of host memory")
    return texts


def _is_fitting(plan: Plan, base: Estimate, estimate: Estimate) -> bool:
    """Return True if the run fits with a lever, as the verdict counts it with expandable segments.

    Counted are the plan's own peak with what the lever changes of it, and what loading, validation
    and saving take.
    """
    peaks = plan.heaviest.peaks
    of_steps = [peak.reserved_expandable for peak in peaks if peak.phase in (FIRST, STEADY)]
    of_others = [peak for peak in peaks if peak.phase not in (FIRST, STEADY)]
    # Estimates lack what loading and the first step leave, so that only their difference counts.
    planned = max(of_steps, default=0) + estimate.reserved_expandable - base.reserved_expandable
    # Other phases take as much beyond what is alive between steps, which the lever may change.
    beyond = max([0, *(peak.active - base.held for peak in of_others)])
    return max(planned, estimate.held + beyond) <= estimate.usable


def name_next_lever(plan: Plan, cfg: Any, settings: PlanSettings) -> str:
    """Return what to change next, in words; empty where nothing is known to help. cfg: of the plan.

    By what fills the plan's peak, and what the room that is left is for: a lever is named with what
    its kind of memory takes, and a larger batch only where what grows with it would fit several
    times over.
    """
    if plan.verdict == FITS:
        return _name_larger_batch(plan, cfg) or _name_lever(
            plan, cfg, settings=settings, effect="would make more room"
        )
    if plan.margin < 0 and plan.heaviest.reserved_expandable <= plan.device.usable:
        return (
            f"{EXPANDABLE} in the environment: {format_bytes(plan.heaviest.reserved_expandable)}"
            " are reserved then, which fit"
        )
    return _name_lever(plan, cfg, settings=settings, effect="lowers what takes the most")


def _sum_kinds(plan: Plan) -> Counter[str]:
    """Return the bytes of each kind of memory at the peak of the heaviest rank."""
    kinds: Counter[str] = Counter()
    for alive in plan.heaviest.alive:
        kinds[alive.kind] += alive.bytes
    return kinds


def _name_larger_batch(plan: Plan, cfg: Any) -> str:
    """Return a larger batch_size, where the plan has the room; empty where it does not.

    With gradient accumulation a step keeps its sequences.
    """
    kinds = _sum_kinds(plan)
    reserved = compute_planned_reserved(plan)
    growing = reserved - sum(kinds[kind] for kind in _FIXED)
    room = int(plan.device.usable * (1 - RESERVED_TOLERANCE)) - reserved
    # Where the optimizer has the peak, little of what a batch needs is in it.
    if (
        plan.heaviest.peak.part not in ("forward", "backward", "recompute")
        or growing <= 0
        or plan.pipeline is not None
    ):
        return ""
    largest_factor = room // growing + 1
    if largest_factor < 2:
        return ""
    micro_batch_count = cfg.gradient_accumulation_steps
    # A power of two that the number of micro-batches can be divided by.
    factor = math.gcd(1 << largest_factor.bit_length() - 1, micro_batch_count)
    if factor > 1:
        changes: Changes = {
            "batch_size": cfg.batch_size * factor,
            TURNS_KEY: micro_batch_count // factor,
        }
        meaning = "the same sequences a step, in fewer micro-batches"
    elif plan.time is not None and plan.time.steps == 1:  # there may be no more sequences
        return ""
    else:
        changes = {"batch_size": 2 * cfg.batch_size}
        meaning = "twice the sequences a step"
    if apply_changes(cfg, changes) is None:
        return ""
    return (
        f"{format_overrides(changes)} has room ({meaning}): {format_bytes(plan.margin)} are left,"
        f" and what grows with batch_size takes {format_bytes(growing)}"
    )


def _name_lever(plan: Plan, cfg: Any, settings: PlanSettings, effect: str) -> str:
    """Return the first lever for the kind of memory that takes the most at the peak.

    Kinds that no lever lowers are passed over. effect: what the lever does, in words.
    """
    peak = max(1, plan.heaviest.peak.active)
    levers = list_levers(cfg, settings)
    for kind, num_bytes in _sum_kinds(plan).most_common():
        for lever in levers:
            if num_bytes and kind in lever.lowers and apply_changes(cfg, lever.changes) is not None:
                taken = f"{format_bytes(num_bytes)} of {kind}, {num_bytes / peak:.0%} of the peak"
                more = "; alone it is not enough" if -plan.margin > num_bytes else ""
                return f"{format_overrides(lever.changes)} {effect} ({taken}){more}"
    return ""


def find_smallest_cards(plan: Plan, cfg: Any) -> list[str]:
    """Return the known cards of the least memory that has room for the plan's peak.

    Nothing is planned anew, though kernels of another card may take another workspace.
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
    """Set a plan's `fewest_ranks` and `tried_ranks`.

    They are found by whole plans of the same micro-batches on fewer ranks, or on more of them.
    """
    any_ranks_cfg = copy.deepcopy(cfg)
    any_ranks_cfg.parallel.data_shard = -1  # as many shards as there are ranks
    tried_ranks: list[int] = []

    def check_ranks(ranks: int) -> bool:
        tried_ranks.append(ranks)
        # Memory outside of torch depends on the ranks, so that it is looked up anew.
        fewer = replace(settings, ranks=ranks, traced_ranks=(), timed=False, outside=None)
        with phase(f"planning {ranks} rank{'s' if ranks > 1 else ''}", leaves_line=False):
            try:
                return make_plan(recipe_class, any_ranks_cfg, fewer)[0].verdict == FITS
            except UserError:  # the mesh cannot be made of so many ranks
                return False

    plan.fewest_ranks = find_fewest(
        plan.ranks, count_least_ranks(cfg), good=plan.verdict == FITS, fits=check_ranks
    )
    plan.tried_ranks = sorted(tried_ranks)


def count_least_ranks(cfg: Any) -> int:
    """Return the ranks of the smallest mesh that divides the model as the config says."""
    # FSDP has one shard there.
    copies = 1 if cfg.parallel.strategy == "ddp" else cfg.parallel.data_replicate
    return int(count_same_batch_ranks(cfg.parallel) * copies)


def find_fewest(ranks: int, least: int, good: bool, fits: Callable[[int], bool]) -> int | None:
    """Return the first of `least`, twice as many and so on that `fits`; good: `ranks` do."""
    # More ranks never take more memory, so that few have to be tried: half of what is left at a
    # time, or some larger ones.
    numbers = [least << power for power in range(32)]
    if good:
        smaller = [number for number in numbers if number < ranks]
        return [*smaller, ranks][bisect.bisect_left(smaller, True, key=fits)]
    larger = [number for number in numbers if number > ranks][:_MOST_LARGER]
    return next((number for number in larger if fits(number)), None)


def add_alone(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Set `alone` of a plan, the full model on one device; it takes as long as planning a rank."""
    if settings.ranks == 1:  # the run is that already
        return
    alone_cfg = copy.deepcopy(cfg)
    alone_cfg.batch_size, alone_cfg.gradient_accumulation_steps = compute_micro_batches(cfg)
    sizes = dict.fromkeys(("data_replicate", *MODEL_DIMS), 1)
    alone_cfg.parallel = replace(
        alone_cfg.parallel,
        strategy=SHARDS,
        data_shard=-1,
        pipeline_microbatches=None,
        **sizes,
    )
    with phase("simulating the full model on one device", leaves_line=False):
        simulated = simulate_rank(
            recipe_class,
            alone_cfg,
            settings=replace(settings, ranks=1, traced_ranks=(), phases=()),
            rank=0,
        )
    plan.alone = build_rank_plan(0, simulated)


def choose_strategy(
    recipe_class: type, cfg: Any, settings: PlanSettings, *, expandable: bool = False
) -> tuple[str, str]:
    """Return (strategy, the line that says so) of a config whose `parallel.strategy` is `auto`.

    Of shards and copies that fit the device with room for an estimate's error, it is the one with
    the shorter step. It is shards where neither fits, or copies do not go with other settings.

    cfg: plannable. expandable: whether the run's allocator has expandable segments. Raises
    UserErrors of recipe and config.
    """
    configs = {name: apply_changes(cfg, {STRATEGY_KEY: name}) for name in (SHARDS, COPIES)}
    strategy = SHARDS
    reason = f"{COPIES} does not go with other settings of the run"
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
    sharded_bytes = sharded.reserved_expandable if expandable else sharded.reserved
    copied_bytes = copied.reserved_expandable if expandable else copied.reserved
    limit = copied.usable * (1 - RESERVED_TOLERANCE)
    sharded_fits = sharded_bytes <= limit
    copied_fits = copied_bytes <= limit
    share = f"of the {format_bytes(copied.usable)} that {where} can give each rank"
    if not sharded_fits and not copied_fits:
        return (
            SHARDS,
            f"it takes least, about {format_bytes(sharded_bytes)} {share}, which is tight",
        )
    if not copied_fits:
        return SHARDS, f"{COPIES} would take about {format_bytes(copied_bytes)} {share}"
    sharded_step = format_duration(sharded.seconds)
    copied_step = format_duration(copied.seconds)
    # Copies gather nothing, and sum the trained gradients once a step: they are often the faster.
    if sharded_fits and sharded.seconds <= copied.seconds:
        return SHARDS, (
            f"a step is estimated at {sharded_step}, with {COPIES} at {copied_step}; about"
            f" {format_bytes(sharded_bytes)} {share}"
        )
    return COPIES, (
        f"a step is estimated at {copied_step}, with {SHARDS} at {sharded_step}; about"
        f" {format_bytes(copied_bytes)} {share}"
    )

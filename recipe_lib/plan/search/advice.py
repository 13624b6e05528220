"""Advise on a run: what each lever does, which to change next, how few ranks and how small a card.

A lever is a change of config keys that trades memory, time or quality (`lever_table.py`). `tune
plan --advice` estimates the run with each lever alone (`try_levers`, `advise`) and finds the fewest
ranks that fit (`add_fewest_ranks`). Every plan names the lever to change next, without a trial
(`name_next_lever`). `choose_strategy` decides between FSDP and DDP for `parallel.strategy: auto`.
"""

import bisect
import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import MODEL_DIMS, compute_micro_batches, count_same_batch_ranks
from recipe_lib.config.precision import find_capability_faults
from recipe_lib.errors import UserError
from recipe_lib.plan.build_plan import PlanSettings, make_plan, simulate_rank
from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, Advice, Plan
from recipe_lib.plan.search.lever_table import (
    LENGTH_KEY,
    MICRO_BATCHES_KEY,
    PACKING_KEY,
    RANKS_KEY,
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

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"  # as typed before a command
# Strategies, as values of `parallel.strategy`: sharded parameters, or a copy on each rank.
FSDP = "fsdp"
DDP = "ddp"
MIN_CHANGE = 0.002  # share of the peak or of the seconds; a smaller change counts as none
_MOST_LARGER = 3  # how often the number of ranks is doubled in search of one that fits
# Kinds of memory that do not grow with the batch size.
_FIXED = ("parameters", "gradients", "optimizer", "gathered", "communication")


Tried = tuple[Lever, Estimate]  # a lever, and the estimate of the run with it


@dataclass(frozen=True)
class Trial:
    """A lever, with the config and the settings that have its changes."""

    lever: Lever
    cfg: Any
    settings: PlanSettings


def try_levers(
    recipe_class: type, cfg: Any, settings: PlanSettings
) -> tuple[Estimate | None, list[Tried]]:
    """Return the estimate of the run as it is (None: it cannot be estimated) and with each lever.

    Levers that cannot be estimated are left out. Call this before the run's own plan is made: once
    this process has simulated anything, it cannot be forked, and the trials run one by one.
    """
    trials = [Trial(Lever(), cfg, settings)]  # the first without changes
    for lever in list_levers(cfg, settings):
        # The number of ranks is an option of the launcher, no key of the config.
        changes = {key: value for key, value in lever.changes.items() if key != RANKS_KEY}
        changed_cfg = apply_changes(cfg, changes)
        if changed_cfg is not None:
            changed_settings = _apply_to_settings(settings, lever.changes, changed_cfg)
            trials.append(Trial(lever, changed_cfg, changed_settings))
    base, *estimates = run_in_processes(
        lambda trial: try_estimate(recipe_class, trial.cfg, trial.settings),
        trials,
        "trying levers",
    )
    tried = zip(trials[1:], estimates, strict=True)
    return base, [(trial.lever, estimate) for trial, estimate in tried if estimate]


def _apply_to_settings(settings: PlanSettings, changes: Changes, cfg: Any) -> PlanSettings:
    # `pack` is the mean number of documents in a sequence: of another length it has more or fewer;
    # packed for the first time, as many as its documents' median length allows.
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
    """Return a row of advice for each useful lever, the most useful first.

    Levers with which the run fits come first. Among them, those that make a fitting run faster or
    make room for a long sequence lead, by seconds; the others follow by the bytes that they save.
    A lever that saves neither bytes nor seconds is left out, unless it `is_always_shown`.

    Args:
        plan: of the run as it is.
        base: the estimate of the run as it is; None: there is none, and no lever is compared.
        tried: as `try_levers` returns them. Bytes are of the active peak, off by 0.5 % of it at
            most; whether the run fits with a lever is an estimate, some percent off.
    """
    rank = plan.heaviest
    # (sort key, advice). Sort key: (does not fit, is sorted by bytes, change in seconds or bytes).
    ranked: list[tuple[tuple[bool, bool, float], Advice]] = []
    bytes_change = rank.reserved_expandable - rank.reserved
    if bytes_change < -MIN_CHANGE * rank.reserved:
        fits = rank.reserved_expandable <= plan.device.usable
        row = Advice(
            override=EXPANDABLE,
            bytes=bytes_change,
            seconds=0.0,
            fits=fits,
            note="an environment variable; less reserved memory lies idle",
        )
        ranked.append(((not fits, True, bytes_change), row))
    for lever, estimate in tried if base is not None else []:
        assert base is not None
        bytes_change = estimate.active - base.active
        seconds_change = estimate.seconds - base.seconds
        fits = _is_fitting(plan, base, estimate)
        # With other sequences a step does other work: its seconds cannot be compared.
        is_timed = not {LENGTH_KEY, PACKING_KEY} & set(lever.changes)
        is_faster = (
            is_timed
            and fits
            and plan.verdict != DOES_NOT_FIT
            and seconds_change < -MIN_CHANGE * base.seconds
        )
        if not (is_faster or lever.is_always_shown or bytes_change < -MIN_CHANGE * base.active):
            continue
        row = Advice(
            override=format_overrides(lever.changes).replace(f"{RANKS_KEY}=", f"{RANKS_KEY} "),
            bytes=bytes_change,
            seconds=seconds_change if is_timed else None,
            fits=fits,
            note="; ".join(filter(None, [lever.note, *_describe_traffic(lever, estimate, base)])),
        )
        by_time = is_faster or (lever.shows_traffic and fits)
        ranked.append(((not fits, not by_time, seconds_change if by_time else bytes_change), row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _describe_traffic(lever: Lever, estimate: Estimate, base: Estimate) -> list[str]:
    """Return texts on what a run with a lever sends and copies, and on its host memory.

    estimate: with the lever. base: without.
    """
    texts = []
    if lever.shows_traffic:
        texts.append(
            f"sends {format_bytes(estimate.sent)} a step (without it {format_bytes(base.sent)}), to"
            f" and from the host {format_bytes(estimate.copied)} ({format_bytes(base.copied)})"
        )
    if estimate.host > base.host + MIN_CHANGE * base.active:
        texts.append(f"{format_bytes(estimate.host)} of host memory")
    return texts


def _is_fitting(plan: Plan, base: Estimate, estimate: Estimate) -> bool:
    """Return True if the run with a lever fits with expandable segments.

    Its steps are taken to need the plan's peak plus the change that the lever makes. Other phases
    are taken to need as much beyond what is held between steps as in the plan.

    base: estimate without the lever. estimate: with it.
    """
    peaks = plan.heaviest.peaks
    step_bytes = [peak.reserved_expandable for peak in peaks if peak.phase in (FIRST, STEADY)]
    other_peaks = [peak for peak in peaks if peak.phase not in (FIRST, STEADY)]
    # Estimates lack what loading and the first step leave reserved: only their difference counts.
    step_peak = max(step_bytes, default=0) + estimate.reserved_expandable - base.reserved_expandable
    # Bytes of the other phases beyond those held between steps, which the lever may change.
    extra_bytes = max([0, *(peak.active - base.held for peak in other_peaks)])
    return max(step_peak, estimate.held + extra_bytes) <= estimate.usable


def name_next_lever(plan: Plan, cfg: Any, settings: PlanSettings) -> str:
    """Return a text on what to change next; empty where nothing is known to help.

    For a run that does not fit, the lever for the kind of memory that takes the most at the plan's
    peak. For one that fits, a larger batch if there is room for twice the memory that grows with
    it, else a lever that makes room. cfg: the config that was planned.
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
    """Return a text that names a larger batch_size; empty where the plan has no room for one.

    With gradient accumulation, micro-batches become fewer so that a step keeps its sequences.
    """
    kinds = _sum_kinds(plan)
    reserved = compute_planned_reserved(plan)
    growing_bytes = reserved - sum(kinds[kind] for kind in _FIXED)
    free_bytes = int(plan.device.usable * (1 - RESERVED_TOLERANCE)) - reserved
    # A peak in the optimizer's step says little of what a larger batch needs.
    if (
        plan.heaviest.peak.part not in ("forward", "backward", "recompute")
        or growing_bytes <= 0
        or plan.pipeline is not None
    ):
        return ""
    largest_factor = free_bytes // growing_bytes + 1
    if largest_factor < 2:
        return ""
    num_micro_batches = cfg.gradient_accumulation_steps
    # The largest power of two that fits and divides the number of micro-batches.
    factor = math.gcd(1 << largest_factor.bit_length() - 1, num_micro_batches)
    if factor > 1:
        changes: Changes = {
            "batch_size": cfg.batch_size * factor,
            MICRO_BATCHES_KEY: num_micro_batches // factor,
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
        f" and what grows with batch_size takes {format_bytes(growing_bytes)}"
    )


def _name_lever(plan: Plan, cfg: Any, settings: PlanSettings, effect: str) -> str:
    """Return a text with the first lever for the kind of memory that takes the most at the peak.

    Kinds that no lever lowers are passed over. effect: what the text says that the lever does.
    """
    peak_bytes = max(1, plan.heaviest.peak.active)
    levers = list_levers(cfg, settings)
    for kind, num_bytes in _sum_kinds(plan).most_common():
        for lever in levers:
            if num_bytes and kind in lever.lowers and apply_changes(cfg, lever.changes) is not None:
                share_text = (
                    f"{format_bytes(num_bytes)} of {kind}, {num_bytes / peak_bytes:.0%} of the peak"
                )
                not_enough = "; alone it is not enough" if -plan.margin > num_bytes else ""
                return f"{format_overrides(lever.changes)} {effect} ({share_text}){not_enough}"
    return ""


def find_smallest_cards(plan: Plan, cfg: Any) -> list[str]:
    """Return the known cards with the least memory that has room for the plan's peak.

    They are names, such as `rtx4090`; [] for a plan on a CPU, and if no card has room. The peak is
    that of the plan's own device: workspaces of another card's kernels may differ.
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
    """Set a plan's `fewest_ranks`, on which the run fits, and `tried_ranks`.

    Each number of ranks is tried by a whole plan with the same micro-batches.
    """
    any_ranks_cfg = copy.deepcopy(cfg)
    any_ranks_cfg.parallel.data_shard = -1  # as many shards as there are ranks
    tried_ranks: list[int] = []

    def check_ranks(ranks: int) -> bool:
        tried_ranks.append(ranks)
        # outside=None: memory outside of torch depends on the ranks and is estimated anew.
        fewer = replace(settings, ranks=ranks, traced_ranks=(), timed=False, outside=None)
        with phase(f"planning {ranks} rank{'s' if ranks > 1 else ''}", leaves_line=False):
            try:
                return make_plan(recipe_class, any_ranks_cfg, fewer)[0].verdict == FITS
            except UserError:  # the mesh cannot be made of so many ranks
                return False

    plan.fewest_ranks = find_fewest(
        plan.ranks, count_least_ranks(cfg), fits=plan.verdict == FITS, check_ranks=check_ranks
    )
    plan.tried_ranks = sorted(tried_ranks)


def count_least_ranks(cfg: Any) -> int:
    """Return the number of ranks of the smallest mesh with the config's parallelism.

    It has a single FSDP shard, or with DDP a single copy.
    """
    copies = 1 if cfg.parallel.strategy == "ddp" else cfg.parallel.data_replicate
    return int(count_same_batch_ranks(cfg.parallel) * copies)


def find_fewest(
    ranks: int, least: int, fits: bool, check_ranks: Callable[[int], bool]
) -> int | None:
    """Return the fewest ranks of `least`, twice `least` and so on that fit; None: none tried does.

    ranks: the plan's own number. fits: True if the run fits on `ranks`. check_ranks: returns True
    for a number of ranks that it fits on.
    """
    # More ranks never take more memory per rank: a bisection of the smaller numbers finds the
    # fewest, and if `ranks` are too few, only larger numbers are tried.
    rank_counts = [least << power for power in range(32)]  # up to more ranks than any cluster has
    if fits:
        smaller = [number for number in rank_counts if number < ranks]
        return [*smaller, ranks][bisect.bisect_left(smaller, True, key=check_ranks)]
    larger = [number for number in rank_counts if number > ranks][:_MOST_LARGER]
    return next((number for number in larger if check_ranks(number)), None)


def add_alone(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Set `plan.alone`: a step of the full model on one device, without parallelism.

    It takes as long as planning one rank. A run of one rank gets none.
    """
    if settings.ranks == 1:  # the run is that already
        return
    alone_cfg = copy.deepcopy(cfg)
    alone_cfg.batch_size, alone_cfg.gradient_accumulation_steps = compute_micro_batches(cfg)
    sizes = dict.fromkeys(("data_replicate", *MODEL_DIMS), 1)
    alone_cfg.parallel = replace(
        alone_cfg.parallel,
        strategy=FSDP,
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
    """Return (strategy, a line for the log) for a config whose `parallel.strategy` is `auto`.

    Of FSDP and DDP, choose the one with the shorter step that fits the device with room for the
    estimate's error; FSDP if neither fits, or if DDP breaks a rule with other settings.

    cfg: the config as a simulation takes it. expandable: whether the run's allocator has expandable
    segments. Raises UserErrors of the recipe and of rules on config keys.
    """
    configs = {name: apply_changes(cfg, {STRATEGY_KEY: name}) for name in (FSDP, DDP)}
    strategy = FSDP
    reason = f"{DDP} does not go with other settings of the run"
    if configs[DDP] is not None:
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
    """Return (strategy, reason) by the estimates with FSDP and with DDP.

    sharded, copied: with FSDP, with DDP; None: no estimate could be made. expandable: as in
    `choose_strategy`.
    """
    where = f"{settings.ranks} x {settings.hardware.name}"
    if sharded is None or copied is None:
        return FSDP, f"no estimate could be made of both for {where}"
    sharded_bytes = sharded.reserved_expandable if expandable else sharded.reserved
    copied_bytes = copied.reserved_expandable if expandable else copied.reserved
    limit = copied.usable * (1 - RESERVED_TOLERANCE)
    sharded_fits = sharded_bytes <= limit
    copied_fits = copied_bytes <= limit
    share = f"of the {format_bytes(copied.usable)} that {where} can give each rank"
    if not sharded_fits and not copied_fits:
        return (
            FSDP,
            f"it takes least, about {format_bytes(sharded_bytes)} {share}, which is tight",
        )
    if not copied_fits:
        return FSDP, f"{DDP} would take about {format_bytes(copied_bytes)} {share}"
    sharded_step = format_duration(sharded.seconds)
    copied_step = format_duration(copied.seconds)
    # Copies gather nothing, and sum the trained gradients once a step: they are often the faster.
    if sharded_fits and sharded.seconds <= copied.seconds:
        return FSDP, (
            f"a step is estimated at {sharded_step}, with {DDP} at {copied_step}; about"
            f" {format_bytes(sharded_bytes)} {share}"
        )
    return DDP, (
        f"a step is estimated at {copied_step}, with {FSDP} at {sharded_step}; about"
        f" {format_bytes(copied_bytes)} {share}"
    )

"""Which settings a search tries next, on all cores, and which it need not try at all.

A way to share the model between ranks is gone through kind by kind of checkpointing, from the one
that computes least again, with micro-batches from the smallest on. Of all ways the trial that could
be the fastest is next, pipelines last. None is made for what cannot fit or cannot be faster than
the best so far, by `least_bytes`; each such decision is said.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from recipe_lib.config.mesh import (
    SCHEDULES,
    compute_mesh_shape,
    count_fewest_micro_batches,
    count_stages,
)
from recipe_lib.errors import SetupError, UserError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.lever_table import (
    HOST,
    RESHARD_KEY,
    ROUNDING,
    STATES,
    TEACHER,
    TURNS_KEY,
    list_contexts,
    list_levers,
)
from recipe_lib.plan.search.trials import (
    CHECKPOINTING,
    CHECKPOINTING_KEY,
    CONTEXT_KEY,
    OFFLOAD_KEY,
    QUANTIZE_KEY,
    QUANTIZE_TEACHER,
    REDUCE_KEY,
    STATES_KEY,
    STRATEGY_KEY,
    STREAM_KEY,
    TEACHER_KEYS,
    Candidate,
    Changes,
    Estimate,
    apply_changes,
    compute_tolerance,
    compute_usable_bytes,
    count_data_ranks,
    find_differing,
    format_overrides,
    get_value,
    is_long,
    set_checkpointing,
)
from recipe_lib.plan.simulated_world.shape_only_model import count_layers
from recipe_lib.report.phases import Phase
from recipe_lib.units import format_bytes, format_count


def compute_least_bytes(
    cfg: Any, settings: PlanSettings, known: Estimate, known_cfg: Any, like: Estimate | None
) -> int:
    """Return the bytes that `cfg` takes on its heaviest rank at least: those of the average one as
    a backward begins and ends.

    known, known_cfg: what is the same but for how the ranks share the model. like: what has the
    same layers and the same checkpointing; None: kept activations are left out. Each rank of a
    pipeline keeps its part for a micro-batch.
    """
    mesh, before = (compute_mesh_shape(one.parallel, settings.ranks) for one in (cfg, known_cfg))
    parts = mesh["pipeline"] * mesh["data_shard"]
    is_offloaded = cfg.memory.cpu_offload or cfg.memory.stream_layers is True
    held = 0.0 if is_offloaded else known.held * before["pipeline"] * before["data_shard"] / parts
    gathered = 0.0  # and so until the backward, beyond the rank's own part
    if not (
        cfg.parallel.reshard_after_forward or cfg.memory.stream_layers
    ):  # of streamed layers, adapters alone are
        gathered = known.parameters / mesh["pipeline"] - known.parameters / parts
    gradients = 0.0
    once = reduces_once(cfg.parallel)
    if not cfg.memory.optimizer_in_backward and (once or not is_offloaded):
        gradients = known.trained / (mesh["pipeline"] if once else parts)
    kept = (
        0.0
        if like is None
        else like.kept * cfg.batch_size / (cfg.parallel.context * cfg.parallel.pipeline)
    )
    # A backward finds the gradients of the one before it, but for a schedule that may defer those
    # of all weights.
    defers = cfg.parallel.pipeline > 1 and SCHEDULES[cfg.parallel.pipeline_schedule].splits
    earlier_gradients = gradients if cfg.gradient_accumulation_steps > 1 and not defers else 0.0
    return int(held + max(gathered + kept + earlier_gradients, gradients))


# Gives settings to try, takes what came of each: None for those that are left out.
TrialSequence = Generator[Changes, Candidate | None, None]


def make_key(changes: Changes) -> str:
    """The same for the same changes in any order."""
    return format_overrides(dict(sorted(changes.items())))


@dataclass
class SearchState:
    """What a search has tried so far."""

    cfg: Any
    settings: PlanSettings
    # Dotted keys that stay as the config has them.
    fixed: Collection[str]
    # As `side_by_side` gives them.
    submit: Callable[[Any], Future[Any]]
    workers: int
    going: Phase
    # By `key_of` the settings that a trial was made of; None: the recipe or the simulation refuses
    # them.
    tried: dict[str, Candidate | None] = field(default_factory=dict)
    # By `variant_key` the estimate with the least memory.
    leanest: dict[str, Candidate | None] = field(default_factory=dict)
    # Settings that no trial was made of, and why.
    skipped: dict[str, str] = field(default_factory=dict)
    # By `key_of` the candidates with their whole plan.
    plans: dict[str, Candidate] = field(default_factory=dict)
    # The speed that was last said to be the best.
    best_said: float = 0.0
    configs: dict[str, Any] = field(default_factory=dict)

    def config(self, changes: Changes) -> Any:
        """Return the config with changes, made once; None where they do not go together."""
        key = make_key(changes)
        if key not in self.configs:
            self.configs[key] = apply_changes(self.cfg, changes)
        return self.configs[key]

    def size(self, changes: Changes, batch_size: int) -> Changes:
        """Return the changes with micro-batches of that size, unless sizes stay as they are."""
        return (
            changes
            if SIZE_KEYS & set(self.fixed)
            else changes | set_micro_batch(self.cfg, changes, batch_size)
        )

    def fitting(self) -> list[Candidate]:
        """What may fit, fastest first, each once."""
        found = {make_key(one.changes): one for one in self.tried.values() if one is not None}
        left = [
            one for key, one in found.items() if one.may_fit and self.plans.get(key, one).may_fit
        ]
        return sorted(left, key=lambda one: (-one.speed, one.quick.active))

    def plan(self, candidates: Iterable[Candidate]) -> None:
        """Plan candidates in full."""
        for one, future in [(one, self.submit(one)) for one in candidates]:
            self.plans[make_key(one.changes)] = future.result()

    def confirmed(self) -> list[Candidate]:
        """Return what fits by its whole plan, fastest first."""
        return sorted(
            (one for one in self.plans.values() if one.may_fit), key=lambda one: -one.speed
        )

    def text(self, changes: Changes) -> str:
        """What to type for them."""
        return format_overrides(find_differing(self.cfg, changes)) or "as it is"


def make_leanest(trials: SearchState, begun: Changes) -> Changes:
    """One sequence at a time, everything computed again."""
    kind = (
        {} if CHECKPOINTING_KEY in trials.fixed else set_checkpointing(trials.cfg, CHECKPOINTING[0])
    )
    return trials.size(begun | kind, min(list_micro_batch_sizes(trials.cfg, begun), default=1))


def yield_one(changes: Changes) -> TrialSequence:
    """Try settings as they are."""
    yield changes


def yield_micro_batches(trials: SearchState, begun: Changes) -> TrialSequence:
    """For each kind of checkpointing try micro-batches, from the smallest on, until one does not
    fit.

    One that computes more again is of use for larger micro-batches only.
    """
    cfg = trials.cfg
    left = [cfg.batch_size] if SIZE_KEYS & set(trials.fixed) else list_micro_batch_sizes(cfg, begun)
    kinds: Iterable[str] = reversed(CHECKPOINTING)
    if CHECKPOINTING_KEY in trials.fixed:
        kinds = (cfg.memory.activation_checkpointing,)
    for kind in kinds:
        kept = begun | set_checkpointing(cfg, kind)
        if left[-1:] == [count_changed_sequences(cfg, begun)]:
            # All sequences at once have no gradients of others to be added to: they may fit where
            # fewer do not.
            one = yield trials.size(kept, left[-1])
            if one is not None and one.may_fit:
                return
        while left:
            one = yield trials.size(kept, left[0])
            if one is None or not one.may_fit:
                break
            del left[0]


def run_trials(trials: SearchState, ways: Iterable[TrialSequence]) -> None:
    """Go through all ways, with all workers: pipelines last, whose trials take longest and which a
    fast answer rules out; among the others, and among them, the trial that could be the fastest
    first.
    """
    ready: list[tuple[TrialSequence, Changes]] = []
    pending: dict[Future[Candidate | None], tuple[TrialSequence, Changes]] = {}

    def go_on(following: TrialSequence, answer: Candidate | None) -> None:
        with suppress(StopIteration):
            ready.append((following, following.send(answer)))

    for one in ways:
        go_on(one, None)
    while ready or pending:
        while ready and len(pending) < trials.workers:
            ready.sort(key=lambda pair: (PIPELINE_KEY in pair[1], -_bound_speed(trials, pair[1])))
            following, changes = ready.pop(0)
            if make_key(changes) in trials.tried:
                go_on(following, trials.tried[make_key(changes)])
            elif why := _explain_needless(trials, changes):
                skip_trial(trials, changes, why)
                go_on(following, None)
            else:
                pending[trials.submit(changes)] = following, changes
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            following, changes = pending.pop(future)
            trials.tried[make_key(changes)] = future.result()
            _report_trial(trials, changes, future.result())
            go_on(following, future.result())


def _find_alike_estimate(trials: SearchState, cfg: Any) -> Estimate | None:
    """Return of what was tried something with the same kind of checkpointing; not of a pipeline,
    whose ranks have some of the layers each. How frozen weights are rounded makes no difference to
    what is kept and computed.
    """
    for one in trials.tried.values():
        if one is not None and one.quick.least_seconds:
            if get_value(trials.config(one.changes), CHECKPOINTING_KEY) == get_value(
                cfg, CHECKPOINTING_KEY
            ):
                return one.quick
    return None


def _bound_speed(trials: SearchState, changes: Changes) -> float:
    """Return the tokens per second that settings have at most; infinite where nothing like them was
    tried.
    """
    like = _find_alike_estimate(trials, trials.config(changes))
    return float("inf") if like is None else like.tokens / like.least_seconds


def _explain_needless(trials: SearchState, changes: Changes) -> str:
    """Return why no trial of the settings is needed; nothing where one is."""
    best, highest = next(iter(trials.fitting()), None), _bound_speed(trials, changes)
    if best is not None and highest <= best.speed:
        return f"{format_count(highest)} tokens/s at most, no faster than the best so far"
    return explain_too_large(trials, changes)


def explain_too_large(trials: SearchState, changes: Changes) -> str:
    """Return why the settings cannot fit; nothing where they might."""
    cfg = trials.config(changes)
    if cfg is None:
        return "these do not go together"
    known = trials.leanest.get(make_variant_key(changes))
    if known is None:
        return ""
    try:
        known_cfg = trials.config(known.changes)
        least = compute_least_bytes(
            cfg, trials.settings, known.quick, known_cfg, _find_alike_estimate(trials, cfg)
        )
    except UserError:  # ranks that the mesh cannot be made of: the trial says so
        return ""
    usable = compute_usable_bytes(cfg, trials.settings)
    if least <= usable + compute_tolerance(trials.settings):
        return ""
    return f"takes {format_bytes(least)} at least, of {format_bytes(usable)}"


def make_variant_key(changes: Changes) -> str:
    """Of the part of the changes that is no way to share the model, and no micro-batch."""
    names = (HOST_KEY, STREAM_KEY, OFFLOAD_KEY, QUANTIZE_KEY, STATES_KEY, *TEACHER_KEYS)
    return make_key({key: value for key, value in changes.items() if key in names})


def skip_trial(trials: SearchState, changes: Changes, why: str) -> None:
    """Say once why settings are not tried."""
    text = trials.text(changes)
    if text not in trials.skipped:
        trials.skipped[text] = why
        get_logger().info(f"not simulated: {text}: {why}")


def _report_trial(trials: SearchState, changes: Changes, found: Candidate | None) -> None:
    """What came of a trial, and the best so far where it is better."""
    trials.going.advance(1)
    if found is None:
        get_logger().info(f"refused: {trials.text(changes)}")
        return
    fits = "too large" if not found.may_fit else "fits" if found.short <= 0 else "may fit"
    size, speed = (
        format_bytes(found.quick.reserved_expandable),
        f", {format_count(found.speed)} tokens/s",
    )
    get_logger().info(
        f"estimated: {trials.text(found.changes)}: {size}, {fits}{speed if found.speed else ''}"
    )
    best = next(iter(trials.fitting()), None)
    if best is not None and best.speed > trials.best_said:
        trials.best_said = best.speed
        line = f"best so far: {format_count(best.speed)} tokens/s: {trials.text(best.changes)}"
        trials.going.say(line)
        get_logger().info(line)


# What is tried: ways to share a model between ranks, pipelines among them, and micro-batches.

HOST_KEY = "memory.cpu_offload"
# The micro-batch, with as many of them as make up the batch of a step.
SIZE_KEYS = {"batch_size", TURNS_KEY}

PIPELINE_KEY, SCHEDULE_KEY, COUNT_KEY = (
    f"parallel.{name}" for name in ("pipeline", "pipeline_schedule", "pipeline_microbatches")
)
# The schedule with the least memory, and the one with the least waiting that takes as much
# activation memory.
SCHEDULES_TRIED = ("1f1b", "zbv")
# Where ranks cannot read each other's memory, gathering parameters costs more than it does
# elsewhere, and what a pipeline exchanges is little.
LINKS_FOR_PIPELINES = ("pcie_no_p2p",)
MAX_PIPELINE_LENGTHS = 3  # of pipelines, the longest that there can be


def count_sequences(cfg: Any) -> int:
    """Sequences of a step on one data rank."""
    return int(cfg.batch_size * cfg.gradient_accumulation_steps)


def list_groups(
    cfg: Any, settings: PlanSettings, fixed: Collection[str]
) -> Iterator[list[Changes]]:
    """Yield settings to begin with, group by group: a group is only tried if nothing of those
    before it fits.
    """
    stays: Changes = {} if HOST_KEY in fixed else {HOST_KEY: False}
    fixed = {*fixed, OFFLOAD_KEY, STREAM_KEY} if HOST_KEY in fixed else set(fixed)
    resorts: dict[int, list[Changes]] = defaultdict(list)
    for lever in reversed(
        list_levers(apply_changes(cfg, stays) or cfg, settings)
    ):  # of each key the value with the most memory first
        if not fixed & set(lever.changes):
            resorts[lever.resort].append(lever.changes)
    adapters = cfg.trained_adapters
    rounds = adapters is not None and adapters.quantize_base != "none" and QUANTIZE_KEY not in fixed
    yield [stays, *([stays | {QUANTIZE_KEY: "none"}] if rounds else [])]
    if resorts[TEACHER]:
        yield [stays | changes for changes in resorts[TEACHER]]
    for changes in resorts[TEACHER]:
        if QUANTIZE_TEACHER in changes:  # alone it was not enough
            stays = stays | changes
    if resorts[ROUNDING]:
        yield [stays | changes for changes in resorts[ROUNDING]]
    for resort in (STATES, HOST):
        if resorts[resort]:
            yield [
                stays | one | rounding
                for one, rounding in product(resorts[resort], resorts[ROUNDING] or [{}])
            ]


def list_sharings(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    """Yield all ways to copy the model, to keep it whole and to reduce once, least memory first;
    then whole models on every rank, without FSDP. Where sequences are long, then the same with
    ranks that share one.
    """
    yield from _list_sharings_of_config(cfg, ranks, fixed)
    free = (
        CONTEXT_KEY not in fixed
        and not SIZE_KEYS & set(fixed)
        and cfg.parallel.pipeline == 1
        and is_long(cfg)
    )
    for size in list_contexts(cfg, ranks) if free else []:
        other = apply_changes(cfg, {CONTEXT_KEY: size})
        if other is not None:
            yield from (
                one | {CONTEXT_KEY: size} for one in _list_sharings_of_config(other, ranks, fixed)
            )


def _list_sharings_of_config(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    copies = count_data_ranks(cfg, ranks)
    free = STRATEGY_KEY not in fixed
    shared = free and ranks > 1 and cfg.parallel.strategy != "fsdp"
    values: dict[str, Sequence[Any]] = {
        "parallel.data_replicate": _list_copies(cfg, copies),
        RESHARD_KEY: (True, False) if copies > 1 else (cfg.parallel.reshard_after_forward,),
        REDUCE_KEY: ("micro_batch", "step") if copies > 1 else (cfg.parallel.reduce_gradients,),
        "optimizer.implementation": ("auto",),
    }
    free_keys = [key for key in values if key not in fixed and get_value(cfg, key) is not None]
    for combination in product(*(values[key] for key in free_keys)):
        one = ({STRATEGY_KEY: "fsdp"} if shared else {}) | dict(
            zip(free_keys, combination, strict=True)
        )
        alone = (
            one.get("parallel.data_replicate") == copies != 1
        )  # each rank has a copy: there is nothing to gather
        kept = not one.get(RESHARD_KEY, True)
        # Whole gradients alone save as much as weights kept from forward to backward do, and take
        # as much.
        halfway = one.get(REDUCE_KEY) == "step" and not kept and RESHARD_KEY not in fixed
        if not (alone and kept) and not halfway:
            yield one
    if free and copies > 1:
        own = "optimizer.implementation"
        again = (
            {REDUCE_KEY: "micro_batch"} if cfg.parallel.reduce_gradients != "micro_batch" else {}
        )  # has no effect
        yield {STRATEGY_KEY: "ddp"} | again | ({} if own in fixed else {own: "auto"})


def list_pipelines(
    cfg: Any, settings: PlanSettings, fixed: Collection[str], *, splits: bool = True
) -> Iterator[Changes]:
    """Ways to divide the layers between ranks instead; none where the link or what is fixed speaks
    against it.

    The ranks that a pipeline leaves share or copy its stages. splits: whether backward may be cut
    in two.
    """
    if (
        settings.hardware.link.kind not in LINKS_FOR_PIPELINES
        or PIPELINE_KEY in fixed
        or SIZE_KEYS & set(fixed)
    ):
        return  # with fewer data ranks, a step keeps its global batch by more sequences on each
    groups = settings.ranks // (cfg.parallel.tensor * cfg.parallel.context)
    schedules = SCHEDULES_TRIED if SCHEDULE_KEY not in fixed else (cfg.parallel.pipeline_schedule,)
    lengths = [size for size in range(2, min(groups, count_layers(cfg)) + 1) if groups % size == 0]
    for size in lengths[-MAX_PIPELINE_LENGTHS:]:
        for schedule in (one for one in schedules if splits or not SCHEDULES[one].splits):
            begun: Changes = {PIPELINE_KEY: size, SCHEDULE_KEY: schedule}
            if (
                cfg.parallel.strategy != "fsdp" and STRATEGY_KEY not in fixed
            ):  # copies are a number of FSDP's here
                begun[STRATEGY_KEY] = "fsdp"
            if cfg.parallel.pipeline_microbatches is not None:  # meant for another pipeline
                begun[COUNT_KEY] = None
            left = groups // size
            copies = [1, left] if left > 1 and cfg.parallel.data_shard == -1 else [1]
            if "parallel.data_replicate" in fixed:
                copies = [cfg.parallel.data_replicate]
            # Ranks with different batches may keep nothing whole through a step, or gradients and
            # weights.
            kept_whole: list[Changes] = [{}]
            if left > 1 and not {REDUCE_KEY, RESHARD_KEY} & set(fixed):
                kept_whole.append({REDUCE_KEY: "step", RESHARD_KEY: False})
            for number, whole in product(copies, kept_whole):
                one = begun | {"parallel.data_replicate": number} | whole
                if _is_possible(cfg, settings, one):
                    yield one


def _is_possible(cfg: Any, settings: PlanSettings, changes: Changes) -> bool:
    """Whether ranks, layers and the batch of a step can be divided so."""
    if count_sequences(cfg) * changes[
        PIPELINE_KEY
    ] % cfg.parallel.pipeline or not list_micro_batch_sizes(cfg, changes):
        return False
    other = apply_changes(cfg, changes | set_micro_batch(cfg, changes, 1))
    if other is None or count_stages(other.parallel) > count_layers(other):
        return False
    try:
        compute_mesh_shape(other.parallel, settings.ranks)
    except SetupError:
        return False
    return True


def count_changed_sequences(cfg: Any, changes: Changes) -> int:
    """Sequences of a step on one data rank, so that the global batch stays as it is."""
    times = int(changes.get(PIPELINE_KEY, cfg.parallel.pipeline)) * int(
        changes.get(CONTEXT_KEY, cfg.parallel.context)
    )
    return count_sequences(cfg) * times // int(cfg.parallel.pipeline * cfg.parallel.context)


def set_micro_batch(cfg: Any, changes: Changes, batch_size: int) -> Changes:
    """Micro-batches of that size, as many as make up the global batch."""
    return {
        "batch_size": batch_size,
        TURNS_KEY: count_changed_sequences(cfg, changes) // batch_size,
    }


def list_micro_batch_sizes(cfg: Any, changes: Changes) -> list[int]:
    """Sequences that a micro-batch can have, fewest first."""
    whole = count_changed_sequences(cfg, changes)
    found = [size for size in range(1, whole + 1) if whole % size == 0]
    if changes.get(PIPELINE_KEY, cfg.parallel.pipeline) == 1:
        once = changes.get(REDUCE_KEY, cfg.parallel.reduce_gradients) == "step"
        return (
            found[:-1] if once and changes.get(STRATEGY_KEY) != "ddp" else found
        )  # of one, every reduction is once
    other = apply_changes(cfg, changes | set_micro_batch(cfg, changes, 1))
    fewest = whole + 1 if other is None else count_fewest_micro_batches(other.parallel)
    return [size for size in found if whole // size >= fewest]


def _list_copies(cfg: Any, ranks: int) -> list[int]:
    """Numbers of copies of the model: few, and one for each rank; as the config says where it fixes
    the shards.
    """
    if cfg.parallel.data_shard != -1:
        return [cfg.parallel.data_replicate]
    return sorted(
        {copies for copies in (1, 2, ranks // 8, ranks) if copies and ranks % copies == 0}
    )

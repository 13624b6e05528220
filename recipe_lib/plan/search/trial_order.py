"""Choose which settings a search for the fastest tries next, and which need no trial at all.

`fastest_settings.py` calls `list_groups`, `list_sharings` and `list_pipelines` for settings, as
`Changes` (dotted config key -> value), and `run_trials`, which simulates them in worker processes.
A candidate is settings with their simulated memory and time. A lever is a change that trades
memory, time and quality. Settings that cannot fit or be the fastest get no trial, but a log line.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeGuard

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
    MICRO_BATCHES_KEY,
    RESHARD_KEY,
    SearchGroup,
    list_contexts,
    list_levers,
)
from recipe_lib.plan.search.trials import (
    CHECKPOINTING,
    CHECKPOINTING_KEY,
    CONTEXT_KEY,
    HOST_KEY,
    OFFLOAD_KEY,
    QUANTIZE_KEY,
    REDUCE_KEY,
    STRATEGY_KEY,
    STREAM_KEY,
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
    make_key,
    make_variant_key,
    set_checkpointing,
)
from recipe_lib.plan.simulated_world.shape_only_model import count_layers
from recipe_lib.report.phases import Phase
from recipe_lib.units import format_bytes, format_count

# Sequences of a micro-batch, and micro-batches of a step: they change together, so that a step
# keeps its batch.
SIZE_KEYS = {"batch_size", MICRO_BATCHES_KEY}
PIPELINE_KEY = "parallel.pipeline"
SCHEDULE_KEY = "parallel.pipeline_schedule"
COPIES_KEY = "parallel.data_replicate"
CHUNKS_KEY = "memory.loss_chunks"
LEAST_GAIN = 0.005  # share of speed for which settings are tried with half as many chunks again
# The schedule with the least memory, and the one with the least waiting that takes as much
# activation memory.
SCHEDULES_TRIED = ("1f1b", "zbv")
# Kinds of links (`Link.kind`) for which pipelines are tried: where ranks cannot read each other's
# memory, gathering parameters is slow, and a pipeline exchanges little.
LINKS_FOR_PIPELINES = ("pcie_no_p2p",)
MAX_PIPELINE_LENGTHS = 3  # numbers of pipeline ranks that are tried: the largest possible ones

# A generator that yields settings to try, and is sent the candidate of each trial: None where it
# was refused or left out.
TrialSequence = Generator[Changes, Candidate | None, None]


@dataclass
class SearchState:
    """The state of a search: what it has tried so far, and where it submits its next trials."""

    # The config that the search begins with.
    cfg: Any
    # Device and ranks that are planned for.
    settings: PlanSettings
    # Dotted keys that stay as the config has them.
    fixed: Collection[str]
    # Starts a trial of `Changes`, or a whole plan (all phases) of a `Candidate`, in a worker. The
    # future's result is a Candidate; of a trial None if it was refused.
    submit: Callable[[Any], Future[Any]]
    # Number of trials that run at a time.
    workers: int
    # Counts trials on the terminal.
    progress: Phase
    # By `make_key` the candidate of each trial; None: the recipe or the simulation refuses it.
    tried: dict[str, Candidate | None] = field(default_factory=dict)
    # By `make_variant_key` the candidate of `make_leanest`; no entry: not tried, or refused.
    leanest_by_variant: dict[str, Candidate | None] = field(default_factory=dict)
    # Settings that no trial was made of, as typed on a command line -> the reason.
    skipped: dict[str, str] = field(default_factory=dict)
    # By `make_key` the candidates with the figures of their whole plan.
    plans: dict[str, Candidate] = field(default_factory=dict)
    # The highest speed that was logged, tokens per second.
    best_reported: float = 0.0
    # By `make_key` the changed configs; None where the changes do not go together.
    configs: dict[str, Any] = field(default_factory=dict)

    def get_config(self, changes: Changes) -> Any:
        key = make_key(changes)
        # A changed config is checked against all rules of the schema, which takes a while.
        if key not in self.configs:
            self.configs[key] = apply_changes(self.cfg, changes)
        return self.configs[key]

    def resize(self, changes: Changes, batch_size: int) -> Changes:
        """Return the changes with micro-batches of that size, unless their size is fixed."""
        if SIZE_KEYS & set(self.fixed):
            return changes
        return changes | set_micro_batch(self.cfg, changes, batch_size)

    def may_fit(self, candidate: Candidate | None) -> TypeGuard[Candidate]:
        """Return True if settings may fit: by their estimate, and by their whole plan if made."""
        return (
            candidate is not None
            and candidate.may_fit
            and self.plans.get(make_key(candidate.changes), candidate).may_fit
        )

    def list_fitting(self) -> list[Candidate]:
        # By the candidates' own keys, not those of `tried`: a trial may add changes to what it was
        # asked for (`OUTSIDE_LAYERS`), so that two trials end with one candidate.
        candidates = {make_key(trial.changes): trial for trial in self.tried.values() if trial}
        fitting = filter(self.may_fit, candidates.values())
        return sorted(fitting, key=lambda candidate: (-candidate.speed, candidate.estimate.active))

    def plan_in_full(self, candidates: Iterable[Candidate]) -> None:
        # All are submitted before the first is waited for.
        submitted = [(candidate, self.submit(candidate)) for candidate in candidates]
        self.plans |= {
            make_key(candidate.changes): future.result() for candidate, future in submitted
        }

    def list_confirmed(self) -> list[Candidate]:
        return sorted(
            (candidate for candidate in self.plans.values() if candidate.may_fit),
            key=lambda candidate: -candidate.speed,
        )

    def format_changes(self, changes: Changes) -> str:
        return format_overrides(find_differing(self.cfg, changes)) or "as it is"


def run_trials(state: SearchState, sequences: Iterable[TrialSequence]) -> None:
    """Run all sequences of trials, `state.workers` trials at a time, and fill `state.tried`.

    Pipelines are tried last: their trials take longest, and a fast candidate without one may make
    them needless. Otherwise the trial that could turn out the fastest is next.
    """
    # Each sequence with the settings that it wants tried next: not started yet, and running.
    ready: list[tuple[TrialSequence, Changes]] = []
    pending: dict[Future[Candidate | None], tuple[TrialSequence, Changes]] = {}

    def request_next(sequence: TrialSequence, candidate: Candidate | None) -> None:
        with suppress(StopIteration):  # the sequence has no more settings
            ready.append((sequence, sequence.send(candidate)))

    for sequence in sequences:
        request_next(sequence, None)
    while ready or pending:
        while ready and len(pending) < state.workers:
            # Sorted anew each time: a finished trial may say more about how fast others can be.
            ready.sort(key=lambda pair: (PIPELINE_KEY in pair[1], -_bound_speed(state, pair[1])))
            sequence, changes = ready.pop(0)
            if make_key(changes) in state.tried:
                request_next(sequence, state.tried[make_key(changes)])
            elif reason := _explain_needless(state, changes):
                skip_trial(state, changes, reason)
                request_next(sequence, None)
            else:
                pending[state.submit(changes)] = (sequence, changes)
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            sequence, changes = pending.pop(future)
            candidate = future.result()
            state.tried[make_key(changes)] = candidate
            _report_trial(state, changes, candidate)
            request_next(sequence, candidate)


def _report_trial(state: SearchState, changes: Changes, candidate: Candidate | None) -> None:
    state.progress.advance(1)
    if candidate is None:
        get_logger().info(f"refused: {state.format_changes(changes)}")
        return
    outcome = "fits" if candidate.shortfall <= 0 else "may fit"
    if not candidate.may_fit:
        outcome = "too large"
    speed = f", {format_count(candidate.speed)} tokens/s" if candidate.speed else ""
    get_logger().info(
        f"estimated: {state.format_changes(candidate.changes)}:"
        f" {format_bytes(candidate.estimate.reserved_expandable)}, {outcome}{speed}"
    )
    best = next(iter(state.list_fitting()), None)
    if best is not None and best.speed > state.best_reported:
        state.best_reported = best.speed
        changes_typed = state.format_changes(best.changes)
        state.progress.text = f"best so far: {format_count(best.speed)} tokens/s: {changes_typed}"
        get_logger().info(state.progress.text)


def skip_trial(state: SearchState, changes: Changes, reason: str) -> None:
    """Log, once, why settings are not tried."""
    text = state.format_changes(changes)
    if text not in state.skipped:
        state.skipped[text] = reason
        get_logger().info(f"not simulated: {text}: {reason}")


# Lower bounds: what settings take at least, by trials of settings like them.


def compute_least_bytes(
    cfg: Any, settings: PlanSettings, known: Estimate, known_cfg: Any, alike: Estimate | None
) -> int:
    """Return a lower bound of the bytes that `cfg` takes on its heaviest rank.

    The bound is what the average rank holds when a backward begins or when it ends, whichever is
    more: states and gathered weights and activations, or states and gradients.

    Args:
        cfg: a config that was not tried.
        settings: device and ranks that are planned for.
        known: the estimate of a config that differs only in how the ranks share the model.
        known_cfg: the config of `known`.
        alike: the estimate of a config with the same layers and the same checkpointing; None:
            activations are left out of the bound.
    """
    mesh = compute_mesh_shape(cfg.parallel, settings.ranks)
    known_mesh = compute_mesh_shape(known_cfg.parallel, settings.ranks)
    num_shards = mesh["pipeline"] * mesh["data_shard"]
    known_num_shards = known_mesh["pipeline"] * known_mesh["data_shard"]
    is_offloaded = cfg.memory.cpu_offload or cfg.memory.stream_layers is True
    state_bytes = 0.0 if is_offloaded else known.held * known_num_shards / num_shards
    # Weights that stay gathered from forward to backward, without the rank's own shard, which
    # `state_bytes` has. Of streamed layers only adapters stay.
    gathered_bytes = 0.0
    if not (cfg.parallel.reshard_after_forward or cfg.memory.stream_layers):
        gathered_bytes = known.parameters / mesh["pipeline"] - known.parameters / num_shards
    gradient_bytes = 0.0
    reduces_at_end = reduces_once(cfg.parallel)
    if not cfg.memory.optimizer_in_backward and (reduces_at_end or not is_offloaded):
        gradient_bytes = known.trained / (mesh["pipeline"] if reduces_at_end else num_shards)
    kept_bytes = alike.kept if alike is not None else 0.0
    # Each rank of a pipeline keeps its part of the layers.
    activation_bytes = kept_bytes * cfg.batch_size / (cfg.parallel.context * cfg.parallel.pipeline)
    # From the second micro-batch on, a backward begins with the gradients of earlier ones in
    # memory; a schedule that splits backward may defer all gradients of weights.
    defers = cfg.parallel.pipeline > 1 and SCHEDULES[cfg.parallel.pipeline_schedule].splits
    accumulates = cfg.gradient_accumulation_steps > 1 and not defers
    earlier_gradient_bytes = gradient_bytes if accumulates else 0.0
    return int(
        state_bytes
        + max(gathered_bytes + activation_bytes + earlier_gradient_bytes, gradient_bytes)
    )


def _find_alike_estimate(state: SearchState, cfg: Any) -> Estimate | None:
    """Return the estimate of a trial with the same kind of checkpointing; None: there is none.

    The trial may share the model or quantize frozen weights in another way: the activations of a
    sequence and the operations of a step are the same.
    """
    kind = get_value(cfg, CHECKPOINTING_KEY)
    for candidate in state.tried.values():
        # `least_seconds` is 0 in a pipeline's estimate, whose ranks have some of the layers each.
        if (
            candidate is not None
            and candidate.estimate.least_seconds
            and get_value(state.get_config(candidate.changes), CHECKPOINTING_KEY) == kind
        ):
            return candidate.estimate
    return None


def _bound_speed(state: SearchState, changes: Changes) -> float:
    """Return an upper bound of tokens per second: those of matmuls and attention alone.

    It is infinite without a trial to derive it from.
    """
    alike = _find_alike_estimate(state, state.get_config(changes))
    return float("inf") if alike is None else alike.tokens / alike.least_seconds


def _explain_needless(state: SearchState, changes: Changes) -> str:
    """Return why settings need no trial: too slow or too large; empty where they need one."""
    best = next(iter(state.list_fitting()), None)
    speed_bound = _bound_speed(state, changes)
    if best is not None and speed_bound <= best.speed:
        return f"{format_count(speed_bound)} tokens/s at most, no faster than the best so far"
    return explain_too_large(state, changes)


def explain_too_large(state: SearchState, changes: Changes) -> str:
    """Return why the settings cannot fit; empty where they might, or where no bound is known."""
    cfg = state.get_config(changes)
    if cfg is None:
        return "these do not go together"
    known = state.leanest_by_variant.get(make_variant_key(cfg, changes))
    if known is None:  # no trial of such states yet
        return ""
    alike = _find_alike_estimate(state, cfg)
    try:
        least_bytes = compute_least_bytes(
            cfg,
            state.settings,
            known=known.estimate,
            known_cfg=state.get_config(known.changes),
            alike=alike,
        )
    except UserError:  # no mesh can be made of these ranks: the trial reports it
        return ""
    usable_bytes = compute_usable_bytes(cfg, state.settings)
    if least_bytes <= usable_bytes + compute_tolerance(state.settings):
        return ""
    return f"takes {format_bytes(least_bytes)} at least, of {format_bytes(usable_bytes)}"


# Sequences of trials: generators of settings, which may depend on how earlier ones turned out.


def make_leanest(state: SearchState, base: Changes) -> Changes:
    """Return `base` with the least memory: the smallest micro-batch, all activations recomputed."""
    checkpointing = (
        {} if CHECKPOINTING_KEY in state.fixed else set_checkpointing(state.cfg, CHECKPOINTING[0])
    )
    return state.resize(
        base | checkpointing, min(list_micro_batch_sizes(state.cfg, base), default=1)
    )


def yield_one(changes: Changes) -> TrialSequence:
    """Yield settings as they are: a sequence of one trial."""
    yield changes


def yield_micro_batches(state: SearchState, base: Changes) -> TrialSequence:
    """Yield `base` with each kind of checkpointing and the largest micro-batches that fit with it.

    Kinds that recompute least are first. One that recomputes more is of use only for larger
    micro-batches than fit with those before it. Without a pipeline the largest is first, as the
    bounds know well what activations take, and the first that fits is taken for the fastest of its
    kind: `yield_smaller_micro_batch` and the config as it is are tried against it. In a pipeline,
    whose fewer micro-batches wait more, sizes grow until they are slower or do not fit.
    Once settings are planned in full, their plan decides: a sequence that is made again goes on
    where their estimate had ended it.
    """
    cfg = state.cfg
    sizes = [cfg.batch_size] if SIZE_KEYS & set(state.fixed) else list_micro_batch_sizes(cfg, base)
    kinds = (
        [cfg.memory.activation_checkpointing]
        if CHECKPOINTING_KEY in state.fixed
        else CHECKPOINTING[::-1]
    )
    is_pipeline = base.get(PIPELINE_KEY, cfg.parallel.pipeline) > 1
    for kind in kinds:
        changes = base | set_checkpointing(cfg, kind)
        speed = 0.0
        for size in sizes if is_pipeline else sizes[::-1]:
            candidate = yield state.resize(changes, size)
            if state.may_fit(candidate):
                sizes = [larger for larger in sizes if larger > size]
                if not is_pipeline:
                    break
                if candidate.speed < speed:
                    return
                speed = candidate.speed
            elif is_pipeline:
                break


def yield_fewer_chunks(state: SearchState, candidate: Candidate) -> TrialSequence:
    """Yield settings with half as many chunks of the loss, again while that makes them faster.

    Each chunk reads the whole output projection: a config's chunks are right for its own
    micro-batch, and too many for a smaller one. candidate: with the config's own chunks; for others
    nothing is yielded.
    """
    chunks = state.get_config(candidate.changes).memory.loss_chunks
    if CHUNKS_KEY in (*state.fixed, *candidate.changes):
        return
    while chunks > 1:
        chunks //= 2
        halved = yield candidate.changes | {CHUNKS_KEY: chunks}
        if halved is None or not state.may_fit(halved):
            break
        if halved.speed < candidate.speed * (1 + LEAST_GAIN):
            break
        candidate = halved


def yield_smaller_micro_batch(state: SearchState, candidate: Candidate) -> TrialSequence:
    """Yield settings with the next smaller micro-batch, which has more room and may be faster."""
    changes = candidate.changes
    size = changes.get("batch_size", state.cfg.batch_size)
    sizes = [one for one in list_micro_batch_sizes(state.cfg, changes) if one < size]
    if sizes:
        yield state.resize(changes, sizes[-1])


def count_sequences(cfg: Any) -> int:
    """Return the sequences of a step on one data rank."""
    return int(cfg.batch_size * cfg.gradient_accumulation_steps)


def count_changed_sequences(cfg: Any, changes: Changes) -> int:
    """Return the sequences of a step on one data rank, if the global batch stays as it is.

    changes: of the number of ranks that share a sequence, in a pipeline or by context parallelism.
    """
    # Where more ranks share a sequence there are fewer data ranks, with more sequences each.
    num_sharing_ranks = int(changes.get(PIPELINE_KEY, cfg.parallel.pipeline)) * int(
        changes.get(CONTEXT_KEY, cfg.parallel.context)
    )
    return (
        count_sequences(cfg)
        * num_sharing_ranks
        // int(cfg.parallel.pipeline * cfg.parallel.context)
    )


def set_micro_batch(cfg: Any, changes: Changes, batch_size: int) -> Changes:
    """Return the changes for micro-batches of that size, as many as make up the global batch.

    changes: those made otherwise.
    """
    sequences = count_changed_sequences(cfg, changes)
    return {"batch_size": batch_size, MICRO_BATCHES_KEY: sequences // batch_size}


def list_micro_batch_sizes(cfg: Any, changes: Changes) -> list[int]:
    """Return the numbers of sequences that a micro-batch can have, fewest first.

    Return [] if the changes do not go together.
    """
    num_sequences = count_changed_sequences(cfg, changes)
    sizes = [size for size in range(1, num_sequences + 1) if num_sequences % size == 0]
    if changes.get(PIPELINE_KEY, cfg.parallel.pipeline) == 1:
        reduces_at_end = changes.get(REDUCE_KEY, cfg.parallel.reduce_gradients) == "step"
        # With one micro-batch, both values of `reduce_gradients` reduce once: only one is tried.
        return sizes[:-1] if reduces_at_end and changes.get(STRATEGY_KEY) != "ddp" else sizes
    changed_cfg = apply_changes(cfg, changes | set_micro_batch(cfg, changes, 1))
    if changed_cfg is None:
        return []
    fewest_micro_batches = count_fewest_micro_batches(changed_cfg.parallel)
    return [size for size in sizes if num_sequences // size >= fewest_micro_batches]


# What is tried: variants, group by group, and ways to share a model between ranks.


def list_groups(
    cfg: Any, settings: PlanSettings, fixed: Collection[str]
) -> Iterator[list[Changes]]:
    """Yield groups of changes to begin with; a group is tried only if none of those before fits.

    The cheapest group is first: the config as it is, then less memory for other models (a teacher),
    fewer bits for frozen weights, less memory for optimizer states, host memory.
    """
    # Begin without offload, unless the user has fixed it; then its other kinds are fixed as well.
    base: Changes = {} if HOST_KEY in fixed else {HOST_KEY: False}
    fixed = {*fixed, OFFLOAD_KEY, STREAM_KEY} if HOST_KEY in fixed else set(fixed)
    # Group -> the changes of its levers.
    changes_by_group: dict[SearchGroup | None, list[Changes]] = defaultdict(list)
    # Reversed: of each key the value with the most memory first.
    for lever in reversed(list_levers(apply_changes(cfg, base) or cfg, settings)):
        if not fixed & set(lever.changes):
            changes_by_group[lever.search_group].append(lever.changes)
    adapters = cfg.trained_adapters
    is_quantized = (
        adapters is not None and adapters.quantize_base != "none" and QUANTIZE_KEY not in fixed
    )
    # Quantized weights save memory and cost time: the run is tried without as well.
    yield [base, base | {QUANTIZE_KEY: "none"}] if is_quantized else [base]
    if changes_by_group[SearchGroup.OTHER_MODEL]:
        yield [base | changes for changes in changes_by_group[SearchGroup.OTHER_MODEL]]
    for changes in changes_by_group[SearchGroup.OTHER_MODEL]:
        ((key, _),) = changes.items()  # such a lever changes one key
        # A key of several values is one of bits: the fewest, which come last, stay in all groups
        # that follow, as they were not enough alone.
        if len(cfg.other_model_levers[key]) > 1:
            base = base | changes
    quantizing = changes_by_group[SearchGroup.FEWER_BITS]
    if quantizing:
        yield [base | changes for changes in quantizing]
    for group in (SearchGroup.OPTIMIZER_STATES, SearchGroup.HOST_MEMORY):
        if changes_by_group[group]:
            yield [
                base | changes | quantized
                for changes, quantized in product(changes_by_group[group], quantizing or [{}])
            ]


def list_sharings(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    """Yield the ways to share the model between ranks without a pipeline, least memory first.

    Those of FSDP are first: with copies of the model, weights that stay gathered between forward
    and backward, and gradients reduced once a step. Then DDP. Where sequences are long, all of them
    follow again for each size of context parallelism.
    """
    yield from _list_sharings_of_config(cfg, ranks, fixed)
    is_free = (
        CONTEXT_KEY not in fixed
        and not SIZE_KEYS & set(fixed)
        and cfg.parallel.pipeline == 1
        and is_long(cfg)
    )
    for size in list_contexts(cfg, ranks) if is_free else []:
        changed_cfg = apply_changes(cfg, {CONTEXT_KEY: size})
        if changed_cfg is not None:
            for sharing in _list_sharings_of_config(changed_cfg, ranks, fixed):
                yield sharing | {CONTEXT_KEY: size}


def _list_sharings_of_config(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    """Yield the ways of FSDP and then DDP, with the context parallelism of the config."""
    data_ranks = count_data_ranks(cfg, ranks)
    is_free = STRATEGY_KEY not in fixed  # the strategy may be changed
    base: Changes = {}
    if is_free and ranks > 1 and cfg.parallel.strategy != "fsdp":
        base = {STRATEGY_KEY: "fsdp"}
    implementation_key = "optimizer.implementation"
    # Key -> the values that are tried, least memory first.
    values: dict[str, Sequence[Any]] = {
        COPIES_KEY: _list_copies(cfg, data_ranks),
        RESHARD_KEY: (True, False) if data_ranks > 1 else (cfg.parallel.reshard_after_forward,),
        REDUCE_KEY: ("micro_batch", "step") if data_ranks > 1 else (cfg.parallel.reduce_gradients,),
        implementation_key: ("auto",),
    }
    free_keys = [key for key in values if key not in fixed and get_value(cfg, key) is not None]
    for combination in product(*(values[key] for key in free_keys)):
        sharing = base | dict(zip(free_keys, combination, strict=True))
        keeps_weights = not sharing.get(RESHARD_KEY, True)
        # Where each rank has a copy of its own there is nothing to gather, and so to keep.
        has_own_copy = sharing.get(COPIES_KEY) == data_ranks != 1
        # Whole gradients with sharded weights save as much communication as the reverse does, and
        # take as much memory: only the reverse is tried.
        keeps_gradients_alone = (
            sharing.get(REDUCE_KEY) == "step" and not keeps_weights and RESHARD_KEY not in fixed
        )
        if not (has_own_copy and keeps_weights) and not keeps_gradients_alone:
            yield sharing
    if is_free and data_ranks > 1:
        sharing = {STRATEGY_KEY: "ddp"}
        if cfg.parallel.reduce_gradients != "micro_batch":  # has no effect with DDP
            sharing[REDUCE_KEY] = "micro_batch"
        if implementation_key not in fixed:
            sharing[implementation_key] = "auto"
        yield sharing


def _list_copies(cfg: Any, data_ranks: int) -> list[int]:
    """Return the numbers of copies of the model that are tried: a few, and one for each rank.

    If the config sets the number of shards, return only the config's number of copies.
    """
    if cfg.parallel.data_shard != -1:
        return [cfg.parallel.data_replicate]
    candidates = {1, 2, data_ranks // 8, data_ranks} - {0}
    return sorted(copies for copies in candidates if data_ranks % copies == 0)


def list_pipelines(
    cfg: Any, settings: PlanSettings, fixed: Collection[str], *, splits: bool = True
) -> Iterator[Changes]:
    """Yield the ways to divide the layers between ranks in a pipeline.

    The ranks of one stage shard it or copy it. splits: try schedules that split backward into the
    gradients of inputs and of weights. Nothing is yielded for links that are fast enough without a
    pipeline, or if its keys or those of the batch are fixed.
    """
    if (
        settings.hardware.link.kind not in LINKS_FOR_PIPELINES
        or PIPELINE_KEY in fixed
        # With fewer data ranks, a step keeps its global batch by more sequences on each.
        or SIZE_KEYS & set(fixed)
    ):
        return
    # Ranks that a pipeline and data parallelism share.
    num_ranks = settings.ranks // (cfg.parallel.tensor * cfg.parallel.context)
    names = (cfg.parallel.pipeline_schedule,) if SCHEDULE_KEY in fixed else SCHEDULES_TRIED
    schedules = [name for name in names if splits or not SCHEDULES[name].splits]
    pipeline_lengths = [
        length
        for length in range(2, min(num_ranks, count_layers(cfg)) + 1)
        if num_ranks % length == 0
    ]
    for length, schedule in product(pipeline_lengths[-MAX_PIPELINE_LENGTHS:], schedules):
        base: Changes = {PIPELINE_KEY: length, SCHEDULE_KEY: schedule}
        # Only FSDP reads `data_replicate`, the number of copies of a stage.
        if cfg.parallel.strategy != "fsdp" and STRATEGY_KEY not in fixed:
            base[STRATEGY_KEY] = "fsdp"
        if cfg.parallel.pipeline_microbatches is not None:  # meant for another pipeline
            base["parallel.pipeline_microbatches"] = None
        ranks_per_stage = num_ranks // length
        copies = (
            [1, ranks_per_stage] if ranks_per_stage > 1 and cfg.parallel.data_shard == -1 else [1]
        )
        if COPIES_KEY in fixed:
            copies = [cfg.parallel.data_replicate]
        # Where several ranks have a stage, they either shard all between uses, or keep gradients
        # and weights whole through a step.
        kept_whole: list[Changes] = [{}]
        if ranks_per_stage > 1 and not {REDUCE_KEY, RESHARD_KEY} & set(fixed):
            kept_whole.append({REDUCE_KEY: "step", RESHARD_KEY: False})
        for num_copies, kept_changes in product(copies, kept_whole):
            changes = base | {COPIES_KEY: num_copies} | kept_changes
            if _is_possible(cfg, settings, changes):
                yield changes


def _is_possible(cfg: Any, settings: PlanSettings, changes: Changes) -> bool:
    """Return True if ranks, layers and the batch of a step can be divided as the changes say."""
    is_uneven = count_sequences(cfg) * changes[PIPELINE_KEY] % cfg.parallel.pipeline != 0
    if is_uneven or not list_micro_batch_sizes(cfg, changes):
        return False
    changed_cfg = apply_changes(cfg, changes | set_micro_batch(cfg, changes, 1))
    if changed_cfg is None or count_stages(changed_cfg.parallel) > count_layers(changed_cfg):
        return False
    try:
        compute_mesh_shape(changed_cfg.parallel, settings.ranks)
    except SetupError:
        return False
    return True

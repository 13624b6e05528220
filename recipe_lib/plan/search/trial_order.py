"""Which settings a search tries next, on all cores, and which it need not try at all.

A way to share the model between ranks is gone through kind by kind of checkpointing, from the one that computes least
again, with micro-batches from the smallest on. Of all ways the trial that could be the fastest is next, pipelines
last. None is made for what cannot fit or cannot be faster than the best so far, by `lower_bounds`; each such decision
is said.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from recipe_lib.config.mesh import (
    SCHEDULES,
    fewest_micro_batches,
    mesh_shape,
    micro_batches,
    stage_count,
    stages_of_rank,
    stages_per_rank,
)
from recipe_lib.errors import SetupError, UserError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline.balance import split_layers
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
    changed,
    checkpointing,
    data_ranks,
    doubt,
    find_differing,
    is_long,
    override_text,
    usable_bytes,
    value_of,
)
from recipe_lib.plan.tracing.pipeline_actions import orders_of
from recipe_lib.plan.world.shape_only_model import layer_count, spec_of
from recipe_lib.report.phases import Phase
from recipe_lib.units import format_bytes, format_count

# What settings take at least, from what others took: what the layers' parameters, states, gradients and kept
# activations take together when a backward begins, and the step's operations at the highest rate.


@dataclass(frozen=True)
class Like:
    """An estimate with the same layers and the same checkpointing, and the sequences of its micro-batches that a rank
    has: of one that others share with it a part."""

    quick: Estimate
    batch_size: float


@dataclass(frozen=True)
class _Held:
    """Bytes of the average rank, and the layers' share of them. before: parameters and states, with what is whole
    through forward; gradients: once there are any."""

    before: float
    gradients: float
    by_layers: float


def least_bytes(cfg: Any, settings: PlanSettings, known: Estimate, known_cfg: Any, like: Like | None) -> int:
    """Bytes that `cfg` takes on its heaviest rank, at least.

    known, known_cfg: what is the same but for how the ranks share the model. like: None: kept activations are left out.
    """
    held = _held(cfg, settings, known, known_cfg)
    kept = 0.0 if like is None else like.quick.kept * cfg.batch_size / cfg.parallel.context / like.batch_size
    if cfg.parallel.pipeline > 1:
        return int(max(held.before + held.gradients, *_places(cfg, settings, held, kept)))
    accumulates = cfg.gradient_accumulation_steps > 1
    as_backward_begins = held.before + kept + (held.gradients if accumulates else 0)
    return int(max(as_backward_begins, held.before - _whole(cfg, settings, known) + held.gradients))


def _held(cfg: Any, settings: PlanSettings, known: Estimate, known_cfg: Any) -> _Held:
    """By those of another way to share the model."""
    mesh, before = mesh_shape(cfg.parallel, settings.ranks), mesh_shape(known_cfg.parallel, settings.ranks)
    parts = mesh["pipeline"] * mesh["data_shard"]
    offloaded = cfg.memory.cpu_offload or cfg.memory.stream_layers is True
    held = 0.0 if offloaded else known.held * before["pipeline"] * before["data_shard"] / parts
    gradients = 0.0 if offloaded or cfg.memory.optimizer_in_backward else known.trained / parts
    if reduces_once(cfg.parallel) and not cfg.memory.optimizer_in_backward:
        gradients = known.trained / mesh["pipeline"]
    by_layers = known.held_by_layers / known.held if known.held else 0.0
    return _Held(held + _whole(cfg, settings, known), gradients, by_layers)


def _whole(cfg: Any, settings: PlanSettings, known: Estimate) -> float:
    """What is gathered and stays so from forward to backward, beyond the rank's own part."""
    mesh = mesh_shape(cfg.parallel, settings.ranks)
    if cfg.parallel.reshard_after_forward or cfg.parallel.strategy == "ddp" or mesh["data_shard"] == 1:
        return 0.0
    if cfg.memory.stream_layers:  # adapters alone are gathered
        return 0.0
    shards = mesh["data_shard"]
    others = shards if cfg.memory.cpu_offload else shards - 1
    return known.parameters * others / (mesh["pipeline"] * shards)


def _places(cfg: Any, settings: PlanSettings, held: _Held, kept: float) -> Iterator[float]:
    """The same of each place of a pipeline, of its layers alone: as many micro-batches are kept as its order says."""
    parallel, layers = cfg.parallel, layer_count(cfg)
    split = split_layers(spec_of(cfg), cfg, mesh_shape(parallel, settings.ranks)["data_shard"])
    orders = orders_of(parallel, micro_batches(cfg)[1])
    for place in range(parallel.pipeline):
        share = {stage: len(split[stage]) / layers for stage in stages_of_rank(parallel, place)}
        mine = held.by_layers * parallel.pipeline * sum(share.values())
        alive, gradients, most = 0.0, 0.0, 0.0
        for action in orders[place]:
            if action.kind == "F":
                alive += kept * share[action.stage]
                most = max(most, alive + gradients)
            elif action.kind in ("B", "I"):
                alive -= kept * share[action.stage]
                gradients = held.gradients * mine if action.kind == "B" else gradients
        yield held.before * mine + most


def least_step(cfg: Any, like: Like) -> float:
    """Seconds that a step of `cfg` takes at least.

    A pipeline whose ranks have one stage each, and whose backward is not cut in two, also waits for its first
    micro-batch to come to the last rank and back.
    """
    parallel = cfg.parallel
    if parallel.pipeline == 1 or stages_per_rank(parallel) > 1 or SCHEDULES[parallel.pipeline_schedule].splits:
        return like.quick.least_seconds
    count = micro_batches(cfg)[1]
    return like.quick.least_seconds * (count + parallel.pipeline - 1) / count


# Gives settings to try, takes what came of each: None for those that are left out.
Way = Generator[Changes, Candidate | None, None]


def key_of(changes: Changes) -> str:
    """The same for the same changes in any order."""
    return override_text(dict(sorted(changes.items())))


@dataclass
class Trials:
    """What a search has tried so far."""

    cfg: Any
    settings: PlanSettings
    # Dotted keys that stay as the config has them.
    fixed: Collection[str]
    # As `side_by_side` gives them.
    submit: Callable[[Changes], Future[Any]]
    workers: int
    going: Phase
    # By `key_of` the settings that a trial was made of; None: the recipe or the simulation refuses them.
    tried: dict[str, Candidate | None] = field(default_factory=dict)
    # By `variant_key` the estimate with the least memory.
    leanest: dict[str, Candidate | None] = field(default_factory=dict)
    # Settings that no trial was made of, and why.
    skipped: dict[str, str] = field(default_factory=dict)
    # Settings whose whole plan does not fit.
    refused: set[str] = field(default_factory=set)
    # The speed that was last said to be the best.
    best_said: float = 0.0
    configs: dict[str, Any] = field(default_factory=dict)

    def config(self, changes: Changes) -> Any:
        """Return the config with changes, made once; None where they do not go together."""
        key = key_of(changes)
        if key not in self.configs:
            self.configs[key] = changed(self.cfg, changes)
        return self.configs[key]

    def size(self, changes: Changes, batch_size: int) -> Changes:
        """Return the changes with micro-batches of that size, unless sizes stay as they are."""
        return changes if SIZE_KEYS & set(self.fixed) else changes | micro_batch(self.cfg, changes, batch_size)

    def fitting(self) -> list[Candidate]:
        """What may fit, fastest first, each once."""
        found = {key_of(one.changes): one for one in self.tried.values() if one is not None}
        left = [one for key, one in found.items() if key not in self.refused and one.may_fit]
        return sorted(left, key=lambda one: (-one.speed, one.quick.active))

    def text(self, changes: Changes) -> str:
        """What to type for them."""
        return override_text(find_differing(self.cfg, changes)) or "as it is"


def worth_trying(trials: Trials, begun: Iterable[Changes]) -> list[Changes]:
    """Ways to share the model whose leanest settings could fit; the others are said once."""
    found = []
    for changes in begun:
        if why := _too_large(trials, leanest(trials, changes)):
            _skip(trials, changes, f"{why}, however activations are kept")
        else:
            found.append(changes)
    return found


def leanest(trials: Trials, begun: Changes) -> Changes:
    """One sequence at a time, everything computed again."""
    kind = {} if CHECKPOINTING_KEY in trials.fixed else checkpointing(trials.cfg, CHECKPOINTING[0])
    return trials.size(begun | kind, min(sizes(trials.cfg, begun), default=1))


def try_all(trials: Trials, wanted: Iterable[Changes]) -> None:
    """Each of the settings, but for those that are decided already."""

    def single(changes: Changes) -> Way:
        yield changes

    run_ways(trials, [single(changes) for changes in wanted])


def way(trials: Trials, begun: Changes) -> Way:
    """For each kind of checkpointing the largest micro-batch that fits. One that computes more again is of use for
    larger micro-batches only."""
    cfg = trials.cfg
    left = [cfg.batch_size] if SIZE_KEYS & set(trials.fixed) else sizes(cfg, begun)
    kinds: Iterable[str] = reversed(CHECKPOINTING)
    if CHECKPOINTING_KEY in trials.fixed:
        kinds = (cfg.memory.activation_checkpointing,)
    for kind in kinds:
        fitting = yield from _micro_batches(trials, begun | checkpointing(cfg, kind), left)
        left = [size for size in left if size > max(fitting, default=0)]
        if not left:
            return


def _micro_batches(trials: Trials, begun: Changes, left: list[int]) -> Generator[Changes, Candidate | None, list[int]]:
    """Tries sizes of micro-batches; returns those that fit.

    Besides what `largest` asks for: in a pipeline smaller ones, as more micro-batches in a step wait less; else all
    sequences at once, which have no gradients of others to be added to.
    """

    answers: dict[int, Candidate | None] = {}
    looking = largest(left, trials.settings)
    size = next(looking)
    while size is not None:
        answers[size] = yield trials.size(begun, size)
        size = looking.send(answers[size])
    fitting = [size for size, one in answers.items() if one is not None and one.may_fit]
    others = [size for size in left if size not in answers]
    if begun.get(PIPELINE_KEY, trials.cfg.parallel.pipeline) > 1:
        more = [size for size in others if size < max(fitting, default=0)]
    else:
        more = [size for size in others if size == batch_per_step_with(trials.cfg, begun)]
    if (over := [size for size in set(others) - set(more) if size > max(fitting, default=0)]) and fitting:
        _skip(trials, trials.size(begun, min(over)), "too large by smaller micro-batches, and so are larger ones")
    for size in more:
        answers[size] = yield trials.size(begun, size)
    return [size for size, one in answers.items() if one is not None and one.may_fit]


def largest(sizes: list[int], settings: PlanSettings) -> Generator[int | None, Candidate | None, None]:
    """Looks for the largest of `sizes` that fits: gives the smallest, then what a straight line says, and takes their
    estimates; None for one that is left out, as larger ones then are. Gives None at the end."""
    points: dict[int, int] = {}
    low, high, guess = 0, len(sizes), 0  # sizes below place `low` fit, those from `high` on do not
    while low < high:
        one = yield sizes[guess]
        if one is None:
            break
        points[sizes[guess]] = one.short
        low, high = (guess + 1, high) if one.may_fit else (low, guess)
        if len(points) == 1:  # what is held between steps does not grow with the batch, the rest does at most
            points.setdefault(0, one.short - (one.quick.active - one.quick.held))
        likely = [place for place in range(low, high) if _line(points, sizes[place]) <= doubt(settings)]
        # A peak is the highest of straight lines over the size: beyond two sizes it is not below the line through them.
        if not likely and len(points) > 2:
            break
        guess = max(likely, default=low)
    yield None


def _line(points: dict[int, int], size: int) -> float:
    """Bytes short at a size, by the line through the two known points next to it."""
    first, second = sorted(sorted(points, key=lambda known: abs(known - size))[:2])
    return points[first] + (points[second] - points[first]) * (size - first) / (second - first)


def run_ways(trials: Trials, ways: list[Way]) -> None:
    """Goes through all ways, with all workers: pipelines last, whose trials take longest and which a fast answer rules
    out; among the others, and among them, the trial that could be the fastest first."""
    ready: list[tuple[Way, Changes]] = []
    pending: dict[Future[Any], tuple[Way, Changes]] = {}
    for one in ways:
        _go_on(trials, ready, one, None)
    while ready or pending:
        while ready and len(pending) < trials.workers:
            ready.sort(key=lambda pair: (PIPELINE_KEY in pair[1], -_highest_speed(trials, pair[1])))
            following, changes = ready.pop(0)
            if why := _why_not(trials, changes):
                _skip(trials, changes, why)
                _go_on(trials, ready, following, None)
            elif key_of(changes) in trials.tried:
                _go_on(trials, ready, following, trials.tried[key_of(changes)])
            else:
                pending[trials.submit(changes)] = following, changes
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            following, changes = pending.pop(future)
            found = trials.tried[key_of(changes)] = future.result()
            _say(trials, changes, found)
            _go_on(trials, ready, following, found)


def _go_on(trials: Trials, ready: list[tuple[Way, Changes]], following: Way, answer: Candidate | None) -> None:
    try:
        ready.append((following, following.send(answer)))
    except StopIteration:
        return


def _like(trials: Trials, cfg: Any) -> Like | None:
    """Of what was tried, something with the same kind of checkpointing; not of a pipeline, whose ranks have some of the
    layers each. How frozen weights are rounded makes no difference to what is kept and computed."""
    for one in trials.tried.values():
        if one is None or not one.quick.least_seconds:
            continue
        other = trials.config(one.changes)
        if other is not None and value_of(other, CHECKPOINTING_KEY) == value_of(cfg, CHECKPOINTING_KEY):
            return Like(one.quick, micro_batches(other)[0] / other.parallel.context)
    return None


def _highest_speed(trials: Trials, changes: Changes) -> float:
    """Tokens per second that the settings have at most; infinite where nothing like them was tried."""
    cfg = trials.config(changes)
    like = None if cfg is None else _like(trials, cfg)
    return float("inf") if like is None else like.quick.tokens / least_step(cfg, like)


def _why_not(trials: Trials, changes: Changes) -> str:
    """Why no trial of the settings is needed; nothing where one is."""
    if key_of(changes) in trials.tried:
        return ""
    best, highest = next(iter(trials.fitting()), None), _highest_speed(trials, changes)
    if best is not None and highest <= best.speed:
        return f"{format_count(highest)} tokens/s at most, no faster than the best so far"
    return _too_large(trials, changes)


def _too_large(trials: Trials, changes: Changes) -> str:
    """Why the settings cannot fit; nothing where they might."""
    cfg = trials.config(changes)
    if cfg is None:
        return "these do not go together"
    usable, least = usable_bytes(cfg, trials.settings), _least_bytes(trials, changes, cfg)
    if least <= usable + doubt(trials.settings):
        return ""
    return f"takes {format_bytes(least)} at least, of {format_bytes(usable)}"


def _least_bytes(trials: Trials, changes: Changes, cfg: Any) -> int:
    known = trials.leanest.get(variant_key(changes))
    if known is None:
        return 0
    try:
        return least_bytes(cfg, trials.settings, known.quick, trials.config(known.changes), _like(trials, cfg))
    except UserError:  # a pipeline that the model cannot be divided for: its trial says so
        return 0


def variant_key(changes: Changes) -> str:
    """Of the part of the changes that is no way to share the model, and no micro-batch."""
    names = (HOST_KEY, STREAM_KEY, OFFLOAD_KEY, QUANTIZE_KEY, STATES_KEY, *TEACHER_KEYS)
    return key_of({key: value for key, value in changes.items() if key in names})


def _skip(trials: Trials, changes: Changes, why: str) -> None:
    text = trials.text(changes)
    if text not in trials.skipped:
        trials.skipped[text] = why
        get_logger().info(f"not simulated: {text}: {why}")


def _say(trials: Trials, changes: Changes, found: Candidate | None) -> None:
    """What came of a trial, and the best so far where it is better."""
    trials.going.advance(1)
    if found is None:
        get_logger().info(f"refused: {trials.text(changes)}")
        return
    fits = "too large" if not found.may_fit else "fits" if found.short <= 0 else "may fit"
    size, speed = format_bytes(found.quick.reserved_expandable), f", {format_count(found.speed)} tokens/s"
    get_logger().info(f"estimated: {trials.text(found.changes)}: {size}, {fits}{speed if found.speed else ''}")
    best = next(iter(trials.fitting()), None)
    if best is not None and best.speed > trials.best_said:
        trials.best_said = best.speed
        line = f"best so far: {format_count(best.speed)} tokens/s: {trials.text(best.changes)}"
        trials.going.say(line)
        get_logger().info(line)


# What is tried: ways to share a model between ranks, pipelines among them, and micro-batches.

# What is looked for besides the micro-batch: key -> its values for a config and so many ranks with different batches,
# least memory first.
SHARING: dict[str, Callable[[Any, int], Iterable[Any]]] = {
    "parallel.data_replicate": lambda cfg, ranks: _copies(cfg, ranks),
    RESHARD_KEY: lambda cfg, ranks: (True, False) if ranks > 1 else (cfg.parallel.reshard_after_forward,),
    REDUCE_KEY: lambda cfg, ranks: ("micro_batch", "step") if ranks > 1 else (cfg.parallel.reduce_gradients,),
    "optimizer.implementation": lambda cfg, ranks: ("auto",),
}
HOST_KEY = "memory.cpu_offload"
# The micro-batch, with as many of them as make up the batch of a step.
SIZE_KEYS = {"batch_size", TURNS_KEY}

PIPELINE_KEY, SCHEDULE_KEY, COUNT_KEY = (
    f"parallel.{name}" for name in ("pipeline", "pipeline_schedule", "pipeline_microbatches")
)
# The schedule with the least memory, and the one with the least waiting that takes as much activation memory.
SCHEDULES_TRIED = ("1f1b", "zbv")
# Where ranks cannot read each other's memory, gathering parameters costs more than it does elsewhere, and what a
# pipeline exchanges is little.
LINKS_FOR_PIPELINES = ("pcie_no_p2p",)
MAX_PIPELINE_LENGTHS = 3  # of pipelines, the longest that there can be


def batch_per_step(cfg: Any) -> int:
    """Sequences of a step on one data rank."""
    return int(cfg.batch_size * cfg.gradient_accumulation_steps)


def list_groups(cfg: Any, settings: PlanSettings, fixed: Collection[str]) -> Iterator[list[Changes]]:
    """Yield settings to begin with, group by group: a group is only tried if nothing of those before it fits."""
    stays: Changes = {} if HOST_KEY in fixed else {HOST_KEY: False}
    fixed = {*fixed, OFFLOAD_KEY, STREAM_KEY} if HOST_KEY in fixed else set(fixed)
    resorts: dict[int, list[Changes]] = defaultdict(list)
    for lever in reversed(
        list_levers(changed(cfg, stays) or cfg, settings)
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
            yield [stays | one | rounding for one, rounding in product(resorts[resort], resorts[ROUNDING] or [{}])]


def sharings(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    """All combinations of SHARING, least memory first; then whole models on every rank, without FSDP. Where sequences
    are long, then the same with ranks that share one."""
    yield from _sharings(cfg, ranks, fixed)
    free = CONTEXT_KEY not in fixed and not SIZE_KEYS & set(fixed) and cfg.parallel.pipeline == 1 and is_long(cfg)
    for size in list_contexts(cfg, ranks) if free else []:
        other = changed(cfg, {CONTEXT_KEY: size})
        if other is not None:
            yield from (one | {CONTEXT_KEY: size} for one in _sharings(other, ranks, fixed))


def _sharings(cfg: Any, ranks: int, fixed: Collection[str]) -> Iterator[Changes]:
    copies = data_ranks(cfg, ranks)
    free = STRATEGY_KEY not in fixed
    shared = free and ranks > 1 and cfg.parallel.strategy != "fsdp"
    combinations: list[Changes] = [{STRATEGY_KEY: "fsdp"} if shared else {}]
    for key, values in SHARING.items():
        if key not in fixed and value_of(cfg, key) is not None:
            combinations = [one | {key: value} for one in combinations for value in values(cfg, copies)]
    for one in combinations:
        alone = one.get("parallel.data_replicate") == copies != 1  # each rank has a copy: there is nothing to gather
        kept = not one.get(RESHARD_KEY, True)
        # Whole gradients alone save as much as weights kept from forward to backward do, and take as much.
        halfway = one.get(REDUCE_KEY) == "step" and not kept and RESHARD_KEY not in fixed
        if not (alone and kept) and not halfway:
            yield one
    if free and copies > 1:
        own = "optimizer.implementation"
        again = {REDUCE_KEY: "micro_batch"} if cfg.parallel.reduce_gradients != "micro_batch" else {}  # has no effect
        yield {STRATEGY_KEY: "ddp"} | again | ({} if own in fixed else {own: "auto"})


def pipelines(cfg: Any, settings: PlanSettings, fixed: Collection[str], *, splits: bool = True) -> Iterator[Changes]:
    """Ways to divide the layers between ranks instead; none where the link or what is fixed speaks against it.

    The ranks that a pipeline leaves share or copy its stages. splits: whether backward may be cut in two.
    """
    if settings.hardware.link.kind not in LINKS_FOR_PIPELINES or PIPELINE_KEY in fixed or SIZE_KEYS & set(fixed):
        return  # with fewer data ranks, a step keeps its global batch by more sequences on each
    groups = settings.ranks // (cfg.parallel.tensor * cfg.parallel.context)
    schedules = SCHEDULES_TRIED if SCHEDULE_KEY not in fixed else (cfg.parallel.pipeline_schedule,)
    lengths = [size for size in range(2, min(groups, layer_count(cfg)) + 1) if groups % size == 0]
    for size in lengths[-MAX_PIPELINE_LENGTHS:]:
        for schedule in (one for one in schedules if splits or not SCHEDULES[one].splits):
            begun: Changes = {PIPELINE_KEY: size, SCHEDULE_KEY: schedule}
            if cfg.parallel.strategy != "fsdp" and STRATEGY_KEY not in fixed:  # copies are a number of FSDP's here
                begun[STRATEGY_KEY] = "fsdp"
            if cfg.parallel.pipeline_microbatches is not None:  # meant for another pipeline
                begun[COUNT_KEY] = None
            left = groups // size
            copies = [1, left] if left > 1 and cfg.parallel.data_shard == -1 else [1]
            if "parallel.data_replicate" in fixed:
                copies = [cfg.parallel.data_replicate]
            # Ranks with different batches may keep nothing whole through a step, or gradients and weights.
            kept_whole: list[Changes] = [{}]
            if left > 1 and not {REDUCE_KEY, RESHARD_KEY} & set(fixed):
                kept_whole.append({REDUCE_KEY: "step", RESHARD_KEY: False})
            for number, whole in product(copies, kept_whole):
                one = begun | {"parallel.data_replicate": number} | whole
                if _is_possible(cfg, settings, one):
                    yield one


def _is_possible(cfg: Any, settings: PlanSettings, changes: Changes) -> bool:
    """Whether ranks, layers and the batch of a step can be divided so."""
    if batch_per_step(cfg) * changes[PIPELINE_KEY] % cfg.parallel.pipeline or not sizes(cfg, changes):
        return False
    other = changed(cfg, changes | micro_batch(cfg, changes, 1))
    if other is None or stage_count(other.parallel) > layer_count(other):
        return False
    try:
        mesh_shape(other.parallel, settings.ranks)
    except SetupError:
        return False
    return True


def batch_per_step_with(cfg: Any, changes: Changes) -> int:
    """Sequences of a step on one data rank, so that the global batch stays as it is."""
    times = int(changes.get(PIPELINE_KEY, cfg.parallel.pipeline)) * int(changes.get(CONTEXT_KEY, cfg.parallel.context))
    return batch_per_step(cfg) * times // int(cfg.parallel.pipeline * cfg.parallel.context)


def micro_batch(cfg: Any, changes: Changes, batch_size: int) -> Changes:
    """Micro-batches of that size, as many as make up the global batch."""
    return {"batch_size": batch_size, TURNS_KEY: batch_per_step_with(cfg, changes) // batch_size}


def sizes(cfg: Any, changes: Changes) -> list[int]:
    """Sequences that a micro-batch can have, fewest first."""
    whole = batch_per_step_with(cfg, changes)
    found = [size for size in range(1, whole + 1) if whole % size == 0]
    if changes.get(PIPELINE_KEY, cfg.parallel.pipeline) == 1:
        once = changes.get(REDUCE_KEY, cfg.parallel.reduce_gradients) == "step"
        return found[:-1] if once and changes.get(STRATEGY_KEY) != "ddp" else found  # of one, every reduction is once
    other = changed(cfg, changes | micro_batch(cfg, changes, 1))
    fewest = whole + 1 if other is None else fewest_micro_batches(other.parallel)
    return [size for size in found if whole // size >= fewest]


def _copies(cfg: Any, ranks: int) -> list[int]:
    """Numbers of copies of the model: few, and one for each rank; as the config says where it fixes the shards."""
    if cfg.parallel.data_shard != -1:
        return [cfg.parallel.data_replicate]
    return sorted({copies for copies in (1, 2, ranks // 8, ranks) if copies and ranks % copies == 0})

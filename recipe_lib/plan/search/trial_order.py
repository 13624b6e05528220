"""Which settings a search tries next, on all cores, and which it need not try at all.

A way to share the model between ranks is gone through kind by kind of checkpointing, from the one that computes least
again, with micro-batches from the smallest on. Of all ways the trial that could be the fastest is next, pipelines
last. None is made for what cannot fit or cannot be faster than the best so far, by `lower_bounds`; each such decision
is said.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.mesh import SCHEDULES, mesh_shape, micro_batches, stages_of_rank, stages_per_rank
from recipe_lib.errors import UserError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.search_space import (
    HOST_KEY,
    PIPELINE_KEY,
    SIZE_KEYS,
    batch_per_step_with,
    micro_batch,
    sizes,
)
from recipe_lib.plan.search.trials import (
    CHECKPOINTING,
    CHECKPOINTING_KEY,
    OFFLOAD_KEY,
    QUANTIZE_KEY,
    STATES_KEY,
    STREAM_KEY,
    TEACHER_KEYS,
    Candidate,
    Changes,
    Estimate,
    changed,
    checkpointing,
    doubt,
    find_differing,
    override_text,
    usable_bytes,
    value_of,
)
from recipe_lib.plan.tracing.pipeline_actions import orders_of
from recipe_lib.plan.world.shape_only_model import layer_count, spec_of
from recipe_lib.report.phases import Phase
from recipe_lib.units import format_bytes, format_count

# What settings take at least, from what others took: enough to leave many out of a search without a
# simulation.
#
# The bounds are of the model's own layers: what parameters, states, gradients and kept activations
# take together when a backward begins, and how long the step's operations take at the highest rate.
# Everything else comes to that.


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

    def config(self, changes: Changes) -> Any | None:
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
    run_ways(trials, [_single(changes) for changes in wanted])


def _single(changes: Changes) -> Way:
    yield changes


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
        least = least_bytes(cfg, trials.settings, known.quick, trials.config(known.changes), _like(trials, cfg))
    except UserError:  # a pipeline that the model cannot be divided for: its trial says so
        return 0
    return max(least, _least_without_states(trials, changes, known))


def _least_without_states(trials: Trials, changes: Changes, known: Candidate) -> int:
    """With optimizer states in host memory: what the same takes with them, but for the states, which both leanest
    settings tell; 0 where it is not known, or the peak was in the optimizer's step."""
    if not changes.get(OFFLOAD_KEY):
        return 0
    without = {key: value for key, value in changes.items() if key != OFFLOAD_KEY}
    before, other = trials.leanest.get(variant_key(without)), trials.tried.get(key_of(without))
    if before is None or other is None or other.quick.part == "optimizer":
        return 0
    states = before.quick.held - known.quick.held
    parts = []
    for one in (known, other):
        cfg = trials.config(one.changes)
        assert cfg is not None
        mesh = mesh_shape(cfg.parallel, trials.settings.ranks)
        parts.append(mesh["pipeline"] * mesh["data_shard"])
    return int(other.quick.reserved_expandable - states * parts[0] / parts[1])


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

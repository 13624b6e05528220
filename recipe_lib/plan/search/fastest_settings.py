"""The fastest settings of a config that fit a device: estimated by `quick`, the first of them confirmed by whole plans.

For each way to share the model between ranks (pipelines too, where their link is slow) and each kind of activation
checkpointing, the largest micro-batch that fits is looked for; it divides the global batch, which stays as the
config asks for. What one setting rules out is not tried with another: if a micro-batch does not fit, a larger one does
not, nor does the same with less checkpointing; and what parameters, gradients and states alone take decides without a
simulation.
"""

import functools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import mesh_shape
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.result import DOES_NOT_FIT
from recipe_lib.plan.search.estimate import Estimate
from recipe_lib.plan.search.search_space import (
    SIZE_KEYS,
    batch_per_step,
    batch_per_step_with,
    data_ranks,
    micro_batch,
    pipelines,
    sharings,
    sizes,
    variants,
)
from recipe_lib.plan.search.trials import (
    Changes,
    changed,
    checkpointing,
    in_processes,
    override_text,
    try_quick,
    usable_bytes,
    value_of,
)
from recipe_lib.plan.tables import duration
from recipe_lib.report.terminal import WIDEST, Table, open_console, put, put_table, terminal_width, text_of
from recipe_lib.units import format_bytes, format_count

CHECKPOINTING_KEY = "memory.activation_checkpointing"
CHECKPOINTING = ("full", "selective", "none")
# Settings that cost little time, and are tried together where the peak is outside of the layers.
OUTSIDE_LAYERS = {"parallel.fsdp_wrap_policy": "memory_efficient", "memory.loss_chunks": 64}
OUTSIDE_SHARE = 0.1

# Estimates of reserved memory are some percent off: what is beyond the device by less than this is planned in full.
RESERVED_TOLERANCE = 0.06
# The line through one micro-batch and what is held between steps says too much, by less than this share of the device.
ROUGH = 0.25
MAX_PLANS = 10


@dataclass(frozen=True)
class PlannedSettings:
    """Settings. changes: of the config. verdict, active, reserved, reserved_expandable, host, margin: of their own
    plan, the bytes of the heaviest rank; margin is negative where they do not fit. seconds: of a step;
    tokens_per_second: of all ranks; both for ranking, and None with parameters in host memory, whose way there and back
    is not planned."""

    changes: Changes
    verdict: str
    active: int
    reserved: int
    reserved_expandable: int
    host: int
    margin: int
    seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Search:
    """found: what fits, confirmed, fastest first. closest: where nothing does, what lacks least. device, ranks: to fit.
    global_batch_size: sequences of a step, all ranks. tried: settings that were estimated; planned: in full; took:
    seconds. True if something was found; as text, the table of `render_search`."""

    found: list[PlannedSettings]
    closest: PlannedSettings | None
    device: str
    ranks: int
    global_batch_size: int
    tried: int
    planned: int
    took: float
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        return render_search(self)


@dataclass(frozen=True)
class _Candidate:
    """Settings and their estimate. short: bytes that they lack, by it; negative: to spare."""

    changes: Changes
    quick: Estimate
    short: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.quick.tokens / self.quick.seconds if self.quick.seconds else 0.0


def search(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    *,
    want: int = 3,
    fixed: Collection[str] = (),
    splits: bool = True,
) -> Search:
    """The fastest settings of a plannable config that fit `settings.hardware` on `settings.ranks` ranks.

    want: as many as are confirmed by a whole plan, fastest first. fixed: dotted keys that stay as the config has them.
    splits: whether a pipeline's backward may be cut in two, which compiled layers cannot.
    Frozen weights are only rounded more, and parameters only kept in host memory, where nothing fits without. It works
    in several processes if nothing has been simulated in this one yet. Raises UserErrors of recipe and config.
    """
    began = time.monotonic()
    tried: list[_Candidate] = []
    found: list[PlannedSettings] = []
    refused: list[PlannedSettings] = []
    for group in variants(cfg, fixed):
        estimated = _estimate(recipe_class, cfg, settings, group, fixed, splits)
        tried += estimated
        found, too_large = _confirm(recipe_class, cfg, settings, estimated, want)
        refused += too_large
        if found:
            break
    closest = None
    if not found:
        nearest = sorted(tried, key=lambda one: one.short)[:1]
        doubted = [one for one in nearest if one.short > _doubt(settings)]
        refused += in_processes(lambda one: _plan(recipe_class, cfg, settings, one), doubted, "planning the closest")
        fitting = [one for one in refused if one.verdict != DOES_NOT_FIT]
        found, closest = fitting, max(refused, key=lambda one: one.margin, default=None)
    return Search(
        found=found,
        closest=None if found else closest,
        device=settings.hardware.name,
        ranks=settings.ranks,
        global_batch_size=batch_per_step(cfg) * data_ranks(cfg, settings.ranks),
        tried=len(tried),
        planned=len(found) + len(refused),
        took=time.monotonic() - began,
    )


def _estimate(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    group: list[Changes],
    fixed: Collection[str],
    splits: bool,
) -> list[_Candidate]:
    """Estimates of a group of variants, each with every way of sharing that could fit."""
    leanest = [variant | next(sharings(cfg, settings.ranks, fixed)) for variant in group]
    ways = [*sharings(cfg, settings.ranks, fixed), *pipelines(cfg, settings, fixed, splits=splits)]
    # One estimate of each decides which of its ways of sharing are worth more.
    begun = in_processes(
        lambda one: _first(recipe_class, cfg, settings, one, fixed), leanest, "trying the leanest settings"
    )
    jobs = [
        (variant | sharing, known)
        for variant, known in zip(group, begun, strict=True)
        if known is not None
        for sharing in ways
        if _could_fit(cfg, settings, variant | sharing, known)
    ]
    results = in_processes(
        lambda job: _micro_batches(recipe_class, cfg, settings, job[0], fixed),
        jobs,
        "trying ways to share the model",
        _best_so_far(cfg, settings),
    )
    first = [one for one in begun if one is not None]
    return _without_twins([*first, *(one for result in results for one in result)])


def _best_so_far(cfg: Any, settings: PlanSettings) -> Callable[[list[_Candidate]], str]:
    """What says the fastest of all that were tried until then, by their estimates."""
    seen: list[_Candidate] = []

    def tell(found: list[_Candidate]) -> str:
        seen.extend(one for one in found if one.short <= _doubt(settings))
        best = max(seen, key=lambda one: one.speed, default=None)
        if best is None:
            return "none fits so far"
        changes = _differing(cfg, best.changes)
        return f"fastest so far {format_count(best.speed)} tokens/s: {override_text(changes) or 'as it is'}"

    return tell


def _differing(cfg: Any, changes: Changes) -> Changes:
    """Those of the changes that change the config."""
    return {key: value for key, value in changes.items() if value_of(cfg, key) != value}


def _first(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str]
) -> _Candidate | None:
    """The leanest settings: one sequence at a time, everything computed again."""
    kind = {} if CHECKPOINTING_KEY in fixed else checkpointing(cfg, CHECKPOINTING[0])
    size = {} if SIZE_KEYS & set(fixed) else micro_batch(cfg, changes, min(sizes(cfg, changes), default=1))
    return _try(recipe_class, cfg, settings, changes | kind | size, fixed)


def _try(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str]
) -> _Candidate | None:
    """The estimate; where it does not fit and the peak is outside of the layers, with what makes less of that."""
    less = {key: value for key, value in _differing(cfg, OUTSIDE_LAYERS).items() if key not in fixed}
    if isinstance(value_of(cfg, "parallel.fsdp_wrap_policy"), list):
        less.pop("parallel.fsdp_wrap_policy")
    best = None
    for more in ({}, less):
        other = changed(cfg, changes | more)
        found = None if other is None else try_quick(recipe_class, other, settings)
        if other is None or found is None:
            break
        short = found.reserved_expandable - usable_bytes(other, settings)
        if best is None or short < best.short:
            best = _Candidate(changes | more, found, short)
        # More than this, logits and gathered embeddings do not make up for.
        if short <= 0 or ".layers." in found.module or short > OUTSIDE_SHARE * settings.hardware.memory:
            break
    return best


def _could_fit(cfg: Any, settings: PlanSettings, changes: Changes, known: _Candidate) -> bool:
    """Whether parameters, gradients and states alone leave room, by those of a leaner way to share them."""
    before, after = changed(cfg, known.changes), changed(cfg, changes)
    if before is None or after is None:
        return False
    meshes = [mesh_shape(one.parallel, settings.ranks) for one in (before, after)]
    parts_before, parts = (mesh["pipeline"] * mesh["data_shard"] for mesh in meshes)
    held = known.quick.held * parts_before // parts if not after.memory.cpu_offload else 0
    gradients = known.quick.trained // parts if not after.memory.cpu_offload else 0
    if reduces_once(after.parallel):
        gradients = known.quick.trained // meshes[1]["pipeline"]
    others = meshes[1]["data_shard"] - 1
    whole = 0 if after.parallel.reshard_after_forward else known.quick.parameters * others // parts
    least = gradients + whole if reduces_once(after.parallel) else max(gradients, whole)
    return held + least <= usable_bytes(after, settings) + _doubt(settings)


def _doubt(settings: PlanSettings) -> int:
    return int(RESERVED_TOLERANCE * settings.hardware.memory)


def _micro_batches(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str]
) -> list[_Candidate]:
    """For each kind of checkpointing the largest micro-batch that fits, and what was tried on the way.

    Begins with the kind that computes least again; one that computes more is of use for larger micro-batches only.
    """
    per_step = batch_per_step_with(cfg, changes)
    left = [cfg.batch_size] if SIZE_KEYS & set(fixed) else sizes(cfg, changes)
    kinds: Iterable[str] = reversed(CHECKPOINTING)
    if CHECKPOINTING_KEY in fixed:
        kinds = (cfg.memory.activation_checkpointing,)
    found: list[_Candidate] = []
    for kind in kinds:
        run = functools.partial(
            _with_micro_batch, recipe_class, cfg, settings, changes | checkpointing(cfg, kind), fixed
        )
        found += _largest(run, left, settings)
        fitting = [one.changes.get("batch_size", per_step) for one in found if one.short <= _doubt(settings)]
        left = [size for size in left if size > max(fitting, default=0)]
        if not left:
            break
    return found


def _with_micro_batch(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str], size: int
) -> _Candidate | None:
    size_changes = {} if SIZE_KEYS & set(fixed) else micro_batch(cfg, changes, size)
    return _try(recipe_class, cfg, settings, changes | size_changes, fixed)


def _largest(run: Callable[[int], _Candidate | None], sizes: list[int], settings: PlanSettings) -> list[_Candidate]:
    """What was tried to find the largest of `sizes` that fits: the smallest, then what a straight line says."""
    points: dict[int, int] = {}
    found: list[_Candidate] = []
    low, high, guess = 0, len(sizes), 0  # sizes below place `low` fit, those from `high` on do not
    while low < high:
        one = run(sizes[guess])
        if one is None:
            break
        found.append(one)
        points[sizes[guess]] = one.short
        low, high = (low, guess) if one.short > _doubt(settings) else (guess + 1, high)
        if len(points) == 1:  # what is held between steps does not grow with the batch, the rest does at most
            points.setdefault(0, one.short - (one.quick.active - one.quick.held))
        likely = [place for place in range(low, high) if _line(points, sizes[place]) <= _doubt(settings)]
        sure = _doubt(settings) if len(found) > 1 else ROUGH * settings.hardware.memory
        if not likely and low < high and _line(points, sizes[low]) > sure:
            break
        guess = max(likely, default=low)
    return found


def _line(points: dict[int, int], size: int) -> float:
    """Bytes short at a size, by the line through the two known points next to it."""
    first, second = sorted(sorted(points, key=lambda known: abs(known - size))[:2])
    return points[first] + (points[second] - points[first]) * (size - first) / (second - first)


def _without_twins(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    unique = {override_text(dict(sorted(one.changes.items()))): one for one in candidates}
    return list(unique.values())


def _confirm(
    recipe_class: type, cfg: Any, settings: PlanSettings, tried: list[_Candidate], want: int
) -> tuple[list[PlannedSettings], list[PlannedSettings]]:
    """(what fits by its whole plan, what does not), the fastest estimates first, until there are enough."""
    waiting = [one for one in tried if one.short <= _doubt(settings)]
    waiting.sort(key=lambda one: (-one.speed, one.quick.active))
    fits: list[PlannedSettings] = []
    refused: list[PlannedSettings] = []
    while waiting and len(fits) < want and len(fits) + len(refused) < MAX_PLANS:
        now, waiting = waiting[: want - len(fits)], waiting[want - len(fits) :]
        for one in in_processes(
            lambda one: _plan(recipe_class, cfg, settings, one), now, "planning the fastest in full"
        ):
            (refused if one.verdict == DOES_NOT_FIT else fits).append(one)
    return fits, refused


def _plan(recipe_class: type, cfg: Any, settings: PlanSettings, one: _Candidate) -> PlannedSettings:
    """The whole plan of a candidate."""
    other = changed(cfg, one.changes)
    assert other is not None
    plan, _ = make_plan(recipe_class, other, replace(settings, timed=False))
    rank = plan.heaviest
    changes = _differing(cfg, one.changes)
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
        seconds=None if other.memory.cpu_offload else one.quick.seconds,
        tokens_per_second=None if other.memory.cpu_offload else one.speed,
    )


def speed_text(found: PlannedSettings) -> str:
    """Tokens per second as text."""
    return "not planned" if found.tokens_per_second is None else format_count(found.tokens_per_second)


def render_search(result: Search) -> str:
    """The settings as a table: what to type, planned peak, tokens per second, verdict."""
    where = f"{result.ranks} x {result.device}"
    batch = f"{result.global_batch_size} sequences a step"
    shown = result.found or ([result.closest] if result.closest else [])
    if result.found:
        title = f"FOUND  settings that fit {where}, {batch}, fastest first"
    else:
        lacking = f"; closest, short of {format_bytes(-shown[0].margin)}:" if shown else ""
        title = f"DOES NOT FIT  {where}, {batch}, with none of the settings tried{lacking}"
    header = ["planned active", "reserved", "expandable", "step", "tokens/s", "verdict"]
    console = open_console(terminal_width(WIDEST))
    put(console, title)
    for number, one in enumerate(shown, 1):
        sizes = map(format_bytes, (one.active, one.reserved, one.reserved_expandable))
        step = "not planned" if one.seconds is None else duration(one.seconds)
        cells = [*sizes, step, speed_text(one), one.verdict]
        console.print()
        put(console, f"{number}. {override_text(one.changes) or 'as the config has it'}", indent=2, wrap=False)
        put_table(console, Table("", header, [cells], ("verdict",), ("expandable", "step")))
    how = f"{result.tried} settings estimated, {result.planned} planned in full, {result.took:.0f} s"
    console.print()
    put(console, f"tokens/s are for ranking; {how}", indent=2)
    return text_of(console).rstrip("\n")

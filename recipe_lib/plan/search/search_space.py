"""What `tune plan --search` tries: ways to share a model between ranks, pipelines among them, and micro-batches."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from typing import Any

from recipe_lib.config.mesh import SCHEDULES, fewest_micro_batches, mesh_shape, stage_count
from recipe_lib.errors import SetupError
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
    CONTEXT_KEY,
    OFFLOAD_KEY,
    QUANTIZE_KEY,
    QUANTIZE_TEACHER,
    REDUCE_KEY,
    STRATEGY_KEY,
    STREAM_KEY,
    Changes,
    changed,
    data_ranks,
    is_long,
    value_of,
)
from recipe_lib.plan.world.shape_only_model import layer_count

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
            for number, whole in product(copies, _kept_whole(fixed, left)):
                one = begun | {"parallel.data_replicate": number} | whole
                if _is_possible(cfg, settings, one):
                    yield one


def _kept_whole(fixed: Collection[str], ranks: int) -> list[Changes]:
    """What `ranks` with different batches may keep whole through a step: nothing, or gradients and weights."""
    if ranks == 1 or {REDUCE_KEY, RESHARD_KEY} & set(fixed):
        return [{}]
    return [{}, {REDUCE_KEY: "step", RESHARD_KEY: False}]


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

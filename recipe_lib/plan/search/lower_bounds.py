"""What settings take at least, from what others took: enough to leave many out of a search without a simulation.

The bounds are of the model's own layers: what parameters, states, gradients and kept activations take together when a
backward begins, and how long the step's operations take at the highest rate. Everything else comes to that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.mesh import SCHEDULES, mesh_shape, micro_batches, stages_of_rank, stages_per_rank
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.estimate import Estimate
from recipe_lib.plan.tracing.pipeline_actions import orders_of
from recipe_lib.plan.world.shape_only_model import layer_count, spec_of


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

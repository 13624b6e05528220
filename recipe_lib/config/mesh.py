"""Computes what follows from a config and the number of ranks: mesh, stages, micro-batches.

The mesh has four dimensions (MESH_DIMS). The ranks that share a sequence (`parallel.context`) have
no dimension of their own in it: they are part of a data dimension. No torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import SetupError

# Outermost first: neighbors share matrices; the stages of a pipeline, which exchange the least, are
# furthest apart.
MESH_DIMS = ("pipeline", "data_replicate", "data_shard", "tensor")
# Along these, ranks have different batches, or parts of a sequence.
DATA_DIMS = ("data_replicate", "data_shard")
# The keys by which ranks have the same batch.
MODEL_DIMS = ("pipeline", "context", "tensor")


def compute_mesh_shape(parallel: ParallelConfig, size: int) -> dict[str, int]:
    """Return the ranks along MESH_DIMS, in their order, for `size` ranks.

    Raises SetupError, with the numbers, when they do not fit.
    """
    sizes = {name: getattr(parallel, name) for name in MODEL_DIMS}
    inner = math.prod(sizes.values())
    if size % inner:
        factors = [str(ranks) for ranks in sizes.values() if ranks > 1]
        product = f"{' x '.join(factors)} = {inner}" if len(factors) > 1 else str(inner)
        raise SetupError(
            f"{' x '.join(_list_dividing_keys(parallel))}: found {product} for {size}"
            f" rank{'s' if size > 1 else ''}, expected a divisor of {size}; start a multiple of"
            f" {inner} ranks (--nproc_per_node)"
        )
    sizes |= dict(zip(DATA_DIMS, _compute_data_shape(parallel, size // inner, inner), strict=True))
    # Ranks that share a sequence are neighbors in a data dimension, which is so many times longer:
    # to parameters, gradients and states they are ranks like others with a batch of their own.
    sizes[_find_context_dim(parallel)] *= parallel.context
    return {name: sizes[name] for name in MESH_DIMS}


def _find_context_dim(parallel: ParallelConfig) -> str:
    """Return the dimension of the mesh that the ranks which share a sequence are part of."""
    return "data_replicate" if parallel.strategy == "ddp" else "data_shard"


def add_context_dim(parallel: ParallelConfig, shape: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the mesh's dimensions, the ranks that share a sequence apart.

    They get a dimension `context` before `tensor`, if there are any.
    """
    dim = _find_context_dim(parallel)
    num_sequences = shape[dim] // parallel.context
    return _insert_context(parallel, {**shape, dim: num_sequences}, parallel.context)


def split_context_coordinate(
    parallel: ParallelConfig, coordinate: Mapping[str, int]
) -> dict[str, int]:
    """Return a rank's place along the dimensions of `add_context_dim`.

    coordinate: its place along those of the mesh.
    """
    dim = _find_context_dim(parallel)
    sequence_rank, context_rank = divmod(coordinate[dim], parallel.context)
    return _insert_context(parallel, {**coordinate, dim: sequence_rank}, context_rank)


def _insert_context(
    parallel: ParallelConfig, by_dim: Mapping[str, int], context: int
) -> dict[str, int]:
    """Return values by dimension, with one of `context` before `tensor` if it has several ranks."""
    if parallel.context == 1:
        return dict(by_dim)
    tensor = MESH_DIMS.index("tensor")
    outer = {name: by_dim[name] for name in MESH_DIMS[:tensor]}
    return outer | {"context": context} | {name: by_dim[name] for name in MESH_DIMS[tensor:]}


def count_same_batch_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks that have the same batch."""
    return math.prod(getattr(parallel, name) for name in MODEL_DIMS)


def count_token_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share the tokens of a micro-batch between layers."""
    return parallel.context * parallel.tensor


def compute_padded_multiple(cfg: Any) -> int:
    """Return what the length of every padded sequence is a multiple of."""
    return math.lcm(cfg.data.pad_to_multiple_of, count_token_ranks(cfg.parallel))


def _list_dividing_keys(parallel: ParallelConfig) -> list[str]:
    """Return the keys by which several ranks have the same batch."""
    return [f"parallel.{name}" for name in MODEL_DIMS if getattr(parallel, name) > 1]


def _compute_data_shape(parallel: ParallelConfig, size: int, inner: int) -> tuple[int, int]:
    """Return (data_replicate, data_shard) for `size` different batches, of `inner` ranks each."""
    replicate = parallel.data_replicate
    shard = parallel.data_shard
    if parallel.strategy == "ddp":
        return size, 1
    # Words for the errors below.
    divisors = [str(number) for number in range(1, size + 1) if size % number == 0]
    possible = f"one of {', '.join(divisors)}" if size > 1 else "1"
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if inner > 1:
        ranks += f" (of {size * inner}, by {' and '.join(_list_dividing_keys(parallel))})"
    if shard == -1:
        if size % replicate:
            raise SetupError(
                f"parallel.data_replicate: found {replicate} copies for {ranks}, expected a divisor"
                f" of {size}; use {possible}, or start a multiple of {replicate * inner} ranks"
                " (--nproc_per_node)"
            )
        return replicate, size // replicate
    if shard < 1:
        raise SetupError(f"parallel.data_shard: found {shard}, expected -1 or an integer >= 1")
    if replicate * shard != size:
        remedy = (
            f"parallel.data_shard={size // replicate} or -1"
            if size % replicate == 0
            else f"parallel.data_replicate to {possible} and parallel.data_shard=-1"
        )
        raise SetupError(
            f"parallel: found data_replicate {replicate} x data_shard {shard} = {replicate * shard}"
            f" for {ranks}; set {remedy}, or start {replicate * shard * inner} ranks"
            " (--nproc_per_node)"
        )
    return replicate, shard


@dataclass(frozen=True)
class ScheduleFacts:
    """Facts of a pipeline schedule, known without running it."""

    # On each rank; None: `parallel.pipeline_stages_per_rank`.
    stages: int | None
    # The first rank's last stage is the last of all (a V); else the stages go round the ranks.
    folded: bool
    # Backward is split into input and weight gradients.
    splits: bool


SCHEDULES = {
    "gpipe": ScheduleFacts(1, folded=False, splits=False),
    "1f1b": ScheduleFacts(1, folded=False, splits=False),
    "interleaved_1f1b": ScheduleFacts(None, folded=False, splits=False),
    "interleaved_zero_bubble": ScheduleFacts(None, folded=False, splits=True),
    "zbv": ScheduleFacts(2, folded=True, splits=True),
}


def count_stages_per_rank(parallel: ParallelConfig) -> int:
    """Return the number of stages on each rank of a pipeline; 1 without one."""
    if parallel.pipeline == 1:
        return 1
    return SCHEDULES[parallel.pipeline_schedule].stages or parallel.pipeline_stages_per_rank


def count_stages(parallel: ParallelConfig) -> int:
    """Return the number of stages of the whole pipeline."""
    return parallel.pipeline * count_stages_per_rank(parallel)


def find_stage_rank(parallel: ParallelConfig, stage: int) -> int:
    """Return the place in its pipeline of the rank that has a stage."""
    # A pass over the ranks gives each one stage; of a V every second pass runs backwards.
    pass_number, place = divmod(stage, parallel.pipeline)
    is_backwards = SCHEDULES[parallel.pipeline_schedule].folded and pass_number % 2 == 1
    return parallel.pipeline - 1 - place if is_backwards else place


def list_rank_stages(parallel: ParallelConfig, rank: int) -> list[int]:
    """Return the stages of a rank by its place in the pipeline, first to last."""
    stages = range(count_stages(parallel))
    return [stage for stage in stages if find_stage_rank(parallel, stage) == rank]


def compute_micro_batches(cfg: Any) -> tuple[int, int]:
    """Return (sequences of a micro-batch, micro-batches) of a data rank's step.

    Their product is batch_size x gradient_accumulation_steps.
    """
    num_micro_batches = cfg.parallel.pipeline_microbatches if cfg.parallel.pipeline > 1 else None
    if num_micro_batches is None:
        return cfg.batch_size, cfg.gradient_accumulation_steps
    num_sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    return num_sequences // num_micro_batches, num_micro_batches


def count_fewest_micro_batches(parallel: ParallelConfig) -> int:
    """Return the micro-batches a step that a schedule is made for."""
    is_free = parallel.pipeline == 1 or parallel.pipeline_schedule == "gpipe"
    return 1 if is_free else parallel.pipeline


def find_schedule_fault(parallel: ParallelConfig, count: int) -> str | None:
    """Return why `count` micro-batches a step are too few for the schedule; None if they are not.

    The text is `found .., expected ..; remedy`.
    """
    # Every schedule can order any number of them. With fewer than this, ranks wait for each other
    # even in the middle of a step, and what an interleaved or zero-bubble schedule is taken for is
    # not to be had.
    fewest = count_fewest_micro_batches(parallel)
    if count >= fewest:
        return None
    return (
        f"found {count} micro-batches a step, expected {fewest} or more for"
        f" parallel.pipeline={parallel.pipeline} with"
        f" parallel.pipeline_schedule={parallel.pipeline_schedule}; set"
        f" parallel.pipeline_microbatches to {fewest} or more (batch_size x"
        " gradient_accumulation_steps has to be a multiple of it), or parallel.pipeline lower"
    )

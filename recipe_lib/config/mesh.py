"""Compute what follows from a config and the number of ranks: mesh, stages, micro-batches.

The mesh has four dimensions (MESH_DIMS). The ranks that share a sequence (`parallel.context`) have
no dimension of their own in it: they are neighbors in a data dimension. A stage is some consecutive
layers, of which a rank of a pipeline has one or more. Imports no torch, so that configs are checked
without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import SetupError

# Outermost first. Neighboring ranks share matrices (`tensor`), which communicates the most; the
# stages of a pipeline communicate the least, and are furthest apart.
MESH_DIMS = ("pipeline", "data_replicate", "data_shard", "tensor")
# Along these, ranks have different batches, or with `parallel.context` parts of the same one.
DATA_DIMS = ("data_replicate", "data_shard")
# Keys of the section `parallel` that count ranks which have the same batch.
MODEL_DIMS = ("pipeline", "context", "tensor")


def compute_mesh_shape(parallel: ParallelConfig, size: int) -> dict[str, int]:
    """Return dimension -> number of ranks along it, in the order of MESH_DIMS, for `size` ranks.

    Raises SetupError if the keys of `parallel` do not multiply to `size`.
    """
    sizes = {name: getattr(parallel, name) for name in MODEL_DIMS}
    inner = math.prod(sizes.values())  # ranks that have the same batch
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
    """Return the mesh dimension in which ranks that share a sequence are neighbors."""
    return "data_replicate" if parallel.strategy == "ddp" else "data_shard"


def add_context_dim(parallel: ParallelConfig, shape: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the mesh's dimensions, with one more for ranks that share a sequence.

    That is `context`, before `tensor`; it is left out if its size is 1. shape: of
    `compute_mesh_shape`.
    """
    dim = _find_context_dim(parallel)
    num_batches = shape[dim] // parallel.context
    return _insert_context(parallel, {**shape, dim: num_batches}, parallel.context)


def split_context_coordinate(
    parallel: ParallelConfig, coordinate: Mapping[str, int]
) -> dict[str, int]:
    """Return a rank's index along each dimension of `add_context_dim`.

    coordinate: its index along each dimension of the mesh.
    """
    dim = _find_context_dim(parallel)
    batch_index, context_rank = divmod(coordinate[dim], parallel.context)
    return _insert_context(parallel, {**coordinate, dim: batch_index}, context_rank)


def _insert_context(
    parallel: ParallelConfig, by_dim: Mapping[str, int], context: int
) -> dict[str, int]:
    """Return values by dimension, with the value `context` before `tensor`.

    by_dim: sizes, or indices of a rank. They are unchanged if `parallel.context` is 1.
    """
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
    """Return the tokens of which every padded sequence's length is a multiple."""
    return math.lcm(cfg.data.pad_to_multiple_of, count_token_ranks(cfg.parallel))


def _list_dividing_keys(parallel: ParallelConfig) -> list[str]:
    return [f"parallel.{name}" for name in MODEL_DIMS if getattr(parallel, name) > 1]


def _compute_data_shape(parallel: ParallelConfig, size: int, inner: int) -> tuple[int, int]:
    """Return (data_replicate, data_shard) for `size` different batches, of `inner` ranks each.

    With DDP every rank replicates. Raises SetupError if the config's two do not multiply to `size`.
    """
    replicate = parallel.data_replicate
    shard = parallel.data_shard
    if parallel.strategy == "ddp":
        return size, 1
    # Parts of the errors below.
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

    # Stages on each rank; None: `parallel.pipeline_stages_per_rank`.
    stages: int | None
    # Whether the stages go along the ranks and back (a V), so that the first rank has the last one;
    # else they go along the ranks, and again from the first.
    folded: bool
    # Whether weight gradients are computed apart from input gradients, later.
    splits: bool


# Value of `parallel.pipeline_schedule` -> its facts.
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
    """Return the rank that has a stage, counted within its pipeline from 0."""
    # A pass over the ranks gives each one stage; of a V every second pass runs backwards.
    pass_number, position = divmod(stage, parallel.pipeline)
    is_backwards = SCHEDULES[parallel.pipeline_schedule].folded and pass_number % 2 == 1
    return parallel.pipeline - 1 - position if is_backwards else position


def list_rank_stages(parallel: ParallelConfig, rank: int) -> list[int]:
    """Return the stages of a rank, first to last. rank: counted within its pipeline from 0."""
    stages = range(count_stages(parallel))
    return [stage for stage in stages if find_stage_rank(parallel, stage) == rank]


def compute_micro_batches(cfg: Any) -> tuple[int, int]:
    """Return (items of a micro-batch, micro-batches) of a data rank's step.

    An item is a sequence, or a pair of two. A data rank has a batch of its own. The product of the
    two is batch_size x gradient_accumulation_steps.
    """
    num_micro_batches = cfg.parallel.pipeline_microbatches if cfg.parallel.pipeline > 1 else None
    if num_micro_batches is None:
        return cfg.batch_size, cfg.gradient_accumulation_steps
    num_sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    return num_sequences // num_micro_batches, num_micro_batches


def count_fewest_micro_batches(parallel: ParallelConfig) -> int:
    """Return the fewest micro-batches a step with which a schedule keeps its ranks busy."""
    is_free = parallel.pipeline == 1 or parallel.pipeline_schedule == "gpipe"
    return 1 if is_free else parallel.pipeline


def find_schedule_fault(parallel: ParallelConfig, count: int) -> str | None:
    """Return why `count` micro-batches a step are too few for the schedule; None if they are not.

    The text is `found ..., expected ...; remedy`.
    """
    # Every schedule can order any number of them. With fewer than this, ranks wait for each other
    # even in the middle of a step, and an interleaved or zero-bubble schedule gains nothing.
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

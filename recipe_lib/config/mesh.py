"""Numbers that follow from a config alone: ranks of each mesh dimension, stages, micro-batches. No
torch.
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
DATA_DIMS = (
    "data_replicate",
    "data_shard",
)  # along these, ranks have different batches, or parts of a sequence
MODEL_DIMS = ("pipeline", "context", "tensor")  # the keys by which ranks have the same batch


def compute_mesh_shape(parallel: ParallelConfig, size: int) -> dict[str, int]:
    """Ranks by MESH_DIMS, in their order, for `size` ranks; SetupError names the numbers when they
    do not fit.

    Those that share a sequence are neighbors in the data dimension, which is so many times longer:
    to parameters, their gradients and states they are ranks like others that have a batch of their
    own.
    """
    sizes = {name: getattr(parallel, name) for name in MODEL_DIMS}
    inner = math.prod(sizes.values())
    if size % inner:
        several = [str(ranks) for ranks in sizes.values() if ranks > 1]
        product = f"{' x '.join(several)} = {inner}" if len(several) > 1 else str(inner)
        raise SetupError(
            f"{' x '.join(_dividing(parallel))}: found {product} for {size}"
            f" rank{'s' if size > 1 else ''}, expected a divisor of {size}; start a multiple of"
            f" {inner} ranks (--nproc_per_node)"
        )
    sizes |= dict(zip(DATA_DIMS, _data_shape(parallel, size // inner, inner), strict=True))
    sizes[_context_dim(parallel)] *= parallel.context
    return {name: sizes[name] for name in MESH_DIMS}


def _context_dim(parallel: ParallelConfig) -> str:
    """The dimension of the mesh that the ranks which share a sequence are part of."""
    return "data_replicate" if parallel.strategy == "ddp" else "data_shard"


def add_context_dim(parallel: ParallelConfig, shape: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the mesh's dimensions with one of its own for the ranks that share a sequence, if
    there are any.
    """
    parts = {_context_dim(parallel): shape[_context_dim(parallel)] // parallel.context}
    return _with_context(parallel, {**shape, **parts}, parallel.context)


def split_context_coordinate(parallel: ParallelConfig, place: Mapping[str, int]) -> dict[str, int]:
    """A rank's place along the dimensions of `add_context_dim`, of that along those of the mesh."""
    other, own = divmod(place[_context_dim(parallel)], parallel.context)
    return _with_context(parallel, {**place, _context_dim(parallel): other}, own)


def _with_context(
    parallel: ParallelConfig, numbers: Mapping[str, int], context: int
) -> dict[str, int]:
    if parallel.context == 1:
        return dict(numbers)
    tensor = MESH_DIMS.index("tensor")
    found = {name: numbers[name] for name in MESH_DIMS[:tensor]}
    return found | {"context": context} | {name: numbers[name] for name in MESH_DIMS[tensor:]}


def count_same_batch_ranks(parallel: ParallelConfig) -> int:
    """Ranks that have the same batch."""
    return math.prod(getattr(parallel, name) for name in MODEL_DIMS)


def count_token_ranks(parallel: ParallelConfig) -> int:
    """Ranks that share the tokens of a micro-batch between layers."""
    return parallel.context * parallel.tensor


def compute_padded_multiple(cfg: Any) -> int:
    """What the length of every padded sequence is a multiple of."""
    return math.lcm(cfg.data.pad_to_multiple_of, count_token_ranks(cfg.parallel))


def _dividing(parallel: ParallelConfig) -> list[str]:
    """The keys by which several ranks have the same batch."""
    return [f"parallel.{name}" for name in MODEL_DIMS if getattr(parallel, name) > 1]


def _data_shape(parallel: ParallelConfig, size: int, inner: int) -> tuple[int, int]:
    """(data_replicate, data_shard) for `size` different batches, of `inner` ranks each."""
    replicate, shard = parallel.data_replicate, parallel.data_shard
    if parallel.strategy == "ddp":
        return size, 1
    fitting = [str(number) for number in range(1, size + 1) if size % number == 0]
    possible = f"one of {', '.join(fitting)}" if size > 1 else "1"
    divided = f" (of {size * inner}, by {' and '.join(_dividing(parallel))})" if inner > 1 else ""
    ranks = f"{size} rank{'s' if size > 1 else ''}{divided}"
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
        remedy = f"parallel.data_replicate to {possible} and parallel.data_shard=-1"
        if size % replicate == 0:
            remedy = f"parallel.data_shard={size // replicate} or -1"
        raise SetupError(
            f"parallel: found data_replicate {replicate} x data_shard {shard} = {replicate * shard}"
            f" for {ranks}; set {remedy}, or start {replicate * shard * inner} ranks"
            " (--nproc_per_node)"
        )
    return replicate, shard


@dataclass(frozen=True)
class ScheduleFacts:
    """stages: on each rank; None: `parallel.pipeline_stages_per_rank`. folded: the first rank's
    last stage is the last of all (a V), else the stages go round the ranks. splits: backward is cut
    into input and weight gradients.
    """

    stages: int | None
    folded: bool
    splits: bool


SCHEDULES = {
    "gpipe": ScheduleFacts(1, folded=False, splits=False),
    "1f1b": ScheduleFacts(1, folded=False, splits=False),
    "interleaved_1f1b": ScheduleFacts(None, folded=False, splits=False),
    "interleaved_zero_bubble": ScheduleFacts(None, folded=False, splits=True),
    "zbv": ScheduleFacts(2, folded=True, splits=True),
}


def count_stages_per_rank(parallel: ParallelConfig) -> int:
    """Stages on each rank of a pipeline; 1 without one."""
    if parallel.pipeline == 1:
        return 1
    return SCHEDULES[parallel.pipeline_schedule].stages or parallel.pipeline_stages_per_rank


def count_stages(parallel: ParallelConfig) -> int:
    """Stages of the whole pipeline."""
    return parallel.pipeline * count_stages_per_rank(parallel)


def find_stage_rank(parallel: ParallelConfig, stage: int) -> int:
    """The place in its pipeline of the rank that has a stage."""
    turn, place = divmod(stage, parallel.pipeline)
    folded = SCHEDULES[parallel.pipeline_schedule].folded and turn % 2 == 1
    return parallel.pipeline - 1 - place if folded else place


def list_rank_stages(parallel: ParallelConfig, rank: int) -> list[int]:
    """The stages of a rank by its place in the pipeline, first to last."""
    return [
        stage for stage in range(count_stages(parallel)) if find_stage_rank(parallel, stage) == rank
    ]


def compute_micro_batches(cfg: Any) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches) of a data rank's step; the product is batch_size
    x accumulation.
    """
    sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    count = cfg.parallel.pipeline_microbatches if cfg.parallel.pipeline > 1 else None
    if count is None:
        return cfg.batch_size, cfg.gradient_accumulation_steps
    return sequences // count, count


def count_fewest_micro_batches(parallel: ParallelConfig) -> int:
    """The micro-batches a step that a schedule is made for; with fewer, ranks wait even in the
    middle of the step.
    """
    if parallel.pipeline == 1 or parallel.pipeline_schedule == "gpipe":
        return 1
    return parallel.pipeline


def find_schedule_fault(parallel: ParallelConfig, count: int) -> str | None:
    """Why so many micro-batches a step are too few for the schedule, as `found .., expected ..;
    remedy`; None: they do.

    Every schedule can order any number of them. With fewer than this, ranks wait for each other
    even in the middle of a step, and what an interleaved or zero-bubble schedule is taken for is
    not to be had.
    """
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

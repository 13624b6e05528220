"""Numbers of a pipeline that follow from a config alone: stages, micro-batches, and what a schedule needs. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the schema's keys ask this file what a schedule needs
    from recipe_lib.config.schema import ParallelConfig


@dataclass(frozen=True)
class ScheduleFacts:
    """stages: on each rank; None: `parallel.pipeline_stages_per_rank`. folded: the first rank's last stage is the
    last of all (a V), else the stages go round the ranks. splits: backward is cut into input and weight gradients."""

    stages: int | None
    folded: bool
    splits: bool


SCHEDULES = {
    "gpipe": ScheduleFacts(1, folded=False, splits=False),
    "1f1b": ScheduleFacts(1, folded=False, splits=False),
    "interleaved_1f1b": ScheduleFacts(None, folded=False, splits=False),
    "interleaved_zero_bubble": ScheduleFacts(None, folded=False, splits=True),
    "zbv": ScheduleFacts(2, folded=True, splits=True),
    "dualpipev": ScheduleFacts(2, folded=True, splits=True),
}


def stages_per_rank(parallel: "ParallelConfig") -> int:
    """Stages on each rank of a pipeline; 1 without one."""
    if parallel.pipeline == 1:
        return 1
    return SCHEDULES[parallel.pipeline_schedule].stages or parallel.pipeline_stages_per_rank


def stage_count(parallel: "ParallelConfig") -> int:
    """Stages of the whole pipeline."""
    return parallel.pipeline * stages_per_rank(parallel)


def rank_of_stage(parallel: "ParallelConfig", stage: int) -> int:
    """The place in its pipeline of the rank that has a stage."""
    turn, place = divmod(stage, parallel.pipeline)
    folded = SCHEDULES[parallel.pipeline_schedule].folded and turn % 2 == 1
    return parallel.pipeline - 1 - place if folded else place


def stages_of_rank(parallel: "ParallelConfig", rank: int) -> list[int]:
    """The stages of a rank by its place in the pipeline, first to last."""
    return [stage for stage in range(stage_count(parallel)) if rank_of_stage(parallel, stage) == rank]


def micro_batches(cfg: Any) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches) of a data rank's step; the product is batch_size x accumulation."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    count = cfg.parallel.pipeline_microbatches if cfg.parallel.pipeline > 1 else None
    if count is None:
        return cfg.batch_size, cfg.gradient_accumulation_steps
    return rows // count, count


def fewest_micro_batches(parallel: "ParallelConfig") -> int:
    """The micro-batches a step that a schedule is made for; with fewer, ranks wait even in the middle of the step."""
    if parallel.pipeline == 1 or parallel.pipeline_schedule == "gpipe":
        return 1
    return stage_count(parallel) if parallel.pipeline_schedule == "dualpipev" else parallel.pipeline


def schedule_fault(parallel: "ParallelConfig", count: int) -> str | None:
    """Why so many micro-batches a step are too few for the schedule, as `found .., expected ..; remedy`; None: they do.

    Every schedule can order any number of them. With fewer than this, ranks wait for each other even in the middle of
    a step, and what an interleaved or zero-bubble schedule is taken for is not to be had.
    """
    fewest = fewest_micro_batches(parallel)
    if count >= fewest:
        return None
    return (
        f"found {count} micro-batches a step, expected {fewest} or more for parallel.pipeline={parallel.pipeline} with "
        f"parallel.pipeline_schedule={parallel.pipeline_schedule}; set parallel.pipeline_microbatches to {fewest} or "
        "more (batch_size x gradient_accumulation_steps has to be a multiple of it), or parallel.pipeline lower"
    )

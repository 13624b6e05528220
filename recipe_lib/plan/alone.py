"""The full model on one device, without parallelism, to stand beside a rank of a run."""

import copy
from dataclasses import replace
from typing import Any

from recipe_lib.config.mesh import MODEL_DIMS, micro_batches
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.rank_plans import layer_rows, rank_plan
from recipe_lib.plan.result import Plan
from recipe_lib.report.phases import phase


def add_alone(plan: Plan, recipe_class: type, cfg: Any, settings: PlanSettings) -> None:
    """Sets `alone` of a plan, and of its layers what they keep so; costs about as much as planning a rank.

    Where the run is one rank it is that already.
    """
    if settings.ranks == 1:
        return
    with phase("simulating the full model on one device", leaves_line=False):
        alone = replace(settings, ranks=1, traced_ranks=(), phases=())
        found = simulate_rank(recipe_class, without_parallelism(cfg), alone, 0)
    plan.alone = rank_plan(0, found)
    kept = {row.module: row.kept for row in layer_rows(found)}
    for row in plan.layers:
        row.kept_alone = kept.get(row.module)


def without_parallelism(cfg: Any) -> Any:
    """A copy of a config for one rank, with micro-batches as large and as many."""
    other = copy.deepcopy(cfg)
    other.batch_size, other.gradient_accumulation_steps = micro_batches(cfg)
    sizes = dict.fromkeys(("data_replicate", *MODEL_DIMS), 1) | {"data_shard": -1, "pipeline_microbatches": None}
    other.parallel = replace(other.parallel, strategy="fsdp", **sizes)
    return other

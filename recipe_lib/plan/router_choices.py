"""What the router of a mixture of experts changes in a plan: no byte, since each token is computed by as many experts
whichever they are; and the time, since a grouped matmul reads the weights of the experts that have rows."""

from collections.abc import Mapping
from typing import Any

from recipe_lib.models.spec import MixtureSpec
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.pipeline_plan import staged
from recipe_lib.plan.result import Plan
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing.simulate import STEADY, Simulated
from recipe_lib.plan.world.shape_only_model import spec_of
from recipe_lib.units import format_duration


def mixture_of(cfg: Any) -> MixtureSpec | None:
    """The mixture of a plannable config's model; None without one, and of a model that is not native."""
    return getattr(spec_of(cfg), "mixture", None)


def say_router_choices(
    plan: Plan, cfg: Any, simulated: Mapping[int, Simulated], hardware: Hardware, calibration: Calibration | None
) -> None:
    """Adds to the plan of a mixture how long a step takes if the router's choice is as uneven as it can be, and what
    that means for its figures. simulated: by rank."""
    mixture = mixture_of(cfg)
    if mixture is None:
        return
    line = (
        f"each token is computed by {mixture.top_k} of {mixture.num_experts} experts and none is dropped: all bytes, "
        "and the verdict, which is of bytes, are the same whatever the router chooses"
    )
    if plan.time is not None:
        seconds = _same_experts(plan, cfg, mixture.top_k, simulated, hardware, calibration)
        plan.time.same_experts = seconds
        line += f"; times are those of even loads, {format_duration(plan.time.step)} a step"
        if seconds is not None:
            line += f", and {format_duration(seconds)} if all tokens of a micro-batch go to the same {mixture.top_k}"
    plan.assumptions.append(line)


def _same_experts(
    plan: Plan,
    cfg: Any,
    experts: int,
    simulated: Mapping[int, Simulated],
    hardware: Hardware,
    calibration: Calibration | None,
) -> float | None:
    """Seconds of a step in which so many experts have all rows of every grouped matmul."""
    wanted = simulated if plan.pipeline else {plan.heaviest.rank: simulated[plan.heaviest.rank]}
    timings = {rank: schedule(one.trace, STEADY, hardware, calibration, experts) for rank, one in wanted.items()}
    pipeline = staged(cfg, simulated, timings, hardware, calibration)
    return pipeline.step if pipeline else timings[plan.heaviest.rank].step

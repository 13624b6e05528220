"""Build a plan from a recipe and its config: the way into the planner.

`make_plan` simulates ranks (`simulate_rank`, `plan_ranks`), replays their memory through the
allocator, puts their operators on a time line, and sums it all up in a `Plan`
(`plan_schema.py`), which `views` print and `search` compares.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import recipe_lib
from recipe_lib.config.mesh import compute_micro_batches
from recipe_lib.config.precision import describe_stalled_means, find_capability_faults
from recipe_lib.errors import ConfigError
from recipe_lib.parallel.ddp import DTYPES
from recipe_lib.parallel.gradient_accumulation import list_collectives_once_a_step
from recipe_lib.plan.allocation.scratch import make_kernel_memory
from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    DOES_NOT_FIT,
    DeviceFacts,
    LayerRow,
    OutsideTorch,
    Plan,
    RankPlan,
)
from recipe_lib.plan.simulated_world.compiled_code import NotCompiled
from recipe_lib.plan.simulated_world.sequence_lengths import PlannedSequence
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.summary.assumptions import (
    list_assumptions,
    list_not_modeled,
    note_large_tensors,
)
from recipe_lib.plan.summary.communication import (
    build_communication_rows,
    build_dimension_plans,
    list_group_sizes,
)
from recipe_lib.plan.summary.fit_verdict import (
    decide_verdict,
    estimate_not_simulated,
    judge_host,
    lower_verdict,
)
from recipe_lib.plan.summary.rank_memory import (
    build_layer_rows,
    build_rank_plan,
    merge_layer_rows,
)
from recipe_lib.plan.summary.step_time import (
    SimulatedStep,
    add_router_choices,
    build_simulated_step,
    build_time_plan,
    list_first_ranks,
)
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_deep_model import simulate_deep
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, Simulated, simulate
from recipe_lib.report.phases import phase

PHASES = ("load", "validation", "save")
_SEQUENCE_FACTS = ("tokens", "source", "histogram", "documents", "group")


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan, besides recipe and config."""

    hardware: Hardware
    # Lengths of the sequences planned with, and where they are from.
    sequence: PlannedSequence
    # Ranks of the run.
    ranks: int = 1
    # Which of them are simulated; empty: the first of each place in a pipeline, or rank 0.
    traced_ranks: tuple[int, ...] = ()
    # As typed, for the report.
    recipe: str = ""
    config: str = ""
    overrides: tuple[str, ...] = ()
    # Of the whole run; None: those that the data makes.
    steps: int | None = None
    # Measured rates; None: those of the data sheet.
    calibration: Calibration | None = None
    # In place of what `outside_torch` says.
    outside: OutsideTorch | None = None
    # Traced besides set-up and steps.
    phases: tuple[str, ...] = PHASES
    # What was assumed on the way here.
    assumptions: tuple[str, ...] = ()
    # Whether operators are put on a time line.
    timed: bool = True

    def __post_init__(self) -> None:
        """Tell the device how many ranks share its machine."""
        ranks_here = min(self.ranks, self.hardware.ranks_per_node)
        # The class is frozen.
        object.__setattr__(self, "hardware", replace(self.hardware, ranks_here=ranks_here))


@dataclass(frozen=True)
class PlannedRanks:
    """The ranks that a plan simulates: what they do, their memory and their time."""

    # By rank.
    simulated: dict[int, Simulated]
    plans: list[RankPlan]
    # The rank for which the most is reserved.
    heaviest: RankPlan
    step: SimulatedStep


def make_plan(
    recipe_class: type, cfg: Any, settings: PlanSettings, steps: tuple[str, ...] = (FIRST, STEADY)
) -> tuple[Plan, Trace]:
    """Return the plan, and the trace of the heaviest rank.

    cfg: plannable. steps: as `simulate` takes them. Raises UserErrors of recipe and config.
    """
    hardware = settings.hardware
    planned = plan_ranks(recipe_class, cfg, settings=settings, steps=steps)
    simulated = planned.simulated
    heaviest = planned.heaviest
    heaviest_simulated = simulated[heaviest.rank]
    trace = heaviest_simulated.trace
    outside = settings.outside or _find_largest_outside(hardware, simulated)
    usable = hardware.memory - outside.total
    run_steps = settings.steps or settings.sequence.steps
    more, estimate = max(
        estimate_not_simulated(simulation, run_steps) for simulation in simulated.values()
    )
    verdict = decide_verdict(trace, heaviest, usable=usable, hardware=hardware)
    verdict = lower_verdict(verdict, more, heaviest=heaviest, usable=usable)
    if not judge_host(cfg, settings, trace)[0]:
        verdict = DOES_NOT_FIT
    plan = Plan(
        recipe=settings.recipe,
        config=settings.config,
        overrides=list(settings.overrides),
        model=str(cfg.model.preset or cfg.model.path),
        ranks=settings.ranks,
        mesh=heaviest_simulated.mesh,
        device=DeviceFacts(
            name=hardware.name,
            memory=hardware.memory,
            usable=usable,
            architecture=hardware.architecture,
            flops=hardware.rate(cfg.dtype),
            bandwidth=hardware.bandwidth,
            link=hardware.link.kind,
            link_bandwidth=hardware.link.bandwidth,
        ),
        sequence={name: getattr(settings.sequence, name) for name in _SEQUENCE_FACTS},
        verdict=verdict,
        margin=usable - heaviest.reserved - more,
        rank_plans=planned.plans,
        outside=outside,
        layers=_build_layers(planned),
        communication=build_communication_rows(trace, settings),
        time=build_time_plan(planned.step, simulated, settings=settings, dtype=cfg.dtype),
        pipeline=planned.step.pipeline,
        assumptions=[
            *settings.assumptions,
            *list_assumptions(cfg, settings, heaviest_simulated),
        ],
        not_modeled=list_not_modeled(cfg, settings.ranks, trace),
        estimate=estimate,
        ranks_per_node=hardware.ranks_per_node,
        dimensions=build_dimension_plans(
            heaviest_simulated.mesh,
            _list_traces_by_place(simulated),
            phase=STEADY,
            micro_batches=compute_micro_batches(cfg)[1],
            once=list_collectives_once_a_step(cfg.parallel),
        ),
        notes=note_large_tensors(trace, DTYPES[cfg.dtype].itemsize),
        versions={
            "tune-recipes": recipe_lib.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    )
    add_router_choices(
        plan, cfg, simulated=simulated, hardware=hardware, calibration=settings.calibration
    )
    stalled_means = describe_stalled_means(cfg)
    plan.notes += stalled_means
    plan.assumptions += stalled_means
    return plan, trace


def _find_largest_outside(hardware: Hardware, simulated: dict[int, Simulated]) -> OutsideTorch:
    """Return the memory outside of torch of the rank that has the most: in most communicators."""
    parts = [
        estimate_outside_torch(hardware, list_group_sizes(one.trace)) for one in simulated.values()
    ]
    return max(parts, key=lambda outside: outside.total)


def _build_layers(planned: PlannedRanks) -> list[LayerRow]:
    """Return the rows of the model's modules; in a pipeline each rank has some of them."""
    if planned.step.pipeline:
        return merge_layer_rows([build_layer_rows(one) for one in planned.simulated.values()])
    return build_layer_rows(planned.simulated[planned.heaviest.rank])


def _list_traces_by_place(simulated: dict[int, Simulated]) -> dict[int, Trace]:
    """Return the trace of the first simulated rank of each place in the pipeline, in order."""
    # Reversed, so that of a place's ranks the first one stays.
    traces = {one.coordinates.get("pipeline", 0): one.trace for one in reversed(simulated.values())}
    return dict(sorted(traces.items()))


def plan_ranks(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    steps: tuple[str, ...] = (FIRST, STEADY),
    limit: int | None = None,
) -> PlannedRanks:
    """Simulate the ranks of a plan.

    steps: as `simulate` takes them. limit: bytes; after the first rank with more of them active no
    other is simulated. Raises UserErrors of recipe and config.
    """
    simulated = {}
    plans: list[RankPlan] = []
    for rank in settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks):
        with phase(f"simulating rank {rank} of {settings.ranks}", leaves_line=False):
            simulated[rank] = simulate_rank(
                recipe_class, cfg, settings=settings, rank=rank, steps=steps
            )
        plans.append(build_rank_plan(rank, simulated[rank]))
        if limit is not None and plans[-1].peak.active > limit:
            break
    heaviest = max(plans, key=lambda plan: plan.reserved)
    timings = None
    if settings.timed:
        timings = {
            rank: schedule(
                simulation.trace,
                STEADY,
                hardware=settings.hardware,
                calibration=settings.calibration,
            )
            for rank, simulation in simulated.items()
            if rank == heaviest.rank or cfg.parallel.pipeline > 1
        }
    step = build_simulated_step(
        cfg,
        simulated,
        timings=timings,
        hardware=settings.hardware,
        calibration=settings.calibration,
    )
    return PlannedRanks(simulated=simulated, plans=plans, heaviest=heaviest, step=step)


def simulate_rank(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    rank: int,
    steps: tuple[str, ...] = (FIRST, STEADY),
    traced: int | None = None,
    checker: StreamChecker | None = None,
) -> Simulated:
    """Simulate one rank, with the kernels and the scratch of the planned device.

    steps, traced, checker: as `simulate` takes them. ConfigError for what the device cannot
    compute.
    """
    hardware = settings.hardware
    if hardware.capability is None and getattr(cfg, "matmul_dtype", None) == "fp8":
        raise ConfigError(
            "matmul_dtype: found fp8 for cpu, expected a GPU; choose int8, or remove matmul_dtype"
        )
    if hardware.capability is not None and (
        faults := find_capability_faults(cfg, hardware.name, hardware.capability)
    ):
        raise ConfigError(*faults)

    def run(run_cfg: Any) -> Simulated:
        return simulate(
            recipe_class,
            run_cfg,
            settings.sequence,
            rank=rank,
            ranks=settings.ranks,
            phases=settings.phases,
            steps=steps,
            like_cpu=hardware.architecture == "cpu",
            capability=hardware.capability or (8, 0),
            # Each run has its own: it knows what is there already.
            kernel_memory=make_kernel_memory(hardware.architecture),
            traced=traced,
            checker=checker,
        )

    # Streams are checked in the operators of all layers.
    if checker is not None:
        return run(cfg)
    try:
        return simulate_deep(recipe_class, cfg, run)
    except NotCompiled as fault:
        simulated = simulate_deep(recipe_class, replace(cfg, compile=False), run)
        note = (
            f"compile=true is planned without compiling, which takes more memory and time: {fault}"
        )
        return replace(simulated, notes=[*simulated.notes, note])

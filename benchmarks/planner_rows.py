"""Plan runs of which memory figures were published: rows, groups of rows and their tables.

`planner_865.py`, `planner_megatron.py` and `planner_replications.py` make a `Row` of each published
run, with the stack (the training program, ours or an imitated one) to plan. `plan_run` plans it,
once for all tables. A steady step is any but the first.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from unittest import mock

from benchmarks.megatron_stack import STEP, Gpt, Layout, trace_stages
from benchmarks.planner_stacks import (
    FSDP1,
    RECIPE,
    Stack,
    compute_product_written_out,
    make_recipe_class,
)
from benchmarks.planner_streams import MarkedTrace, mark_traces, replay_with_marks
from benchmarks.transformer_engine_stack import Llama
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.config import load_config
from recipe_lib.models import decoder
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import PhasePeak, Plan
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB

GB = 10**9
UNITS = {"GB": GB, "GiB": GIB}
# Metric, a field of `PhasePeak` -> its name on the page. They are peaks of torch's allocator.
METRICS = {
    "active": "active",
    "allocated": "allocated",
    "reserved": "reserved",
    "reserved_expandable": "reserved, expandable segments",
}
OURS = Stack()


@dataclass(frozen=True)
class Run:
    """A command line of `tune plan`."""

    config: str  # a shipped one
    ranks: int  # of one machine
    device: str  # as `--device` takes it
    tokens: int  # of a sequence
    overrides: tuple[str, ...]  # `key=value`
    recipe: str = RECIPE

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all overrides, `key=value`."""
        # The published runs launch a kernel for each operator.
        return (*self.overrides, "fused_kernels=false", "memory.recompute_cheap=false")

    @property
    def command(self) -> str:
        """Return the command as typed."""
        processes = f"--nproc_per_node {self.ranks} " if self.ranks > 1 else ""
        return (
            f"tune plan {processes}{self.recipe} --config {self.config} --device {self.device} "
            f"--sequence {self.tokens} {' '.join(self.keys)}"
        )


@dataclass(frozen=True)
class Row:
    """A published run, its figures, and what is planned for it."""

    name: str  # of the run
    whose: str  # the stack's name in the table: `theirs`, `ours`, or what it is
    run: Run | Layout  # a `Layout` with a `Gpt`
    stack: Stack | Gpt  # what is planned; a `Gpt` is Megatron's
    published: dict[str, float]  # figures by metric, in the group's unit
    goal: bool = False  # the plan is meant to come within 1 %


@dataclass(frozen=True)
class Group:
    """Rows of one source, and the text around them."""

    title: str
    source: str  # where the figures are, and of what
    unit: str  # of UNITS
    rows: list[Row]
    differs: list[str]  # what theirs and ours do differently, or what is assumed
    more: Callable[[], list[str]] = list  # returns lines of tables after the rows


@dataclass(frozen=True)
class Planned:
    """What a run is planned to hold."""

    peak: PhasePeak  # of a steady step
    # By kind of memory, the bytes that are live at the peak, not rounded up to blocks.
    kinds: dict[str, int] = field(default_factory=dict)
    verdict: str = ""  # of `tune plan`: does it fit? Empty for a `Layout`
    usable: int = 0  # bytes of the card for torch's allocator; 0 for a `Layout`


@lru_cache(maxsize=2)  # a trace is large
def trace_run(run: Run, stack: Stack) -> tuple[Plan, Trace]:
    """Plan a run in a stack; return the plan and the trace of its heaviest rank."""
    recipe = RecipeFile.find(run.recipe)
    cfg, _ = make_plannable(load_config(run.config, run.keys, recipe.load_schema()))
    sequence = choose_sequence(cfg, str(run.tokens))
    settings = PlanSettings(find_hardware(run.device), sequence, run.ranks, phases=(), timed=False)
    print(f"{run.command} ({stack})", file=sys.stderr, flush=True)
    product = mock.patch.object(decoder, "gated_activation", compute_product_written_out)
    # FSDP1 marks memory by record_stream; then the trace is a `MarkedTrace`.
    with product, mark_traces() if stack.sharding == FSDP1 else nullcontext():
        return make_plan(make_recipe_class(stack, run.recipe), cfg, settings)


@cache
def plan_run(run: Run | Layout, stack: Stack | Gpt | Llama) -> Planned:
    """Plan the peaks of a steady step: the heaviest rank's of `tune plan`, or stage's of a Layout.

    FSDP1's active bytes count memory that other streams may still use.
    """
    if isinstance(run, Layout):
        assert isinstance(stack, Gpt | Llama)
        print(f"{run} ({stack})", file=sys.stderr, flush=True)
        return max(
            (_plan_stage(trace) for trace in trace_stages(stack, run)),
            key=lambda planned: planned.peak.allocated,
        )
    assert isinstance(stack, Stack)
    plan, trace = trace_run(run, stack)
    peak = next(peak for peak in plan.heaviest.peaks if peak.phase == STEADY)
    if isinstance(trace, MarkedTrace):
        peak = replace(
            peak, active=replay_with_marks(trace, STEADY, find_hardware(run.device)).active
        )
    return Planned(
        peak,
        kinds=sum_kinds_at_peak(trace, STEADY),
        verdict=plan.verdict,
        usable=plan.device.usable,
    )


def _plan_stage(trace: Trace) -> Planned:
    """Return the peaks of a traced stage of Megatron's pipeline."""
    peaks = replay(trace).phases[STEP]
    peak = PhasePeak(
        STEP,
        active=peaks.active,
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        reserved_expandable=0,  # not planned, as no row has it
        host=0,
        requested=peaks.requested,
    )
    return Planned(peak, sum_kinds_at_peak(trace, STEP))


def sum_kinds_at_peak(trace: Trace, phase: str) -> dict[str, int]:
    """Sum the bytes that are live at a phase's peak of requested bytes, by kind of memory."""
    kinds: dict[str, int] = defaultdict(int)
    for number in trace.list_alive_at_peak(phase):
        kinds[trace.storages[number].kind] += trace.storages[number].bytes
    return dict(kinds)


def plan_amount(row: Row, metric: str, unit: str) -> float:
    """Return the planned figure of a row, in a unit of `UNITS`."""
    return float(getattr(plan_run(row.run, row.stack).peak, metric)) / UNITS[unit]


def compute_error(row: Row, metric: str, unit: str) -> float:
    """Return the error of a row's plan: planned over published, less one."""
    return plan_amount(row, metric, unit) / row.published[metric] - 1


def format_table(group: Group) -> list[str]:
    """Return a table with a line for each published figure."""
    lines = [
        f"| row | stack | metric | published, {group.unit} | planned, {group.unit} | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in group.rows:
        for metric, published in row.published.items():
            figures = f"{published:.2f} | {plan_amount(row, metric, group.unit):.2f}"
            error = compute_error(row, metric, group.unit)
            lines.append(
                f"| {row.name} | {row.whose} | {METRICS[metric]} | {figures} | {error:+.1%} |"
            )
    return lines

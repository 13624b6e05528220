"""Build a plan of a run's memory and time from a recipe class and its config.

`tune plan` calls `make_plan`, and `plan/search` calls `plan_ranks` for changed configs. Ranks are
simulated on tensors without bytes. A trace is what a simulated rank did: allocations, operators and
waits. A model of torch's allocator replays it, and its operators are put on a time line.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import recipe_lib
from recipe_lib.config.mesh import compute_micro_batches
from recipe_lib.config.precision import describe_stalled_means, find_capability_faults
from recipe_lib.errors import ConfigError
from recipe_lib.models import ExternalSpec
from recipe_lib.parallel.ddp import DTYPES
from recipe_lib.parallel.gradient_accumulation import list_collectives_once_a_step
from recipe_lib.plan.allocation.caching_allocator import LAUNCH_QUEUE
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
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.plan.simulated_world.shape_only_model import read_spec
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.summary.communication import (
    build_communication_rows,
    build_dimension_plans,
    list_group_sizes,
)
from recipe_lib.plan.summary.rank_memory import (
    build_layer_rows,
    build_rank_plan,
    decide_verdict,
    estimate_not_simulated,
    judge_host,
    lower_verdict,
    merge_layer_rows,
)
from recipe_lib.plan.summary.step_time import (
    SimulatedStep,
    add_router_choices,
    build_simulated_step,
    build_time_plan,
    find_rank_of_each_place,
    list_first_ranks,
)
from recipe_lib.plan.timing.cost import Calibration, is_attention
from recipe_lib.plan.timing.kernel_rates import choose_attention_kernel
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing.simulated_micro_batches import count_micro_batches_to_trace
from recipe_lib.plan.tracing.trace import ALLOC, Trace
from recipe_lib.plan.tracing.trace_deep_model import simulate_deep
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, Simulated, simulate
from recipe_lib.report.phases import phase
from recipe_lib.units import format_bytes

# Phases of a run that can be simulated besides set-up and steps.
PHASES = ("load", "validation", "save")
# Attributes of PlannedSequence that a plan has under `sequence`.
_SEQUENCE_FACTS = ("tokens", "source", "histogram", "documents", "group")
# Number of elements of a tensor from which on kernels fail that count in 32 bits: FlashAttention 2,
# which torch's attention runs, and Liger's kernels (Liger-Kernel issue 803). torch's own pointwise
# kernels and those that its compiler makes count such tensors in 64 bits.
LIMIT = 2**31
# Kinds of memory that are computed from tokens, and grow with them.
_TOKEN_KINDS = ("activations", "temporary", "logits", "communication", "gradients")


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan, besides recipe and config."""

    # The device of every rank.
    hardware: Hardware
    # Length of the sequences of a simulated batch, and where it is from.
    sequence: PlannedSequence
    # Number of ranks of the run.
    ranks: int = 1
    # Ranks that are simulated; empty: the first of each place (position in a pipeline), or rank 0.
    traced_ranks: tuple[int, ...] = ()
    # Recipe, config and overrides (`key=value`) as typed, for the report.
    recipe: str = ""
    config: str = ""
    overrides: tuple[str, ...] = ()
    # Optimizer steps of the run; None: `sequence.steps`, which the data give.
    steps: int | None = None
    # Measured rates of the device; None: those of the data sheet.
    calibration: Calibration | None = None
    # Device memory that torch's allocator does not hand out; None: by `estimate_outside_torch`.
    outside: OutsideTorch | None = None
    # Phases that are traced besides set-up and steps.
    phases: tuple[str, ...] = PHASES
    # Assumptions made before planning, sentences for the report.
    assumptions: tuple[str, ...] = ()
    # True: times are planned too.
    timed: bool = True

    def __post_init__(self) -> None:
        # The ranks that share a machine. object.__setattr__, since the dataclass is frozen.
        object.__setattr__(
            self,
            "hardware",
            replace(self.hardware, ranks_here=min(self.ranks, self.hardware.ranks_per_node)),
        )


@dataclass(frozen=True)
class PlannedRanks:
    """The simulated ranks of a plan, with their memory and time."""

    # Rank -> its simulation.
    simulated: dict[int, Simulated]
    # Memory of each simulated rank, in the order of `simulated`.
    plans: list[RankPlan]
    # Memory of the simulated rank that reserves the most.
    heaviest: RankPlan
    # Times of a step after the first one, and in a pipeline its schedule.
    step: SimulatedStep


def make_plan(
    recipe_class: type, cfg: Any, settings: PlanSettings, steps: tuple[str, ...] = (FIRST, STEADY)
) -> tuple[Plan, Trace]:
    """Return the plan, and the trace of the rank that reserves the most.

    steps: which steps are simulated, in order: the first, in which the optimizer makes its states,
    a later one, or both. Raises UserErrors of recipe and config.
    """
    hardware = settings.hardware
    planned = plan_ranks(recipe_class, cfg, settings=settings, steps=steps)
    simulated = planned.simulated
    heaviest = planned.heaviest
    heaviest_simulated = simulated[heaviest.rank]
    trace = heaviest_simulated.trace
    places = find_rank_of_each_place(simulated)
    outside = settings.outside or _find_largest_outside(hardware, simulated)
    usable = hardware.memory - outside.total
    steps_of_run = settings.steps or settings.sequence.steps
    # The most that micro-batches and steps that were not simulated may add on any rank.
    not_simulated = max(
        estimate_not_simulated(simulation, steps_of_run) for simulation in simulated.values()
    )
    verdict = decide_verdict(trace, heaviest, usable=usable, hardware=hardware)
    verdict = lower_verdict(verdict, not_simulated.bytes, heaviest=heaviest, usable=usable)
    host_verdict = judge_host(cfg, hardware, trace)
    if host_verdict is not None and not host_verdict.is_enough:
        verdict = DOES_NOT_FIT
    plan = Plan(
        recipe=settings.recipe,
        config=settings.config,
        overrides=list(settings.overrides),
        model=str(cfg.model.preset or cfg.model.path),
        ranks=settings.ranks,
        mesh=heaviest_simulated.mesh,
        device=_describe_device(hardware, cfg.dtype, usable=usable),
        sequence={name: getattr(settings.sequence, name) for name in _SEQUENCE_FACTS},
        verdict=verdict,
        margin=usable - heaviest.reserved - not_simulated.bytes,
        rank_plans=planned.plans,
        outside=outside,
        layers=_build_layers(planned),
        communication=build_communication_rows(
            trace, hardware, settings.calibration, timed=settings.timed
        ),
        time=build_time_plan(
            planned.step,
            simulated,
            steps=steps_of_run,
            hardware=hardware,
            calibration=settings.calibration,
            dtype=cfg.dtype,
        ),
        pipeline=planned.step.pipeline,
        assumptions=[
            *settings.assumptions,
            *list_assumptions(cfg, settings, heaviest_simulated),
        ],
        not_modeled=list_not_modeled(cfg, settings.ranks, trace),
        estimate=not_simulated.reason,
        ranks_per_node=hardware.ranks_per_node,
        dimensions=build_dimension_plans(
            heaviest_simulated.mesh,
            {place: simulated[rank].trace for place, rank in places.items()},
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
    # Sentences on optimizer states that lose their updates to rounding.
    stalled_means = describe_stalled_means(cfg)
    plan.notes += stalled_means
    plan.assumptions += stalled_means
    return plan, trace


def _describe_device(hardware: Hardware, dtype: str, usable: int) -> DeviceFacts:
    """Return the facts on a plan's device.

    dtype: of the run, such as `bf16`. usable: bytes that the allocator may take.
    """
    return DeviceFacts(
        name=hardware.name,
        memory=hardware.memory,
        usable=usable,
        architecture=hardware.architecture,
        flops=hardware.get_rate(dtype),
        bandwidth=hardware.bandwidth,
        link=hardware.link.kind,
        link_bandwidth=hardware.link.bandwidth,
    )


def _find_largest_outside(hardware: Hardware, simulated: dict[int, Simulated]) -> OutsideTorch:
    # Ranks differ in their communicators.
    return max(
        (
            estimate_outside_torch(hardware, list_group_sizes(simulation.trace))
            for simulation in simulated.values()
        ),
        key=lambda outside: outside.total,
    )


def _build_layers(planned: PlannedRanks) -> list[LayerRow]:
    # In a pipeline each rank has some of the modules.
    if planned.step.pipeline:
        return merge_layer_rows(list(map(build_layer_rows, planned.simulated.values())))
    return build_layer_rows(planned.simulated[planned.heaviest.rank])


def plan_ranks(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    steps: tuple[str, ...] = (FIRST, STEADY),
    limit: int | None = None,
) -> PlannedRanks:
    """Simulate the ranks of a plan.

    steps: as in `make_plan`. limit: bytes; ranks are simulated up to the first with a higher peak
    of active memory. None: all are. Raises UserErrors of recipe and config.
    """
    simulated = {}
    plans: list[RankPlan] = []
    for rank in settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks):
        # Shows the text on the terminal while it runs, and removes it then.
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
        # A pipeline's step needs the times of all its places, any other those of one rank.
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

    steps: as in `make_plan`. traced: so many micro-batches of a step run and count only for
    themselves; None: as many as can count for all. checker: finds races between streams. Raises
    ConfigError for a dtype or feature that the device does not support.
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
            capability=hardware.capability or (8, 0),  # not read for a CPU's kernels
            # A new one for each run: it remembers the workspaces that are taken already.
            kernel_memory=make_kernel_memory(hardware.architecture),
            traced=traced,
            checker=checker,
        )

    # Streams are checked in the operators of all layers.
    if checker is not None:
        return run(cfg)
    try:
        # With few of a deep model's layers, where these show what all of them do.
        return simulate_deep(recipe_class, cfg, run)
    except NotCompiled as fault:
        simulated = simulate_deep(recipe_class, replace(cfg, compile=False), run)
        note = (
            f"compile=true is planned without compiling, which takes more memory and time: {fault}"
        )
        return replace(simulated, notes=[*simulated.notes, note])


# What a plan assumes and leaves out, in sentences.


def list_assumptions(cfg: Any, settings: PlanSettings, simulated: Simulated) -> list[str]:
    """Return the assumptions of a plan, and the notes of the heaviest rank's simulation.

    Each is a sentence.
    """
    sequence = settings.sequence
    multiple = cfg.data.pad_to_multiple_of
    padding = -sequence.tokens % multiple
    padding_text = f", padded to {sequence.tokens + padding}" if multiple > 1 else ""
    # Without the reason after the colon, which stands in other lines of the report.
    source = sequence.source.partition(":")[0]
    lines = [
        (
            f"sequences of {sequence.tokens} tokens{padding_text} ({source}), batch_size"
            f" {cfg.batch_size}, gradient_accumulation_steps {cfg.gradient_accumulation_steps}"
        ),
        (
            f"kernels: {_describe_kernels(cfg, settings.hardware, simulated.trace)}; torch"
            f" {torch.__version__}"
        ),
        (
            "allocator: torch's default settings; `expandable` with"
            " PYTORCH_ALLOC_CONF=expandable_segments:True"
        ),
    ]
    traced = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
    if settings.ranks > 1:
        ranks_text = (
            f"ranks {', '.join(map(str, traced))}" if len(traced) > 1 else f"rank {traced[0]}"
        )
        lines.append(
            f"of {settings.ranks} ranks, {ranks_text} simulated; first ranks hold the larger part"
            " of uneven shards"
        )
    spec = read_spec(cfg)
    if isinstance(spec, ExternalSpec):
        device_type = "cpu" if settings.hardware.architecture == "cpu" else "cuda"
        if scans := spec.describe_scans(device_type):
            lines.append(f"scans: {scans}")
            if scans.startswith("kernels"):
                lines[-1] += (
                    ", planned by the products of their algorithms, with which no run was compared"
                )
    if cfg.parallel.pipeline > 1:
        lines += _list_pipeline_assumptions(cfg, len(traced))
    if host_verdict := judge_host(cfg, settings.hardware, simulated.trace):
        lines.append(host_verdict.sentence)
    if not simulated.repeats and not simulated.step_growth:
        lines.append(
            "the second step left less memory than the first: later steps may differ from it"
        )
    return lines + simulated.notes


def _describe_kernels(cfg: Any, hardware: Hardware, trace: Trace) -> str:
    if hardware.architecture == "cpu":
        return "a CPU's"
    # By the width of the heads, which not every kernel has.
    attention = choose_attention_kernel(
        hardware,
        "aten::_scaled_dot_product_flash_attention",
        width=next((op.shape[-1] for op in trace.ops if is_attention(op) and op.shape), 0),
    )
    kernels = (
        f"{attention} attention (with packed documents or windows: varlen flash), fused RMSNorm"
    )
    if cfg.fused_kernels:
        kernels += (
            ", fused rotary embedding, gated activation, soft-capped scores, loss and"
            " dequantizing (by Triton)"
        )
    if attention == "cudnn":
        kernels += "; cudnn attention has its own times, and flash attention's workspace"
    return kernels


def _list_pipeline_assumptions(cfg: Any, simulated_ranks: int) -> list[str]:
    """Return what the figures of a pipeline rest on. simulated_ranks: their number."""
    _, count = compute_micro_batches(cfg)
    traced = max(count_micro_batches_to_trace(cfg, place) for place in range(cfg.parallel.pipeline))
    lines = [
        "pipeline: every rank computes as fast as its trace says; a transfer begins when both ranks"
        " are ready"
    ]
    if traced < count:
        lines.append(
            f"pipeline: at most {traced} of the {count} micro-batches of a step are traced on a"
            " rank, which is enough to hold all that it holds with all of them; the others take as"
            " long as those like them"
        )
    if simulated_ranks < cfg.parallel.pipeline:
        lines.append(
            "pipeline: --rank leaves pipeline ranks out, so neither the heaviest rank nor the time"
            " is certain"
        )
    return lines


def list_not_modeled(cfg: Any, ranks: int, trace: Trace) -> list[str]:
    """Return what a plan leaves out, in words.

    ranks: number of ranks of the run. trace: of the heaviest one.
    """
    lines = ["CUDA graphs", "other processes on the device"]
    if ranks > 1:
        lines.append("NCCL's buffers are a published figure of another machine, not a model")
    if trace.uses:
        lines.append(
            "record_stream: how soon another stream is done with memory that is freed; planned is"
            f" the longest that a host can be ahead of it, {LAUNCH_QUEUE:,} kernels"
        )
    if cfg.trained_adapters is not None and cfg.trained_adapters.merge_on_save:
        lines.append(
            "lora.merge_on_save: the merged model is written layer by layer after training"
        )
    return lines


def note_large_tensors(trace: Trace, itemsize: int) -> list[str]:
    """Return a warning if a tensor computed from tokens may have LIMIT elements or more, else [].

    itemsize: bytes of an element in the run's dtype, as a trace has only the bytes of a tensor.
    """
    storages = (trace.storages[number] for kind, number in trace.events if kind == ALLOC)
    # A storage with a label belongs to a parameter, and does not grow with the tokens.
    token_storages = [
        storage
        for storage in storages
        if storage.device and storage.kind in _TOKEN_KINDS and not storage.label
    ]
    largest = max(token_storages, key=lambda storage: storage.bytes, default=None)
    if largest is None or largest.bytes < LIMIT * itemsize:
        return []
    return [
        f"{largest.module or 'the step'} makes a tensor of {largest.bytes // itemsize:,} elements"
        f" ({format_bytes(largest.bytes)}): kernels that count in 32 bits, such as FlashAttention"
        f" 2, fail from {LIMIT:,} on; share sequences among more ranks (parallel.context), or set"
        " max_seq_len lower"
    ]

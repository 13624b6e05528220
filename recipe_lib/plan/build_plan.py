"""A plan from a recipe and its config: simulated, replayed through the allocator, put on a time
line, summed up.
"""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import recipe_lib
from recipe_lib.config.compute_capability import find_capability_faults
from recipe_lib.config.mesh import DATA_DIMS, compute_micro_batches
from recipe_lib.config.optimizer_precision import describe_stalled_means
from recipe_lib.errors import ConfigError
from recipe_lib.parallel.ddp import DTYPES
from recipe_lib.parallel.gradient_accumulation import once_a_step
from recipe_lib.plan.allocation.caching_allocator import LAUNCH_QUEUE
from recipe_lib.plan.allocation.scratch import make_kernel_memory
from recipe_lib.plan.allocation.untraced_memory import (
    choose_attention_backend,
    estimate_outside_torch,
)
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    DOES_NOT_FIT,
    CommunicationRow,
    DeviceFacts,
    DimensionPlan,
    OutsideTorch,
    Plan,
    RankPlan,
    TimePlan,
    Volume,
    list_rank_groups,
)
from recipe_lib.plan.simulated_world.compiled_code import NotCompiled
from recipe_lib.plan.simulated_world.sequence_lengths import PlannedSequence
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.summary.rank_memory import (
    SimulatedStep,
    add_router_choices,
    build_layer_rows,
    build_rank_plan,
    build_simulated_step,
    decide_verdict,
    estimate_not_simulated,
    list_first_ranks,
    list_pipeline_assumptions,
    lower_verdict,
    merge_layer_rows,
)
from recipe_lib.plan.timing.cost import (
    Calibration,
    compute_collective_seconds,
    compute_model_flops_utilization,
    count_model_flops,
    count_wire_bytes,
    describe_error,
)
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    MATMULS,
    MEMORY_BOUND,
    count_launched_operators,
    schedule,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.trace import ALLOC, Collective, Trace
from recipe_lib.plan.tracing.trace_deep_model import simulate_deep
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, Simulated, simulate
from recipe_lib.plan.views.tables import split_number
from recipe_lib.plan.views.verdict_text import HOST_ALLOWS
from recipe_lib.report.phases import phase
from recipe_lib.units import GIB, format_bytes

PHASES = ("load", "validation", "save")
_SEQUENCE_FACTS = ("tokens", "source", "histogram", "documents", "group")


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for. ranks: of the run; traced_ranks: which of them are simulated, none:
    the first of each place in a pipeline, or rank 0. steps: of the whole run.

    recipe, config, overrides: as typed, for the report. outside: in place of what `outside_torch`
    says. phases: traced besides set-up and steps. assumptions: what was assumed on the way here.
    timed: whether operators are put on a time line.
    """

    hardware: Hardware
    sequence: PlannedSequence
    ranks: int = 1
    traced_ranks: tuple[int, ...] = ()
    recipe: str = ""
    config: str = ""
    overrides: tuple[str, ...] = ()
    steps: int | None = None
    calibration: Calibration | None = None
    outside: OutsideTorch | None = None
    phases: tuple[str, ...] = PHASES
    assumptions: tuple[str, ...] = ()
    timed: bool = True

    def __post_init__(self) -> None:
        """The device knows how many ranks share its machine."""
        here = min(self.ranks, self.hardware.ranks_per_node)
        object.__setattr__(self, "hardware", replace(self.hardware, ranks_here=here))


@dataclass(frozen=True)
class PlannedRanks:
    """The ranks that a plan simulates: what they do, their memory and their time."""

    # By rank.
    simulated: dict[int, Simulated]
    plans: list[RankPlan]
    # The rank for which the most is reserved.
    heaviest: RankPlan
    step: SimulatedStep


def plan_ranks(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    steps: tuple[str, ...] = (FIRST, STEADY),
    limit: int | None = None,
) -> PlannedRanks:
    """Simulate the ranks of a plan. steps: as `simulate` takes them. limit: after the first rank
    with more active bytes no other is simulated. Raises UserErrors of recipe and config.
    """
    simulated = {}
    plans: list[RankPlan] = []
    for rank in settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks):
        with phase(f"simulating rank {rank} of {settings.ranks}", leaves_line=False):
            simulated[rank] = simulate_rank(recipe_class, cfg, settings, rank, steps)
        plans.append(build_rank_plan(rank, simulated[rank]))
        if limit is not None and plans[-1].peak.active > limit:
            break
    heaviest = max(plans, key=lambda plan: plan.reserved)
    timings = None
    if settings.timed:
        timings = {
            rank: schedule(found.trace, STEADY, settings.hardware, settings.calibration)
            for rank, found in simulated.items()
            if rank == heaviest.rank or cfg.parallel.pipeline > 1
        }
    step = build_simulated_step(cfg, simulated, timings, settings.hardware, settings.calibration)
    return PlannedRanks(simulated, plans, heaviest, step)


def make_plan(
    recipe_class: type, cfg: Any, settings: PlanSettings, steps: tuple[str, ...] = (FIRST, STEADY)
) -> tuple[Plan, Trace]:
    """The plan, and the trace of the heaviest rank. cfg: plannable. Raises UserErrors of recipe and
    config.
    """
    hardware = settings.hardware
    planned = plan_ranks(recipe_class, cfg, settings, steps)
    simulated = planned.simulated
    pipeline = planned.step.pipeline
    heaviest = planned.heaviest
    outside = settings.outside or max(
        (
            estimate_outside_torch(hardware, list_group_sizes(found.trace))
            for found in simulated.values()
        ),
        key=lambda one: one.total,
    )
    usable = hardware.memory - outside.total
    found = simulated[heaviest.rank]
    more, estimate = max(
        estimate_not_simulated(one, settings.steps or settings.sequence.steps)
        for one in simulated.values()
    )
    verdict = lower_verdict(
        decide_verdict(found.trace, heaviest, usable, hardware), more, heaviest, usable
    )
    if not _judge_host(cfg, settings, found.trace)[0]:
        verdict = DOES_NOT_FIT
    places = {one.coordinates.get("pipeline", 0): one.trace for one in reversed(simulated.values())}
    plan = Plan(
        recipe=settings.recipe,
        config=settings.config,
        overrides=list(settings.overrides),
        model=str(cfg.model.preset or cfg.model.path),
        ranks=settings.ranks,
        mesh=found.mesh,
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
        layers=(
            merge_layer_rows([build_layer_rows(one) for one in simulated.values()])
            if pipeline
            else build_layer_rows(found)
        ),
        communication=_build_communication_rows(found.trace, settings),
        time=_build_time_plan(planned, settings, cfg.dtype),
        pipeline=pipeline,
        assumptions=[*settings.assumptions, *_list_assumptions(cfg, settings, found)],
        not_modeled=_list_not_modeled(cfg, hardware, settings.ranks, found.trace),
        estimate=estimate,
        ranks_per_node=hardware.ranks_per_node,
        dimensions=build_dimension_plans(
            found.mesh,
            dict(sorted(places.items())),
            STEADY,
            compute_micro_batches(cfg)[1],
            once_a_step(cfg.parallel),
        ),
        notes=note_large_tensors(found.trace, DTYPES[cfg.dtype].itemsize),
        versions={
            "tune-recipes": recipe_lib.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    )
    add_router_choices(plan, cfg, simulated, hardware, settings.calibration)
    stalled_means = describe_stalled_means(cfg)
    plan.notes += stalled_means
    plan.assumptions += stalled_means
    return plan, found.trace


def simulate_rank(
    recipe_class: type,
    cfg: Any,
    settings: PlanSettings,
    rank: int,
    steps: tuple[str, ...] = (FIRST, STEADY),
    traced: int | None = None,
    checker: StreamChecker | None = None,
) -> Simulated:
    """One rank's trace, with the kernels and the scratch of the planned device. steps, traced,
    checker: as `simulate` takes them. ConfigError for what the device cannot compute.
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

    def run(model: Any) -> Simulated:
        return simulate(
            recipe_class,
            model,
            settings.sequence,
            rank=rank,
            ranks=settings.ranks,
            phases=settings.phases,
            steps=steps,
            like_cpu=hardware.architecture == "cpu",
            capability=hardware.capability or (8, 0),
            kernel_memory=make_kernel_memory(
                hardware.architecture
            ),  # each run's own: it knows what is there already
            traced=traced,
            checker=checker,
        )

    if checker is not None:
        return run(cfg)
    try:
        return simulate_deep(recipe_class, cfg, run)
    except NotCompiled as fault:
        found = simulate_deep(recipe_class, replace(cfg, compile=False), run)
        why = (
            f"compile=true is planned without compiling, which takes more memory and time: {fault}"
        )
        return replace(found, notes=[*found.notes, why])


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _build_communication_rows(trace: Trace, settings: PlanSettings) -> list[CommunicationRow]:
    """Alike collectives of the steady step as one row each; numbers of layers become `*`."""
    rows: dict[tuple[Any, ...], CommunicationRow] = {}
    for op in trace.iterate_ops(STEADY):
        if op.collective is None:
            continue
        collective, module = op.collective, _NUMBER.sub("*", op.module)
        key = (
            collective.operation,
            collective.dim,
            collective.ranks,
            op.part,
            module,
            collective.shapes,
            op.dtype,
        )
        if key in rows:
            rows[key].count += op.repeats
            continue
        rows[key] = CommunicationRow(
            operation=collective.operation,
            dim=collective.dim,
            ranks=list(collective.ranks),
            where=op.part,
            module=module,
            shapes=[list(shape) for shape in collective.shapes],
            dtype=collective.dtype,
            bytes=collective.bytes,
            wire_bytes=count_wire_bytes(
                collective.operation, collective.bytes, len(collective.ranks)
            ),
            count=op.repeats,
            seconds=(
                compute_collective_seconds(collective, settings.hardware, settings.calibration)
                if settings.timed
                else 0.0
            ),
        )
    return [row for row in rows.values() if len(row.ranks) > 1]


def _build_time_plan(planned: PlannedRanks, settings: PlanSettings, dtype: str) -> TimePlan | None:
    """Of the heaviest rank, or in a pipeline of the one that computes the longest. None where no
    time is wanted, or the places of a pipeline are not all known.
    """
    sums = planned.step.sums
    trace = planned.step.trace
    seconds = planned.step.seconds
    if sums is None or trace is None or seconds is None:
        return None
    steps = settings.steps or settings.sequence.steps
    simulated = planned.simulated
    flops = [
        count_model_flops(found.trace, STEADY) for found in simulated.values()
    ]  # each place has as many ranks
    mfu = compute_model_flops_utilization(
        sum(flops) / len(flops), seconds, settings.hardware, dtype
    )
    tokens = next(iter(simulated.values())).tokens
    kinds = sum_time_by_kind(trace, STEADY, settings.hardware, settings.calibration)
    return TimePlan(
        compute=sums.compute,
        communication=sums.communication,
        exposed=sums.exposed,
        launch=sums.launch,
        step=seconds,
        tokens_per_step=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        mfu=mfu,
        steps=steps,
        total=steps * seconds if steps else None,
        calibrated=settings.calibration is not None,
        error=describe_error(settings.hardware, settings.calibration),
        copies=sums.copies,
        copies_exposed=sums.copies_exposed,
        on_host=sums.on_host,
        matmuls=kinds[MATMULS],
        attention=kinds[ATTENTION],
        memory_bound=kinds[MEMORY_BOUND],
        idle=max(0.0, seconds - sums.compute - sums.exposed - sums.copies_exposed - sums.on_host),
        operators=count_launched_operators(trace, STEADY),
    )


def _list_assumptions(cfg: Any, settings: PlanSettings, found: Simulated) -> list[str]:
    """What the figures rest on."""
    like_cpu = settings.hardware.architecture == "cpu"
    kernels = (
        "a CPU's"
        if like_cpu
        else "flash attention (documents of packed sequences: varlen flash), fused RMSNorm"
    )
    if not like_cpu and cfg.fused_kernels:
        kernels += (
            ", fused rotary embedding, gated activation, soft-capped scores, loss and dequantizing"
            " (by Triton)"
        )
    if choose_attention_backend(settings.hardware.architecture) == "cudnn":
        kernels += (
            "; for unpacked sequences torch takes cuDNN's attention here: its times, with flash"
            " attention's workspace"
        )
    multiple = cfg.data.pad_to_multiple_of
    padded = (
        f", padded to {-(-settings.sequence.tokens // multiple) * multiple}" if multiple > 1 else ""
    )
    source = settings.sequence.source.partition(":")[
        0
    ]  # why it is that one, the run's own lines say
    lines = [
        (
            f"sequences of {settings.sequence.tokens} tokens{padded} ({source}), batch_size"
            f" {cfg.batch_size}, gradient_accumulation_steps {cfg.gradient_accumulation_steps}"
        ),
        f"kernels: {kernels}; torch {torch.__version__}",
        (
            "allocator: torch's default settings; `expandable` with"
            " PYTORCH_ALLOC_CONF=expandable_segments:True"
        ),
    ]
    if settings.ranks > 1:
        traced = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
        found_ranks = (
            f"rank {traced[0]}" if len(traced) == 1 else f"ranks {', '.join(map(str, traced))}"
        )
        lines.append(
            f"of {settings.ranks} ranks, {found_ranks} simulated; first ranks hold the larger part"
            " of uneven shards"
        )
    lines += list_pipeline_assumptions(cfg, traced) if cfg.parallel.pipeline > 1 else []
    lines += _judge_host(cfg, settings, found.trace)[1]
    if not found.repeats and not found.step_growth:
        lines.append(
            "the second step left less memory than the first: later steps may differ from it"
        )
    return lines + found.notes


def _judge_host(cfg: Any, settings: PlanSettings, trace: Trace) -> tuple[bool, list[str]]:
    """Return whether what the ranks of a machine keep on the host is what the config allows them,
    and that in words; nothing is said where it allows everything.
    """
    allowed = cfg.memory.host_memory_limit_gib
    if allowed is None:
        return True, []
    ranks = min(settings.ranks, settings.hardware.ranks_per_node)
    most = ranks * max(trace.find_active_peaks(device=False).values(), default=0)
    is_enough = most <= allowed * GIB
    verdict = "enough" if is_enough else "too little, a run is refused"
    return is_enough, [
        f"{HOST_ALLOWS} {allowed:g} GiB for {ranks} rank{'s' if ranks > 1 else ''} of a machine,"
        f" which take {format_bytes(most)}: {verdict}"
    ]


def _list_not_modeled(cfg: Any, hardware: Hardware, ranks: int, trace: Trace) -> list[str]:
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


# What all ranks communicate in a step, from the traces of a few. No torch in here.
#
# Of each place in the pipeline one rank is simulated. Ranks of one place communicate alike (shards
# are padded to equal sizes), so that sums over all ranks are those of the places times their ranks.


_OF_MICRO_BATCHES = (
    "forward",
    "backward",
    "recompute",
)  # parts of a step; the others are once a step


def build_dimension_plans(
    mesh: Mapping[str, int],
    traces: Mapping[int, Trace],
    phase: str,
    micro_batches: int,
    once: Collection[str] = (),
) -> list[DimensionPlan]:
    """Of every dimension with more than one rank. traces: by place in the pipeline, of one rank
    each; phase: the step that is counted. micro_batches: of it. once: operations among data ranks
    that are once a step, not in each of them.
    """
    counted = {place: _Counted(trace, phase, mesh, once) for place, trace in traces.items()}
    found_keys = dict.fromkeys(key for one in counted.values() for key in one.step)
    silent = [
        name
        for name, size in mesh.items()
        if size > 1 and not any(name in along for _, along in found_keys)
    ]
    places = {name: place for place, name in enumerate(mesh)}
    keys = [*found_keys, *((name, (name,)) for name in silent)]
    keys.sort(key=lambda key: places.get(key[0], len(mesh)))
    layers = sum(len(one.layers) for one in counted.values())
    whole = len(traces) == mesh.get("pipeline", 1)
    found = []
    for key in keys:
        step = [one.step[key] for one in counted.values()]
        each = [one.inside[key].part(micro_batches) for one in counted.values()]
        plan = DimensionPlan(key[0], list(key[1]), list_rank_groups(mesh, key[1]), step, each)
        if whole:
            of_place = math.prod(mesh.values()) // len(traces)
            plan.cluster_step = sum(step, Volume()).times(of_place)
            plan.cluster_micro_batch = sum(each, Volume()).times(of_place)
        plan.layer = _find_usual_layer(
            [one.in_layers[key] for one in counted.values()], layers * micro_batches
        )
        found.append(plan)
    return found


def list_group_sizes(trace: Trace) -> list[int]:
    """Return the sizes of the groups that communicate in a trace.

    Ranks that share sequences have a group of their own also where they are all.
    """
    groups = {
        (op.collective.dim == "context", op.collective.ranks) for op in trace.ops if op.collective
    }
    return [len(ranks) for _, ranks in sorted(groups)]


_Key = tuple[
    str, tuple[str, ...]
]  # a dimension's name, and the dimensions along which its groups lie


class _Counted:
    """What one rank communicates in a step, by dimension: in all, in micro-batches, in layers for
    them. layers: their paths.
    """

    def __init__(
        self, trace: Trace, phase: str, mesh: Mapping[str, int], once: Collection[str]
    ) -> None:
        self.step: dict[_Key, Volume] = defaultdict(Volume)
        self.inside: dict[_Key, Volume] = defaultdict(Volume)
        self.in_layers: dict[_Key, Counter[tuple[str, int, int]]] = defaultdict(
            Counter
        )  # operation, bytes, on the wire
        self.layers: set[str] = set()
        for op in trace.iterate_ops(phase):
            before, at, _ = split_number(op.module)
            if at is not None:
                self.layers.add(f"{before}{at}")
            if op.collective is None or len(op.collective.ranks) < 2:
                continue
            key = _make_dimension_key(op.collective, mesh)
            sent = count_wire_bytes(
                op.collective.operation, op.collective.bytes, len(op.collective.ranks)
            )
            volume = Volume(
                1, op.collective.bytes, 0 if op.collective.operation == "recv" else sent
            )
            self.step[key] += volume.times(op.repeats)
            is_once = op.collective.operation in once and op.collective.dim in DATA_DIMS
            if op.part in _OF_MICRO_BATCHES and not is_once:
                self.inside[key] += volume.times(op.repeats)
                if at is not None:
                    alike = (op.collective.operation, op.collective.bytes, int(volume.wire_bytes))
                    self.in_layers[key][alike] += op.repeats


def _make_dimension_key(collective: Collective, mesh: Mapping[str, int]) -> _Key:
    places: dict[str, set[int]] = {}
    step = 1  # between neighbors along a dimension
    for name in reversed(list(mesh)):
        places[name] = {rank // step % mesh[name] for rank in collective.ranks}
        step *= mesh[name]
    return collective.dim, tuple(name for name in mesh if len(places[name]) > 1)


def _find_usual_layer(
    places: Iterable[Counter[tuple[str, int, int]]], passes: int
) -> Volume | None:
    """What most layers have in one pass of `passes`: of a neighbor's gather, which a layer may
    issue, there are few.
    """
    counts = sum(places, Counter())
    each = {alike: round(count / passes) for alike, count in counts.items()} if passes else {}
    found = sum(
        (Volume(1, size, sent).times(times) for (_, size, sent), times in each.items()), Volume()
    )
    return found if found.operations else None


# Tensors of 2^31 elements or more: known for failing in kernels that count in 32 bits.
#
# FlashAttention 2, which torch's attention runs, and Liger's kernels do (Liger-Kernel issue 803);
# torch's own pointwise kernels and those that its compiler makes count such tensors in 64 bits.


LIMIT = 2**31
_KINDS = ("activations", "temporary", "logits", "communication", "gradients")


def note_large_tensors(trace: Trace, itemsize: int) -> list[str]:
    """What to know of a plan whose largest tensor that is computed from tokens may have LIMIT
    elements. itemsize: bytes of one.
    """
    made = (trace.storages[number] for kind, number in trace.events if kind == ALLOC)
    of_tokens = (one for one in made if one.device and one.kind in _KINDS and not one.label)
    largest = max(of_tokens, key=lambda one: one.bytes, default=None)
    if largest is None or largest.bytes < LIMIT * itemsize:
        return []
    return [
        f"{largest.module or 'the step'} makes a tensor of {largest.bytes // itemsize:,} elements"
        f" ({format_bytes(largest.bytes)}): kernels that count in 32 bits, such as FlashAttention"
        f" 2, fail from {LIMIT:,} on; share sequences among more ranks (parallel.context), or set"
        " max_seq_len lower"
    ]

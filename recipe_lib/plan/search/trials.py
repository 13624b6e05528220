"""Estimate the memory and time of a run with changed config keys, in processes on all cores.

A change is a dotted key and its value. `apply_changes` makes the changed config, `estimate_run`
simulates a steady step of it (any but the first), `try_settings` makes a `Candidate` of the
estimate. `fastest_settings.py` calls `try_settings` through `open_workers`, `advice.py` calls
`try_estimate` through `run_in_processes`. A place is a coordinate in a pipeline.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from recipe_lib.config.compatibility.table import find_broken_rules
from recipe_lib.config.describe import format_value
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.key_conditions import explain_idle_key
from recipe_lib.config.mesh import compute_micro_batches, count_same_batch_ranks
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.data.tokenize_dataset import count_workers, start_forks
from recipe_lib.errors import SetupError, UserError
from recipe_lib.parallel.world import count_communicator_ranks
from recipe_lib.plan.allocation.caching_allocator import round_size
from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch
from recipe_lib.plan.build_plan import PlanSettings, plan_ranks
from recipe_lib.plan.simulated_world.simulated_device import is_registered
from recipe_lib.plan.summary.module_paths import list_outermost
from recipe_lib.plan.summary.step_time import find_rank_of_each_place
from recipe_lib.plan.timing.cost import compute_least_op_seconds, count_wire_bytes
from recipe_lib.plan.tracing.simulated_micro_batches import list_peers
from recipe_lib.plan.tracing.trace import OP, PHASE, Storage, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, list_short_steps
from recipe_lib.report.phases import phase

IN_LAYERS = ".layers."  # stands in the path of every module inside a decoder layer
_IN_MODEL = ("forward", "recompute", "backward")  # parts of a step that run the model


@dataclass(frozen=True)
class Estimate:
    """The memory and time of a step on the rank that reserves the most, bytes of its device."""

    # Peak of bytes in blocks that the caching allocator has handed out: `active_bytes` of torch.
    active: int
    # Peak of bytes that the allocator reserves; some percent off, as the trial simulates neither
    # loading nor the first step, which leave reserved memory behind.
    reserved: int
    # The same with the allocator's expandable segments.
    reserved_expandable: int
    # Peak of bytes in host memory, the largest of the simulated ranks.
    host: int
    # Seconds of a steady step; 0: not timed, or not all places of a pipeline were simulated.
    seconds: float
    # Tokens of a step on all ranks.
    tokens: int
    # Bytes in blocks between two steps: parameters and states.
    held: int
    # Bytes of the full model.
    parameters: int
    # Bytes of the full model's trained weights.
    trained: int
    # Path of the module that ran at the peak.
    module: str
    # Bytes of activations that all layers keep for the backward of one sequence: a lower bound for
    # any way to share the same layers. 0 in a pipeline, whose ranks have some of the layers each.
    kept: float = 0.0
    # Seconds of a step's matmuls and attention alone, a lower bound likewise; 0 in a pipeline.
    least_seconds: float = 0.0
    # Bytes that the rank sends to others in a step.
    sent: int = 0
    # Bytes that the rank copies to and from its host in a step.
    copied: int = 0
    # Bytes that the allocator may take on the device.
    usable: int = 0


def estimate_run(
    recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None
) -> Estimate:
    """Return the estimate of a steady step of a config, without load, validation and save.

    limit: bytes; a pipeline's places are simulated up to the first whose active peak is higher;
    None: all of them. Raises UserErrors of the recipe and of rules on config keys.
    """
    planned = plan_ranks(
        recipe_class,
        cfg,
        replace(settings, phases=()),
        steps=list_short_steps(cfg),
        limit=limit,
    )
    rank = planned.heaviest
    simulation = planned.simulated[rank.rank]
    trace = simulation.trace
    held_storages, kept_storages = _list_alive(trace)
    activations = sum(
        storage.bytes
        for storage in kept_storages
        if storage.kind == "activations" and IN_LAYERS in storage.label + storage.module
    )
    # Matmuls and attention. Their operations are the same however a step is divided into
    # micro-batches and among ranks.
    arithmetic_ops = [op for op in trace.iterate_ops(STEADY) if op.flops and op.part in _IN_MODEL]
    least_seconds = sum(
        op.repeats * compute_least_op_seconds(op, settings.hardware, settings.calibration)
        for op in arithmetic_ops
    )
    has_all_layers = cfg.parallel.pipeline == 1
    sent, copied = sum_transfers(trace)
    # One rank of each place in the pipeline: together they have every module once.
    first_ranks = find_rank_of_each_place(planned.simulated).values()
    modules = list(
        chain.from_iterable(
            list_outermost(planned.simulated[first].modules) for first in first_ranks
        )
    )
    return Estimate(
        active=rank.peak.active,
        reserved=rank.reserved,
        reserved_expandable=rank.reserved_expandable,
        host=max(plan.host for plan in planned.plans),
        seconds=planned.step.seconds or 0.0,
        tokens=simulation.tokens,
        held=sum(round_size(storage.bytes) for storage in held_storages),
        parameters=sum(row.bytes for row in modules),
        # An approximation where a module has packed (quantized) weights beside trained ones.
        trained=sum(row.bytes * row.trained // max(row.parameters, 1) for row in modules),
        module=rank.peak.module,
        # A rank has 1 / context of each of a micro-batch's sequences.
        kept=activations * cfg.parallel.context / compute_micro_batches(cfg)[0]
        if has_all_layers
        else 0.0,
        least_seconds=least_seconds if has_all_layers else 0.0,
        sent=sent,
        copied=copied,
        usable=compute_usable_bytes(cfg, settings),
    )


def sum_transfers(trace: Trace) -> tuple[int, int]:
    """Return the bytes that a rank sends in a step, and those it copies to and from its host."""
    ops = list(trace.iterate_ops(STEADY))
    sends = [
        (op.repeats, op.collective)
        for op in ops
        if op.collective is not None and op.collective.operation != "recv"
    ]
    sent = sum(
        times * count_wire_bytes(send.operation, send.bytes, len(send.ranks))
        for times, send in sends
    )
    # `bytes` of a copy counts each byte twice: as read and as written.
    return sent, sum(op.repeats * op.bytes // 2 for op in ops if op.transfer)


def _list_alive(trace: Trace) -> tuple[list[Storage], list[Storage]]:
    """Return the device's live storages as the steady step begins, and as its backward begins."""
    held_storages: list[Storage] = []
    for _, kind, op_index, phase_name, _, alive in trace.walk():
        if phase_name != STEADY:
            continue
        if kind == PHASE:
            held_storages = list(alive.values())
        elif kind == OP and trace.ops[op_index].part in ("recompute", "backward"):
            return held_storages, list(alive.values())
    return held_storages, []


# Dotted key -> value.
Changes = dict[str, Any]

HOST_KEY = "memory.cpu_offload"
STREAM_KEY = "memory.stream_layers"
OFFLOAD_KEY = "memory.optimizer_offload"
CHECKPOINTING_KEY = "memory.activation_checkpointing"
QUANTIZE_KEY = "lora.quantize_base"
CONTEXT_KEY = "parallel.context"
REDUCE_KEY = "parallel.reduce_gradients"
STRATEGY_KEY = "parallel.strategy"
STATES_KEY = "optimizer.state_bits"

CHECKPOINTING = ("full", "selective", "none")  # from least to most memory
# Tokens of a sequence from which on context parallelism, offload and the like are compared.
LONG_SEQUENCE = 8192
# Changes that lower a peak outside of the layers (in logits, gathered embeddings) for little time.
OUTSIDE_LAYERS = {"parallel.fsdp_wrap_policy": "memory_efficient", "memory.loss_chunks": 64}
OUTSIDE_SHARE = 0.1  # share of the device's memory that OUTSIDE_LAYERS can save at most
RESERVED_TOLERANCE = 0.06  # share by which an estimate of reserved memory may be off
ACTIVE_TOLERANCE = 0.01  # the same of active memory, whose estimates are within 0.5 %

# Of functions that work in processes: an argument, such as settings to try, and what comes of it.
Piece = TypeVar("Piece")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidate:
    """Settings and the memory and time that they take, by an estimate or by their whole plan."""

    # Changes to the config that the search begins with.
    changes: Changes
    # With a verdict, its bytes are those of the whole plan.
    estimate: Estimate
    # False if the settings certainly do not fit.
    may_fit: bool
    # Verdict of the whole plan, `fits`, `risky` or `does not fit`; empty: only estimated.
    verdict: str = ""

    @property
    def shortfall(self) -> int:
        """Return the bytes that the settings lack; negative: bytes to spare."""
        reserved = self.estimate.reserved_expandable
        # A plan's verdict is that a run fits if it does with or without expandable segments.
        if self.verdict:
            reserved = min(reserved, self.estimate.reserved)
        return reserved - self.estimate.usable

    @property
    def speed(self) -> float:
        """Return the tokens per second; 0 if the step was not timed."""
        return self.estimate.tokens / self.estimate.seconds if self.estimate.seconds else 0.0


def get_value(cfg: Any, key: str) -> Any:
    """Return the value of a dotted key; None where the config's class has no such key."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def find_differing(cfg: Any, changes: Changes) -> Changes:
    """Return those of the changes whose value differs from the config's."""
    return {key: value for key, value in changes.items() if get_value(cfg, key) != value}


def is_long(cfg: Any) -> bool:
    """Return True if sequences are so long that ways to make room for them are compared."""
    return bool(cfg.max_seq_len >= LONG_SEQUENCE)


def count_data_ranks(cfg: Any, ranks: int) -> int:
    """Return the number of ranks with different batches."""
    return max(1, ranks // count_same_batch_ranks(cfg.parallel))


def apply_changes(cfg: Any, changes: Changes) -> Any | None:
    """Return a copy of a config with changed values.

    Return None if the config's class lacks a key, or if the values break a rule that the config
    itself does not.
    """
    schema: type = type(cfg)
    if not changes.keys() <= read_schema(schema).keys.keys():
        return None
    changed_cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        owner = functools.reduce(getattr, section.split(".") if section else [], changed_cfg)
        setattr(owner, name, value)
    # Rules that the config breaks already do not count against the changes.
    return None if _list_config_faults(changed_cfg) - _list_config_faults(cfg) else changed_cfg


def _list_config_faults(cfg: Any) -> set[Any]:
    schema: type = type(cfg)
    keys = read_schema(schema).keys
    idle_keys = {
        name
        for name, key in keys.items()
        if get_value(cfg, name) != key.default and explain_idle_key(cfg, key)
    }
    return idle_keys.union(find_broken_rules(cfg, list(keys)))


def set_checkpointing(cfg: Any, kind: str) -> Changes:
    """Return the changes that set the kind of activation checkpointing."""
    changes: Changes = {CHECKPOINTING_KEY: kind}
    # A memory budget is allowed with the kind `budget` only.
    if kind != "budget" and get_value(cfg, "memory.activation_budget_gib") is not None:
        changes["memory.activation_budget_gib"] = None
    return changes


def step_in_backward(cfg: Any) -> Changes:
    """Return the changes by which the optimizer steps each parameter in backward."""
    return find_differing(
        cfg,
        {
            "memory.optimizer_in_backward": True,
            # The optimizer in backward allows neither clipping nor gradient accumulation.
            "clip_grad_norm": None,
            "gradient_accumulation_steps": 1,
        },
    )


def stream_layers(cfg: Any) -> Changes:
    """Return the changes that stream layers from host memory, with what training them needs."""
    if cfg.trained_adapters is not None:
        return {STREAM_KEY: True}
    return {STREAM_KEY: True} | step_in_backward(cfg) | find_differing(cfg, {OFFLOAD_KEY: True})


def format_overrides(changes: Changes) -> str:
    """Return the changes as they are typed: `batch_size=1 gradient_accumulation_steps=16`."""
    return " ".join(
        f"{key}={format_value(value).replace(', ', ',')}" for key, value in changes.items()
    )


def make_key(changes: Changes) -> str:
    """Return a key that is the same for the same changes in any order."""
    return format_overrides(dict(sorted(changes.items())))


def make_variant_key(cfg: Any, changes: Changes) -> str:
    """Return the key of the changes that decide how large the model's states are.

    These are offload, quantization, bits of the states and models beside the trained one. Changes
    of how ranks share the model, and of the micro-batch, are left out.
    """
    names = {HOST_KEY, STREAM_KEY, OFFLOAD_KEY, QUANTIZE_KEY, STATES_KEY, *cfg.other_model_levers}
    return make_key({key: value for key, value in changes.items() if key in names})


def compute_usable_bytes(cfg: Any, settings: PlanSettings) -> int:
    """Return the bytes that the allocator may take on the device."""
    outside = settings.outside or estimate_outside_torch(
        settings.hardware, list_communicator_sizes(cfg.parallel, settings.ranks)
    )
    return settings.hardware.memory - outside.total


def list_communicator_sizes(parallel: ParallelConfig, ranks: int) -> list[int]:
    """Return the number of ranks in each communicator that one rank has.

    In a pipeline it is the rank with the most communicators. ranks: of the run.
    """
    # NCCL gives every two ranks that exchange tensors outside of a batch of such exchanges a
    # communicator of their own.
    pairs = max(len(list_peers(parallel, place)) for place in range(parallel.pipeline))
    return [*count_communicator_ranks(parallel, ranks), *[2] * pairs]


def compute_tolerance(settings: PlanSettings) -> int:
    """Return the bytes by which an estimate may exceed the device before settings are ruled out."""
    return int(RESERVED_TOLERANCE * settings.hardware.memory)


def try_estimate(
    recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None
) -> Estimate | None:
    """Return what `estimate_run` does; None if the recipe or the simulation refuses the config."""
    try:
        return estimate_run(recipe_class, cfg, settings=settings, limit=limit)
    # All but UserError are raised by an operator that cannot be simulated. These settings are one
    # trial of many, which goes without them.
    except (UserError, AssertionError, NotImplementedError, AttributeError, RuntimeError):
        return None


def try_settings(
    recipe_class: type, cfg: Any, settings: PlanSettings, changes: Changes, fixed: Collection[str]
) -> Candidate | None:
    """Return a candidate with the changes; None if the recipe or the simulation refuses them.

    If they do not fit and the peak is outside of the layers, `OUTSIDE_LAYERS` is tried as well, and
    the candidate that lacks less memory is returned; but not without changes, which is the config
    as it is. fixed: keys that stay as the config has them.
    """
    outside_layers = {
        key: value for key, value in find_differing(cfg, OUTSIDE_LAYERS).items() if key not in fixed
    }
    # A list of patterns is the user's own choice of the modules that FSDP gathers as one.
    if isinstance(get_value(cfg, "parallel.fsdp_wrap_policy"), list):
        outside_layers.pop("parallel.fsdp_wrap_policy", None)
    best = None
    for added_changes in ({}, outside_layers):
        all_changes = changes | added_changes
        changed_cfg = apply_changes(cfg, all_changes)
        if changed_cfg is None:
            break
        limit = int(compute_usable_bytes(changed_cfg, settings) / (1 - ACTIVE_TOLERANCE))
        estimate = try_estimate(recipe_class, changed_cfg, settings=settings, limit=limit)
        if estimate is None:
            break
        candidate = Candidate(all_changes, estimate, may_fit=estimate.active <= limit)
        fits_reserved = candidate.shortfall <= compute_tolerance(settings)
        candidate = replace(candidate, may_fit=candidate.may_fit and fits_reserved)
        if best is None or candidate.shortfall < best.shortfall:
            best = candidate
        if (
            candidate.shortfall <= 0
            or not changes
            or IN_LAYERS in estimate.module
            # Smaller logits and gathered embeddings would not save that much.
            or candidate.shortfall > OUTSIDE_SHARE * settings.hardware.memory
        ):
            break
    return best


def run_in_processes(
    work: Callable[[Piece], Result],
    pieces: Sequence[Piece],
    what: str = "trying settings",
    unit: str = "settings",
) -> list[Result]:
    """Return the results of `work` for all pieces, in order, computed by `open_workers`.

    what: text of the progress line, which counts pieces in `unit`. Raises what `work` raises, and
    SetupError as `open_workers` does.
    """

    # A fork has the pieces already: only their indexes and the results go through pipes.
    def work_on_piece(index: int) -> Result:
        return work(pieces[index])

    with (
        open_workers(work_on_piece) as (submit, _),
        phase(what, len(pieces), unit, leaves_line=False) as progress,
    ):
        results = []
        for future in [submit(index) for index in range(len(pieces))]:
            results.append(future.result())
            progress.advance(1)
    return results


@contextmanager
def open_workers(
    work: Callable[[Piece], Result], processes: int | None = None
) -> Iterator[tuple[Callable[[Piece], Future[Result]], int]]:
    """Yield (function that submits a piece to `work`, number of pieces that run at a time).

    The workers are forks of this process. processes: how many; None: one for each core. Raises
    SetupError if a fork is killed.
    """
    # A simulation in this process has started threads of autograd, which a fork would lack: the
    # work is then done here, one piece after the other.
    workers = 1 if is_registered() else count_workers(processes)
    if workers == 1:
        yield functools.partial(_run_now, work), 1
        return
    try:
        with start_forks(work, workers) as submit:
            yield submit, workers
    except BrokenProcessPool as error:
        raise SetupError(
            "tune plan: one of the processes that try settings was killed (out of memory?); free"
            " some memory"
        ) from error


def _run_now(work: Callable[[Piece], Result], piece: Piece) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(work(piece))
    return future

"""What a run takes on one rank, from one exact step: what a search tries settings by, in place of a whole plan."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.plan.allocation.caching_allocator import block_bytes
from recipe_lib.plan.build_plan import PlanSettings, plan_ranks
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.tables import outermost
from recipe_lib.plan.timing.cost import Calibration, least_op_seconds, wire_bytes
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, Storage, Trace
from recipe_lib.plan.tracing.simulate import STEADY, list_short_steps

IN_LAYERS = ".layers."  # in the path of every module of a decoder's layer
_IN_MODEL = ("forward", "recompute", "backward")
_HELD = ("parameters", "optimizer", "gradients")


@dataclass(frozen=True)
class Estimate:
    """What a step takes on the heaviest rank; bytes are per device unless said otherwise."""

    # Most bytes in blocks, as `PhasePeak.active`.
    active: int
    # What the allocator takes for them; some percent off, as memory that loading and the first step leave is not there.
    reserved: int
    reserved_expandable: int
    # Most bytes of host memory, of any simulated rank.
    host: int
    # Of a steady step; 0: not timed, or a place of a pipeline is not known.
    seconds: float
    # Of a step, all ranks.
    tokens: int
    # Bytes in blocks between two steps.
    held: int
    # Bytes of the whole model, and the share of them that is trained.
    parameters: int
    trained: int
    # Where the most is active.
    phase: str
    part: str
    module: str
    # What no other way to run the same layers has less of; 0 of a pipeline, whose ranks have some of them each:
    # activations that all layers keep for the backward of a micro-batch,
    kept: int = 0
    # the layers' part of `held`,
    held_by_layers: int = 0
    # seconds of a step's matmuls and attention alone.
    least_seconds: float = 0.0
    # Bytes of a step that the rank sends to others, and that it copies to and from its host.
    sent: int = 0
    copied: int = 0


def quick(recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None) -> Estimate:
    """Return the estimate for a plannable config: of a steady step, without load, validation and save.

    limit: of a pipeline's places none is simulated after the first one with more active bytes. Raises UserErrors of
    recipe and config.
    """
    planned = plan_ranks(recipe_class, cfg, replace(settings, phases=()), list_short_steps(cfg), limit)
    rank = planned.heaviest
    peak = rank.peak
    simulation = planned.simulated[rank.rank]
    trace = simulation.trace
    held, kept = _list_alive(trace)
    is_whole = cfg.parallel.pipeline == 1
    sent, copied = traffic(trace)
    places = {found.coordinates.get("pipeline", 0): found.modules for found in planned.simulated.values()}
    modules = [row for rows in places.values() for row in outermost(rows)]
    return Estimate(
        active=peak.active,
        reserved=rank.reserved,
        reserved_expandable=rank.reserved_expandable,
        host=max(plan.host for plan in planned.plans),
        seconds=planned.step or 0.0,
        tokens=simulation.tokens,
        held=sum(block_bytes(storage.bytes) for storage in held),
        parameters=sum(row.bytes for row in modules),
        # Roughly, where some of a module's weights are packed.
        trained=sum(row.bytes * row.trained // max(row.parameters, 1) for row in modules),
        phase=peak.phase,
        part=peak.part,
        module=peak.module,
        kept=_sum_layers(kept, ("activations",)) if is_whole else 0,
        held_by_layers=_sum_layers(held, _HELD) if is_whole else 0,
        least_seconds=_least_seconds(trace, settings.hardware, settings.calibration) if is_whole else 0.0,
        sent=sent,
        copied=copied,
    )


def traffic(trace: Trace) -> tuple[int, int]:
    """Bytes of a steady step that a rank sends to others, and that are copied to and from its host."""
    sent = copied = 0
    for op in trace.phase_ops(STEADY):
        if op.collective is not None and op.collective.operation != "recv":
            collective = op.collective
            sent += op.repeats * wire_bytes(collective.operation, collective.bytes, len(collective.ranks))
        if op.transfer:  # its bytes are counted where they are read and where they are written
            copied += op.repeats * op.bytes // 2
    return sent, copied


def _list_alive(trace: Trace) -> tuple[list[Storage], list[Storage]]:
    """Return what is on the device as the steady step begins, and as its first backward does."""
    alive: dict[int, Storage] = {}
    held: list[Storage] = []
    is_steady = False
    for kind, number in trace.events:
        if kind == PHASE:
            is_steady = trace.phases[number] == STEADY
            held = list(alive.values()) if is_steady else held
        elif kind == ALLOC and trace.storages[number].device:
            alive[number] = trace.storages[number]
        elif kind == FREE:
            alive.pop(number, None)
        elif kind == OP and is_steady and trace.ops[number].part in ("recompute", "backward"):
            return held, list(alive.values())
    return held, []


def _sum_layers(storages: Iterable[Storage], kinds: tuple[str, ...]) -> int:
    """Return the bytes of such kinds that are a layer's."""
    return sum(one.bytes for one in storages if one.kind in kinds and IN_LAYERS in one.label + one.module)


def _least_seconds(trace: Trace, hardware: Hardware, calibration: Calibration | None) -> float:
    """Return the seconds that the matmuls and attention of a steady step take at least, of forward, recomputation and
    backward alone. How they are divided into micro-batches, and among the ranks, does not matter."""
    ops = (op for op in trace.phase_ops(STEADY) if op.flops and op.part in _IN_MODEL)
    return sum(op.repeats * least_op_seconds(op, hardware, calibration) for op in ops)

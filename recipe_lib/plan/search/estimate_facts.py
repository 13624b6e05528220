"""What an estimate of a run says, whichever way it was made."""

from collections.abc import Collection
from dataclasses import dataclass

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.tables import outermost
from recipe_lib.plan.timing.cost import Calibration, least_op_seconds, wire_bytes
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, Trace
from recipe_lib.plan.tracing.simulate import STEADY, Simulated

IN_LAYERS = ".layers."  # in the path of every module of a decoder's layer
_MODEL_PARTS = ("forward", "recompute", "backward")


@dataclass(frozen=True)
class Estimate:
    """What a run takes on one rank, per device.

    active: most bytes in blocks, as `PhasePeak.active`; phase, part, module: where, with `*` for a number of an inner
    layer. reserved, reserved_expandable: active, and what the allocator held beyond it in the short simulations, where
    less or more of it can lie idle than in the whole run: up to a tenth of the peak off, either way. host: most
    bytes of host memory. seconds: of a steady step. tokens: of a step, all ranks. held: bytes that are alive between
    two steps. parameters, trained: bytes of the whole model's. `active` is off by 0.5 % at most, and mostly
    by a few bytes. first: of rank 0, where another place of a pipeline is the heaviest: active, reserved and
    reserved_expandable. estimate: as `Plan.estimate`.

    What no other way to run the same layers has less of: kept: bytes of activations that all layers keep for the
    backward of a micro-batch; held_by_layers: of `held`, the layers' part; least_seconds: of a step, its matmuls and
    attention alone. 0 of a pipeline, where they are not looked for.

    sent, copied: bytes of a steady step that the rank sends to others, and that it copies to and from its host; 0 of a
    pipeline.
    """

    active: int
    reserved: int
    reserved_expandable: int
    host: int
    seconds: float
    tokens: int
    held: int
    parameters: int
    trained: int
    phase: str
    part: str
    module: str
    first: tuple[int, int, int] | None = None
    estimate: str = ""
    kept: int = 0
    held_by_layers: int = 0
    least_seconds: float = 0.0
    sent: int = 0
    copied: int = 0


def traffic(trace: Trace) -> tuple[int, int]:
    """Bytes of a steady step that a rank sends to others, and that are copied to and from its host."""
    sent = copied = 0
    for kind, number in trace.phase_events(STEADY):
        op = trace.ops[number] if kind == OP else None
        if op is None:
            continue
        if op.collective is not None and op.collective.operation != "recv":
            collective = op.collective
            sent += op.repeats * wire_bytes(collective.operation, collective.bytes, len(collective.ranks))
        if op.transfer:  # its bytes are counted where they are read and where they are written
            copied += op.repeats * op.bytes // 2
    return sent, copied


def parameter_bytes(found: Simulated) -> int:
    """Of all modules of a simulated rank, without other parallelism."""
    return sum(facts.bytes for facts in outermost(found.modules))


def trained_bytes(found: Simulated) -> int:
    """By the share of a module's parameters that are trained; roughly, where some of its weights are packed."""
    return sum(facts.bytes * facts.trained // max(facts.parameters, 1) for facts in outermost(found.modules))


def kept_by_layers(trace: Trace) -> int:
    """Bytes of activations of layers that are alive as the first backward of the steady step begins."""
    alive: set[int] = set()
    phase = ""
    for kind, number in trace.events:
        if kind == PHASE:
            phase = trace.phases[number]
        elif kind == ALLOC:
            alive.add(number)
        elif kind == FREE:
            alive.discard(number)
        elif kind == OP and phase == STEADY and trace.ops[number].part in ("recompute", "backward"):
            return _of_layers(trace, alive, ("activations",))
    return 0


def held_by_layers(trace: Trace) -> int:
    """Bytes of layers that are alive as the steady step begins."""
    alive: set[int] = set()
    for kind, number in trace.events:
        if kind == PHASE and trace.phases[number] == STEADY:
            break
        if kind == ALLOC:
            alive.add(number)
        elif kind == FREE:
            alive.discard(number)
    return _of_layers(trace, alive, ("parameters", "optimizer", "gradients"))


def _of_layers(trace: Trace, alive: Collection[int], kinds: Collection[str]) -> int:
    storages = (trace.storages[number] for number in alive)
    return sum(
        one.bytes for one in storages if one.device and one.kind in kinds and IN_LAYERS in one.label + one.module
    )


def least_seconds(trace: Trace, hardware: Hardware, calibration: Calibration | None) -> float:
    """Seconds that the matmuls and attention of a steady step take at least; of forward, recomputation and backward
    alone. How they are divided into micro-batches, and among the ranks, does not matter."""
    seconds = 0.0
    for kind, number in trace.phase_events(STEADY):
        op = trace.ops[number] if kind == OP else None
        if op is not None and op.flops and op.part in _MODEL_PARTS:
            seconds += op.repeats * least_op_seconds(op, hardware, calibration)
    return seconds

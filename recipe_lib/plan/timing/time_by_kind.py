"""What a planned step's kernels spend their time on: matmuls, attention, and what moves bytes, by module.

No torch in here. Seconds are those of each operator alone on the device, all micro-batches counted; what runs at the
same time counts twice, so the sums of kinds are no times of a step. See `stream_schedule` for when it all runs.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.timing.cost import Calibration, is_attention, is_wait, op_seconds
from recipe_lib.plan.trace import Op, Trace

MATMULS, ATTENTION, MEMORY_BOUND = "matmuls", "attention", "memory-bound kernels"
COPIES, COMMUNICATION = "copies", "communication"
KINDS = (MATMULS, ATTENTION, MEMORY_BOUND, COPIES, COMMUNICATION)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class ModuleTime:
    """Memory-bound kernels of alike modules, numbers of layers as `*`. kernels: how many. seconds: together."""

    module: str
    kernels: int
    seconds: float


def kind_of(op: Op) -> str:
    """One of KINDS; "" for what takes no time by itself."""
    if op.collective is not None:
        return COMMUNICATION
    if op.transfer:
        return COPIES
    if is_wait(op) or op.on_host or not (op.flops or op.bytes):
        return ""
    if is_attention(op):
        return ATTENTION
    return MATMULS if op.flops else MEMORY_BOUND


def time_by_kind(
    trace: Trace, phase: str, hardware: Hardware, calibration: Calibration | None = None
) -> dict[str, float]:
    """Seconds by kind, KINDS in order; ValueError if the phase was not traced."""
    found = dict.fromkeys(KINDS, 0.0)
    for op in trace.phase_ops(phase):
        if kind := kind_of(op):
            found[kind] += op.repeats * op_seconds(op, hardware, calibration)
    return found


def memory_bound_by_module(
    trace: Trace, phase: str, hardware: Hardware, calibration: Calibration | None = None
) -> list[ModuleTime]:
    """Memory-bound kernels by the module that they are of, forward, recomputation and backward together; the optimizer
    and what is outside of all modules under their part of the step. The slowest first."""
    kernels: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for op in trace.phase_ops(phase):
        if kind_of(op) == MEMORY_BOUND:
            place = _NUMBER.sub("*", op.module) or f"({op.part})"
            kernels[place] += op.repeats
            seconds[place] += op.repeats * op_seconds(op, hardware, calibration)
    rows = [ModuleTime(place, kernels[place], seconds[place]) for place in seconds]
    return sorted(rows, key=lambda row: -row.seconds)


def operators_launched(trace: Trace, phase: str) -> int:
    """How many operators the host issues, collectives and copies among them; ValueError if the phase was not traced."""
    return sum(op.repeats for op in trace.phase_ops(phase) if not is_wait(op))


def kernel_overhead(times: dict[str, float]) -> float:
    """The time of all kernels over that of matmuls and attention: 1 where nothing else takes time."""
    useful = times[MATMULS] + times[ATTENTION]
    return (useful + times[MEMORY_BOUND]) / useful if useful else float("inf")

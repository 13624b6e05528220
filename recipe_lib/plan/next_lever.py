"""The lever to pull next, as far as a plan itself knows: what fills its peak, and what the room that is left is for.

Nothing more is simulated: `--advice` tries levers and gives their gains. So a lever is named with what its kind of
memory takes, and a larger batch only where what grows with it would fit several times over.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from recipe_lib.plan.result import FITS, Plan
from recipe_lib.plan.search.advice import EXPANDABLE, MAX_LOSS_CHUNKS
from recipe_lib.plan.search.trials import (
    QUANTIZE_TEACHER,
    Changes,
    changed,
    checkpointing,
    override_text,
    stepped_in_backward,
    streamed,
    teacher_in_memory,
)
from recipe_lib.plan.verdict import planned_reserved
from recipe_lib.units import choose_unit, format_bytes

_TOLERANCE = 0.06  # share of the reserved memory that stays free in a proposal: an estimate may be off by it
_MOST_TIMES = 1024
# Kinds of memory that a batch's size does not change.
_FIXED = ("parameters", "gradients", "optimizer", "gathered", "communication")


def next_lever(plan: Plan, cfg: Any) -> str:
    """What to change next, in words; empty where nothing is known to help. cfg: of the plan."""
    if plan.verdict == FITS:
        return _larger_batch(plan, cfg) or _lever(plan, cfg, "would make more room")
    if plan.margin < 0 and plan.heaviest.reserved_expandable <= plan.device.usable:
        reserved = format_bytes(plan.heaviest.reserved_expandable)
        return f"{EXPANDABLE} in the environment: {reserved} are reserved then, which fit"
    return _lever(plan, cfg, "lowers what takes the most")


def _kinds(plan: Plan) -> Counter[str]:
    """Bytes by kind at the peak of the heaviest rank."""
    found: Counter[str] = Counter()
    for alive in plan.heaviest.alive:
        found[alive.kind] += alive.bytes
    return found


def _larger_batch(plan: Plan, cfg: Any) -> str:
    """A larger batch_size, where the plan has the room; with gradient accumulation the same sequences a step."""
    growing = planned_reserved(plan) - sum(_kinds(plan)[kind] for kind in _FIXED)
    room = plan.device.usable * (1 - _TOLERANCE) - planned_reserved(plan)
    # Where the optimizer has the peak, little of what a batch needs is in it.
    if plan.heaviest.peak.part not in ("forward", "backward", "recompute") or growing <= 0 or plan.pipeline is not None:
        return ""
    times = 1
    while times < _MOST_TIMES and 2 * times * growing - growing <= room:
        times *= 2
    turns, size = cfg.gradient_accumulation_steps, cfg.batch_size
    same = next((factor for factor in _halves(times) if turns % factor == 0), 1)
    if times == 1:
        return ""
    if same > 1:
        changes: Changes = {"batch_size": size * same, "gradient_accumulation_steps": turns // same}
        what = "the same sequences a step, in fewer micro-batches"
    elif plan.time is not None and plan.time.steps == 1:  # there may be no more sequences
        return ""
    else:
        changes, what = {"batch_size": 2 * size}, "twice the sequences a step"
    if changed(cfg, changes) is None:
        return ""
    return (
        f"{override_text(changes)} has room ({what}): {_roughly(plan.margin)} are left, and what grows with "
        f"batch_size takes {_roughly(growing)}"
    )


def _halves(times: int) -> Iterator[int]:
    """`8` -> 8, 4, 2."""
    while times > 1:
        yield times
        times //= 2


def _lever(plan: Plan, cfg: Any, what: str) -> str:
    """The lever for the kind of memory that takes the most at the peak, of the kinds that have one."""
    peak = max(1, plan.heaviest.peak.active)
    for kind, num_bytes in _kinds(plan).most_common():
        for changes in _levers(kind, cfg, plan.ranks):
            if num_bytes and changed(cfg, changes) is not None:
                held = f"{_roughly(num_bytes)} of {kind}, {num_bytes / peak:.0%} of the peak"
                more = "; alone it is not enough" if -plan.margin > num_bytes else ""
                return f"{override_text(changes)} {what} ({held}){more}"
    return ""


def _roughly(num_bytes: int) -> str:
    size, name = choose_unit(num_bytes)
    return f"{num_bytes / size:,.1f} {name}"


def _levers(kind: str, cfg: Any, ranks: int) -> Iterator[Changes]:
    """What lowers a kind of memory and is not pulled yet, the cheapest first."""
    memory, turns = cfg.memory, cfg.gradient_accumulation_steps
    if kind in ("activations", "logits", "temporary", "batch") and cfg.batch_size % 2 == 0:
        yield {"batch_size": cfg.batch_size // 2, "gradient_accumulation_steps": 2 * turns}
    if kind == "activations":
        if memory.activation_checkpointing != "full":
            yield checkpointing(cfg, "full")
        if not memory.activation_offload:
            yield {"memory.activation_offload": True}
    elif kind == "logits":
        if memory.loss_chunks < MAX_LOSS_CHUNKS:
            yield {"memory.loss_chunks": min(4 * memory.loss_chunks, MAX_LOSS_CHUNKS)}
    elif kind == "optimizer":
        if cfg.optimizer.name == "adamw" and cfg.optimizer.state_bits is None:
            yield {"optimizer.state_bits": 8}
        if not memory.optimizer_offload:
            yield {"memory.optimizer_offload": True}
    elif kind == "gradients":
        if cfg.parallel.reduce_gradients == "step":
            yield {"parallel.reduce_gradients": "micro_batch"}
        if not memory.optimizer_in_backward and turns == 1:
            yield stepped_in_backward(cfg)
    elif kind in ("gathered", "communication"):
        if not cfg.parallel.reshard_after_forward:
            yield {"parallel.reshard_after_forward": True}
        if ranks > 1 and cfg.parallel.fsdp_wrap_policy in ("auto", "layers"):
            yield {"parallel.fsdp_wrap_policy": "memory_efficient"}
    elif kind == "parameters":
        adapters, teacher = cfg.trained_adapters, teacher_in_memory(cfg)
        if teacher is not None and teacher.quantize_teacher == "none":
            yield {QUANTIZE_TEACHER: "nf4"}
        if adapters is not None and adapters.quantize_base == "none":
            yield {"lora.quantize_base": "nf4"}
        if adapters is None and cfg.dtype == "fp32":
            yield {"dtype": "bf16"}
        if ranks == 1 and memory.stream_layers is not True and not memory.cpu_offload:
            yield streamed(cfg)
        if not memory.cpu_offload:
            yield {"memory.cpu_offload": True}

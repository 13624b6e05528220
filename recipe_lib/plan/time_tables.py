"""What is known about the time of a step and of a run, as lines of text. No torch in here."""

from recipe_lib.plan.result import PipelinePlan, Plan, TimePlan
from recipe_lib.plan.tables import duration
from recipe_lib.units import format_count, format_seconds

_FEW_SECONDS = 1e-3  # batches on their way to the device take less


def time_lines(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) of what is known about time; empty if it was not planned."""
    time = plan.time
    if time is None:
        return []
    rates = "calibrated; error: " if time.calibrated else ""
    issued = f", {time.operators:,} operators" if time.operators else ""
    lines = [
        ("step", f"{duration(time.step)}, {rates}{time.error or 'not stated'}"),
        ("kernels", duration(time.compute) + _kinds_text(time)),
        ("communication", f"{duration(time.communication)} total, {duration(time.exposed)} exposed"),
        ("kernel launches (CPU)", duration(time.launch) + issued),
        ("idle", f"{duration(time.idle)} in which nothing runs"),
        ("bound by", bound_by(plan)),
        ("tokens", f"{format_count(time.tokens_per_step)} a step, {format_count(time.tokens_per_second)} a second, "
                   f"all ranks; {time.mfu:.1%} of the device's dense rate"),
    ]  # fmt: skip
    if time.copies > _FEW_SECONDS:
        text = f"{duration(time.copies)} total, {duration(time.copies_exposed)} exposed"
        lines.insert(3, ("copies to and from the host", text))
    if time.on_host > _FEW_SECONDS:
        lines.insert(3, ("optimizer on the CPU", duration(time.on_host)))
    if plan.pipeline is not None:
        lines.insert(1, ("pipeline", _pipeline_text(plan.pipeline)))
    if time.steps is not None:
        lasts = f", {format_seconds(time.total)}" if time.total is not None else ""
        lines.append(("run", f"{time.steps:,} steps{lasts}"))
    return lines


def step_line(plan: Plan) -> list[tuple[str, str]]:
    """The time of a step in one line; empty if it was not planned."""
    time = plan.time
    if time is None:
        return []
    rates = "" if time.calibrated else "; not calibrated"
    run = f"; {time.steps:,} steps{f' in {format_seconds(time.total)}' if time.total else ''}" if time.steps else ""
    rate = f"{format_count(time.tokens_per_second)} tokens a second"
    return [("step", f"{duration(time.step)}, {rate}, bound by {bound_by(plan)}{run}{rates}")]


def _kinds_text(time: TimePlan) -> str:
    """By what they do; their sum is more than all where kernels run on two streams at once."""
    parts = {"matmuls": time.matmuls, "attention": time.attention, "memory-bound": time.memory_bound}
    total = sum(parts.values())
    return ": " + ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items()) if total else ""


def _pipeline_text(pipeline: PipelinePlan) -> str:
    """Its schedule, and how much of it is waiting."""
    sequences = f"{pipeline.micro_batch_size} sequence{'s' if pipeline.micro_batch_size != 1 else ''}"
    text = f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches of {sequences}"
    if pipeline.bubble is not None and pipeline.seconds is not None:
        text += (
            f"; bubble {pipeline.bubble:.1%} of {duration(pipeline.seconds)} on {len(pipeline.places)} pipeline ranks"
        )
    if pipeline.ideal is not None:
        text += f" (equal stages without communication time: {pipeline.ideal:.1%})"
    return text


def bound_by(plan: Plan) -> str:
    """What a step cannot be shorter than: its kernels, its collectives, its copies, or the host."""
    assert plan.time is not None
    parts = {
        "kernels": plan.time.compute,
        "communication": plan.time.communication,
        "the CPU (launch-bound)": plan.time.launch,
        "copies to and from the host": plan.time.copies,
        "the optimizer on the CPU": plan.time.on_host,
    }
    return max(parts, key=lambda name: parts[name])

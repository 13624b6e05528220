"""Write the texts of a plan: its verdict and what to do about it, what was planned, its time.

`report.py` and `tables.py` call these functions; `summary/rank_memory.py` decides the verdict. The
heaviest rank is the one that reserves the most memory; the margin is the bytes that are left of
what torch's allocator may take (usable), below 0 where they lack; a lever is a change of config
keys. Imports no torch.
"""

from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.plan_schema import (
    DOES_NOT_FIT,
    FITS,
    HOST_ALLOWS,
    PhasePeak,
    PipelinePlan,
    Plan,
    RankPlan,
)
from recipe_lib.units import (
    choose_unit,
    count_hundredths,
    format_bytes,
    format_count,
    format_duration,
    format_hundredths,
    format_seconds,
    pluralize,
)

_FEW_SECONDS = 1e-3  # less is not shown: copies of batches to the device take less

Facts = list[tuple[str, str]]  # (name, value) of lines of a report


def compute_planned_reserved(plan: Plan) -> int:
    """Return the bytes that the heaviest rank reserves, with those estimated, not simulated."""
    return plan.device.usable - plan.margin


def format_verdict(plan: Plan) -> str:
    """Return the verdict and the sum that it is by; the figures add up as they are printed."""
    reserved, outside, memory, margin = _format_sum(plan)
    estimate = f"; an estimate: {plan.estimate}" if plan.estimate else ""
    return (
        f"{plan.verdict.upper()}  {plan.ranks} x {plan.device.name} ({memory} each)  peak"
        f" reserved {reserved} + outside torch {outside},"
        f" {'margin' if plan.margin >= 0 else 'exceeds by'} {margin}{estimate}"
    )


def format_verdict_line(plan: Plan) -> str:
    """Return the verdict in a few words, for the end of a report on a terminal."""
    margin = _format_sum(plan)[-1]
    room = f"{margin} left" if plan.margin >= 0 else f"exceeds by {margin}"
    devices = f"{'each of ' if plan.ranks > 1 else ''}{plan.ranks} x {plan.device.name}"
    return f"{plan.verdict.upper()}: {room} on {devices}{', an estimate' if plan.estimate else ''}"


def _format_sum(plan: Plan) -> tuple[str, str, str, str]:
    """Return texts (reserved, outside torch `= sum`, the device's memory, what is left or lacks).

    The figures add up as they are printed.
    """
    parts = (compute_planned_reserved(plan), plan.outside.total)
    unit = choose_unit(sum(parts))
    reserved, outside = (count_hundredths(size, unit) for size in parts)
    # What the printed sum leaves of the printed memory, so that the figures add up.
    margin = count_hundredths(sum(parts) + plan.margin, unit) - reserved - outside
    return (
        format_hundredths(reserved),
        f"{format_hundredths(outside)} = {format_hundredths(reserved + outside, unit)}",
        format_hundredths(count_hundredths(plan.device.memory, unit), unit),
        format_hundredths(margin if plan.margin >= 0 else -margin, unit),
    )


def explain_verdict(plan: Plan) -> str:
    """Return why the verdict is not FITS; empty where it is."""
    heaviest = plan.heaviest
    if plan.verdict == FITS:
        return ""
    # The device has room: it is host memory that is not enough.
    if plan.verdict == DOES_NOT_FIT and plan.margin >= 0:
        return next((line for line in plan.assumptions if line.startswith(HOST_ALLOWS)), "")
    if plan.estimate:
        return "what was not simulated is estimated, and counts"
    if plan.margin >= 0:
        return "the margin is below the error of a plan"
    requested = max(peak.requested for peak in heaviest.peaks)
    if plan.verdict == DOES_NOT_FIT and requested <= plan.device.usable:
        return (
            "its tensors would fit, but not in the blocks that the allocator makes of what it has,"
            " nor with retries"
        )
    if plan.verdict == DOES_NOT_FIT:
        return (
            f"the tensors alone take {format_bytes(requested)} of the"
            f" {format_bytes(plan.device.usable)} that torch can have"
        )
    if heaviest.reserved_expandable <= plan.device.usable:
        return (
            "needs PYTORCH_ALLOC_CONF=expandable_segments:True, with which"
            f" {format_bytes(heaviest.reserved_expandable)} are reserved"
        )
    return "fits only after retries of the allocator, which gives unused memory back and takes time"


def describe_next_step(plan: Plan) -> str:
    """Return what to change next, and where to find more."""
    commands = [] if plan.advice else ["--advice says what each lever gains"]
    if plan.verdict != FITS:
        commands.append("--search looks for the fastest settings that fit")
    return "; ".join(filter(None, [_describe_best_lever(plan) or plan.next_lever, *commands]))


def _describe_best_lever(plan: Plan) -> str:
    """Return a text on the best of the levers that were tried; empty if none helps.

    Where the run does not fit for sure, it makes it fit, or else saves the most; where the run
    fits, it makes it faster.
    """
    rows = [row for row in plan.advice if row.fits]
    if plan.verdict == FITS:
        rows = [row for row in rows if row.seconds is not None and row.seconds < 0]
    else:  # where none is enough, what gains the most
        rows = rows or plan.advice
    if not rows:
        return ""
    row = rows[0]  # `plan.advice` has the most useful first
    change = f"{format_bytes(abs(row.bytes))} {'less' if row.bytes <= 0 else 'more'} at the peak"
    if row.seconds:
        change += f", a step {abs(row.seconds):.3g} s {'shorter' if row.seconds < 0 else 'longer'}"
    return f"{row.override}: {change}, {'fits' if row.fits else 'does not fit yet'}"


def list_run_facts(plan: Plan) -> Facts:
    """Return what was planned: recipe, config, model, mesh, sequence length, device.

    With them are the smallest card and the fewest ranks that have room, where they are known.
    """
    mesh = " x ".join(f"{dim} {size}" for dim, size in plan.mesh.items()) or "one rank"
    device = plan.device
    speeds = f"{format_count(device.flops)} FLOP/s, memory {format_bytes(device.bandwidth)}/s"
    if plan.ranks > 1:
        speeds += f", {device.link} {format_bytes(device.link_bandwidth)}/s"
    # A plan for a CPU says nothing of cards.
    card = "" if device.architecture == "cpu" else "none of the known cards has room for this peak"
    if plan.smallest_cards:
        card = (
            f"{' or '.join(plan.smallest_cards)}"
            f" ({format_bytes(HARDWARE[plan.smallest_cards[0]].memory)}) has room for this peak"
        )
    fewest = "" if plan.fewest_ranks is None else str(plan.fewest_ranks)
    if plan.tried_ranks:
        fewest = (
            f"{fewest or 'more than these'}; planned with {', '.join(map(str, plan.tried_ranks))}"
        )
    facts = [
        ("why", explain_verdict(plan)),
        ("run", " ".join([plan.recipe, plan.config, *plan.overrides])),
        ("model", plan.model),
        ("mesh", f"{mesh} ({pluralize(plan.ranks, 'rank')})"),
        ("sequence length", _format_sequence(plan)),
        (
            "device",
            f"{device.name}, {device.architecture}, {format_bytes(device.memory)}, {speeds}",
        ),
        ("smallest card", card),
        (f"fewest {device.name}", fewest),
    ]
    return [(name, text) for name, text in facts if text]


def _format_sequence(plan: Plan) -> str:
    source = plan.sequence["source"]
    source_name, _, reason = source.partition(": ")
    # The reason is left out where an assumption says it.
    if reason and any(line.startswith(reason) for line in plan.assumptions):
        source = source_name
    text = f"{plan.sequence['tokens']:,} tokens, from {source}"
    histogram = plan.sequence.get("histogram") or {}
    lengths = ", ".join(f"{name} {value:,}" for name, value in histogram.items())
    return f"{text} ({lengths})" if lengths else text


def format_host(plan: Plan) -> str:
    """Return the most host memory of a planned rank, and what all ranks can take at most."""
    rank = max(plan.rank_plans, key=lambda rank: rank.host)
    phase = max(rank.peaks, key=lambda peak: peak.host)
    text = f"{format_bytes(rank.host)}, rank {rank.rank} in phase {phase.phase}"
    if plan.ranks > 1:
        text += f"; at most {format_bytes(rank.host * plan.ranks)} for all {plan.ranks} ranks"
    return text


def format_versions(plan: Plan) -> str:
    """Return programs with their versions, and how long planning took."""
    return ", ".join(
        [
            *(f"{name} {version}" for name, version in plan.versions.items()),
            format_planning_time(plan),
        ]
    )


def format_planning_time(plan: Plan) -> str:
    """Return the wall time that planning took, as a text."""
    return f"planned in {format_duration(plan.seconds)} of wall time"


def format_place(plan: Plan, rank: RankPlan) -> str:
    """Return the rank's coordinates in dimensions of more than one rank: `data_shard 3`."""
    return ", ".join(
        f"{dim} {place}" for dim, place in rank.coordinates.items() if plan.mesh.get(dim) != 1
    )


def format_rank(plan: Plan, rank: RankPlan) -> str:
    """Return `rank 0 (data_shard 0), heaviest of 3 planned`."""
    text = f"rank {rank.rank}"
    if place := format_place(plan, rank):
        text += f" ({place})"
    if len(plan.rank_plans) > 1:
        text += f", heaviest of {len(plan.rank_plans)} planned"
    return text


def format_running(peak: PhasePeak) -> str:
    """Return what was running at a peak: `backward, model.layers.31`."""
    return ", ".join(text for text in (peak.part, peak.module) if text) or "-"


def list_time_facts(plan: Plan) -> Facts:
    """Return what is known about time; empty if it was not planned."""
    time = plan.time
    if time is None:
        return []
    kinds = {
        "matmuls": time.matmuls,
        "attention": time.attention,
        "memory-bound": time.memory_bound,
    }
    total = sum(kinds.values())  # more than `compute` where kernels run on two streams at once
    shares = (
        ", ".join(f"{name} {value / total:.0%}" for name, value in kinds.items()) if total else ""
    )
    error = f"{'calibrated; error: ' if time.calibrated else ''}{time.error or 'not stated'}"
    facts = {
        "step": f"{format_duration(time.step)}, {error}",
        "pipeline": _format_pipeline(plan.pipeline) if plan.pipeline else "",
        "kernels": format_duration(time.compute) + (f": {shares}" if shares else ""),
        "communication": _format_exposed(time.communication, time.exposed),
        "optimizer on the CPU": (
            format_duration(time.on_host) if time.on_host > _FEW_SECONDS else ""
        ),
        "copies to and from the host": (
            _format_exposed(time.copies, time.copies_exposed) if time.copies > _FEW_SECONDS else ""
        ),
        "kernel launches (CPU)": (
            format_duration(time.launch)
            + (f", {time.operators:,} operators" if time.operators else "")
        ),
        "idle": f"{format_duration(time.idle)} in which nothing runs",
        "bound by": find_bound(plan),
        "tokens": (
            f"{format_count(time.tokens_per_step)} a step,"
            f" {format_count(time.tokens_per_second)} a second, all ranks;"
            f" {time.mfu:.1%} of the device's dense rate"
        ),
        "run": "" if time.steps is None else f"{time.steps:,} steps",
    }
    if facts["run"] and time.total is not None:
        facts["run"] += f", {format_seconds(time.total)}"
    return [(name, text) for name, text in facts.items() if text]


def _format_exposed(seconds: float, exposed: float) -> str:
    return f"{format_duration(seconds)} total, {format_duration(exposed)} exposed"


def list_step_facts(plan: Plan) -> Facts:
    """Return the time of a step in one line; empty if it was not planned."""
    time = plan.time
    if time is None:
        return []
    text = (
        f"{format_duration(time.step)}, {format_count(time.tokens_per_second)} tokens a second,"
        f" bound by {find_bound(plan)}"
    )
    if time.steps:
        text += f"; {time.steps:,} steps"
        text += f" in {format_seconds(time.total)}" if time.total else ""
    return [("step", text if time.calibrated else f"{text}; not calibrated")]


def _format_pipeline(pipeline: PipelinePlan) -> str:
    text = (
        f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches of"
        f" {pluralize(pipeline.micro_batch_size, 'sequence')}"
    )
    if pipeline.bubble is not None and pipeline.seconds is not None:
        text += (
            f"; bubble {pipeline.bubble:.1%} of {format_duration(pipeline.seconds)} on"
            f" {len(pipeline.places)} pipeline ranks"
        )
    if pipeline.ideal is not None:
        text += f" (equal stages without communication time: {pipeline.ideal:.1%})"
    return text


def find_bound(plan: Plan) -> str:
    """Return what bounds the time of a step: kernels, collectives, copies, or the host."""
    assert plan.time is not None
    # These run at the same time, so that the longest is the bound.
    parts = {
        "kernels": plan.time.compute,
        "communication": plan.time.communication,
        "the CPU (launch-bound)": plan.time.launch,
        "copies to and from the host": plan.time.copies,
        "the optimizer on the CPU": plan.time.on_host,
    }
    return max(parts, key=lambda name: parts[name])

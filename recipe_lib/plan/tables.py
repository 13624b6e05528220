"""Tables of a plan: phases, ranks, stages of a pipeline, modules, levers. No torch in here."""

from typing import Any

from recipe_lib.config.idle import trained_dtype
from recipe_lib.config.optimizer_facts import BYTES, state_bytes
from recipe_lib.config.stalled_means import describe_stalled_means
from recipe_lib.plan.result import LayerRow, Plan, RankPlan, StagePlan
from recipe_lib.plan.tree import join_numbered, split_number
from recipe_lib.plan.verdict import place_text, rank_text, running_text
from recipe_lib.report.view import Table
from recipe_lib.units import (
    Bytes,
    Count,
    Seconds,
    choose_unit,
    count_hundredths,
    format_bytes,
    format_change,
    format_hundredths,
    share_out,
)

_STATES = ("parameters", "gradients", "optimizer")


def phase_table(plan: Plan) -> Table:
    """Return the peaks of each phase on the heaviest rank."""
    rank = plan.heaviest
    rows = []
    for peak in rank.peaks:
        sizes = (peak.active, peak.allocated, peak.reserved, peak.reserved_expandable, peak.host)
        rows.append([peak.phase, *map(Bytes, sizes), running_text(peak)])
    header = ["phase", "active", "allocated", "reserved", "expandable", "host", "peak in"]
    title = f"memory by phase, {rank_text(plan, rank)}"
    return Table(title, header, rows, ("phase", "peak in"), ("peak in", "host", "allocated", "expandable"))


def rank_table(plan: Plan) -> Table | None:
    """Return the ranks that were planned; None if it was one."""
    if len(plan.rank_plans) < 2:
        return None
    rows = []
    for rank in plan.rank_plans:
        sizes = map(Bytes, (rank.peak.active, rank.reserved, rank.reserved_expandable, rank.host))
        rows.append([str(rank.rank), *sizes, "heaviest" if rank is plan.heaviest else "", place_text(plan, rank)])
    header = ["rank", "active", "reserved", "expandable", "host", "", "place"]
    return Table("ranks, peak of all phases", header, rows, ("rank", "", "place"), ("place", "host", "expandable"))


def outside_table(plan: Plan) -> Table:
    """Return device memory that torch does not hand out, with the options that replace its parts."""
    outside = plan.outside
    parts = [
        ("context and kernels", outside.context, "--context-gib"),
        ("NCCL communicators", outside.nccl, "--nccl-gib"),
        ("reserved headroom", outside.reserve, "--reserve-gib"),
    ]
    unit = choose_unit(outside.total)
    total = count_hundredths(outside.total, unit)
    numbers = share_out(total, [num_bytes for _, num_bytes, _ in parts])
    rows = [["outside torch", format_hundredths(total, unit), ""]]
    for (name, _, option), number in zip(parts, numbers, strict=True):
        rows.append([f"  {name}", format_hundredths(number, unit), f"{option} X replaces it"])
    header = ["name", "bytes", "option"]
    return Table("outside PyTorch's allocator", header, rows, ("name", "option"), ("option",), headed=False)


def advice_table(plan: Plan) -> Table | None:
    """Return one lever a row; None without advice."""
    rows = []
    for lever in plan.advice:
        seconds = "not planned" if lever.seconds is None else format_change(Seconds(lever.seconds))
        verdict = "fits" if lever.fits else "does not fit"
        rows.append([lever.override, format_change(Bytes(lever.bytes)), seconds, verdict, lever.note])
    header = ["override", "peak", "step", "verdict", "note"]
    left = ("override", "verdict", "note")
    return Table("effect of one override", header, rows, left, ("step",), tells_below=True) if rows else None


def layers_text(place: StagePlan) -> str:
    """Return the layers of a place's stages: `0-3, 28-31`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in place.layers)


def stage_table(plan: Plan) -> Table | None:
    """Return a row for each place of a pipeline that was planned; None without a pipeline."""
    if plan.pipeline is None:
        return None
    ranks = {rank.rank: rank for rank in plan.rank_plans}
    rows = [_stage_row(plan, place, ranks[place.rank]) for place in plan.pipeline.places if place.rank in ranks]
    header = ["rank", "layers", "parameters", "in flight", "active", "states", "activations", "other", "reserved"]
    header += ["computes", "idle", "sends", ""]
    note = (
        "In flight: micro-batches between forward and backward, each stage counted; + those with deferred weight "
        "gradients. States: parameters, gradients and optimizer states at the peak. Sends: to other ranks of the "
        "pipeline, a step."
    )
    optional = ("parameters", "sends", "other", "computes", "reserved", "layers", "states", "activations", "idle")
    title = "stages of the pipeline, at the peak of each"
    return Table(title, header, rows, ("rank", "layers", ""), optional, (note,))


def _stage_row(plan: Plan, place: StagePlan, rank: RankPlan) -> list[Any]:
    states = sum(alive.bytes for alive in rank.alive if alive.kind in _STATES)
    activations = sum(alive.bytes for alive in rank.alive if alive.kind == "activations")
    sizes = (rank.peak.active, states, activations, rank.peak.active - states - activations, rank.reserved)
    is_timed = plan.pipeline is not None and plan.pipeline.seconds is not None
    return [
        str(place.rank),
        layers_text(place),
        Count(place.parameters),
        f"{place.in_flight}+{place.deferred}" if place.deferred else str(place.in_flight),
        *map(Bytes, sizes),
        f"{place.compute:.3g} s" if is_timed else "-",
        f"{place.idle:.1%}" if is_timed else "-",
        f"{place.sends} x {format_bytes(place.sent // place.sends)}" if place.sends else "none",
        "heaviest" if rank is plan.heaviest else "",
    ]


def outermost(layers: list[LayerRow]) -> list[LayerRow]:
    """Return the rows that lie in no other row's module: what a total counts."""
    names = {row.module for row in layers}
    rows = []
    for row in layers:
        segments = row.module.split(".") if row.module else []
        if not any(".".join(segments[:cut]) in names for cut in range(len(segments))):
            rows.append(row)
    return rows


def layer_table(plan: Plan) -> Table | None:
    """Return modules with their parameters, in the full model without parallelism and one rank's share, the shapes of
    their weights and what they keep for backward; None if not known."""
    if not plan.layers:
        return None
    groups: dict[tuple[Any, ...], list[LayerRow]] = {}
    for row in plan.layers:
        before, number, after = split_number(row.module)
        sizes = (row.type, row.parameters, row.trained, row.bytes, row.local_bytes)  # the first layer keeps more
        groups.setdefault((before, number is None, after, sizes, _shapes_text(row)), []).append(row)
    names = _indented([join_numbered(row.module for row in alike) or "(model)" for alike in groups.values()])
    rows = [
        [name, _shapes_text(alike[0]), alike[0].type, str(len(alike)), *_layer_sums(alike)]
        for name, alike in zip(names, groups.values(), strict=True)
    ]
    rows.append(["total", "", "", "", *_layer_sums(outermost(plan.layers))])
    header = ["module", "weights", "type", "modules", "parameters", "trained", "full model", "this rank", "kept"]
    note = "Kept: activations saved for backward on this rank"
    if plan.alone is None:
        rows = [row[:-1] for row in rows]
    else:
        header.append("kept alone")
        note += "; alone: by the full model on one device"
    if plan.pipeline:
        note += ". With a pipeline, this rank is for each module a rank that has it"
    if any(row.weights for row in plan.layers):
        note += ". Weights: as this rank computes with them, gathered"
    optional = ("type", "modules", "trained", "full model", "parameters")
    title = "layers: the full model and one rank's share"
    return Table(title, header, rows, ("module", "weights", "type"), optional, (f"{note}.",))


def _shapes_text(row: LayerRow) -> str:
    """Return the shapes of a module's weights: `[2048, 4096]`, `[2048, 4096], bias [2048]`."""
    return ", ".join(f"{'' if name == 'weight' else f'{name} '}{shape}" for name, shape in row.weights.items())


def _indented(names: list[str]) -> list[str]:
    """Return dotted names; one inside another that stands above it is shortened, and indented."""
    lines: list[str] = []
    above: list[str] = []
    for name in names:
        while above and not name.startswith(f"{above[-1]}."):
            above.pop()
        lines.append("  " * len(above) + name.removeprefix(f"{above[-1]}." if above else ""))
        above.append(name)
    return lines


def _layer_sums(rows: list[LayerRow]) -> list[Any]:
    counts = [Count(sum(getattr(row, name) for row in rows)) for name in ("parameters", "trained")]
    sizes = [Bytes(sum(getattr(row, name) for row in rows)) for name in ("bytes", "local_bytes", "kept")]
    alone = [row.kept_alone for row in rows if row.kept_alone is not None]
    return [*counts, *sizes, Bytes(sum(alone)) if alone else "-"]


def say_stalled_means(plan: Plan, cfg: Any) -> None:
    """Add a line for each mean of the optimizer that cannot follow, with the bytes of all that is trained."""
    width = BYTES[trained_dtype(cfg)]

    def format_size(optimizer: Any) -> str:
        size = 0.0
        for row in outermost(plan.layers):
            is_in_layer = split_number(row.module)[1] is not None
            size += row.trained * state_bytes(optimizer, width, in_layer=is_in_layer)
        return format_bytes(round(size))

    lines = describe_stalled_means(cfg, format_size, "size on all ranks")
    plan.notes += lines
    plan.assumptions += lines

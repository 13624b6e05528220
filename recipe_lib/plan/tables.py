"""The tables of a plan, as rows of text that the terminal report, the HTML page and a comparison lay out. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.result import CommunicationRow, LayerRow, PhasePeak, Plan, RankPlan, StagePlan
from recipe_lib.plan.tree import Node, folded, join_numbered, number_ranges, shares
from recipe_lib.plan.verdict import reason_text
from recipe_lib.report.terminal import Table
from recipe_lib.units import GIB, MIB, format_bytes, format_count, format_seconds

# (bytes of one, name)
Unit = tuple[int, str]

# A branch of the tree is shown if it is this share of the one above it, and at most so many are.
_SMALLEST_SHARE, _MOST_BRANCHES = 0.01, 12


def unit_of(largest: int) -> Unit:
    """GiB, or for small sums MiB or KiB: figures that are added up in a report share one unit."""
    if largest >= GIB // 4:
        return GIB, "GiB"
    return (MIB, "MiB") if largest >= MIB // 4 else (1024, "KiB")


def hundredths(num_bytes: int, unit: Unit) -> int:
    """Bytes in hundredths of the unit, rounded."""
    return round(num_bytes * 100 / unit[0])


def written(number: int, unit: Unit | None = None) -> str:
    """Hundredths of a unit: `1234` -> `12.34 GiB`."""
    return f"{number / 100:,.2f}" + (f" {unit[1]}" if unit else "")


def signed_bytes(num_bytes: int) -> str:
    """A change: `+1.20 GiB`, `-512.00 MiB`, `none`."""
    return f"{'+' if num_bytes > 0 else ''}{format_bytes(num_bytes)}" if num_bytes else "none"


def duration(seconds: float) -> str:
    """`2.84 s`, `12.4 ms`, `85.0 us`; from a minute on as `1m15s`."""
    if abs(seconds) >= 60:
        return format_seconds(seconds)
    for size, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1)):
        if abs(seconds) >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def signed_seconds(seconds: float) -> str:
    """A change: `+0.20 s`, `-12.4 ms`, `none`."""
    if not seconds:
        return "none"
    return f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def planned_reserved(plan: Plan) -> int:
    """What the verdict takes the allocator to reserve: usable memory less the margin."""
    return plan.device.usable - plan.margin


def allocator_name(plan: Plan) -> str:
    """Which of the allocator's configurations that is."""
    planned, heaviest = planned_reserved(plan), plan.heaviest
    expandable = max(rank.reserved_expandable for rank in plan.rank_plans)
    return "reserved (expandable segments)" if planned == expandable != heaviest.reserved else "reserved"


def _margin(plan: Plan, unit: Unit) -> int:
    """In hundredths of the unit: what the printed sum leaves of the printed memory, so that the figures add up."""
    reserved, outside = (hundredths(size, unit) for size in (planned_reserved(plan), plan.outside.total))
    return hundredths(planned_reserved(plan) + plan.outside.total + plan.margin, unit) - reserved - outside


def verdict_text(plan: Plan) -> str:
    """The verdict with its sum; the figures add up as they are printed."""
    unit = unit_of(planned_reserved(plan) + plan.outside.total)
    reserved, outside = (hundredths(size, unit) for size in (planned_reserved(plan), plan.outside.total))
    margin = _margin(plan, unit)
    return (
        f"{plan.verdict.upper()}  {plan.ranks} x {plan.device.name}"
        f" ({written(hundredths(plan.device.memory, unit), unit)} each)"
        f"  peak {allocator_name(plan)} {written(reserved)} + outside torch {written(outside)}"
        f" = {written(reserved + outside, unit)}, "
        f"{f'margin {written(margin, unit)}' if plan.margin >= 0 else f'exceeds by {written(-margin, unit)}'}"
        f"{f'; an estimate: {plan.estimate}' if plan.estimate else ''}"
    )


def verdict_line(plan: Plan) -> str:
    """The same in a few words, for where a terminal stands still."""
    unit = unit_of(planned_reserved(plan) + plan.outside.total)
    margin = _margin(plan, unit)
    room = f"{written(margin, unit)} left" if plan.margin >= 0 else f"exceeds by {written(-margin, unit)}"
    estimated = ", an estimate" if plan.estimate else ""
    devices = f"{'each of ' if plan.ranks > 1 else ''}{plan.ranks} x {plan.device.name}"
    return f"{plan.verdict.upper()}: {room} on {devices}{estimated}"


def branches(root: Node, number: int, unit: Unit, depth: int) -> list[tuple[str, Node, int]]:
    """(indent, branch, hundredths of the unit) of what lies below the root, `depth` levels of it: all of its kinds,
    and of what is in them the larger ones.

    number: the root's own hundredths, which those of its branches add up to; so it is at each level.
    """
    return _below(root, root.children, number, unit, depth, "  ")


def _below(
    node: Node, shown: list[Node], number: int, unit: Unit, depth: int, indent: str
) -> list[tuple[str, Node, int]]:
    found = []
    for child, part in zip(shown, shares(number, [child.bytes for child in shown]), strict=True):
        found.append((indent, child, part))
        if depth > 1:
            smallest = max(child.bytes * _SMALLEST_SHARE, unit[0] / 200)
            inside = folded(child.children, smallest=smallest, most=_MOST_BRANCHES)
            found += _below(child, inside, part, unit, depth - 1, f"{indent}  ")
    return found


def outside_rows(plan: Plan) -> list[tuple[str, int, str]]:
    """(name, bytes, option that replaces them) of device memory that torch does not hand out."""
    outside = plan.outside
    return [
        ("context and kernels", outside.context, "--context-gib"),
        ("NCCL communicators", outside.nccl, "--nccl-gib"),
        ("reserved headroom", outside.reserve, "--reserve-gib"),
    ]


def where_of(peak: PhasePeak) -> str:
    """`backward, model.layers.31`."""
    return ", ".join(text for text in (peak.part, peak.module) if text) or "-"


def layers_text(place: StagePlan) -> str:
    """`0-3, 28-31`: the layers of a place's stages."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in place.layers)


def _place(plan: Plan, rank: RankPlan) -> str:
    """`data_shard 3`: where the rank is in the dimensions of the mesh that have more than one place."""
    return ", ".join(f"{dim} {place}" for dim, place in rank.coordinates.items() if plan.mesh.get(dim) != 1)


def rank_name(plan: Plan, rank: RankPlan) -> str:
    """`rank 0 (data_shard 0), heaviest of 3 planned`."""
    places = _place(plan, rank)
    traced = f", heaviest of {len(plan.rank_plans)} planned" if len(plan.rank_plans) > 1 else ""
    return f"rank {rank.rank}{f' ({places})' if places else ''}{traced}"


def phase_table(plan: Plan) -> Table:
    """Peaks of each phase on the heaviest rank."""
    rank = plan.heaviest
    rows = [
        [peak.phase, *map(format_bytes, (peak.active, peak.allocated, peak.reserved, peak.reserved_expandable,
         peak.host)), where_of(peak)] for peak in rank.peaks
    ]  # fmt: skip
    header = ["phase", "active", "allocated", "reserved", "expandable", "host", "peak in"]
    title = f"memory by phase, {rank_name(plan, rank)}"
    return Table(title, header, rows, ("phase", "peak in"), ("peak in", "host", "allocated", "expandable"))


def rank_table(plan: Plan) -> Table | None:
    """The ranks that were planned; None if it was one."""
    if len(plan.rank_plans) < 2:
        return None
    rows = []
    for rank in plan.rank_plans:
        sizes = (rank.peak.active, rank.reserved, rank.reserved_expandable, rank.host)
        heaviest = "heaviest" if rank is plan.heaviest else ""
        rows.append([str(rank.rank), *map(format_bytes, sizes), heaviest, _place(plan, rank)])
    header = ["rank", "active", "reserved", "expandable", "host", "", "place"]
    return Table("ranks, peak of all phases", header, rows, ("rank", "", "place"), ("place", "host", "expandable"))


def outermost(layers: list[LayerRow]) -> list[LayerRow]:
    """The rows that lie in no other row's module: what a total counts."""
    names = {row.module for row in layers}
    return [row for row in layers if not any(above in names for above in _above(row.module))]


def _above(module: str) -> list[str]:
    """`a.b.c` -> ``, `a`, `a.b`."""
    segments = module.split(".") if module else []
    return [".".join(segments[:cut]) for cut in range(len(segments))]


@dataclass
class Traffic:
    """Sums over collectives of a step. bytes: of whole tensors; wire: sent by one rank; seconds: one after another."""

    count: int
    bytes: int
    wire: int
    seconds: float


def traffic(rows: Iterable[CommunicationRow]) -> Traffic:
    """The sums of these rows."""
    rows = list(rows)
    return Traffic(
        sum(row.count for row in rows),
        sum(row.count * row.bytes for row in rows),
        sum(row.count * row.wire_bytes for row in rows),
        sum(row.count * row.seconds for row in rows),
    )


def by_dim(rows: Iterable[CommunicationRow]) -> dict[tuple[str, int], list[CommunicationRow]]:
    """Collectives by (mesh dimension, ranks in a group)."""
    found: dict[tuple[str, int], list[CommunicationRow]] = {}
    for row in rows:
        found.setdefault((row.dim, len(row.ranks)), []).append(row)
    return found


def communication_table(plan: Plan) -> Table | None:
    """Collectives of a steady step by mesh dimension and operation, with sums; None if there are none."""
    if not plan.communication:
        return None
    rows = []
    for (dim, _), inside in by_dim(plan.communication).items():
        members = " or ".join(dict.fromkeys(number_ranges(row.ranks) for row in inside))
        rows.append([f"{dim}: ranks {members}", "", *_traffic_cells(traffic(inside)), "", ""])
        alike: dict[tuple[Any, ...], list[CommunicationRow]] = {}
        for row in inside:
            alike.setdefault((row.operation, row.where, row.dtype, row.bytes, row.wire_bytes), []).append(row)
        for (operation, where, dtype, num_bytes, _), found in alike.items():
            cells = _traffic_cells(traffic(found), format_bytes(num_bytes), dtype)
            modules = join_numbered(row.module for row in found)
            rows.append([f"  {operation}", where, *cells, modules, _shapes_text(found)])
    whole = traffic(plan.communication)
    rows.append(["one rank", "", *_traffic_cells(whole), "", ""])
    if plan.pipeline is None:  # whose ranks are not alike
        rows.append([f"all {plan.ranks} ranks", "", "", "", "", "", format_bytes(whole.wire * plan.ranks), "", "", ""])
    header = ["operation", "where", "count", "each", "dtype", "together", "on the wire", "alone", "module", "shape"]
    note = "On the wire: what a rank sends. Alone: the time if nothing else ran."
    title = "communication of a step" + (f", {rank_name(plan, plan.heaviest)}" if plan.pipeline else "")
    return Table(title, header, rows, ("operation", "where", "module", "shape"),
                 ("shape", "module", "dtype", "together", "each", "alone"), (note,))  # fmt: skip


def _shapes_text(rows: Iterable[CommunicationRow]) -> str:
    """`4096 x 1024, scalar`: the shapes of the tensors, each once."""
    shapes = [" x ".join(map(str, shape)) or "scalar" for row in rows for shape in row.shapes]
    return ", ".join(dict.fromkeys(shapes))


def _traffic_cells(sums: Traffic, each: str = "", dtype: str = "") -> list[str]:
    return [str(sums.count), each, dtype, format_bytes(sums.bytes), format_bytes(sums.wire), duration(sums.seconds)]


def advice_table(plan: Plan) -> Table | None:
    """One lever a row; None without advice."""
    if not plan.advice:
        return None
    rows = [
        [lever.override, signed_bytes(lever.bytes), "not planned" if lever.seconds is None else
         signed_seconds(lever.seconds), "fits" if lever.fits else "does not fit", lever.note] for lever in plan.advice
    ]  # fmt: skip
    header = ["override", "peak", "step", "verdict", "note"]
    return Table("effect of one override", header, rows, ("override", "verdict", "note"), ("step",))


def host_line(plan: Plan) -> str:
    """The most host memory of a planned rank, and what all ranks can take at most."""
    rank = max(plan.rank_plans, key=lambda rank: rank.host)
    phase = max(rank.peaks, key=lambda peak: peak.host)
    text = f"{format_bytes(rank.host)}, rank {rank.rank} in phase {phase.phase}"
    if plan.ranks > 1:
        text += f"; at most {format_bytes(rank.host * plan.ranks)} for all {plan.ranks} ranks"
    return text


def run_lines(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) of what was planned: recipe, config, model, mesh, sequence length, device."""
    mesh = " x ".join(f"{dim} {size}" for dim, size in plan.mesh.items()) or "one rank"
    device = plan.device
    facts = f"{device.name}, {device.architecture}, {format_bytes(device.memory)}, {format_count(device.flops)} FLOP/s"
    facts += f", memory {format_bytes(device.bandwidth)}/s"
    if plan.ranks > 1:
        facts += f", {device.link} {format_bytes(device.link_bandwidth)}/s"
    why = reason_text(plan)
    return [
        *([("why", why)] if why else []),
        ("run", " ".join([plan.recipe, plan.config, *plan.overrides])),
        ("model", plan.model),
        ("mesh", f"{mesh} ({plan.ranks} rank{'s' if plan.ranks != 1 else ''})"),
        ("sequence length", _sequence_text(plan)),
        ("device", facts),
        *_least_lines(plan),
    ]


def _least_lines(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) of the smallest card for these ranks, and, where it was looked for, of the fewest ranks."""
    lines = []
    if plan.smallest_cards:
        memory = format_bytes(HARDWARE[plan.smallest_cards[0]].memory)
        lines.append(("smallest card", f"{' or '.join(plan.smallest_cards)} ({memory}) has room for this peak"))
    elif plan.device.architecture != "cpu":
        lines.append(("smallest card", "none of the known cards has room for this peak"))
    if plan.tried_ranks or plan.fewest_ranks is not None:
        tried = f"; planned with {', '.join(map(str, plan.tried_ranks))}" if plan.tried_ranks else ""
        found = "more than these" if plan.fewest_ranks is None else str(plan.fewest_ranks)
        lines.append((f"fewest {plan.device.name}", f"{found}{tried}"))
    return lines


def _sequence_text(plan: Plan) -> str:
    tokens = plan.sequence.get("tokens")
    text = f"{tokens:,} tokens" if isinstance(tokens, int) else "not known"
    source, histogram = plan.sequence.get("source"), plan.sequence.get("histogram")
    if isinstance(source, str):
        short, _, reason = source.partition(": ")
        told = reason and any(line.startswith(reason) for line in plan.assumptions)
        text += f", from {short if told else source}"
    if isinstance(histogram, dict):
        numbers = [f"{name} {value:,}" for name, value in histogram.items() if isinstance(value, (int, float))]
        text += f" ({', '.join(numbers)})" if numbers and len(numbers) <= 8 else ""
    return text


def version_line(plan: Plan) -> str:
    """Programs with their versions, and how long planning took."""
    parts = [f"{name} {version}" for name, version in plan.versions.items()]
    return ", ".join([*parts, planned_in(plan)])


def planned_in(plan: Plan) -> str:
    """How long the process took, as a clock on the wall has it."""
    return f"planned in {duration(plan.seconds)} of wall time"

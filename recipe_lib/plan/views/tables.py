"""Tables of a plan (phases, ranks, stages of a pipeline, modules, levers), and its tree. No torch
in here.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.plan.plan_schema import (
    Alive,
    CommunicationRow,
    LayerRow,
    Plan,
    RankPlan,
    StagePlan,
    Volume,
)
from recipe_lib.plan.tracing.trace import STORAGE_KINDS
from recipe_lib.plan.views.verdict_text import format_place, format_rank, format_running
from recipe_lib.report.view import Table, TreeLine
from recipe_lib.units import (
    Bytes,
    Count,
    Seconds,
    choose_unit,
    count_hundredths,
    format_bytes,
    format_change,
    format_hundredths,
    format_ranges,
    pluralize,
    share_out,
)

_STATES = ("parameters", "gradients", "optimizer")


def build_phase_table(plan: Plan) -> Table:
    """Return the peaks of each phase on the heaviest rank."""
    rank = plan.heaviest
    rows = []
    for peak in rank.peaks:
        sizes = (peak.active, peak.allocated, peak.reserved, peak.reserved_expandable, peak.host)
        rows.append([peak.phase, *map(Bytes, sizes), format_running(peak)])
    header = ["phase", "active", "allocated", "reserved", "expandable", "host", "peak in"]
    title = f"memory by phase, {format_rank(plan, rank)}"
    return Table(
        title, header, rows, ("phase", "peak in"), ("peak in", "host", "allocated", "expandable")
    )


def build_rank_table(plan: Plan) -> Table | None:
    """Return the ranks that were planned; None if it was one."""
    if len(plan.rank_plans) < 2:
        return None
    rows = []
    for rank in plan.rank_plans:
        sizes = map(Bytes, (rank.peak.active, rank.reserved, rank.reserved_expandable, rank.host))
        rows.append(
            [
                str(rank.rank),
                *sizes,
                "heaviest" if rank is plan.heaviest else "",
                format_place(plan, rank),
            ]
        )
    header = ["rank", "active", "reserved", "expandable", "host", "", "place"]
    return Table(
        "ranks, peak of all phases",
        header,
        rows,
        ("rank", "", "place"),
        ("place", "host", "expandable"),
    )


def build_outside_table(plan: Plan) -> Table:
    """Return device memory that torch does not hand out, with the options that replace its
    parts.
    """
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
    return Table(
        "outside PyTorch's allocator", header, rows, ("name", "option"), ("option",), headed=False
    )


def build_advice_table(plan: Plan) -> Table | None:
    """Return one lever a row; None without advice."""
    rows = []
    for lever in plan.advice:
        seconds = "not planned" if lever.seconds is None else format_change(Seconds(lever.seconds))
        verdict = "fits" if lever.fits else "does not fit"
        rows.append(
            [lever.override, format_change(Bytes(lever.bytes)), seconds, verdict, lever.note]
        )
    header = ["override", "peak", "step", "verdict", "note"]
    left = ("override", "verdict", "note")
    return (
        Table("effect of one override", header, rows, left, ("step",), tells_below=True)
        if rows
        else None
    )


def format_layers(place: StagePlan) -> str:
    """Return the layers of a place's stages: `0-3, 28-31`."""
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in place.layers
    )


def build_stage_table(plan: Plan) -> Table | None:
    """Return a row for each place of a pipeline that was planned; None without a pipeline."""
    if plan.pipeline is None:
        return None
    ranks = {rank.rank: rank for rank in plan.rank_plans}
    rows = [
        _build_stage_row(plan, place, ranks[place.rank])
        for place in plan.pipeline.places
        if place.rank in ranks
    ]
    header = [
        "rank",
        "layers",
        "parameters",
        "in flight",
        "active",
        "states",
        "activations",
        "other",
        "reserved",
    ]
    header += ["computes", "idle", "sends", ""]
    note = (
        "In flight: micro-batches between forward and backward, each stage counted; + those with"
        " deferred weight gradients. States: parameters, gradients and optimizer states at the"
        " peak. Sends: to other ranks of the pipeline, a step."
    )
    optional = (
        "parameters",
        "sends",
        "other",
        "computes",
        "reserved",
        "layers",
        "states",
        "activations",
        "idle",
    )
    title = "stages of the pipeline, at the peak of each"
    return Table(title, header, rows, ("rank", "layers", ""), optional, (note,))


def _build_stage_row(plan: Plan, place: StagePlan, rank: RankPlan) -> list[Any]:
    states = sum(alive.bytes for alive in rank.alive if alive.kind in _STATES)
    activations = sum(alive.bytes for alive in rank.alive if alive.kind == "activations")
    sizes = (
        rank.peak.active,
        states,
        activations,
        rank.peak.active - states - activations,
        rank.reserved,
    )
    is_timed = plan.pipeline is not None and plan.pipeline.seconds is not None
    return [
        str(place.rank),
        format_layers(place),
        Count(place.parameters),
        f"{place.in_flight}+{place.deferred}" if place.deferred else str(place.in_flight),
        *map(Bytes, sizes),
        f"{place.compute:.3g} s" if is_timed else "-",
        f"{place.idle:.1%}" if is_timed else "-",
        f"{place.sends} x {format_bytes(place.sent // place.sends)}" if place.sends else "none",
        "heaviest" if rank is plan.heaviest else "",
    ]


def list_outermost(layers: list[LayerRow]) -> list[LayerRow]:
    """Return the rows that lie in no other row's module: what a total counts."""
    names = {row.module for row in layers}
    rows = []
    for row in layers:
        segments = row.module.split(".") if row.module else []
        if not any(".".join(segments[:cut]) in names for cut in range(len(segments))):
            rows.append(row)
    return rows


def build_layer_table(plan: Plan) -> Table | None:
    """Return modules with their parameters, in the full model without parallelism and one rank's
    share, the shapes of their weights and what they keep for backward; None if not known.
    """
    if not plan.layers:
        return None
    groups: dict[tuple[Any, ...], list[LayerRow]] = {}
    for row in plan.layers:
        before, number, after = split_number(row.module)
        sizes = (
            row.type,
            row.parameters,
            row.trained,
            row.bytes,
            row.local_bytes,
        )  # the first layer keeps more
        groups.setdefault((before, number is None, after, sizes, _format_shapes(row)), []).append(
            row
        )
    names = _indent_names(
        [join_numbered(row.module for row in alike) or "(model)" for alike in groups.values()]
    )
    rows = [
        [name, _format_shapes(alike[0]), alike[0].type, str(len(alike)), *_sum_layers(alike)]
        for name, alike in zip(names, groups.values(), strict=True)
    ]
    rows.append(["total", "", "", "", *_sum_layers(list_outermost(plan.layers))])
    header = [
        "module",
        "weights",
        "type",
        "modules",
        "parameters",
        "trained",
        "full model",
        "this rank",
        "kept",
    ]
    note = "Kept: activations saved for backward on this rank"
    if plan.pipeline:
        note += ". With a pipeline, this rank is for each module a rank that has it"
    if any(row.weights for row in plan.layers):
        note += ". Weights: as this rank computes with them, gathered"
    optional = ("type", "modules", "trained", "full model", "parameters")
    title = "layers: the full model and one rank's share"
    return Table(title, header, rows, ("module", "weights", "type"), optional, (f"{note}.",))


def _format_shapes(row: LayerRow) -> str:
    """Return the shapes of a module's weights: `[2048, 4096]`, `[2048, 4096], bias [2048]`."""
    return ", ".join(
        f"{'' if name == 'weight' else f'{name} '}{shape}" for name, shape in row.weights.items()
    )


def _indent_names(names: list[str]) -> list[str]:
    """Return dotted names; one inside another that stands above it is shortened, and indented."""
    lines: list[str] = []
    above: list[str] = []
    for name in names:
        while above and not name.startswith(f"{above[-1]}."):
            above.pop()
        lines.append("  " * len(above) + name.removeprefix(f"{above[-1]}." if above else ""))
        above.append(name)
    return lines


def _sum_layers(rows: list[LayerRow]) -> list[Any]:
    counts = [Count(sum(getattr(row, name) for row in rows)) for name in ("parameters", "trained")]
    sizes = [
        Bytes(sum(getattr(row, name) for row in rows)) for name in ("bytes", "local_bytes", "kept")
    ]
    return [*counts, *sizes]


# Tables of all ranks together: what they communicate, groups by machine and GPU, one rank beside
# the full model.


# Groups with more members are written as ranges; of more groups than these the first ones and the
# last are shown.
_MOST_MEMBERS, _MOST_GROUPS, _FIRST_GROUPS = 8, 16, 4
_COLUMNS = 74  # of a line of groups, so that it fits into 80
_NO_BREAK = "\N{NO-BREAK SPACE}"


def sum_traffic(rows: Iterable[CommunicationRow]) -> tuple[int, Bytes, Bytes, Seconds]:
    """Return collectives of a step, bytes of their tensors, bytes that one rank sends, seconds one
    after another.
    """
    rows = list(rows)
    return (
        sum(row.count for row in rows),
        Bytes(sum(row.count * row.bytes for row in rows)),
        Bytes(sum(row.count * row.wire_bytes for row in rows)),
        Seconds(sum(row.count * row.seconds for row in rows)),
    )


def group_by_dim(rows: Iterable[CommunicationRow]) -> dict[tuple[str, int], list[CommunicationRow]]:
    """Return collectives by (mesh dimension, ranks in a group)."""
    groups: dict[tuple[str, int], list[CommunicationRow]] = {}
    for row in rows:
        groups.setdefault((row.dim, len(row.ranks)), []).append(row)
    return groups


def build_communication_table(plan: Plan) -> Table | None:
    """Return collectives of a steady step by mesh dimension and operation, with sums; None if there
    are none.
    """
    if not plan.communication:
        return None
    rows = []
    for (dim, _), inside in group_by_dim(plan.communication).items():
        members = " or ".join(dict.fromkeys(format_ranges(row.ranks) for row in inside))
        rows.append(_build_traffic_row(f"{dim}: ranks {members}", inside))
        alike: dict[tuple[Any, ...], list[CommunicationRow]] = {}
        for row in inside:
            alike.setdefault(
                (row.operation, row.where, row.dtype, row.bytes, row.wire_bytes), []
            ).append(row)
        for (operation, where, dtype, num_bytes, _), group in alike.items():
            shapes = [
                " x ".join(map(str, shape)) or "scalar" for row in group for shape in row.shapes
            ]
            last = (join_numbered(row.module for row in group), ", ".join(dict.fromkeys(shapes)))
            rows.append(
                _build_traffic_row(f"  {operation}", group, (where, Bytes(num_bytes), dtype, *last))
            )
    rows.append(_build_traffic_row("one rank", plan.communication))
    if plan.pipeline is None:  # whose ranks are not alike
        sent = Bytes(sum_traffic(plan.communication)[2] * plan.ranks)
        rows.append([f"all {plan.ranks} ranks", "", "", "", "", "", sent, "", "", ""])
    header = [
        "operation",
        "where",
        "count",
        "each",
        "dtype",
        "together",
        "on the wire",
        "alone",
        "module",
        "shape",
    ]
    title = "communication of a step" + (
        f", {format_rank(plan, plan.heaviest)}" if plan.pipeline else ""
    )
    return Table(
        title,
        header,
        rows,
        left=("operation", "where", "module", "shape"),
        optional=("shape", "module", "dtype", "together", "each", "alone"),
        notes=("On the wire: what a rank sends. Alone: the time if nothing else ran.",),
    )


def _build_traffic_row(
    name: str, rows: list[CommunicationRow], alike: Sequence[Any] = ("", "", "", "", "")
) -> list[Any]:
    """Return a row of sums. alike: what all rows have in common: where, bytes, dtype, modules,
    shapes.
    """
    where, each, dtype, *last = alike
    count, *sums = sum_traffic(rows)
    return [name, where, count, each, dtype, *sums, *last]


def build_volume_table(plan: Plan) -> Table | None:
    """Return operations, bytes and bytes on the wire along each dimension: of the cluster, of a
    rank, of a layer.
    """
    if not plan.dimensions:
        return None
    place = plan.heaviest.coordinates.get("pipeline", 0)
    places = [one.place for one in plan.pipeline.places] if plan.pipeline else [0]
    at = places.index(place) if place in places else 0
    rank = f"rank {plan.heaviest.rank}"
    rows = []
    for dimension in plan.dimensions:
        scopes = [
            ("step, all ranks", dimension.cluster_step),
            (f"step, {rank}", dimension.rank_step[at]),
            ("micro-batch, all ranks", dimension.cluster_micro_batch),
            (f"micro-batch, {rank}", dimension.rank_micro_batch[at]),
            (f"layer, {rank}", dimension.layer),
        ]
        name = dimension.dim
        for scope, volume in scopes:
            if volume is not None and volume.operations:
                rows.append([name, scope, *_format_volume(volume)])
                name = ""
    steps = [one.cluster_step for one in plan.dimensions]
    if None not in steps:
        rows.append(
            [
                "all",
                "step, all ranks",
                *_format_volume(sum((one for one in steps if one), Volume())),
            ]
        )
    header = ["dimension", "of", "operations", "bytes", "on the wire"]
    note = (
        "Operations: calls, counted on each rank that takes part; a message is a send and a"
        " receive. Bytes: of their whole tensors. On the wire: what ranks send. Micro-batch: its"
        " forward and backward, without what is once a step. Layer: of a micro-batch, as most"
        " layers have it."
    )
    return Table("communication of all ranks", header, rows, ("dimension", "of"), notes=(note,))


def _format_volume(volume: Volume) -> list[Any]:
    number = volume.operations
    operations = f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
    return [operations, Bytes(round(volume.bytes)), Bytes(round(volume.wire_bytes))]


def build_alone_table(plan: Plan) -> Table | None:
    """Return each kind of memory on the heaviest rank, and of the full model on one device; None
    where not planned.
    """
    if plan.alone is None:
        return None
    rank, alone = plan.heaviest, plan.alone
    kinds = [kind for kind in STORAGE_KINDS if kind in alone.most or kind in rank.most]
    sizes = [(kind, alone.most.get(kind, 0), rank.most.get(kind, 0)) for kind in kinds]
    whole, part = (
        next(peak.active for peak in one.peaks if peak.phase == "step") for one in (alone, rank)
    )
    rows = [
        [name, Bytes(whole), Bytes(part), f"{part / whole:.1%}" if whole else "-"]
        for name, whole, part in [*sizes, ("all at a time", whole, part)]
    ]
    title = f"a step of the full model on one device without parallelism, and of rank {rank.rank}"
    note = (
        "The most of each kind at a time, with the same micro-batches; not all kinds are there at"
        " the same time."
    )
    return Table(
        title, ["kind", "full model", f"rank {rank.rank}", "share"], rows, ("kind",), notes=(note,)
    )


def build_groups_table(plan: Plan) -> Table | None:
    """Return every group of every dimension of the mesh; None for one rank."""
    if not plan.dimensions:
        return None
    rows = []
    for dimension in plan.dimensions:
        size = len(dimension.groups[0])
        along = (
            "" if dimension.along == [dimension.dim] else f", along {' and '.join(dimension.along)}"
        )
        rows.append(
            [f"{dimension.dim}: {pluralize(len(dimension.groups), 'group')} of {size}{along}"]
        )
        # A group stays in one line.
        texts = [
            f"[{_format_members(plan, group)}]".replace(" ", _NO_BREAK)
            for group in dimension.groups
        ]
        if len(texts) > _MOST_GROUPS:
            texts = [*texts[:_FIRST_GROUPS], "...", texts[-1]]
        lines = textwrap.wrap(
            " ".join(texts), _COLUMNS, break_long_words=False, break_on_hyphens=False
        )
        rows += [[f"  {line.replace(_NO_BREAK, ' ')}"] for line in lines]
    each = plan.ranks_per_node or plan.ranks
    note = f"n0_g1: machine 0, its GPU 1; rank r is GPU r % {each} of machine r // {each}."
    if any(len(dimension.groups) > _MOST_GROUPS for dimension in plan.dimensions):
        note += " --json has all groups."
    return Table(
        "groups of ranks", ["members"], rows, ("members",), notes=(note,), headed=False, fold=True
    )


def _format_members(plan: Plan, ranks: Sequence[int]) -> str:
    """Return `n0_g0 n0_g1`; of many the ranges, `n0-3_g0-7`."""
    if len(ranks) > _MOST_MEMBERS:
        return _format_ranges(plan, ranks)
    each = plan.ranks_per_node or plan.ranks
    return " ".join(f"n{rank // each}_g{rank % each}" for rank in ranks)


def _format_ranges(plan: Plan, ranks: Sequence[int]) -> str:
    """Return `n0-3_g0-7`; machines on which other GPUs are meant follow after a space."""
    each = plan.ranks_per_node or plan.ranks
    gpus: dict[int, list[int]] = {}
    for rank in ranks:
        gpus.setdefault(rank // each, []).append(rank % each)
    machines: dict[str, list[int]] = {}
    for machine, numbers in gpus.items():
        machines.setdefault(format_ranges(numbers), []).append(machine)
    return " ".join(f"n{format_ranges(numbers)}_g{gpu}" for gpu, numbers in machines.items())


def build_stage_ranks_table(plan: Plan) -> Table | None:
    """Return stage, its layers, the ranks that have it; None without a pipeline."""
    if plan.pipeline is None:
        return None
    rows: list[list[Any]] = []
    for place in plan.pipeline.places:
        for stage, (first, last) in zip(place.stages, place.layers, strict=False):
            layers = str(first) if first == last else f"{first}-{last}"
            rows.append(
                [stage, layers, _format_ranges(plan, place.ranks), format_ranges(place.ranks)]
            )
    rows.sort(key=lambda row: row[0])
    header = ["stage", "layers", "GPUs", "ranks"]
    return Table(
        "stages and the ranks that have them", header, rows, ("layers", "GPUs", "ranks"), ("ranks",)
    )


# What is live at the peak as a tree: kind, then layer or module, then what lies inside. No torch in
# here.
#
# Layers that hold the same are one branch (`model.layers.0-31`). A node is the sum of its branches,
# to the byte.


# (path below the node, bytes, storages)
_Entry = tuple[tuple[str, ...], int, int]
_NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)((?:\..*)?)", re.DOTALL)


@dataclass
class Node:
    """A branch with the sums of all storages in it."""

    name: str
    bytes: int
    count: int
    children: list["Node"] = field(default_factory=list)  # largest first; none for a leaf


def build_alive_tree(rank: RankPlan) -> Node:
    """Return the tree of one rank's largest active peak; its kinds are in the order of
    `STORAGE_KINDS`.

    Storages are as large as they were asked for; what the allocator's blocks take beyond them is a
    branch of its own, so that the sum is the peak.
    """
    entries: dict[str, list[_Entry]] = {kind: [] for kind in STORAGE_KINDS}
    for alive in rank.alive:
        entries.setdefault(alive.kind, []).append((_split_path(alive), alive.bytes, alive.count))
    kinds = [_build_node(kind, inside, join=False) for kind, inside in entries.items() if inside]
    missing = rank.peak.active - sum(kind.bytes for kind in kinds)
    if missing:
        kinds.append(Node("rounded up to blocks", missing, 0))
    return Node("active", rank.peak.active, sum(kind.count for kind in kinds), kinds)


def draw_tree(root: Node, *, depth: float, smallest: float, most: int) -> list[TreeLine]:
    """Return the lines of `depth` levels below the root. The figures of branches add up to their
    node's, as printed.

    smallest: share of a node from which on a branch has a line of its own, if it has any digits; 0:
    all have. most: branches of a node that have one.
    """
    unit = choose_unit(root.bytes)
    lines: list[TreeLine] = []

    def grow(node: Node, number: int, level: int) -> None:
        share = f"{node.bytes / root.bytes:.1%}" if root.bytes else ""
        count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
        exact, opens = f"{node.bytes:,} bytes", bool(node.children)
        lines.append(
            TreeLine(level, node.name, format_hundredths(number, unit), exact, share, count, opens)
        )
        if level >= depth:
            return
        digits = unit[0] / 200 if smallest else 0  # what is smaller has none
        inside = node.children
        if level:  # the root's are the kinds, which all have a line
            inside = fold_small(inside, smallest=max(node.bytes * smallest, digits), most=most)
        for child, part in zip(
            inside, share_out(number, [child.bytes for child in inside]), strict=True
        ):
            grow(child, part, level + 1)

    grow(root, count_hundredths(root.bytes, unit), 0)
    return lines


def fold_small(children: list[Node], *, smallest: float, most: int) -> list[Node]:
    """The children, those below `smallest` bytes and those after the first `most` as one node `N
    smaller`.
    """
    large = [child for child in children if abs(child.bytes) >= smallest][:most]
    small = [child for child in children if not any(child is kept for kept in large)]
    if len(small) < 2:
        return children
    rest = Node(
        f"{len(small)} smaller",
        sum(node.bytes for node in small),
        sum(node.count for node in small),
    )
    return [*large, rest]


def join_numbered(names: Iterable[str]) -> str:
    """`a.0.w, a.1.w, a.2.w, b` -> `a.0-2.w, b`: names that differ in one number are one name with a
    range.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        before, number, after = split_number(name)
        groups.setdefault((before, after), [])
        if number is not None:
            groups[before, after].append(number)
    return ", ".join(
        f"{before}{format_ranges(numbers)}{after}" for (before, after), numbers in groups.items()
    )


def split_number(name: str) -> tuple[str, int | None, str]:
    """`model.layers.3.mlp` -> (`model.layers.`, 3, `.mlp`), the first segment that is a number;
    (name, None, ``).
    """
    numbered = _NUMBERED.fullmatch(name)
    return (numbered[1], int(numbered[2]), numbered[3]) if numbered else (name, None, "")


def _split_path(alive: Alive) -> tuple[str, ...]:
    """Return the layer as one name, then what is inside it; outside of layers all as one name.

    A parameter's full name says where it belongs.
    """
    name = (
        alive.label if "." in alive.label else ".".join(filter(None, (alive.module, alive.label)))
    )
    inside_layer = split_number(name)[2]
    return (name.removesuffix(inside_layer) or "outside of modules", *inside_layer.split(".")[1:])


def _build_node(name: str, entries: list[_Entry], *, join: bool = True) -> Node:
    """A branch of entries. join: one that has a single branch and nothing of its own is shown as
    one name.
    """
    inside: dict[str, list[_Entry]] = {}
    for path, num_bytes, count in entries:
        if path:
            inside.setdefault(path[0], []).append((path[1:], num_bytes, count))
    own = [(num_bytes, count) for path, num_bytes, count in entries if not path]
    children = [_build_node(first, found) for first, found in _join_alike(inside).items()]
    if own and children:
        children.append(Node("itself", sum(num for num, _ in own), sum(count for _, count in own)))
    if join and len(children) == 1:
        only = children[0]
        return Node(f"{name}.{only.name}", only.bytes, only.count, only.children)
    children.sort(key=lambda child: -child.bytes)
    return Node(
        name, sum(num for _, num, _ in entries), sum(count for _, _, count in entries), children
    )


def _join_alike(inside: dict[str, list[_Entry]]) -> dict[str, list[_Entry]]:
    """Make branches one that differ in a number at the end of their name only, and hold the
    same.
    """
    groups: dict[tuple[str, tuple[_Entry, ...]], list[str]] = {}
    for name, entries in inside.items():
        before, _, last = name.rpartition(".")
        groups.setdefault(
            (before, tuple(sorted(entries))) if last.isdecimal() else (name, ()), []
        ).append(name)
    joined: dict[str, list[_Entry]] = {}
    for names in groups.values():
        last = names[0].rpartition(".")[2]
        numbers = (
            format_ranges(int(name.rpartition(".")[2]) for name in names)
            if len(names) > 1
            else last
        )
        joined[names[0].removesuffix(last) + numbers] = [
            entry for name in names for entry in inside[name]
        ]
    return joined

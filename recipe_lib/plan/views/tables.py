"""Build the tables of a plan: phases, ranks, stages, modules, communication, groups, advice.

Each function returns one `Table`, None where a plan has nothing for it; `report.py` puts them in
order. `left` names a table's columns of text, `optional` those that a narrow terminal leaves out,
the first of them first. The heaviest rank is the one that reserves the most memory; a place is a
coordinate in a pipeline, whose ranks have the same stages. Imports no torch.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from recipe_lib.plan.plan_schema import (
    CommunicationRow,
    LayerRow,
    Plan,
    RankPlan,
    StagePlan,
    Volume,
)
from recipe_lib.plan.summary.module_paths import join_numbered, list_outermost, split_number
from recipe_lib.plan.tracing.trace import STORAGE_KINDS
from recipe_lib.plan.views.verdict_text import format_place, format_rank, format_running
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
    format_ranges,
    pluralize,
    share_out,
)

_STATES = ("parameters", "gradients", "optimizer")  # kinds of memory that a stage table sums up


def build_phase_table(plan: Plan) -> Table:
    """Return the peaks of each phase on the heaviest rank."""
    return Table(
        title=f"memory by phase, {format_rank(plan, plan.heaviest)}",
        header=["phase", "active", "allocated", "reserved", "expandable", "host", "peak in"],
        rows=[
            [
                peak.phase,
                Bytes(peak.active),
                Bytes(peak.allocated),
                Bytes(peak.reserved),
                Bytes(peak.reserved_expandable),
                Bytes(peak.host),
                format_running(peak),
            ]
            for peak in plan.heaviest.peaks
        ],
        left=("phase", "peak in"),
        optional=("peak in", "host", "allocated", "expandable"),
    )


def build_rank_table(plan: Plan) -> Table | None:
    """Return the peaks of each rank that was planned; None if it was one."""
    if len(plan.rank_plans) < 2:
        return None
    return Table(
        title="ranks, peak of all phases",
        header=["rank", "active", "reserved", "expandable", "host", "", "place"],
        rows=[
            [
                str(rank.rank),
                Bytes(rank.peak.active),
                Bytes(rank.reserved),
                Bytes(rank.reserved_expandable),
                Bytes(rank.host),
                "heaviest" if rank is plan.heaviest else "",
                format_place(plan, rank),
            ]
            for rank in plan.rank_plans
        ],
        left=("rank", "", "place"),
        optional=("place", "host", "expandable"),
    )


def build_outside_table(plan: Plan) -> Table:
    """Return device memory that torch does not hand out, and the options that replace its parts."""
    outside = plan.outside
    parts = [
        ("context and kernels", outside.context, "--context-gib"),
        ("NCCL communicators", outside.nccl, "--nccl-gib"),
        ("reserved headroom", outside.reserve, "--reserve-gib"),
    ]
    unit = choose_unit(outside.total)
    total = count_hundredths(outside.total, unit)
    # The parts as printed add up to the sum as printed.
    shares = share_out(total, [num_bytes for _, num_bytes, _ in parts])
    rows = [
        [f"  {name}", format_hundredths(share, unit), f"{option} X replaces it"]
        for (name, _, option), share in zip(parts, shares, strict=True)
    ]
    return Table(
        title="outside PyTorch's allocator",
        header=["name", "bytes", "option"],
        rows=[["outside torch", format_hundredths(total, unit), ""], *rows],
        left=("name", "option"),
        optional=("option",),
        shows_header=False,
    )


def build_advice_table(plan: Plan) -> Table | None:
    """Return a row for each lever (a change of config keys) that was tried; None without advice."""
    if not plan.advice:
        return None
    return Table(
        title="effect of one override",
        header=["override", "peak", "step", "verdict", "note"],
        rows=[
            [
                lever.override,
                format_change(Bytes(lever.bytes)),
                "not planned" if lever.seconds is None else format_change(Seconds(lever.seconds)),
                "fits" if lever.fits else "does not fit",
                lever.note,
            ]
            for lever in plan.advice
        ],
        left=("override", "verdict", "note"),
        optional=("step",),
        last_column_below=True,
    )


def format_layers(place: StagePlan) -> str:
    """Return the layers of all stages of a place: `0-3, 28-31`."""
    return ", ".join(format_ranges(range(first, last + 1)) for first, last in place.layers)


def build_stage_table(plan: Plan) -> Table | None:
    """Return a row for each place of a pipeline that was planned; None without a pipeline."""
    if plan.pipeline is None:
        return None
    ranks = {rank.rank: rank for rank in plan.rank_plans}  # by their number
    rows = [
        _build_stage_row(plan, place, ranks[place.rank])
        for place in plan.pipeline.places
        if place.rank in ranks  # --rank may leave places out
    ]
    return Table(
        title="stages of the pipeline, at the peak of each",
        header=[
            "rank",
            "layers",
            "parameters",
            "in flight",
            "active",
            "states",
            "activations",
            "other",
            "reserved",
            "computes",
            "idle",
            "sends",
            "",
        ],
        rows=rows,
        left=("rank", "layers", ""),
        optional=(
            "parameters",
            "sends",
            "other",
            "computes",
            "reserved",
            "layers",
            "states",
            "activations",
            "idle",
        ),
        notes=(
            "In flight: micro-batches between forward and backward, each stage counted; + those"
            " with deferred weight gradients. States: parameters, gradients and optimizer states at"
            " the peak. Sends: to other ranks of the pipeline, a step.",
        ),
    )


def _build_stage_row(plan: Plan, place: StagePlan, rank: RankPlan) -> list[Any]:
    """Return the cells of a place: rank, layers, memory at its peak, times, what it sends.

    rank: the one that was planned for the place.
    """
    active = rank.peak.active
    states = sum(alive.bytes for alive in rank.alive if alive.kind in _STATES)
    activations = sum(alive.bytes for alive in rank.alive if alive.kind == "activations")
    sizes = (active, states, activations, active - states - activations, rank.reserved)
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


def build_layer_table(plan: Plan) -> Table | None:
    """Return modules with their parameters, weights' shapes, and what they keep for backward.

    Modules that are alike and differ in their layer's number share a row. Bytes are those of the
    full model without parallelism, and of one rank's share. None if the plan has no modules.
    """
    if not plan.layers:
        return None
    groups: dict[tuple[Any, ...], list[LayerRow]] = {}
    for row in plan.layers:
        before, number, after = split_number(row.module)
        # `kept` does not tell layers apart: the first one keeps more than others.
        sizes = (row.parameters, row.trained, row.bytes, row.local_bytes)
        key = (before, number is None, after, row.type, sizes, _format_shapes(row))
        groups.setdefault(key, []).append(row)
    names = _indent_names(
        [join_numbered(row.module for row in group) or "(model)" for group in groups.values()]
    )
    rows = [
        [
            name,
            _format_shapes(group[0]),
            group[0].type,
            str(len(group)),
            *_sum_layers(group),
        ]
        for name, group in zip(names, groups.values(), strict=True)
    ]
    rows.append(["total", "", "", "", *_sum_layers(list_outermost(plan.layers))])
    note = "Kept: activations saved for backward on this rank"
    if plan.pipeline:
        note += ". With a pipeline, this rank is for each module a rank that has it"
    if any(row.weights for row in plan.layers):
        note += ". Weights: as this rank computes with them, gathered"
    return Table(
        title="layers: the full model and one rank's share",
        header=[
            "module",
            "weights",
            "type",
            "modules",
            "parameters",
            "trained",
            "full model",
            "this rank",
            "kept",
        ],
        rows=rows,
        left=("module", "weights", "type"),
        optional=("type", "modules", "trained", "full model", "parameters"),
        notes=(f"{note}.",),
    )


def _format_shapes(row: LayerRow) -> str:
    """Return the shapes of a module's weights: `[2048, 4096]`, `[2048, 4096], bias [2048]`."""
    return ", ".join(
        f"{'' if name == 'weight' else f'{name} '}{shape}" for name, shape in row.weights.items()
    )


def _indent_names(names: list[str]) -> list[str]:
    """Return dotted names as lines; a name inside one above it is indented, without its prefix."""
    lines: list[str] = []
    outer: list[str] = []  # names that the next one may lie in: the last one and those around it
    for name in names:
        while outer and not name.startswith(f"{outer[-1]}."):
            outer.pop()
        lines.append("  " * len(outer) + name.removeprefix(f"{outer[-1]}." if outer else ""))
        outer.append(name)
    return lines


def _sum_layers(rows: list[LayerRow]) -> list[Any]:
    """Return the last five cells of the layer table, summed over rows."""
    counts = [Count(sum(getattr(row, name) for row in rows)) for name in ("parameters", "trained")]
    sizes = [
        Bytes(sum(getattr(row, name) for row in rows)) for name in ("bytes", "local_bytes", "kept")
    ]
    return [*counts, *sizes]


# Tables of all ranks together: what they communicate, groups by machine and GPU, one rank beside
# the full model.

_MOST_MEMBERS = 8  # ranks of a group that are listed; those of a larger one are written as ranges
_MOST_GROUPS = 16  # groups of a dimension that are all listed
_FIRST_GROUPS = 4  # of more than _MOST_GROUPS groups, these and the last one are listed
_COLUMNS = 74  # width of a line of groups, so that it fits into 80
_NO_BREAK = "\N{NO-BREAK SPACE}"  # in place of a space at which a line is not to be broken


@dataclass(frozen=True)
class Traffic:
    """Sums over collectives of a step."""

    count: int  # collectives
    bytes: Bytes  # of their whole tensors
    wire_bytes: Bytes  # that one rank sends
    seconds: Seconds  # as if one collective ran after the other


def sum_traffic(rows: Sequence[CommunicationRow]) -> Traffic:
    """Return the sums over collectives of a step."""
    return Traffic(
        count=sum(row.count for row in rows),
        bytes=Bytes(sum(row.count * row.bytes for row in rows)),
        wire_bytes=Bytes(sum(row.count * row.wire_bytes for row in rows)),
        seconds=Seconds(sum(row.count * row.seconds for row in rows)),
    )


def group_by_dim(rows: Iterable[CommunicationRow]) -> dict[tuple[str, int], list[CommunicationRow]]:
    """Return collectives by (mesh dimension, ranks in a group)."""
    groups: dict[tuple[str, int], list[CommunicationRow]] = {}
    for row in rows:
        groups.setdefault((row.dim, len(row.ranks)), []).append(row)
    return groups


def build_communication_table(plan: Plan) -> Table | None:
    """Return collectives of a steady step by mesh dimension and operation, with sums."""
    if not plan.communication:
        return None
    rows = []
    for (dim, _), rows_of_dim in group_by_dim(plan.communication).items():
        members = " or ".join(dict.fromkeys(format_ranges(row.ranks) for row in rows_of_dim))
        rows.append(_build_traffic_row(f"{dim}: ranks {members}", rows_of_dim))
        groups: dict[tuple[Any, ...], list[CommunicationRow]] = {}  # alike but for their module
        for row in rows_of_dim:
            key = (row.operation, row.where, row.dtype, row.bytes, row.wire_bytes)
            groups.setdefault(key, []).append(row)
        for (operation, where, dtype, num_bytes, _), group in groups.items():
            modules = join_numbered(row.module for row in group)
            common = (where, Bytes(num_bytes), dtype, modules, _format_tensors(group))
            rows.append(_build_traffic_row(f"  {operation}", group, common))
    rows.append(_build_traffic_row("one rank", plan.communication))
    if plan.pipeline is None:  # in a pipeline other ranks send other amounts
        sent = Bytes(sum_traffic(plan.communication).wire_bytes * plan.ranks)
        rows.append([f"all {plan.ranks} ranks", "", "", "", "", "", sent, "", "", ""])
    whose = f", {format_rank(plan, plan.heaviest)}" if plan.pipeline else ""
    return Table(
        title=f"communication of a step{whose}",
        header=[
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
        ],
        rows=rows,
        left=("operation", "where", "module", "shape"),
        optional=("shape", "module", "dtype", "together", "each", "alone"),
        notes=("On the wire: what a rank sends. Alone: the time if nothing else ran.",),
    )


def _format_tensors(rows: list[CommunicationRow]) -> str:
    """Return the shapes of the rows' tensors, each once: `2048 x 4096, scalar`."""
    shapes = chain.from_iterable(row.shapes for row in rows)
    return ", ".join(dict.fromkeys(" x ".join(map(str, shape)) or "scalar" for shape in shapes))


def _build_traffic_row(
    name: str, rows: list[CommunicationRow], common: Sequence[Any] = ("", "", "", "", "")
) -> list[Any]:
    """Return the cells of a table row: sums over collectives, and what they have in common.

    common: (part of the step, bytes of one, dtype, modules, shapes); "" where they differ.
    """
    where, num_bytes, dtype, modules, shapes = common
    traffic = sum_traffic(rows)
    return [
        name,
        where,
        traffic.count,
        num_bytes,
        dtype,
        traffic.bytes,
        traffic.wire_bytes,
        traffic.seconds,
        modules,
        shapes,
    ]


def build_volume_table(plan: Plan) -> Table | None:
    """Return operations and bytes along each mesh dimension: of the cluster, of a rank, of a layer.

    None for one rank.
    """
    if not plan.dimensions:
        return None
    place = plan.heaviest.coordinates.get("pipeline", 0)
    places = [stage.place for stage in plan.pipeline.places] if plan.pipeline else [0]
    index = places.index(place) if place in places else 0  # of the heaviest rank's place
    rank = f"rank {plan.heaviest.rank}"
    rows = []
    for dimension in plan.dimensions:
        scopes = [
            ("step, all ranks", dimension.cluster_step),
            (f"step, {rank}", dimension.rank_step[index]),
            ("micro-batch, all ranks", dimension.cluster_micro_batch),
            (f"micro-batch, {rank}", dimension.rank_micro_batch[index]),
            (f"layer, {rank}", dimension.layer),
        ]
        name = dimension.dim
        for scope, volume in scopes:
            if volume is not None and volume.operations:
                rows.append([name, scope, *_format_volume(volume)])
                name = ""  # each dimension is named once
    steps = [dimension.cluster_step for dimension in plan.dimensions]
    if None not in steps:  # every place of a pipeline was planned
        total = sum((volume for volume in steps if volume), Volume())
        rows.append(["all", "step, all ranks", *_format_volume(total)])
    return Table(
        title="communication of all ranks",
        header=["dimension", "of", "operations", "bytes", "on the wire"],
        rows=rows,
        left=("dimension", "of"),
        notes=(
            "Operations: calls, counted on each rank that takes part; a message is a send and a"
            " receive. Bytes: of their whole tensors. On the wire: what ranks send. Micro-batch:"
            " its forward and backward, without what is once a step. Layer: of a micro-batch, as"
            " most layers have it.",
        ),
    )


def _format_volume(volume: Volume) -> list[Any]:
    """Return the cells of a volume; that of one micro-batch may have a fraction of an operation."""
    number = volume.operations
    operations = f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
    return [operations, Bytes(round(volume.bytes)), Bytes(round(volume.wire_bytes))]


def build_alone_table(plan: Plan) -> Table | None:
    """Return each kind of memory on the heaviest rank, and of the full model on one device.

    None if the latter was not planned.
    """
    if plan.alone is None:
        return None
    rank = plan.heaviest
    alone = plan.alone
    sizes = [
        (kind, alone.most.get(kind, 0), rank.most.get(kind, 0))
        for kind in STORAGE_KINDS
        if kind in alone.most or kind in rank.most
    ]
    full_active, rank_active = (
        next(peak.active for peak in planned.peaks if peak.phase == "step")
        for planned in (alone, rank)
    )
    sizes.append(("all at a time", full_active, rank_active))
    return Table(
        title=(
            f"a step of the full model on one device without parallelism, and of rank {rank.rank}"
        ),
        header=["kind", "full model", f"rank {rank.rank}", "share"],
        rows=[
            [name, Bytes(full), Bytes(part), f"{part / full:.1%}" if full else "-"]
            for name, full, part in sizes
        ],
        left=("kind",),
        notes=(
            "The most of each kind at a time, with the same micro-batches; not all kinds are there"
            " at the same time.",
        ),
    )


def build_groups_table(plan: Plan) -> Table | None:
    """Return every group of every dimension of the mesh; None for one rank."""
    if not plan.dimensions:
        return None
    rows = []
    for dimension in plan.dimensions:
        groups = dimension.groups
        title = f"{dimension.dim}: {pluralize(len(groups), 'group')} of {len(groups[0])}"
        if dimension.along != [dimension.dim]:
            title += f", along {' and '.join(dimension.along)}"
        rows.append([title])
        # A group is not broken into two lines.
        texts = [f"[{_format_members(plan, group)}]".replace(" ", _NO_BREAK) for group in groups]
        if len(texts) > _MOST_GROUPS:
            texts = [*texts[:_FIRST_GROUPS], "...", texts[-1]]
        lines = textwrap.wrap(
            " ".join(texts), _COLUMNS, break_long_words=False, break_on_hyphens=False
        )
        rows += [[f"  {line.replace(_NO_BREAK, ' ')}"] for line in lines]
    per_node = plan.ranks_per_node or plan.ranks
    note = f"n0_g1: machine 0, its GPU 1; rank r is GPU r % {per_node} of machine r // {per_node}."
    if any(len(dimension.groups) > _MOST_GROUPS for dimension in plan.dimensions):
        note += " --json has all groups."
    return Table(
        title="groups of ranks",
        header=["members"],
        rows=rows,
        left=("members",),
        notes=(note,),
        shows_header=False,
        wraps_cells=True,
    )


def _format_members(plan: Plan, ranks: Sequence[int]) -> str:
    """Return the members of a group, `n0_g0 n0_g1`; of more than _MOST_MEMBERS as ranges."""
    if len(ranks) > _MOST_MEMBERS:
        return _format_ranges(plan, ranks)
    per_node = plan.ranks_per_node or plan.ranks
    return " ".join(f"n{rank // per_node}_g{rank % per_node}" for rank in ranks)


def _format_ranges(plan: Plan, ranks: Sequence[int]) -> str:
    """Return ranks as `n0-3_g0-7`: the GPUs 0 to 7 of the machines 0 to 3.

    Machines with other GPUs in the group follow after a space.
    """
    per_node = plan.ranks_per_node or plan.ranks
    gpus: dict[int, list[int]] = {}  # machine -> its GPUs in the group
    for rank in ranks:
        gpus.setdefault(rank // per_node, []).append(rank % per_node)
    machines: dict[str, list[int]] = {}  # GPUs as text -> the machines that have just these
    for machine, gpu_numbers in gpus.items():
        machines.setdefault(format_ranges(gpu_numbers), []).append(machine)
    return " ".join(f"n{format_ranges(numbers)}_g{gpu}" for gpu, numbers in machines.items())


def build_stage_ranks_table(plan: Plan) -> Table | None:
    """Return a row for each stage: its layers, the ranks that have it; None without a pipeline."""
    if plan.pipeline is None:
        return None
    rows: list[list[Any]] = []
    for place in plan.pipeline.places:
        for stage, (first, last) in zip(place.stages, place.layers, strict=True):
            layers = format_ranges(range(first, last + 1))
            ranks = format_ranges(place.ranks)
            rows.append([stage, layers, _format_ranges(plan, place.ranks), ranks])
    rows.sort(key=lambda row: row[0])
    return Table(
        title="stages and the ranks that have them",
        header=["stage", "layers", "GPUs", "ranks"],
        rows=rows,
        left=("layers", "GPUs", "ranks"),
        optional=("ranks",),
    )

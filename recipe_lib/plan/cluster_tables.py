"""Tables of all ranks together: what they communicate, groups by machine and GPU, one rank beside the full model."""

from collections.abc import Iterable, Sequence
from typing import Any

from recipe_lib.plan.cluster import Volume
from recipe_lib.plan.result import CommunicationRow, Plan
from recipe_lib.plan.trace import STORAGE_KINDS
from recipe_lib.plan.tree import join_numbered
from recipe_lib.plan.verdict import rank_text
from recipe_lib.report.view import Table
from recipe_lib.units import Bytes, Seconds, counted, number_ranges

# Groups with more members are written as ranges; of more groups than these the first ones and the last are shown.
_MOST_MEMBERS, _MOST_GROUPS, _FIRST_GROUPS = 8, 16, 4
_COLUMNS = 74  # of a line of groups, so that it fits into 80


def sum_traffic(rows: Iterable[CommunicationRow]) -> tuple[int, Bytes, Bytes, Seconds]:
    """Return collectives of a step, bytes of their tensors, bytes that one rank sends, seconds one after another."""
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


def communication_table(plan: Plan) -> Table | None:
    """Return collectives of a steady step by mesh dimension and operation, with sums; None if there are none."""
    if not plan.communication:
        return None
    rows = []
    for (dim, _), inside in group_by_dim(plan.communication).items():
        members = " or ".join(dict.fromkeys(number_ranges(row.ranks) for row in inside))
        rows.append(_traffic_row(f"{dim}: ranks {members}", inside))
        alike: dict[tuple[Any, ...], list[CommunicationRow]] = {}
        for row in inside:
            alike.setdefault((row.operation, row.where, row.dtype, row.bytes, row.wire_bytes), []).append(row)
        for (operation, where, dtype, num_bytes, _), group in alike.items():
            shapes = [" x ".join(map(str, shape)) or "scalar" for row in group for shape in row.shapes]
            last = (join_numbered(row.module for row in group), ", ".join(dict.fromkeys(shapes)))
            rows.append(_traffic_row(f"  {operation}", group, (where, Bytes(num_bytes), dtype, *last)))
    rows.append(_traffic_row("one rank", plan.communication))
    if plan.pipeline is None:  # whose ranks are not alike
        sent = Bytes(sum_traffic(plan.communication)[2] * plan.ranks)
        rows.append([f"all {plan.ranks} ranks", "", "", "", "", "", sent, "", "", ""])
    header = ["operation", "where", "count", "each", "dtype", "together", "on the wire", "alone", "module", "shape"]
    title = "communication of a step" + (f", {rank_text(plan, plan.heaviest)}" if plan.pipeline else "")
    return Table(
        title,
        header,
        rows,
        left=("operation", "where", "module", "shape"),
        optional=("shape", "module", "dtype", "together", "each", "alone"),
        notes=("On the wire: what a rank sends. Alone: the time if nothing else ran.",),
    )


def _traffic_row(name: str, rows: list[CommunicationRow], alike: Sequence[Any] = ("", "", "", "", "")) -> list[Any]:
    """Return a row of sums. alike: what all rows have in common: where, bytes, dtype, modules, shapes."""
    where, each, dtype, *last = alike
    count, *sums = sum_traffic(rows)
    return [name, where, count, each, dtype, *sums, *last]


def volume_table(plan: Plan) -> Table | None:
    """Return operations, bytes and bytes on the wire along each dimension: of the cluster, of a rank, of a layer."""
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
                rows.append([name, scope, *_volume_cells(volume)])
                name = ""
    steps = [one.cluster_step for one in plan.dimensions]
    if None not in steps:
        rows.append(["all", "step, all ranks", *_volume_cells(sum((one for one in steps if one), Volume()))])
    header = ["dimension", "of", "operations", "bytes", "on the wire"]
    note = (
        "Operations: calls, counted on each rank that takes part; a message is a send and a receive. Bytes: of their "
        "whole tensors. On the wire: what ranks send. Micro-batch: its forward and backward, without what is once a "
        "step. Layer: of a micro-batch, as most layers have it."
    )
    return Table("communication of all ranks", header, rows, ("dimension", "of"), notes=(note,))


def _volume_cells(volume: Volume) -> list[Any]:
    number = volume.operations
    operations = f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
    return [operations, Bytes(round(volume.bytes)), Bytes(round(volume.wire_bytes))]


def alone_table(plan: Plan) -> Table | None:
    """Return each kind of memory on the heaviest rank, and of the full model on one device; None where not planned."""
    if plan.alone is None:
        return None
    rank, alone = plan.heaviest, plan.alone
    kinds = [kind for kind in STORAGE_KINDS if kind in alone.most or kind in rank.most]
    sizes = [(kind, alone.most.get(kind, 0), rank.most.get(kind, 0)) for kind in kinds]
    whole, part = (next(peak.active for peak in one.peaks if peak.phase == "step") for one in (alone, rank))
    rows = [
        [name, Bytes(whole), Bytes(part), f"{part / whole:.1%}" if whole else "-"]
        for name, whole, part in [*sizes, ("all at a time", whole, part)]
    ]
    title = f"a step of the full model on one device without parallelism, and of rank {rank.rank}"
    note = "The most of each kind at a time, with the same micro-batches; not all kinds are there at the same time."
    return Table(title, ["kind", "full model", f"rank {rank.rank}", "share"], rows, ("kind",), notes=(note,))


def groups_table(plan: Plan) -> Table | None:
    """Return every group of every dimension of the mesh; None for one rank."""
    if not plan.dimensions:
        return None
    rows = []
    for dimension in plan.dimensions:
        size = len(dimension.groups[0])
        along = "" if dimension.along == [dimension.dim] else f", along {' and '.join(dimension.along)}"
        rows.append([f"{dimension.dim}: {counted(len(dimension.groups), 'group')} of {size}{along}"])
        texts = [f"[{_members_text(plan, group)}]" for group in dimension.groups]
        if len(texts) > _MOST_GROUPS:
            texts = [*texts[:_FIRST_GROUPS], "...", texts[-1]]
        rows += [[f"  {line}"] for line in _fill_lines(texts)]
    each = plan.ranks_per_node or plan.ranks
    note = f"n0_g1: machine 0, its GPU 1; rank r is GPU r % {each} of machine r // {each}."
    if any(len(dimension.groups) > _MOST_GROUPS for dimension in plan.dimensions):
        note += " --json has all groups."
    return Table("groups of ranks", ["members"], rows, ("members",), notes=(note,), headed=False, fold=True)


def _fill_lines(texts: list[str]) -> list[str]:
    """Return lines of as many texts as fit."""
    lines = [texts[0]]
    for text in texts[1:]:
        if len(lines[-1]) + 1 + len(text) <= _COLUMNS:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines


def _members_text(plan: Plan, ranks: Sequence[int]) -> str:
    """Return `n0_g0 n0_g1`; of many the ranges, `n0-3_g0-7`."""
    if len(ranks) > _MOST_MEMBERS:
        return _ranges_text(plan, ranks)
    each = plan.ranks_per_node or plan.ranks
    return " ".join(f"n{rank // each}_g{rank % each}" for rank in ranks)


def _ranges_text(plan: Plan, ranks: Sequence[int]) -> str:
    """Return `n0-3_g0-7`; machines on which other GPUs are meant follow after a space."""
    each = plan.ranks_per_node or plan.ranks
    gpus: dict[int, list[int]] = {}
    for rank in ranks:
        gpus.setdefault(rank // each, []).append(rank % each)
    machines: dict[str, list[int]] = {}
    for machine, numbers in gpus.items():
        machines.setdefault(number_ranges(numbers), []).append(machine)
    return " ".join(f"n{number_ranges(numbers)}_g{gpu}" for gpu, numbers in machines.items())


def stage_ranks_table(plan: Plan) -> Table | None:
    """Return stage, its layers, the ranks that have it; None without a pipeline."""
    if plan.pipeline is None:
        return None
    rows: list[list[Any]] = []
    for place in plan.pipeline.places:
        for stage, (first, last) in zip(place.stages, place.layers, strict=False):
            layers = str(first) if first == last else f"{first}-{last}"
            rows.append([stage, layers, _ranges_text(plan, place.ranks), number_ranges(place.ranks)])
    rows.sort(key=lambda row: row[0])
    header = ["stage", "layers", "GPUs", "ranks"]
    return Table("stages and the ranks that have them", header, rows, ("layers", "GPUs", "ranks"), ("ranks",))

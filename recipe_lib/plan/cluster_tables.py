"""All ranks together as tables: groups by machine and GPU, what they communicate, one rank beside the full model."""

from collections.abc import Sequence

from recipe_lib.plan.cluster import Volume
from recipe_lib.plan.result import Plan
from recipe_lib.plan.trace import STORAGE_KINDS
from recipe_lib.plan.tree import number_ranges
from recipe_lib.report.terminal import Table
from recipe_lib.units import format_bytes

# Groups with more members are written as ranges; of more groups than these the first ones and the last are shown.
_MOST_MEMBERS, _MOST_GROUPS, _FIRST_GROUPS = 8, 16, 4
_COLUMNS = 74  # of a line of groups, so that it fits into 80


def alone_table(plan: Plan) -> Table | None:
    """Each kind of memory on the heaviest rank, and of the full model on one device; None where that is not planned."""
    if plan.alone is None:
        return None
    rank, alone = plan.heaviest, plan.alone
    kinds = [kind for kind in STORAGE_KINDS if kind in alone.most or kind in rank.most]
    sizes = {kind: (alone.most.get(kind, 0), rank.most.get(kind, 0)) for kind in kinds}
    whole, part = (next(peak.active for peak in one.peaks if peak.phase == "step") for one in (alone, rank))
    sizes["all at a time"] = (whole, part)
    rows = [
        [name, format_bytes(whole), format_bytes(part), f"{part / whole:.1%}" if whole else "-"]
        for name, (whole, part) in sizes.items()
    ]
    title = f"a step of the full model on one device without parallelism, and of rank {rank.rank}"
    notes = ("The most of each kind at a time, with the same micro-batches; not all kinds are there at the same time.",)
    return Table(title, ["kind", "full model", f"rank {rank.rank}", "share"], rows, ("kind",), notes=notes)


def groups_table(plan: Plan) -> Table | None:
    """Every group of every dimension of the mesh, and the ranks of each stage; None for one rank."""
    if not plan.dimensions:
        return None
    rows = []
    for dimension in plan.dimensions:
        size, count = len(dimension.groups[0]), len(dimension.groups)
        along = "" if dimension.along == [dimension.dim] else f", along {' and '.join(dimension.along)}"
        rows.append([f"{dimension.dim}: {count} group{'s' if count > 1 else ''} of {size}{along}"])
        rows += [[f"  {line}"] for line in _lines(plan, dimension.groups)]
    each = plan.ranks_per_node or plan.ranks
    note = f"n0_g1: machine 0, its GPU 1; rank r is GPU r % {each} of machine r // {each}."
    if any(len(dimension.groups) > _MOST_GROUPS for dimension in plan.dimensions):
        note += " --json has all groups."
    return Table("groups of ranks", ["members"], rows, ("members",), notes=(note,), headed=False, fold=True)


def stage_ranks_table(plan: Plan) -> Table | None:
    """Stage, its layers, the ranks that have it; None without a pipeline."""
    if plan.pipeline is None:
        return None
    stages = [
        (stage, layers, place)
        for place in plan.pipeline.places
        for stage, layers in zip(place.stages, place.layers, strict=False)
    ]
    rows = []
    for stage, (first, last), place in sorted(stages, key=lambda one: one[0]):
        layers_of = str(first) if first == last else f"{first}-{last}"
        rows.append([str(stage), layers_of, _ranges(plan, place.ranks), number_ranges(place.ranks)])
    header = ["stage", "layers", "GPUs", "ranks"]
    return Table("stages and the ranks that have them", header, rows, ("layers", "GPUs", "ranks"), ("ranks",))


def volume_table(plan: Plan) -> Table | None:
    """Operations, bytes and bytes on the wire along each dimension: of the cluster, of a rank, of a layer."""
    if not plan.dimensions:
        return None
    place = plan.heaviest.coordinates.get("pipeline", 0)
    known = [one.place for one in plan.pipeline.places] if plan.pipeline else [0]
    at = known.index(place) if place in known else 0
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
                rows.append([name, scope, *_cells(volume)])
                name = ""
    steps = [one.cluster_step for one in plan.dimensions]
    if None not in steps:
        rows.append(["all", "step, all ranks", *_cells(sum((one for one in steps if one), Volume()))])
    header = ["dimension", "of", "operations", "bytes", "on the wire"]
    notes = (
        "Operations: calls, counted on each rank that takes part; a message is a send and a receive. Bytes: of their "
        "whole tensors. On the wire: what ranks send. Micro-batch: its forward and backward, without what is once a "
        "step. Layer: of a micro-batch, as most layers have it.",
    )
    return Table("communication of all ranks", header, rows, ("dimension", "of"), notes=notes)


def _cells(volume: Volume) -> list[str]:
    number = volume.operations
    whole = f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
    return [whole, format_bytes(round(volume.bytes)), format_bytes(round(volume.wire_bytes))]


def _lines(plan: Plan, groups: Sequence[Sequence[int]]) -> list[str]:
    """The groups, as many in a line as fit."""
    texts = [f"[{_members(plan, group)}]" for group in groups]
    if len(texts) > _MOST_GROUPS:
        texts = [*texts[:_FIRST_GROUPS], "...", texts[-1]]
    lines = [texts[0]]
    for text in texts[1:]:
        if len(lines[-1]) + 1 + len(text) <= _COLUMNS:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines


def _members(plan: Plan, ranks: Sequence[int]) -> str:
    """`n0_g0 n0_g1`; of many the ranges, `n0-3_g0-7`."""
    if len(ranks) > _MOST_MEMBERS:
        return _ranges(plan, ranks)
    each = plan.ranks_per_node or plan.ranks
    return " ".join(f"n{rank // each}_g{rank % each}" for rank in ranks)


def _ranges(plan: Plan, ranks: Sequence[int]) -> str:
    """`n0-3_g0-7`; machines on which other GPUs are meant follow after a space."""
    each = plan.ranks_per_node or plan.ranks
    gpus: dict[int, list[int]] = {}
    for rank in ranks:
        gpus.setdefault(rank // each, []).append(rank % each)
    machines: dict[str, list[int]] = {}
    for machine, found in gpus.items():
        machines.setdefault(number_ranges(found), []).append(machine)
    return " ".join(f"n{number_ranges(numbers)}_g{found}" for found, numbers in machines.items())

"""Modules with their parameters, the shapes of their weights and what they keep for backward, as a table. No torch."""

from collections.abc import Iterable
from typing import Any

from recipe_lib.config.idle import trained_dtype
from recipe_lib.config.optimizer_facts import BYTES, state_bytes
from recipe_lib.config.stalled_means import describe_stalled_means
from recipe_lib.plan.result import LayerRow, Plan
from recipe_lib.plan.tables import outermost
from recipe_lib.plan.tree import join_numbered, split_number
from recipe_lib.report.terminal import Table
from recipe_lib.units import format_bytes, format_count


def layer_table(plan: Plan) -> Table | None:
    """Modules with their parameters: in the full model without parallelism, and one rank's share; None if not known."""
    if not plan.layers:
        return None
    groups: dict[tuple[Any, ...], list[LayerRow]] = {}
    for row in plan.layers:
        before, number, after = split_number(row.module)
        sizes = (row.type, row.parameters, row.trained, row.bytes, row.local_bytes)  # the first layer keeps more
        alike = (*sizes, _shapes_of(row))
        groups.setdefault((before, number is None, after, alike), []).append(row)
    names = _indented([join_numbered(row.module for row in alike) or "(model)" for alike in groups.values()])
    rows = [
        [name, _shapes_of(alike[0]), alike[0].type, str(len(alike)), *_layer_sums(alike)]
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
    return Table("layers: the full model and one rank's share", header, rows, ("module", "weights", "type"), optional,
                 (f"{note}.",))  # fmt: skip


def _shapes_of(row: LayerRow) -> str:
    """`[2048, 4096]`, `[2048, 4096], bias [2048]`."""
    return ", ".join(f"{'' if name == 'weight' else f'{name} '}{shape}" for name, shape in row.weights.items())


def _indented(names: list[str]) -> list[str]:
    """Dotted names; one inside another that stands above it is shortened, and indented."""
    found: list[str] = []
    above: list[str] = []
    for name in names:
        while above and not name.startswith(f"{above[-1]}."):
            above.pop()
        found.append("  " * len(above) + name.removeprefix(f"{above[-1]}." if above else ""))
        above.append(name)
    return found


def _layer_sums(rows: Iterable[LayerRow]) -> list[str]:
    rows = list(rows)
    counts = [format_count(sum(getattr(row, name) for row in rows)) for name in ("parameters", "trained")]
    sizes = [format_bytes(sum(getattr(row, name) for row in rows)) for name in ("bytes", "local_bytes", "kept")]
    alone = [row.kept_alone for row in rows if row.kept_alone is not None]
    return [*counts, *sizes, format_bytes(sum(alone)) if alone else "-"]


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

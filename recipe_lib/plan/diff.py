"""Two plans side by side, each difference with its sign. No torch in here."""

from collections.abc import Callable, Iterator
from typing import Any

from recipe_lib.plan.result import Plan
from recipe_lib.plan.tables import by_dim, duration, planned_reserved, signed_bytes, signed_seconds, traffic
from recipe_lib.plan.tree import alive_tree
from recipe_lib.report.terminal import HEADING, Table, heading, open_console, put, put_table, text_of
from recipe_lib.units import format_bytes, format_count

_ABSENT = "-"
_PHASE_FIELDS = {
    "active": "active",
    "allocated": "allocated",
    "reserved": "reserved",
    "reserved_expandable": "expandable",
    "host": "host",
}
_TIME_FIELDS = {
    "step": "step",
    "compute": "kernels",
    "communication": "communication, alone",
    "exposed": "communication, exposed",
    "launch": "kernel launches (CPU)",
}


_TOTALS = ("active", "all, one rank: wire", "all, all ranks: wire")  # at the end of their tables
NOT_PLANNED = "not planned"


def _write_count_change(value: float) -> str:
    return f"{'+' if value > 0 else ''}{format_count(value)}" if value else "none"


# How a figure is written, and how a difference.
Format = tuple[Callable[[Any], str], Callable[[Any], str]]
BYTES: Format = (format_bytes, signed_bytes)
SECONDS: Format = (duration, signed_seconds)
COUNT: Format = (format_count, _write_count_change)
# A figure's name, value and format; a text has none.
Figure = tuple[str, Any, Format | None]


def render_diff(first: Plan, second: Plan, *, width: int = 100, color: bool = False) -> str:
    """Return what the second plan takes compared with the first: verdict, phases, kinds at the peak, traffic, time.

    A difference is the second's figure less the first's; `-` where one of them was not planned.
    """
    console = open_console(width, color)
    for letter, plan in (("a", first), ("b", second)):
        where = f"({plan.ranks} x {plan.device.name})"
        put(console, f"{letter}  {' '.join([plan.recipe, plan.config, *plan.overrides, where])}", HEADING)
    for title, list_figures, absent in (
        ("verdict", _list_verdict, None),
        ("peaks by phase, heaviest rank", _list_phases, None),
        ("live at the peak", _list_kinds, 0),  # of a kind that a plan lacks it takes no bytes
        ("communication of a step, one rank", _list_communication, 0),
        ("time of a step", _list_time, None),
    ):
        rows = _compare(list(list_figures(first)), list(list_figures(second)), absent)
        if rows:
            heading(console, title)
            put_table(console, Table(title, ["", "a", "b", "b - a"], rows, ("",)))
    return text_of(console)


def _compare(first: list[Figure], second: list[Figure], absent: int | None) -> list[list[str]]:
    """Return a row for each figure that one of the plans has. absent: what it is where the other lacks it."""
    formats = {name: form for name, _, form in [*first, *second]}
    values = [{name: value for name, value, _ in figures} for figures in (first, second)]
    rows = []
    for name in sorted(formats, key=lambda name: name in _TOTALS):
        form = formats[name]
        if form is None:
            texts = [known.get(name, NOT_PLANNED) for known in values]
            rows.append([name, *texts, "none" if texts[0] == texts[1] else "changed"])
            continue
        a, b = (known.get(name, absent) for known in values)
        difference = _ABSENT if a is None or b is None else form[1](b - a)
        rows.append([name, *(_ABSENT if value is None else form[0](value) for value in (a, b)), difference])
    return rows


def _list_verdict(plan: Plan) -> Iterator[Figure]:
    yield "verdict", plan.verdict, None
    yield "reserved", planned_reserved(plan), BYTES
    yield "outside torch", plan.outside.total, BYTES
    yield "together", planned_reserved(plan) + plan.outside.total, BYTES
    yield "margin", plan.margin, BYTES


def _list_phases(plan: Plan) -> Iterator[Figure]:
    for peak in plan.heaviest.peaks:
        for field, title in _PHASE_FIELDS.items():
            yield f"{peak.phase}: {title}", getattr(peak, field), BYTES


def _list_kinds(plan: Plan) -> Iterator[Figure]:
    tree = alive_tree(plan.heaviest)
    for node in tree.children:
        yield node.name, node.bytes, BYTES
    yield "active", tree.bytes, BYTES


def _list_communication(plan: Plan) -> Iterator[Figure]:
    """Yield count and bytes on the wire of each operation in each mesh dimension, and of all."""
    for (dim, size), inside in by_dim(plan.communication).items():
        for operation in dict.fromkeys(row.operation for row in inside):
            alike = traffic(row for row in inside if row.operation == operation)
            yield f"{operation}, {dim}[{size}]: count", alike.count, COUNT
            yield f"{operation}, {dim}[{size}]: wire", alike.wire, BYTES
    if plan.communication:
        wire = traffic(plan.communication).wire
        yield "all, one rank: wire", wire, BYTES
        yield "all, all ranks: wire", wire * plan.ranks, BYTES


def _list_time(plan: Plan) -> Iterator[Figure]:
    if plan.time is None:
        return
    for field, title in _TIME_FIELDS.items():
        yield title, getattr(plan.time, field), SECONDS
    yield "tokens a step", plan.time.tokens_per_step, COUNT
    yield "tokens a second", plan.time.tokens_per_second, COUNT
    yield "run", plan.time.total, SECONDS
    yield "rates", "calibrated" if plan.time.calibrated else "not calibrated", None

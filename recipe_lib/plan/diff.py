"""Two plans side by side, each difference with its sign. No torch in here."""

from collections.abc import Callable, Sequence
from typing import Any

from recipe_lib.plan.result import Plan
from recipe_lib.plan.tables import by_dim, duration, planned_reserved, signed_bytes, signed_seconds, traffic
from recipe_lib.plan.tree import alive_tree
from recipe_lib.report.terminal import HEADING, Table, heading, open_console, put, put_table, text_of
from recipe_lib.units import format_bytes, format_count

_ABSENT = "-"

# (what, text of the first plan, text of the second, difference)
Row = list[str]


def render_diff(first: Plan, second: Plan, *, width: int = 100, color: bool = False) -> str:
    """What the second plan takes compared with the first: verdict, phases, kinds at the peak, communication, time.

    A difference is the second's figure less the first's; `-` where one of them was not planned.
    """
    console = open_console(width, color)
    for letter, plan in (("a", first), ("b", second)):
        put(console, f"{letter}  {_name(plan)}", HEADING)
    for title, rows in (
        ("verdict", _verdict(first, second)),
        ("peaks by phase, heaviest rank", _phases(first, second)),
        ("live at the peak", _kinds(first, second)),
        ("communication of a step, one rank", _communication(first, second)),
        ("time of a step", _time(first, second)),
    ):
        if rows:
            table = Table(title, ["", "a", "b", "b - a"], rows, ("",))
            heading(console, title)
            put_table(console, table)
    return text_of(console)


def _name(plan: Plan) -> str:
    """Recipe, config, overrides; ranks and device."""
    return " ".join([plan.recipe, plan.config, *plan.overrides, f"({plan.ranks} x {plan.device.name})"])


def _row(
    name: str, a: float | None, b: float | None, show: Callable[[float], str], change: Callable[[float], str]
) -> Row:
    """A figure of both plans; None where a plan has none."""
    difference = _ABSENT if a is None or b is None else change(b - a)
    return [name, *(_ABSENT if value is None else show(value) for value in (a, b)), difference]


def _both(pair: Sequence[Any], field: str) -> tuple[Any, Any]:
    """A field of both; None of what is None."""
    a, b = (None if found is None else getattr(found, field) for found in pair)
    return a, b


def _bytes_row(name: str, a: int | None, b: int | None) -> Row:
    return _row(name, a, b, format_bytes, lambda value: signed_bytes(int(value)))


def _seconds_row(name: str, a: float | None, b: float | None) -> Row:
    return _row(name, a, b, duration, signed_seconds)


def _count_row(name: str, a: float | None, b: float | None) -> Row:
    return _row(
        name, a, b, format_count, lambda value: f"{'+' if value > 0 else ''}{format_count(value)}" if value else "none"
    )


def _verdict(first: Plan, second: Plan) -> list[Row]:
    rows = [["verdict", first.verdict, second.verdict, "none" if first.verdict == second.verdict else "changed"]]
    for name, read in (
        ("reserved", planned_reserved),
        ("outside torch", lambda plan: plan.outside.total),
        ("together", lambda plan: planned_reserved(plan) + plan.outside.total),
        ("margin", lambda plan: plan.margin),
    ):
        rows.append(_bytes_row(name, read(first), read(second)))
    return rows


def _phases(first: Plan, second: Plan) -> list[Row]:
    peaks = [{peak.phase: peak for peak in plan.heaviest.peaks} for plan in (first, second)]
    rows = []
    for phase in dict.fromkeys([*peaks[0], *peaks[1]]):
        pair = [found.get(phase) for found in peaks]
        for field, title in (("active", "active"), ("allocated", "allocated"), ("reserved", "reserved"),
                             ("reserved_expandable", "expandable"), ("host", "host")):  # fmt: skip
            rows.append(_bytes_row(f"{phase}: {title}", *_both(pair, field)))
    return rows


def _kinds(first: Plan, second: Plan) -> list[Row]:
    """Every kind that one of them has; where there is none it is 0 bytes, so that differences add up to the last."""
    trees = [alive_tree(plan.heaviest) for plan in (first, second)]
    sizes = [{node.name: node.bytes for node in tree.children} for tree in trees]
    names = dict.fromkeys([*sizes[0], *sizes[1]])
    rows = [_bytes_row(name, sizes[0].get(name, 0), sizes[1].get(name, 0)) for name in names]
    return [*rows, _bytes_row("active", trees[0].bytes, trees[1].bytes)]


def _communication(first: Plan, second: Plan) -> list[Row]:
    """Count and bytes on the wire of each operation in each mesh dimension, 0 where there is none; and all of it."""
    sums = []
    for plan in (first, second):
        found = {}
        for (dim, size), inside in by_dim(plan.communication).items():
            for operation in dict.fromkeys(row.operation for row in inside):
                alike = traffic(row for row in inside if row.operation == operation)
                found[f"{operation}, {dim}[{size}]"] = alike
        sums.append(found)
    rows = []
    for name in dict.fromkeys([*sums[0], *sums[1]]):
        pair = [found.get(name, traffic([])) for found in sums]
        rows.append(_count_row(f"{name}: count", *_both(pair, "count")))
        rows.append(_bytes_row(f"{name}: wire", *_both(pair, "wire")))
    if rows:
        a, b = (traffic(plan.communication) for plan in (first, second))
        rows.append(_bytes_row("all, one rank: wire", a.wire, b.wire))
        rows.append(_bytes_row("all, all ranks: wire", a.wire * first.ranks, b.wire * second.ranks))
    return rows


def _time(first: Plan, second: Plan) -> list[Row]:
    a, b = first.time, second.time
    if a is None and b is None:
        return []
    rows = []
    for field, title in (("step", "step"), ("compute", "kernels"), ("communication", "communication, alone"),
                         ("exposed", "communication, exposed"), ("launch", "kernel launches (CPU)")):  # fmt: skip
        rows.append(_seconds_row(title, *_both((a, b), field)))
    rows.append(_count_row("tokens a step", *_both((a, b), "tokens_per_step")))
    rows.append(_count_row("tokens a second", *_both((a, b), "tokens_per_second")))
    rows.append(_seconds_row("run", *_both((a, b), "total")))
    rates = [
        "not planned" if time is None else "calibrated" if time.calibrated else "not calibrated" for time in (a, b)
    ]
    rows.append(["rates", *rates, "none" if rates[0] == rates[1] else "changed"])
    return rows

"""Two plans side by side, each difference with its sign. No torch in here."""

from typing import Any

from recipe_lib.plan.result import Plan
from recipe_lib.plan.tables import group_by_dim, sum_traffic
from recipe_lib.plan.tree import alive_tree
from recipe_lib.plan.verdict import planned_reserved
from recipe_lib.report.terminal import HEADING, open_console, put, put_section, text_of
from recipe_lib.report.view import Section, Table
from recipe_lib.units import Bytes, Count, Seconds, format_change

# By the title of a section: the name of a figure, and it as a cell; None where it was not planned.
Figures = dict[str, dict[str, Any]]
_COMMUNICATION = "communication of a step, one rank"
_SUMS = ("active", "all, one rank: wire", "all, all ranks: wire")  # stand last
_PHASE_COLUMNS = {
    "active": "active",
    "allocated": "allocated",
    "reserved": "reserved",
    "reserved_expandable": "expandable",
    "host": "host",
}
_TIMES = {
    "step": "step",
    "compute": "kernels",
    "communication": "communication, alone",
    "exposed": "communication, exposed",
    "launch": "kernel launches (CPU)",
}


def render_diff(first: Plan, second: Plan, *, width: int = 100, color: bool = False) -> str:
    """Return what the second plan takes compared with the first: verdict, phases, kinds at the peak, communication,
    time.

    A difference is the second's figure less the first's; `-` where one of them was not planned.
    """
    console = open_console(width, color)
    for letter, plan in (("a", first), ("b", second)):
        words = [plan.recipe, plan.config, *plan.overrides, f"({plan.ranks} x {plan.device.name})"]
        put(console, f"{letter}  {' '.join(words)}", HEADING)
    both = (_figures(first), _figures(second))
    for title in both[0]:
        a, b = (figures[title] for figures in both)
        names = sorted(dict.fromkeys([*a, *b]), key=_SUMS.__contains__)
        rows = [[name, *_compare(a.get(name), b.get(name), title)] for name in names]
        table = Table(title, ["", "a", "b", "b - a"], rows, ("",))
        put_section(console, Section(title, table=table if rows else None))
    return text_of(console)


def _compare(a: Any, b: Any, title: str) -> list[Any]:
    """Return both cells and their difference. What is not there takes nothing; of phases and times it is not known."""
    if title in ("live at the peak", _COMMUNICATION):
        a, b = (type(b)(0) if a is None else a), (type(a)(0) if b is None else b)
    if isinstance(a, str) or isinstance(b, str):
        return [a or "not planned", b or "not planned", "none" if a == b else "changed"]
    change = "-" if a is None or b is None else format_change(type(a)(b - a))
    return ["-" if a is None else a, "-" if b is None else b, change]


def _figures(plan: Plan) -> Figures:
    """Return all figures of a plan that are compared."""
    reserved, outside = planned_reserved(plan), plan.outside.total
    sizes = {"reserved": reserved, "outside torch": outside, "together": reserved + outside, "margin": plan.margin}
    tree = alive_tree(plan.heaviest)
    figures: Figures = {
        "verdict": {"verdict": plan.verdict, **{name: Bytes(size) for name, size in sizes.items()}},
        "peaks by phase, heaviest rank": {
            f"{peak.phase}: {name}": Bytes(getattr(peak, field))
            for peak in plan.heaviest.peaks
            for field, name in _PHASE_COLUMNS.items()
        },
        "live at the peak": {node.name: Bytes(node.bytes) for node in [*tree.children, tree]},
        _COMMUNICATION: {},
        "time of a step": {},
    }
    for (dim, size), inside in group_by_dim(plan.communication).items():
        for operation in dict.fromkeys(row.operation for row in inside):
            count, _, wire, _ = sum_traffic(row for row in inside if row.operation == operation)
            name = f"{operation}, {dim}[{size}]"
            figures[_COMMUNICATION] |= {f"{name}: count": Count(count), f"{name}: wire": wire}
    if plan.communication:
        wire = sum_traffic(plan.communication)[2]
        figures[_COMMUNICATION] |= {"all, one rank: wire": wire, "all, all ranks: wire": Bytes(wire * plan.ranks)}
    if time := plan.time:
        figures["time of a step"] = {
            **{name: Seconds(getattr(time, field)) for field, name in _TIMES.items()},
            "tokens a step": Count(time.tokens_per_step),
            "tokens a second": Count(time.tokens_per_second),
            "run": None if time.total is None else Seconds(time.total),
            "rates": "calibrated" if time.calibrated else "not calibrated",
        }
    return figures

"""A plan as one HTML page that needs neither network nor script: timeline, tree, tables. No torch in here."""

from html import escape

from recipe_lib.plan.html_template import PAGE
from recipe_lib.plan.pipeline_picture import draw_pipeline
from recipe_lib.plan.pipeline_tables import stage_table
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.plan.tables import (
    Table,
    Unit,
    advice_table,
    communication_table,
    host_line,
    hundredths,
    layer_table,
    outside_rows,
    phase_table,
    rank_name,
    rank_table,
    run_lines,
    time_lines,
    unit_of,
    verdict_text,
    version_line,
    where_of,
    written,
)
from recipe_lib.plan.timeline import draw_timeline
from recipe_lib.plan.trace import Trace
from recipe_lib.plan.tree import Node, alive_tree, folded, shares
from recipe_lib.plan.verdict import next_step
from recipe_lib.units import format_bytes

# More branches than these below one node are folded into one.
_MOST_BRANCHES = 60


def render_html(plan: Plan, trace: Trace | None = None) -> str:
    """The page. trace: of the heaviest rank, for the memory timeline; without it the page has none."""
    outside = [(name, f"{format_bytes(size)} ({option} X replaces it)") for name, size, option in outside_rows(plan)]
    outside.append(("host memory", host_line(plan)))
    makers = (phase_table, stage_table, rank_table, layer_table, communication_table, advice_table)
    tables = (_table(table) if (table := make(plan)) else "" for make in makers)
    phases, stages, ranks, layers, communication, advice = tables
    parts = [
        _facts("Run", [*run_lines(plan), *([("next", after)] if (after := next_step(plan)) else [])]),
        phases,
        _section("Memory of one rank", draw_timeline(plan, trace)) if trace is not None else "",
        _section("Schedule of the pipeline", draw_pipeline(plan.pipeline)) if plan.pipeline is not None else "",
        stages,
        ranks,
        _tree(plan),
        _facts("Device memory outside torch, and host memory", outside),
        communication,
        _facts("Time of a step", time_lines(plan)),
        layers,
        advice,
        _list("Assumed", plan.assumptions),
        _list("Not modeled", plan.not_modeled),
    ]
    return PAGE.substitute(
        title=escape(f"{plan.config}: {plan.verdict}"),
        name=escape(f"{plan.config} on {plan.ranks} x {plan.device.name}"),
        style={FITS: "good", DOES_NOT_FIT: "bad"}.get(plan.verdict, "risky"),
        headline=escape(verdict_text(plan)),
        body="\n".join(part for part in parts if part),
        versions=escape(version_line(plan)),
    )


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title[:1].upper() + title[1:])}</h2>\n{inside}</section>" if inside else ""


def _facts(title: str, pairs: list[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in pairs)
    return _section(title, f'<table class="facts">{rows}</table>') if pairs else ""


def _list(title: str, sentences: list[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>\n" for sentence in sentences)
    return _section(title, f"<ul>{items}</ul>") if sentences else ""


def _table(table: Table) -> str:
    sides = [' class="text"' if name in table.left else "" for name in table.header]
    head = "".join(f"<th{side}>{escape(name)}</th>" for side, name in zip(sides, table.header, strict=True))
    rows = [f"<tr>{head}</tr>"]
    for row in table.rows:
        cells = []
        for side, cell in zip(sides, row, strict=True):
            level = (len(cell) - len(cell.lstrip())) // 2
            side = f'{side} style="padding-left: {1.25 * level}rem"' if level else side
            cells.append(f"<td{side}>{escape(cell.strip())}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    inside = "\n".join(rows)
    return _section(table.title, f'<div class="wide"><table>{inside}</table></div>{notes}')


def _tree(plan: Plan) -> str:
    rank = plan.heaviest
    root = alive_tree(rank)
    unit = unit_of(root.bytes)
    title = f"Alive at the peak of {rank_name(plan, rank)}: phase {rank.peak.phase}, {where_of(rank.peak)}"
    branches = _branch(root, hundredths(root.bytes, unit), unit, max(root.bytes, 1), level=0)
    return _section(title, f'<div class="tree">{branches}</div>')


def _branch(node: Node, number: int, unit: Unit, whole: int, level: int) -> str:
    """A node and all below it. The figures of branches add up to the node's, as printed; kinds are open."""
    count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
    cells = (
        f"<span>{escape(node.name)}</span>"
        f'<span class="number" title="{node.bytes:,} bytes">{written(number, unit)}</span>'
        f'<span class="soft">{node.bytes / whole:.1%}</span><span class="soft">{count}</span>'
    )
    if not node.children:
        return f'<div class="leaf">{cells}</div>\n'
    children = folded(node.children, smallest=0, most=_MOST_BRANCHES)
    parts = shares(number, [child.bytes for child in children])
    inside = "".join(_branch(child, part, unit, whole, level + 1) for child, part in zip(children, parts, strict=True))
    return f"<details{' open' if level == 0 else ''}><summary>{cells}</summary>\n{inside}</details>\n"

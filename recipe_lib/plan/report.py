"""A plan as plain text for a terminal of 80 columns and more. No torch in here."""

from collections.abc import Callable

from rich.console import Console

from recipe_lib.plan.cluster_tables import alone_table, groups_table, stage_ranks_table, volume_table
from recipe_lib.plan.layer_tables import layer_table
from recipe_lib.plan.nearest_receipt import quote_line
from recipe_lib.plan.pipeline_tables import stage_table
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.plan.tables import (
    advice_table,
    branches,
    communication_table,
    host_line,
    hundredths,
    outside_rows,
    phase_table,
    planned_in,
    rank_name,
    rank_table,
    run_lines,
    unit_of,
    verdict_line,
    verdict_text,
    version_line,
    where_of,
    written,
)
from recipe_lib.plan.time_tables import step_line, time_lines
from recipe_lib.plan.tree import alive_tree, folded, shares
from recipe_lib.plan.verdict import next_step
from recipe_lib.report import terminal
from recipe_lib.report.terminal import Table, heading, put, put_list, put_pairs, put_table

_SMALL_KIND = 0.01  # share of the peak below which the short report sums kinds up
_STYLES = {FITS: terminal.GOOD, DOES_NOT_FIT: terminal.BAD}


def render(
    plan: Plan, *, full: bool = False, depth: int | None = None, width: int | None = None, color: bool = False
) -> str:
    """The report. Short: verdict, what was planned, memory by phase, what is live at the peak; full: communication,
    layers, time, host memory and assumptions as well. Both end with the verdict and what to change next.

    depth: levels of the tree; 1: kinds, 2: layers too, and so on; by default 1, in the full report 2. width: columns,
    by default those of the terminal between 80 and 120. color: styles of a terminal; `wants_color` says whether a
    stream should get them.
    """
    console = terminal.open_console(width or terminal.terminal_width(), color)
    style = _STYLES.get(plan.verdict, terminal.WARNING)
    put(console, verdict_text(plan), style)
    console.print()
    put_pairs(console, [*run_lines(plan), *([] if full else step_line(plan))])
    _tables(console, plan, phase_table, *((stage_table, rank_table) if full else ()))
    _put_tree(console, plan, max(depth or (2 if full else 1), 1), whole=full or depth is not None)
    if full:
        _put_details(console, plan)
    if levers := advice_table(plan):
        _put_advice(console, levers)
    if full:
        _put_sentences(console, ("assumed", plan.assumptions), ("not modeled", plan.not_modeled))
    else:
        _put_sentences(console, ("notes", plan.notes))
    console.print()
    more = "--full shows the other tables, times, and what was assumed"
    put(console, version_line(plan) if full else f"{planned_in(plan)}; {more}", terminal.SOFT)
    if plan.receipt is not None:
        put(console, f"receipt: {quote_line(plan.receipt)}")
    console.print()
    put(console, verdict_line(plan), style)
    put(console, f"next: {next_step(plan)}")
    return terminal.text_of(console)


def _put_details(console: Console, plan: Plan) -> None:
    _put_outside(console, plan)
    heading(console, "host memory")
    put(console, host_line(plan), indent=2)
    _tables(console, plan, alone_table, layer_table, communication_table, volume_table, groups_table, stage_ranks_table)
    if plan.time is not None:
        heading(console, "time of a step")
        put_pairs(console, time_lines(plan))


def _put_sentences(console: Console, *lists: tuple[str, list[str]]) -> None:
    for title, sentences in lists:
        if sentences:
            heading(console, title)
            put_list(console, sentences)


def _tables(console: Console, plan: Plan, *makers: Callable[[Plan], Table | None]) -> None:
    for make in makers:
        if table := make(plan):
            heading(console, table.title)
            put_table(console, table)


def _put_tree(console: Console, plan: Plan, depth: int, *, whole: bool) -> None:
    """whole: with kinds that are small, which are one line otherwise."""
    rank = plan.heaviest
    root = alive_tree(rank)
    if not whole:
        root.children = folded(root.children, smallest=root.bytes * _SMALL_KIND, most=len(root.children))
    unit = unit_of(root.bytes)
    total = hundredths(root.bytes, unit)
    heading(console, f"live at the peak of {rank_name(plan, rank)}: phase {rank.peak.phase}, {where_of(rank.peak)}")
    below = branches(root, total, unit, depth)
    rows = []
    for indent, node, number in [("", root, total), *below]:
        share = f"{node.bytes / root.bytes:.1%}" if root.bytes else ""
        count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
        rows.append([f"{indent}{node.name}", written(number, unit), share, count])
    put_table(
        console, Table("", ["name", "bytes", "share", "tensors"], rows, ("name", "tensors"), ("tensors",), headed=False)
    )
    if whole and len(branches(root, total, unit, depth + 1)) > len(below):
        put(console, f"--depth {depth + 1} opens the next level", terminal.SOFT, indent=2)


def _put_outside(console: Console, plan: Plan) -> None:
    rows = outside_rows(plan)
    unit = unit_of(plan.outside.total)
    total = hundredths(plan.outside.total, unit)
    numbers = [total, *shares(total, [num_bytes for _, num_bytes, _ in rows])]
    named = [("outside torch", ""), *((f"  {name}", f"{option} X replaces it") for name, _, option in rows)]
    heading(console, "outside PyTorch's allocator")
    lines = [[name, written(number, unit), note] for (name, note), number in zip(named, numbers, strict=True)]
    put_table(console, Table("", ["name", "bytes", "option"], lines, ("name", "option"), ("option",), headed=False))


def _put_advice(console: Console, table: Table) -> None:
    """A lever a line, its note below it."""
    bare = Table(table.title, table.header[:-1], [row[:-1] for row in table.rows], table.left, table.optional)
    header, *levers = terminal.table_lines(bare, console.width)
    heading(console, table.title)
    put(console, header, terminal.SOFT)
    for line, row in zip(levers, table.rows, strict=True):
        put(console, line)
        if "…" in line:  # to be copied whole
            put(console, row[0], indent=6, wrap=False)
        put(console, row[-1], indent=6)

"""A plan as sections, for a terminal of 80 columns and more and for one HTML page. No torch in here."""

import math

from recipe_lib.plan.cluster_tables import (
    alone_table,
    communication_table,
    groups_table,
    stage_ranks_table,
    volume_table,
)
from recipe_lib.plan.drawings import draw_pipeline, draw_timeline
from recipe_lib.plan.nearest_receipt import quote_line
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.plan.tables import advice_table, layer_table, outside_table, phase_table, rank_table, stage_table
from recipe_lib.plan.trace import Trace
from recipe_lib.plan.tree import alive_tree, draw_tree, folded
from recipe_lib.plan.verdict import (
    host_text,
    next_step,
    planning_text,
    rank_text,
    run_facts,
    running_text,
    step_facts,
    time_facts,
    verdict_line,
    verdict_text,
    version_text,
)
from recipe_lib.report import terminal
from recipe_lib.report.page import render_page
from recipe_lib.report.terminal import put
from recipe_lib.report.view import Section, show_table

# A branch of the tree has a line on a terminal if it is this share of the one above it, and at most so many have.
_SMALLEST_SHARE, _MOST_BRANCHES = 0.01, 12
_MOST_ON_PAGE = 60


def render(
    plan: Plan, *, full: bool = False, depth: int | None = None, width: int | None = None, color: bool = False
) -> str:
    """Return the report. Short: verdict, what was planned, memory by phase, what is live at the peak; full:
    communication, layers, time, host memory and assumptions as well. Both end with the verdict and what to change next.

    depth: levels of the tree; 1: kinds, 2: layers too, and so on; by default 1, in the full report 2. width: columns,
    by default those of the terminal between 80 and 120. color: styles of a terminal; `wants_color` says whether a
    stream should get them.
    """
    console = terminal.open_console(width or terminal.terminal_width(), color)
    style = {FITS: terminal.GOOD, DOES_NOT_FIT: terminal.BAD}.get(plan.verdict, terminal.WARNING)
    put(console, verdict_text(plan), style)
    console.print()
    terminal.put_pairs(console, [*run_facts(plan), *([] if full else step_facts(plan))])
    sections = _describe_all(plan, _tree(plan, max(depth or 2, 1))) if full else _describe_briefly(plan, depth)
    for section in sections:
        terminal.put_section(console, section)
    console.print()
    more = "--full shows the other tables, times, and what was assumed"
    put(console, version_text(plan) if full else f"{planning_text(plan)}; {more}", terminal.SOFT)
    if plan.receipt is not None:
        put(console, f"receipt: {quote_line(plan.receipt)}")
    console.print()
    put(console, verdict_line(plan), style)
    put(console, f"next: {next_step(plan)}")
    return terminal.text_of(console)


def render_html(plan: Plan, trace: Trace | None = None) -> str:
    """Return the page. trace: of the heaviest rank, for the memory timeline; without it the page has none."""
    receipt = [] if plan.receipt is None else [("receipt", quote_line(plan.receipt))]
    lines = draw_tree(alive_tree(plan.heaviest), depth=math.inf, smallest=0, most=_MOST_ON_PAGE)
    tree = Section(_tree_title(plan), tree=lines)
    return render_page(
        "plan",
        f"{plan.config}: {plan.verdict}",
        f"{plan.config} on {plan.ranks} x {plan.device.name}",
        verdict_text(plan),
        [
            Section("run", facts=[*run_facts(plan), *receipt, ("next", next_step(plan))]),
            *_describe_all(plan, tree, trace),
        ],
        style={FITS: "good", DOES_NOT_FIT: "bad"}.get(plan.verdict, "risky"),
        footer=version_text(plan),
    )


def _describe_briefly(plan: Plan, depth: int | None) -> list[Section]:
    return [
        show_table(phase_table(plan)),
        _tree(plan, depth, sums_up=depth is None),
        show_table(advice_table(plan)),
        Section("notes", items=plan.notes),
    ]


def _describe_all(plan: Plan, tree: Section, trace: Trace | None = None) -> list[Section]:
    timeline = draw_timeline(plan, trace) if trace is not None else None
    schedule = draw_pipeline(plan.pipeline) if plan.pipeline is not None else None
    return [
        show_table(phase_table(plan)),
        Section("memory of one rank", figures=[timeline] if timeline else []),
        Section("schedule of the pipeline", figures=[schedule] if schedule else []),
        show_table(stage_table(plan)),
        show_table(rank_table(plan)),
        tree,
        show_table(outside_table(plan)),
        Section("host memory", text=host_text(plan)),
        show_table(alone_table(plan)),
        show_table(layer_table(plan)),
        show_table(communication_table(plan)),
        show_table(volume_table(plan)),
        show_table(groups_table(plan)),
        show_table(stage_ranks_table(plan)),
        Section("time of a step", facts=time_facts(plan)),
        show_table(advice_table(plan)),
        Section("assumed", items=plan.assumptions),
        Section("not modeled", items=plan.not_modeled),
    ]


def _tree_title(plan: Plan) -> str:
    peak = plan.heaviest.peak
    return f"live at the peak of {rank_text(plan, plan.heaviest)}: phase {peak.phase}, {running_text(peak)}"


def _tree(plan: Plan, depth: int | None, *, sums_up: bool = False) -> Section:
    """Return the tree for a terminal. sums_up: kinds that are small are one line, and deeper levels are not named."""
    root, depth = alive_tree(plan.heaviest), max(depth or 1, 1)
    if sums_up:
        root.children = folded(root.children, smallest=root.bytes * _SMALLEST_SHARE, most=len(root.children))
    lines = draw_tree(root, depth=depth, smallest=_SMALLEST_SHARE, most=_MOST_BRANCHES)
    is_cut = not sums_up and any(line.opens and line.level == depth for line in lines)
    return Section(_tree_title(plan), tree=lines, text=f"--depth {depth + 1} opens the next level" if is_cut else "")

"""A plan as one HTML page that needs neither network nor script: timeline, tree, tables. No torch in here."""

from recipe_lib.plan.cluster_tables import alone_table, groups_table, stage_ranks_table, volume_table
from recipe_lib.plan.drawings import draw_pipeline, draw_timeline
from recipe_lib.plan.layer_tables import layer_table
from recipe_lib.plan.nearest_receipt import quote_line
from recipe_lib.plan.pipeline_tables import stage_table
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.plan.tables import (
    Unit,
    advice_table,
    communication_table,
    host_line,
    hundredths,
    outside_rows,
    phase_table,
    rank_name,
    rank_table,
    run_lines,
    unit_of,
    verdict_text,
    version_line,
    where_of,
    written,
)
from recipe_lib.plan.time_tables import time_lines
from recipe_lib.plan.trace import Trace
from recipe_lib.plan.tree import Node, alive_tree, folded, shares
from recipe_lib.plan.verdict import next_step
from recipe_lib.report.page import Branch, Section, render_page
from recipe_lib.units import format_bytes

# More branches than these below one node are folded into one.
_MOST_BRANCHES = 60


def render_html(plan: Plan, trace: Trace | None = None) -> str:
    """The page. trace: of the heaviest rank, for the memory timeline; without it the page has none."""
    outside = [(name, f"{format_bytes(size)} ({option} X replaces it)") for name, size, option in outside_rows(plan)]
    outside.append(("host memory", host_line(plan)))
    makers = (phase_table, stage_table, rank_table, layer_table, communication_table, advice_table)
    phases, stages, ranks, layers, communication, advice = (
        Section(table.title, table=table) if (table := make(plan)) else Section("") for make in makers
    )
    volumes, groups, owners, alone = (
        Section(table.title, table=table) if (table := make(plan)) else Section("")
        for make in (volume_table, groups_table, stage_ranks_table, alone_table)
    )
    timeline = draw_timeline(plan, trace) if trace is not None else None
    schedule = draw_pipeline(plan.pipeline) if plan.pipeline is not None else None
    sections = [
        Section("Run", facts=_run_facts(plan)),
        phases,
        Section("Memory of one rank", figures=[timeline] if timeline else []),
        Section("Schedule of the pipeline", figures=[schedule] if schedule else []),
        stages,
        ranks,
        _tree(plan),
        Section("Device memory outside PyTorch's allocator, and host memory", facts=outside),
        communication,
        volumes,
        groups,
        owners,
        Section("Time of a step", facts=time_lines(plan)),
        alone,
        layers,
        advice,
        Section("Assumptions", items=plan.assumptions),
        Section("Not modeled", items=plan.not_modeled),
    ]
    return render_page(
        "plan",
        f"{plan.config}: {plan.verdict}",
        f"{plan.config} on {plan.ranks} x {plan.device.name}",
        verdict_text(plan),
        sections,
        style={FITS: "good", DOES_NOT_FIT: "bad"}.get(plan.verdict, "risky"),
        footer=version_line(plan),
    )


def _run_facts(plan: Plan) -> list[tuple[str, str]]:
    receipt = quote_line(plan.receipt) if plan.receipt is not None else ""
    ends = [("receipt", receipt), ("next", next_step(plan))]
    return [*run_lines(plan), *((name, text) for name, text in ends if text)]


def _tree(plan: Plan) -> Section:
    rank = plan.heaviest
    root = alive_tree(rank)
    unit = unit_of(root.bytes)
    title = f"Live at the peak of {rank_name(plan, rank)}: phase {rank.peak.phase}, {where_of(rank.peak)}"
    return Section(title, tree=_branch(root, hundredths(root.bytes, unit), unit, max(root.bytes, 1)))


def _branch(node: Node, number: int, unit: Unit, whole: int) -> Branch:
    """A node and all below it. The figures of branches add up to the node's, as printed."""
    count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
    children = folded(node.children, smallest=0, most=_MOST_BRANCHES)
    parts = shares(number, [child.bytes for child in children])
    below = [_branch(child, part, unit, whole) for child, part in zip(children, parts, strict=True)]
    exact, share = f"{node.bytes:,} bytes", f"{node.bytes / whole:.1%}"
    return Branch(node.name, written(number, unit), exact, share, count, below)

"""Format a plan of memory and time as a report for people.

`tune plan` prints `render(plan)` on a terminal and writes `render_html(plan, trace)` as a page;
`tune diff` prints `render_diff(first, second)`. The heaviest rank is the one that reserves the most
memory; a place is a coordinate in a pipeline; a receipt tells how an earlier run like this one met
its plan. Imports no torch, so that a saved plan is shown fast.
"""

import math
from dataclasses import dataclass
from typing import Any

from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, ActionSpan, PipelinePlan, Plan
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, STORAGE_KINDS, Trace
from recipe_lib.plan.views.memory_tree import build_alive_tree, draw_tree, fold_small
from recipe_lib.plan.views.tables import (
    build_advice_table,
    build_alone_table,
    build_communication_table,
    build_groups_table,
    build_layer_table,
    build_outside_table,
    build_phase_table,
    build_rank_table,
    build_stage_ranks_table,
    build_stage_table,
    build_volume_table,
    format_layers,
    group_by_dim,
    sum_traffic,
)
from recipe_lib.plan.views.verdict_text import (
    compute_planned_reserved,
    describe_next_step,
    format_host,
    format_planning_time,
    format_rank,
    format_running,
    format_verdict,
    format_verdict_line,
    format_versions,
    list_run_facts,
    list_step_facts,
    list_time_facts,
)
from recipe_lib.report.chart import (
    Chart,
    Scale,
    compute_ticks,
    format_short,
    render_svg,
)
from recipe_lib.report.page import render_page
from recipe_lib.report.terminal import (
    BAD,
    GOOD,
    HEADING,
    SOFT,
    WARNING,
    get_terminal_width,
    open_console,
    put,
    put_pairs,
    put_section,
    read_console,
)
from recipe_lib.report.view import Figure, Section, Table, show_table
from recipe_lib.units import (
    Bytes,
    Count,
    Seconds,
    Unit,
    choose_unit,
    count_hundredths,
    format_change,
    format_duration,
    format_hundredths,
)

# Branches of the tree of live memory that have a line of their own; the others share one.
_SMALLEST_SHARE = 0.01  # least share of the branch above, on a terminal; a page shows all sizes
_MOST_BRANCHES = 12  # most branches below one, on a terminal
_MOST_ON_PAGE = 60  # most branches below one, on a page


def render(
    plan: Plan,
    *,
    full: bool = False,
    depth: int | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """Return the report for a terminal.

    The short one has the verdict, what was planned, memory by phase and what is live at the peak;
    the full one communication, layers, time, host memory and assumptions as well. Both end with
    the verdict and what to change next.

    Args:
        plan: to report.
        full: the full report.
        depth: levels of the tree: 1 kinds of memory, 2 layers too, and so on; None: 1, in the full
            report 2.
        width: columns; None: those of the terminal, between 80 and 120.
        color: add a terminal's escape sequences for colors.
    """
    console = open_console(width or get_terminal_width(), color)
    style = {FITS: GOOD, DOES_NOT_FIT: BAD}.get(plan.verdict, WARNING)
    put(console, format_verdict(plan), style)
    console.print()
    facts = list_run_facts(plan)
    if full:
        sections = _describe_all(plan, _build_tree(plan, max(depth or 2, 1)))
        footer = format_versions(plan)
    else:
        facts = facts + list_step_facts(plan)
        sections = [
            show_table(build_phase_table(plan)),
            _build_tree(plan, depth, sums_up=depth is None),
            show_table(build_advice_table(plan)),
            Section("notes", items=plan.notes),
        ]
        hint = "--full shows the other tables, times, and what was assumed"
        footer = f"{format_planning_time(plan)}; {hint}"
    put_pairs(console, facts)
    for section in sections:
        put_section(console, section)
    console.print()
    put(console, footer, SOFT)
    if plan.receipt:
        put(console, f"receipt: {plan.receipt}")
    console.print()
    put(console, format_verdict_line(plan), style)
    put(console, f"next: {describe_next_step(plan)}")
    return read_console(console)


def render_html(plan: Plan, trace: Trace | None = None) -> str:
    """Return the report as a page of HTML.

    trace: of the heaviest rank, from which the timeline of memory is drawn; None: no timeline.
    """
    receipt = [("receipt", plan.receipt)] if plan.receipt else []
    lines = draw_tree(
        build_alive_tree(plan.heaviest), depth=math.inf, smallest=0, most=_MOST_ON_PAGE
    )
    return render_page(
        "plan",
        f"{plan.config}: {plan.verdict}",
        name=f"{plan.config} on {plan.ranks} x {plan.device.name}",
        headline=format_verdict(plan),
        sections=[
            Section(
                "run", facts=[*list_run_facts(plan), *receipt, ("next", describe_next_step(plan))]
            ),
            *_describe_all(plan, Section(_format_tree_title(plan), tree=lines), trace),
        ],
        style={FITS: "good", DOES_NOT_FIT: "bad"}.get(plan.verdict, "risky"),
        footer=format_versions(plan),
    )


def _describe_all(plan: Plan, tree: Section, trace: Trace | None = None) -> list[Section]:
    """Return all sections of a full report in their order, with what live memory is from `tree`.

    trace: as for `render_html`. Empty sections are left out by `put_section` and `render_page`.
    """
    timeline = draw_timeline(plan, trace) if trace is not None else None
    schedule = draw_pipeline(plan.pipeline) if plan.pipeline is not None else None
    return [
        show_table(build_phase_table(plan)),
        Section("memory of one rank", figures=[timeline] if timeline else []),
        Section("schedule of the pipeline", figures=[schedule] if schedule else []),
        show_table(build_stage_table(plan)),
        show_table(build_rank_table(plan)),
        tree,
        show_table(build_outside_table(plan)),
        Section("host memory", text=format_host(plan)),
        show_table(build_alone_table(plan)),
        show_table(build_layer_table(plan)),
        show_table(build_communication_table(plan)),
        show_table(build_volume_table(plan)),
        show_table(build_groups_table(plan)),
        show_table(build_stage_ranks_table(plan)),
        Section("time of a step", facts=list_time_facts(plan)),
        show_table(build_advice_table(plan)),
        Section("assumed", items=plan.assumptions),
        Section("not modeled", items=plan.not_modeled),
    ]


def _format_tree_title(plan: Plan) -> str:
    peak = plan.heaviest.peak
    return (
        f"live at the peak of {format_rank(plan, plan.heaviest)}: phase {peak.phase},"
        f" {format_running(peak)}"
    )


def _build_tree(plan: Plan, depth: int | None, *, sums_up: bool = False) -> Section:
    """Return the tree of what is live at the peak, for a terminal.

    depth: levels of the tree; None: 1. sums_up: for the short report: small kinds are summed up in
    one line, and the option that shows more levels is not mentioned.
    """
    root = build_alive_tree(plan.heaviest)
    depth = max(depth or 1, 1)
    if sums_up:
        root.children = fold_small(
            root.children, smallest=root.bytes * _SMALLEST_SHARE, most=len(root.children)
        )
    lines = draw_tree(root, depth=depth, smallest=_SMALLEST_SHARE, most=_MOST_BRANCHES)
    is_cut = not sums_up and any(line.opens and line.level == depth for line in lines)
    return Section(
        _format_tree_title(plan),
        tree=lines,
        text=f"--depth {depth + 1} opens the next level" if is_cut else "",
    )


# Pictures of a plan: memory over a trace, stacked by kind, and a pipeline's step.


MOST_POINTS = 2000  # points of a timeline: twice as many as it is pixels wide
# Sizes of pictures in pixels.
_WIDTH = 1000
_HEIGHT = 376  # of the timeline
# Margins around the axes of the timeline.
_LEFT = 64
_RIGHT = 12
_TOP = 60
_BOTTOM = 40
_LETTER = 7.0  # mean width of a letter, by which names of phases are kept apart
# The line of usable memory is drawn if it is at most so many times as high as the highest point.
# Farther up it would flatten the curve: then the note below the picture says it.
_LIMIT_ABOVE = 3.0


@dataclass
class Point:
    """The memory that is live on the device after one allocation or release."""

    at: int  # number of allocations and releases so far, this one included
    total: int  # bytes of all kinds
    kinds: tuple[int, ...]  # bytes of each of STORAGE_KINDS


def sample_points(trace: Trace, most: int = MOST_POINTS) -> tuple[list[Point], dict[str, int]]:
    """Return (at most `most` points of a trace, phase -> `Point.at` before its first event).

    Where there are more events, neighboring ones of a phase make a group, of which the points with
    the most and with the least memory are kept. A phase that comes again has its first beginning.
    """
    num_events = sum(
        event in (ALLOC, FREE) and trace.storages[index].device for event, index in trace.events
    )
    num_phases = max(1, sum(event == PHASE for event, _ in trace.events))
    # A group gives two points. Each phase may end with one more group, which is not full.
    group_size = (
        1 if num_events <= most else math.ceil(num_events / max(1, most // 2 - num_phases - 1))
    )
    kind_indexes = {kind: index for index, kind in enumerate(STORAGE_KINDS)}
    live_bytes = [0] * len(STORAGE_KINDS)
    num_events_so_far = 0
    phase_starts: dict[str, int] = {}
    points: list[Point] = []
    group: list[Point] = []
    for event, index in [*trace.events, (PHASE, -1)]:  # the last one ends the last phase's group
        # A group ends with its phase, so that no phase loses its peak to a neighbor's.
        if group and (event == PHASE or len(group) == group_size):
            lowest = min(group, key=lambda point: point.total)
            highest = max(group, key=lambda point: point.total)
            points += [point for point in group if point is lowest or point is highest]
            group = []
        if event == PHASE and index >= 0:
            phase_starts.setdefault(trace.phases[index], num_events_so_far)
        elif event in (ALLOC, FREE) and trace.storages[index].device:
            storage = trace.storages[index]
            kind = kind_indexes.get(storage.kind, len(STORAGE_KINDS) - 1)  # else `temporary`
            live_bytes[kind] += storage.bytes if event == ALLOC else -storage.bytes
            num_events_so_far += 1
            group.append(Point(num_events_so_far, sum(live_bytes), tuple(live_bytes)))
    return points, phase_starts


def draw_timeline(plan: Plan, trace: Trace) -> Figure | None:
    """Return the chart of live memory over a trace; None if it takes no memory on the device.

    trace: of the heaviest rank of the plan.
    """
    points, phase_starts = sample_points(trace)
    highest = max(points, key=lambda point: point.total, default=None)
    if highest is None or not highest.total:
        return None
    usable = max(0, plan.device.usable)
    is_limit_drawn = usable <= _LIMIT_ABOVE * highest.total
    unit = choose_unit(highest.total)
    # With a little room above the highest line.
    axis_top = max(highest.total, usable if is_limit_drawn else 0) * 1.04 / unit[0]
    num_events = points[-1].at
    event_ticks = [
        (at, format_short(at)) for at in compute_ticks(0, num_events, 8) if at == int(at)
    ]
    chart = Chart(
        width=_WIDTH,
        height=_HEIGHT,
        label="memory live on the device",
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        x=Scale("allocations and releases, in their order", 0, high=num_events, ticks=event_ticks),
        y=Scale(
            f"live on the device ({unit[1]})",
            0,
            high=axis_top,
            ticks=[(value, f"{value:g}") for value in compute_ticks(0, axis_top, 5)],
        ),
    )
    _draw_areas(chart, points, unit)
    _draw_phase_marks(chart, [(phase, chart.compute_x(at)) for phase, at in phase_starts.items()])
    usable_text = format_hundredths(count_hundredths(usable, unit), unit)
    if is_limit_drawn:
        y = chart.compute_y(usable / unit[0])
        chart.put(
            "line",
            "limit",
            title=f"usable: {usable_text}",
            x1=_LEFT,
            x2=_WIDTH - _RIGHT,
            y1=y,
            y2=y,
        )
        chart.put("text", "limit-name", f"usable {usable_text}", x=_LEFT + 24, y=y + 14)
        limit = f"Dashed across: the {usable_text} that the allocator may use."
    else:
        limit = (
            f"The allocator may use {usable_text}, {usable / highest.total:,.0f} times the highest"
            " point: above this axis."
        )
    highest_text = f"highest: {format_hundredths(count_hundredths(highest.total, unit), unit)}"
    chart.put(
        "circle",
        "peak",
        title=highest_text,
        cx=chart.compute_x(highest.at),
        cy=chart.compute_y(highest.total / unit[0]),
        r=3.5,
    )
    peak = plan.heaviest.peak
    # The plan's peak is the one of active bytes, in the allocator's blocks. It may be another
    # moment than that of the most requested bytes, which this curve shows.
    if highest.total == peak.requested:
        highest_text += f", {format_running(peak)}"
    note = (
        f"{highest_text}. Requested bytes of tensors, on one rank; from left to right every"
        f" allocation and release, in their order. {limit}"
    )
    sizes = [format_hundredths(count_hundredths(size, unit), unit) for size in highest.kinds]
    # (class of a color in the page's style sheet, text beside it)
    keys = [
        (f"k{index}", f"{STORAGE_KINDS[index]} {sizes[index]}")
        for index, num_bytes in enumerate(highest.kinds)
        if num_bytes
    ]
    return Figure(render_svg(chart), keys, note, wide=True)


def _draw_areas(chart: Chart, points: list[Point], unit: Unit) -> None:
    """Draw the areas of all kinds of memory, stacked. unit: (bytes of one unit, its name)."""
    base = f"{chart.compute_y(0):.1f}"
    # Area `index` reaches from 0 to the sum of the kinds up to it. The highest is drawn first, and
    # each lower one over it: of every area the part of its own kind stays in view.
    for index in reversed(range(len(STORAGE_KINDS))):
        if any(point.kinds[index] for point in points):
            corners = [
                (
                    chart.compute_x(point.at),
                    chart.compute_y(sum(point.kinds[: index + 1]) / unit[0]),
                )
                for point in points
            ]
            steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners)
            chart.put(
                "path",
                f"k{index}",
                title=STORAGE_KINDS[index],
                d=f"M{chart.compute_x(0):.1f},{base}{steps}V{base}Z",
            )


def _draw_phase_marks(chart: Chart, begins: list[tuple[str, float]]) -> None:
    """Draw a line where each phase begins, its name above in the first of three rows with room.

    begins: (phase, x in pixels). A name that has room in no row is left out.
    """
    row_ends = [0.0, 0.0, 0.0]  # x at which the last name of each row ends
    for phase, x in begins:
        chart.put("line", "phase", title=phase, x1=x, x2=x, y1=_TOP - 10, y2=_HEIGHT - _BOTTOM)
        width = _LETTER * len(phase)
        # A phase that begins near the right edge has its name left of it.
        name_x = min(x, _WIDTH - width)
        row = next((row for row, end in enumerate(row_ends) if end <= name_x), None)
        if row is not None:
            chart.put("text", text=phase, x=name_x, y=14 + 16 * row)  # rows of 16 pixels
            row_ends[row] = name_x + width + 8


# Letter of a pipeline's action (`ActionSpan.kind`) -> (its name, class of its boxes' color in the
# page's style sheet).
_ACTIONS = {
    "F": ("forward", "k0"),
    "B": ("backward", "k5"),
    "I": ("backward: gradient of the input", "k3"),
    "W": ("backward: gradients of the weights", "k2"),
}
# Of the picture of a pipeline, in pixels.
_NAMES_WIDTH = 150  # room for names at the left of the boxes
_ABOVE_ROWS = 8
_ROW_HEIGHT = 30
_ROW_GAP = 8
_DIGIT_WIDTH = 6.0  # a box that is narrower than the digits of its number has none


def draw_pipeline(plan: PipelinePlan) -> Figure | None:
    """Return a picture of a step: a row for each place in the pipeline, a box for each action.

    Return None if no times were planned.
    """
    if not plan.spans or not plan.seconds:
        return None
    times = [
        (value, format_duration(value) if value else "0")
        for value in compute_ticks(0, plan.seconds, 6)
    ]
    chart = Chart(
        width=_WIDTH,
        height=_ABOVE_ROWS + len(plan.places) * (_ROW_HEIGHT + _ROW_GAP) + _BOTTOM,
        label="what each rank computes over a step",
        left=_NAMES_WIDTH,
        right=_RIGHT,
        top=_ABOVE_ROWS,
        bottom=_BOTTOM,
        x=Scale("planned time of the step", 0, high=plan.seconds, ticks=times),
    )
    # Place -> y of the top of its row, pixels.
    row_tops = {
        place.place: _ABOVE_ROWS + row * (_ROW_HEIGHT + _ROW_GAP)
        for row, place in enumerate(plan.places)
    }
    stage_indexes: dict[int, int] = {}  # stage -> its index among those of its rank
    for place in plan.places:
        y = row_tops[place.place]
        chart.put("text", text=f"rank {place.rank}, idle {place.idle:.1%}", x=0, y=y + 13)
        chart.put("text", text=f"layers {format_layers(place)}", x=0, y=y + 27)
        chart.put(
            "rect",
            "idle",
            x=_NAMES_WIDTH,
            y=y,
            width=_WIDTH - _NAMES_WIDTH - _RIGHT,
            height=_ROW_HEIGHT,
        )
        stage_indexes |= {stage: index for index, stage in enumerate(place.stages)}
    for span in plan.spans:
        _draw_box(chart, span, y=row_tops[span.place], stage_index=stage_indexes.get(span.stage, 0))
    kinds = {span.kind for span in plan.spans}
    keys = [(style, name) for kind, (name, style) in _ACTIONS.items() if kind in kinds]
    note = (
        f"{plan.schedule}, {plan.micro_batches} micro-batches, planned times. Numbers:"
        " micro-batches."
    )
    if plan.stages_per_rank > 1:
        note += " A rank's later stages have lower boxes."
    note += " The optimizer and what else a step does outside the pipeline are not here."
    return Figure(render_svg(chart), [*keys, ("idle", "waiting")], note, wide=True)


def _draw_box(chart: Chart, span: ActionSpan, y: int, stage_index: int) -> None:
    """Draw the box of an action, with the number of its micro-batch.

    y: top of the rank's row, pixels. stage_index: index of the stage among those of its rank.
    """
    name, style = _ACTIONS.get(span.kind, (span.kind, "k9"))
    x = chart.compute_x(span.start)
    width = chart.compute_x(span.end) - x
    # Boxes of a rank's later stages begin lower, by 4 pixels each, to tell them apart; from the
    # fourth stage on they are alike.
    top = y + 4 * min(stage_index, 3)
    title = (
        f"micro-batch {span.micro_batch}, stage {span.stage}, {name},"
        f" {format_duration(span.end - span.start)}"
    )
    chart.put(
        "rect",
        f"box {style}",
        title=title,
        x=x,
        y=top,
        width=max(width, 0.1),  # a box without width would not be seen
        height=_ROW_HEIGHT - (top - y),
    )
    text = str(span.micro_batch)
    if width >= _DIGIT_WIDTH * len(text) + 1:
        chart.put("text", "mark", text, x=x + width / 2, y=y + 23)


# Two plans side by side, each difference with its sign.

# Title of a section -> name of a figure -> the figure as a cell (`Bytes`, `Seconds`, `Count` or
# text); None where it was not planned.
ComparedFigures = dict[str, dict[str, Any]]
_COMMUNICATION = "communication of a step, one rank"
# Names of sums, which stand last in their sections.
_SUMS = ("active", "all, one rank: wire", "all, all ranks: wire")
# Field of `PhasePeak` -> its name in the table.
_PHASE_COLUMNS = {
    "active": "active",
    "allocated": "allocated",
    "reserved": "reserved",
    "reserved_expandable": "expandable",
    "host": "host",
}
# Field of `TimePlan` -> its name in the table.
_TIMES = {
    "step": "step",
    "compute": "kernels",
    "communication": "communication, alone",
    "exposed": "communication, exposed",
    "launch": "kernel launches (CPU)",
}


def render_diff(first: Plan, second: Plan, *, width: int = 100, color: bool = False) -> str:
    """Return tables of two plans, a and b: verdict, phases, kinds at the peak, communication, time.

    A difference is b's figure less a's; `-` where one of them was not planned.
    """
    console = open_console(width, color)
    for letter, plan in (("a", first), ("b", second)):
        words = [plan.recipe, plan.config, *plan.overrides, f"({plan.ranks} x {plan.device.name})"]
        put(console, f"{letter}  {' '.join(words)}", HEADING)
    second_figures = _collect_figures(second)
    for title, a in _collect_figures(first).items():
        b = second_figures[title]
        # Sums last: False sorts before True, and equal ones stay in order.
        names = sorted(dict.fromkeys([*a, *b]), key=_SUMS.__contains__)
        rows = [[name, *_compare(a.get(name), b.get(name), title)] for name in names]
        table = Table(title=title, header=["", "a", "b", "b - a"], rows=rows, left=("",))
        put_section(console, Section(title, table=table if rows else None))
    return read_console(console)


def _compare(a: Any, b: Any, title: str) -> list[Any]:
    """Return the cells of both figures and of their difference.

    a, b: None where not planned. title: of their section.
    """
    # A kind or an operation that one plan lacks takes nothing there; a phase or a time that it
    # lacks is not known.
    if title in ("live at the peak", _COMMUNICATION):
        a = type(b)(0) if a is None else a
        b = type(a)(0) if b is None else b
    if isinstance(a, str) or isinstance(b, str):
        return [a or "not planned", b or "not planned", "none" if a == b else "changed"]
    change = "-" if a is None or b is None else format_change(type(a)(b - a))
    return ["-" if a is None else a, "-" if b is None else b, change]


def _collect_figures(plan: Plan) -> ComparedFigures:
    reserved = compute_planned_reserved(plan)
    outside = plan.outside.total
    tree = build_alive_tree(plan.heaviest)
    peaks = {
        f"{peak.phase}: {name}": Bytes(getattr(peak, field))
        for peak in plan.heaviest.peaks
        for field, name in _PHASE_COLUMNS.items()
    }
    figures: ComparedFigures = {
        "verdict": {
            "verdict": plan.verdict,
            "reserved": Bytes(reserved),
            "outside torch": Bytes(outside),
            "together": Bytes(reserved + outside),
            "margin": Bytes(plan.margin),
        },
        "peaks by phase, heaviest rank": peaks,
        "live at the peak": {node.name: Bytes(node.bytes) for node in [*tree.children, tree]},
        _COMMUNICATION: {},
        "time of a step": {},
    }
    for (dim, size), rows in group_by_dim(plan.communication).items():
        for operation in dict.fromkeys(row.operation for row in rows):
            traffic = sum_traffic([row for row in rows if row.operation == operation])
            name = f"{operation}, {dim}[{size}]"
            figures[_COMMUNICATION][f"{name}: count"] = Count(traffic.count)
            figures[_COMMUNICATION][f"{name}: wire"] = traffic.wire_bytes
    if plan.communication:
        wire = sum_traffic(plan.communication).wire_bytes
        figures[_COMMUNICATION] |= {
            "all, one rank: wire": wire,
            "all, all ranks: wire": Bytes(wire * plan.ranks),
        }
    if time := plan.time:
        figures["time of a step"] = {
            **{name: Seconds(getattr(time, field)) for field, name in _TIMES.items()},
            "tokens a step": Count(time.tokens_per_step),
            "tokens a second": Count(time.tokens_per_second),
            "run": None if time.total is None else Seconds(time.total),
            "rates": "calibrated" if time.calibrated else "not calibrated",
        }
    return figures

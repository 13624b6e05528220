"""Pictures of a plan: memory over a trace, stacked by kind, and a pipeline's step. No torch in here."""

import math
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from recipe_lib.plan.result import ActionSpan, PipelinePlan, Plan
from recipe_lib.plan.tables import Unit, duration, hundredths, layers_text, unit_of, where_of, written
from recipe_lib.plan.trace import ALLOC, FREE, PHASE, STORAGE_KINDS, Trace
from recipe_lib.report.page import Figure
from recipe_lib.report.svg import as_text, drawing, put, ticks

MOST_POINTS = 2000
_WIDTH, _RIGHT = 1000, 12
_HEIGHT, _LEFT, _TOP, _BOTTOM = 340, 80, 44, 12  # of the timeline


@dataclass
class Point:
    """at: allocations and frees before it. total: bytes live on the device. kinds: of them, as in STORAGE_KINDS."""

    at: int
    total: int
    kinds: tuple[int, ...]


def points(trace: Trace, most: int = MOST_POINTS) -> tuple[list[Point], dict[str, int]]:
    """At most `most` points of the trace, and at which event each phase begins.

    Where there are more events, neighboring ones of a phase make a group that keeps its highest and its lowest
    point, so that no phase loses its peak. A phase that comes again counts on.
    """
    events = sum(1 for kind, number in trace.events if kind in (ALLOC, FREE) and trace.storages[number].device)
    phases = max(1, sum(1 for kind, _ in trace.events if kind == PHASE))
    size = 1 if events <= most else math.ceil(events / max(1, most // 2 - phases - 1))
    place = {kind: at for at, kind in enumerate(STORAGE_KINDS)}
    alive, total, at = [0] * len(STORAGE_KINDS), 0, 0
    begins: dict[str, int] = {}
    found: list[Point] = []
    group: list[Point] = []  # the lowest and the highest so far
    inside = 0
    for kind, number in trace.events:
        if kind == PHASE:
            found, group, inside = [*found, *_ordered(group)], [], 0
            begins.setdefault(trace.phases[number], at)
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            change = storage.bytes if kind == ALLOC else -storage.bytes
            alive[place.get(storage.kind, len(STORAGE_KINDS) - 1)] += change
            total, at, inside = total + change, at + 1, inside + 1
            if not group:
                group = [Point(at, total, tuple(alive))] * 2
            elif total < group[0].total:
                group[0] = Point(at, total, tuple(alive))
            elif total > group[1].total:
                group[1] = Point(at, total, tuple(alive))
            if inside == size:
                found.extend(_ordered(group))
                group, inside = [], 0
    return [*found, *_ordered(group)], begins


def _ordered(group: list[Point]) -> list[Point]:
    if not group:
        return []
    return [group[0]] if group[0] is group[1] else sorted(group, key=lambda point: point.at)


def draw_timeline(plan: Plan, trace: Trace) -> Figure | None:
    """The chart with its key; None if the trace takes no memory on the device."""
    shown, begins = points(trace)
    highest = max(shown, key=lambda point: point.total, default=None)
    if highest is None or not highest.total:
        return None
    limit = plan.device.usable if plan.device.usable <= 1.6 * highest.total else 0
    top, last = max(highest.total, limit) * 1.04, shown[-1].at
    unit = unit_of(highest.total)

    def x(at: int) -> float:
        return _LEFT + at / last * (_WIDTH - _LEFT - _RIGHT)

    def y(num_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - num_bytes / top * (_HEIGHT - _TOP - _BOTTOM)

    picture = drawing(_WIDTH, _HEIGHT, "memory live on the device")
    for value in ticks(0, top / unit[0], 5):
        level = y(value * unit[0])
        put(picture, "line", "grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=level, y2=level)
        put(picture, "text", text=f"{value:g} {unit[1]}", x=_LEFT - 8, y=level + 4, text_anchor="end")
    # The highest sum first, each lower one over it: what stays to be seen of an area is its own kind.
    for place in reversed(range(len(STORAGE_KINDS))):
        if any(point.kinds[place] for point in shown):
            steps = "".join(f"H{x(point.at):.1f}V{y(sum(point.kinds[: place + 1])):.1f}" for point in shown)
            path = f"M{x(0):.1f},{y(0):.1f}{steps}V{y(0):.1f}Z"
            put(picture, "path", f"k{place}", title=STORAGE_KINDS[place], d=path)
    _phase_marks(picture, [(phase, x(at)) for phase, at in begins.items()])
    if limit:
        usable = f"usable: {written(hundredths(limit, unit), unit)}"
        put(picture, "line", "limit", title=usable, x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(limit), y2=y(limit))
    most = f"highest: {written(hundredths(highest.total, unit), unit)}"
    put(picture, "circle", "peak", title=most, cx=x(highest.at), cy=y(highest.total), r=3.5)
    peak = plan.heaviest.peak
    at_peak = f"{most}, {where_of(peak)}" if highest.total == peak.requested else most
    return Figure(as_text(picture), _kind_keys(highest, unit), f"{at_peak}. {_CAPTION}")


_CAPTION = (
    "Requested bytes of tensors, on one rank; from left to right every allocation and release, which is "
    "order, not time. Dashed across: what the allocator may use."
)


def _phase_marks(picture: Element, begins: list[tuple[str, float]]) -> None:
    """A line where each phase begins, its name above it in the first of two rows that has room; else only the line."""
    ends = [0.0, 0.0]
    for phase, x in begins:
        put(picture, "line", "phase", title=phase, x1=x, x2=x, y1=_TOP - 10, y2=_HEIGHT - _BOTTOM)
        row = next((row for row, end in enumerate(ends) if end <= x), None)
        if row is not None:
            put(picture, "text", text=phase, x=x, y=14 + 16 * row)
            ends[row] = x + 7.0 * len(phase) + 8


def _kind_keys(highest: Point, unit: Unit) -> list[tuple[str, str]]:
    """Color, name and bytes at the highest point of each kind."""
    return [
        (f"k{place}", f"{STORAGE_KINDS[place]} {written(hundredths(num_bytes, unit), unit)}")
        for place, num_bytes in enumerate(highest.kinds)
        if num_bytes
    ]


# Of an action of a pipeline: what it is, the color.
_ACTIONS = {
    "F": ("forward", "k0"),
    "B": ("backward", "k5"),
    "I": ("backward: gradient of the input", "k3"),
    "W": ("backward: gradients of the weights", "k2"),
}
_NAMES, _AXIS = 150, 22  # at the left and above the boxes of a pipeline
_ROW, _GAP = 30, 8
_DIGIT = 6.0  # a number is left out where its box is narrower than its digits


def draw_pipeline(plan: PipelinePlan) -> Figure | None:
    """A row for each rank, a box for each forward and backward, gaps where it waits; None if times are not known."""
    if not plan.spans or not plan.seconds:
        return None
    height = _AXIS + len(plan.places) * (_ROW + _GAP)
    scale = (_WIDTH - _NAMES - _RIGHT) / plan.seconds
    picture = drawing(_WIDTH, height, "what each rank computes over a step")
    for value in ticks(0, plan.seconds, 5):
        x = _NAMES + value * scale
        put(picture, "line", "grid", x1=x, x2=x, y1=_AXIS - 4, y2=height)
        put(picture, "text", text=duration(value) if value else "0", x=x, y=12, text_anchor="middle")
    rows = {place.place: _AXIS + at * (_ROW + _GAP) for at, place in enumerate(plan.places)}
    for place in plan.places:
        y = rows[place.place]
        put(picture, "text", text=f"rank {place.rank}, idle {place.idle:.1%}", x=0, y=y + 13)
        put(picture, "text", text=f"layers {layers_text(place)}", x=0, y=y + 27)
        put(picture, "rect", "idle", x=_NAMES, y=y, width=_WIDTH - _NAMES - _RIGHT, height=_ROW)
    turns = {stage: turn for place in plan.places for turn, stage in enumerate(place.stages)}
    for span in plan.spans:
        _box(picture, span, rows[span.place], scale, turns.get(span.stage, 0))
    kinds = {span.kind for span in plan.spans}
    keys = [(style, what) for kind, (what, style) in _ACTIONS.items() if kind in kinds]
    note = f"{plan.schedule}, {plan.micro_batches} micro-batches, planned times. Numbers: micro-batches."
    if plan.stages_per_rank > 1:
        note += " A rank's later stages have lower boxes."
    note += " The optimizer and what else a step does outside the pipeline are not here."
    return Figure(as_text(picture), [*keys, ("idle", "waiting")], note)


def _box(picture: Element, span: ActionSpan, y: int, scale: float, turn: int) -> None:
    """A box with the number of its micro-batch; those of a rank's later stages are lower, to tell them apart."""
    what, style = _ACTIONS.get(span.kind, (span.kind, "k9"))
    x, width = _NAMES + span.start * scale, (span.end - span.start) * scale
    top = y + 4 * min(turn, 3)
    title = f"micro-batch {span.micro_batch}, stage {span.stage}, {what}, {duration(span.end - span.start)}"
    put(picture, "rect", f"box {style}", title=title, x=x, y=top, width=max(width, 0.1), height=_ROW - (top - y))
    number = str(span.micro_batch)
    if width >= _DIGIT * len(number) + 1:
        put(picture, "text", "mark", number, x=x + width / 2, y=y + 23)

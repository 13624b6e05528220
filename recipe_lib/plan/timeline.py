"""Memory over a trace as SVG: what is alive on the device, stacked by kind, in the order of events. No torch."""

import html
import math
from dataclasses import dataclass

from recipe_lib.plan.result import Plan
from recipe_lib.plan.tables import Unit, hundredths, unit_of, where_of, written
from recipe_lib.plan.trace import ALLOC, FREE, PHASE, STORAGE_KINDS, Trace

MOST_POINTS = 2000
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 340, 80, 12, 44, 12


@dataclass
class Point:
    """at: allocations and frees before it. total: bytes alive on the device. kinds: of them, as in STORAGE_KINDS."""

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


def draw_timeline(plan: Plan, trace: Trace) -> str:
    """The chart with its key; nothing if the trace takes no memory on the device."""
    shown, begins = points(trace)
    highest = max(shown, key=lambda point: point.total, default=None)
    if highest is None or not highest.total:
        return ""
    limit = plan.device.usable if plan.device.usable <= 1.6 * highest.total else 0
    top, last = max(highest.total, limit) * 1.04, shown[-1].at
    unit = unit_of(highest.total)

    def x(at: int) -> float:
        return _LEFT + at / last * (_WIDTH - _LEFT - _RIGHT)

    def y(num_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - num_bytes / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory alive on the device">']
    for value in _ticks(top, unit):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        label = f"{value / unit[0]:g} {unit[1]}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    # The highest sum first, each lower one over it: what stays to be seen of an area is its own kind.
    for place in reversed(range(len(STORAGE_KINDS))):
        if any(point.kinds[place] for point in shown):
            steps = "".join(f"H{x(point.at):.1f}V{y(sum(point.kinds[: place + 1])):.1f}" for point in shown)
            path = f"M{x(0):.1f},{y(0):.1f}{steps}V{y(0):.1f}Z"
            parts.append(f'<path class="k{place}" d="{path}"><title>{STORAGE_KINDS[place]}</title></path>')
    parts += _phase_marks([(phase, x(at)) for phase, at in begins.items()])
    if limit:
        parts.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}">'
        )
        parts.append(f"<title>usable: {written(hundredths(limit, unit), unit)}</title></line>")
    most = f"highest: {written(hundredths(highest.total, unit), unit)}"
    parts.append(f'<circle class="peak" cx="{x(highest.at):.1f}" cy="{y(highest.total):.1f}" r="3.5">')
    parts.append(f"<title>{most}</title></circle></svg>")
    peak = plan.heaviest.peak
    at_peak = html.escape(f"{most}, {where_of(peak)}" if highest.total == peak.requested else most)
    return f'<figure>{"".join(parts)}{_keys(highest, unit)}<p class="note">{at_peak}. {_CAPTION}</p></figure>'


_CAPTION = (
    "Bytes of tensors as they were asked for, on one rank; from left to right every allocation and release, which is "
    "order, not time. Dashed across: what the allocator may use."
)


def _phase_marks(begins: list[tuple[str, float]]) -> list[str]:
    """A line where each phase begins, its name above it in the first of two rows that has room; else only the line."""
    parts, ends = [], [0.0, 0.0]
    for phase, x in begins:
        name = html.escape(phase)
        parts.append(f'<line class="phase" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{_HEIGHT - _BOTTOM}">')
        parts.append(f"<title>{name}</title></line>")
        row = next((row for row, end in enumerate(ends) if end <= x), None)
        if row is not None:
            parts.append(f'<text x="{x:.1f}" y="{14 + 16 * row}">{name}</text>')
            ends[row] = x + 7.0 * len(phase) + 8
    return parts


def _keys(highest: Point, unit: Unit) -> str:
    """Color, name and bytes at the highest point of each kind."""
    items = []
    for place, num_bytes in enumerate(highest.kinds):
        if num_bytes:
            square = f'<svg viewBox="0 0 10 10"><rect class="k{place}" width="10" height="10" rx="2"/></svg>'
            items.append(f"<li>{square}{STORAGE_KINDS[place]} {written(hundredths(num_bytes, unit), unit)}</li>")
    return f'<ul class="keys">{"".join(items)}</ul>'


def _ticks(top: float, unit: Unit) -> list[float]:
    """Up to 6 round values (1, 2 or 5 times a power of ten units apart) from 0, in bytes."""
    raw = top / unit[0] / 5
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [number * gap * unit[0] for number in range(int(top / unit[0] / gap) + 1)]

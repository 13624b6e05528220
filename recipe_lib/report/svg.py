"""Drawings as SVG text, escaped by the XML library: axes with round numbers, line charts."""

import math
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH, HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 44, 28
_MOST_POINTS = 600


def drawing(width: float, height: float, label: str) -> Element:
    """An empty picture. label: for readers that do not see it."""
    return Element("svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": label})


def put(
    parent: Element, tag: str, style: str = "", text: str | None = None, title: str = "", **places: float | str
) -> None:
    """Adds an element. style: its class. title: shown over it. places: attributes, `text_anchor` for `text-anchor`."""
    attributes = {name.replace("_", "-"): _place(value) for name, value in places.items()}
    element = SubElement(parent, tag, ({"class": style} if style else {}) | attributes)
    element.text = text
    if title:
        SubElement(element, "title").text = title


def _place(value: float | str) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def as_text(picture: Element) -> str:
    """The picture as it stands in a page."""
    return tostring(picture, encoding="unicode")


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / gap - 1e-9)
    return [number * gap for number in range(first, math.floor(high / gap + 1e-9) + 1)]


@dataclass(frozen=True)
class Curve:
    """A named series of (step, value); None where there is no finite number."""

    name: str
    points: list[tuple[int, float | None]]


@dataclass(frozen=True)
class _CurvePoint:
    """One or several neighboring points, drawn as one: their mean, and the range they cover."""

    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class _PlotArea:
    """From numbers to places in the picture."""

    left: float
    right: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.left) / (self.right - self.left) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - _TOP - _BOTTOM)

    def place(self, step: float, value: float) -> str:
        return f"{self.x(step):.1f},{self.y(value):.1f}"


def draw_chart(title: str, unit: str, curves: list[Curve], *, from_zero: bool) -> str:
    """One chart with up to three curves over the step; each has at least one value that is a number.

    unit: added to the title. from_zero: the value axis begins at 0. A curve of more than 600 points is drawn as the
    mean of groups of points, inside a band from their lowest to their highest; the title says over how many steps.
    """
    groups = [max(1, math.ceil(len(curve.points) / _MOST_POINTS)) for curve in curves]
    frame = _frame(curves, from_zero)
    notes = [f"mean and range of {max(groups)} steps"] if max(groups) > 1 else []
    heading = ", ".join([f"{title}, {unit}" if unit else title, *notes])
    picture = drawing(WIDTH, HEIGHT, heading)
    put(picture, "text", "title", heading, x=0, y=14)
    for value in ticks(frame.low, frame.high, 5):
        y = frame.y(value)
        put(picture, "line", "grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y)
        put(picture, "text", text=_short(value), x=_LEFT - 8, y=y + 4, text_anchor="end")
    for step in ticks(frame.left, frame.right, 6):
        if step == int(step):
            put(picture, "text", text=_short(step), x=frame.x(step), y=HEIGHT - 10, text_anchor="middle")
    legend = 0
    for number, (curve, group) in enumerate(zip(curves, groups, strict=True)):
        _draw_curve(picture, frame, _marks(curve.points, group), number, with_band=group > 1)
        last = next(value for _, value in reversed(curve.points) if value is not None)
        text = f"{curve.name} {_short(last, digits=4)}"
        put(picture, "rect", f"key c{number}", x=legend, y=24, width=10, height=3, rx=1)
        put(picture, "text", text=text, x=legend + 15, y=30)
        legend += 15 + 7 * len(text) + 18
    return as_text(picture)


def _marks(points: list[tuple[int, float | None]], group: int) -> list[list[_CurvePoint]]:
    """Runs of marks, one mark for every `group` points; where a whole group holds no number the curve breaks."""
    runs: list[list[_CurvePoint]] = [[]]
    for start in range(0, len(points), group):
        part = points[start : start + group]
        numbers = [value for _, value in part if value is not None]
        if numbers:
            runs[-1].append(_CurvePoint(part[-1][0], sum(numbers) / len(numbers), min(numbers), max(numbers)))
        else:
            runs.append([])
    return [run for run in runs if run]


def _frame(curves: list[Curve], from_zero: bool) -> _PlotArea:
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points if value is not None]
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if from_zero and low == 0 else low - margin
    left, right = min(steps), max(steps)
    return _PlotArea(left, right if right > left else left + 1, low, high + margin)


def _draw_curve(
    picture: Element, frame: _PlotArea, runs: list[list[_CurvePoint]], number: int, *, with_band: bool
) -> None:
    """The band and the line, broken between runs; a mark that stands alone, and the last one, as dots."""
    for run in runs:
        if with_band:
            around = [frame.place(mark.step, mark.high) for mark in run]
            around += [frame.place(mark.step, mark.low) for mark in reversed(run)]
            put(picture, "polygon", f"band c{number}", points=" ".join(around))
        line = " ".join(frame.place(mark.step, mark.mean) for mark in run)
        put(picture, "polyline", f"curve c{number}", points=line)
    alone = [run[0] for run in runs if len(run) == 1]
    for mark in dict.fromkeys([*alone, runs[-1][-1]]):
        put(picture, "circle", f"dot c{number}", cx=frame.x(mark.step), cy=frame.y(mark.mean), r=3)


def _short(value: float, digits: int = 3) -> str:
    """A number in few letters: `0.05`, `1500`, `12.5K`, `2e-5`."""
    for least, size, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if abs(value) >= least:
            return f"{value / size:.{digits}g}{letter}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-")

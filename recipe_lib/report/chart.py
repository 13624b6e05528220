"""Charts as SVG: axes with names and round numbers, lines over the step, a logarithmic view, values under the pointer.

What is drawn where is worked out here; `chart.html` writes it, every text escaped. The values under the pointer need
no script: each strip of a chart that has one holds what CSS shows while the pointer, or a finger, is on it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from recipe_lib.report.view import Figure, Section

WIDTH, HEIGHT = 400, 230  # of a line chart: as wide as its column of the page, so that its letters are as large
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 38
_MOST_POINTS, _MOST_TOOLTIPS = 600, 100
_DECADE = 10.0  # a span of values from which on a logarithmic axis is offered, whatever they are
_LETTER = 6.6  # width of one, about
COLORS = 10  # classes k0 to k9 of the page


@dataclass(frozen=True)
class Scale:
    """An axis."""

    name: str  # with its unit
    low: float  # number at its beginning
    high: float  # at its end
    ticks: Sequence[tuple[float, str]]  # number, text
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Shape:
    """An element of SVG."""

    tag: str
    attributes: dict[str, str]
    text: str = ""  # inside it
    title: str = ""  # shown over it, in place of a text


@dataclass(frozen=True)
class Tooltip:
    """Text that is shown while the pointer is between left and right."""

    left: float
    right: float
    at: float  # where a line marks it
    lines: Sequence[tuple[str, str]]  # class of a color or "", text
    dots: Sequence[tuple[float, str]] = ()  # y, class of a color


@dataclass
class Chart:
    """A picture with a plot in it, and margins around the plot."""

    width: float
    height: float
    label: str  # for who does not see it
    left: float = 0
    right: float = 0
    top: float = 0
    bottom: float = 0
    x: Scale | None = None
    y: Scale | None = None
    shapes: list[Shape] = field(default_factory=list)  # in the plot, the first at the back
    tooltips: list[Tooltip] = field(default_factory=list)

    def across(self, value: float) -> float:
        """Where a number of the x axis is."""
        assert self.x is not None
        return self.left + self.x.share(value) * (self.width - self.left - self.right)

    def up(self, value: float) -> float:
        """Where a number of the y axis is."""
        assert self.y is not None
        return self.height - self.bottom - self.y.share(value) * (self.height - self.top - self.bottom)

    def put(self, tag: str, style: str = "", text: str = "", title: str = "", **places: float | str) -> None:
        """Adds a shape. style: its class. places: its attributes, `text_anchor` for `text-anchor`."""
        self.shapes.append(_shape(tag, style, text, title, **places))


def _shape(tag: str, style: str = "", text: str = "", title: str = "", **places: float | str) -> Shape:
    named = {name.replace("_", "-"): place(value) for name, value in places.items()}
    return Shape(tag, ({"class": style} if style else {}) | named, text, title)


def place(value: float | str) -> str:
    """A number as an attribute: two digits are enough for a picture."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def as_svg(chart: Chart) -> str:
    """The chart as it stands in a page."""
    tooltips = [(tooltip, _plate(chart, tooltip)) for tooltip in chart.tooltips]
    return (
        load_template("chart.html")
        .render(place=place, chart=chart, axes=[*_x_axis(chart), *_y_axis(chart)], tooltips=tooltips)
        .strip()
    )


def _plate(chart: Chart, tooltip: Tooltip) -> dict[str, float]:
    """Return where a tooltip's text stands: right of the pointer, or left of it where there is no room."""
    width = max(14.0 * bool(color) + _LETTER * len(text) for color, text in tooltip.lines) + 16
    left = tooltip.at + 8 if tooltip.at + 8 + width <= chart.width else tooltip.at - 8 - width
    return {"left": max(0.0, left), "top": chart.top + 2, "width": width, "height": 16 * len(tooltip.lines) + 8}


def _x_axis(chart: Chart) -> list[Shape]:
    if chart.x is None:
        return []
    base, end = chart.height - chart.bottom, chart.width - chart.right
    shapes = [_shape("line", "axis", x1=chart.left, x2=end, y1=base, y2=base)]
    for value, text in chart.x.ticks:
        x = chart.across(value)
        shapes.append(_shape("line", "axis", x1=x, x2=x, y1=base, y2=base + 4))
        half = _LETTER / 2 * len(text)  # a text at the end of the axis stays in the picture
        shapes.append(_shape("text", text=text, x=min(x, chart.width - half), y=base + 16, text_anchor="middle"))
    middle = (chart.left + end) / 2
    return [*shapes, _shape("text", "name", chart.x.name, x=middle, y=base + 32, text_anchor="middle")]


def _y_axis(chart: Chart) -> list[Shape]:
    if chart.y is None:
        return []
    shapes = []
    for value, text in chart.y.ticks:
        y = chart.up(value)
        shapes.append(_shape("line", "grid", x1=chart.left, x2=chart.width - chart.right, y1=y, y2=y))
        shapes.append(_shape("text", text=text, x=chart.left - 6, y=y + 4, text_anchor="end"))
    middle = place((chart.top + chart.height - chart.bottom) / 2)
    turned = f"translate(11 {middle}) rotate(-90)"
    return [*shapes, _shape("text", "name", chart.y.name, transform=turned, text_anchor="middle")]


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / gap - 1e-9)
    return [number * gap for number in range(first, math.floor(high / gap + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most about `most` numbers from low to high: 1, 2 and 5 times powers of ten, or powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in range(first, min(last, 300) + 1) for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def short(value: float, digits: int = 3) -> str:
    """A number in few letters: `0.05`, `1500`, `12.5K`, `2e-5`."""
    for least, size, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if least <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    if 1000 <= abs(value) < 1e4:
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+", "e")


@dataclass(frozen=True)
class Curve:
    """A named series of (step, value); None where there is no finite number."""

    name: str
    points: list[tuple[int, float | None]]

    @property
    def values(self) -> list[float]:
        """The finite numbers."""
        return [value for _, value in self.points if value is not None]


class _CurvePoint(NamedTuple):
    """One or several neighboring points, drawn as one: their mean, and the range they cover."""

    step: int
    mean: float
    low: float
    high: float


def line_figure(
    title: str, unit: str, curves: list[Curve], *, from_zero: bool = False, prefers_log: bool = False, note: str = ""
) -> Figure:
    """A chart of curves over the step; each has at least one value that is a number.

    unit: of the value axis, beside its name. from_zero: the value axis begins at 0. Where the values span a decade
    there is a logarithmic view as well; with prefers_log it is there for any span, and a decade makes it the one that
    is seen first. A curve of more than 600 points is drawn as the mean of groups of points, inside a band from their
    lowest to their highest; a note says so.
    """
    keys = [(f"k{at % COLORS}", f"{curve.name} {short(curve.values[-1], 4)}") for at, curve in enumerate(curves)]
    notes = [note] if note else []
    group = max(map(_count_alike, curves))
    notes += [f"Line: mean of {group} steps; band: their range."] if group > 1 else []
    values = [value for curve in curves for value in curve.values]
    above = [value for value in values if value > 0]
    log = ""
    is_decade = bool(above) and max(above) > _DECADE * min(above)
    if is_decade or (prefers_log and above and max(above) > min(above)):
        positive = [
            Curve(
                curve.name, [(step, value if value is not None and value > 0 else None) for step, value in curve.points]
            )
            for curve in curves
        ]
        log = as_svg(_lines(title, unit, positive, from_zero=False, is_log=True))
        notes += ["On the log axis, values that are not above 0 are left out."] if len(above) < len(values) else []
    svg = as_svg(_lines(title, unit, curves, from_zero=from_zero, is_log=False))
    return Figure(svg, keys, " ".join(notes), title=title, log=log, log_first=is_decade and prefers_log)


def _count_alike(curve: Curve) -> int:
    """Return how many of its points are drawn as one."""
    return max(1, math.ceil(len(curve.points) / _MOST_POINTS))


def _lines(title: str, unit: str, curves: list[Curve], *, from_zero: bool, is_log: bool) -> Chart:
    values = [value for curve in curves for value in curve.values]
    name = f"{title[:1].lower()}{title[1:]}" + (f" ({unit})" if unit else "")
    label = f"{name} over the step: " + "; ".join(
        f"{curve.name} ends at {short(curve.values[-1], 4)}, from {short(min(curve.values), 4)} to "
        f"{short(max(curve.values), 4)}"
        for curve in curves
        if curve.values
    )
    chart = Chart(WIDTH, HEIGHT, label, _LEFT, _RIGHT, _TOP, _BOTTOM)
    steps = [step for curve in curves for step, _ in curve.points]
    last = max(*steps, min(steps) + 1)
    whole = [step for step in ticks(min(steps), last, 6) if step == int(step)]
    chart.x = Scale("step", min(steps), last, [(step, short(step)) for step in whole])
    chart.y = _log_axis(unit or name, values) if is_log else _value_axis(unit or name, values, from_zero)
    chart.left = max(_LEFT, 24 + _LETTER * max((len(text) for _, text in chart.y.ticks), default=0))
    for number, curve in enumerate(curves):
        if curve.values:
            _draw_curve(chart, curve, number)
    chart.tooltips = _tooltips(chart, curves)
    return chart


def _value_axis(name: str, values: list[float], from_zero: bool) -> Scale:
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if from_zero and low == 0 else low - margin
    high += margin
    return Scale(name, low, high, _different(ticks(low, high, 5)))


def _log_axis(name: str, values: list[float]) -> Scale:
    low, high = min(values), max(values)
    margin = (high / low) ** 0.06
    low, high = low / margin, high * margin
    found = log_ticks(low, high)
    return Scale(name, low, high, _different(found if len(found) > 2 else ticks(low, high, 5)), is_log=True)


def _different(values: list[float]) -> list[tuple[float, str]]:
    """Numbers and their texts, with as many digits as tell neighbors apart."""
    for digits in range(3, 12):
        texts = [short(value if abs(value) > 1e-300 else 0.0, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts, strict=True))


def _draw_curve(chart: Chart, curve: Curve, number: int) -> None:
    """The band and the line, broken between runs; a mark that stands alone, and the last one, as dots."""
    group, color = _count_alike(curve), number % COLORS
    runs = _marks(curve.points, group)
    for run in runs:
        if group > 1:
            around = [(mark.step, mark.high) for mark in run] + [(mark.step, mark.low) for mark in reversed(run)]
            chart.put("polygon", f"band c{color}", points=_path(chart, around))
        chart.put("polyline", f"curve c{color}", points=_path(chart, [(mark.step, mark.mean) for mark in run]))
    alone = [run[0] for run in runs if len(run) == 1]
    for mark in dict.fromkeys([*alone, runs[-1][-1]]):
        chart.put("circle", f"dot c{color}", cx=chart.across(mark.step), cy=chart.up(mark.mean), r=3)


def _path(chart: Chart, points: list[tuple[int, float]]) -> str:
    return " ".join(f"{chart.across(step):.1f},{chart.up(value):.1f}" for step, value in points)


def _marks(points: list[tuple[int, float | None]], group: int) -> list[list[_CurvePoint]]:
    """Return runs of marks, one for every `group` points; where a whole group holds no number the curve breaks."""
    runs: list[list[_CurvePoint]] = [[]]
    for start in range(0, len(points), group):
        part = Curve("", points[start : start + group])
        if numbers := part.values:
            mean = math.fsum(numbers) / len(numbers)
            runs[-1].append(_CurvePoint(part.points[-1][0], mean, min(numbers), max(numbers)))
        else:
            runs.append([])
    return [run for run in runs if run]


def _tooltips(chart: Chart, curves: list[Curve]) -> list[Tooltip]:
    """A tooltip for each step, or for several neighboring ones where there are more than 100."""
    steps = sorted({step for curve in curves for step, _ in curve.points})
    size = math.ceil(len(steps) / _MOST_TOOLTIPS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    found = [dict(curve.points) for curve in curves]

    def lines(group: list[int]) -> tuple[list[tuple[str, str]], list[tuple[float, str]]]:
        said = [("", f"step {group[0]}" if len(group) == 1 else f"steps {group[0]} to {group[-1]}")]
        dots = []
        for number, (curve, values) in enumerate(zip(curves, found, strict=True)):
            numbers = [value for step in group if (value := values.get(step)) is not None]
            if numbers:
                mean, color = math.fsum(numbers) / len(numbers), f"k{number % COLORS}"
                text = f"{curve.name} {short(mean, 6)}"
                if len(numbers) > 1:
                    text += f" ({short(min(numbers), 4)} to {short(max(numbers), 4)})"
                said.append((color, text))
                dots.append((chart.up(mean), color))
        return said, dots

    return strips(chart, [chart.across((group[0] + group[-1]) / 2) for group in groups], lambda at: lines(groups[at]))


def strips(
    chart: Chart,
    places: list[float],
    read: Callable[[int], tuple[list[tuple[str, str]], list[tuple[float, str]]]],
) -> list[Tooltip]:
    """Tooltips at rising places, each as wide as to halfway to its neighbors. read: (lines, dots) of a place."""
    edges = [chart.left, *((first + second) / 2 for first, second in pairwise(places)), chart.width - chart.right]
    return [Tooltip(edges[at], edges[at + 1], x, *read(at)) for at, x in enumerate(places)]


# An HTML page that needs neither network nor script, rendered with jinja2 from sections; all text
# is escaped.


@cache
def load_template(name: str) -> Any:
    """Return a template of this folder."""
    import jinja2  # which a plan on the terminal does without

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("recipe_lib", "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def render_page(
    kind: str,
    title: str,
    name: str,
    headline: str,
    sections: Iterable[Section],
    *,
    style: str = "",
    status: str = "",
    footer: str = "",
) -> str:
    """Return the page.

    kind: `run`, `plan` or `evaluation`, by which the file is known again. style: `good`, `risky` or `bad` colors the
    headline. status: a word after the name.
    """
    return load_template("page.html").render(
        kind=kind,
        title=title,
        name=name,
        headline=headline,
        sections=[section for section in sections if section],
        style=style,
        status=status,
        footer=footer,
    )

"""Draw charts as SVG, for pages that need neither network nor script.

A run calls `draw_line_figure` for a chart of curves over the step; plans draw other figures on a
`Chart` with `put`, and call `render_svg`. Lengths are in units of the SVG. All text is escaped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from recipe_lib.report.view import Figure

# Size of a line chart: as wide as its column of the page, so that its letters have the page's size.
WIDTH = 400
HEIGHT = 230
# Margins of a line chart.
_LEFT = 58
_RIGHT = 14
_TOP = 10
_BOTTOM = 38
_MAX_POINTS = 600  # of a curve that is drawn
# Ratios of largest to least value between which an axis is logarithmic, where that is preferred.
_DECADE = 10.0
_MAX_SPAN = 1e100
_LETTER = 6.6  # width of a letter, about
COLORS = 10  # number of the page's color classes, k0 to k9


@dataclass(frozen=True)
class Scale:
    """An axis."""

    name: str  # with its unit
    low: float  # value at its beginning
    high: float  # value at its end
    ticks: Sequence[tuple[float, str]]  # (value, text)
    is_log: bool = False  # True: logarithmic

    def share(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass
class Chart:
    """A picture with a plot in it, and margins around the plot."""

    width: float
    height: float
    label: str  # text for people who do not see it (aria-label)
    # Margins.
    left: float = 0
    right: float = 0
    top: float = 0
    bottom: float = 0
    x: Scale | None = None  # None: no such axis
    y: Scale | None = None
    shapes: list[Element] = field(default_factory=list)  # in the plot, the first at the back

    def compute_x(self, value: float) -> float:
        assert self.x is not None
        return self.left + self.x.share(value) * (self.width - self.left - self.right)

    def compute_y(self, value: float) -> float:
        """Return the y coordinate, from the top, of a value of the y axis."""
        assert self.y is not None
        return (
            self.height - self.bottom - self.y.share(value) * (self.height - self.top - self.bottom)
        )

    def put(
        self, tag: str, style: str = "", text: str = "", title: str = "", **attributes: float | str
    ) -> None:
        """Add a shape in front of the others.

        tag: such as `line`. style: its class on the page. text: inside it. title: shown when the
        mouse is over it. attributes: the other ones, such as `x1`; `text_anchor` stands for
        `text-anchor`.
        """
        texts = {
            name.replace("_", "-"): format_attribute(value) for name, value in attributes.items()
        }
        shape = Element(tag, ({"class": style} if style else {}) | texts)
        shape.text = text
        if title:
            SubElement(shape, "title").text = title
        self.shapes.append(shape)


def format_attribute(value: float | str) -> str:
    """Return an attribute as text; a float with two decimals, enough for a picture."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def render_svg(chart: Chart) -> str:
    """Return the chart as it stands in a page; every text is escaped."""
    svg = Element(
        "svg",
        {
            "viewBox": f"0 0 {chart.width} {chart.height}",
            "role": "img",
            "aria-label": chart.label,
        },
    )
    axes = replace(chart, shapes=[])  # of the same picture, drawn behind the shapes
    _draw_axes(axes)
    svg.extend([*axes.shapes, *chart.shapes])
    indent(svg, "")
    return tostring(svg, encoding="unicode")


def _draw_axes(chart: Chart) -> None:
    bottom_edge = chart.height - chart.bottom
    right_edge = chart.width - chart.right
    if chart.x is not None:
        chart.put("line", "axis", x1=chart.left, x2=right_edge, y1=bottom_edge, y2=bottom_edge)
        for value, text in chart.x.ticks:
            x = chart.compute_x(value)
            chart.put("line", "axis", x1=x, x2=x, y1=bottom_edge, y2=bottom_edge + 4)
            # Half the text's width: a text at the end of the axis stays in the picture.
            half = _LETTER / 2 * len(text)
            chart.put(
                "text",
                text=text,
                x=min(x, chart.width - half),
                y=bottom_edge + 16,
                text_anchor="middle",
            )
        chart.put(
            "text",
            "name",
            chart.x.name,
            x=(chart.left + right_edge) / 2,
            y=bottom_edge + 32,
            text_anchor="middle",
        )
    if chart.y is not None:
        for value, text in chart.y.ticks:
            y = chart.compute_y(value)
            chart.put("line", "grid", x1=chart.left, x2=right_edge, y1=y, y2=y)
            chart.put("text", text=text, x=chart.left - 6, y=y + 4, text_anchor="end")
        turned = f"translate(11 {format_attribute((chart.top + bottom_edge) / 2)}) rotate(-90)"
        chart.put("text", "name", chart.y.name, transform=turned, text_anchor="middle")


def compute_ticks(low: float, high: float, max_steps: int) -> list[float]:
    """Return at most `max_steps` + 1 round numbers from low to high.

    They are 1, 2 or 5 times a power of ten apart.
    """
    # The 1e-9 below allow for rounding: a bound that is a round number itself is among them.
    least_gap = (high - low) / max_steps
    power = 10.0 ** math.floor(math.log10(least_gap))
    gap = next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= least_gap * (1 - 1e-9)
    )
    return [
        number * gap
        for number in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)
    ]


def format_short(value: float, digits: int = 3) -> str:
    """Return a number in few letters: `0.05`, `1500`, `12.5K`, `2e-5`.

    digits: significant ones.
    """
    for least, size, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if least <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    if 1000 <= abs(value) < 1e4:
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+", "e")


@dataclass(frozen=True)
class Curve:
    """A named series of values over the step."""

    name: str
    points: list[tuple[int, float | None]]  # (step, value); None: the value is not finite

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


def draw_line_figure(
    title: str,
    unit: str,
    curves: list[Curve],
    *,
    from_zero: bool = False,
    prefers_log: bool = False,
) -> Figure:
    """Return a chart of curves over the step.

    If a curve has more than 600 points, the means of groups of points are drawn, and a note says
    so.

    unit: of the values; empty: none. curves: each has at least one finite value. from_zero: the
    value axis begins at 0. prefers_log: it is logarithmic if all values are above 0 and the largest
    is more than ten times the least.
    """
    values = [value for curve in curves for value in curve.values]
    name = f"{title[:1].lower()}{title[1:]}" + (f" ({unit})" if unit else "")
    # The legend's texts: each curve with its last value.
    ends = [f"{curve.name} {format_short(curve.values[-1], 4)}" for curve in curves]
    steps = [step for curve in curves for step, _ in curve.points]
    last_step = max(*steps, min(steps) + 1)
    ticks = [step for step in compute_ticks(min(steps), last_step, 6) if step == int(step)]
    is_log = prefers_log and min(values) > 0 and _DECADE < max(values) / min(values) < _MAX_SPAN
    value_axis = (
        _make_log_axis(unit or name, values)
        if is_log
        else _make_value_axis(unit or name, values, from_zero)
    )
    letters = max((len(text) for _, text in value_axis.ticks), default=0)
    chart = Chart(
        width=WIDTH,
        height=HEIGHT,
        label=f"{name} over the step, at its end {'; '.join(ends)}",
        left=max(_LEFT, 24 + _LETTER * letters),
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        x=Scale(
            "step",
            low=min(steps),
            high=last_step,
            ticks=[(step, format_short(step)) for step in ticks],
        ),
        y=value_axis,
    )
    group = max(1, math.ceil(max(len(curve.points) for curve in curves) / _MAX_POINTS))
    for index, curve in enumerate(curves):
        _draw_curve(chart, _find_runs(curve, group), index % COLORS)
    return Figure(
        render_svg(chart),
        keys=[(f"k{index % COLORS}", end) for index, end in enumerate(ends)],
        note=f"Line: mean of {group} steps." if group > 1 else "",
        title=title,
    )


def _make_value_axis(name: str, values: list[float], from_zero: bool) -> Scale:
    """Return an axis from the least to the largest value, with a margin.

    from_zero: begin at 0, or below if a value is negative.
    """
    values = [*values, 0.0] if from_zero else values
    low = min(values)
    high = max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if from_zero and low == 0 else low - margin
    high += margin
    return Scale(name, low=low, high=high, ticks=_label_ticks(compute_ticks(low, high, 5)))


def _make_log_axis(name: str, values: list[float]) -> Scale:
    """Return a logarithmic axis with ticks at powers of ten, at most seven.

    values: above 0.
    """
    margin = (max(values) / min(values)) ** 0.06
    low = min(values) / margin
    high = max(values) * margin
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = [10.0**power for power in powers[:: math.ceil(len(powers) / 7)]]
    return Scale(
        name,
        low=low,
        high=high,
        ticks=_label_ticks(marks if len(marks) > 1 else compute_ticks(low, high, 5)),
        is_log=True,
    )


def _label_ticks(values: list[float]) -> list[tuple[float, str]]:
    """Return (value, text) for ticks, with as many digits as tell the texts apart."""
    for digits in range(3, 12):
        texts = [format_short(value if abs(value) > 1e-300 else 0.0, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts, strict=True))


def _draw_curve(chart: Chart, runs: list[list[tuple[int, float]]], color: int) -> None:
    """Draw a line that is broken between runs; dots for points that stand alone, and for the last.

    runs: consecutive points (step, value). color: index of the page's color class.
    """
    for run in runs:
        points = " ".join(
            f"{chart.compute_x(step):.1f},{chart.compute_y(value):.1f}" for step, value in run
        )
        chart.put("polyline", f"curve c{color}", points=points)
    alone = [run[0] for run in runs if len(run) == 1]
    for step, value in dict.fromkeys([*alone, runs[-1][-1]]):
        chart.put(
            "circle", f"dot c{color}", cx=chart.compute_x(step), cy=chart.compute_y(value), r=3
        )


def _find_runs(curve: Curve, group: int) -> list[list[tuple[int, float]]]:
    """Return runs of points (step, value), each the mean of `group` points of the curve.

    A group without a finite value ends a run: the curve breaks there.
    """
    runs: list[list[tuple[int, float]]] = [[]]
    for start in range(0, len(curve.points), group):
        part = Curve("", curve.points[start : start + group])
        if part.values:
            runs[-1].append((part.points[-1][0], math.fsum(part.values) / len(part.values)))
        else:
            runs.append([])
    return [run for run in runs if run]

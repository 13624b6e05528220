"""Draw lines over two axes as an SVG file, for pages of docs/measurements.

`tp_trace.py` calls `write_picture` with a `Picture` of up to five `Line`s. The file needs no other
style sheet. Coordinates of points are in the units of the axes, all else in pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipe_lib.report.chart import Chart, Scale, compute_ticks, render_svg

_WIDTH = 1000
# Margins around the axes; the lines' names stand in the right one.
_LEFT = 64
_RIGHT = 250
_TOP = 14
_BOTTOM = 44
# Of the lines, in their order. Classes `s0`, `s1` ... draw in them, `f0`, `f1` ... fill.
_COLORS = ("#d1242f", "#bc6c00", "#8250df", "#1f6feb", "#1a7f37")
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#24292f}.grid{stroke:#d0d7de}.axis{stroke:#57606a}"
    ".limit{stroke:#24292f;stroke-dasharray:6 4}polyline{fill:none;stroke-width:1.6}"
    + "".join(f".s{at}{{stroke:{color}}}.f{at}{{fill:{color}}}" for at, color in enumerate(_COLORS))
    + "</style>"
)
Point = tuple[float, float]  # x, y


@dataclass(frozen=True)
class Line:
    """Hold a line of a picture."""

    name: str  # beside the picture
    points: Sequence[Point]
    note: str = ""  # under the name
    mark: tuple[Point, str] | None = None  # a point that gets a dot, and the text beside it


@dataclass(frozen=True)
class Picture:
    """Hold a picture of lines over two axes."""

    label: str  # what the picture shows, for readers who do not see it
    x: str  # name of the axis
    y: str  # name of the axis
    lines: Sequence[Line]  # at most as many as _COLORS
    marks: Sequence[tuple[float, str]] = field(default=())  # (x, text) of ticks; empty: numbers
    limit: tuple[float, str] | None = None  # (y, text) of a dashed line
    low: float | None = None  # where y begins; None: at the lowest point
    height: int = 420


def write_picture(picture: Picture, path: Path) -> None:
    """Draw a picture and write it as an SVG file."""
    path.write_text(draw_picture(picture), encoding="utf-8")


def draw_picture(picture: Picture) -> str:
    """Return a picture's SVG."""
    points: list[Point] = []
    for line in picture.lines:
        points += line.points
    values = [value for _, value in points] + ([picture.limit[0]] if picture.limit else [])
    low = min(values) if picture.low is None else picture.low
    high = max(values) + 0.05 * (max(values) - low)  # some room above the highest point
    chart = Chart(
        width=_WIDTH,
        height=picture.height,
        label=picture.label,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
    )
    left = min(x for x, _ in points)
    right = max(x for x, _ in points)
    x_ticks = picture.marks or [(value, f"{value:g}") for value in compute_ticks(left, right, 8)]
    y_ticks = [(value, f"{value:g}") for value in compute_ticks(low, high, 8)]
    chart.x = Scale(picture.x, low=left, high=right, ticks=x_ticks)
    chart.y = Scale(picture.y, low=low, high=high, ticks=y_ticks)
    if picture.limit is not None:
        y = chart.compute_y(picture.limit[0])
        chart.put("line", "limit", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y)
        chart.put("text", text=picture.limit[1], x=_WIDTH - _RIGHT - 8, y=y - 6, text_anchor="end")
    for at, line in enumerate(picture.lines):
        _draw_line(chart, line, at)
    # `render_svg` is for SVG inside an HTML page. A file needs the namespace, a size, a style and a
    # background of its own.
    text = render_svg(chart)
    svg_tag = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{picture.height}" '
    chart_tag, _, chart_body = text.partition(">")
    background = f'<rect width="{_WIDTH}" height="{picture.height}" fill="#ffffff"/>'
    lines = [
        line
        for line in f"{chart_tag}>{_STYLE}{background}{chart_body}".splitlines()
        if line.strip()
    ]
    return "\n".join(lines).replace("<svg ", svg_tag, 1) + "\n"


def _draw_line(chart: Chart, line: Line, at: int) -> None:
    """Draw a line, and its name beside the picture.

    at: number of the line, which decides its color and where its name stands.
    """
    path = " ".join(f"{chart.compute_x(x):.1f},{chart.compute_y(y):.1f}" for x, y in line.points)
    chart.put("polyline", f"s{at}", points=path)
    if line.mark is not None:
        (x, y), text = line.mark
        chart.put("circle", f"f{at}", cx=chart.compute_x(x), cy=chart.compute_y(y), r=4)
        chart.put("text", f"f{at}", text, x=chart.compute_x(x) + 7, y=chart.compute_y(y) - 3)
    y = _TOP + 16 + 40 * at
    chart.put("rect", f"f{at}", x=_WIDTH - _RIGHT + 16, y=y - 10, width=12, height=12)
    chart.put("text", text=line.name, x=_WIDTH - _RIGHT + 34, y=y)
    if line.note:
        chart.put("text", text=line.note, x=_WIDTH - _RIGHT + 34, y=y + 16)

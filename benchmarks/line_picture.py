"""Lines as an SVG file that stands for itself, for pages of docs/measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipe_lib.report.chart import Chart, Scale, compute_ticks, render_svg

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 64, 250, 14, 44
_COLORS = ("#d1242f", "#bc6c00", "#8250df", "#1f6feb", "#1a7f37")
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#24292f}.grid{stroke:#d0d7de}.axis{stroke:#57606a}"
    ".limit{stroke:#24292f;stroke-dasharray:6 4}polyline{fill:none;stroke-width:1.6}"
    + "".join(f".s{at}{{stroke:{color}}}.f{at}{{fill:{color}}}" for at, color in enumerate(_COLORS))
    + "</style>"
)
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """name: said beside the picture, with `note` under it. mark: a point that is shown as a dot,
    and what it says.
    """

    name: str
    points: Sequence[Point]
    note: str = ""
    mark: tuple[Point, str] | None = None


@dataclass(frozen=True)
class Picture:
    """x, y: names of the axes. marks: (place, name) along x. limit: a number of y, its name. low:
    where y begins.
    """

    label: str
    x: str
    y: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = field(default=())
    limit: tuple[float, str] | None = None
    low: float | None = None
    height: int = 420


def write_picture(picture: Picture, path: Path) -> None:
    """Draws the lines; at most five, told apart by color."""
    path.write_text(draw_picture(picture), encoding="utf-8")


def draw_picture(picture: Picture) -> str:
    """The file's text."""
    points = [point for line in picture.lines for point in line.points]
    values = [value for _, value in points] + ([picture.limit[0]] if picture.limit else [])
    low = min(values) if picture.low is None else picture.low
    high = max(values) + 0.05 * (max(values) - low)
    chart = Chart(_WIDTH, picture.height, picture.label, _LEFT, _RIGHT, _TOP, _BOTTOM)
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    shown = picture.marks or [(value, f"{value:g}") for value in compute_ticks(left, right, 8)]
    chart.x = Scale(picture.x, left, right, shown)
    chart.y = Scale(
        picture.y, low, high, [(value, f"{value:g}") for value in compute_ticks(low, high, 8)]
    )
    if picture.limit is not None:
        y = chart.compute_y(picture.limit[0])
        chart.put("line", "limit", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y)
        chart.put("text", text=picture.limit[1], x=_WIDTH - _RIGHT - 8, y=y - 6, text_anchor="end")
    for at, line in enumerate(picture.lines):
        _draw(chart, line, at)
    text = render_svg(chart)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{picture.height}" '
    begin, _, rest = text.partition(">")
    background = f'<rect width="{_WIDTH}" height="{picture.height}" fill="#ffffff"/>'
    lines = [line for line in f"{begin}>{_STYLE}{background}{rest}".splitlines() if line.strip()]
    return "\n".join(lines).replace("<svg ", start, 1) + "\n"


def _draw(chart: Chart, line: Line, at: int) -> None:
    path = " ".join(f"{chart.compute_x(x):.1f},{chart.compute_y(y):.1f}" for x, y in line.points)
    chart.put("polyline", f"s{at}", points=path)
    if line.mark is not None:
        (x, y), said = line.mark
        chart.put("circle", f"f{at}", cx=chart.compute_x(x), cy=chart.compute_y(y), r=4)
        chart.put("text", f"f{at}", said, x=chart.compute_x(x) + 7, y=chart.compute_y(y) - 3)
    y = _TOP + 16 + 40 * at
    chart.put("rect", f"f{at}", x=_WIDTH - _RIGHT + 16, y=y - 10, width=12, height=12)
    chart.put("text", text=line.name, x=_WIDTH - _RIGHT + 34, y=y)
    if line.note:
        chart.put("text", text=line.note, x=_WIDTH - _RIGHT + 34, y=y + 16)

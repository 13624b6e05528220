"""report.html: a page that stands alone, is well formed, and shows the numbers of the run."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipe_lib.training.curves import Curve, draw_chart, ticks
from recipe_lib.training.records.metrics import MetricsFile, step_metrics, write_summary
from recipe_lib.training.report_page import write_report

PEAK = {"active": 2**30, "allocated": 2**31, "reserved": 3 * 2**30, "kind": "device"}


def write_run(folder: Path, steps: int, kind: str = "device") -> Path:
    metrics = MetricsFile(folder)
    peak = PEAK if kind == "device" else dict.fromkeys(("active", "allocated", "reserved"), 2**30)
    for step in range(1, steps + 1):
        metrics.append(
            step_metrics(
                step=step,
                epoch=step / 10,
                loss=5.0 / step if step != 3 else math.nan,
                grad_norm=1.0,
                lr=1e-3,
                seconds=0.5,
                trained_tokens=100,
                total_tokens=400,
                devices=2,
                peak=peak | {"kind": kind},
            )  # fmt: skip
        )
        if step % 4 == 0:
            metrics.append({"step": step, "validation_loss": 6.0 / step, "validation_tokens": 7})
    (folder / "config.yaml").write_text("model:\n  path: a <b> & c\n")
    write_summary(folder, "done", {}, wall_seconds=3700.0, total_steps=steps, world_size=2)
    return write_report(folder)


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects tags, addresses and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    path = write_run(tmp_path, 12)
    text = path.read_text()
    page = Page(text)
    assert page.addresses == [] and "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("svg") == 6
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)
    assert "a <b> & c" in page.text  # the config, escaped
    assert "$" not in page.text


def test_the_numbers_are_on_the_page(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path, 12).read_text())
    assert "12 of 12 steps, loss 5.0000 → 0.4167, validation loss 0.5000" in page.text
    for expected in ("training 0.4167", "validation 0.5", "reserved 3", "1h01m", "4.8 K (4,800)", "3.00 GiB", "done"):
        assert expected in page.text


def test_equal_curves_are_drawn_once(tmp_path: Path) -> None:
    text = write_run(tmp_path, 4, kind="resident set").read_text()
    assert "Peak memory (resident set), GiB" in text
    assert "active 1" in text and "reserved" not in text.split("</svg>")[-2]


def test_a_run_that_never_stepped_has_a_page_too(tmp_path: Path) -> None:
    write_summary(tmp_path, "stopped", {}, wall_seconds=1.0, total_steps=5, world_size=1)
    page = Page(write_report(tmp_path).read_text())
    assert "svg" not in page.tags and "0 of 5 steps" in page.text


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_extremes(tmp_path: Path) -> None:
    points = [(step, 1.0) for step in range(1, 10_001)]
    points[5000] = (5001, 50.0)
    text = draw_chart("Loss", "", [Curve("loss", points), Curve("validation", [(10_000, 2.0)])], from_zero=True)
    chart = ElementTree.fromstring(text)
    assert "mean and range of 17 steps" in text
    (line,) = [part for part in chart.iter("polyline") if part.get("class") == "curve c0"]
    assert len(line.get("points").split()) == 589
    heights = {float(pair.split(",")[1]) for pair in chart.find("polygon").get("points").split()}
    assert min(heights) < 60 < 180 < max(heights)
    assert len(list(chart.iter("polygon"))) == 1  # the short curve has no band


def test_a_missing_value_breaks_the_line() -> None:
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, None), (6, 1.0), (7, 3.0)]
    chart = ElementTree.fromstring(draw_chart("Loss", "", [Curve("loss", points)], from_zero=False))
    assert [len(line.get("points").split()) for line in chart.iter("polyline")] == [2, 1, 2]
    assert len(list(chart.iter("circle"))) == 2  # the lonely point, the last point


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e12])
def test_a_constant_or_single_value_is_inside_the_picture(value: float) -> None:
    for points in ([(1, value)], [(1, value), (2, value)]):
        for from_zero in (False, True):
            chart = ElementTree.fromstring(draw_chart("x", "", [Curve("x", points)], from_zero=from_zero))
            (dot,) = chart.iter("circle")
            assert 44 <= float(dot.get("cy")) <= 212 and 52 <= float(dot.get("cx")) <= 456


@pytest.mark.parametrize(
    "low, high, most, expected",
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.9, 6.3, 5, [2, 4, 6]),
        (1, 240, 6, [50, 100, 150, 200]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == pytest.approx(expected)

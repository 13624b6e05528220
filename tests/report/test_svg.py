"""Charts: axes with round numbers, curves that break where there is no number, points that stay inside."""

from xml.etree import ElementTree

import pytest

from recipe_lib.report.svg import Curve, draw_chart, ticks


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_extremes() -> None:
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

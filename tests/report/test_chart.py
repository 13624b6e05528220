"""Charts: axes with names and round numbers, curves that break where there is no number."""

import math
from xml.etree import ElementTree

import pytest

from recipe_lib.report.chart import HEIGHT, WIDTH, Curve, compute_ticks, draw_line_figure

EVIL = "<script>'a' & \"b\"</script>"


def shown(svg: str, style: str) -> list[ElementTree.Element]:
    """The elements of a class."""
    return [part for part in ElementTree.fromstring(svg).iter() if part.get("class") == style]


def test_a_long_run_is_drawn_with_few_points() -> None:
    points = [(step, 1.0) for step in range(1, 10_001)]
    points[5000] = (5001, 18.0)
    found = draw_line_figure(
        "Loss", "", [Curve("loss", points), Curve("validation", [(10_000, 2.0)])], from_zero=True
    )
    assert found.note == "Line: mean of 17 steps."
    (line,) = shown(found.svg, "curve c0")
    assert len(line.get("points").split()) == 589
    heights = {float(pair.split(",")[1]) for pair in line.get("points").split()}
    assert len(heights) == 2  # one group holds the step that is unlike the others, whose mean is 2
    (dot,) = shown(found.svg, "dot c1")
    assert min(heights) == pytest.approx(float(dot.get("cy")), abs=0.06)


def test_long_numbers_do_not_touch_the_axis_name() -> None:
    """The name stands in the first 16 units, each number left of the plot."""
    svg = draw_line_figure(
        "Loss", "", [Curve("training", [(1, 11.9381), (2, 11.9364), (3, 11.9371)])]
    ).svg
    numbers = [
        part for part in ElementTree.fromstring(svg).iter() if part.get("text-anchor") == "end"
    ]
    assert max(len(part.text or "") for part in numbers) >= 6
    assert all(float(part.get("x", "0")) - 6.6 * len(part.text or "") >= 16 for part in numbers)


def test_a_missing_value_breaks_the_line() -> None:
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, None), (6, 1.0), (7, 3.0)]
    svg = draw_line_figure("Loss", "", [Curve("loss", points)]).svg
    assert [len(line.get("points").split()) for line in shown(svg, "curve c0")] == [2, 1, 2]
    assert len(shown(svg, "dot c0")) == 2  # the lonely point, the last point


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e12, 1e-290, 1e290])
def test_a_constant_or_single_value_is_inside_the_picture(value: float) -> None:
    for points in ([(1, value)], [(1, value), (2, value)]):
        for from_zero in (False, True):
            (dot,) = shown(
                draw_line_figure("x", "", [Curve("x", points)], from_zero=from_zero).svg, "dot c0"
            )
            assert 0 < float(dot.get("cy")) < HEIGHT - 30 and 50 <= float(dot.get("cx")) <= WIDTH


def test_both_axes_have_their_names() -> None:
    curve = [Curve("x", [(1, 2.0), (9, 4.0)])]
    for unit, name in (("tokens per second", "tokens per second"), ("", "speed of light")):
        names = [
            part.text for part in shown(draw_line_figure("Speed of light", unit, curve).svg, "name")
        ]
        assert names == ["step", name]


def test_an_axis_is_logarithmic_from_a_decade_on_where_that_is_preferred() -> None:
    def middle(last: float, prefers_log: bool) -> float:
        """Where 2 is, between the height of the first value, 5, and that of the last."""
        curve = Curve("x", [(1, 5.0), (2, 2.0), (3, last)])
        (line,) = shown(draw_line_figure("x", "", [curve], prefers_log=prefers_log).svg, "curve c0")
        first, second, third = (float(pair.split(",")[1]) for pair in line.get("points").split())
        return (second - first) / (third - first)

    assert middle(0.05, True) == pytest.approx(math.log(5 / 2) / math.log(5 / 0.05), abs=0.002)
    for last, prefers_log in ((0.05, False), (1.0, True), (0.0, True), (-1.0, True)):
        assert middle(last, prefers_log) == pytest.approx(3 / (5 - last), abs=0.002)


def test_equal_factors_are_equal_distances_on_a_log_axis() -> None:
    points = [(step, 10.0**-step) for step in range(1, 6)]
    figure = draw_line_figure("Loss", "", [Curve("loss", points)], prefers_log=True)
    (line,) = shown(figure.svg, "curve c0")
    heights = [float(pair.split(",")[1]) for pair in line.get("points").split()]
    gaps = [later - earlier for earlier, later in zip(heights, heights[1:], strict=False)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.2) and gaps[0] > 20
    texts = [part.text for part in ElementTree.fromstring(figure.svg).iter("text")]
    assert {"0.1", "0.01", "0.001"} <= set(texts)


@pytest.mark.parametrize(
    "points", [[(1, 9.0), (2, 0.85)], [(1, 1e49), (2, 1e-50)], [(1, 1e200), (2, 1e-200)]]
)
def test_a_log_axis_has_some_numbers_and_not_many(points: list[tuple[int, float]]) -> None:
    figure = draw_line_figure("Loss", "", [Curve("loss", points)], prefers_log=True)
    numbers = [
        part
        for part in ElementTree.fromstring(figure.svg).iter("text")
        if part.get("text-anchor") == "end"
    ]
    assert 2 <= len(numbers) <= 7


def test_texts_are_escaped() -> None:
    svg = draw_line_figure(EVIL, EVIL, [Curve(EVIL, [(1, 1.0), (2, 100.0)])]).svg
    assert (
        "<script" not in svg and svg.count("&lt;script&gt;") == 4
    )  # the label has three, the axis one
    ElementTree.fromstring(svg)


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
    assert compute_ticks(low, high, most) == pytest.approx(expected)


def test_neighboring_ticks_differ() -> None:
    svg = draw_line_figure("x", "", [Curve("x", [(1, 1000001.0), (2, 1000002.0)])]).svg
    texts = [part.text for part in ElementTree.fromstring(svg).iter("text")]
    values = [text for text in texts if text.endswith("M")]
    assert len(set(values)) == len(values) == 3

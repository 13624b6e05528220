"""Charts: axes with names and round numbers, curves that break where there is no number, values under the pointer."""

import re
from xml.etree import ElementTree

import pytest

from recipe_lib.report.chart import HEIGHT, WIDTH, Chart, Curve, Scale, Tooltip, as_svg, line_figure, log_ticks, ticks

EVIL = "<script>'a' & \"b\"</script>"


def shown(svg: str, style: str) -> list[ElementTree.Element]:
    """The elements of a class."""
    return [part for part in ElementTree.fromstring(svg).iter() if part.get("class") == style]


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_extremes() -> None:
    points = [(step, 1.0) for step in range(1, 10_001)]
    points[5000] = (5001, 50.0)
    found = line_figure("Loss", "", [Curve("loss", points), Curve("validation", [(10_000, 2.0)])], from_zero=True)
    assert found.note == "Line: mean of 17 steps; band: their range."
    (line,) = shown(found.svg, "curve c0")
    assert len(line.get("points").split()) == 589
    (band,) = shown(found.svg, "band c0")  # the short curve has no band
    heights = {float(pair.split(",")[1]) for pair in band.get("points").split()}
    assert min(heights) < 0.2 * HEIGHT < 0.7 * HEIGHT < max(heights)
    assert not shown(found.svg, "band c1")


def test_long_numbers_do_not_touch_the_axis_name() -> None:
    """The name stands in the first 16 units, each number left of the plot."""
    svg = line_figure("Loss", "", [Curve("training", [(1, 11.9381), (2, 11.9364), (3, 11.9371)])]).svg
    numbers = [part for part in ElementTree.fromstring(svg).iter() if part.get("text-anchor") == "end"]
    assert max(len(part.text or "") for part in numbers) >= 6
    assert all(float(part.get("x", "0")) - 6.6 * len(part.text or "") >= 16 for part in numbers)


def test_a_missing_value_breaks_the_line() -> None:
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, None), (6, 1.0), (7, 3.0)]
    svg = line_figure("Loss", "", [Curve("loss", points)]).svg
    assert [len(line.get("points").split()) for line in shown(svg, "curve c0")] == [2, 1, 2]
    assert len(shown(svg, "dot c0")) == 2  # the lonely point, the last point


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e12, 1e-290, 1e290])
def test_a_constant_or_single_value_is_inside_the_picture(value: float) -> None:
    for points in ([(1, value)], [(1, value), (2, value)]):
        for from_zero in (False, True):
            (dot,) = shown(line_figure("x", "", [Curve("x", points)], from_zero=from_zero).svg, "dot c0")
            assert 0 < float(dot.get("cy")) < HEIGHT - 30 and 50 <= float(dot.get("cx")) <= WIDTH


def test_both_axes_have_their_names() -> None:
    curve = [Curve("x", [(1, 2.0), (9, 4.0)])]
    for unit, name in (("tokens per second", "tokens per second"), ("", "speed of light")):
        names = [part.text for part in shown(line_figure("Speed of light", unit, curve).svg, "name")]
        assert names == ["step", name]


def test_a_log_view_is_there_from_a_decade_on_and_for_any_loss() -> None:
    for last, is_decade in ((1.0, False), (0.41, True)):
        points = [(1, 5.0), (2, last)]
        loss, rate = (line_figure("x", "", [Curve("x", points)], prefers_log=preferred) for preferred in (True, False))
        assert loss.log and loss.log_first == is_decade
        assert bool(rate.log) == is_decade and not rate.log_first
    assert not line_figure("Loss", "", [Curve("loss", [(1, 5.0), (2, 5.0)])], prefers_log=True).log


def test_a_log_view_of_a_small_span_has_numbers() -> None:
    figure = line_figure("Loss", "", [Curve("loss", [(1, 1.9), (2, 1.1)])], prefers_log=True)
    ticks = [part.text for part in ElementTree.fromstring(figure.log).iter("text") if re.fullmatch(r"1\.\d", part.text)]
    assert len(ticks) >= 3


def test_equal_factors_are_equal_distances_in_a_log_view() -> None:
    points = [(step, 10.0**-step) for step in range(1, 6)]
    figure = line_figure("Loss", "", [Curve("loss", points)])
    (line,) = shown(figure.log, "curve c0")
    heights = [float(pair.split(",")[1]) for pair in line.get("points").split()]
    gaps = [later - earlier for earlier, later in zip(heights, heights[1:], strict=False)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.2) and gaps[0] > 20
    texts = [part.text for part in ElementTree.fromstring(figure.log).iter("text")]
    assert {"0.1", "0.01", "0.001"} <= set(texts)
    assert figure.note == ""


def test_what_a_log_axis_cannot_show_is_left_out_and_said() -> None:
    figure = line_figure("x", "", [Curve("x", [(1, 100.0), (2, 0.0), (3, -5.0), (4, 1.0), (5, 2.0)])])
    assert [len(line.get("points").split()) for line in shown(figure.log, "curve c0")] == [1, 2]
    assert figure.note == "On the log axis, values that are not above 0 are left out."
    only = line_figure("x", "", [Curve("x", [(1, 0.0), (2, -5.0)])])
    assert not only.log


def test_every_value_is_under_the_pointer() -> None:
    """A strip for each step, without gaps, that says the step and what each curve has there."""
    training = Curve("training", [(step, step / 7) for step in range(1, 41)])
    checked = Curve("validation", [(20, 3.25), (40, None)])
    svg = line_figure("Loss", "", [training, checked]).svg
    strips = shown(svg, "catch")
    assert len(strips) == 40
    ends = [(float(part.get("x")), float(part.get("x")) + float(part.get("width"))) for part in strips]
    assert all(first[1] == pytest.approx(second[0], abs=0.02) for first, second in zip(ends, ends[1:], strict=False))
    said = [[text.text for text in hit.iter("text")] for hit in shown(svg, "hit")]
    assert said[6] == ["step 7", "training 1"]
    assert said[19] == ["step 20", "training 2.85714", "validation 3.25"]
    assert said[39] == ["step 40", "training 5.71429"]


def test_many_steps_share_a_strip_that_says_their_range() -> None:
    svg = line_figure("Loss", "", [Curve("loss", [(step, float(step)) for step in range(1, 1001)])]).svg
    said = [[text.text for text in hit.iter("text")] for hit in shown(svg, "hit")]
    assert len(said) == 100
    assert said[0] == ["steps 1 to 10", "loss 5.5 (1 to 10)"]


def test_what_is_shown_under_the_pointer_stays_in_the_picture() -> None:
    chart = Chart(400, 200, "x", x=Scale("a", 0, 10, []), y=Scale("b", 0, 1, []))
    for at in (0, 100, 390, 400):
        chart.tooltips = [Tooltip(0, 400, at, [("", "w" * 20)])]
        (plate,) = shown(as_svg(chart), "plate")
        assert float(plate.get("x")) >= 0 and float(plate.get("x")) + float(plate.get("width")) <= 400


def test_texts_are_escaped() -> None:
    svg = line_figure(EVIL, EVIL, [Curve(EVIL, [(1, 1.0), (2, 100.0)])]).log
    assert "<script" not in svg and svg.count("&lt;script&gt;") >= 4
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
    assert ticks(low, high, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0.9, 12, [1, 2, 5, 10]),
        (0.003, 6.5, [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3]),
        (1e-6, 2, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]),
    ],
)
def test_log_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)
    assert len(log_ticks(1e-200, 1e200)) <= 7


def test_neighboring_ticks_differ() -> None:
    svg = line_figure("x", "", [Curve("x", [(1, 1000001.0), (2, 1000002.0)])]).svg
    texts = [part.text for part in ElementTree.fromstring(re.sub(r"<g .*</g>", "", svg, flags=re.DOTALL)).iter("text")]
    values = [text for text in texts if text.endswith("M")]
    assert len(set(values)) == len(values) == 3

"""The page of a plan: stands alone, is well formed, escapes what it is given, and its timeline
loses no peak.
"""

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from recipe_lib.plan.measured.receipts import format_receipt
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, Plan
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, STORAGE_KINDS, Storage, Trace
from recipe_lib.plan.views.report import (
    MOST_POINTS,
    draw_pipeline,
    draw_timeline,
    render_html,
    sample_points,
)
from recipe_lib.units import GIB, MIB, format_bytes
from tests.plan.made_receipts import build_receipt
from tests.plan.plans import LAYER, build_example_pipeline, build_example_plan, build_example_trace

EVIL = "<script>alert('a') & \"b\"</script>"


class Page(HTMLParser):
    """Checks that every tag is closed in order; collects tags, attributes, text; (level, bytes,
    text) of the tree.
    """

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.tree: list[tuple[int, int, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
        if (title := dict(attrs).get("title")) and dict(attrs).get("class") == "number":
            self.tree.append(
                (
                    self.open.count("details") - ("summary" in self.open),
                    int(title.split()[0].replace(",", "")),
                    "",
                )
            )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tree and not self.tree[-1][2] and self.open[-1] == "span":
            self.tree[-1] = (*self.tree[-1][:2], data)


def test_a_receipt_is_quoted_on_the_page():
    quote = format_receipt(build_receipt(config=EVIL))
    assert f"receipt{quote}" in re.sub(
        r"\n\s*", "", Page(render_html(build_example_plan(receipt=quote))).text
    )
    assert "receipt" not in Page(render_html(build_example_plan())).text


def test_the_page_stands_alone_and_is_well_formed():
    text = render_html(build_example_plan(pipeline=build_example_pipeline()), build_example_trace())
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "onclick", "onload"} & page.attributes
    assert not re.search(r"https?://|@import|url\(|javascript:", text)
    assert "prefers-color-scheme: dark" in text and "$" not in text
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)


def test_every_text_is_escaped():
    plan = spoilt(build_example_plan(pipeline=build_example_pipeline()))
    trace = build_example_trace()
    trace.phases[1] = EVIL
    text = render_html(plan, trace)
    page = Page(text)
    assert "script" not in page.tags and "<script" not in text
    assert page.text.count("alert('a')") > 20  # shown, not dropped


def spoilt(plan: Plan) -> Plan:
    """The same with markup for every text in it, nested ones too."""

    def change(value: object) -> object:
        if isinstance(value, str):
            return EVIL
        if isinstance(value, list):
            return [change(item) for item in value]
        if isinstance(value, dict):
            return {
                f"{name}{EVIL}" if name not in ("tokens", "source") else name: change(item)
                for name, item in value.items()
            }
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                entry.name: change(getattr(value, entry.name))
                for entry in dataclasses.fields(value)
            }
            return dataclasses.replace(value, **fields)
        return value

    changed = change(plan)
    assert isinstance(changed, Plan)
    return changed


def test_numbers_of_the_plan_are_shown():
    plan = build_example_plan()
    text = Page(render_html(plan)).text
    for peak in plan.heaviest.peaks:
        for size in (
            peak.active,
            peak.allocated,
            peak.reserved,
            peak.reserved_expandable,
            peak.host,
        ):
            assert format_bytes(size) in text
    for shown in (
        "FITS",
        "-50 % to +20 %",
        "all_gather",
        "model.layers.0-31",
        "memory.checkpointing=full",
        "Row length 512.",
    ):
        assert shown in text


def boxes(chart: str) -> list[tuple[float, float, float]]:
    """(x, y, width) of each box of a schedule."""
    found = [
        element
        for element in ElementTree.fromstring(chart)
        if element.get("class", "").startswith("box")
    ]
    return [tuple(float(element.attrib[name]) for name in ("x", "y", "width")) for element in found]  # type: ignore[misc]


def test_the_schedule_of_a_pipeline_is_drawn_to_scale():
    """A row for each rank, a box for each action, as wide as it is long, and the rank's wait left
    open.
    """
    pipeline = build_example_pipeline(ranks=2, micro_batches=3)
    text = render_html(build_example_plan(pipeline=pipeline))
    assert "schedule of the pipeline" in text and "idle 25.0%" in text and "layers 16-31" in text
    chart = draw_pipeline(pipeline).svg
    shown = boxes(chart)
    rows = sorted({y for _, y, _ in shown})
    assert [sum(y == row for _, y, _ in shown) for row in rows] == [6, 6]
    by_width = sorted(width for _, _, width in shown)
    assert by_width[-1] == pytest.approx(2 * by_width[0], rel=0.01)
    for row, wait in zip(rows, (0, 1), strict=True):
        first = min(x for x, y, _ in shown if y == row)
        assert first == pytest.approx(min(x for x, _, _ in shown) + wait * by_width[0], abs=0.1)
    assert chart.count('class="mark"') == 12
    assert chart.count("micro-batch 2, stage 1, backward, 2.00 s") == 1


def test_numbers_are_left_out_where_boxes_are_narrow():
    chart = draw_pipeline(build_example_pipeline(ranks=4, micro_batches=64)).svg
    assert chart.count('class="box') == 4 * 2 * 64
    assert 0 < chart.count('class="mark"') < 4 * 64
    assert (
        draw_pipeline(dataclasses.replace(build_example_pipeline(), seconds=None, spans=[])) is None
    )


@pytest.mark.parametrize("extra", [0, 3 * GIB])
def test_tree_adds_up(extra: int):
    plan = build_example_plan()
    plan.heaviest.peak.active += extra
    page = Page(render_html(plan))
    lines = page.tree
    assert lines[0][:2] == (0, plan.heaviest.peak.active)
    summed = 0
    for at, (level, num_bytes, text) in enumerate(lines):
        last = next(
            (below for below in range(at + 1, len(lines)) if lines[below][0] <= level), len(lines)
        )
        inside = [line for line in lines[at + 1 : last] if line[0] == level + 1]
        if inside:
            summed += 1
            assert num_bytes == sum(line[1] for line in inside)
            assert hundredths(text) == sum(hundredths(line[2]) for line in inside)
    assert summed > 5


def hundredths(text: str) -> int:
    return int(re.match(r"-?[\d,.]+", text)[0].replace(",", "").replace(".", ""))


def test_without_a_trace_there_is_no_timeline():
    assert "<svg" not in render_html(build_example_plan())
    assert "<svg" not in render_html(
        build_example_plan(), Trace(phases=["setup"], events=[(PHASE, 0)])
    )
    assert "<svg" in render_html(build_example_plan(), build_example_trace())


def test_groups_and_shapes_of_collectives_are_shown():
    text = Page(render_html(build_example_plan())).text
    assert "data_shard: ranks 0-3" in text and f"{LAYER // 8}, {LAYER // 2}" in text


def test_verdict_has_its_style():
    assert 'class="headline good"' in render_html(build_example_plan())
    assert 'class="headline bad"' in render_html(build_example_plan(verdict=DOES_NOT_FIT))


def test_few_events_are_all_points():
    trace = build_example_trace(steps=1, per_phase=5)
    shown, begins = sample_points(trace)
    assert [point.at for point in shown] == list(
        range(1, 18)
    )  # 5 + 5 + spike, its end, 5 ends; the host's are not there
    assert begins == {"setup": 0, "step": 5}
    assert all(sum(point.kinds) == point.total for point in shown)
    assert max(point.total for point in shown) == max(trace.find_active_peaks().values())
    assert shown[-1].kinds[STORAGE_KINDS.index("parameters")] == 5 * MIB == shown[-1].total


@pytest.mark.parametrize(("steps", "per_phase"), [(40, 740), (3, 333), (500, 60), (1, 1000)])
def test_many_events_keep_each_phase_s_peak(steps: int, per_phase: int):
    trace = build_example_trace(steps, per_phase)
    shown, begins = sample_points(trace)
    assert 100 < len(shown) <= MOST_POINTS
    assert all(first.at < second.at for first, second in pairwise(shown))
    assert all(sum(point.kinds) == point.total for point in shown)
    peaks = trace.find_active_peaks()
    assert max(point.total for point in shown if point.at <= begins["step"]) == peaks["setup"]
    assert max(point.total for point in shown if point.at > begins["step"]) == peaks["step"]
    # Each is what was alive at that event, worked out anew.
    alive, at, sums = 0, 0, [0]
    for kind, number in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += trace.storages[number].bytes * (1 if kind == ALLOC else -1)
            at += 1
            sums.append(alive)
    assert all(point.total == sums[point.at] for point in shown)


def test_many_short_phases_stay_within_the_points():
    trace = Trace(phases=[f"phase {number}" for number in range(300)])
    for phase in range(300):
        trace.events.append((PHASE, phase))
        for _ in range(20):
            trace.storages.append(Storage(MIB))
            trace.events += [(ALLOC, len(trace.storages) - 1), (FREE, len(trace.storages) - 1)]
    shown, begins = sample_points(trace)
    assert len(shown) <= MOST_POINTS and len(begins) == 300
    ElementTree.fromstring(draw_timeline(build_example_plan(), trace).svg)


def test_areas_are_stacked():
    """The top of the highest area at its highest is the peak, that of each lower kind the sum up to
    it.
    """
    trace = build_example_trace(steps=3, per_phase=20)
    chart = ElementTree.fromstring(draw_timeline(build_example_plan(), trace).svg)
    areas = {area.get("class"): area.get("d") for area in chart.iter("path")}
    assert set(areas) == {
        f"k{STORAGE_KINDS.index(kind)}" for kind in ("parameters", "activations", "logits")
    }
    base = float(re.match(r"M[\d.]+,([\d.]+)", areas["k0"])[1])
    height = {
        kind: base - min(map(float, re.findall(r"V([\d.]+)", path))) for kind, path in areas.items()
    }
    shown, _ = sample_points(trace)
    highest = max(point.total for point in shown)
    for kind, found in height.items():
        most = max(sum(point.kinds[: int(kind[1:]) + 1]) for point in shown)
        assert found / height[f"k{STORAGE_KINDS.index('logits')}"] == pytest.approx(
            most / highest, abs=0.002
        )


def test_the_limit_is_on_the_axis_or_said_to_be_above_it():
    """However far it is from the highest point; the note is true of what is drawn."""
    trace = build_example_trace()
    highest = max(trace.find_active_peaks().values())
    for times in (0.2, 0.9, 1.0, 1.7, 2.9, 3.2, 400.0):
        plan = build_example_plan()
        plan.device.usable = int(times * highest)
        figure = draw_timeline(plan, trace)
        chart = ElementTree.fromstring(figure.svg)
        limits = [line for line in chart.iter("line") if line.get("class") == "limit"]
        if times < 3:
            (line,) = limits
            (name,) = [
                text.text for text in chart.iter("text") if text.get("class") == "limit-name"
            ]
            (peak,) = [
                dot for dot in chart.iter("circle") if dot.get("r") == "3.5" and dot in list(chart)
            ]
            assert 60 <= float(line.get("y1")) <= 336 and name.startswith("usable ")
            assert (float(line.get("y1")) <= float(peak.get("cy"))) == (times >= 1)
            assert "Dashed across: the" in figure.note and "above this axis" not in figure.note
        else:
            assert not limits and "Dashed" not in figure.note
            assert figure.note.endswith(f"{times:,.0f} times the highest point: above this axis.")


def test_names_of_phases_stay_in_the_picture():
    """Also of one that begins at the right edge, and of three that begin at the left one."""
    trace = build_example_trace()
    for name in ("validation of all that is there", "save"):
        trace.phases.append(name)
        trace.events.append((PHASE, len(trace.phases) - 1))
        trace.storages.append(Storage(MIB))
        trace.events.append((ALLOC, len(trace.storages) - 1))
    chart = ElementTree.fromstring(draw_timeline(build_example_plan(), trace).svg)
    named = {
        text.text: float(text.get("x"))
        for text in chart.findall("text")
        if text.text in trace.phases
    }
    assert set(named) == set(trace.phases)
    assert all(0 <= x and x + 7 * len(name) <= 1000 for name, x in named.items())


def test_axes_have_their_names():
    figures = [
        draw_timeline(build_example_plan(), build_example_trace()),
        draw_pipeline(build_example_pipeline()),
    ]
    names = [
        [
            text.text
            for text in ElementTree.fromstring(figure.svg).iter("text")
            if text.get("class") == "name"
        ]
        for figure in figures
    ]
    assert names == [
        ["allocations and releases, in their order", "live on the device (GiB)"],
        ["planned time of the step"],
    ]


def test_wide_parts_scroll_in_their_own_box():
    """A phone's page is not wider than the phone: each table is in a box that scrolls, and no word
    is broken in one.
    """
    text = render_html(build_example_plan(pipeline=build_example_pipeline()), build_example_trace())
    assert text.count("<table") == text.count('<div class="scroll"><table') > 5
    assert text.count('<div class="view wide">') == 2
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert "overflow-wrap: anywhere" not in style and "word-break" not in style

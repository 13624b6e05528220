"""Two plans side by side: figures of both, and differences that can be worked out from them."""

import dataclasses
import re

import pytest

from recipe_lib.plan.plan_schema import DOES_NOT_FIT
from recipe_lib.plan.views.report import render_diff
from recipe_lib.units import GIB, MIB, Bytes, Seconds, format_bytes, format_change, format_duration
from tests.plan.plans import LAYER, LAYERS, build_example_plan


def rows(text: str) -> dict[str, list[str]]:
    """Section and name -> the cells beside it."""
    found, title = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            title = line
        elif line.strip() and not line.endswith("b - a"):
            name, *cells = re.split(r" {2,}", line.strip())
            found[f"{title}/{name}"] = cells
    return found


def changed():
    """Another plan: checkpointed, fewer ranks in its mesh's groups, no save phase."""
    plan = build_example_plan(verdict=DOES_NOT_FIT, ranks=2, overrides=[])
    plan.margin -= 20 * GIB
    rank = plan.heaviest
    plan.rank_plans = [
        dataclasses.replace(
            rank,
            peaks=[
                dataclasses.replace(peak, active=peak.active - GIB)
                for peak in rank.peaks
                if peak.phase != "save"
            ],
            alive=[alive for alive in rank.alive if alive.kind != "gathered"],
        )
    ]
    plan.communication = [row for row in plan.communication if row.operation != "reduce_scatter"]
    plan.time = dataclasses.replace(plan.time, step=4.5, total=None, calibrated=True)
    return plan


def test_figures_and_differences():
    first = build_example_plan()
    second = changed()
    found = rows(render_diff(first, second, width=100))
    assert found["verdict/verdict"] == ["fits", "does not fit", "changed"]
    assert found["verdict/margin"] == [
        format_bytes(first.margin),
        format_bytes(second.margin),
        "-20.00 GiB",
    ]
    assert (
        found["verdict/reserved"][2] == "+20.00 GiB" and found["verdict/outside torch"][2] == "none"
    )
    active = [plan.heaviest.peak.active for plan in (first, second)]
    step = [*map(format_bytes, active), "-1.00 GiB"]
    assert (
        found["peaks by phase, heaviest rank/step: active"]
        == step
        == found["live at the peak/active"]
    )
    save = format_bytes(first.heaviest.peaks[2].active)
    assert found["peaks by phase, heaviest rank/save: active"] == [save, "-", "-"]
    sent = LAYERS * (LAYER * 3 // 4)
    communication = "communication of a step, one rank/"
    assert found[f"{communication}all_gather, data_shard[4]: count"] == ["64", "64", "none"]
    assert found[f"{communication}reduce_scatter, data_shard[4]: count"] == ["32", "0", "-32"]
    assert found[f"{communication}all, one rank: wire"] == [
        format_bytes(3 * sent + 18), format_bytes(2 * sent + 18), format_change(Bytes(-sent))]  # fmt: skip
    assert found[f"{communication}all, all ranks: wire"] == [
        format_bytes(4 * (3 * sent + 18)),
        format_bytes(2 * (2 * sent + 18)),
        format_change(Bytes(-8 * sent - 36)),
    ]
    assert found["time of a step/step"] == ["4.00 s", "4.50 s", "+500.0 ms"]
    assert found["time of a step/run"] == ["1h06m", "-", "-"]
    assert found["time of a step/rates"] == ["not calibrated", "calibrated", "changed"]


def test_kinds_add_up_to_the_peak():
    first = build_example_plan()
    second = changed()
    found = rows(render_diff(first, second, width=100))
    names = [name for name in found if name.startswith("live at the peak/")]
    assert {"live at the peak/gathered", "live at the peak/rounded up to blocks"} < set(names)
    for at in range(3):
        *kinds, active = [in_bytes(found[name][at]) for name in names]
        assert sum(kinds) == pytest.approx(active, abs=0.01 * GIB * len(kinds))
    assert found["live at the peak/gathered"][1:] == ["0 B", f"-{format_bytes(LAYER)}"]


def in_bytes(text: str) -> float:
    if text == "none":
        return 0
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}[unit]


def test_equal_plans_differ_in_nothing():
    for name, cells in rows(render_diff(build_example_plan(), build_example_plan())).items():
        if len(cells) == 3:
            assert cells[0] == cells[1] and cells[2] == "none", name


def test_the_other_way_round_only_signs_change():
    here, there = (
        rows(render_diff(build_example_plan(), changed())),
        rows(render_diff(changed(), build_example_plan())),
    )
    signs = str.maketrans("+-", "-+")
    seen = set()
    for name, (a, b, difference) in (
        (name, cells) for name, cells in here.items() if len(cells) == 3
    ):
        seen.add(difference[0])
        back = difference if difference in ("none", "changed", "-") else difference.translate(signs)
        assert there[name] == [b, a, back], name
    assert seen >= {"+", "-", "n", "c"}


def test_plans_without_time_and_communication():
    bare = {"time": None, "communication": []}
    text = render_diff(build_example_plan(**bare), build_example_plan(**bare))
    assert "time of a step" not in text and "communication" not in text
    assert rows(render_diff(build_example_plan(), build_example_plan(time=None)))[
        "time of a step/step"
    ] == [
        "4.00 s",
        "-",
        "-",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit(width: int):
    text = render_diff(build_example_plan(overrides=["word " * 50]), changed(), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_signs_and_durations():
    assert [format_change(Bytes(size)) for size in (0, 5, -5, -2 * GIB)] == [
        "none",
        "+5 B",
        "-5 B",
        "-2.00 GiB",
    ]
    assert [format_change(Seconds(time)) for time in (0, 1.5, -0.0125, -90)] == [
        "none",
        "+1.50 s",
        "-12.5 ms",
        "-1m30s",
    ]
    assert [format_duration(time) for time in (0.0, 85e-6, 59.0, 3725)] == [
        "0.0 us",
        "85.0 us",
        "59.00 s",
        "1h02m",
    ]

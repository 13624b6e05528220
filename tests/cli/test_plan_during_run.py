"""The plan that `tune run` shows: whose figures are compared, and that it never costs a run
anything.
"""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe_lib.cli import plan_during_run
from recipe_lib.cli.launch import should_show_plan
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import PhasePeak
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.units import GIB
from tests.plan.plans import build_example_plan

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("words", "variable", "wanted"),
    [
        ([], None, True),
        ([], "off", False),
        (["--no-plan"], None, False),
        (["--plan"], "off", True),
        (["--no-plan", "--plan"], "off", True),
        (["--plan", "--no-plan"], None, False),
    ],
)
def test_whether_a_plan_is_shown(words, variable, wanted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(plan_during_run.PLAN_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(plan_during_run.PLAN_VARIABLE, variable)
    others = ["--nproc_per_node", "2", "recipe.py", "--config", "x", "a=--plan"]
    assert plan_during_run.take_choice([*words[:1], *others, *words[1:]]) == (others, wanted)


def test_steps_of_rank_0_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Other phases, though larger, are not in the peaks of metrics.jsonl; other ranks write
    none.
    """
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    peaks = [
        PhasePeak("load", 90, 91, 92, 93, 0),
        PhasePeak("first step", 30, 31, 42, 33, 0),
        PhasePeak("step", 40, 41, 38, 36, 0),
        PhasePeak("save", 80, 81, 82, 83, 0),
    ]
    first = dataclasses.replace(build_example_plan().rank_plans[0], peaks=peaks)
    other = dataclasses.replace(first, rank=3, peaks=[PhasePeak("step", 99, 99, 99, 99, 0)])
    plan = build_example_plan(rank_plans=[other, first])
    found = plan_during_run.collect_figures(plan)
    assert found["first"] == {"active": 40, "allocated": 41, "reserved": 42}
    assert (found["active"], found["allocated"], found["reserved"]) == (
        99,
        99,
        99,
    )  # shown: the heaviest
    (line,) = plan_during_run.format_comparison(
        found, {"memory_kind": "device", "peak_memory_active_gib": 50 / GIB}
    )
    assert line == "planned / measured: active 40 B / 50 B (-20.0%)"
    monkeypatch.setenv(ALLOCATORS[0], "max_split_size_mb:64, expandable_segments: True")
    assert plan_during_run.collect_figures(plan)["first"]["reserved"] == 36


def test_the_comparison_is_signed():
    planned = {"output_dir": "out", "active": 11 * GIB, "allocated": 9 * GIB, "reserved": 10 * GIB}
    measured = {f"peak_memory_{kind}_gib": 10.0 for kind in ("active", "allocated", "reserved")}
    (line,) = plan_during_run.format_comparison(planned, measured | {"memory_kind": "device"})
    assert (
        line
        == "planned / measured: active 11.00 GiB / 10.00 GiB (+10.0%), allocated 9.00 GiB / 10.00"
        " GiB (-10.0%), reserved 10.00 GiB / 10.00 GiB (+0.0%)"
    )
    (line,) = plan_during_run.format_comparison(planned, measured | {"memory_kind": "resident set"})
    assert "no comparison" in line
    assert "10.00" not in line
    (line,) = plan_during_run.format_comparison(
        planned | {"reserved": None}, measured | {"memory_kind": "device"}
    )
    assert line.endswith("allocated 9.00 GiB / 10.00 GiB (-10.0%)")
    assert (
        plan_during_run.format_comparison(
            planned, {"memory_kind": "device", "peak_memory_active_gib": None}
        )
        == []
    )


SETTINGS = PlanSettings(
    hardware=find_hardware("rtx4090"), sequence=PlannedSequence(512, "max_seq_len"), ranks=4
)


def test_the_line_says_what_it_was_planned_for():
    figures = plan_during_run.collect_figures(build_example_plan())
    own, other = (
        plan_during_run.describe(figures, SETTINGS, is_own_device=own) for own in (True, False)
    )
    assert own.startswith("plan: fits (4 x rtx4090): active ")
    assert "sequences of 512 tokens; a step 4.00s (uncalibrated)" in own
    assert other.startswith("plan: fits (4 x rtx4090, as there is no GPU here): active ")
    assert "a step" not in other
    assert "\n" not in own


def test_a_plan_of_one_step_says_that_it_is_rough():
    figures = plan_during_run.collect_figures(build_example_plan()) | {"is_short": True}
    assert " about " in plan_during_run.describe(figures, SETTINGS, is_own_device=True)


@pytest.fixture
def summary(tmp_path: Path):
    """Figures of a plan, and the summary of the run in its output folder."""
    (tmp_path / "summary.json").write_text(
        '{"memory_kind": "device", "peak_memory_active_gib": 2.0}', encoding="utf-8"
    )
    (tmp_path / "figures.json").write_text(
        f'{{"output_dir": "{tmp_path}", "active": {GIB}, "allocated": 1, "reserved": 1}}',
        encoding="utf-8",
    )
    return tmp_path / "figures.json"


@pytest.mark.parametrize(
    ("code", "began", "lines"), [(0, 0.0, 1), (3, 0.0, 1), (5, 0.0, 0), (2, 0.0, 0), (0, 100.0, 0)]
)
def test_a_run_that_failed_is_not_compared(
    summary: Path, code, began, lines, monkeypatch: pytest.MonkeyPatch
):
    """Nor is a summary that was there before."""
    said: list[str] = []
    monkeypatch.setattr(plan_during_run, "get_logger", lambda: SimpleNamespace(info=said.append))
    plan_during_run._compare(summary, time.time() + began if began else 0.0, code)
    assert said == ["planned / measured: active 1.00 GiB / 2.00 GiB (-50.0%)"] * lines


@pytest.mark.parametrize(
    ("flags", "rank", "speaks"),
    [([], None, True), (["--node-rank=1"], None, False), ([], "1", False)],
)
def test_one_process_shows_the_plan(flags, rank, speaks: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert should_show_plan(flags) == speaks

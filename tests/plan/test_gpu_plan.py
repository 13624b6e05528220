"""benchmarks/gpu_check.py plan without a GPU: cases, report, dry run. The replications: commands,
imitated stacks.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_plan
from benchmarks.gpu_plan import Job
from benchmarks.gpu_plan_cases import PlanCase
from benchmarks.gpu_plan_report import compute_errors, compute_quantile, summarize
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]
TINY = PlanCase("full", "demo", 4, 64)


def row(error: float, *, expandable: bool = False) -> dict[str, Any]:
    """One whose figures were all planned too high by a share."""
    measured = {"active": 2 * GIB, "allocated": 3 * GIB, "reserved": 4 * GIB}
    planned = {name: int(size * (1 + error)) for name, size in measured.items()}
    planned["reserved_expandable"] = planned.pop("reserved") if expandable else 1
    planned.setdefault("reserved", 1)
    return {
        "kind": "peaks",
        "case": dataclasses.asdict(TINY),
        "expandable": expandable,
        "planned": {STEADY: planned},
        "measured": {"peaks": {STEADY: measured}},
    }


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    device = {"type": "cuda", "name": "A Card", "memory_gib": 24, "driver": "1"}
    versions = dict.fromkeys(("torch", "python", "system"), "")
    return {
        "kind": "",
        "date": "",
        "command": "",
        "hardware": "",
        "device": device,
        "versions": versions,
        "rows": rows,
    }


def test_goals_are_met_or_missed() -> None:
    assert (
        compute_quantile([-0.4, 0.1, 0.2, -0.3], 0.5) == 0.2
        and compute_quantile([0.1], 0.95) == 0.1
    )
    good = [row(0.005, expandable=index % 2 == 1) for index in range(19)]
    assert {round(error, 6) for found in good for *_, error in compute_errors(found)} == {0.005}
    lines = summarize(report_of([*good, row(-0.5)]))
    assert lines[1].startswith(
        "allocated: 20 figures, half within 0.50%, 95 % within 0.50%, worst -50.00%"
    )
    assert lines[1].endswith("met") and lines[2].endswith("met") and len(lines) == 3
    lines = summarize(report_of([*good, row(-0.02), row(0.02)]))
    assert lines[1].endswith("MISSED") and lines[2].endswith("met")


def test_the_dry_run_compares_with_a_real_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_plan, "list_jobs", lambda gpu: [Job("peaks", TINY)])
    assert gpu_check.main(["plan", "--output", str(tmp_path)]) == 0
    assert "allocated: not measured" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gpu-plan-dry-run-cpu.json",
        "gpu-plan-dry-run-cpu.md",
    ]
    assert "Nothing was measured on a GPU" in (tmp_path / "gpu-plan-dry-run-cpu.md").read_text()
    (found,) = json.loads((tmp_path / "gpu-plan-dry-run-cpu.json").read_text())["rows"]
    assert [error for *_, error in compute_errors(found)] == [0, 0]
    assert found["planned"]["pinned"] < 100  # a few numbers
    pinning = found | {"planned": {"pinned": 3 * 2**20}, "measured": {"pinned": 4 * 2**20}}
    assert summarize(report_of([pinning]))[-1] == "pinned host memory: 1 runs, worst -25.00%"

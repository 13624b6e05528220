"""benchmarks/gpu_check.py times and benchmarks/cpu_and_cuda.py without a GPU: dry runs, cases,
verdicts, pages.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cpu_and_cuda, gpu_check, gpu_times
from benchmarks.cpu_and_cuda import DIFFERS, EQUAL, NOT_RUN, ONE_SIDE, REFUSED, judge_row
from benchmarks.gpu_plan_cases import PlanCase
from benchmarks.gpu_times import NOW
from tests.plan.apart import call_in_fork

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]


def test_a_dry_run_times_and_plans_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_times, "list_cases", lambda gpu: [PlanCase("full", "demo", 1, 16, "none")]
    )
    monkeypatch.setattr(gpu_times, "STEADY_STEPS", 1)
    assert gpu_check.main(["times", "--output", str(tmp_path)]) == 0
    names = [f"gpu-times-dry-run-cpu{end}" for end in ("-rates.json", ".json", ".md")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert "Nothing was measured on a GPU" in (tmp_path / names[2]).read_text()
    before = json.loads((tmp_path / names[1]).read_text())
    assert gpu_times.main(["--plan", str(tmp_path / names[1]), "--label", "again"]) == 0
    (row,) = json.loads((tmp_path / names[1]).read_text())["rows"]
    assert (
        row["seconds"] == before["rows"][0]["seconds"]
        and row["planned"]["again"] == row["planned"][NOW]
    )
    assert "## Planned again" in (tmp_path / names[2]).read_text()


# The same runs on the CPU and on CUDA


def row(
    losses: tuple[float, ...], others: tuple[float, ...], codes: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    sides = {
        name: {"code": code, "losses": list(found), "norms": [], "said": "error: no" * bool(code)}
        for name, code, found in zip(("cpu", "second"), codes, (losses, others), strict=True)
    }
    return {"name": "a | b", "words": ["x=1"], "tolerance": 1e-3, **sides}


def test_verdicts() -> None:
    assert (
        judge_row(row((2.0, 1.0), (2.0, 1.0009))) == EQUAL
        and judge_row(row((2.0, 1.0), (2.0, 1.002))) == DIFFERS
    )
    assert (
        judge_row(row((), (), (2, 2))) == REFUSED and judge_row(row((1.0,), (), (0, 2))) == ONE_SIDE
    )
    assert judge_row({"name": "late", "skipped": "no time left"}) == NOT_RUN


class Part:
    """A process of the harness, in a fork that has imported all already."""

    def __init__(self, command: list[str], **options: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "benchmarks.cpu_and_cuda"]
        self.code = call_in_fork(cpu_and_cuda.main, command[3:])

    def wait(self) -> int:
        """Return the exit code."""
        return self.code


def test_a_dry_run_compares_the_cpu_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_and_cuda, "subprocess", SimpleNamespace(Popen=Part))
    words = [
        "--second",
        "cpu",
        "--only",
        "full memory.mlp_tiles=3",
        "--processes",
        "1",
        "--output",
        str(tmp_path),
    ]
    assert cpu_and_cuda.main(words) == 0
    (found,) = json.loads((tmp_path / "cpu-and-cuda-dry-run-cpu.json").read_text())["rows"]
    assert judge_row(found) == EQUAL and found["cpu"]["losses"] == found["second"]["losses"]
    page = (tmp_path / "cpu-and-cuda-dry-run-cpu.md").read_text()
    assert "1 of 1 equal" in page and "a dry run" in page

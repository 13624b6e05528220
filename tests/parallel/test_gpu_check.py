"""benchmarks/gpu_check.py without a GPU: the dry run, and what it does when a case fails."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]


def test_the_dry_run_measures_and_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one process that it starts imports nothing that is not here already. Only this module's
    # `subprocess` is replaced: `platform.processor` starts a process by the real one.
    in_this_process = SimpleNamespace(
        run=lambda words, check: SimpleNamespace(returncode=gpu_check.main(words[2:]))
    )
    monkeypatch.setattr(gpu_check, "subprocess", in_this_process)
    assert gpu_check.main(["--output", str(tmp_path)]) == 0
    assert "speed, full, demo/0.5M, 1 x 32 tokens, full: " in capsys.readouterr().out
    text = (tmp_path / "gpu-check-dry-run-cpu.md").read_text()
    assert (
        "dry run, CPU" in text and f"torch {torch.__version__}" in text and "GPU check" not in text
    )
    report = json.loads((tmp_path / "gpu-check-dry-run-cpu.json").read_text())
    assert report["kind"] == "dry run, CPU" and len(report["cases"]) == 7
    memory = [entry["result"] for entry in report["cases"] if entry["case"]["kind"] == "memory"]
    assert [result["later_steps"]["kind"][:12] for result in memory] == ["resident set"] * 4
    for speed in [entry["result"] for entry in report["cases"][-2:]]:
        assert len(speed["losses"]) == len(speed["grad_norms"]) == 3
        assert speed["losses"][0] > speed["losses"][-1]  # the same batch each step
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gpu-check-dry-run-cpu.json",
        "gpu-check-dry-run-cpu.md",
        "gpu-streams-dry-run-cpu.json",
        "gpu-streams-dry-run-cpu.md",
    ]
    rows = json.loads((tmp_path / "gpu-streams-dry-run-cpu.json").read_text())["rows"]
    assert [row["ours"] for row in rows] == [{"faults": [], "waits": 1}] * 2
    assert not any({"sanitizer", "host"} & set(row) for row in rows)


def test_a_case_that_crashes_hangs_or_raises_spoils_no_other() -> None:
    assert gpu_check.run_apart(lambda: {"fine": True}, 30) == {"fine": True}
    assert gpu_check.run_apart(lambda: os._exit(11), 30) == {"failed": "process ended with 11"}
    assert gpu_check.run_apart(lambda: 1 // 0, 30) == {"failed": "process ended with 1"}  # type: ignore[arg-type,return-value]
    assert gpu_check.run_apart(lambda: time.sleep(30), 0.5) == {"failed": "not done after 0 s"}  # type: ignore[arg-type]

"""benchmarks/gpu_check.py without a GPU: the dry run, and what it does when a case fails."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_report
from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import build_meta
from tests.parallel.small_models import small_spec

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]


def test_the_dry_run_measures_and_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--output", str(tmp_path)]) == 0
    assert "speed, full, demo/0.5M, 1 x 32 tokens, full: " in capsys.readouterr().out
    text = (tmp_path / "gpu-check-dry-run-cpu.md").read_text()
    assert "dry run, CPU" in text and f"torch {torch.__version__}" in text and "GPU check" not in text
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


def test_the_gpu_plan_covers_what_is_asked() -> None:
    cases = gpu_check.plan(gpu=True)
    capped = [case for case in cases if case.kind == "memory" and case.capped]
    memory = {(case.ranks, case.sequence, case.wrapping) for case in capped if case.method == "full"}
    assert memory == {
        (ranks, sequence, wrapping)
        for ranks in (2, 4)
        for sequence in (512, 2048, 4096, 8192)
        for wrapping in ("layers", "memory_efficient")
    }
    assert [case.method for case in cases if case.kind == "speed"] == ["qlora", "lora", *["full"] * 3]
    assert {(case.method, case.preset, case.ranks, case.sequence) for case in capped if case.method != "full"} == {
        *((method, "llama3/8B", 1, sequence) for method in ("lora", "qlora") for sequence in (2048, 8192)),
        *(("qlora", "llama3/70B", ranks, sequence) for ranks in (2, 4) for sequence in (512, 4096)),
    }
    assert all("8B" in case.preset for case in cases if case.method == "full")


def test_flop_of_a_token() -> None:
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    for tied in (False, True):
        spec = small_spec(tied=tied)
        case = gpu_check.Case("speed", "small", sequence=10, batch_size=2)
        found = gpu_check.speed_of(case, spec, build_meta(spec, torch.float32), [9.0, 0.5, 0.5])
        assert found["flop_per_token"] == 6 * (3 * layer + 512 * 32) + 6 * 3 * 10 * 32
        assert found["tokens_per_second"] == 40
    model = build_meta(spec, torch.float32)
    add_adapters(model, LoraConfig(rank=2, target_modules=["q"], quantize_base="nf4"), torch.float32)
    found = gpu_check.speed_of(case, spec, model, [0.5, 0.5])
    assert found["flop_per_token"] == 4 * (3 * layer + 512 * 32) + 6 * 3 * 2 * (32 + 32) + 6 * 3 * 10 * 32


class NoRoom:
    """A recipe whose second step finds no memory left."""

    def __init__(self, recipe: Any):
        self.recipe, self.steps = recipe, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recipe, name)

    def train_step(self, batches: Any) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise torch.OutOfMemoryError("no room")
        return self.recipe.train_step(batches)


def test_running_out_of_memory_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_steps = gpu_check.run_steps
    monkeypatch.setattr(gpu_check, "run_steps", lambda case, cfg, recipe: run_steps(case, cfg, NoRoom(recipe)))
    case = gpu_check.Case("memory", "demo/0.5M", 32, "layers", ranks=4)
    result = gpu_check.run_apart(lambda: gpu_check.measure(case), 60)
    assert result["out_of_memory"] == "step 2" and "first_step" in result and result["at_failure"]["active"] > 0
    assert gpu_check.summarize(result) == "out of memory in step 2"
    report = {
        "kind": "dry run, CPU", "date": "", "command": "", "versions": dict.fromkeys(("torch", "python", "system"), ""),
        "device": {"type": "cpu"}, "cap_gib": 1, "cases": [{"case": dataclasses.asdict(case), "result": result}],
    }  # fmt: skip
    assert "| out of memory, step 2 |" in gpu_report.to_markdown(report)


def test_a_case_that_crashes_hangs_or_raises_spoils_no_other() -> None:
    assert gpu_check.run_apart(lambda: {"fine": True}, 30) == {"fine": True}
    assert gpu_check.run_apart(lambda: os._exit(11), 30) == {"failed": "process ended with 11"}
    assert gpu_check.run_apart(lambda: 1 // 0, 30) == {"failed": "process ended with 1"}  # type: ignore[arg-type,return-value]
    assert gpu_check.run_apart(lambda: time.sleep(30), 0.5) == {"failed": "not done after 0 s"}  # type: ignore[arg-type]


def test_the_dry_run_of_tensor_parallel(tmp_path: Path) -> None:
    assert gpu_check.main(["tensor", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "gpu-tensor-dry-run-cpu.json").read_text())["rows"]
    assert len(row["ways"]) == 3 and all(found["seconds"] > 0 for found in row["ways"].values())
    assert "dry run" in (tmp_path / "gpu-tensor-dry-run-cpu.md").read_text()

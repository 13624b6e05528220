"""metrics.jsonl and summary.json: valid JSON always, whole after a kill, cut back on resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.errors import StorageError
from recipe_lib.training.records import MetricsFile, build_step_metrics, read_metrics, write_summary
from recipe_lib.units import GIB
from tests.forked import call_forked

PEAK = {"active": 2 * GIB, "allocated": 3 * GIB, "reserved": 4 * GIB, "kind": "device"}


def line(step: int, **changes: Any) -> dict[str, Any]:
    given = {
        "step": step, "epoch": step / 10, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "seconds": 0.5,
        "label_tokens": 100, "total_tokens": 400, "devices": 2, "peak": PEAK,
    }  # fmt: skip
    return build_step_metrics(**(given | changes))


def written(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(entry, parse_constant=refuse) for entry in text.splitlines()]


def test_the_line_of_a_step_has_every_number_and_its_units() -> None:
    assert line(2) == {
        "step": 2, "epoch": 0.2, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3,
        "tokens_per_second": 800.0, "tokens_per_second_per_device": 400.0,
        "label_tokens": 100, "label_token_fraction": 0.25,
        "peak_memory_active_gib": 2.0, "peak_memory_allocated_gib": 3.0, "peak_memory_reserved_gib": 4.0,
        "memory_kind": "device", "seconds": 0.5, "tokens": 400,
    }  # fmt: skip
    assert line(1, seconds=0.0, total_tokens=0, label_tokens=0)["label_token_fraction"] == 0.0


def test_each_line_is_on_the_disk_once_appended(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        metrics.append(line(step))
        assert [entry["step"] for entry in written(tmp_path)] == list(range(1, step + 1))
    metrics.close()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append(line(1, loss=math.nan, grad_norm=math.inf))
    metrics.append({"step": 1, "nested": {"list": [1.0, -math.inf]}})
    first, second = written(tmp_path)
    assert first["loss"] is None and first["grad_norm"] is None and first["lr"] == 1e-3
    assert second["nested"] == {"list": [1.0, None]}


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in range(1, 6):
        metrics.append(line(step))
        metrics.append({"step": step, "validation_loss": 1.0})
    with open(metrics.path, "a") as file:
        file.write('{"step": 3, "loss": 0.1')  # what a kill within a write leaves
    metrics.truncate(3)
    metrics.append(line(4))
    assert [entry["step"] for entry in written(tmp_path)] == [1, 1, 2, 2, 3, 3, 4]
    assert written(tmp_path)[4]["loss"] == pytest.approx(5 / 3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_to_zero_starts_over_and_a_missing_file_is_fine(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.truncate(0)
    assert not metrics.path.exists()
    metrics.append(line(1))
    metrics.truncate(0)
    assert written(tmp_path) == []


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1}\n\xff\xfe\n[1]\n{"loss": 2}\n{"step": 2}\n'
    )
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2]


def test_a_kill_while_truncating_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe_lib import files

    metrics = MetricsFile(tmp_path)
    for step in (1, 2):
        metrics.append(line(step))
    before = metrics.path.read_bytes()

    def fail(operation: str, path: Path) -> None:
        if operation == "rename":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "before_operation", fail)
    with pytest.raises(KeyboardInterrupt):
        metrics.truncate(1)
    assert metrics.path.read_bytes() == before


def test_a_disk_that_refuses_is_one_line() -> None:
    metrics = MetricsFile(Path("/proc/self"))
    with pytest.raises(
        StorageError,
        match=(
            r"^/proc/self/metrics\.jsonl: .*(make the folder|make it writable), or choose another"
            r" place$"
        ),
    ):
        metrics.append(line(1))


def test_a_full_disk_is_one_line_and_cuts_no_line(tmp_path: Path) -> None:
    MetricsFile(tmp_path).append(line(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def append_on_a_full_disk() -> str:
        with pytest.raises(StorageError) as caught:
            MetricsFile(tmp_path).append(line(2))
        return str(caught.value)

    said = call_forked(append_on_a_full_disk, disk_bytes=len(before) + 9)
    assert (
        said.startswith(f"{tmp_path / 'metrics.jsonl'}: No space left on device (")
        and "free some space" in said
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_in_the_place_of_the_metrics_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: is a device, expected a regular file"):
        MetricsFile(tmp_path).append(line(1))


def test_the_summary_adds_up_the_run(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in range(1, 6):
        metrics.append(line(step, peak=PEAK | {"active": step * GIB}))
        metrics.append(
            {"step": step, "validation_loss": abs(step - 3) + 1.0, "validation_tokens": 7}
        )
    settings = {
        "seed": 42,
        "tokenizer": {"path": None},
        "note": "hf_0123456789abcdefghijABCDEFGHIJabcd",
        "lr": math.nan,
    }
    summary = write_summary(
        tmp_path, "done", settings, wall_seconds=9.5, total_steps=5, world_size=2
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    expected = {
        "status": "done", "steps": 5, "total_steps": 5, "first_loss": 5.0, "final_loss": 1.0,
        "final_validation_loss": 3.0, "best_validation_loss": 1.0, "tokens": 2000, "label_tokens": 500,
        "training_seconds": 2.5, "wall_seconds": 9.5, "peak_memory_active_gib": 5.0, "peak_memory_allocated_gib": 3.0,
        "peak_memory_reserved_gib": 4.0, "memory_kind": "device", "world_size": 2,
        "settings": {"seed": 42, "tokenizer": {"path": None}, "note": "[secret]", "lr": None},
    }  # fmt: skip
    assert {key: value for key, value in summary.items() if key != "versions"} == expected
    assert {"torch", "python", "tune-recipes"} <= set(summary["versions"])


def test_the_summary_of_a_run_that_never_stepped(tmp_path: Path) -> None:
    summary = write_summary(tmp_path, "stopped", {}, wall_seconds=1.0, total_steps=5, world_size=1)
    assert (
        summary["status"] == "stopped" and summary["steps"] == 0 and summary["final_loss"] is None
    )


def test_the_summary_of_a_run_that_diverged_has_no_final_loss(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append(line(1))
    metrics.append(line(2, loss=math.nan))
    summary = write_summary(tmp_path, "diverged", {}, wall_seconds=1.0, total_steps=5, world_size=1)
    assert summary["steps"] == 2 and summary["final_loss"] is None and summary["first_loss"] == 5.0

"""Measured peaks: on a CPU the resident set, on a device the allocator's numbers."""

from pathlib import Path

import pytest
import torch

from recipe_lib.memory import PeakMemory, peaks
from recipe_lib.units import MIB

SIZE = 200 * MIB


def touch(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


def test_the_resident_set_rises_with_a_tensor_and_is_reset() -> None:
    memory = PeakMemory(torch.device("cpu"))
    before = memory.read()
    assert before["active"] == before["allocated"] == before["reserved"] > 0
    held = touch(SIZE)
    during = memory.read()
    assert during["active"] - before["active"] > 0.9 * SIZE
    del held
    assert (
        abs(memory.read()["active"] - during["active"]) < 0.1 * SIZE
    )  # it is a peak (kept in per-core counters)
    memory.reset()
    after = memory.read()
    if after["kind"] == "resident set":
        assert after["active"] < during["active"] - 0.9 * SIZE
    else:
        assert after["kind"] == "resident set since start"


def test_without_proc_the_peak_since_the_start_is_said_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peaks, "_CLEAR", tmp_path / "absent" / "clear_refs")
    monkeypatch.setattr(peaks, "_STATUS", tmp_path / "absent" / "status")
    memory = PeakMemory(torch.device("cpu"))
    held = touch(SIZE)
    found = memory.read()
    assert found["kind"] == "resident set since start" and found["active"] > SIZE
    del held


class FakeDeviceModule:
    """An accelerator's module, as far as peaks go."""

    def __init__(self) -> None:
        self.peak = 7

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 0

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        kinds = {"active": 1, "allocated": 2, "reserved": 3}
        return {f"{kind}_bytes.all.peak": self.peak * factor for kind, factor in kinds.items()}


def test_a_devices_own_numbers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeDeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    memory = PeakMemory(torch.device("cuda", 0))
    assert memory.read() == {"active": 0, "allocated": 0, "reserved": 0, "kind": "device"}
    module.peak = 5
    assert memory.read() == {"active": 5, "allocated": 10, "reserved": 15, "kind": "device"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_peaks_of_a_gpu() -> None:
    memory = PeakMemory(torch.device("cuda", 0))
    before = memory.read()["active"]
    held = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    found = memory.read()
    assert (
        found["active"] - before == SIZE
        and found["reserved"] >= found["allocated"] >= found["active"] - before
    )
    del held

"""A dry run of the measurements on the CPU, what is read back, and files that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import HARDWARE, find_hardware
from recipe_lib.plan.measured import measure_rates as module
from recipe_lib.plan.measured.measure_rates import calibrate
from recipe_lib.plan.measured.rates_file import TINY_MATMULS, read_calibration
from recipe_lib.plan.timing.cost import compute_op_seconds
from recipe_lib.plan.tracing.trace import Op


def good() -> dict[str, Any]:
    return {
        "version": 1,
        "device": "NVIDIA GeForce RTX 4090",
        "dry_run": False,
        "torch": "2.13.0",
        "date": "2026-11-21",
        "matmul": {
            "bf16": [{"shape": [2, 3, 5], "rate": 7e13}, {"shape": [1, 1, 1], "rate": 3e13}]
        },
        "attention": 6e13,
        "bandwidth": 8e11,
        "host_seconds": 5e-6,
        "kernel_seconds": 2e-6,
        "link_bandwidth": None,
    }


def written(folder: Path, values: Any) -> Path:
    path = folder / "calibration.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_a_dry_run_on_the_cpu_can_be_read_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "_measure_seconds", lambda work, device: (work(), 0.001)[1]
    )  # one call each
    result = calibrate("cpu")
    path = written(tmp_path, result)
    assert (
        result["dry_run"] is True and result["device"] == "cpu" and result["link_bandwidth"] is None
    )
    read = read_calibration(path, find_hardware("cpu"))
    assert read.matmul["bf16"][0] == ((32, 32, 32), 2 * 32**3 / 0.001)
    assert read.attention == 14 * 2 * 64 * 64 * 32 / 0.001
    assert compute_op_seconds(
        Op("aten::mm", flops=2 * 32**3, dtype="bf16"), find_hardware("cpu"), read
    ) == pytest.approx(0.001)
    assert read.host_seconds > 0 and read.torch.startswith("2.")
    with pytest.raises(ConfigError, match="measured on 'cpu', the plan is for rtx4090"):
        read_calibration(path, HARDWARE["rtx4090"])
    with pytest.raises(ConfigError, match="measured on 'cpu', the plan is for 24GB"):
        read_calibration(path, find_hardware("24GB"))


def test_the_counted_attention_operations_are_torchs() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = (1, 2, 64, 32)
    counted = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(
        shape, shape, shape, shape
    )
    assert counted == 14 * 2 * 64 * 64 * 32


def test_a_time_is_that_of_one_call() -> None:
    import time

    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    seconds = module._measure_seconds(work, "cpu")
    assert seconds >= 0.002 and calls == 3 + 1 + 7


def test_sizes_come_in_order(tmp_path: Path) -> None:
    read = read_calibration(written(tmp_path, good()), HARDWARE["rtx4090"])
    assert read.matmul == {"bf16": (((1, 1, 1), 3e13), ((2, 3, 5), 7e13))}
    assert read.bandwidth == 8e11 and read.link_bandwidth is None


def test_a_size_of_memory_takes_any_card(tmp_path: Path) -> None:
    assert read_calibration(written(tmp_path, good()), find_hardware("24GB")).bandwidth == 8e11
    unknown = good() | {"device": "NVIDIA Something Else"}
    assert read_calibration(written(tmp_path, unknown), find_hardware("24GB")).bandwidth == 8e11
    with pytest.raises(ConfigError, match="'NVIDIA Something Else', the plan is for rtx4090"):
        read_calibration(written(tmp_path, unknown), HARDWARE["rtx4090"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "NVIDIA H200"}, "measured on 'NVIDIA H200', the plan is for rtx4090"),
        ({"version": 0}, "no calibration of version 1"),
        ({"bandwidth": 0}, "bandwidth is '0'; expected a positive number"),
        ({"bandwidth": "fast"}, "bandwidth is 'fast'"),
        ({"kernel_seconds": True}, "kernel_seconds is 'True'"),
        ({"host_seconds": float("inf")}, "host_seconds is 'inf'"),
        ({"link_bandwidth": -1}, "link_bandwidth is '-1'"),
        ({"attention": None}, "attention is 'None'"),
        ({"device": 3}, "device is no text"),
        ({"matmul": {}}, "matmul is no list"),
        ({"matmul": []}, "matmul is no list"),
        ({"matmul": {"bf16": []}}, "matmul is no list"),
        ({"matmul": {"bf16": [{"shape": [1, 1, 1]}]}}, "matmul is no list"),
        ({"matmul": {"bf16": [{"shape": [1, 1, "x"], "rate": 1.0}]}}, "matmul is no list"),
        ({"matmul": {"bf16": [{"shape": [1, 1, 1], "rate": -1.0}]}}, "matmul is no list"),
    ],
)
def test_files_that_are_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = written(tmp_path, good() | change)
    with pytest.raises(ConfigError) as caught:
        read_calibration(path, HARDWARE["rtx4090"])
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in good() if name not in ("version", "dry_run")])
def test_a_missing_key_is_named(name: str, tmp_path: Path) -> None:
    values = good()
    del values[name]
    with pytest.raises(ConfigError, match=f"lacks {name};"):
        read_calibration(written(tmp_path, values), HARDWARE["rtx4090"])


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "[" * 100_000])
def test_what_is_no_calibration(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read|is no calibration"):
        read_calibration(written(tmp_path, text), HARDWARE["rtx4090"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "absent.json", HARDWARE["rtx4090"])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path, HARDWARE["rtx4090"])
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="a byte that is not UTF-8 at 0"):
        read_calibration(tmp_path / "bytes.json", HARDWARE["rtx4090"])


class MovedBytes(TorchDispatchMode):
    """Counts operations of products, and bytes that all other operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in (*args, result) if isinstance(tensor, torch.Tensor)]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = tensors[-3:-1]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif not func.is_view and not any(tensor._is_view() for tensor in tensors[-1:]):
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def test_the_share_that_steps_reach_is_of_the_operations_and_bytes_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seconds that are what such products and bytes take at half of the rate give a half."""
    shape, rate, bandwidth = list(TINY_MATMULS[-1]), 1e9, 1e8

    def seconds(step: Callable[[], Any], device: str) -> float:
        with MovedBytes() as moved:
            step()
        return 2 * moved.flops / rate + moved.bytes / bandwidth

    monkeypatch.setattr(module, "_measure_seconds", seconds)
    assert module.measure_step_share(
        "cpu", [{"shape": shape, "rate": rate}], bandwidth
    ) == pytest.approx(0.5)


def test_the_optimizers_bytes_are_those_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read: weights, gradients and both states; written: all but gradients. Each is bf16."""

    def seconds(step: Callable[[], Any], device: str) -> float:
        step()
        optimizer = step.__self__  # type: ignore[attr-defined]
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        states = [
            state
            for tensor in tensors
            for name, state in optimizer.state[tensor].items()
            if name != "step"
        ]
        sizes = [2 * tensor.numel() for tensor in tensors]
        assert {tensor.dtype for tensor in (*tensors, *states)} == {torch.bfloat16} and len(
            states
        ) == 2 * len(sizes)
        return sum(sizes) * (4 + 3) / 1e6

    monkeypatch.setattr(module, "_measure_seconds", seconds)
    assert module.measure_optimizer_rate("cpu") == pytest.approx(1e6)


@pytest.mark.parametrize("name", ["step_share", "optimizer", "memory"])
def test_what_older_files_do_not_have(name: str, tmp_path: Path) -> None:
    assert getattr(read_calibration(written(tmp_path, good()), HARDWARE["rtx4090"]), name) is None
    assert (
        getattr(
            read_calibration(written(tmp_path, good() | {name: 0.5}), HARDWARE["rtx4090"]), name
        )
        == 0.5
    )
    with pytest.raises(ConfigError, match=f"{name} is '0'; expected a positive number"):
        read_calibration(written(tmp_path, good() | {name: 0}), HARDWARE["rtx4090"])

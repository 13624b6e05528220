"""Single operators of a CPU: lines through measured points, and the measuring itself on a step of known operators."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing import calibrate as measured
from recipe_lib.plan.timing.calibration import read_calibration
from recipe_lib.plan.timing.cost import OperatorTime, fit, launch_seconds, op_seconds
from recipe_lib.plan.trace import Op
from tests.plan.timing.test_calibrate import good


def test_a_line_is_found_again() -> None:
    line = OperatorTime(2e-6, 3e-11, 5e-10)
    points = [(flops, size, line.seconds(flops, size)) for flops, size in ((0, 10), (10**6, 10**4), (10**9, 10**5))]
    found = fit(points)
    assert [found.base, found.per_flop, found.per_byte] == pytest.approx([2e-6, 3e-11, 5e-10])
    assert found.seconds(10**8, 10**6) == pytest.approx(line.seconds(10**8, 10**6))


def test_no_number_of_a_line_is_below_zero() -> None:
    falling = fit([(0, 10, 3e-6), (0, 1000, 2e-6)])
    assert min(falling.base, falling.per_flop, falling.per_byte) >= 0 and falling.seconds(0, 10**6) > 0
    with pytest.raises(ValueError, match="no points"):
        fit([])


def test_the_operators_of_a_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.ones(8, 16), torch.ones(16, 4)

    def step() -> None:
        (left @ right).add_(1.0)

    def longer() -> None:
        step()
        step()

    monkeypatch.setattr(measured, "_step_seconds", {step: 10.0, longer: 40.0}.__getitem__)
    out = measured.measure_operators([(step, longer)])
    assert set(out["operators"]) == {"aten::mm fp32", "aten::add_ fp32"}
    alone = [OperatorTime(**one).seconds(2 * 8 * 16 * 4, 4 * 8 * 16) for one in out["operators"].values()]
    assert all(0 < seconds < 1 for seconds in alone)
    assert out["host_seconds"] == pytest.approx(10 / 2, abs=1)  # of two operators, which themselves take no second
    assert out["recompute_seconds"] == pytest.approx((40 - 10) / 2, abs=1)  # of the two that the longer step has more
    assert measured.measure_operators([(step, step)])["recompute_seconds"] is None


def test_a_file_with_operators_is_read_and_used(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    numbers = {"base": 1.0, "per_flop": 2.0, "per_byte": 3.0}
    path.write_text(json.dumps(good() | {"device": "cpu", "operators": {"aten::mm fp32": numbers}}))
    cpu = find_hardware("cpu")
    rates = read_calibration(path, cpu)
    assert op_seconds(Op("aten::mm", flops=10, bytes=100, dtype="fp32"), cpu, rates) == 1 + 20 + 300
    assert op_seconds(Op("aten::mm", flops=10, bytes=100, dtype="bf16"), cpu, rates) != 321
    for part, seconds in (("forward", rates.host_seconds), ("recompute", rates.host_seconds)):
        assert launch_seconds(Op("aten::mm", part=part), rates) == seconds
    more = dataclasses.replace(rates, recompute_seconds=2 * rates.host_seconds)
    assert launch_seconds(Op("aten::mm", part="recompute"), more) == 2 * launch_seconds(Op("aten::mm"), more)
    path.write_text(json.dumps(good() | {"device": "cpu", "operators": {"aten::mm fp32": {"base": -1.0}}}))
    with pytest.raises(ConfigError, match="operators is no table of base, per_flop and per_byte"):
        read_calibration(path, cpu)

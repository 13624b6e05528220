"""The warning of a type that the CPU is slow in."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.logs import get_logger
from recipe_lib.training import slow_dtype

LINE = (
    "warning: dtype=bf16 on this CPU, which has no instructions for it: matrices are multiplied at 200.0 MFLOP/s, in "
    "fp32 at 20.00 GFLOP/s; set dtype=fp32"
)


@pytest.mark.parametrize(
    ("dtype", "device", "is_main", "bf16", "warned"),
    [
        ("bf16", "cpu", True, 2e8, True),
        (
            "bf16",
            "cpu",
            True,
            4.1e9,
            False,
        ),  # slower than fp32, as on CPUs with few such units, and no reason to change
        ("fp32", "cpu", True, 2e8, False),
        ("bf16", "cuda", True, 2e8, False),
        ("bf16", "cpu", False, 2e8, False),
    ],
)
def test_who_is_warned(
    dtype: str, device: str, is_main: bool, bf16: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(slow_dtype, "product_speed", {torch.bfloat16: bf16, torch.float32: 2e10}.__getitem__)
    monkeypatch.setattr(get_logger(), "handle", said.append)
    world = cast(Any, SimpleNamespace(device=torch.device(device), is_main=is_main))
    slow_dtype.warn_of_slow_dtype(FullFinetuneConfig(dtype=dtype), world)
    assert [(record.levelno, record.getMessage()) for record in said] == [(logging.WARNING, LINE)] * warned


def test_the_speed_is_that_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two products, by a clock that goes on by 4 and by 2 seconds, the faster counts."""
    clock = iter([0.0, 4.0, 10.0, 12.0])
    monkeypatch.setattr(slow_dtype.time, "perf_counter", lambda: next(clock))
    assert slow_dtype.product_speed(torch.float32) == 2 * slow_dtype.SIZE**3 / 2.0

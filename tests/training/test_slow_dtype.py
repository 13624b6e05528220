"""The warning of a type that the CPU is slow in."""

import logging
import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.logs import get_logger
from recipe_lib.training import run as run_module
from tests.cli.commands import environment

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
    monkeypatch.setattr(run_module, "product_speed", {torch.bfloat16: bf16, torch.float32: 2e10}.__getitem__)
    monkeypatch.setattr(get_logger(), "handle", said.append)
    world = cast(Any, SimpleNamespace(device=torch.device(device), is_main=is_main))
    run_module.warn_of_slow_dtype(FullFinetuneConfig(dtype=dtype), world)
    assert [(record.levelno, record.getMessage()) for record in said] == [(logging.WARNING, LINE)] * warned


@pytest.mark.parametrize(("times", "best"), [([3, 2, 4, 5, 6, 7], 2), ([40, 2, 2, 2, 2, 2], 40)])
def test_the_speed_is_that_of_the_best_product(times: list[int], best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In thousandths of CPU seconds of the one thread that works; where the first ones take long, these are enough."""
    clock, threads = [0.0], torch.get_num_threads()
    left = iter([*times, 0])

    class Matrix:
        def __matmul__(self, other: object) -> None:
            assert torch.get_num_threads() == 1
            clock[0] += next(left) / 1000

    monkeypatch.setattr(run_module.torch, "ones", lambda *size, dtype: Matrix())
    monkeypatch.setattr(run_module.time, "thread_time", lambda: clock[0])
    assert run_module.product_speed(torch.float32) == pytest.approx(2 * run_module.SIZE**3 / (best / 1000))
    assert torch.get_num_threads() == threads


PROBE = """
import sys, time
import torch
from recipe_lib.training.run import product_speed
began = time.process_time()
missed = sum(product_speed(torch.bfloat16) * 5 >= product_speed(torch.float32) for _ in range(10))
print(missed, (time.process_time() - began) / 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variables are those of x86")
def test_a_busy_machine_hides_nothing() -> None:
    """A CPU without the instructions, whose cores all have something else to do."""
    variables = environment(
        ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2", OMP_NUM_THREADS=None, MKL_NUM_THREADS=None
    )
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        said = subprocess.run([sys.executable, "-c", PROBE], env=variables, capture_output=True, text=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert said.returncode == 0, said.stderr
    missed, seconds = said.stdout.split()
    assert int(missed) == 0
    assert float(seconds) < 0.2

"""The warning of a type that the CPU is slow in."""

import logging
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
from tests.cli.commands import build_environment

LINE = (
    "warning: dtype=bf16 on this CPU, which has no instructions for it: matrices are multiplied"
    " many times as slowly as in fp32; set dtype=fp32"
)


@pytest.mark.parametrize(
    ("dtype", "device", "is_main", "is_supported", "warned"),
    [
        ("bf16", "cpu", True, False, True),
        ("bf16", "cpu", True, True, False),
        ("fp32", "cpu", True, False, False),
        ("bf16", "cuda", True, False, False),
        ("bf16", "cpu", False, False, False),
    ],
)
def test_who_is_warned(
    dtype: str,
    device: str,
    is_main: bool,
    is_supported: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_supported)
    monkeypatch.setattr(get_logger(), "handle", said.append)
    world = cast(Any, SimpleNamespace(device=torch.device(device), is_main=is_main))
    run_module.warn_of_slow_dtype(FullFinetuneConfig(dtype=dtype), world)
    assert [(record.levelno, record.getMessage()) for record in said] == [
        (logging.WARNING, LINE)
    ] * warned


def test_a_torch_without_onednn_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    world = cast(Any, SimpleNamespace(device=torch.device("cpu"), is_main=True))
    run_module.warn_of_slow_dtype(FullFinetuneConfig(dtype="bf16"), world)


PROBE = """
import time
import torch

torch.set_num_threads(1)

def seconds(dtype):
    matrix, best = torch.ones(256, 256, dtype=dtype), float("inf")
    for _ in range(6):
        began = time.thread_time()
        matrix @ matrix
        best = min(best, time.thread_time() - began)
    return best

for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    has_it = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
    print(has_it, seconds(dtype) > 15 * seconds(torch.float32))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the variables are those of x86"
)
def test_it_is_slow_where_torch_says_that_it_has_no_instructions() -> None:
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    said = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=build_environment(**limit),
        capture_output=True,
        text=True,
        check=True,
    )
    for line in said.stdout.splitlines():
        has_it, is_slow = line.split()
        assert (has_it == "False") == (is_slow == "True"), said.stdout
    assert "True False" not in said.stdout

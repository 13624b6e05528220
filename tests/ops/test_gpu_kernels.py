"""`gpu_check.py kernels` without a GPU, and the Triton code that inductor generates without one."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks import gpu_kernels
from benchmarks.gpu_check import main
from benchmarks.triton_code import count_bytes, count_kernels, generate_triton_code
from tests.distributed.ranks import run_in_fork
from tests.ops.test_fused_kernels import CALLS

pytestmark = pytest.mark.benchmark


@run_in_fork
def test_other_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_kernels, "KERNELS", gpu_kernels.KERNELS[:1])
    monkeypatch.setattr(gpu_kernels, "CALLS", 3)
    monkeypatch.setattr(gpu_kernels.importlib.util, "find_spec", lambda name: None)
    compiled = gpu_kernels.fused_kernels.call_compiled
    monkeypatch.setattr(
        gpu_kernels.fused_kernels, "call_compiled", lambda *args: 1.1 * compiled(*args)
    )
    assert main(["kernels", "--output", str(tmp_path)]) == 1


NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed, which generates code for GPUs"
)


@NEEDS_TRITON
@run_in_fork
def test_triton_has_its_own_driver_again() -> None:
    """Kernels are measured by it afterwards."""
    from triton.runtime import driver

    before = driver._active
    _, function, _, arguments = CALLS[0]
    generate_triton_code(function.__wrapped__, *arguments)
    assert driver._active is before


@NEEDS_TRITON
@pytest.mark.parametrize("call", CALLS, ids=[call[0] for call in CALLS])
@run_in_fork
def test_a_gpu_has_one_kernel(call: tuple[Any, ...]) -> None:
    """NF4 has a second one, for the scales of blocks."""
    name, function, _, arguments = call
    code = generate_triton_code(function.__wrapped__, *arguments)
    found = function(*arguments)
    own = sum(one.nbytes for one in ([found] if isinstance(found, Tensor) else found))
    scales = 2 * len(arguments[0]) if name == "nf4" else 0
    assert count_kernels(code) == (2 if name == "nf4" else 1)
    assert count_bytes(code) == own + scales


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["capped_shares", "capped_score_gradients"])
@run_in_fork
def test_long_rows_of_scores_are_computed_again_and_not_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "SCORES", (1, 4, 64, 4096))
    (kernel,) = [one for one in gpu_kernels.KERNELS if one.name == name]
    assert gpu_kernels.measure_generated(kernel) == ("1", "0.00")

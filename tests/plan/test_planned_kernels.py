"""What a plan says of the kernels that it assumes: attention's by card and width of the heads."""

from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.plan.build_plan import list_assumptions
from recipe_lib.plan.tracing.trace import Op, Trace
from tests.plan.apart import build_settings

SDPA = "aten::_scaled_dot_product_flash_attention"
VARLEN = "torch_attn::_varlen_attn"
CUDNN = "; cudnn attention has its own times, and flash attention's workspace"


@pytest.mark.parametrize("operator", [SDPA, VARLEN])
@pytest.mark.parametrize(
    ("card", "width", "kernel"),
    [
        ("h200", 128, "cudnn"),
        ("h200", 256, "flash"),  # wider than cuDNN's, as Gemma's
        ("rtx4090", 128, "flash"),
        ("cpu", 128, "cpu"),
    ],
)
def test_the_kernel_of_attention_is_named(
    card: str, width: int, kernel: str, operator: str
) -> None:
    _, cfg, settings = build_settings(
        "llama3/8B_lora", 1, "data.source=examples/demo/train.jsonl", device=card
    )
    simulated: Any = SimpleNamespace(
        trace=Trace(ops=[Op("aten::mm"), Op(operator, shape=(64, 2048, 2048, 1024, width))]),
        notes=[],
        repeats=True,
        step_growth=0,
    )
    line = next(
        line for line in list_assumptions(cfg, settings, simulated) if line.startswith("kernels: ")
    )
    if kernel == "cpu":
        assert line.startswith("kernels: a CPU's; torch ")
        return
    assert line.startswith(
        f"kernels: {kernel} attention (with packed documents or windows: varlen flash), fused"
    )
    assert (CUDNN in line) == (kernel == "cudnn")

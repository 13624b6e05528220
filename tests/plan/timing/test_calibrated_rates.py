"""What measured rates stand for: which kernel, in a burst or in a run, and whose time, the device's
or the host's.
"""

from dataclasses import replace

import pytest

from recipe_lib.plan.hardware import HARDWARE, Hardware
from recipe_lib.plan.timing.cost import ATTENTION, Calibration, compute_op_seconds
from recipe_lib.plan.timing.kernel_rates import MULTIPROCESSORS, compute_bandwidth, get_run_share
from recipe_lib.plan.tracing.trace import Op

H100 = HARDWARE["h100"]
A100 = HARDWARE["a100-80gb"]
RTX4090 = HARDWARE["rtx4090"]
LARGE = (4096, 14336, 4096)
MIDDLE = (512, 4096, 4096)
SMALL = (512, 2048, 2048)
MEASURED = Calibration(
    device="NVIDIA H100 80GB HBM3",
    torch="2.13.0",
    date="2026-11-28",
    matmul={"bf16": ((SMALL, 3e14), (MIDDLE, 6e14), (LARGE, 7e14))},
    attention=9e14,
    bandwidth=2.9e12,
    host_seconds=8e-6,
    kernel_seconds=1e-6,
)
SDPA = "aten::_scaled_dot_product_flash_attention"
VARLEN = "aten::_flash_attention_forward"


def product(m: int, n: int, k: int) -> Op:
    return Op("aten::mm", flops=2 * m * n * k, dtype="bf16", shape=(1, m, k, n))


def attention(name: str, width: int = 128) -> Op:
    rows, heads, tokens, _ = ATTENTION
    return Op(
        name, flops=1, dtype="bf16", shape=(rows * heads, tokens, tokens, (tokens + 1) // 2, width)
    )


def rate(op: Op, hardware: Hardware, calibration: Calibration | None) -> float:
    return op.flops / compute_op_seconds(op, hardware, calibration)


def test_a_product_that_the_host_issued_no_faster_is_no_rate() -> None:
    """Its 14 us are those of two calls of Python; a product of that size is then planned by the
    next larger one.
    """
    without = replace(MEASURED, matmul={"bf16": MEASURED.matmul["bf16"][1:]})
    assert rate(product(*SMALL), H100, MEASURED) == rate(product(*SMALL), H100, without)
    fast_host = replace(MEASURED, host_seconds=2e-6)
    assert rate(product(*SMALL), H100, fast_host) == pytest.approx(get_run_share(H100) * 3e14)
    slow_host = replace(MEASURED, host_seconds=1.0)  # the largest is kept in any case
    assert rate(product(*LARGE), H100, slow_host) == pytest.approx(get_run_share(H100) * 7e14)


@pytest.mark.parametrize(
    ("name", "share"), [("h100", 0.9), ("rtx4090", 0.9), ("a100-80gb", 0.96), ("cpu", 1.0)]
)
def test_a_burst_is_taken_down_to_a_run_as_published_bursts_are(name: str, share: float) -> None:
    hardware = (
        H100
        if name == "h100"
        else replace(H100, name=name, architecture="cpu" if name == "cpu" else "sm90")
    )
    assert get_run_share(hardware) == share
    assert rate(product(*LARGE), hardware, MEASURED) == pytest.approx(share * 7e14)


@pytest.mark.parametrize("share", [0.8, 0.97])
def test_what_steps_reach_is_taken_where_it_was_measured(share: float) -> None:
    measured = replace(MEASURED, step_share=share)
    assert rate(product(*LARGE), H100, measured) == pytest.approx(share * 7e14)
    assert rate(product(*MIDDLE), H100, measured) == pytest.approx(share * 6e14)


@pytest.mark.parametrize("hardware", [H100, A100, RTX4090], ids=lambda card: card.name)
def test_measured_attention_is_that_of_the_kernel_that_torch_takes(hardware: Hardware) -> None:
    """On Hopper it is cuDNN's, which packed rows do not use; elsewhere both are flash attention."""
    for way in ("", "_backward"):
        padded, packed = (
            attention(SDPA + way),
            attention(VARLEN.replace("_forward", way or "_forward")),
        )
        ratio = [
            compute_op_seconds(op, hardware, MEASURED) / compute_op_seconds(op, hardware)
            for op in (padded, packed)
        ]
        assert ratio[0] != pytest.approx(1.0)
        assert ratio[1] == pytest.approx(1.0 if hardware is H100 else ratio[0])


@pytest.mark.parametrize(
    ("width", "cudnn"), [(64, True), (128, True), (120, True), (256, False), (100, False)]
)
def test_hopper_takes_cudnns_attention_for_the_widths_it_has(width: int, cudnn: bool) -> None:
    padded, packed = (compute_op_seconds(attention(name, width), H100) for name in (SDPA, VARLEN))
    assert (padded < 0.8 * packed) == cudnn
    assert compute_op_seconds(attention(SDPA, width), A100) == compute_op_seconds(
        attention(VARLEN, width), A100
    )


def test_fused_adamw_moves_what_its_kernel_can() -> None:
    """Llama 2 7B in bf16 took 49.9 ms on an H100; of other architectures no time is known but the
    memory's.
    """
    step = Op("aten::_fused_adamw_", part="optimizer", bytes=14 * 6_738_415_616, dtype="bf16")
    assert compute_op_seconds(step, H100) == pytest.approx(0.0499, rel=0.01)
    assert compute_op_seconds(step, HARDWARE["h200"]) == compute_op_seconds(
        step, H100
    )  # as many multiprocessors
    assert compute_op_seconds(step, H100, MEASURED) == compute_op_seconds(step, H100)
    assert compute_op_seconds(step, H100, replace(MEASURED, optimizer=2.5e12)) == pytest.approx(
        step.bytes / 2.5e12
    )
    addition = replace(step, name="aten::add")
    for card in HARDWARE.values():
        seconds, bound = (
            compute_op_seconds(step, card),
            compute_bandwidth(card, step.bytes) / MULTIPROCESSORS[card.name],
        )
        assert seconds >= compute_op_seconds(addition, card)
        assert (seconds > compute_op_seconds(addition, card)) == (
            card.architecture == "sm90" and bound > 14.4e9
        ), card.name

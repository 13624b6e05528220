"""Times by closed formulas: bytes of rings, latency plus bandwidth, rooflines, MFU."""

from dataclasses import replace

import pytest

from recipe_lib.plan.hardware import HARDWARE, find_hardware
from recipe_lib.plan.timing.cost import (
    ATTENTION,
    COLLECTIVE_SECONDS,
    KERNEL_SECONDS,
    Calibration,
    compute_collective_seconds,
    compute_launch_seconds,
    compute_matmul_rate,
    compute_model_flops_utilization,
    compute_op_seconds,
    count_model_flops,
    count_wire_bytes,
    describe_error,
)
from recipe_lib.plan.tracing.trace import OP, PHASE, Collective, Op, Trace

RTX4090 = HARDWARE["rtx4090"]
H100 = HARDWARE["h100"]
MEASURED = Calibration(
    device="NVIDIA H100 80GB HBM3",
    torch="2.13.0",
    date="2026-11-21",
    matmul={"bf16": (((1, 5 * 10**8, 1), 1e14), ((1, 5 * 10**10, 1), 5e14))},
    attention=3e14,
    bandwidth=2e12,
    host_seconds=5e-6,
    kernel_seconds=2e-6,
    link_bandwidth=100e9,
)


def test_a_compiled_operator_takes_the_host_longer() -> None:
    plain, fused = Op("aten::mul"), Op("tune_recipes::rotate")
    assert (
        compute_launch_seconds(plain)
        < compute_launch_seconds(fused)
        == compute_launch_seconds(fused, MEASURED)
    )
    assert compute_launch_seconds(plain, MEASURED) == MEASURED.host_seconds


def ring(operation: str, num_bytes: int, ranks: int, first: int = 0, stride: int = 1) -> Collective:
    return Collective(
        operation, "world", tuple(range(first, first + ranks * stride, stride)), num_bytes
    )


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("all_gather", 750),
        ("reduce_scatter", 750),
        ("all_to_all", 750),
        ("all_reduce", 1500),
        ("broadcast", 1000),
    ],
)
def test_wire_bytes_of_four_ranks(operation: str, expected: int) -> None:
    assert count_wire_bytes(operation, 1000, 4) == expected
    assert count_wire_bytes(operation, 1000, 1) == 0


def test_wire_bytes_of_messages_and_of_nonsense() -> None:
    assert count_wire_bytes("send", 1000, 2) == count_wire_bytes("recv", 1000, 8) == 1000
    with pytest.raises(ValueError, match="unknown collective barrier"):
        count_wire_bytes("barrier", 1, 2)


def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_do() -> None:
    for ranks in (2, 3, 4, 8, 64):
        size = 1024 * ranks
        halves = count_wire_bytes("reduce_scatter", size, ranks) + count_wire_bytes(
            "all_gather", size, ranks
        )
        assert count_wire_bytes("all_reduce", size, ranks) == halves


def test_latency_of_steps_plus_bandwidth() -> None:
    size = 4 * 10**9
    link = RTX4090.link
    expected = COLLECTIVE_SECONDS + 3 * link.latency + 3 * 10**9 / link.bandwidth
    assert compute_collective_seconds(ring("all_gather", size, 4), RTX4090) == pytest.approx(
        expected
    )
    assert compute_collective_seconds(ring("send", size, 2), RTX4090) == pytest.approx(
        COLLECTIVE_SECONDS + link.latency + size / link.bandwidth
    )
    assert compute_collective_seconds(ring("all_gather", size, 1), RTX4090) == 0


def test_a_small_all_reduce_takes_a_tree() -> None:
    eight = compute_collective_seconds(ring("all_reduce", 8, 8), H100)
    assert eight == pytest.approx(
        COLLECTIVE_SECONDS + 6 * H100.link.latency, rel=1e-4
    )  # up and down three levels
    two = compute_collective_seconds(ring("all_reduce", 8, 2), H100)
    assert two == pytest.approx(COLLECTIVE_SECONDS + 2 * H100.link.latency, rel=1e-4)


def test_full_sharding_of_8b_without_p2p_is_bound_by_traffic() -> None:
    """Llama 3 8B has 8,030,261,248 parameters; two gathers and a reduce-scatter in bf16, 3/4 of
    them on the wire.
    """
    size = 2 * 8_030_261_248
    step = sum(
        compute_collective_seconds(ring(name, size, 4), RTX4090)
        for name in ["all_gather"] * 2 + ["reduce_scatter"]
    )
    assert step == pytest.approx(3 * 3 / 4 * size / 10e9, rel=1e-3)


def test_groups_across_machines_use_the_cards_of_their_ranks() -> None:
    size = 16 * 10**9
    everyone = compute_collective_seconds(ring("all_gather", size, 16), H100)
    one_each = compute_collective_seconds(ring("all_gather", size, 2, stride=8), H100)
    assert everyone == pytest.approx(
        size * 15 / 16 / min(8 * H100.inter_node_bandwidth, H100.link.bandwidth), rel=0.01
    )
    assert one_each == pytest.approx(size / 2 / H100.inter_node_bandwidth, rel=1e-3)
    inside = compute_collective_seconds(ring("all_gather", 2, 2), H100)
    across = compute_collective_seconds(ring("all_gather", 2, 2, stride=8), H100)
    assert across - inside == pytest.approx(H100.inter_node_latency - H100.link.latency, rel=1e-3)
    wide = replace(H100, ranks_per_node=16)
    assert compute_collective_seconds(ring("all_gather", size, 2, stride=8), wide) < one_each


def test_roofline() -> None:
    matmul = Op("aten::mm", flops=10**15, bytes=10**6, dtype="bf16")
    assert compute_op_seconds(matmul, H100) == pytest.approx(
        1e15 / compute_matmul_rate(H100, "bf16", ())
    )
    assert compute_op_seconds(replace(matmul, dtype="fp32"), H100) > 10 * compute_op_seconds(
        matmul, H100
    )
    assert compute_op_seconds(replace(matmul, dtype=""), H100) == compute_op_seconds(
        replace(matmul, dtype="fp32"), H100
    )
    add = Op("aten::add", bytes=10**12, dtype="bf16")
    assert compute_op_seconds(add, H100) == pytest.approx(1e12 / (0.85 * H100.bandwidth))
    assert compute_op_seconds(Op("aten::add", bytes=8), H100) == KERNEL_SECONDS
    assert compute_op_seconds(Op("aten::empty"), H100) == 0
    assert compute_op_seconds(Op("_c10d_functional::wait_tensor", bytes=10**12), H100) == 0
    gather = ring("all_gather", 10**9, 4)
    assert compute_op_seconds(
        Op("c10d::gather", bytes=9, collective=gather), H100
    ) == compute_collective_seconds(gather, H100)


def test_measured_rates_replace_the_datasheets() -> None:
    def rate(size: int, dtype: str = "bf16") -> float:
        shape = (1, 4096, size // 4096, 4096)
        op = Op("aten::mm", flops=2 * 4096 * 4096 * (size // 4096), dtype=dtype, shape=shape)
        return op.flops / compute_op_seconds(op, H100, measured)

    square = (4096, 4096, 4096)
    twice = 2 * compute_matmul_rate(H100, "bf16", (1, *square))
    measured = replace(MEASURED, matmul={"bf16": ((square, twice),)}, step_share=1.0)
    assert rate(4096 * 4096) == pytest.approx(twice)  # the shape that was measured
    assert rate(4096 * 8192) == pytest.approx(
        2 * compute_matmul_rate(H100, "bf16", (1, 4096, 8192, 4096))
    )  # others by as much
    assert rate(4096 * 4096, "fp32") == pytest.approx(
        2 * compute_matmul_rate(H100, "fp32", (1, *square))
    )
    growing = replace(measured, matmul={"bf16": (((1, 1, 1000), 1.0), ((1, 1, 100_000), 3.0))})
    ends = [
        one / compute_matmul_rate(H100, "bf16", (1, 1, k, 1))
        for one, k in ((1.0, 1000), (3.0, 100_000))
    ]
    half_way = Op("aten::mm", flops=20_000, dtype="bf16")  # on the logarithm of size
    expected = 20_000 / (compute_matmul_rate(H100, "bf16", ()) * sum(ends) / 2)
    assert compute_op_seconds(half_way, H100, growing) == pytest.approx(expected)


def test_measured_attention_scales_the_datasheets() -> None:
    rows, heads, tokens, width = ATTENTION
    shape = (rows * heads, tokens, tokens, (tokens + 1) // 2, width)
    name = "aten::_scaled_dot_product_flash_attention"
    ops = [Op(name + way, flops=1, dtype="bf16", shape=shape) for way in ("", "_backward")]
    together = sum(compute_op_seconds(op, H100, MEASURED) for op in ops)
    # as torch's flop counter counts: every score, twice forward and five times backward
    assert 14 * rows * heads * tokens**2 * width / together == pytest.approx(MEASURED.attention)


def test_measured_bandwidth_and_links() -> None:
    assert compute_op_seconds(Op("aten::add", bytes=2 * 10**12), H100, MEASURED) == pytest.approx(
        1.0
    )
    assert compute_op_seconds(Op("aten::add", bytes=1), H100, MEASURED) == 2e-6
    gather = ring("all_gather", 2 * 10**11, 2)
    assert compute_collective_seconds(gather, H100, MEASURED) == pytest.approx(1.0, rel=1e-3)
    unmeasured = replace(MEASURED, link_bandwidth=None)
    assert compute_collective_seconds(gather, H100, unmeasured) == compute_collective_seconds(
        gather, H100
    )


def test_mfu_leaves_recomputation_out() -> None:
    parts = {"forward": 2, "recompute": 2, "backward": 4, "optimizer": 1}
    ops = [Op("aten::mm", part=part, flops=flops * 10**14) for part, flops in parts.items()]
    other = Op("aten::mm", part="forward", flops=10**20)
    events = [(PHASE, 0), *((OP, number) for number in range(4)), (PHASE, 1), (OP, 4)]
    trace = Trace(ops=[*ops, other], phases=["step", "validation"], events=events)
    flops = count_model_flops(trace, "step")
    assert flops == 6 * 10**14
    assert compute_model_flops_utilization(flops, 1.0, H100) == pytest.approx(
        6e14 / H100.flops["bf16"]
    )
    assert compute_model_flops_utilization(flops, 0.0, H100) == 0.0


def test_errors_are_told() -> None:
    assert "25 %" in describe_error(H100, None)
    assert all(
        words in describe_error(find_hardware("24GB"), None)
        for words in ("rtx3090", "ranking only")
    )
    assert "15 %" in describe_error(H100, MEASURED) and "links" not in describe_error(
        H100, MEASURED
    )
    assert "links were not measured" in describe_error(H100, replace(MEASURED, link_bandwidth=None))

"""Times by kind against sums by hand."""

import pytest

from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.timing.cost import compute_op_seconds
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    MATMULS,
    MEMORY_BOUND,
    count_launched_operators,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.trace import OP, PHASE, Collective, Op, Trace

CARD = HARDWARE["h100"]


def traced(*ops: Op) -> Trace:
    trace = Trace(phases=["step"], ops=list(ops))
    trace.events = [(PHASE, 0), *((OP, number) for number in range(len(ops)))]
    return trace


def test_each_operator_counts_for_its_kind_as_often_as_it_stands_for() -> None:
    ops = {
        MATMULS: Op("aten::mm", flops=10**13, bytes=10**8, dtype="bf16", repeats=3),
        ATTENTION: Op(
            "aten::_scaled_dot_product_flash_attention", flops=10**12, bytes=10**7, dtype="bf16"
        ),
        MEMORY_BOUND: Op("aten::mul", bytes=10**9, module="model.layers.1.mlp"),
        COPIES: Op("aten::copy_", bytes=10**9, transfer="to_host"),
        COMMUNICATION: Op(
            "c10d::x", collective=Collective("all_gather", "data_shard", (0, 1), 10**9)
        ),
    }
    more = Op("aten::silu", bytes=2 * 10**9, module="model.layers.2.mlp", repeats=2)
    nothing = Op("_c10d_functional::wait_tensor"), Op("aten::empty")
    trace = traced(*ops.values(), more, *nothing, Op("aten::add_", bytes=10**8, part="optimizer"))
    found = sum_time_by_kind(trace, "step", CARD)
    for kind in (MATMULS, ATTENTION, COPIES, COMMUNICATION):
        assert found[kind] == pytest.approx(ops[kind].repeats * compute_op_seconds(ops[kind], CARD))
    # 1, 2 and 2 GB, and 0.1 GB of the optimizer's, at 0.85 of 3350 GB/s.
    assert found[MEMORY_BOUND] == pytest.approx(5.1 / (0.85 * 3350))
    assert (
        count_launched_operators(trace, "step") == 3 + 1 + 1 + 1 + 1 + 2 + 1 + 1
    )  # waits are none
    # 30 TFLOP of matmuls, 1 TFLOP of attention whose shape is not known.
    useful = (30 / 0.73 + 1) / 989.4
    assert found[MATMULS] + found[ATTENTION] == pytest.approx(useful, rel=1e-6)

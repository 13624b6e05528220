"""Times of matmuls over the rows of experts, by hand: one kernel or a loop, even loads or a few
experts with all.
"""

from dataclasses import replace

import pytest

from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.timing.cost import (
    HOST_SECONDS,
    KERNEL_SECONDS,
    compute_launch_seconds,
    compute_op_seconds,
    count_issued_matmuls,
    is_grouped,
    set_loads,
)
from recipe_lib.plan.timing.kernel_rates import compute_tile_share
from recipe_lib.plan.timing.stream_schedule import MATMULS, classify_op, schedule
from recipe_lib.plan.tracing.trace import OP, PHASE, Op, Trace

EXPERTS = 128
ROWS = 128
WIDTH = 2048
INNER = 768
ELEMENTS = ROWS * WIDTH + WIDTH * INNER + ROWS * INNER
FORWARD = Op(
    "aten::_grouped_mm", flops=2 * EXPERTS * ROWS * WIDTH * INNER, bytes=2 * EXPERTS * ELEMENTS, dtype="bf16",
    shape=(EXPERTS, ROWS, WIDTH, INNER, 1),
)  # fmt: skip
WEIGHTS = replace(FORWARD, shape=(EXPERTS, WIDTH, ROWS, INNER, 2))
CHOICES = 8


def test_it_is_a_matmul_and_attention_is_none() -> None:
    assert classify_op(FORWARD) == MATMULS and is_grouped(FORWARD)
    assert not is_grouped(Op("aten::_flash_attention_forward", shape=(1, 2, 3, 4, 5)))


def test_hopper_has_one_kernel_and_others_a_matmul_for_each_expert() -> None:
    hopper, ada = HARDWARE["h100"], HARDWARE["rtx4090"]
    assert (
        count_issued_matmuls(FORWARD, hopper.architecture) == 0
        and count_issued_matmuls(FORWARD, "cpu") == 0
    )
    assert count_issued_matmuls(FORWARD, ada.architecture) == EXPERTS
    for other in (
        replace(FORWARD, dtype="fp32"),
        replace(FORWARD, name="tune_recipes::grouped_matmul_loop"),
    ):
        assert count_issued_matmuls(other, hopper.architecture) == EXPERTS
    assert compute_launch_seconds(FORWARD, None, hopper.architecture) == HOST_SECONDS
    assert compute_launch_seconds(FORWARD, None, ada.architecture) == (1 + EXPERTS) * HOST_SECONDS
    one = Op(
        "aten::mm", flops=FORWARD.flops // EXPERTS, bytes=FORWARD.bytes // EXPERTS, dtype="bf16"
    )
    assert (
        compute_op_seconds(FORWARD, ada)
        >= EXPERTS * compute_op_seconds(one, ada)
        >= EXPERTS * KERNEL_SECONDS
    )


def test_weights_that_are_read_bound_a_kernel_of_few_rows() -> None:
    few = replace(FORWARD, flops=FORWARD.flops // ROWS, shape=(EXPERTS, 1, WIDTH, INNER, 1))
    seconds = compute_op_seconds(few, HARDWARE["h100"])
    assert seconds == pytest.approx(few.bytes / (0.85 * HARDWARE["h100"].bandwidth))


def test_few_rows_share_the_inner_dimension_among_multiprocessors() -> None:
    alone, shared = (
        compute_tile_share(1, ROWS, WIDTH, INNER, 128, splits) for splits in (False, True)
    )
    assert shared > 2 * alone
    assert compute_tile_share(1, 8192, 8192, 8192, 128, True) == compute_tile_share(
        1, 8192, 8192, 8192, 128
    )


def test_where_a_few_experts_have_all_rows_no_other_weights_are_read() -> None:
    found = set_loads(FORWARD, CHOICES)
    assert found.flops == FORWARD.flops and found.shape == (
        CHOICES,
        ROWS * EXPERTS // CHOICES,
        WIDTH,
        INNER,
        1,
    )
    assert found.bytes == FORWARD.bytes - 2 * (EXPERTS - CHOICES) * WIDTH * INNER
    gradient = set_loads(WEIGHTS, CHOICES)  # all of which are written, those of the others as 0
    assert gradient.bytes == WEIGHTS.bytes
    assert gradient.shape == (CHOICES, WIDTH, ROWS * EXPERTS // CHOICES, INNER, 2)
    assert set_loads(FORWARD, EXPERTS) is FORWARD and set_loads(Op("aten::mm"), CHOICES) == Op(
        "aten::mm"
    )


def test_the_host_waits_for_the_rows_that_a_loop_has_and_issues_meanwhile() -> None:
    """Before the loop a kernel of 1 s, while which nothing else can be issued."""
    card = HARDWARE["rtx4090"]
    slow = Op("aten::add", bytes=int(card.bandwidth * 0.91))
    trace = Trace(ops=[slow, FORWARD], phases=["step"], events=[(PHASE, 0), (OP, 0), (OP, 1)])
    first, loop = schedule(trace, "step", card).timeline
    assert loop[1] - first[2] == pytest.approx(HOST_SECONDS)
    fast = schedule(trace, "step", HARDWARE["h100"]).timeline
    assert fast[1][1] == fast[0][2]
    assert loop[2] - loop[1] == pytest.approx(compute_op_seconds(FORWARD, card))
    uneven = schedule(trace, "step", card, experts=CHOICES).timeline[1]
    assert uneven[2] - uneven[1] == pytest.approx(
        compute_op_seconds(set_loads(FORWARD, CHOICES), card)
    )

"""Bytes and arithmetic of operators whose schema alone would count them wrongly, by hand."""

import torch
import torch.distributed.fsdp

from recipe_lib.plan.allocation.scratch import make_kernel_memory
from recipe_lib.plan.tracing.operator_costs import Cost, compute_cost


def cost(operator: torch._ops.OpOverload, *args: object) -> Cost:
    """On the meta device."""
    return compute_cost(operator, args, {}, operator(*args))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_product_that_is_added_in_place_counts_as_one_with_a_result() -> None:
    left, right = meta(8, 16), meta(16, 32)
    plain, added = (
        cost(torch.ops.aten.mm.default, left, right),
        cost(torch.ops.aten.addmm_.default, meta(8, 32), left, right),
    )
    assert plain.flops == added.flops == 2 * 8 * 16 * 32
    assert added.bytes == plain.bytes + 2 * 8 * 32  # the sum is read as well
    batched = cost(torch.ops.aten.baddbmm_.default, meta(3, 8, 32), meta(3, 8, 16), meta(3, 16, 32))
    assert batched.flops == 3 * plain.flops


def test_shards_are_copied_into_their_place_of_a_gather() -> None:
    """Of four ranks' buffer a rank writes its quarter, and reads as much."""
    shards = [meta(100), meta(28)]
    whole = meta(4 * 128)
    found = cost(torch.ops.fsdp.all_gather_copy_in.default, shards, whole, [100, 28], 128, 1)
    assert found.bytes == 2 * (2 * 128)


def test_a_rows_sum_reads_the_logits_twice() -> None:
    logits, labels = meta(6, 1000), meta(6, dtype=torch.int64)
    found = cost(torch.ops.tune_recipes.label_log_probs.default, logits, labels, None)
    assert found.bytes == 2 * (2 * 6 * 1000) + 8 * 6 + 2 * (4 * 6)


def test_scales_of_nf4_are_scratch_of_its_numbers() -> None:
    """A kernel before the one of the numbers makes them, in the numbers' type, one for each block;
    on a GPU alone.
    """
    arguments = (
        meta(48, 32, dtype=torch.uint8),
        meta(48, dtype=torch.int8),
        meta(4),
        meta(16),
        [0, 0, 48, 48],
        16,
    )
    assert make_kernel_memory("sm90")("tune_recipes::dequantize_nf4", arguments, 0) == [
        (48 * 2, False)
    ]
    assert make_kernel_memory("cpu")("tune_recipes::dequantize_nf4", arguments, 0) == []


def ends(count: int) -> torch.Tensor:
    return meta(count, dtype=torch.int32)


def test_rows_of_experts_count_once_each_and_as_many_for_every_expert() -> None:
    """By torch's operator and by ours for other types; the gradient of the weights as well."""
    rows, weights, gradient = meta(64, 16), meta(8, 16, 32), meta(64, 32)
    once = 2 * 64 * 16 * 32
    found = cost(torch.ops.aten._grouped_mm.default, rows, weights, ends(8))
    assert (found.flops, found.shape) == (once, (8, 8, 16, 32, 1))
    assert found.bytes == 2 * (64 * 16 + 8 * 16 * 32 + 64 * 32) + 4 * 8
    back = cost(torch.ops.aten._grouped_mm.default, gradient.t(), rows, ends(8))
    assert (back.flops, back.shape) == (once, (8, 32, 8, 16, 2))
    wide, table = meta(64, 16, dtype=torch.float64), meta(8, 16, 32, dtype=torch.float64)
    loop = cost(torch.ops.tune_recipes.grouped_matmul_loop.default, wide, table, ends(8))
    assert (loop.flops, loop.shape, loop.dtype) == (once, found.shape, "fp64")
    slopes = meta(64, 32, dtype=torch.float64)
    loop = cost(torch.ops.tune_recipes.grouped_gradient_loop.default, slopes, wide, ends(8))
    assert (loop.flops, loop.shape) == (once, back.shape)


def test_rows_that_no_number_of_experts_divides_are_counted_exactly() -> None:
    found = cost(torch.ops.aten._grouped_mm.default, meta(9, 16), meta(4, 16, 32), ends(4))
    assert (found.flops, found.shape) == (2 * 9 * 16 * 32, (4, 3, 16, 32, 1))
    found = cost(torch.ops.aten._grouped_mm.default, meta(3, 16), meta(8, 16, 32), ends(8))
    assert (found.flops, found.shape) == (
        2 * 3 * 16 * 32,
        (3, 1, 16, 32, 1),
    )  # an expert without rows does nothing


def test_flash_attention_over_documents_counts_as_attention_of_variable_lengths() -> None:
    """That of sinks: four documents of 25 tokens, of which a query sees 13 on average, with a
    window of 5 at most 5.
    """
    q, k = meta(100, 8, 64), meta(100, 2, 64)
    arguments = (q, k, k, ends(5), ends(5), 40, 40, 0.0, True, False)
    operator = torch.ops.aten._flash_attention_forward.default
    whole, near = (
        compute_cost(
            operator,
            arguments,
            {"window_size_left": left, "window_size_right": 0},
            (q, meta(8, 100)),
        )
        for left in (-1, 4)
    )
    assert whole.flops == near.flops == 4 * 8 * 64 * 100 * 25
    assert whole.shape == (32, 25, 25, 13, 64) and near.shape == (32, 25, 25, 5, 64)
    backward = torch.ops.aten._flash_attention_backward.default
    given = (q, q, k, k, q, meta(8, 100), ends(5), ends(5), 40, 40, 0.0, True, meta(2), meta(0))
    back = compute_cost(backward, given, {"window_size_left": 4, "window_size_right": 0}, (q, k, k))
    assert (back.flops, back.shape) == (10 * 8 * 64 * 100 * 25, near.shape)

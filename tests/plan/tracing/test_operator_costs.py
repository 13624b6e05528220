"""Bytes and arithmetic of operators whose schema alone would count them wrongly, by hand."""

import torch
import torch.distributed.fsdp

from recipe_lib.plan.allocation.scratch import kernel_memory
from recipe_lib.plan.tracing.operator_costs import Cost, cost_of


def cost(operator: torch._ops.OpOverload, *args: object) -> Cost:
    """On the meta device."""
    return cost_of(operator, args, {}, operator(*args))


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
    """A kernel before the one of the numbers makes them, in the numbers' type, one for each block; on a GPU alone."""
    arguments = meta(48, 32, dtype=torch.uint8), meta(48, dtype=torch.int8), meta(4), meta(16), [0, 0, 48, 48], 16
    assert kernel_memory("sm90")("tune_recipes::dequantize_nf4", arguments, 0) == [(48 * 2, False)]
    assert kernel_memory("cpu")("tune_recipes::dequantize_nf4", arguments, 0) == []

"""Scratch of kernels by closed formulas, workspaces by architecture, memory outside torch."""

from recipe_lib.plan.allocation.untraced_memory import (
    compute_attention_backward_scratch,
    compute_embedding_backward_scratch,
    compute_softmax_backward_scratch,
    compute_varlen_backward_scratch,
    count_grouped_arguments,
    estimate_outside_torch,
    get_workspace_bytes,
)
from recipe_lib.plan.hardware import HARDWARE, find_hardware
from recipe_lib.units import MIB


def test_matmul_workspaces() -> None:
    # pytorch issue 95668: what torch.cuda.memory_allocated() shows after the first matmul on an
    # A100.
    assert {get_workspace_bytes(name) for name in ("sm80", "sm86", "sm89")} == {8519680}
    assert {get_workspace_bytes(name) for name in ("sm90", "sm100", "sm120")} == {32 * MIB}
    assert get_workspace_bytes("cpu") == 0


def test_attention_backward_of_aligned_shapes_needs_twice_dq_in_fp32() -> None:
    shape = {"rows": 2, "heads": 32, "queries": 8192, "keys": 8192, "head_width": 128}
    q_bytes = 2 * 32 * 8192 * 128 * 2
    sums, dq = compute_attention_backward_scratch(**shape, kv_heads=32)
    assert dq == 2 * q_bytes and sums == dq // 128
    grouped = compute_attention_backward_scratch(**shape, kv_heads=8)
    assert grouped == [sums, dq, q_bytes, q_bytes]


def test_attention_backward_rounds_tokens_to_128_and_heads_to_32_or_64() -> None:
    shape = {"rows": 1, "heads": 1, "kv_heads": 1, "keys": 200}
    assert compute_attention_backward_scratch(**shape, queries=129, head_width=64) == [
        4 * 256,
        4 * 256 * 64,
    ]
    widths = {80: 96, 96: 96, 100: 128, 128: 128, 136: 192, 192: 192, 256: 256}
    for width, rounded in widths.items():
        assert compute_attention_backward_scratch(**shape, queries=1, head_width=width) == [
            4 * 128,
            4 * 128 * rounded,
        ], width


def test_documents_need_128_more_tokens_each() -> None:
    shape = {"heads": 4, "kv_heads": 4, "head_width": 64}
    one = compute_varlen_backward_scratch(tokens=1024, documents=1, **shape)
    five = compute_varlen_backward_scratch(tokens=1024, documents=5, **shape)
    assert [after - before for before, after in zip(one, five, strict=True)] == [
        4 * 4 * 4 * 128,
        4 * 4 * 4 * 128 * 64,
    ]
    assert compute_varlen_backward_scratch(
        tokens=1000, documents=2, heads=4, kv_heads=2, head_width=64
    )[2:] == [
        1000 * 4 * 64 * 2,
        1000 * 4 * 64 * 2,
    ]


def test_embedding_backward_holds_an_fp32_row_for_each_token() -> None:
    assert compute_embedding_backward_scratch(tokens=3072, width=4096) == []
    scratch = compute_embedding_backward_scratch(tokens=8192, width=4096)
    assert scratch[-1] == 8192 * 4096 * 4 and set(scratch[:-1]) == {8192 * 8}


def test_softmax_backward_makes_a_product_of_its_inputs_size() -> None:
    # What eager attention of TinyLlama with 2 sequences of 1024 tokens was measured to take more
    # than its tensors, on a T4: fitcheck-llm 0.3.1, data/measurements/t4-sweep-2026-09-15.json,
    # rows 28 and 29.
    assert compute_softmax_backward_scratch(numbers=2 * 32 * 1024 * 1024, element_bytes=4) == [
        256 * MIB
    ]


def test_outside_torch() -> None:
    card = HARDWARE["rtx4090"]
    alone = estimate_outside_torch(card, [])
    assert (
        alone.nccl == 0 and 900 * MIB <= alone.total <= 1100 * MIB
    )  # 1 GB, the usual advice for one GPU
    assert estimate_outside_torch(card, [1, 1]) == alone
    # github.com/NVIDIA/nccl/issues/964: 544 MB for a pair, 688 MB for more.
    assert estimate_outside_torch(card, [2, 4, 8]).nccl == (544 + 688 + 688) * MIB
    assert estimate_outside_torch(find_hardware("cpu"), [2, 4]).total == 0


def test_a_grouped_matmul_is_told_of_each_group() -> None:
    """Pointers to rows, weights and results, each list of them a multiple of 16 bytes; strides and
    sizes of three.
    """
    assert count_grouped_arguments(groups=128) == 128 * (3 * 8 + 3 * 8 + 3 * 4)
    assert count_grouped_arguments(groups=3) == 4 * 3 * 8 + 3 * (3 * 8 + 3 * 4)

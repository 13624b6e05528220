"""The page of a layer's kernels: what bounds a kernel, which are one chain, and its least bytes."""

import pytest

from benchmarks.kernel_chains import Kernel, KernelGraph, View, fuse_kernels, link_kernels
from benchmarks.layer_kernels import CARDS, COMPUTE, MEMORY, find_bound
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.tracing.trace import Op

pytestmark = pytest.mark.benchmark

TENSOR = 1000  # bytes of a storage of the hand-made kernels, unless they say otherwise


def make_matmul(rows: int, inner: int, columns: int) -> Op:
    return Op(
        name="aten::mm",
        flops=2 * rows * inner * columns,
        bytes=2 * (rows * inner + inner * columns + rows * columns),
        dtype="bf16",
        shape=(1, rows, inner, columns),
    )


@pytest.mark.parametrize("card", CARDS)
def test_what_bounds_a_kernel(card: str) -> None:
    hardware = find_hardware(card)
    assert find_bound(make_matmul(4096, 4096, 4096), hardware) == COMPUTE
    # An adapter's: on an RTX 3090 the narrow tile takes longer than the bytes, its arithmetic not.
    assert find_bound(make_matmul(4096, 4096, 16), hardware) == MEMORY
    assert find_bound(Op(name="aten::add", bytes=3 * 2**25, dtype="bf16"), hardware) == MEMORY
    attention = Op(
        name="aten::_scaled_dot_product_flash_attention",
        flops=4 * 64 * 2048 * 2048 * 128,
        bytes=4 * 2**25,
        dtype="bf16",
        shape=(64, 2048, 2048, 1024, 128),
    )
    assert find_bound(attention, hardware) == COMPUTE


def link(*kernels: tuple[str, str, str], parts: dict[str, int] | None = None) -> KernelGraph:
    """Return the graph of (name, storages that are read, that are written), a letter each.

    parts: storage -> bytes of it that kernels write; TENSOR for others.
    """

    def view(letter: str, num_bytes: int = TENSOR) -> View:
        return View(ord(letter), num_bytes)

    return link_kernels(
        [
            Kernel(
                Op(name),
                reads=tuple(map(view, reads)),
                writes=tuple(view(letter, (parts or {}).get(letter, TENSOR)) for letter in writes),
            )
            for name, reads, writes in kernels
        ],
        dict.fromkeys(map(ord, "abcdefghijklmnopqrstuvwxyz"), TENSOR),
    )


def fuse(graph: KernelGraph) -> list[tuple[list[int], int]]:
    """Return (kernels, least bytes) of each chain; all but matmuls are bound by memory."""
    window = range(len(graph.kernels))
    fusible = {index for index in window if graph.kernels[index].op.name != "mm"}
    chains = fuse_kernels(graph, window, fusible)
    return [(sorted(chain), graph.count_least_bytes(chain)) for chain in chains]


def test_a_residual_sum_and_its_norm_are_one_chain() -> None:
    graph = link(
        ("mm", "ab", "c"),
        ("add", "cx", "y"),  # y: the next sum reads it too
        ("norm", "y", "d"),
        ("mm", "de", "f"),
        ("mm", "dg", "h"),
        ("gate", "fh", "i"),
        ("mm", "ij", "k"),
        ("add", "ky", "z"),
    )
    # c and x are read, y and d written: one read of y less than the two kernels apart. z is dead.
    assert fuse(graph) == [
        ([1, 2], 4 * TENSOR),
        ([5], 3 * TENSOR),
        ([7], 2 * TENSOR),
    ]
    assert graph.share_least_bytes({1, 2}) == {1: 3 * TENSOR, 2: TENSOR}


def test_a_matmul_between_two_kernels_keeps_them_apart() -> None:
    graph = link(("norm", "a", "b"), ("mm", "bw", "c"), ("add", "ac", "d"), ("mm", "dw", "e"))
    # Both read a, but the sum needs what the matmul makes of the norm.
    assert fuse(graph) == [([0], 2 * TENSOR), ([2], 3 * TENSOR)]


def test_an_order_that_nothing_asks_for_does_not_keep_kernels_apart() -> None:
    graph = link(
        ("act", "ab", "c"),
        ("mm", "gc", "m"),  # a weight's gradient
        ("mm", "gw", "d"),
        ("gradient", "dab", "e"),
        ("mm", "ew", "f"),
        ("add", "fm", "h"),
        ("mm", "hw", "i"),
    )
    # a, b and d are read once, c and e written: the matmul of c may run after both.
    assert fuse(graph) == [([0, 3], 5 * TENSOR), ([5], 3 * TENSOR)]


def test_sums_in_place_are_one_chain_and_free_in_between() -> None:
    graph = link(
        ("mm", "gw", "a"),
        ("mm", "hw", "b"),
        ("add_", "ab", "a"),
        ("mm", "iw", "c"),
        ("add_", "ac", "a"),
        ("norm", "a", "d"),
        ("mm", "dw", "e"),
    )
    assert fuse(graph) == [([2, 4, 5], 4 * TENSOR)]  # a, b and c are read, d is written


def test_kernels_that_read_the_same_tensor_are_one_chain() -> None:
    graph = link(("mm", "aw", "x"), ("scale", "x", "b"), ("scale", "x", "c"), ("mm", "bc", "d"))
    assert fuse(graph) == [([1, 2], 3 * TENSOR)]


def test_a_part_of_a_storage_is_written_after_the_others() -> None:
    graph = link(
        ("copy", "a", "c"), ("mm", "cw", "b"), ("copy", "b", "c"), ("mm", "cw", "d"),
        parts={"c": TENSOR // 2},
    )  # fmt: skip
    assert fuse(graph) == [([0], 1500), ([2], 1500)]


def test_views_of_a_storage_are_together_the_storage_at_most() -> None:
    halves = [View(0, 500, (start,)) for start in (0, 500)]
    kernel = Kernel(Op("rotate"), reads=(*halves, View(0, 1000, (0, 2))), writes=(View(1, 1000),))
    reader = Kernel(Op("mm"), reads=(View(1, 1000),))
    graph = link_kernels([kernel, reader], {0: 1000, 1: 1000})
    assert graph.count_least_bytes({0}) == 2000

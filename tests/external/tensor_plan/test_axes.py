"""Dimensions as trees: splitting, cutting, uniting."""

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    block,
    compute_local_size,
    cut,
    find,
    find_segments,
    list_leaves,
    make_concatenation,
    make_product,
    regroup,
    unify,
)


def sizes(node):
    return [leaf.size for leaf in list_leaves(node)]


def layout(node, axis):
    """Lengths of the segments, all of which have the axis; None where one has not."""
    found = find_segments(node, axis)
    return (
        None
        if found is None or any(whole for _, whole in found)
        else [length for length, _ in found]
    )


def test_a_view_takes_a_dimension_apart_and_puts_it_together():
    whole = AxisNode(24)
    heads, width = regroup([whole], [4, 6], "view")
    assert sizes(whole) == [4, 6]
    (joined,) = regroup([heads, width], [24], "view")
    assert list_leaves(joined) == list_leaves(whole)
    assert layout(whole, heads) == [24]
    assert layout(whole, width) == [6, 6, 6, 6]


def test_sizes_that_do_not_line_up_are_blocked():
    one, other = AxisNode(4), AxisNode(6)
    found = regroup([one, other], [3, 8], "view in attention")
    assert one.blocked == other.blocked == "view in attention"
    assert all(node.blocked for node in found)


def test_fused_parts_of_unequal_lengths_share_the_axis_of_heads():
    fused = AxisNode(64 + 32 + 32)
    query, key, value = cut(fused, [64, 32, 32], "split")
    heads, _ = regroup([key], [4, 8], "view")
    unify(heads, regroup([value], [4, 8], "view")[0], "product")
    grouped, width = regroup([query], [8, 8], "view")
    unify(grouped, make_product([heads, AxisNode(2)]), "product")
    assert layout(fused, heads) == [64, 32, 32]
    assert (
        layout(fused, width) is None
    )  # keys do not have the width of queries, until a product unites them


def test_a_view_of_fused_parts_keeps_them_apart():
    fused = AxisNode(96)
    cut(fused, [64, 16, 16], "split")
    heads, width = regroup([fused], [12, 8], "view")
    assert sizes(heads) == [8, 2, 2]
    assert layout(fused, width) == [8] * 12


def test_two_halves_seen_as_a_dimension_of_two_are_one_axis():
    halves, seen = AxisNode(20), AxisNode(20)
    cut(halves, [10, 10], "chunk")
    two, rest = regroup([seen], [2, 10], "view")
    unify(halves, seen, "add")
    assert layout(halves, rest) == [10, 10]
    assert all(leaf.blocked for leaf in list_leaves(two))  # which of the halves it is cannot be cut


def test_uniting_keeps_the_reason_of_either_side():
    for blocked_first in (True, False):
        one, other = AxisNode(8), AxisNode(8)
        block("softmax in attention", one if blocked_first else other)
        unify(one, other, "add")
        assert find(one) is find(other) and find(one).blocked == "softmax in attention"


def test_a_part_that_lacks_the_axis_has_no_layout():
    sharded, other = AxisNode(8), AxisNode(4)
    assert layout(make_concatenation([sharded, other]), sharded) is None


def test_the_size_on_a_rank_counts_every_part():
    heads = AxisNode(4)
    fused = make_concatenation(
        [
            make_product([heads, AxisNode(2), AxisNode(8)]),
            make_product([heads, AxisNode(8)]),
            AxisNode(5),
        ]
    )
    assert compute_local_size(fused, {heads: 2}) == 32 + 16 + 5

"""Represent dimensions of tensors as trees, to find which dimensions of a model are one axis.

Rules of operators (`operator_rules`) call `regroup`, `cut`, `unify` and `block` on the dimensions
of a traced forward. A dimension is a node: a product (heads x head width, outermost first) that a
view took apart, a concatenation (queries, keys, values) that a slice cut, or a leaf. An elementwise
operator unites nodes of its inputs (union-find), so that in the end a leaf is one axis, wherever in
the model it occurs. An axis that an operator cannot compute part by part is blocked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod


@dataclass(slots=True, eq=False, repr=False)
class AxisNode:
    """One dimension, or a part of one. `find` returns the node that now stands for it."""

    size: int  # number of elements
    kind: str = "leaf"  # `leaf`, `product` or `parts` (a concatenation)
    # Factors, the outermost first, or parts in order.
    children: list["AxisNode"] = field(default_factory=list)
    blocked: str = ""  # of a leaf: why this axis stays whole; empty: it need not
    parent: "AxisNode | None" = None  # a node united with this one; None: it is the root


def find(node: AxisNode) -> AxisNode:
    """Return the root of a node: the one that stands for all nodes united with it."""
    while node.parent is not None:
        node.parent = node.parent.parent or node.parent  # path halving: later look-ups are short
        node = node.parent
    return node


def list_leaves(node: AxisNode) -> list[AxisNode]:
    """Return the leaves of more than one element under a node, in order, with repetitions."""
    root = find(node)
    if root.kind == "leaf":
        return [root] if root.size > 1 else []
    return [leaf for child in root.children for leaf in list_leaves(child)]


def block(reason: str, *nodes: AxisNode) -> None:
    """Block every axis under the nodes; the first reason that an axis gets stays."""
    for node in nodes:
        for leaf in list_leaves(node):
            leaf.blocked = leaf.blocked or reason


def list_factors(node: AxisNode) -> list[AxisNode]:
    """Return the factors of more than one element of a node, the outermost first.

    A node that is no product is its only factor.
    """
    root = find(node)
    if root.size == 1:
        return []
    if root.kind != "product":
        return [root]
    return [factor for child in root.children for factor in list_factors(child)]


def list_parts(node: AxisNode) -> list[AxisNode]:
    """Return the parts of a concatenation in order; another node is its only part."""
    root = find(node)
    if root.kind != "parts":
        return [root]
    return [part for child in root.children for part in list_parts(child)]


def make_product(nodes: Iterable[AxisNode]) -> AxisNode:
    """Return the dimension that a view makes of several ones; nodes: the outermost first."""
    factors = [factor for node in nodes for factor in list_factors(node)]
    if len(factors) == 1:
        return factors[0]
    size = prod(factor.size for factor in factors)
    return AxisNode(size, "product", factors) if factors else AxisNode(1)


def make_concatenation(nodes: Iterable[AxisNode]) -> AxisNode:
    """Return the dimension that a concatenation makes of several ones, in order."""
    joined = [part for node in nodes for part in list_parts(node) if part.size]
    if len(joined) == 1:
        return joined[0]
    return AxisNode(sum(part.size for part in joined), "parts", joined) if joined else AxisNode(0)


def regroup(nodes: Sequence[AxisNode], sizes: Sequence[int], reason: str) -> list[AxisNode]:
    """Return the dimensions of a view of other sizes, of the same number of elements.

    A factor that only a part of a new size fits is taken apart. Where that is not possible, all
    axes of `nodes` are blocked for `reason`, and the new dimensions are blocked leaves.
    """
    queue = [factor for node in nodes for factor in list_factors(node)]
    regrouped: list[AxisNode] = []
    for size in sizes:
        factors: list[AxisNode] = []
        missing_size = size  # by which the factors have still to grow; 0: they do not line up
        while missing_size > 1 and queue:
            first = queue[0]
            if missing_size % first.size == 0:
                factors.append(queue.pop(0))
                missing_size //= first.size
            elif first.size % missing_size or not _refine(first, missing_size, reason):
                missing_size = 0
            else:
                queue[:1] = list_factors(first)
                if queue[0].size > missing_size:  # it was a product already, with other factors
                    missing_size = 0
        if missing_size != 1:
            return _make_opaque(nodes, sizes, reason)
        regrouped.append(make_product(factors))
    return regrouped


def cut(node: AxisNode, lengths: Sequence[int], reason: str) -> list[AxisNode]:
    """Cut a node into consecutive parts of these lengths, which add up to its size.

    The node becomes a concatenation. A product is cut along its outermost factor; where the lengths
    do not line up with that, its axes are blocked for `reason`. Lengths of 0 give no part.
    """
    root = find(node)
    lengths = [length for length in lengths if length]
    if len(lengths) == 1:
        return [root]
    if root.kind == "leaf":
        root.children = [AxisNode(length, blocked=root.blocked) for length in lengths]
        root.kind = "parts"
        return list(root.children)
    if root.kind == "product":
        factors = list_factors(root)
        inner = prod(factor.size for factor in factors[1:])
        if any(length % inner for length in lengths):
            return _make_opaque([root], lengths, reason)
        outer = cut(factors[0], [length // inner for length in lengths], reason)
        return [make_product([piece, *factors[1:]]) for piece in outer]
    return _cut_parts(root, lengths, reason)


def _cut_parts(root: AxisNode, lengths: Sequence[int], reason: str) -> list[AxisNode]:
    """Cut a concatenation, as `cut` does: its parts are cut further where a length ends in one."""
    queue = list_parts(root)
    pieces: list[AxisNode] = []  # the parts of the concatenation from now on
    cuts = []
    for length in lengths:
        cut_pieces: list[AxisNode] = []
        missing_length = length
        while missing_length:
            first = queue.pop(0)
            if first.size > missing_length:
                head, tail = cut(first, [missing_length, first.size - missing_length], reason)
                queue.insert(0, tail)
                first = head
            cut_pieces.append(first)
            missing_length -= first.size
        pieces += cut_pieces
        cuts.append(make_concatenation(cut_pieces))
    root.children = pieces
    return cuts


def unify(left: AxisNode, right: AxisNode, reason: str) -> None:
    """Unite two nodes of equal size whose elements an operator combines one by one.

    Nodes of one element stay as they are. Where the trees of the two do not line up, their axes are
    blocked for `reason`.
    """
    left, right = map(find, (left, right))
    if left is right or left.size == 1:
        return
    assert left.size == right.size, (
        f"dimensions of {left.size} and {right.size} elements cannot be one"
    )
    if left.kind == "leaf":
        _link(left, right)
    elif right.kind == "leaf":
        _link(right, left)
    elif left.kind == right.kind:
        if _align(left, right, reason) and find(left) is not find(right):
            left.parent = right
    else:
        # Make the concatenation a product with the same innermost factor: both are products then.
        product, parts = (left, right) if left.kind == "product" else (right, left)
        if _refine(parts, parts.size // list_factors(product)[-1].size, reason):
            unify(product, parts, reason)
        else:
            block(reason, product)


def _link(leaf: AxisNode, root: AxisNode) -> None:
    """Make `root` stand for a leaf, whose reason to be blocked goes over to it."""
    leaf.parent = root
    if leaf.blocked:
        block(leaf.blocked, root)


def _align(left: AxisNode, right: AxisNode, reason: str) -> bool:
    """Unite two products factor by factor, or two concatenations part by part.

    Return False if that fails; both are blocked then.
    """
    is_product = left.kind == "product"
    lefts, rights = map(list_factors if is_product else list_parts, (left, right))
    while lefts and rights:
        larger, smaller = (lefts, rights) if lefts[0].size >= rights[0].size else (rights, lefts)
        length = smaller[0].size
        if larger[0].size == length:
            unify(lefts.pop(0), rights.pop(0), reason)
            if is_product:  # uniting these two may have taken later factors apart
                lefts = [factor for node in lefts for factor in list_factors(node)]
                rights = [factor for node in rights for factor in list_factors(node)]
        elif not is_product:
            larger[:1] = cut(larger[0], [length, larger[0].size - length], reason)
        elif larger[0].size % length == 0 and _refine(larger[0], length, reason):
            larger[:1] = list_factors(larger[0])
        else:
            block(reason, left, right)
            return False
    return True


def _refine(node: AxisNode, outer: int, reason: str) -> bool:
    """Make a leaf or a concatenation a product of `outer` and the rest, in place.

    Returns False if the parts of a concatenation do not line up with that; they are blocked then. A
    product is left as it is.
    """
    root = find(node)
    inner = root.size // outer
    if root.kind == "leaf":
        root.children = [
            AxisNode(outer, blocked=root.blocked),
            AxisNode(inner, blocked=root.blocked),
        ]
        root.kind = "product"
        return True
    if root.kind == "product":
        return True
    pieces = list_parts(root)
    if any(piece.size % inner for piece in pieces):
        block(reason, root)
        return False
    # Take each piece apart into (outer, inner); the inner ones are one axis.
    split = [regroup([piece], [piece.size // inner, inner], reason) for piece in pieces]
    for _, inner_node in split[1:]:
        unify(split[0][1], inner_node, reason)
    if all(outer_node.size == 1 for outer_node, _ in split):
        # Such as (2, width) for gate and up: the axis of 2 tells them apart, and cannot be cut.
        outer_node = AxisNode(outer, blocked=reason)
    else:
        outer_node = make_concatenation(outer_node for outer_node, _ in split)
    root.children = [outer_node, split[0][1]]
    root.kind = "product"
    return True


def _make_opaque(nodes: Sequence[AxisNode], sizes: Sequence[int], reason: str) -> list[AxisNode]:
    """Block all axes of `nodes`, and return new, blocked leaves of these sizes in their place."""
    block(reason, *nodes)
    return [AxisNode(size, blocked=reason) for size in sizes]


def has_axis(node: AxisNode, axis: AxisNode) -> bool:
    """Return True if the axis (a leaf) is under the node."""
    axis = find(axis)
    return any(leaf is axis for leaf in list_leaves(node))


def have_axis(nodes: Iterable[AxisNode], axis: AxisNode) -> bool:
    """Return True if the axis (a leaf) is under one of the nodes."""
    return any(has_axis(node, axis) for node in nodes)


def find_segments(node: AxisNode, axis: AxisNode) -> list[tuple[int, bool]] | None:
    """Return the segments of a dimension that has an axis, in order, as (length, is whole).

    Not whole: ranks cut the segment evenly. Whole: it does not have the axis. A product that has
    the axis as an inner factor has its segments once for each outer element. None where a product
    has the axis in two factors, or the node does not have it.
    """
    root, axis = map(find, (node, axis))
    if root is axis:
        return [(root.size, False)]
    if root.kind == "parts":
        pieces = [
            find_segments(part, axis) if has_axis(part, axis) else [(part.size, True)]
            for part in list_parts(root)
        ]
        if any(piece is None for piece in pieces):
            return None
        return [segment for piece in pieces for segment in piece or ()]
    if root.kind == "product":
        factors = list_factors(root)
        indices = [index for index, factor in enumerate(factors) if has_axis(factor, axis)]
        if len(indices) != 1:
            return None
        inner = prod(factor.size for factor in factors[indices[0] + 1 :])
        outer = prod(factor.size for factor in factors[: indices[0]])
        segments = find_segments(factors[indices[0]], axis) or []
        return [(length * inner, whole) for length, whole in segments] * outer or None
    return None


def compute_local_size(node: AxisNode, shares: dict[AxisNode, int]) -> int:
    """Return the number of elements of a dimension on one rank.

    shares: leaf of an axis that is cut -> the number of ranks that share it, which divides it.
    """
    root = find(node)
    if root.kind == "leaf":
        return root.size // shares.get(root, 1)
    sizes = [compute_local_size(child, shares) for child in root.children]
    return prod(sizes) if root.kind == "product" else sum(sizes)

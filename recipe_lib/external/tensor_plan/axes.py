"""Dimensions as trees: what a view splits, what a slice cuts, and which dimensions are one axis.

A dimension is a node. A leaf is not known to have parts; a product is a dimension that a view took
apart (heads x head width, the outermost first); a concatenation is one that a slice cut (queries,
keys, values). Nodes that an operator brings together are united, so that a leaf in the end stands
for one axis of the model, wherever it occurs. An axis that an operator cannot compute part by part
is blocked, with the reason.
"""

from collections.abc import Iterable, Sequence
from math import prod


class AxisNode:
    """One dimension, or a part of one; `find` gives the node that stands for it."""

    __slots__ = ("blocked", "children", "kind", "parent", "size")

    def __init__(
        self, size: int, kind: str = "leaf", children: Sequence["AxisNode"] = (), blocked: str = ""
    ):
        """size: elements. kind: `leaf`, `product` or `parts`. blocked: why this axis
        stays whole, or empty.
        """
        self.size = size
        self.kind = kind
        self.children = list(children)
        self.blocked = blocked
        self.parent: AxisNode | None = None


def find(node: AxisNode) -> AxisNode:
    """Return the node that all united with this one share."""
    while node.parent is not None:
        node.parent = node.parent.parent or node.parent  # later look-ups are short
        node = node.parent
    return node


def list_leaves(node: AxisNode) -> list[AxisNode]:
    """Return the leaves under a node that hold more than one element, in order, as often as they
    occur.
    """
    root = find(node)
    if root.kind == "leaf":
        return [root] if root.size > 1 else []
    return [leaf for child in root.children for leaf in list_leaves(child)]


def block(node: AxisNode, reason: str) -> None:
    """Keep every axis under the node whole, for this reason; the first reason is kept."""
    for leaf in list_leaves(node):
        leaf.blocked = leaf.blocked or reason


def list_factors(node: AxisNode) -> list[AxisNode]:
    """Return the node as a product: its factors of more than one element, the outermost first."""
    root = find(node)
    if root.size == 1:
        return []
    if root.kind != "product":
        return [root]
    return [factor for child in root.children for factor in list_factors(child)]


def list_parts(node: AxisNode) -> list[AxisNode]:
    """Return the node as a concatenation: its parts in order."""
    root = find(node)
    if root.kind != "parts":
        return [root]
    return [part for child in root.children for part in list_parts(child)]


def make_product(nodes: Iterable[AxisNode]) -> AxisNode:
    """Make one dimension of several, the outermost first."""
    factors = [factor for node in nodes for factor in list_factors(node)]
    if len(factors) == 1:
        return factors[0]
    size = prod(factor.size for factor in factors)
    return AxisNode(size, "product", factors) if factors else AxisNode(1)


def make_concatenation(nodes: Iterable[AxisNode]) -> AxisNode:
    """Make one dimension of several, one after the other."""
    joined = [part for node in nodes for part in list_parts(node) if part.size]
    if len(joined) == 1:
        return joined[0]
    return AxisNode(sum(part.size for part in joined), "parts", joined) if joined else AxisNode(0)


def regroup(nodes: Sequence[AxisNode], sizes: Sequence[int], reason: str) -> list[AxisNode]:
    """Return the same elements under other sizes, as a view has it; block what does not line up."""
    queue = [factor for node in nodes for factor in list_factors(node)]
    regrouped: list[AxisNode] = []
    for size in sizes:
        taken: list[AxisNode] = []
        need = size
        while need > 1 and queue:
            first = queue[0]
            if need % first.size == 0:
                taken.append(queue.pop(0))
                need //= first.size
            elif first.size % need or not _refine(first, need, reason):
                need = 0
            else:
                queue[:1] = list_factors(first)
                if queue[0].size > need:  # its own factors do not line up
                    need = 0
        if need != 1:
            return _make_opaque(nodes, sizes, reason)
        regrouped.append(make_product(taken))
    return regrouped


def cut(node: AxisNode, lengths: Sequence[int], reason: str) -> list[AxisNode]:
    """Cut the node into consecutive lengths, which add up to its size."""
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
    queue = list_parts(root)
    pieces: list[AxisNode] = []  # what the concatenation consists of from now on
    cuts = []
    for length in lengths:
        taken: list[AxisNode] = []
        need = length
        while need:
            first = queue.pop(0)
            if first.size > need:
                head, tail = cut(first, [need, first.size - need], reason)
                queue.insert(0, tail)
                first = head
            taken.append(first)
            need -= first.size
        pieces += taken
        cuts.append(make_concatenation(taken))
    root.children = pieces
    return cuts


def unify(left: AxisNode, right: AxisNode, reason: str) -> None:
    """Make both nodes one from now on: an operator brings their elements together one by one."""
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
        product, parts = (left, right) if left.kind == "product" else (right, left)
        if _refine(parts, parts.size // list_factors(product)[-1].size, reason):
            unify(product, parts, reason)
        else:
            block(product, reason)


def _link(leaf: AxisNode, other: AxisNode) -> None:
    leaf.parent = other
    if leaf.blocked:
        block(other, leaf.blocked)


def _align(left: AxisNode, right: AxisNode, reason: str) -> bool:
    """Unite two products factor by factor, or two concatenations part by part. False, and blocked,
    if that fails.
    """
    is_product = left.kind == "product"
    ours, theirs = map(list_factors if is_product else list_parts, (left, right))
    while ours and theirs:
        larger, smaller = (ours, theirs) if ours[0].size >= theirs[0].size else (theirs, ours)
        length = smaller[0].size
        if larger[0].size == length:
            unify(ours.pop(0), theirs.pop(0), reason)
            if is_product:  # uniting may have taken others apart
                ours = [factor for node in ours for factor in list_factors(node)]
                theirs = [factor for node in theirs for factor in list_factors(node)]
        elif not is_product:
            larger[:1] = cut(larger[0], [length, larger[0].size - length], reason)
        elif larger[0].size % length == 0 and _refine(larger[0], length, reason):
            larger[:1] = list_factors(larger[0])
        else:
            block(left, reason)
            block(right, reason)
            return False
    return True


def _refine(node: AxisNode, outer: int, reason: str) -> bool:
    """Take a leaf or a concatenation apart into `outer` x the rest. False, and blocked, where that
    cannot be.
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
        block(root, reason)
        return False
    split = [regroup([piece], [piece.size // inner, inner], reason) for piece in pieces]
    for _, low in split[1:]:
        unify(split[0][1], low, reason)
    if all(high.size == 1 for high, _ in split):
        # gate and up as (2, width): which of the two it is cannot be cut
        high = AxisNode(outer, blocked=reason)
    else:
        high = make_concatenation(high for high, _ in split)
    root.children = [high, split[0][1]]
    root.kind = "product"
    return True


def _make_opaque(nodes: Sequence[AxisNode], sizes: Sequence[int], reason: str) -> list[AxisNode]:
    for node in nodes:
        block(node, reason)
    return [AxisNode(size, blocked=reason) for size in sizes]


def has_axis(node: AxisNode, axis: AxisNode) -> bool:
    """Return True if the axis (a leaf) is under the node."""
    axis = find(axis)
    return any(leaf is axis for leaf in list_leaves(node))


def have_axis(nodes: Iterable[AxisNode], axis: AxisNode) -> bool:
    """Return True if the axis (a leaf) is under one of the nodes."""
    return any(has_axis(node, axis) for node in nodes)


def find_segments(node: AxisNode, axis: AxisNode) -> list[tuple[int, bool]] | None:
    """Return the segments of a dimension as (length, whole): cut evenly along the axis, or without
    it, and so whole on each rank.

    None where the dimension, or a part of it, carries the axis twice or not as one of the factors
    of a product.
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
        with_axis = [number for number, factor in enumerate(factors) if has_axis(factor, axis)]
        if len(with_axis) != 1:
            return None
        inner = prod(factor.size for factor in factors[with_axis[0] + 1 :])
        outer = prod(factor.size for factor in factors[: with_axis[0]])
        segments = find_segments(factors[with_axis[0]], axis) or []
        return [(length * inner, whole) for length, whole in segments] * outer or None
    return None


def compute_local_size(node: AxisNode, shares: dict[AxisNode, int]) -> int:
    """Return the elements of a dimension on one rank, where each axis of `shares` (leaf: ranks) is
    cut.
    """
    root = find(node)
    if root.kind == "leaf":
        return root.size // shares.get(root, 1)
    sizes = [compute_local_size(child, shares) for child in root.children]
    return prod(sizes) if root.kind == "product" else sum(sizes)

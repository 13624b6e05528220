"""Build the tree of what is live at the peak: kind of memory, then layer, then module inside it.

`report.py` calls `build_alive_tree` and `draw_tree`. Layers that hold the same are one branch
(`model.layers.0-31`). A node is the sum of its branches, to the byte. A storage is one allocation,
of a tensor. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from recipe_lib.plan.plan_schema import Alive, RankPlan
from recipe_lib.plan.summary.module_paths import split_number
from recipe_lib.plan.tracing.trace import STORAGE_KINDS
from recipe_lib.report.view import TreeLine
from recipe_lib.units import (
    choose_unit,
    count_hundredths,
    format_hundredths,
    format_ranges,
    share_out,
)

# (segments of the path below a node, bytes, number of storages)
_Entry = tuple[tuple[str, ...], int, int]


@dataclass
class Node:
    """A branch with the sums of all storages in it."""

    # Kind of memory, or the path of a module or parameter inside the node above.
    name: str
    # Bytes of all storages in it.
    bytes: int
    # Number of storages in it.
    count: int
    # Largest first; none for a leaf.
    children: list["Node"] = field(default_factory=list)


def build_alive_tree(rank: RankPlan) -> Node:
    """Return the tree of one rank's largest active peak: the bytes in the allocator's blocks.

    Kinds are in the order of `STORAGE_KINDS`.
    """
    entries: dict[str, list[_Entry]] = {kind: [] for kind in STORAGE_KINDS}
    for alive in rank.alive:
        entries.setdefault(alive.kind, []).append((_split_path(alive), alive.bytes, alive.count))
    kinds = [_build_node(kind, inside, join=False) for kind, inside in entries.items() if inside]
    # Storages are as large as they were asked for. What the allocator's blocks take beyond them is
    # a branch of its own, so that the sum is the peak.
    if missing := rank.peak.active - sum(kind.bytes for kind in kinds):
        kinds.append(Node("rounded up to blocks", missing, 0))
    return Node("active", rank.peak.active, count=sum(kind.count for kind in kinds), children=kinds)


def draw_tree(root: Node, *, depth: float, smallest: float, most: int) -> list[TreeLine]:
    """Return the lines of `depth` levels below the root.

    The figures of branches add up to their node's, as printed.

    Args:
        root: the only node of level 0.
        depth: levels that are drawn; infinite: all.
        smallest: least share of a node for which its branch has a line of its own; a branch whose
            printed number would be 0.00 has none. 0: all branches have one.
        most: branches of a node that have a line of their own, at most.
    """
    unit = choose_unit(root.bytes)
    lines: list[TreeLine] = []

    def grow(node: Node, hundredths: int, level: int) -> None:
        """Add the lines of a node and its branches. hundredths: its bytes, as printed."""
        lines.append(
            TreeLine(
                level=level,
                name=node.name,
                number=format_hundredths(hundredths, unit),
                exact=f"{node.bytes:,} bytes",
                share=f"{node.bytes / root.bytes:.1%}" if root.bytes else "",
                count=f"{node.count:,} tensor{'s' if node.count != 1 else ''}"
                if node.count
                else "",
                opens=bool(node.children),
            )
        )
        if level >= depth:
            return
        children = node.children
        if level:  # the branches of the root are kinds, which all have a line
            children = fold_small(
                children,
                # Two digits are printed: half of a hundredth of the unit would be rounded to 0.
                smallest=max(node.bytes * smallest, unit[0] / 200 if smallest else 0),
                most=most,
            )
        parts = share_out(hundredths, [child.bytes for child in children])
        for child, part in zip(children, parts, strict=True):
            grow(child, part, level + 1)

    grow(root, count_hundredths(root.bytes, unit), 0)
    return lines


def fold_small(children: list[Node], *, smallest: float, most: int) -> list[Node]:
    """Return the children, the small ones as one node `N smaller`.

    Small are those below `smallest` bytes, and those after the first `most`.
    """
    large = [child for child in children if abs(child.bytes) >= smallest][:most]
    # By identity: nodes of the same name and sizes are equal.
    small = [child for child in children if not any(child is large_child for large_child in large)]
    if len(small) < 2:  # a single one keeps its line
        return children
    return [
        *large,
        Node(
            f"{len(small)} smaller",
            bytes=sum(node.bytes for node in small),
            count=sum(node.count for node in small),
        ),
    ]


def _split_path(alive: Alive) -> tuple[str, ...]:
    """Return the path of live storages: the layer as one name, then each module inside it.

    Outside of layers the path is one name.
    """
    # A parameter's full name says where it belongs.
    name = (
        alive.label if "." in alive.label else ".".join(filter(None, (alive.module, alive.label)))
    )
    inside_layer = split_number(name)[2]
    return (name.removesuffix(inside_layer) or "outside of modules", *inside_layer.split(".")[1:])


def _build_node(name: str, entries: list[_Entry], *, join: bool = True) -> Node:
    """Return a branch of entries.

    join: a node with a single branch and no storage of its own is joined with it into one name.
    """
    branches: dict[str, list[_Entry]] = {}
    for path, num_bytes, count in entries:
        if path:
            branches.setdefault(path[0], []).append((path[1:], num_bytes, count))
    children = [_build_node(first, inside) for first, inside in _join_alike(branches).items()]
    own_entries = [entry for entry in entries if not entry[0]]
    if own_entries and children:
        children.append(_sum_entries("itself", own_entries))
    if join and len(children) == 1:
        return replace(children[0], name=f"{name}.{children[0].name}")
    return _sum_entries(name, entries, sorted(children, key=lambda child: -child.bytes))


def _sum_entries(name: str, entries: list[_Entry], children: Sequence[Node] = ()) -> Node:
    return Node(
        name,
        bytes=sum(num_bytes for _, num_bytes, _ in entries),
        count=sum(count for _, _, count in entries),
        children=list(children),
    )


def _join_alike(branches: dict[str, list[_Entry]]) -> dict[str, list[_Entry]]:
    """Join branches whose names differ in a number at their end alone, and that hold the same."""
    # (name without its number, what the branch holds) -> names.
    groups: dict[tuple[str, tuple[_Entry, ...]], list[str]] = {}
    for name, entries in branches.items():
        before, _, last = name.rpartition(".")
        key = (before, tuple(sorted(entries))) if last.isdecimal() else (name, ())
        groups.setdefault(key, []).append(name)
    joined: dict[str, list[_Entry]] = {}
    for names in groups.values():
        joined_name = names[0]
        if len(names) > 1:
            last = joined_name.rpartition(".")[2]
            numbers = format_ranges(int(name.rpartition(".")[2]) for name in names)
            joined_name = joined_name.removesuffix(last) + numbers
        joined[joined_name] = list(chain.from_iterable(branches[name] for name in names))
    return joined

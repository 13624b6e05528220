"""What is live at the peak as a tree: kind, then layer or module, then what lies inside. No torch in here.

Layers that hold the same are one branch (`model.layers.0-31`). A node is the sum of its branches, to the byte.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from recipe_lib.plan.result import Alive, RankPlan
from recipe_lib.plan.trace import STORAGE_KINDS
from recipe_lib.report.view import TreeLine
from recipe_lib.units import choose_unit, count_hundredths, format_hundredths, number_ranges, share_out

# (path below the node, bytes, storages)
_Entry = tuple[tuple[str, ...], int, int]
_NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)((?:\..*)?)", re.DOTALL)


@dataclass
class Node:
    """A branch with the sums of all storages in it."""

    name: str
    bytes: int
    count: int
    children: list["Node"] = field(default_factory=list)  # largest first; none for a leaf


def alive_tree(rank: RankPlan) -> Node:
    """Return the tree of one rank's largest active peak; its kinds are in the order of `STORAGE_KINDS`.

    Storages are as large as they were asked for; what the allocator's blocks take beyond them is a branch of its own,
    so that the sum is the peak.
    """
    entries: dict[str, list[_Entry]] = {kind: [] for kind in STORAGE_KINDS}
    for alive in rank.alive:
        entries.setdefault(alive.kind, []).append((_path(alive), alive.bytes, alive.count))
    kinds = [_node(kind, inside, join=False) for kind, inside in entries.items() if inside]
    missing = rank.peak.active - sum(kind.bytes for kind in kinds)
    if missing:
        kinds.append(Node("rounded up to blocks", missing, 0))
    return Node("active", rank.peak.active, sum(kind.count for kind in kinds), kinds)


def draw_tree(root: Node, *, depth: float, smallest: float, most: int) -> list[TreeLine]:
    """Return the lines of `depth` levels below the root. The figures of branches add up to their node's, as printed.

    smallest: share of a node from which on a branch has a line of its own, if it has any digits; 0: all have. most:
    branches of a node that have one.
    """
    unit = choose_unit(root.bytes)
    lines: list[TreeLine] = []

    def grow(node: Node, number: int, level: int) -> None:
        share = f"{node.bytes / root.bytes:.1%}" if root.bytes else ""
        count = f"{node.count:,} tensor{'s' if node.count != 1 else ''}" if node.count else ""
        exact, opens = f"{node.bytes:,} bytes", bool(node.children)
        lines.append(TreeLine(level, node.name, format_hundredths(number, unit), exact, share, count, opens))
        if level >= depth:
            return
        digits = unit[0] / 200 if smallest else 0  # what is smaller has none
        inside = node.children
        if level:  # the root's are the kinds, which all have a line
            inside = folded(inside, smallest=max(node.bytes * smallest, digits), most=most)
        for child, part in zip(inside, share_out(number, [child.bytes for child in inside]), strict=True):
            grow(child, part, level + 1)

    grow(root, count_hundredths(root.bytes, unit), 0)
    return lines


def folded(children: list[Node], *, smallest: float, most: int) -> list[Node]:
    """The children, those below `smallest` bytes and those after the first `most` as one node `N smaller`."""
    large = [child for child in children if abs(child.bytes) >= smallest][:most]
    small = [child for child in children if not any(child is kept for kept in large)]
    if len(small) < 2:
        return children
    rest = Node(f"{len(small)} smaller", sum(node.bytes for node in small), sum(node.count for node in small))
    return [*large, rest]


def join_numbered(names: Iterable[str]) -> str:
    """`a.0.w, a.1.w, a.2.w, b` -> `a.0-2.w, b`: names that differ in one number are one name with a range."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        before, number, after = split_number(name)
        groups.setdefault((before, after), [])
        if number is not None:
            groups[before, after].append(number)
    return ", ".join(f"{before}{number_ranges(numbers)}{after}" for (before, after), numbers in groups.items())


def split_number(name: str) -> tuple[str, int | None, str]:
    """`model.layers.3.mlp` -> (`model.layers.`, 3, `.mlp`), the first segment that is a number; (name, None, ``)."""
    numbered = _NUMBERED.fullmatch(name)
    return (numbered[1], int(numbered[2]), numbered[3]) if numbered else (name, None, "")


def _path(alive: Alive) -> tuple[str, ...]:
    """Return the layer as one name, then what is inside it; outside of layers all as one name.

    A parameter's full name says where it belongs.
    """
    name = alive.label if "." in alive.label else ".".join(filter(None, (alive.module, alive.label)))
    inside_layer = split_number(name)[2]
    return (name.removesuffix(inside_layer) or "outside of modules", *inside_layer.split(".")[1:])


def _node(name: str, entries: list[_Entry], *, join: bool = True) -> Node:
    """A branch of entries. join: one that has a single branch and nothing of its own is shown as one name."""
    inside: dict[str, list[_Entry]] = {}
    for path, num_bytes, count in entries:
        if path:
            inside.setdefault(path[0], []).append((path[1:], num_bytes, count))
    own = [(num_bytes, count) for path, num_bytes, count in entries if not path]
    children = [_node(first, found) for first, found in _alike(inside).items()]
    if own and children:
        children.append(Node("itself", sum(num for num, _ in own), sum(count for _, count in own)))
    if join and len(children) == 1:
        only = children[0]
        return Node(f"{name}.{only.name}", only.bytes, only.count, only.children)
    children.sort(key=lambda child: -child.bytes)
    return Node(name, sum(num for _, num, _ in entries), sum(count for _, _, count in entries), children)


def _alike(inside: dict[str, list[_Entry]]) -> dict[str, list[_Entry]]:
    """Make branches one that differ in a number at the end of their name only, and hold the same."""
    groups: dict[tuple[str, tuple[_Entry, ...]], list[str]] = {}
    for name, entries in inside.items():
        before, _, last = name.rpartition(".")
        groups.setdefault((before, tuple(sorted(entries))) if last.isdecimal() else (name, ()), []).append(name)
    joined: dict[str, list[_Entry]] = {}
    for names in groups.values():
        last = names[0].rpartition(".")[2]
        numbers = number_ranges(int(name.rpartition(".")[2]) for name in names) if len(names) > 1 else last
        joined[names[0].removesuffix(last) + numbers] = [entry for name in names for entry in inside[name]]
    return joined

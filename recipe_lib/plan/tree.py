"""What is live at the peak as a tree: kind, then layer or module, then what lies inside. No torch in here.

Layers that hold the same are one branch (`model.layers.0-31`). A node is the sum of its branches, to the byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from recipe_lib.plan.result import Alive, RankPlan
from recipe_lib.plan.trace import STORAGE_KINDS

# (path below the node, bytes, storages)
_Entry = tuple[tuple[str, ...], int, int]


@dataclass
class Node:
    """A branch. bytes, count: of all storages in it; children: largest first, none for a leaf."""

    name: str
    bytes: int
    count: int
    children: list["Node"] = field(default_factory=list)


def alive_tree(rank: RankPlan) -> Node:
    """The tree of one rank's largest active peak; its kinds are in the order of `STORAGE_KINDS`.

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


def folded(children: list[Node], *, smallest: float, most: int) -> list[Node]:
    """The children, those below `smallest` bytes and those after the first `most` as one node `N smaller`."""
    large = [child for child in children if abs(child.bytes) >= smallest][:most]
    small = [child for child in children if not any(child is kept for kept in large)]
    if len(small) < 2:
        return children
    rest = Node(f"{len(small)} smaller", sum(node.bytes for node in small), sum(node.count for node in small))
    return [*large, rest]


def shares(total: int, parts: list[int]) -> list[int]:
    """Whole numbers in the proportion of `parts` whose sum is `total`; each is less than 1 off its exact share.

    So that rounded figures in a report add up to the rounded figure above them (largest remainder).
    """
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    found = [total * part // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda at: (-(total * parts[at] % abs(whole)), at))
    for at in by_remainder[: total - sum(found)]:
        found[at] += 1
    return found


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
    segments = name.split(".")
    at = next((index for index, segment in enumerate(segments) if segment.isdecimal()), None)
    if at is None:
        return name, None, ""
    before = "".join(f"{segment}." for segment in segments[:at])
    after = "".join(f".{segment}" for segment in segments[at + 1 :])
    return before, int(segments[at]), after


def number_ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _path(alive: Alive) -> tuple[str, ...]:
    """The layer as one name, then what is inside it; outside of layers all as one name.

    A parameter's full name says where it belongs.
    """
    if "." in alive.label:
        segments = alive.label.split(".")
    else:
        segments = [name for name in (*alive.module.split("."), alive.label) if name]
    if not segments:
        return ("outside of modules",)
    at = next((index for index, segment in enumerate(segments) if segment.isdecimal()), None)
    cut = at + 1 if at is not None else len(segments)
    return (".".join(segments[:cut]), *segments[cut:])


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
    """Branches that differ in a number at the end of their name only, and hold the same, made one."""
    groups: dict[tuple[str, tuple[_Entry, ...]], list[str]] = {}
    for name, entries in inside.items():
        before, last = name[: len(name) - len(name.rpartition(".")[2])], name.rpartition(".")[2]
        key = (before, tuple(sorted(entries))) if last.isdecimal() else (name, ())
        groups.setdefault(key, []).append(name)
    joined: dict[str, list[_Entry]] = {}
    for (before, _), names in groups.items():
        if len(names) == 1:
            joined[names[0]] = inside[names[0]]
        else:
            numbers = number_ranges(int(name.rpartition(".")[2]) for name in names)
            joined[f"{before}{numbers}"] = [entry for name in names for entry in inside[name]]
    return joined

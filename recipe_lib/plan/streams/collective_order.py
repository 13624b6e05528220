"""Whether the collectives of all ranks meet: the same ones in the same order in each group, and no circle of waits.

NCCL's rules: the k-th call of a rank on a communicator is matched with the k-th of every other rank by nothing but its
place; a communicator does one after the other; each begins when all of its ranks have come to it. The exchanges of two
ranks have a communicator of their own. The first call on a communicator makes it, for which the host of each rank
waits until all of its ranks are there (`ncclCommInitRank`). No torch in here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest

Group = tuple[str, tuple[int, ...], bool]  # dimension of the mesh, ranks, whether it is for exchanges of two
_MATCHES = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call. bytes: of the whole tensor, or of the message. place: `file:line`. after: numbers of earlier
    calls of the rank that are done before it can begin, the last of each stream. host_after: those that the host had
    waited for when it was issued."""

    operation: str
    group: Group
    bytes: int
    dtype: str
    place: str
    after: tuple[int, ...] = ()
    host_after: tuple[int, ...] = ()

    def text(self) -> str:
        """`all_gather of 1024 bytes bf16 at recipes/x.py:12`."""
        return f"{self.operation} of {self.bytes} bytes {self.dtype} at {self.place}"

    def matches(self, other: "CollectiveCall") -> bool:
        """Whether this and another rank's are two sides of one collective."""
        same = (self.bytes, self.dtype) == (other.bytes, other.dtype)
        return same and other.operation == _MATCHES.get(self.operation, self.operation)


Calls = Mapping[int, Sequence[CollectiveCall]]  # by rank, in the order in which it issues them
_Node = tuple[Group, int]  # a collective, by its place in its group; -1: making the communicator


def order_faults(calls: Calls) -> list[str]:
    """What would hang or exchange the wrong tensors, in words; empty: nothing. calls: of all ranks of the groups."""
    faults = mismatches(calls)
    return faults or circles(calls)


def mismatches(calls: Calls) -> list[str]:
    """Of each group the first call that not all of its ranks make alike."""
    of_group: dict[Group, dict[int, list[CollectiveCall]]] = defaultdict(lambda: defaultdict(list))
    for rank, made in calls.items():
        for call in made:
            of_group[call.group][rank].append(call)
    faults = []
    for group, ranks in of_group.items():
        first = next(rank for rank in group[1] if rank in calls)
        for other in group[1]:
            if other == first or other not in calls:
                continue
            fault = _first_difference(group, first, ranks[first], other, ranks[other])
            if fault:
                faults.append(fault)
                break
    return faults


def _first_difference(
    group: Group, first: int, one: Sequence[CollectiveCall], other_rank: int, other: Sequence[CollectiveCall]
) -> str:
    for place, (here, there) in enumerate(zip_longest(one, other)):
        if here is None or there is None or not here.matches(there):
            sides = [
                f"rank {rank} {'makes no such call' if call is None else f'calls {call.text()}'}"
                for rank, call in ((first, here), (other_rank, there))
            ]
            return f"call {place + 1} of the ranks {_words(group)}: {', '.join(sides)}"
    return ""


def _words(group: Group) -> str:
    dim, ranks, pair = group
    return f"{', '.join(map(str, ranks))} ({'exchange' if pair else dim})"


def circles(calls: Calls) -> list[str]:
    """A circle of collectives each of which waits for the next, if there is one."""
    needs = _needs(calls)
    try:
        TopologicalSorter(needs).prepare()
        return []
    except CycleError as error:
        circle = error.args[1][::-1]  # its end is its beginning; each comes before the next one there
    places: dict[_Node, str] = {}
    for rank, node, call in _numbered(calls):
        places.setdefault(node, f"{call.text()} (rank {rank})")
        places.setdefault((node[0], -1), f"the communicator for {call.text()} (rank {rank})")
    return ["a circle of waits: " + ", which waits for ".join(places[node] for node in circle)]


def _numbered(calls: Calls) -> list[tuple[int, _Node, CollectiveCall]]:
    found = []
    for rank, made in calls.items():
        count: dict[Group, int] = defaultdict(int)
        for call in made:
            found.append((rank, (call.group, count[call.group]), call))
            count[call.group] += 1
    return found


def _needs(calls: Calls) -> dict[_Node, set[_Node]]:
    """By collective those that have to be done before it can begin, on any of its ranks."""
    needs: dict[_Node, set[_Node]] = defaultdict(set)
    nodes: dict[int, list[_Node]] = defaultdict(list)
    made: dict[int, list[_Node]] = defaultdict(list)  # by rank, its communicators so far
    for rank, node, call in _numbered(calls):
        own = nodes[rank]
        group, number = node
        begins = (group, -1)
        if number == 0:
            needs[begins] |= {*(own[at] for at in call.host_after), *made[rank][-1:]}
            made[rank].append(begins)
        else:
            needs[node].add((group, number - 1))
        needs[node] |= {*(own[at] for at in call.after), *made[rank][-1:]}
        own.append(node)
    return needs

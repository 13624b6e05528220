"""Whether the collectives of all ranks meet: the same ones in the same order in each group, and no
circle of waits.

NCCL's rules: the k-th call of a rank on a communicator is matched with the k-th of every other rank
by nothing but its place; a communicator does one after the other; each begins when all of its ranks
have come to it. The exchanges of two ranks have a communicator of their own. The first call on a
communicator makes it, for which the host of each rank waits until all of its ranks are there
(`ncclCommInitRank`). No torch in here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

Group = tuple[
    str, tuple[int, ...], bool
]  # dimension of the mesh, ranks, whether it is for exchanges of two
_MATCHES = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call. bytes: of the whole tensor, or of the message. place: `file:line`. after:
    numbers of earlier calls of the rank that are done before it can begin, the last of each stream.
    host_after: those that the host had waited for when it was issued.
    """

    operation: str
    group: Group
    bytes: int
    dtype: str
    place: str
    after: tuple[int, ...] = ()
    host_after: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation} of {self.bytes} bytes {self.dtype} at {self.place}"


Calls = Mapping[int, Sequence[CollectiveCall]]  # by rank, in the order in which it issues them
_Node = tuple[Group, int]  # a collective, by its place in its group; -1: making the communicator


def list_order_faults(calls: Calls) -> list[str]:
    """What would hang or exchange the wrong tensors, in words; empty: nothing. calls: of all ranks
    of the groups.
    """
    return find_mismatches(calls) or find_circles(calls)


def find_mismatches(calls: Calls) -> list[str]:
    """Of each group the first call that not all of its ranks make alike."""
    made = {(rank, node): call for rank, node, call in _number_calls(calls)}
    faults: dict[Group, str] = {}
    for (rank, (group, place)), call in made.items():
        expected = (_MATCHES.get(call.operation, call.operation), call.bytes, call.dtype)
        for other in group[1]:
            met = made.get((other, (group, place)))
            if other == rank or other not in calls or group in faults:
                continue
            if met is None or (met.operation, met.bytes, met.dtype) != expected:
                answer = "makes no such call" if met is None else f"calls {met}"
                where = f"{', '.join(map(str, group[1]))} ({'exchange' if group[2] else group[0]})"
                faults[group] = (
                    f"call {place + 1} of the ranks {where}: rank {rank} calls {call}, rank {other}"
                    f" {answer}"
                )
    return list(faults.values())


def find_circles(calls: Calls) -> list[str]:
    """A circle of collectives each of which waits for the next, if there is one."""
    needs: dict[_Node, set[_Node]] = defaultdict(
        set
    )  # what has to be done before it can begin, on any of its ranks
    words: dict[_Node, str] = {}
    nodes: dict[int, list[_Node]] = defaultdict(list)
    made: dict[int, list[_Node]] = defaultdict(list)  # by rank, its communicators so far
    for rank, node, call in _number_calls(calls):
        own = nodes[rank]
        group, number = node
        begins = (group, -1)
        if number == 0:
            needs[begins] |= {*(own[at] for at in call.host_after), *made[rank][-1:]}
            made[rank].append(begins)
            words.setdefault(begins, f"the communicator for {call} (rank {rank})")
        else:
            needs[node].add((group, number - 1))
        needs[node] |= {*(own[at] for at in call.after), *made[rank][-1:]}
        words.setdefault(node, f"{call} (rank {rank})")
        own.append(node)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle = error.args[1][
            ::-1
        ]  # its end is its beginning; each comes before the next one there
        return ["a circle of waits: " + ", which waits for ".join(words[node] for node in circle)]
    return []


def _number_calls(calls: Calls) -> Iterator[tuple[int, _Node, CollectiveCall]]:
    """Yield the ranks' calls, each with its place in its group."""
    for rank, made in calls.items():
        count: Counter[Group] = Counter()
        for call in made:
            yield rank, (call.group, count[call.group]), call
            count[call.group] += 1

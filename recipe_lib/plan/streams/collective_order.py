"""Collectives of all ranks compared: the same ones in the same order, and no circle of waits.

NCCL's rules: the k-th call of a rank on a communicator is matched with the k-th of every other rank
by nothing but its position; a communicator does one after the other; each begins when all of its
ranks have come to it. The exchanges of two ranks have a communicator of their own. The first call
on a communicator makes it, for which the host of each rank waits until all of its ranks are there
(`ncclCommInitRank`). No torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

# (dimension of the mesh, ranks, whether it is for exchanges of two)
Group = tuple[str, tuple[int, ...], bool]
_MATCHES = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call."""

    operation: str
    group: Group
    bytes: int  # of the whole tensor, or of the message
    dtype: str
    line: str  # `file:line`
    # Indices of earlier calls of the rank that are done before it can begin, the last of each
    # stream.
    after: tuple[int, ...] = ()
    # Those that the host had waited for when it was issued.
    host_after: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation} of {self.bytes} bytes {self.dtype} at {self.line}"


Calls = Mapping[int, Sequence[CollectiveCall]]  # by rank, in the order in which it issues them
_Node = tuple[Group, int]  # a collective, by its index in its group; -1: making the communicator


def list_order_faults(calls: Calls) -> list[str]:
    """Return what would hang or exchange the wrong tensors, in words.

    calls: of all ranks of the groups.
    """
    return find_mismatches(calls) or find_circles(calls)


def find_mismatches(calls: Calls) -> list[str]:
    """Return for each group the first call that not all of its ranks make alike, in words."""
    numbered = {(rank, node): call for rank, node, call in _number_calls(calls)}
    faults: dict[Group, str] = {}
    for (rank, (group, index)), call in numbered.items():
        dim, group_ranks, is_exchange = group
        expected = (_MATCHES.get(call.operation, call.operation), call.bytes, call.dtype)
        for peer in group_ranks:
            met = numbered.get((peer, (group, index)))
            if peer == rank or peer not in calls or group in faults:
                continue
            if met is None or (met.operation, met.bytes, met.dtype) != expected:
                answer = "makes no such call" if met is None else f"calls {met}"
                kind = "exchange" if is_exchange else dim
                faults[group] = (
                    f"call {index + 1} of the ranks {', '.join(map(str, group_ranks))} ({kind}):"
                    f" rank {rank} calls {call}, rank {peer} {answer}"
                )
    return list(faults.values())


def find_circles(calls: Calls) -> list[str]:
    """Return a circle of collectives each of which waits for the next, if there is one."""
    # What has to be done before a collective can begin, on any of its ranks.
    needs: dict[_Node, set[_Node]] = defaultdict(set)
    words: dict[_Node, str] = {}
    rank_nodes: dict[int, list[_Node]] = defaultdict(list)  # by rank, its calls so far
    communicators: dict[int, list[_Node]] = defaultdict(list)  # by rank, those made so far
    for rank, node, call in _number_calls(calls):
        nodes = rank_nodes[rank]
        group, index = node
        if index == 0:
            communicator = (group, -1)
            # The host makes one communicator after the other, behind all that it has waited for.
            needs[communicator].update(nodes[earlier] for earlier in call.host_after)
            needs[communicator].update(communicators[rank][-1:])
            communicators[rank].append(communicator)
            words.setdefault(communicator, f"the communicator for {call} (rank {rank})")
        else:
            needs[node].add((group, index - 1))
        needs[node].update(nodes[earlier] for earlier in call.after)
        needs[node].update(communicators[rank][-1:])
        words.setdefault(node, f"{call} (rank {rank})")
        nodes.append(node)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        # Its end is its beginning, and each comes before the next one: reversed, it waits for it.
        circle = error.args[1][::-1]
        return ["a circle of waits: " + ", which waits for ".join(words[node] for node in circle)]
    return []


def _number_calls(calls: Calls) -> Iterator[tuple[int, _Node, CollectiveCall]]:
    """Yield (rank, group and index in it, call) of the ranks' calls."""
    for rank, rank_calls in calls.items():
        count: Counter[Group] = Counter()
        for call in rank_calls:
            yield rank, (call.group, count[call.group]), call
            count[call.group] += 1

"""Compare the collectives of all ranks: the same ones in the same order, and no deadlock.

`check_recipe.check_streams` passes the calls of simulated ranks to `list_order_faults`. By NCCL's
rules the k-th call of a rank on a communicator is matched with the k-th of every other rank. Calls
on it run one after the other; each begins when all ranks have come to it. Two ranks that exchange
have a communicator of their own. The first call makes it: the host of each rank waits until all
are there (`ncclCommInitRank`). Imports no torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

# A communicator: (mesh dimension, ranks, True if it is for send and receive between two ranks).
Group = tuple[str, tuple[int, ...], bool]
# Operation of a rank -> that of its peer, where it is another one.
_MATCHES = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of a collective, a send or a receive."""

    operation: str  # such as `all_gather`, as `trace.Collective.operation`
    group: Group  # the communicator that it runs on
    bytes: int  # of the whole tensor, or of the message
    dtype: str  # such as `bf16`
    line: str  # `file:line` of the code that calls it
    # Indices of earlier calls of the rank that are done before it begins: the last of each stream.
    after: tuple[int, ...] = ()
    # Indices of earlier calls that the host had waited for when it issued this one.
    host_after: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation} of {self.bytes} bytes {self.dtype} at {self.line}"


Calls = Mapping[int, Sequence[CollectiveCall]]  # rank -> its calls, in the order of issue
# (communicator, index of a collective on it); index -1 is the making of the communicator.
_Node = tuple[Group, int]


def list_order_faults(calls: Calls) -> list[str]:
    """Return a sentence for each fault by which ranks would hang or exchange the wrong tensors.

    A circle of waits (a deadlock) is looked for only if all calls match.
    """
    return find_mismatches(calls) or find_circles(calls)


def find_mismatches(calls: Calls) -> list[str]:
    """Return a sentence for the first call of each group that not all of its ranks make alike.

    Ranks without an entry in `calls` are not compared.
    """
    calls_by_node = {(rank, node): call for rank, node, call in _number_calls(calls)}
    faults: dict[Group, str] = {}
    for (rank, (group, index)), call in calls_by_node.items():
        dim, group_ranks, is_exchange = group
        expected = (_MATCHES.get(call.operation, call.operation), call.bytes, call.dtype)
        for peer in group_ranks:
            peer_call = calls_by_node.get((peer, (group, index)))
            if peer == rank or peer not in calls or group in faults:
                continue
            if (
                peer_call is None
                or (peer_call.operation, peer_call.bytes, peer_call.dtype) != expected
            ):
                answer = "makes no such call" if peer_call is None else f"calls {peer_call}"
                kind = "exchange" if is_exchange else dim
                faults[group] = (
                    f"call {index + 1} of the ranks {', '.join(map(str, group_ranks))} ({kind}):"
                    f" rank {rank} calls {call}, rank {peer} {answer}"
                )
    return list(faults.values())


def find_circles(calls: Calls) -> list[str]:
    """Return a sentence for a circle of collectives that wait for each other; [] without one."""
    # Collective -> collectives that have to be done before it can begin, on any of its ranks.
    needs: dict[_Node, set[_Node]] = defaultdict(set)
    texts: dict[_Node, str] = {}  # collective -> its description
    rank_nodes: dict[int, list[_Node]] = defaultdict(list)  # rank -> its collectives so far
    # Rank -> communicators that it has made so far.
    communicators: dict[int, list[_Node]] = defaultdict(list)
    for rank, node, call in _number_calls(calls):
        nodes = rank_nodes[rank]
        group, index = node
        if index == 0:
            communicator = (group, -1)
            # The host makes one communicator after the other, after all calls that it waited for.
            needs[communicator].update(nodes[earlier] for earlier in call.host_after)
            needs[communicator].update(communicators[rank][-1:])
            communicators[rank].append(communicator)
            texts.setdefault(communicator, f"the communicator for {call} (rank {rank})")
        else:
            needs[node].add((group, index - 1))
        needs[node].update(nodes[earlier] for earlier in call.after)
        needs[node].update(communicators[rank][-1:])
        texts.setdefault(node, f"{call} (rank {rank})")
        nodes.append(node)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        # graphlib lists the first to be done first, and once more at the end. Reversed, each waits
        # for the next.
        circle = error.args[1][::-1]
        return ["a circle of waits: " + ", which waits for ".join(texts[node] for node in circle)]
    return []


def _number_calls(calls: Calls) -> Iterator[tuple[int, _Node, CollectiveCall]]:
    """Yield (rank, (group, index of the call in the group), call) for all calls."""
    for rank, rank_calls in calls.items():
        num_calls: Counter[Group] = Counter()  # of the rank so far, by group
        for call in rank_calls:
            yield rank, (call.group, num_calls[call.group]), call
            num_calls[call.group] += 1

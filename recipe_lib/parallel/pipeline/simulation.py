"""How long a pipeline takes, where its ranks wait and what they hold: simulated, and in closed
form.

The simulation follows the lists that the ranks run (see schedules.py), with the rules of NCCL: a
computation waits for what it receives; a send waits for nothing; what two ranks exchange goes one
after the other, each when both have come to it. Numbers keep their type, so that whole numbers give
exact results. No torch.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from recipe_lib.config.mesh import count_stages, find_stage_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedules import (
    COMPUTE,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    UNITS,
    WEIGHT,
    Action,
    Orders,
    count_moments,
    get_exchange,
    get_receive,
)


@dataclass(frozen=True)
class TimedAction:
    """A rank's computation from `start` to `end`, in seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way. action: the send that it is; sender, receiver: places of ranks; seconds:
    see ActionSpan.
    """

    sender: int
    receiver: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline. spans: by rank and start. transfers: by start. ranks: how many."""

    ranks: int
    spans: list[TimedAction]
    transfers: list[Transfer]

    @property
    def total(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.end for span in self.spans), default=0)

    def sum_busy_seconds(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    def compute_idle_share(self, rank: int) -> float:
        """Return the part of `total` in which a rank does not compute, waiting before its first and
        after its last action included.
        """
        return (self.total - self.sum_busy_seconds(rank)) / self.total

    @property
    def bubble(self) -> float:
        """The part of all ranks' time together, ranks x `total`, in which they do not compute: the
        mean of `compute_idle_share`.
        """
        available = self.ranks * self.total
        return (available - sum(span.end - span.start for span in self.spans)) / available


def simulate(
    orders: Orders,
    parallel: ParallelConfig,
    seconds: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda send: 0,
) -> Timeline:
    """Simulate a step in which every rank of a pipeline runs its list, with transfers
    (`add_transfers`) or with none.

    seconds: of a computation. transfer: of a send, from when both ranks have come to it until the
    tensor is there. Raises ValueError for lists that deadlock, or that two ranks exchange tensors
    by in different orders.
    """
    return _Simulation(orders, parallel, seconds, transfer).run()


class _Simulation:
    """What is under way: where each rank is, and which of its exchanges wait for the other rank."""

    def __init__(
        self,
        orders: Orders,
        parallel: ParallelConfig,
        seconds: Callable[[Action], float],
        transfer: Callable[[Action], float],
    ) -> None:
        self._orders, self._parallel = orders, parallel
        self._seconds, self._transfer = seconds, transfer
        self._stages = count_stages(parallel)
        self._at = dict.fromkeys(orders, 0)
        self._clock: dict[int, float] = dict.fromkeys(orders, 0)
        self._across = {
            action for order in orders.values() for action in order if action.kind not in COMPUTE
        }
        # By (rank, other rank): the sends and receives that the rank has come to and the other has
        # not, and when.
        self._waiting: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        self._free: dict[tuple[int, int], float] = {}  # by pair, when its last exchange ended
        self._arrived: dict[Action, float] = {}  # by receive
        self._spans: list[TimedAction] = []
        self._transfers: list[Transfer] = []

    def run(self) -> Timeline:
        """Run all actions of all ranks."""
        moved = True
        while moved:
            moved = False
            for rank, order in self._orders.items():
                while self._at[rank] < len(order) and self._do(rank, order[self._at[rank]]):
                    self._at[rank] += 1
                    moved = True
        left = [
            f"rank {rank}: {order[self._at[rank]]}"
            for rank, order in self._orders.items()
            if self._at[rank] < len(order)
        ]
        left += [str(entry[0]) for entries in self._waiting.values() for entry in entries]
        if left:
            raise ValueError(f"the pipeline deadlocks: {', '.join(left)}")
        self._spans.sort(key=lambda span: (span.rank, span.start))
        self._transfers.sort(key=lambda found: (found.start, found.sender, found.receiver))
        return Timeline(len(self._orders), self._spans, self._transfers)

    def _do(self, rank: int, action: Action) -> bool:
        """Run an action of a rank; return False if what it waits for has not arrived."""
        if action.kind not in COMPUTE:
            self._exchange(rank, action)
            return True
        received = get_receive(action, self._stages)
        start = self._clock[rank]
        if received is not None:
            if received not in self._arrived:
                return False
            start = max(start, self._arrived[received])
        self._clock[rank] = end = start + self._seconds(action)
        self._spans.append(TimedAction(rank, action, start, end))
        exchange = get_exchange(action, self._stages)
        if exchange is not None and exchange[1] not in self._across:  # it is there at once
            self._arrived[exchange[1]] = end
        return True

    def _exchange(self, rank: int, action: Action) -> None:
        """Exchange at once if the other rank is there already, else when it comes."""
        partner = get_partner(action)
        other = find_stage_rank(self._parallel, partner.stage)
        theirs = self._waiting[other, rank]
        if not theirs:
            self._waiting[rank, other].append((action, self._clock[rank]))
            return
        found, since = theirs.popleft()
        if found != partner:
            raise ValueError(
                f"rank {rank} comes to {action} when rank {other} is at {found}, expected {partner}"
            )
        pair = min(rank, other), max(rank, other)
        sends = action.kind in (SEND_ACTIVATION, SEND_GRADIENT)
        send, receive = (action, partner) if sends else (partner, action)
        start = max(since, self._clock[rank], self._free.get(pair, 0))
        self._free[pair] = self._arrived[receive] = end = start + self._transfer(send)
        sender, receiver = (rank, other) if sends else (other, rank)
        self._transfers.append(Transfer(sender, receiver, send, start, end))


def add_transfers(orders: Orders, parallel: ParallelConfig) -> Orders:
    """Return the orders with what is sent and received.

    A tensor is sent when it is made, and asked for one computation ahead: with NCCL a transfer
    begins when the receiver's stream has come to it, so that one that is asked for just before it
    is used is never hidden. Two ranks exchange all their tensors in one order, that in which they
    are made, since NCCL matches them by nothing else; so one that is made earlier than another is
    also asked for before the other is sent or asked for, and nothing is asked for ahead of what
    this rank has still to send the other first.
    """
    stages = count_stages(parallel)
    wanted: dict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(
        list
    )  # by pair of ranks: (send, receive)
    timeline = simulate(orders, parallel, lambda action: UNITS[action.kind])
    for span in sorted(timeline.spans, key=lambda span: (span.end, span.rank, span.action)):
        rank = span.rank
        exchange = get_exchange(span.action, stages)
        if exchange is None:
            continue
        peer = find_stage_rank(parallel, exchange[1].stage)
        if peer != rank:
            wanted[min(rank, peer), max(rank, peer)].append(exchange)
    found: Orders = {}
    for rank, order in orders.items():
        found[rank] = _list_transfers(rank, order, parallel, wanted, stages)
    return found


def _list_transfers(
    rank: int,
    order: list[Action],
    parallel: ParallelConfig,
    wanted: dict[tuple[int, int], list[tuple[Action, Action]]],
    stages: int,
) -> list[Action]:
    """Put a rank's sends after its actions, and its receives before the actions before them, each
    pair of ranks in its one order.
    """
    mine: dict[int, list[Action]] = {}  # by the other rank, what this one does in their order
    place: dict[Action, tuple[int, int]] = {}
    for pair, exchanges in wanted.items():
        if rank not in pair:
            continue
        other = pair[0] if pair[1] == rank else pair[1]
        mine[other] = [
            send if find_stage_rank(parallel, send.stage) == rank else receive
            for send, receive in exchanges
        ]
        place |= {action: (other, number) for number, action in enumerate(mine[other])}
    reached = dict.fromkeys(mine, 0)
    found: list[Action] = []

    def up_to(action: Action) -> None:
        other, number = place[action]
        while reached[other] <= number:
            found.append(mine[other][reached[other]])
            reached[other] += 1

    for action, following in zip_longest(order, order[1:]):
        received = get_receive(action, stages)
        if received in place:
            up_to(received)
        ahead = get_receive(following, stages) if following is not None else None
        if ahead in place and reached[place[ahead][0]] == place[ahead][1]:
            up_to(ahead)
        found.append(action)
        exchange = get_exchange(action, stages)
        if exchange is not None and exchange[0] in place:
            up_to(exchange[0])
    return found


def get_partner(action: Action) -> Action:
    """Return the receive that a send goes to, the send that a receive waits for."""
    kind, step = {
        SEND_ACTIVATION: (RECEIVE_ACTIVATION, 1),
        RECEIVE_ACTIVATION: (SEND_ACTIVATION, -1),
        SEND_GRADIENT: (RECEIVE_GRADIENT, -1),
        RECEIVE_GRADIENT: (SEND_GRADIENT, 1),
    }[action.kind]
    return Action(action.stage + step, kind, action.micro_batch)


# What a rank of a pipeline holds for backward after each of its actions, in bytes, from the sizes
# of its stages.
#
# A stage keeps of a micro-batch: from forward on what autograd needs; from the input gradient on,
# where the weight gradients are deferred, what those take; then nothing. A tensor from another rank
# is there from its receive until it is used, one between two stages of the same rank from when it
# is made; one for another rank from when it is made until that rank has taken it. Parameters,
# gradients and states are not counted.


@dataclass(frozen=True)
class StageBytes:
    """Of one micro-batch. kept: after its forward, the stage's input included, of the last stage
    its output too. deferred: after its input gradient, until its weight gradients are made. Each
    storage counts once.
    """

    kept: int
    deferred: int = 0


@dataclass(frozen=True)
class Live:
    """Bytes after an action. kept, deferred: of the stages, see `StageBytes`. received: of tensors
    from other ranks, not used yet. handed: between two stages of this rank. waiting: made for
    another rank, not sent yet. sent: on their way, counted until the other rank has taken them; it
    may be sooner.
    """

    action: Action
    kept: int
    deferred: int
    received: int
    handed: int
    waiting: int
    sent: int


def compute_live_bytes(
    order: Sequence[Action],
    parallel: ParallelConfig,
    stages: Mapping[int, StageBytes],
    boundary: int,
    taken: Mapping[Action, int] | None = None,
) -> list[Live]:
    """Return what a rank holds after each action of its list, transfers included.

    stages: the rank's own. boundary: bytes of one micro-batch's tensor between two stages; a
    gradient is as large. taken: until when sent tensors count, see `find_latest_taken`, which is the
    default, and `find_taken`.
    """
    count = count_stages(parallel)
    taken = find_latest_taken(order, parallel) if taken is None else taken
    transfers = {action for action in order if action.kind not in COMPUTE}
    kept = deferred = 0
    received, handed = set[Action](), set[Action]()  # receives; those that need no transfer
    waiting, sent = set[Action](), set[Action]()  # sends

    found = []
    for number, action in enumerate(order):
        sent -= {send for send in sent if taken[send] <= number}
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            received.add(action)
        elif action.kind not in COMPUTE:
            waiting.discard(action)
            sent.add(action)
        else:
            used = get_receive(action, count)
            if used is not None:
                received.discard(used)
                handed.discard(used)
            stage = stages[action.stage]
            kept += {FORWARD: stage.kept, WEIGHT: 0}.get(action.kind, -stage.kept)
            deferred += {INPUT: stage.deferred, WEIGHT: -stage.deferred}.get(action.kind, 0)
            exchange = get_exchange(action, count)
            if exchange is not None:
                send, receive = exchange
                if send in transfers:
                    waiting.add(send)
                else:
                    handed.add(receive)
        found.append(
            Live(
                action,
                kept=kept,
                deferred=deferred,
                received=len(received) * boundary,
                handed=len(handed) * boundary,
                waiting=len(waiting) * boundary,
                sent=len(sent) * boundary,
            )
        )
    return found


def find_latest_taken(order: Sequence[Action], parallel: ParallelConfig) -> dict[Action, int]:
    """By send of a rank's list: the number of the action before which the other rank has taken it,
    at the latest.

    Two ranks exchange in one order: who has used what comes after a send in it knows that the send
    is done. The length of the list where nothing comes after it.
    """
    stages = count_stages(parallel)
    used = {
        get_receive(action, stages): number
        for number, action in enumerate(order)
        if action.kind in COMPUTE
    }
    found: dict[Action, int] = {}
    open_: dict[
        int, list[Action]
    ] = {}  # by the other rank, sends that nothing has come after so far
    for action in order:
        if action.kind in COMPUTE:
            continue
        other = find_stage_rank(parallel, get_partner(action).stage)
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            for send in open_.pop(other, []):
                found[send] = used[action]
        else:
            open_.setdefault(other, []).append(action)
    return found | {send: len(order) for sends in open_.values() for send in sends}


def find_taken(
    timeline: Timeline, order: Sequence[Action], rank: int, parallel: ParallelConfig
) -> dict[Action, int]:
    """Return the same as `find_latest_taken`, but sooner: the number of the action before which a
    rank waits until a send is taken.

    In a simulation of this list it has been taken one computation before: a rank that waited
    already there would be held up by every small delay of a neighbor. Ranks that wait so come to an
    end, in the order of the simulation.
    """
    begins = {span.action: span.start for span in timeline.spans if span.rank == rank}
    computed = [
        (begins[action], number) for number, action in enumerate(order) if action.kind in COMPUTE
    ]
    surely = find_latest_taken(order, parallel)
    found = {}
    for way in timeline.transfers:
        if way.sender == rank:
            behind = [number for begin, number in computed if begin >= way.end][1:2]
            found[way.action] = min([*behind, surely[way.action]])
    return found


def count_in_flight(order: Sequence[Action]) -> tuple[int, int]:
    """Return (the most micro-batches between F and B or I, the most between I and W) of a rank's
    list, stages counted separately.
    """
    counts = [list(moment.values()) for moment in count_moments(order)]
    most_ahead = max((sum(ahead for ahead, _ in moment) for moment in counts), default=0)
    most_deferred = max((sum(deferred for _, deferred in moment) for moment in counts), default=0)
    return most_ahead, most_deferred

"""Simulate a pipeline: how long a step takes, where its ranks wait, and how many bytes they hold.

The driver puts sends and receives into a rank's order by `add_transfers`; the planner (`tune plan`)
calls `simulate` and `compute_live_bytes`. A stage is consecutive layers of one rank, which may have
several. An action is what a stage does with one micro-batch: a computation, a send or a receive.
Computations are F for forward, and B for backward, or its two halves: I for the gradient of the
input, W for those of the weights.
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

# This file imports no torch. Times keep their type, so that ints give exact results.


@dataclass(frozen=True)
class TimedAction:
    """A computation of a rank, and when it runs."""

    rank: int  # its index in the pipeline
    action: Action  # F, B, I or W
    start: float  # seconds since the step began
    end: float  # likewise


@dataclass(frozen=True)
class Transfer:
    """A tensor that one rank sends to another, and when."""

    sender: int  # a rank's index in the pipeline
    receiver: int  # likewise
    action: Action  # the send
    start: float  # seconds since the step began, when both ranks have come to it and are free
    end: float  # when the tensor is there


@dataclass(frozen=True)
class Timeline:
    """A simulated step of a pipeline."""

    ranks: int  # number of ranks
    spans: list[TimedAction]  # sorted by rank and start
    transfers: list[Transfer]  # sorted by start

    @property
    def total(self) -> float:
        """Return the seconds until the last rank is done."""
        return max((span.end for span in self.spans), default=0)

    def sum_busy_seconds(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    def compute_idle_share(self, rank: int) -> float:
        """Return the part of `total` in which a rank does not compute, its ends included."""
        return (self.total - self.sum_busy_seconds(rank)) / self.total

    @property
    def bubble(self) -> float:
        """Return the part of all ranks' time, ranks x `total`, in which they do not compute."""
        available = self.ranks * self.total
        return (available - sum(span.end - span.start for span in self.spans)) / available


def simulate(
    orders: Orders,
    parallel: ParallelConfig,
    seconds: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda send: 0,
) -> Timeline:
    """Simulate a step in which every rank of a pipeline runs its actions, by the rules of NCCL.

    A computation waits for the tensor that it uses. A send does not hold up its rank. Two ranks
    exchange one tensor after the other, each when both have come to it.

    orders: by rank, its actions with sends and receives (`add_transfers`), or without any: tensors
    then arrive at once. seconds: returns the duration of a computation. transfer: returns that of a
    send, from when both ranks have come to it until the tensor is there. Raise ValueError for
    orders that deadlock, and if two ranks would exchange their tensors in different orders.
    """
    return _Simulation(orders, parallel=parallel, seconds=seconds, transfer=transfer).run()


class _Simulation:
    """The state of a simulated step: where each rank is, and which of its exchanges wait."""

    def __init__(
        self,
        orders: Orders,
        parallel: ParallelConfig,
        seconds: Callable[[Action], float],
        transfer: Callable[[Action], float],
    ) -> None:
        self._orders = orders
        self._parallel = parallel
        self._seconds = seconds
        self._transfer = transfer
        self._stages = count_stages(parallel)
        self._next = dict.fromkeys(orders, 0)  # by rank, the index of its next action
        self._clock: dict[int, float] = dict.fromkeys(orders, 0)  # by rank, when it is free
        # All sends and receives between ranks; empty if the orders have none.
        self._exchange_actions = {
            action for order in orders.values() for action in order if action.kind not in COMPUTE
        }
        # By (rank, other rank), the sends and receives that the rank has come to and the other has
        # not, each with the time when it came.
        self._waiting: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        # By pair of ranks, the lower one first, when its last exchange ended.
        self._free_at: dict[tuple[int, int], float] = {}
        self._arrived: dict[Action, float] = {}  # by receive, when the tensor is there
        self._spans: list[TimedAction] = []
        self._transfers: list[Transfer] = []

    def run(self) -> Timeline:
        """Run all actions of all ranks, each as soon as its input has arrived.

        Raise ValueError if ranks wait for each other, or a send or receive has no partner.
        """
        has_progress = True
        while has_progress:
            has_progress = False
            for rank, order in self._orders.items():
                while self._next[rank] < len(order) and self._run(rank, order[self._next[rank]]):
                    self._next[rank] += 1
                    has_progress = True
        stuck_actions = [
            f"rank {rank}: {order[self._next[rank]]}"
            for rank, order in self._orders.items()
            if self._next[rank] < len(order)
        ]
        stuck_actions += [str(entry[0]) for entries in self._waiting.values() for entry in entries]
        if stuck_actions:
            raise ValueError(f"the pipeline deadlocks: {', '.join(stuck_actions)}")
        self._spans.sort(key=lambda span: (span.rank, span.start))
        self._transfers.sort(key=lambda sent: (sent.start, sent.sender, sent.receiver))
        return Timeline(len(self._orders), self._spans, self._transfers)

    def _run(self, rank: int, action: Action) -> bool:
        """Run an action of a rank; return False, and change nothing, if its input is not there."""
        if action.kind not in COMPUTE:
            self._exchange(rank, action)
            return True
        receive = get_receive(action, self._stages)
        start = self._clock[rank]
        if receive is not None:
            if receive not in self._arrived:
                return False
            start = max(start, self._arrived[receive])
        self._clock[rank] = end = start + self._seconds(action)
        self._spans.append(TimedAction(rank=rank, action=action, start=start, end=end))
        exchange = get_exchange(action, self._stages)
        # The next stage's input is there at once between two stages of a rank, and in orders
        # without transfers.
        if exchange is not None and exchange[1] not in self._exchange_actions:
            self._arrived[exchange[1]] = end
        return True

    def _exchange(self, rank: int, action: Action) -> None:
        """Run a send or receive if the other rank has come to its side of it; else note it.

        Raise ValueError if the other rank's next exchange with this one is a different one.
        """
        partner = get_partner(action)
        peer = find_stage_rank(self._parallel, partner.stage)
        waiting_of_peer = self._waiting[peer, rank]
        if not waiting_of_peer:
            self._waiting[rank, peer].append((action, self._clock[rank]))
            return
        peer_action, waiting_since = waiting_of_peer.popleft()
        if peer_action != partner:
            raise ValueError(
                f"rank {rank} comes to {action} when rank {peer} is at {peer_action}, expected"
                f" {partner}"
            )
        pair = (min(rank, peer), max(rank, peer))
        is_sender = action.kind in (SEND_ACTIVATION, SEND_GRADIENT)
        send, receive = (action, partner) if is_sender else (partner, action)
        start = max(waiting_since, self._clock[rank], self._free_at.get(pair, 0))
        self._free_at[pair] = self._arrived[receive] = end = start + self._transfer(send)
        sender, receiver = (rank, peer) if is_sender else (peer, rank)
        self._transfers.append(
            Transfer(sender=sender, receiver=receiver, action=send, start=start, end=end)
        )


def add_transfers(orders: Orders, parallel: ParallelConfig) -> Orders:
    """Return the orders with the sends and receives between ranks put in.

    A tensor is sent when it is made, and its receive stands one computation before the one that
    uses it. Two ranks exchange all their tensors in one order: that in which a simulation makes
    them. To keep it, a receive may have to stand sooner, before another send or receive, or just
    before its use, after a send to the same rank.
    """
    # One computation ahead, since with NCCL a transfer begins when the receiver's stream has come
    # to it: a receive just before the use would never overlap with computation. In one order, since
    # NCCL matches the tensors of two ranks by nothing else.
    stages = count_stages(parallel)
    # By pair of ranks, the lower one first: (send, receive) of each tensor, in that order.
    exchanges: dict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(list)
    timeline = simulate(orders, parallel, lambda action: UNITS[action.kind])
    for span in sorted(timeline.spans, key=lambda span: (span.end, span.rank, span.action)):
        rank = span.rank
        exchange = get_exchange(span.action, stages)
        if exchange is None:
            continue
        peer = find_stage_rank(parallel, exchange[1].stage)
        if peer != rank:
            exchanges[min(rank, peer), max(rank, peer)].append(exchange)
    return {
        rank: _insert_transfers(rank, order=order, parallel=parallel, exchanges=exchanges)
        for rank, order in orders.items()
    }


def _insert_transfers(
    rank: int,
    order: list[Action],
    parallel: ParallelConfig,
    exchanges: Mapping[tuple[int, int], list[tuple[Action, Action]]],
) -> list[Action]:
    """Return a rank's order with the sends and receives that `add_transfers` puts in.

    exchanges: by pair of ranks, their sends and receives in the one order that both keep.
    """
    stages = count_stages(parallel)
    # By the other rank, this rank's sends and receives with it, in the order that both keep.
    own_actions: dict[int, list[Action]] = {}
    # By send or receive of this rank, the other rank and the index in that order.
    positions: dict[Action, tuple[int, int]] = {}
    for pair, exchanges_of_pair in exchanges.items():
        if rank not in pair:
            continue
        peer = pair[0] if pair[1] == rank else pair[1]
        own_actions[peer] = [
            send if find_stage_rank(parallel, send.stage) == rank else receive
            for send, receive in exchanges_of_pair
        ]
        positions |= {action: (peer, index) for index, action in enumerate(own_actions[peer])}
    num_inserted = dict.fromkeys(own_actions, 0)  # by the other rank
    result: list[Action] = []

    # Insert this send or receive, and before it all that come sooner with the same rank.
    def insert_through(action: Action) -> None:
        peer, index = positions[action]
        result.extend(own_actions[peer][num_inserted[peer] : index + 1])
        num_inserted[peer] = max(num_inserted[peer], index + 1)

    for action, next_action in zip_longest(order, order[1:]):
        receive = get_receive(action, stages)
        if receive in positions:
            insert_through(receive)  # if it could not be inserted one action ahead
        # The next action's receive, if it is the next exchange with that rank: not ahead of a
        # tensor that this rank has still to make and send.
        next_receive = get_receive(next_action, stages) if next_action is not None else None
        if (
            next_receive in positions
            and num_inserted[positions[next_receive][0]] == positions[next_receive][1]
        ):
            insert_through(next_receive)
        result.append(action)
        exchange = get_exchange(action, stages)
        if exchange is not None and exchange[0] in positions:
            insert_through(exchange[0])
    return result


def get_partner(action: Action) -> Action:
    """Return the receive of a send's tensor, or the send of a receive's tensor.

    Raise KeyError for a computation.
    """
    kind, step = {  # step: from a stage to its partner's
        SEND_ACTIVATION: (RECEIVE_ACTIVATION, 1),
        RECEIVE_ACTIVATION: (SEND_ACTIVATION, -1),
        SEND_GRADIENT: (RECEIVE_GRADIENT, -1),
        RECEIVE_GRADIENT: (SEND_GRADIENT, 1),
    }[action.kind]
    return Action(action.stage + step, kind, action.micro_batch)


# The bytes that a rank of a pipeline holds for backward after each of its actions, computed from
# those of its stages.
#
# For each micro-batch a stage keeps, from its forward on, what autograd needs; from its input
# gradient on, if weight gradients are deferred, the tensors for these; then nothing. A tensor from
# another rank is there from its receive until it is used; one between two stages of the same rank,
# from when it is made until it is used; one for another rank, from when it is made until that rank
# has taken it. Parameters, gradients and optimizer states are not counted.


@dataclass(frozen=True)
class StageBytes:
    """The bytes that a stage holds of one micro-batch; each storage counts once."""

    # From its forward to its backward, with the stage's input, and in the last stage its output.
    kept: int
    deferred: int = 0  # from its input gradient until its weight gradients are made


@dataclass(frozen=True)
class Live:
    """The bytes that a rank holds after an action, its stages and micro-batches summed."""

    action: Action  # the last one that has run
    kept: int  # `StageBytes.kept` of the micro-batches between forward and backward
    deferred: int  # `StageBytes.deferred` of those with deferred weight gradients
    received: int  # tensors from other ranks, from the receive until they are used
    handed: int  # tensors between two stages of this rank
    waiting: int  # tensors for other ranks, made and not sent yet
    sent: int  # tensors sent, until it is certain that the other rank has taken them


def compute_live_bytes(
    order: Sequence[Action],
    parallel: ParallelConfig,
    stages: Mapping[int, StageBytes],
    boundary: int,
    taken: Mapping[Action, int] | None = None,
) -> list[Live]:
    """Return the bytes that a rank holds after each of its actions.

    order: the rank's actions, with sends and receives. stages: by stage of this rank. boundary:
    bytes of one micro-batch's tensor between two stages; its gradient is as large. taken: by send,
    the index of the action before which it is freed, as `find_taken` returns it; None: as
    `find_latest_taken` does.
    """
    num_stages = count_stages(parallel)
    taken = find_latest_taken(order, parallel) if taken is None else taken
    transfers = {action for action in order if action.kind not in COMPUTE}
    kept = deferred = 0
    # The tensors of the fields of `Live`, each by its receive (`handed`: which needs no transfer),
    # or by its send.
    received: set[Action] = set()
    handed: set[Action] = set()
    waiting: set[Action] = set()
    sent: set[Action] = set()
    moments = []
    for index, action in enumerate(order):
        sent -= {send for send in sent if taken[send] <= index}
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            received.add(action)
        elif action.kind not in COMPUTE:
            waiting.discard(action)
            sent.add(action)
        else:
            used = get_receive(action, num_stages)
            received -= {used}
            handed -= {used}
            stage = stages[action.stage]
            # B and I free it.
            kept += {FORWARD: stage.kept, WEIGHT: 0}.get(action.kind, -stage.kept)
            deferred += {INPUT: stage.deferred, WEIGHT: -stage.deferred}.get(action.kind, 0)
            exchange = get_exchange(action, num_stages)
            if exchange is not None:
                send, receive = exchange
                if send in transfers:
                    waiting.add(send)
                else:
                    handed.add(receive)
        moments.append(
            Live(
                action=action,
                kept=kept,
                deferred=deferred,
                received=len(received) * boundary,
                handed=len(handed) * boundary,
                waiting=len(waiting) * boundary,
                sent=len(sent) * boundary,
            )
        )
    return moments


def find_latest_taken(order: Sequence[Action], parallel: ParallelConfig) -> dict[Action, int]:
    """Return by send the index of the action at which a rank knows that it was taken.

    Two ranks exchange in one order. So when a rank uses a tensor that it has received after a send
    to the same rank, the send is done. If it receives none after it, the index is `len(order)`.
    """
    stages = count_stages(parallel)
    used = {  # by receive, the index of the computation that uses it
        get_receive(action, stages): index
        for index, action in enumerate(order)
        if action.kind in COMPUTE
    }
    latest: dict[Action, int] = {}
    unanswered: dict[int, list[Action]] = {}  # by other rank, sends without a receive after them
    for action in order:
        if action.kind in COMPUTE:
            continue
        peer = find_stage_rank(parallel, get_partner(action).stage)
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            for send in unanswered.pop(peer, []):
                latest[send] = used[action]
        else:
            unanswered.setdefault(peer, []).append(action)
    return latest | {send: len(order) for sends in unanswered.values() for send in sends}


def find_taken(
    timeline: Timeline, order: Sequence[Action], rank: int, parallel: ParallelConfig
) -> dict[Action, int]:
    """Return by send the index of the action before which a rank waits until the send is taken.

    It is no later than `find_latest_taken`. In the simulation the send was taken one computation
    sooner: a rank that waited there already would be held up by every small delay of a neighbor.
    Ranks that wait so do not deadlock, since the simulation has come to its end.

    timeline: of a simulation of the orders with transfers. order: this rank's actions in it. rank:
    its index in the pipeline.
    """
    starts = {span.action: span.start for span in timeline.spans if span.rank == rank}
    computations = [  # start and index in the list
        (starts[action], index) for index, action in enumerate(order) if action.kind in COMPUTE
    ]
    latest = find_latest_taken(order, parallel)
    taken = {}
    for transfer in timeline.transfers:
        if transfer.sender == rank:
            # The second computation that starts when the transfer has ended, if there is one.
            second = [index for start, index in computations if start >= transfer.end][1:2]
            taken[transfer.action] = min([*second, latest[transfer.action]])
    return taken


def count_in_flight(order: Sequence[Action]) -> tuple[int, int]:
    """Return the most micro-batches that a rank holds between F and B (or I), and between I and W.

    They are summed over the rank's stages.
    """
    counts = [list(moment.values()) for moment in count_moments(order)]
    most_ahead = max((sum(ahead for ahead, _ in moment) for moment in counts), default=0)
    most_deferred = max((sum(deferred for _, deferred in moment) for moment in counts), default=0)
    return most_ahead, most_deferred

"""How long a pipeline takes and where its ranks wait, from seconds for each action: simulated, and in closed form.

The simulation follows the lists that the ranks run (see schedules.py), with the rules of NCCL: a computation waits for
what it receives; a send waits for nothing; what two ranks exchange goes one after the other, each when both have come
to it. Numbers keep their type, so that whole numbers give exact results. No torch.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from recipe_lib.config.mesh import rank_of_stage, stage_count
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedules import (
    COMPUTE,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Orders,
    received_for,
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
    """A tensor on its way. action: the send that it is; sender, receiver: places of ranks; seconds: see ActionSpan."""

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

    def busy(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    def idle_share(self, rank: int) -> float:
        """The part of `total` in which a rank does not compute, waiting before its first and after its last action
        included."""
        return (self.total - self.busy(rank)) / self.total

    @property
    def bubble(self) -> float:
        """The part of all ranks' time together, ranks x `total`, in which they do not compute: the mean of
        `idle_share`."""
        available = self.ranks * self.total
        return (available - sum(span.end - span.start for span in self.spans)) / available


def simulate(
    orders: Orders,
    parallel: ParallelConfig,
    seconds: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda send: 0,
) -> Timeline:
    """A step in which every rank of a pipeline runs its list, transfers included (`with_transfers`).

    seconds: of a computation. transfer: of a send, from when both ranks have come to it until the tensor is there.
    Raises ValueError for lists that deadlock, or that two ranks exchange tensors by in different orders.
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
        self._stages = stage_count(parallel)
        self._at = dict.fromkeys(orders, 0)
        self._clock: dict[int, float] = dict.fromkeys(orders, 0)
        self._across = {action for order in orders.values() for action in order if action.kind not in COMPUTE}
        # By (rank, other rank): the sends and receives that the rank has come to and the other has not, and when.
        self._waiting: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        self._free: dict[tuple[int, int], float] = {}  # by pair, when its last exchange ended
        self._arrived: dict[Action, float] = {}  # by receive
        self._spans: list[TimedAction] = []
        self._transfers: list[Transfer] = []

    def run(self) -> Timeline:
        """All actions of all ranks."""
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
        """An action of a rank; False: what it waits for has not arrived."""
        if action.kind not in COMPUTE:
            self._exchange(rank, action)
            return True
        received = received_for(action, self._stages)
        start = self._clock[rank]
        if received in self._across:
            if received not in self._arrived:
                return False
            start = max(start, self._arrived[received])
        self._clock[rank] = end = start + self._seconds(action)
        self._spans.append(TimedAction(rank, action, start, end))
        return True

    def _exchange(self, rank: int, action: Action) -> None:
        """Goes at once if the other rank is there already, else when it comes."""
        partner = partner_of(action)
        other = rank_of_stage(self._parallel, partner.stage)
        theirs = self._waiting[other, rank]
        if not theirs:
            self._waiting[rank, other].append((action, self._clock[rank]))
            return
        found, since = theirs.popleft()
        if found != partner:
            raise ValueError(f"rank {rank} comes to {action} when rank {other} is at {found}, expected {partner}")
        pair = min(rank, other), max(rank, other)
        sends = action.kind in (SEND_ACTIVATION, SEND_GRADIENT)
        send, receive = (action, partner) if sends else (partner, action)
        start = max(since, self._clock[rank], self._free.get(pair, 0))
        self._free[pair] = self._arrived[receive] = end = start + self._transfer(send)
        sender, receiver = (rank, other) if sends else (other, rank)
        self._transfers.append(Transfer(sender, receiver, send, start, end))


def partner_of(action: Action) -> Action:
    """The receive that a send goes to, the send that a receive waits for."""
    kind, step = {
        SEND_ACTIVATION: (RECEIVE_ACTIVATION, 1),
        RECEIVE_ACTIVATION: (SEND_ACTIVATION, -1),
        SEND_GRADIENT: (RECEIVE_GRADIENT, -1),
        RECEIVE_GRADIENT: (SEND_GRADIENT, 1),
    }[action.kind]
    return Action(action.stage + step, kind, action.micro_batch)


def theoretical_bubble(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float | None:
    """The bubble (see `Timeline.bubble`) of equal stages whose forward, input gradient and weight gradients take one
    time each and whose transfers take none, by formula. None: no formula is known for so many micro-batches.

    With p ranks, m micro-batches and v stages on a rank it is idle / (3 v m + idle), idle in times of a forward:
    - gpipe, 1f1b: 3 (p - 1), for every m; so (p - 1) / (m + p - 1), however long backward takes.
    - interleaved_1f1b: 3 (p - 1) if m >= p is in m // p rounds of one size; for m < p 3 (v - 1) (p - m) more.
    - interleaved_zero_bubble: p - 1 if m >= p is in such rounds; more for m < p.
    - zbv: p - 1 if m >= 3 p // 2; 4 p - 2 - 2 m if that is more.
    """
    idle = _idle(schedule, ranks, micro_batches, stages_per_rank)
    return None if idle is None else idle / (3 * stages_per_rank * micro_batches + idle)


def _idle(schedule: str, ranks: int, micro_batches: int, stages: int) -> int | None:
    """How long each rank does not compute, in times of a forward."""
    missing = max(0, ranks - micro_batches)
    if schedule in ("gpipe", "1f1b"):
        return 3 * (ranks - 1)
    if schedule == "zbv":
        return max(ranks - 1, 4 * ranks - 2 - 2 * micro_batches)
    if micro_batches % max(1, micro_batches // ranks):
        return None
    if schedule == "interleaved_1f1b":
        return 3 * (ranks - 1) + 3 * (stages - 1) * missing
    few = 2 * stages * ranks - 1 - (3 * stages - 2) * micro_batches if missing else 0
    return max(ranks - 1 + stages * missing, few)

"""What a rank of a pipeline holds for backward after each of its actions, in bytes, from the sizes of its stages.

A stage keeps of a micro-batch: from forward on what autograd needs; from the input gradient on, where the weight
gradients are deferred, what those take; then nothing. A tensor from another rank is there from its receive until it is
used, one between two stages of the same rank from when it is made; one for another rank from when it is made until that
rank has taken it. Parameters, gradients and states are not counted. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipe_lib.config.mesh import rank_of_stage, stage_count
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedule_time import Timeline, partner_of
from recipe_lib.parallel.pipeline.schedules import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    WEIGHT,
    Action,
    exchange_of,
    received_for,
)


@dataclass(frozen=True)
class StageBytes:
    """Of one micro-batch. kept: after its forward, the stage's input included, of the last stage its output too.
    deferred: after its input gradient, until its weight gradients are made. Each storage counts once.

    forward_work, backward_work, input_work, weight_work: the most bytes that an F, B, I or W has alive at once beyond
    what was alive before it.
    """

    kept: int
    deferred: int = 0
    forward_work: int = 0
    backward_work: int = 0
    input_work: int = 0
    weight_work: int = 0

    def work(self, kind: str) -> int:
        """Of an action; transfers need none."""
        works = {
            FORWARD: self.forward_work,
            BACKWARD: self.backward_work,
            INPUT: self.input_work,
            WEIGHT: self.weight_work,
        }
        return works.get(kind, 0)


@dataclass(frozen=True)
class Live:
    """Bytes after an action. kept, deferred: of the stages, see `StageBytes`. received: of tensors from other ranks,
    not used yet. handed: between two stages of this rank. waiting: made for another rank, not sent yet. sent: on
    their way, counted until the other rank has taken them; it may be sooner.

    most: alive at once during the action, `StageBytes.work` counted.
    """

    action: Action
    kept: int
    deferred: int
    received: int
    handed: int
    waiting: int
    sent: int
    most: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.held + self.sent

    @property
    def held(self) -> int:
        """What this rank alone decides about: all but `sent`."""
        return self.kept + self.deferred + self.received + self.handed + self.waiting


def live_bytes(
    order: Sequence[Action],
    parallel: ParallelConfig,
    stages: Mapping[int, StageBytes],
    boundary: int,
    skipped: frozenset[int] = frozenset(),
    taken: Mapping[Action, int] | None = None,
) -> list[Live]:
    """What a rank holds after each action of its list, transfers included.

    stages: the rank's own. boundary: bytes of one micro-batch's tensor between two stages; a gradient is as large.
    skipped: stages whose input needs no gradient, since nothing before them is trained: none is made or exchanged.
    taken: until when sent tensors count, see `taken_by`, which is the default, and `taken_in`.
    """
    return _Accounts(order, parallel, stages, boundary, skipped, taken).run()


def peak_bytes(found: Sequence[Live]) -> int:
    """The most bytes alive at any time."""
    return max((entry.most for entry in found), default=0)


class _Accounts:
    """What is alive while a rank goes through its list."""

    def __init__(
        self,
        order: Sequence[Action],
        parallel: ParallelConfig,
        stages: Mapping[int, StageBytes],
        boundary: int,
        skipped: frozenset[int],
        taken: Mapping[Action, int] | None,
    ) -> None:
        self._order = order
        self._stages, self._boundary, self._skipped = stages, boundary, skipped
        self._count = stage_count(parallel)
        self._taken = taken_by(order, parallel, skipped) if taken is None else taken
        self._transfers = {action for action in order if action.kind not in COMPUTE}
        self._kept = self._deferred = 0
        self._received, self._handed = set[Action](), set[Action]()  # receives; those that need no transfer
        self._waiting, self._sent = set[Action](), set[Action]()  # sends

    def run(self) -> list[Live]:
        """After each action, in order."""
        found = []
        for number, action in enumerate(self._order):
            if _is_skipped(action, self._skipped):
                continue
            self._sent -= {send for send in self._sent if self._taken[send] <= number}
            before = self._alive()
            if action.kind in COMPUTE:
                self._compute(action)
            elif action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
                self._received.add(action)
            else:
                self._waiting.discard(action)
                self._sent.add(action)
            work = before + self._stages[action.stage].work(action.kind)
            found.append(
                Live(
                    action,
                    self._kept,
                    self._deferred,
                    len(self._received) * self._boundary,
                    len(self._handed) * self._boundary,
                    len(self._waiting) * self._boundary,
                    len(self._sent) * self._boundary,
                    max(work, self._alive()),
                )
            )
        return found

    def _alive(self) -> int:
        tensors = len(self._received) + len(self._handed) + len(self._waiting) + len(self._sent)
        return self._kept + self._deferred + tensors * self._boundary

    def _compute(self, action: Action) -> None:
        stage = self._stages[action.stage]
        received = received_for(action, self._count)
        if received is not None:
            self._received.discard(received)
            self._handed.discard(received)
        if action.kind == FORWARD:
            self._kept += stage.kept
        elif action.kind == WEIGHT:
            self._deferred -= stage.deferred
        else:
            self._kept -= stage.kept
            self._deferred += stage.deferred if action.kind == INPUT else 0
        exchange = exchange_of(action, self._count)
        if exchange is None or _is_skipped(exchange[0], self._skipped):
            return
        send, receive = exchange
        if send in self._transfers:
            self._waiting.add(send)
        else:
            self._handed.add(receive)


def _is_skipped(action: Action, skipped: frozenset[int]) -> bool:
    """Whether it exchanges a gradient that nobody makes."""
    return (action.kind == "SB" and action.stage in skipped) or (action.kind == "RB" and action.stage + 1 in skipped)


def taken_by(
    order: Sequence[Action], parallel: ParallelConfig, skipped: frozenset[int] = frozenset()
) -> dict[Action, int]:
    """By send of a rank's list: the number of the action before which the other rank has taken it, at the latest.

    Two ranks exchange in one order: who has used what comes after a send in it knows that the send is done. The
    length of the list where nothing comes after it. skipped: see `live_bytes`.
    """
    stages = stage_count(parallel)
    used = {received_for(action, stages): number for number, action in enumerate(order) if action.kind in COMPUTE}
    found: dict[Action, int] = {}
    open_: dict[int, list[Action]] = {}  # by the other rank, sends that nothing has come after so far
    for action in order:
        if action.kind in COMPUTE or _is_skipped(action, skipped):
            continue
        other = rank_of_stage(parallel, partner_of(action).stage)
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            for send in open_.pop(other, []):
                found[send] = used[action]
        else:
            open_.setdefault(other, []).append(action)
    return found | {send: len(order) for sends in open_.values() for send in sends}


def taken_in(timeline: Timeline, order: Sequence[Action], rank: int, parallel: ParallelConfig) -> dict[Action, int]:
    """The same as `taken_by`, but sooner: the number of the action before which a rank waits until a send is taken.

    In a simulation of this list it has been taken one computation before: a rank that waited already there would be
    held up by every small delay of a neighbor. Ranks that wait so come to an end, in the order of the simulation.
    """
    begins = {span.action: span.start for span in timeline.spans if span.rank == rank}
    computed = [(begins[action], number) for number, action in enumerate(order) if action.kind in COMPUTE]
    surely = taken_by(order, parallel)
    found = {}
    for way in timeline.transfers:
        if way.sender == rank:
            behind = [number for begin, number in computed if begin >= way.end][1:2]
            found[way.action] = min([*behind, surely[way.action]])
    return found


def in_flight(schedule: str, ranks: int, rank: int, micro_batches: int, stages_per_rank: int = 1) -> int | None:
    """The most micro-batches between their forward and their backward (B or I) on a rank, by formula; each of its v
    stages counts for itself. None: there is no formula for so many micro-batches.

    With p ranks, m micro-batches, n of them in a round of an interleaved schedule (m // p rounds of one size):
    - gpipe: m. 1f1b: p - rank, m at most.
    - interleaved_1f1b: (v - 1) n + 2 (p - 1 - rank) + 1; interleaved_zero_bubble: (v - 1) n + p - rank; v m at most.
    - zbv: 2 p, as many as p whole micro-batches; m + 1 + rank or 2 m where those are fewer.
    """
    behind = ranks - 1 - rank
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(micro_batches, behind + 1)
    if schedule == "zbv":
        return min(2 * ranks, micro_batches + 1 + rank, 2 * micro_batches)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        return None
    hops = 2 if schedule == "interleaved_1f1b" else 1
    ahead = (stages_per_rank - 1) * (micro_batches // rounds) + hops * behind + 1
    return min(ahead, stages_per_rank * micro_batches)


def counted_in_flight(order: Sequence[Action]) -> tuple[int, int]:
    """(the most micro-batches between F and B or I, the most between I and W) of a rank's list, stages counted
    separately: what `in_flight` says by formula where there is one."""
    kept = deferred = most_kept = most_deferred = 0
    for action in order:
        kept += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
        deferred += {INPUT: 1, WEIGHT: -1}.get(action.kind, 0)
        most_kept, most_deferred = max(most_kept, kept), max(most_deferred, deferred)
    return most_kept, most_deferred

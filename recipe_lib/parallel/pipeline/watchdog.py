"""What a rank of a pipeline is at: which action of which micro-batch, and which stage it waits for.

The heartbeat of the run ends it when ranks fail or hang; of a pipeline, whose ranks do different things, it asks
here who waits for whom. On a GPU the host is ahead of the work that it has queued: there the work itself marks how far
it is, by events, which a thread of this module's own looks at.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from recipe_lib.config.mesh import rank_of_stage, stages_of_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import UserError
from recipe_lib.ops.device import holds_values
from recipe_lib.parallel.pipeline.schedules import COMPUTE, Action
from recipe_lib.parallel.world import World

LOOK_SECONDS = 0.5  # seconds between two looks at a device's marks
_FROM_BEFORE = ("F", "RF", "SB")  # kinds of actions that take from the stage before, or send to it


BETWEEN, COMPUTES, WAITS = "between", "computes", "waits"
_SLACK = 3.0  # seconds by which those that hang may differ in when they came to it
_WORK = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
_EXCHANGES = {
    "RF": "receiving the activation",
    "RB": "receiving the gradient",
    "SF": "sending the activation",
    "SB": "sending the gradient",
}


@dataclass(frozen=True)
class Stand:
    """What a rank is at. what: BETWEEN two steps, COMPUTES, or WAITS for rank `other`. stage, kind, micro_batch: of the
    action; -1 and "" without one. done: how often it has come to something new; seconds: since when it has not.
    """

    what: str = BETWEEN
    stage: int = -1
    kind: str = ""
    micro_batch: int = -1
    other: int = -1
    done: int = 0
    seconds: float = 0.0

    @property
    def action(self) -> str:
        """`the forward of micro-batch 3`; of a stand with an action."""
        if self.kind in _WORK:
            return f"the {_WORK[self.kind]} of micro-batch {self.micro_batch}"
        return f"{_EXCHANGES[self.kind]} of micro-batch {self.micro_batch}"

    @property
    def where(self) -> str:
        """`in the forward of micro-batch 3`, or `between two steps`."""
        return f"in {self.action}" if self.kind else "between two steps"


def to_json(stand: Stand) -> dict[str, Any]:
    """The fields, as JSON holds them."""
    return asdict(stand)


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a run: how many, and how a pipeline divides them; see MESH_DIMS."""

    parallel: ParallelConfig
    size: int

    def place(self, rank: int) -> int:
        """Where in its pipeline a rank is."""
        return rank // (self.size // self.parallel.pipeline)

    def name(self, rank: int, stage: int = -1) -> str:
        """`rank 2 (stage 2)`, or all stages of the rank: `rank 2 (stages 2 and 5)`."""
        stages = [stage] if stage >= 0 else stages_of_rank(self.parallel, self.place(rank))
        return f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))})"


def culprits(known: dict[int, Stand], ranks: RankGrid, timeout: float) -> list[int]:
    """The ranks that the others wait for, none of which waits for another itself; empty: work goes on somewhere.

    known: by rank. Of ranks that compute for long those are left out that have a peer, with the same actions, which is
    not as far yet: they wait for it in a collective. If all wait for each other it is all of them.
    """
    free = [rank for rank, stand in known.items() if stand.what in (BETWEEN, COMPUTES)]
    if not free:
        return [] if any(stand.seconds < timeout - _SLACK for stand in known.values()) else list(known)

    def ahead(rank: int) -> bool:
        peers = (other for other in known if ranks.place(other) == ranks.place(rank))
        return any(known[other].done < known[rank].done for other in peers)

    behind = [rank for rank in free if not ahead(rank)]
    candidates = [rank for rank in behind if known[rank].what == COMPUTES] or behind
    return [rank for rank in candidates if known[rank].seconds >= timeout - _SLACK]


def words(ranks: RankGrid, rank: int, stand: Stand) -> str:
    """Who is where since when, and waits for whom; "" for a rank between two steps."""
    name = ranks.name(rank, stand.stage)
    if stand.what == WAITS:
        return f"{name} has waited for rank {stand.other} for {stand.seconds:.0f} s, for {stand.action}"
    return f"{name} has been blocked for {stand.seconds:.0f} s {stand.where}" if stand.kind else ""


def watch_over(world: World, parallel: ParallelConfig) -> "Watch":
    """The watch of a world, one for all its pipelines, which its heartbeat asks. In a simulation it only notes."""
    found = world.heartbeat.detail
    if not isinstance(found, Watch) or found.parallel != parallel:
        found = Watch(world, parallel)
        world.heartbeat.detail = found
    return found


class Watch:
    """What a rank is at. A `Detail` of the heartbeat."""

    def __init__(self, world: World, parallel: ParallelConfig) -> None:
        self.parallel = parallel
        self._rank, self._ranks, self._heartbeat = world.rank, RankGrid(parallel, world.size), world.heartbeat
        self._members = world.pipeline.ranks if world.pipeline is not None else (world.rank,)
        self._device, self._on_device = world.device, world.device.type == "cuda" and holds_values(world.device)
        self._done = 0
        self._host = self._reached = (Stand(), time.monotonic())  # of the host, and of the work that it has queued
        self._marks: deque[tuple[Any, Stand]] = deque()
        self._thread: threading.Thread | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """A run of a rank's actions. What is raised inside says which one it was."""
        if self._on_device and self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="pipeline marks", daemon=True)
            self._thread.start()
        try:
            yield
        except Exception as error:
            stand = self._host[0]
            if stand.kind:
                where = f"{self._ranks.name(self._rank, stand.stage)}, {stand.action}"
                if isinstance(error, UserError):
                    error.faults = [f"{fault} ({where})" for fault in error.faults]
                else:
                    error.add_note(where)
            raise
        finally:
            self._note(Stand())
            self._heartbeat.count_anew()

    def at(self, action: Action) -> None:
        """Notes what comes now. An exchange counts as waiting for the other rank: what is sent until it is taken."""
        self._note(Stand(COMPUTES, action.stage, action.kind, action.micro_batch))
        if action.kind not in COMPUTE:
            self.waits()

    def waits(self) -> None:
        """Notes that the action waits for the rank that has the stage before it, or after it."""
        stand = self._host[0]
        stage = stand.stage + (-1 if stand.kind in _FROM_BEFORE else 1)
        other = self._members[rank_of_stage(self.parallel, stage)]
        self._note(replace(stand, what=WAITS, other=other))

    def computes(self) -> None:
        """Notes that what the action has waited for is there."""
        self._note(replace(self._host[0], what=COMPUTES, other=-1))

    def name(self, rank: int) -> str:
        """`rank 2 (stage 2)`."""
        return self._ranks.name(rank)

    def stand(self) -> dict[str, Any]:
        """What the work is at, and since when; on a GPU as far as it has been seen."""
        stand, since = self._reached if self._on_device else self._host
        return to_json(replace(stand, seconds=time.monotonic() - since))

    def culprits(self, stands: dict[int, dict[str, Any]]) -> list[int] | None:
        """The ranks that the others wait for; None: this rank is between two steps."""
        known = {rank: Stand(**stand) for rank, stand in stands.items()}
        if known[self._rank].what == BETWEEN:
            return None
        return culprits(known, self._ranks, self.parallel.heartbeat_timeout_seconds)

    def words(self, rank: int, stand: dict[str, Any]) -> str:
        """`rank 2 (stage 2) has been blocked for 62 s in the forward of micro-batch 3`; "" between two steps."""
        return words(self._ranks, rank, Stand(**stand))

    def _note(self, stand: Stand) -> None:
        self._done += 1
        stand = replace(stand, done=self._done)
        self._host = stand, time.monotonic()
        if self._on_device:
            with suppress(RuntimeError):  # a device that has failed takes no more marks, and says so by itself
                event = torch.cuda.Event()
                event.record()
                self._marks.append((event, stand))

    def _follow(self) -> None:
        """The thread that looks how far the work is, apart from the heartbeat, which waits for no call to a device."""
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)  # else it takes something of the first GPU
        while True:
            try:
                while self._marks and self._marks[0][0].query():
                    self._reached = self._marks.popleft()[1], time.monotonic()
            except RuntimeError:  # the device has failed: its error comes to the host by itself
                return
            time.sleep(LOOK_SECONDS)

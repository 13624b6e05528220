"""Where each rank of a run stands, in words, and who of them holds up the others."""

from dataclasses import asdict, dataclass
from typing import Any

from recipe_lib.config.mesh import stages_of_rank
from recipe_lib.config.schema import ParallelConfig

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

"""What ranks say of themselves while they work, and whom of them a run waits for in vain.

A rank that waits in a collective has entered more collectives of some group than the rank it waits for. So the rank
that holds up the others is behind in a group and ahead in none, whatever it is doing itself: sleeping, an endless loop,
a call that does not return.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# How many timeouts long a rank may be at something before the others stop waiting for it.
STEP_SECONDS = 1.0  # a training step
# Most, of any phase, for a rank without a beat that is not known to be stopped: a library that holds the interpreter's
# lock, as while it opens a large file or the first use of a GPU, lets no thread beat. And of a step for all ranks.
SILENT_TIMEOUTS = 5.0
FIRST_STEP_SECONDS = 10.0  # communicators and kernels are made
# Loading, quantizing, validation, saving, export: for ever while it moves, this long where it does not.
LONG_SECONDS = 30.0
PHASE_TIMEOUTS = {"compiling": LONG_SECONDS, "in a debugger": float("inf")}  # whatever the phase


@dataclass(frozen=True)
class Beat:
    """What a rank has said last.

    number: of its beats, counted; 0: it has not met the others. phase: what it is at, and patience: how many timeouts
    that may take. still: seconds for which its main thread has been at one and the same place; quiet: for which it has
    entered no collective and no new phase. where: that place, `file.py:12 (function)`. groups: by process group, the
    collectives entered. stand: of a pipeline. node: its machine. left: it has ended in order. unheard: seconds since
    `number` has last changed.
    """

    number: int = 0
    phase: str = "starting"
    patience: float = LONG_SECONDS
    still: float = 0.0
    quiet: float = 0.0
    where: str = ""
    groups: dict[str, list[int]] = field(default_factory=dict)
    stand: dict[str, Any] | None = None
    node: str = ""
    left: bool = False
    unheard: float = 0.0

    @property
    def at(self) -> str:
        """`step 12, at recipe.py:120 (train_step)`."""
        return f"{self.phase}, at {self.where}" if self.where else self.phase


class Detail(Protocol):
    """Tells what only a pipeline knows: how far its actions are, and which stage waits for which."""

    def name(self, rank: int) -> str:
        """Return a rank and its stage: `rank 2 (stage 2)`."""

    def stand(self) -> dict[str, Any]:
        """Return what this rank is at, as JSON holds it; `done` counts what it has come to."""

    def culprits(self, stands: dict[int, dict[str, Any]]) -> list[int] | None:
        """Return the ranks that the others wait for; None: this one is at no action."""

    def words(self, rank: int, stand: dict[str, Any]) -> str:
        """Describe what a rank is at; "" where nothing is known of it."""


def silent(beats: Mapping[int, Beat], timeout: float, stopped: Collection[int] = ()) -> list[int]:
    """Return the ranks that have not been heard of for too long.

    stopped: those known to be, which have one timeout whatever they are at. Others may be on a machine that cannot be
    reached, or busy in a call that lets no thread beat; one that has not met the others may still import.
    """
    return [rank for rank, beat in beats.items() if beat.unheard >= timeout * _silent_timeouts(beat, rank in stopped)]


def _silent_timeouts(beat: Beat, is_stopped: bool) -> float:
    if is_stopped:
        return STEP_SECONDS
    return min(beat.patience, SILENT_TIMEOUTS) if beat.number else LONG_SECONDS


def describe_silence(silent_ranks: Sequence[int], beats: Mapping[int, Beat], stopped: Collection[int]) -> str:
    """Return `is stopped for 60 s`, `are stopped or unreachable for 300 s`, `has not met the others and is ...`."""
    seconds = max(beats[rank].unheard for rank in silent_ranks)
    be, have = ("is", "has") if len(silent_ranks) == 1 else ("are", "have")
    has_met = any(beats[rank].number for rank in silent_ranks)
    how = "stopped" if set(silent_ranks) <= set(stopped) else "stopped or unreachable"
    return f"{'' if has_met else f'{have} not met the others and '}{be} {how} for {seconds:.0f} s"


def behind(beats: Mapping[int, Beat]) -> list[int]:
    """Those that have entered fewer collectives of some group than another rank, and of none more.

    Behind even those that are behind in another group only because they wait for one of these.
    """
    fewer, more = set(), set()
    names = {name for beat in beats.values() for name in beat.groups}
    for name in names:
        counts = {rank: beat.groups[name] for rank, beat in beats.items() if name in beat.groups}
        fewer |= {rank for rank, count in counts.items() if count < max(counts.values())}
        more |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(fewer - more)


def is_overdue(beat: Beat, timeout: float) -> bool:
    """Whether a rank that others wait for has had its time: of a step by what it has entered, of what may take long by
    whether it moves at all."""
    if beat.patience <= FIRST_STEP_SECONDS:
        return beat.quiet >= timeout * beat.patience
    return beat.still >= timeout * beat.patience


def all_stand(beats: Mapping[int, Beat], timeout: float) -> bool:
    """Whether no rank has moved for so long that none will. The work that ranks have queued on GPUs has longer."""
    return all(beat.still >= timeout * max(beat.patience, SILENT_TIMEOUTS) for beat in beats.values())


def numbers(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1, 2 and 3`, `ranks 0, 1, 2 and 13 more`."""
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names = [*names[:3], f"{len(names) - 3} more"]
    together = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"rank{'s' if len(names) > 1 else ''} {together}"

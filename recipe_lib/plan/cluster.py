"""All ranks of a run: the groups of each mesh dimension, and what a plan says of their communication. No torch here."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Volume:
    """Communication, summed up. operations: calls, each counted on every rank that takes part; a message is a send and
    a receive. bytes: of the whole tensors of these calls (the gathered one, the one before it is scattered, the reduced
    one, the message). wire_bytes: that ranks send for them by a ring; a receive sends none."""

    operations: float = 0
    bytes: float = 0
    wire_bytes: float = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.operations + other.operations, self.bytes + other.bytes, self.wire_bytes + other.wire_bytes)

    def times(self, factor: int) -> "Volume":
        """So many of it."""
        return Volume(self.operations * factor, self.bytes * factor, self.wire_bytes * factor)

    def part(self, count: int) -> "Volume":
        """One of `count` equal parts of it; whole numbers stay whole where they can."""
        sizes = (self.operations, self.bytes, self.wire_bytes)
        return Volume(*(size // count if size % count == 0 else size / count for size in sizes))


@dataclass
class DimensionPlan:
    """A dimension of the mesh with more than one rank, or `world`: several of them as one. dim: its name. along: the
    dimensions along which the ranks of a group differ. groups: the ranks of every group, in the order of their first
    ones; together they are all ranks. rank_step: of a steady step, one rank of each place in the pipeline, first to
    last. rank_micro_batch: the same of one micro-batch, forward and backward. cluster_step, cluster_micro_batch: the
    same of all ranks; None if not every place was planned. layer: of one micro-batch forward and backward through one
    transformer layer on one rank, as most layers have it; None if layers communicate nothing along it.
    """

    dim: str
    along: list[str]
    groups: list[list[int]]
    rank_step: list[Volume] = field(default_factory=list)
    rank_micro_batch: list[Volume] = field(default_factory=list)
    cluster_step: Volume | None = None
    cluster_micro_batch: Volume | None = None
    layer: Volume | None = None


def groups_along(mesh: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """The ranks of each group: those that differ in the dimensions `along` alone. mesh: sizes, outermost first; a rank
    is its place in the order of all coordinates."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in mesh.values()))):
        others = tuple(at for name, at in zip(mesh, place, strict=True) if name not in along)
        found.setdefault(others, []).append(rank)
    return list(found.values())


def ranks_of_place(mesh: Mapping[str, int], place: int) -> list[int]:
    """The ranks at one place of their pipelines."""
    inner = math.prod(mesh.values()) // mesh.get("pipeline", 1)
    return list(range(place * inner, (place + 1) * inner))

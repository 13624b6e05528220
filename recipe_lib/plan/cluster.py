"""What all ranks of a run do together: the groups of each mesh dimension, and what they communicate. No torch in here.

Only a rank of each place in the pipeline is simulated. Ranks of one place communicate alike (shards are padded to equal
sizes), so that sums over all ranks are those of the places times their ranks.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from recipe_lib.plan.timing.cost import wire_bytes
from recipe_lib.plan.trace import OP, Collective, Trace

_OF_MICRO_BATCHES = ("forward", "backward", "recompute")  # parts of a step; the others are once a step


@dataclass
class Volume:
    """Communication, summed up. operations: calls, each counted on every rank that takes part; a message is a send and
    a receive. bytes: of the whole tensors of these calls (the gathered one, the one before it is scattered, the reduced
    one, the message). wire_bytes: that ranks send for them by a ring; a receive sends none."""

    operations: float = 0
    bytes: float = 0
    wire_bytes: float = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.operations + other.operations, self.bytes + other.bytes, self.wire_bytes + other.wire_bytes
        )

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
    transformer layer on one rank, as most layers have it; None if layers communicate nothing here.
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


def dimension_plans(
    mesh: Mapping[str, int], traces: Mapping[int, Trace], phase: str, micro_batches: int
) -> list[DimensionPlan]:
    """Of every dimension with more than one rank. traces: by place in the pipeline, of one rank each; phase: the step
    that is counted. micro_batches: of it."""
    counted = {place: _Counted(trace, phase, mesh) for place, trace in traces.items()}
    named = [(name, (name,)) for name, size in mesh.items() if size > 1]
    keys = list(dict.fromkeys([*named, *(key for one in counted.values() for key in one.step)]))
    whole = len(traces) == mesh.get("pipeline", 1)
    found = []
    for key in keys:
        step = [one.step[key] for one in counted.values()]
        each = [one.inside[key].part(micro_batches) for one in counted.values()]
        plan = DimensionPlan(key[0], list(key[1]), groups_along(mesh, key[1]), step, each)
        if whole:
            of_place = math.prod(mesh.values()) // len(traces)
            plan.cluster_step = sum(step, Volume()).times(of_place)
            plan.cluster_micro_batch = sum(each, Volume()).times(of_place)
        plan.layer = _usual(one.layers[key] for one in counted.values())
        if plan.layer is not None:
            plan.layer = plan.layer.part(micro_batches)
        found.append(plan)
    return found


_Key = tuple[str, tuple[str, ...]]  # a dimension's name, and the dimensions along which its groups lie


class _Counted:
    """What one rank communicates in a step, by dimension: in all, in micro-batches, in each layer for them."""

    def __init__(self, trace: Trace, phase: str, mesh: Mapping[str, int]) -> None:
        self.step: dict[_Key, Volume] = defaultdict(Volume)
        self.inside: dict[_Key, Volume] = defaultdict(Volume)
        self.layers: dict[_Key, dict[int, Volume]] = defaultdict(lambda: defaultdict(Volume))
        for kind, number in trace.phase_events(phase):
            op = trace.ops[number] if kind == OP else None
            if op is None or op.collective is None or len(op.collective.ranks) < 2:
                continue
            key, volume = _key(op.collective, mesh), _volume(op.collective).times(op.repeats)
            self.step[key] += volume
            if op.part in _OF_MICRO_BATCHES:
                self.inside[key] += volume
                layer = next((int(piece) for piece in op.module.split(".") if piece.isdecimal()), None)
                if layer is not None:
                    self.layers[key][layer] += volume


def _key(collective: Collective, mesh: Mapping[str, int]) -> _Key:
    if collective.dim in mesh:
        return collective.dim, (collective.dim,)
    inner = list(itertools.accumulate(reversed(mesh.values()), lambda one, other: one * other, initial=1))[-2::-1]
    places = {
        name: {rank // step % size for rank in collective.ranks}
        for (name, size), step in zip(mesh.items(), inner, strict=True)
    }
    return collective.dim, tuple(name for name, found in places.items() if len(found) > 1)


def _volume(collective: Collective) -> Volume:
    sent = wire_bytes(collective.operation, collective.bytes, len(collective.ranks))
    return Volume(1, collective.bytes, 0 if collective.operation == "recv" else sent)


def _usual(layers: Iterable[Mapping[int, Volume]]) -> Volume | None:
    """What most layers have; of values that as many have the larger."""
    values = [volume for one in layers for volume in one.values()]
    counts = Counter((volume.operations, volume.bytes, volume.wire_bytes) for volume in values)
    return Volume(*max(counts, key=lambda value: (counts[value], value))) if counts else None

"""What all ranks communicate in a step, from the traces of a few. No torch in here.

Of each place in the pipeline one rank is simulated. Ranks of one place communicate alike (shards are padded to equal
sizes), so that sums over all ranks are those of the places times their ranks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from recipe_lib.config.mesh import DATA_DIMS
from recipe_lib.plan.cluster import DimensionPlan, Volume, groups_along
from recipe_lib.plan.timing.cost import wire_bytes
from recipe_lib.plan.trace import Collective, Trace
from recipe_lib.plan.tree import split_number

_OF_MICRO_BATCHES = ("forward", "backward", "recompute")  # parts of a step; the others are once a step


def dimension_plans(
    mesh: Mapping[str, int],
    traces: Mapping[int, Trace],
    phase: str,
    micro_batches: int,
    once: Collection[str] = (),
) -> list[DimensionPlan]:
    """Of every dimension with more than one rank. traces: by place in the pipeline, of one rank each; phase: the step
    that is counted. micro_batches: of it. once: operations among data ranks that are once a step, not in each of
    them."""
    counted = {place: _Counted(trace, phase, mesh, once) for place, trace in traces.items()}
    found_keys = dict.fromkeys(key for one in counted.values() for key in one.step)
    silent = [name for name, size in mesh.items() if size > 1 and not any(name in along for _, along in found_keys)]
    keys = sorted([*found_keys, *((name, (name,)) for name in silent)], key=lambda key: _order(key, mesh))
    layers = sum(len(one.layers) for one in counted.values())
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
        plan.layer = _usual_layer([one.in_layers[key] for one in counted.values()], layers * micro_batches)
        found.append(plan)
    return found


def group_sizes(trace: Trace) -> list[int]:
    """Return the sizes of the groups that communicate in a trace.

    Ranks that share sequences have a group of their own also where they are all.
    """
    groups = {(op.collective.dim == "context", op.collective.ranks) for op in trace.ops if op.collective}
    return [len(ranks) for _, ranks in sorted(groups)]


_Key = tuple[str, tuple[str, ...]]  # a dimension's name, and the dimensions along which its groups lie


class _Counted:
    """What one rank communicates in a step, by dimension: in all, in micro-batches, in layers for them. layers: their
    paths."""

    def __init__(self, trace: Trace, phase: str, mesh: Mapping[str, int], once: Collection[str]) -> None:
        self.step: dict[_Key, Volume] = defaultdict(Volume)
        self.inside: dict[_Key, Volume] = defaultdict(Volume)
        self.in_layers: dict[_Key, Counter[tuple[str, int, int]]] = defaultdict(
            Counter
        )  # operation, bytes, on the wire
        self.layers: set[str] = set()
        for op in trace.phase_ops(phase):
            before, at, _ = split_number(op.module)
            if at is not None:
                self.layers.add(f"{before}{at}")
            if op.collective is None or len(op.collective.ranks) < 2:
                continue
            key, volume = _key(op.collective, mesh), _volume(op.collective)
            self.step[key] += volume.times(op.repeats)
            is_once = op.collective.operation in once and op.collective.dim in DATA_DIMS
            if op.part in _OF_MICRO_BATCHES and not is_once:
                self.inside[key] += volume.times(op.repeats)
                if at is not None:
                    alike = (op.collective.operation, op.collective.bytes, int(volume.wire_bytes))
                    self.in_layers[key][alike] += op.repeats


def _order(key: _Key, mesh: Mapping[str, int]) -> int:
    """Dimensions first, as the mesh has them."""
    return list(mesh).index(key[0]) if key[0] in mesh else len(mesh)


def _key(collective: Collective, mesh: Mapping[str, int]) -> _Key:
    places: dict[str, set[int]] = {}
    step = 1  # between neighbors along a dimension
    for name in reversed(list(mesh)):
        places[name] = {rank // step % mesh[name] for rank in collective.ranks}
        step *= mesh[name]
    return collective.dim, tuple(name for name in mesh if len(places[name]) > 1)


def _volume(collective: Collective) -> Volume:
    sent = wire_bytes(collective.operation, collective.bytes, len(collective.ranks))
    return Volume(1, collective.bytes, 0 if collective.operation == "recv" else sent)


def _usual_layer(places: Iterable[Counter[tuple[str, int, int]]], passes: int) -> Volume | None:
    """What most layers have in one pass of `passes`: of a neighbor's gather, which a layer may issue, there are few."""
    counts = sum(places, Counter())
    each = {alike: round(count / passes) for alike, count in counts.items()} if passes else {}
    found = sum((Volume(1, size, sent).times(times) for (_, size, sent), times in each.items()), Volume())
    return found if found.operations else None

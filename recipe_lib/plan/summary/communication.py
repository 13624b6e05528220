"""List the collectives of a step of one rank, and sum up those of all ranks.

`build_plan.py` calls `build_communication_rows` for the heaviest rank, which reserves the most, and
`build_dimension_plans` for the sums along each dimension of the mesh. Of each place (a coordinate
in the pipeline) one rank is simulated; its ranks communicate alike, as shards are padded to equal
sizes, so that a sum is that of the places times their ranks.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from recipe_lib.config.mesh import DATA_DIMS
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    CommunicationRow,
    DimensionPlan,
    Volume,
    list_rank_groups,
)
from recipe_lib.plan.summary.module_paths import split_number
from recipe_lib.plan.timing.cost import Calibration, compute_collective_seconds, count_wire_bytes
from recipe_lib.plan.tracing.trace import Collective, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY

# Parts of a step that each micro-batch has; the others are once a step.
_MICRO_BATCH_PARTS = ("forward", "backward", "recompute")
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # a segment of a module's path, not the first

# (name of a dimension or `world`, dimensions of the mesh in which the ranks of its groups differ).
_DimensionKey = tuple[str, tuple[str, ...]]


def build_communication_rows(
    trace: Trace, hardware: Hardware, calibration: Calibration | None, *, timed: bool
) -> list[CommunicationRow]:
    """Return the collectives of the steady step, any after the first, in the order of first use.

    Collectives that differ in the number of their layer alone are one row, the number a `*`. Those
    of a group of one rank are left out. timed: with seconds, else these are 0.
    """
    rows: dict[tuple[Any, ...], CommunicationRow] = {}
    for op in trace.iterate_ops(STEADY):
        collective = op.collective
        if collective is None:
            continue
        module = _LAYER_NUMBER.sub("*", op.module)
        key = (
            collective.operation,
            collective.dim,
            collective.ranks,
            op.part,
            module,
            collective.shapes,
            op.dtype,
        )
        if key in rows:
            rows[key].count += op.repeats
            continue
        rows[key] = CommunicationRow(
            operation=collective.operation,
            dim=collective.dim,
            ranks=list(collective.ranks),
            where=op.part,
            module=module,
            shapes=[list(shape) for shape in collective.shapes],
            dtype=collective.dtype,
            bytes=collective.bytes,
            wire_bytes=count_wire_bytes(
                collective.operation, collective.bytes, len(collective.ranks)
            ),
            count=op.repeats,
            seconds=compute_collective_seconds(collective, hardware, calibration) if timed else 0.0,
        )
    return [row for row in rows.values() if len(row.ranks) > 1]


def list_group_sizes(trace: Trace) -> list[int]:
    """Return the number of ranks of each group that communicates in a trace."""
    # Context parallelism has a group of its own even if another group has the same ranks.
    groups = {
        (op.collective.dim == "context", op.collective.ranks) for op in trace.ops if op.collective
    }
    return [len(ranks) for _, ranks in sorted(groups)]


def build_dimension_plans(
    mesh: Mapping[str, int],
    traces: Mapping[int, Trace],
    phase: str,
    micro_batches: int,
    once: Collection[str] = (),
) -> list[DimensionPlan]:
    """Return what is communicated along every dimension with more than one rank.

    Args:
        mesh: dimension -> its size, outermost first.
        traces: place -> trace of one rank there.
        phase: name of the traces' phase that is counted, a step.
        micro_batches: number of micro-batches in that step.
        once: operations, such as `reduce_scatter`, that data ranks do once a step, though they run
            in a part of it that each micro-batch has.
    """
    counted = [_CountedStep(trace, phase, mesh=mesh, once=once) for trace in traces.values()]
    dimension_keys = dict.fromkeys(chain.from_iterable(place.step for place in counted))
    # Dimensions along which nothing is communicated have a plan, too: reports show their groups.
    silent_dims = [
        name
        for name, size in mesh.items()
        if size > 1 and not any(name in along for _, along in dimension_keys)
    ]
    order = {name: index for index, name in enumerate(mesh)}
    keys = sorted(
        [*dimension_keys, *((name, (name,)) for name in silent_dims)],
        key=lambda key: order.get(key[0], len(mesh)),  # `world` last
    )
    layers = sum(len(place.layers) for place in counted)
    plans = []
    for dim, along in keys:
        key = (dim, along)
        steps = [place.step[key] for place in counted]
        per_micro_batch = [place.in_micro_batches[key].divide(micro_batches) for place in counted]
        plan = DimensionPlan(
            dim=dim,
            along=list(along),
            groups=list_rank_groups(mesh, along),
            rank_step=steps,
            rank_micro_batch=per_micro_batch,
        )
        if len(traces) == mesh.get("pipeline", 1):  # each place was simulated
            ranks_of_place = math.prod(mesh.values()) // len(traces)
            plan.cluster_step = sum(steps, Volume()).multiply(ranks_of_place)
            plan.cluster_micro_batch = sum(per_micro_batch, Volume()).multiply(ranks_of_place)
        plan.layer = _find_usual_layer(
            [place.in_layers[key] for place in counted], passes=layers * micro_batches
        )
        plans.append(plan)
    return plans


class _CountedStep:
    """The sums of what one rank communicates in a step, by dimension; arguments as above."""

    def __init__(
        self, trace: Trace, phase: str, mesh: Mapping[str, int], once: Collection[str]
    ) -> None:
        # In all of the step.
        self.step: dict[_DimensionKey, Volume] = defaultdict(Volume)
        # In the forwards and backwards of all its micro-batches.
        self.in_micro_batches: dict[_DimensionKey, Volume] = defaultdict(Volume)
        # In decoder layers: (operation, bytes of the full tensor, bytes that the rank sends) -> how
        # often.
        self.in_layers: dict[_DimensionKey, Counter[tuple[str, int, int]]] = defaultdict(Counter)
        # Paths of the decoder layers.
        self.layers: set[str] = set()
        for op in trace.iterate_ops(phase):
            before, number, _ = split_number(op.module)
            if number is not None:
                self.layers.add(f"{before}{number}")
            collective = op.collective
            if collective is None or len(collective.ranks) < 2:
                continue
            operation = collective.operation
            sent = count_wire_bytes(operation, collective.bytes, len(collective.ranks))
            # A message counts as sent on the rank that sends it, not on the one that receives it.
            wire_bytes = 0 if operation == "recv" else sent
            key = _make_dimension_key(collective, mesh)
            volume = Volume(1, collective.bytes, wire_bytes)
            self.step[key] += volume.multiply(op.repeats)
            is_once = operation in once and collective.dim in DATA_DIMS
            if op.part in _MICRO_BATCH_PARTS and not is_once:
                self.in_micro_batches[key] += volume.multiply(op.repeats)
                if number is not None:
                    self.in_layers[key][operation, collective.bytes, wire_bytes] += op.repeats


def _make_dimension_key(collective: Collective, mesh: Mapping[str, int]) -> _DimensionKey:
    """Return the collective's dimension, with the mesh dimensions in which its ranks differ."""
    coordinates: dict[str, set[int]] = {}  # dimension -> coordinates of the ranks in it
    stride = 1  # difference of the ranks of two neighbors along a dimension
    for name in reversed(list(mesh)):
        coordinates[name] = {rank // stride % mesh[name] for rank in collective.ranks}
        stride *= mesh[name]
    return collective.dim, tuple(name for name in mesh if len(coordinates[name]) > 1)


def _find_usual_layer(
    places: Iterable[Counter[tuple[str, int, int]]], passes: int
) -> Volume | None:
    """Return what most layers communicate in forward and backward of one micro-batch.

    None if they communicate nothing. places: `in_layers` of each place. passes: number of layers
    times number of micro-batches.
    """
    total = Volume()
    for (_, num_bytes, wire_bytes), count in sum(places, Counter()).items():
        # Rounding leaves out what only few layers have: one may issue the gather of its neighbor.
        total += Volume(1, num_bytes, wire_bytes).multiply(round(count / passes) if passes else 0)
    return total if total.operations else None

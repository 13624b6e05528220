"""Integers in a forward that are right for whole tensors only, and the attributes that make them
right for a rank's.
"""

from collections.abc import Iterator

from recipe_lib.external.tensor_plan.forward_trace import (
    AttributeDivision,
    ForwardTrace,
    LocalSizes,
    ShardedAxis,
    SizeDemand,
    list_demands,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Attribute,
    Division,
    evaluate,
    is_decided_alike,
    list_attributes,
)


def find_rewrites(
    trace: ForwardTrace, sharded_axes: list[ShardedAxis]
) -> tuple[dict[Attribute, AttributeDivision], dict[ShardedAxis, str]]:
    """Attributes that have to be divided, with the axes that ask for it; and axes that cannot be,
    with the reason.
    """
    ranks = LocalSizes(sharded_axes)
    demands = [demand for call in trace.calls for demand in list_demands(call, ranks)]
    divisions: dict[Attribute, Division] = {}
    wanted: dict[Attribute, AttributeDivision] = {}
    kept = {
        attribute
        for demand in demands
        if demand.expected == int(demand.value) and not demand.sharded_axes
        for attribute in list_attributes(demand.value)
        if _is_right(demand, ranks, {})
    }
    for demand in demands:
        if _is_right(demand, ranks, divisions):
            for attribute in list_attributes(demand.value):
                if attribute in divisions:
                    wanted[attribute].sharded_axes.update(demand.sharded_axes)
            continue
        for attribute in dict.fromkeys(list_attributes(demand.value)):
            shares = {ranks.shares[sharded_axis] for sharded_axis in demand.sharded_axes}
            if (
                attribute in kept
                or attribute in divisions
                or len(shares) != 1
                or int(demand.value) < 2
            ):
                continue
            right = (
                each
                for each in _list_divisions(demand, *shares)
                if _is_right(demand, ranks, {**divisions, attribute: each})
            )
            if (found := next(right, None)) is not None:
                divisions[attribute] = found
                wanted[attribute] = AttributeDivision(set(demand.sharded_axes), found.kept)
                break
    refused: dict[ShardedAxis, str] = {}
    for demand in demands:
        if not _is_right(demand, ranks, divisions):
            guilty = demand.sharded_axes or [
                sharded_axis
                for each in list_attributes(demand.value)
                if each in wanted
                for sharded_axis in wanted[each].sharded_axes
            ]
            for sharded_axis in guilty:
                refused[sharded_axis] = (
                    f"{demand.call.function} at {demand.call.source} in"
                    f" {demand.call.key.module or 'the model itself'} takes the size"
                    f" {int(demand.value)}, which no attribute of its own gives for a part"
                )
    return wanted, refused


def _list_divisions(demand: SizeDemand, ranks: int) -> Iterator[Division]:
    """All of an attribute is divided, or as much of one that is the very size as is needed."""
    yield Division(ranks)
    kept = (ranks * demand.expected - int(demand.value)) // (ranks - 1)
    if isinstance(getattr(demand.value, "source", None), Attribute) and 0 < kept < int(
        demand.value
    ):
        yield Division(ranks, kept)


def is_control_flow_same(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    wanted: dict[Attribute, AttributeDivision],
    size: int,
    last: dict[str, int],
) -> bool:
    """True if the forward goes as far as its last boundaries on each of `size` ranks as it does on
    the whole.

    last: by module, the number of the last call that has a boundary. A comparison of sizes that
    comes after it may come out otherwise: `if groups == 1: return keys`.
    """
    ranks = LocalSizes(
        [sharded_axis for sharded_axis in sharded_axes if not sharded_axis.vocabulary], size
    )
    divisions = {attribute: Division(size, each.kept) for attribute, each in wanted.items()}
    return all(
        is_decided_alike(decision, ranks.read_size, divisions)
        for decision in trace.decisions
        if decision.call <= last.get(decision.module, -1)
    )


def _is_right(demand: SizeDemand, ranks: LocalSizes, divisions: dict[Attribute, Division]) -> bool:
    return evaluate(demand.value, ranks.read_size, divisions) == demand.expected

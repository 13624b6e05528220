"""Find the integers in a forward that are right for whole tensors only, and the attributes that
make them right for a rank's.

A forward says `view(b, s, self.num_heads, self.head_dim)`: on a rank `num_heads` has to be divided.
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
    """Return the attributes that have to be divided, with the axes that ask for it; and axes that
    cannot be cut, with the reason.
    """
    ranks = LocalSizes(sharded_axes)
    demands = [demand for call in trace.calls for demand in list_demands(call, ranks)]
    # What some call gets right as it is must not be divided for another one.
    kept: set[Attribute] = set()
    for demand in demands:
        is_same = demand.expected == int(demand.value) and not demand.sharded_axes
        if is_same and _is_right(demand, ranks, {}):
            kept.update(list_attributes(demand.value))
    divisions: dict[Attribute, Division] = {}
    rewrites: dict[Attribute, AttributeDivision] = {}
    for demand in demands:
        attributes = dict.fromkeys(list_attributes(demand.value))
        if _is_right(demand, ranks, divisions):
            for attribute in divisions.keys() & attributes.keys():
                rewrites[attribute].sharded_axes.update(demand.sharded_axes)
            continue
        shares = {ranks.shares[axis] for axis in demand.sharded_axes}
        if len(shares) != 1 or int(demand.value) < 2:
            continue
        for attribute in attributes:
            if attribute in kept or attribute in divisions:
                continue
            division = next(
                (
                    division
                    for division in _list_divisions(demand, *shares)
                    if _is_right(demand, ranks, {**divisions, attribute: division})
                ),
                None,
            )
            if division is not None:
                divisions[attribute] = division
                rewrites[attribute] = AttributeDivision(set(demand.sharded_axes), division.kept)
                break
    refused: dict[ShardedAxis, str] = {}
    for demand in demands:
        if _is_right(demand, ranks, divisions):
            continue
        guilty = list(demand.sharded_axes)
        if not guilty:  # a whole tensor, whose size an attribute gave that others have divided
            for attribute in list_attributes(demand.value):
                guilty += rewrites[attribute].sharded_axes if attribute in rewrites else ()
        reason = (
            f"{demand.call.function} at {demand.call.source} in"
            f" {demand.call.key.module or 'the model itself'} takes the size"
            f" {int(demand.value)}, which no attribute of its own gives for a part"
        )
        refused |= dict.fromkeys(guilty, reason)
    return rewrites, refused


def _list_divisions(demand: SizeDemand, ranks: int) -> Iterator[Division]:
    """Yield how an attribute may be divided: all of it, or as much of one that is the very size as
    is needed.
    """
    yield Division(ranks)
    value = int(demand.value)
    kept = (ranks * demand.expected - value) // (ranks - 1)
    if isinstance(getattr(demand.value, "source", None), Attribute) and 0 < kept < value:
        yield Division(ranks, kept)


def is_control_flow_same(
    trace: ForwardTrace,
    sharded_axes: list[ShardedAxis],
    rewrites: dict[Attribute, AttributeDivision],
    *,
    size: int,
    last: dict[str, int],
) -> bool:
    """Return True if the forward goes as far as its last boundaries on each of `size` ranks as it
    does on the whole.

    last: by module, the number of the last call that has a boundary. A comparison of sizes that
    comes after it may come out otherwise: `if groups == 1: return keys`.
    """
    # The vocabulary is cut unevenly, and no size in a layer depends on it.
    ranks = LocalSizes([axis for axis in sharded_axes if not axis.vocabulary], size)
    divisions = {attribute: Division(size, rewrite.kept) for attribute, rewrite in rewrites.items()}
    return all(
        is_decided_alike(decision, ranks.read_size, divisions)
        for decision in trace.decisions
        if decision.call <= last.get(decision.module, -1)
    )


def _is_right(demand: SizeDemand, ranks: LocalSizes, divisions: dict[Attribute, Division]) -> bool:
    return evaluate(demand.value, ranks.read_size, divisions) == demand.expected

"""Integers in a forward that are right for whole tensors only, and the attributes that make them
right for a rank's.
"""

from collections.abc import Iterator

from recipe_lib.external.tensor_plan.forward_trace import (
    Course,
    Demand,
    ForwardTrace,
    LocalSizes,
    Wanted,
    demands_of,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Attribute,
    Division,
    attributes_of,
    decided_alike,
    evaluate,
)


def rewrites_for(
    trace: ForwardTrace, courses: list[Course]
) -> tuple[dict[Attribute, Wanted], dict[Course, str]]:
    """Attributes that have to be divided, with the axes that ask for it; and axes that cannot be,
    with the reason.
    """
    ranks = LocalSizes(courses)
    demands = [demand for call in trace.calls for demand in demands_of(call, ranks)]
    divisions: dict[Attribute, Division] = {}
    wanted: dict[Attribute, Wanted] = {}
    kept = {
        attribute
        for demand in demands
        if demand.expected == int(demand.value) and not demand.courses
        for attribute in attributes_of(demand.value)
        if _right(demand, ranks, {})
    }
    for demand in demands:
        if _right(demand, ranks, divisions):
            for attribute in attributes_of(demand.value):
                if attribute in divisions:
                    wanted[attribute].courses.update(demand.courses)
            continue
        for attribute in dict.fromkeys(attributes_of(demand.value)):
            shares = {ranks.shares[course] for course in demand.courses}
            if (
                attribute in kept
                or attribute in divisions
                or len(shares) != 1
                or int(demand.value) < 2
            ):
                continue
            right = (
                each
                for each in _divisions(demand, *shares)
                if _right(demand, ranks, {**divisions, attribute: each})
            )
            if (found := next(right, None)) is not None:
                divisions[attribute] = found
                wanted[attribute] = Wanted(set(demand.courses), found.kept)
                break
    refused: dict[Course, str] = {}
    for demand in demands:
        if not _right(demand, ranks, divisions):
            guilty = demand.courses or [
                course
                for each in attributes_of(demand.value)
                if each in wanted
                for course in wanted[each].courses
            ]
            for course in guilty:
                refused[course] = (
                    f"{demand.call.function} at {demand.call.source} in"
                    f" {demand.call.key.module or 'the model itself'} takes the size"
                    f" {int(demand.value)}, which no attribute of its own gives for a part"
                )
    return wanted, refused


def _divisions(demand: Demand, ranks: int) -> Iterator[Division]:
    """All of an attribute is divided, or as much of one that is the very size as is needed."""
    yield Division(ranks)
    kept = (ranks * demand.expected - int(demand.value)) // (ranks - 1)
    if isinstance(getattr(demand.value, "source", None), Attribute) and 0 < kept < int(
        demand.value
    ):
        yield Division(ranks, kept)


def goes_the_same_way(
    trace: ForwardTrace,
    courses: list[Course],
    wanted: dict[Attribute, Wanted],
    size: int,
    last: dict[str, int],
) -> bool:
    """True if the forward goes as far as its last boundaries on each of `size` ranks as it does on
    the whole.

    last: by module, the number of the last call that has a boundary. A comparison of sizes that
    comes after it may come out otherwise: `if groups == 1: return keys`.
    """
    ranks = LocalSizes([course for course in courses if not course.vocabulary], size)
    divisions = {attribute: Division(size, each.kept) for attribute, each in wanted.items()}
    return all(
        decided_alike(decision, ranks.size, divisions)
        for decision in trace.decisions
        if decision.call <= last.get(decision.module, -1)
    )


def _right(demand: Demand, ranks: LocalSizes, divisions: dict[Attribute, Division]) -> bool:
    return evaluate(demand.value, ranks.size, divisions) == demand.expected

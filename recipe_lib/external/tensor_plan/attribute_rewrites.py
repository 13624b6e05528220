"""Integers in a forward that are right for whole tensors only, and the attributes that make them
right for a rank's.
"""

import dataclasses
from collections.abc import Iterator

from recipe_lib.external.tensor_plan.axes import AxisNode, factors, local_size, parts
from recipe_lib.external.tensor_plan.propagation import Course
from recipe_lib.external.tensor_plan.sourced_integers import (
    Attribute,
    Division,
    Size,
    attributes_of,
    decided_alike,
    evaluate,
)
from recipe_lib.external.tensor_plan.tracing import ForwardTrace, FunctionCall, Traced

_SHAPES = frozenset(
    "view reshape expand zeros ones empty full new_zeros new_ones new_empty new_full rand randn".split()
)


@dataclasses.dataclass(eq=False)
class Demand:
    """An integer that a call gets, and what it has to be on a rank. courses: the axes that make the
    difference.
    """

    call: FunctionCall
    value: int
    expected: int
    courses: list[Course]


@dataclasses.dataclass(eq=False)
class Wanted:
    """An attribute to divide. courses: the axes that ask for it. kept: how much of it each rank
    has.
    """

    courses: set[Course]
    kept: int = 0


class LocalSizes:
    """Sizes on one rank: shares says into how many parts each axis is cut."""

    def __init__(self, courses: list[Course], size: int = 0):
        """size: into how many parts; 0: the smallest number that each can be cut into."""
        self.shares = {course: size or smallest_factor(course.axis.size) for course in courses}
        self._of: dict[Traced, list[Course]] = {}
        for course in courses:
            for tensor in course.sharded:
                self._of.setdefault(tensor, []).append(course)

    def courses_of(self, tensor: Traced) -> list[Course]:
        """The axes that a tensor is cut along."""
        return self._of.get(tensor, [])

    def of(self, tensor: Traced, node: AxisNode) -> int:
        """The size of a dimension of a tensor, or of a part of one."""
        return local_size(
            node, {course.axis: self.shares[course] for course in self.courses_of(tensor)}
        )

    def size(self, size: Size) -> int:
        """What the model reads as the size of a dimension."""
        return self.of(size.tensor, size.tensor.dims[size.dimension])

    def offset(self, tensor: Traced, node: AxisNode, start: int) -> int | None:
        """Where a place within a dimension lies on the rank; None where it does not lie between
        parts.
        """
        found = 0
        for part in parts(node):
            if start >= part.size:
                start -= part.size
                found += self.of(tensor, part)
            elif not start:
                break
            else:
                first = factors(part)[0]
                rest = part.size // first.size
                within = (
                    self.offset(tensor, first, start // rest)
                    if start % rest == 0 and first is not part
                    else None
                )
                return (
                    None
                    if within is None
                    else found + within * (self.of(tensor, part) // self.of(tensor, first))
                )
        return found


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


def demands_of(call: FunctionCall, ranks: LocalSizes) -> Iterator[Demand]:
    """What the integers of a call have to be, where that is known."""
    if not call.outputs or not call.numbers:
        return
    if call.function == "__getitem__":
        yield from _slices(call, ranks)
        return
    output = call.outputs[0]
    for place, dimension in _dimensions(call):
        value = call.numbers.get(place)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= 0
            and dimension < len(output.dims)
        ):
            if call.function.startswith("split") and "." in place:
                output = call.outputs[min(int(place.split(".")[1]), len(call.outputs) - 1)]
            if int(value) == output.dims[dimension].size:
                courses = ranks.courses_of(output)
                expected = ranks.of(output, output.dims[dimension])
                yield Demand(call, value, expected, courses if expected != int(value) else [])


def _dimensions(call: FunctionCall) -> Iterator[tuple[str, int]]:
    """Places of integers that are sizes of what comes out, with the dimension."""
    output = call.outputs[0]
    numbers = call.numbers
    if call.function in _SHAPES:
        method = bool(call.arguments) and call.arguments[0][0] == "0"
        nested = any(place.startswith(("1." if method else "0.", "size.")) for place in numbers)
        for dimension in range(len(output.dims)):
            yield (f"{int(method)}.{dimension}" if nested else str(dimension + method)), dimension
            yield f"size.{dimension}", dimension
    elif call.function == "unflatten":
        dimension = int(numbers.get("1", numbers.get("dim", 0))) % max(len(output.dims), 1)
        count = sum(place.startswith(("2.", "sizes.")) for place in numbers)
        first = (
            dimension
            if int(numbers.get("1", numbers.get("dim", 0))) >= 0
            else dimension - count + 1
        )
        for number in range(count):
            yield f"2.{number}", first + number
            yield f"sizes.{number}", first + number
    elif call.function in ("split", "split_with_sizes", "narrow"):
        default = numbers.get("1", 0) if call.function == "narrow" else numbers.get("2", 0)
        dimension = int(numbers.get("dim", default)) % len(output.dims)
        names = (
            ("3", "length")
            if call.function == "narrow"
            else ("1", "split_size_or_sections", "split_size")
        )
        for place in numbers:
            if place.split(".")[0] in names and place != "1.dim":
                yield place, dimension
    elif call.function.startswith("conv"):
        yield "6", 1
        yield "groups", 1


def _slices(call: FunctionCall, ranks: LocalSizes) -> Iterator[Demand]:
    """Starts and stops of slices."""
    if not call.arguments or call.arguments[0][0] != "0":
        return
    tensor = call.arguments[0][1]
    items = [
        call.numbers.get(place, ...) for place in sorted(call.numbers, key=_order) if place != "0"
    ]
    others = [place for place, _, _ in call.arguments[1:]]
    if others:  # picked by number: those dimensions are blocked
        return
    count = len(tensor.dims)
    spent = sum(item is not None and item is not ... for item in items)
    dimension = 0
    for item in items:
        if item is ...:
            dimension += count - spent
        elif isinstance(item, slice):
            node = tensor.dims[dimension]
            for value in (item.start, item.stop):
                if isinstance(value, int) and 0 < value <= node.size:
                    expected = (
                        ranks.offset(tensor, node, int(value))
                        if value < node.size
                        else ranks.of(tensor, node)
                    )
                    courses = ranks.courses_of(tensor) if expected != int(value) else []
                    if expected is not None:
                        yield Demand(call, value, expected, courses)
            dimension += 1
        elif item is not None:
            dimension += 1


def _order(place: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in place.split(".")]


def smallest_factor(number: int) -> int:
    """The smallest prime that divides a number above 1."""
    return next(
        (factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number
    )

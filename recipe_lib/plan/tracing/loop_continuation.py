"""Continue two runs of a program, of n and n + 1 iterations of its loops, to any number of them.

`trace_deep_model` continues traces of a model with few layers by `continue_items`. A run is a list
of items: some are in loops, whose iterations are layers, the others between loops. The loops are
the parts that the longer run has once more. Items are continued linearly; where an iteration that
was seen does not fit that, there is no result. No torch.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# Iterations that a loop has to have in the longer run at the least.
_FEWEST = 4
# (iterations at the begin, at the end of a loop) that may differ from the others, tried in this
# order. Between them the shorter run has to have one iteration at least and the longer run two.
_DIFFERENT_ENDS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2))

# Indices of the shorter, the longer and the continued run in the tuples below: (short, long, new).
_SHORT, _LONG, _NEW = range(3)


@dataclass
class LoopItems:
    """The items of a run: entry i of each list belongs to item i."""

    # Equal for items that are alike: an item has the same key in each iteration of a loop.
    keys: list[int] = field(default_factory=list)
    # Numbers of an item, such as bytes or the layer. They may grow with the iteration, or with the
    # number of iterations.
    numbers: list[tuple[int, ...]] = field(default_factory=list)
    # Index of an earlier item that the item refers to, as a release to its allocation; -1: none.
    targets: list[int] = field(default_factory=list)

    def add(self, key: int, numbers: tuple[int, ...] = (), target: int = -1) -> None:
        self.keys.append(key)
        self.numbers.append(numbers)
        self.targets.append(target)


# A loop in the longer run: (index of its first item, items of an iteration, iterations). Runs with
# the keys 0 1 2 1 2 3 and 0 1 2 1 2 1 2 3 have the loop (1, 2, 3).
_Loop = tuple[int, int, int]


@dataclass(frozen=True)
class _Part:
    """A loop, or the items between two loops, which count as one iteration."""

    length: int  # items of an iteration
    starts: tuple[int, int, int]  # index of its first item in each run
    iterations: tuple[int, int, int]  # number of its iterations in each run

    def find_item(self, run: int, iteration: int, offset: int) -> int:
        """Return the index in a run of an item. offset: its position in the iteration."""
        return self.starts[run] + iteration * self.length + offset


# (target, numbers) of an item. The target is (index of its part, offset in an iteration), None if
# there is none. The iteration of the target is appended to the numbers, to be continued as these.
_Location = tuple[tuple[int, int] | None, tuple[int, ...]]


class _Rule(NamedTuple):
    """A rule that gives an item of a stretch in each of its iterations of the continued run."""

    like: int  # index of the item in the longer run
    target: tuple[int, int] | None  # as in `_Location`
    numbers: tuple[int, ...]  # in the first iteration, as in `_Location`
    slopes: list[int]  # by how much each number grows from one iteration to the next; []: none does


class _Stretch(NamedTuple):
    """Successive iterations of a loop that are alike."""

    long_first: int  # index of its first iteration in the longer run
    short_first: int  # index of the same iteration in the shorter run
    long_count: int  # iterations in the longer run that have to be alike; 0: only one, not compared
    new_count: int  # iterations in the continued run


def continue_items(short: LoopItems, long: LoopItems, more: int, step: int = 1) -> LoopItems | None:
    """Continue two runs to one with `more` iterations of each loop beyond the longer one.

    step: by how much numbers grow or fall from iteration to iteration, if they do: the layers of an
    iteration. Return None where the two runs do not show how they go on. A key of the result is the
    index of the longer run's item that the item is like.
    """
    loops = _find_loops(np.array(short.keys), np.array(long.keys))
    if loops is None:
        return None
    parts = _split_parts(loops, len(long.keys), more)
    # For each of the two runs, the locations of its items.
    located = [_locate(run, parts, index) for index, run in enumerate((short, long))]
    result = LoopItems()
    for part in parts:
        attempts = (
            _find_rules(part, located, stretches, more=more, step=step)
            for stretches in _list_stretches(part)
        )
        rules = next((attempt for attempt in attempts if attempt is not None), None)
        if rules is None:
            return None
        for stretch_rules, iterations in rules:
            for iteration in range(iterations):
                _apply_rules(stretch_rules, iteration=iteration, parts=parts, result=result)
    return result


def _find_loops(short: Any, long: Any) -> list[_Loop] | None:
    """Return the loops that the longer run has one more iteration of, in order.

    short, long: arrays of keys. Return None where the shorter run is not the longer one with an
    iteration of some loops left out.
    """
    loops: list[_Loop] = []
    positions: dict[int, list[int]] = defaultdict(list)  # key -> its indices in the longer run
    for index, key in enumerate(long.tolist()):
        positions[key].append(index)
    # All items before short_at and long_at are accounted for. last_end: end of the loop that was
    # found last, in `long`.
    short_at = long_at = last_end = 0
    while True:
        num_common = _count_common(short[short_at:], long[long_at:])
        short_at += num_common
        long_at += num_common
        # Items of the longer run, from here on, that the shorter one lacks.
        missing = (len(long) - long_at) - (len(short) - short_at)
        if not missing:
            return loops if short_at == len(short) else None
        if long_at == len(long):
            return None
        length = _find_missing_iteration(
            short[short_at:], long, long_at, missing=missing, known=positions[int(long[long_at])]
        )
        if not length:
            return None
        # The missing iteration is the loop's last one: look for its iterations before.
        start = long_at
        iterations = 1
        body = long[long_at : long_at + length]
        while start - length >= last_end and np.array_equal(long[start - length : start], body):
            start -= length
            iterations += 1
        loops.append((start, length, iterations))
        long_at += length
        last_end = long_at


def _find_missing_iteration(
    short: Any, long: Any, long_at: int, *, missing: int, known: list[int]
) -> int:
    """Return the length of the iteration at `long_at` that the shorter run does not have; 0: none.

    It has the keys of the iteration before it, so its first key stands one length earlier too.
    short: keys of the shorter run that are not compared yet. missing: by how many items these are
    fewer than the longer run's. known: indices of the key at `long_at` in the longer run.
    """
    best_length = 0
    longest = 0
    for earlier in reversed(known[: bisect_right(known, long_at - 1)]):
        length = long_at - earlier
        if length > missing:
            break
        if not np.array_equal(long[earlier:long_at], long[long_at : long_at + length]):
            continue
        # With an empty `short` no keys can agree: 1 if the iteration ends the longer run.
        num_common = (
            _count_common(short, long[long_at + length :])
            if len(short)
            else int(long_at + length == len(long))
        )
        # Of several lengths, take the one after which both runs agree for the most items.
        if num_common > longest:
            best_length = length
            longest = num_common
    return best_length


def _count_common(first: Any, second: Any) -> int:
    """Return the length of the longest common beginning of two arrays of keys."""
    limit = min(len(first), len(second))
    differences = np.flatnonzero(first[:limit] != second[:limit])
    return int(differences[0]) if len(differences) else limit


def _split_parts(loops: list[_Loop], num_long: int, more: int) -> list[_Part]:
    """Return the loops and the items between them as parts, in order.

    num_long: items of the longer run.
    """
    parts: list[_Part] = []
    starts = [0, 0, 0]

    def add(length: int, iterations: tuple[int, int, int]) -> None:
        parts.append(_Part(length, (starts[0], starts[1], starts[2]), iterations))
        for run in range(3):
            starts[run] += length * iterations[run]

    for start, length, iterations in loops:
        add(start - starts[_LONG], (1, 1, 1))
        add(length, (iterations - 1, iterations, iterations + more))
    add(num_long - starts[_LONG], (1, 1, 1))
    return parts


def _locate(items: LoopItems, parts: list[_Part], run: int) -> list[_Location]:
    """Return each item's location. run: _SHORT or _LONG, the run that the items are of."""
    starts = [part.starts[run] for part in parts]
    located: list[_Location] = []
    for numbers, target in zip(items.numbers, items.targets, strict=True):
        if target < 0:
            located.append((None, numbers))
            continue
        part = bisect_right(starts, target) - 1
        iteration, offset = divmod(target - starts[part], parts[part].length)
        located.append(((part, offset), (*numbers, iteration)))
    return located


def _list_stretches(part: _Part) -> Iterator[list[_Stretch]]:
    """Yield the ways to divide a part's iterations into stretches, the strictest first.

    Yield nothing for a loop with fewer than _FEWEST iterations.
    """
    num_short, num_long, num_new = part.iterations
    if num_short == num_long:  # no loop
        yield [_Stretch(0, short_first=0, long_count=0, new_count=1)]
    elif num_long >= _FEWEST:
        for before, after in _DIFFERENT_ENDS:
            inner = num_long - before - after
            if inner >= 2:
                stretches = [
                    _Stretch(index, short_first=index, long_count=0, new_count=1)
                    for index in range(before)
                ]
                stretches.append(
                    _Stretch(
                        before,
                        short_first=before,
                        long_count=inner,
                        new_count=num_new - before - after,
                    )
                )
                stretches += [
                    _Stretch(
                        num_long - from_end,
                        short_first=num_short - from_end,
                        long_count=0,
                        new_count=1,
                    )
                    for from_end in range(after, 0, -1)
                ]
                yield stretches


def _find_rules(
    part: _Part,
    located: list[list[_Location]],
    stretches: list[_Stretch],
    *,
    more: int,
    step: int,
) -> list[tuple[list[_Rule], int]] | None:
    """Return (rules of its items, iterations in the continued run) of each stretch of a part.

    Return None where the part cannot be divided into these stretches. more, step: as in
    `continue_items`.
    """
    rules: list[tuple[list[_Rule], int]] = []
    for stretch in stretches:
        # (run, distance from the stretch's first iteration) of its later iterations, of which the
        # shorter run has one less.
        seen = [(_LONG, distance) for distance in range(1, stretch.long_count)]
        seen += [(_SHORT, distance) for distance in range(1, stretch.long_count - 1)]
        stretch_rules: list[_Rule] = []
        for offset in range(part.length):
            later_items = [
                (run, part.find_item(run, stretch.long_first + distance, offset), distance)
                for run, distance in seen
            ]
            rule = _find_rule(
                located,
                part.find_item(_LONG, stretch.long_first, offset),
                part.find_item(_SHORT, stretch.short_first, offset),
                later_items=later_items,
                more=more,
                step=step,
            )
            if rule is None:
                return None
            stretch_rules.append(rule)
        rules.append((stretch_rules, stretch.new_count))
    return rules


def _find_rule(
    located: list[list[_Location]],
    long_item: int,
    short_item: int,
    *,
    later_items: Sequence[tuple[int, int, int]],
    more: int,
    step: int,
) -> _Rule | None:
    """Return the rule of an item of a stretch's first iteration.

    long_item, short_item: its index in the longer and the shorter run. later_items: (run, index of
    the same item in a later iteration, iterations between). more, step: as in `continue_items`.
    Return None where targets differ or numbers do not grow linearly.
    """
    target, numbers = located[_LONG][long_item]
    short_target, short_numbers = located[_SHORT][short_item]
    if short_target != target:
        return None
    slopes = [0] * len(numbers)
    for run, item, distance in later_items:
        later_target, later_numbers = located[run][item]
        first_numbers = numbers if run == _LONG else short_numbers
        if later_target != target:
            return None
        grown = [new - old for new, old in zip(later_numbers, first_numbers, strict=True)]
        if run == _LONG and distance == 1:
            slopes = grown
        if grown != [slope * distance for slope in slopes]:
            return None
    # In a loop a number grows or falls by `step`, or stays. The last number of an item with a
    # target is the target's iteration, which grows by 1.
    steps = [step] * (len(numbers) - (target is not None)) + [1] * (target is not None)
    if any(slope not in (-most, 0, most) for slope, most in zip(slopes, steps, strict=True)):
        return None
    # From the shorter to the longer run a number grows by as much as it does for each of `more`.
    continued = tuple(
        long + more * (long - short) for long, short in zip(numbers, short_numbers, strict=True)
    )
    return _Rule(long_item, target=target, numbers=continued, slopes=slopes if any(slopes) else [])


def _apply_rules(rules: list[_Rule], iteration: int, parts: list[_Part], result: LoopItems) -> None:
    """Add an iteration of a stretch to the result.

    rules: of its items. iteration: index in the stretch.
    """
    for like, target, numbers, slopes in rules:
        if slopes and iteration:
            numbers = tuple(
                [number + iteration * slope for number, slope in zip(numbers, slopes, strict=True)]
            )
        if target is None:
            result.add(like, numbers)
        else:
            part, offset = target
            result.add(like, numbers[:-1], parts[part].find_item(_NEW, numbers[-1], offset))

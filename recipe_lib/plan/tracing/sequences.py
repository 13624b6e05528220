"""Two sequences, of which the longer has one more turn of every loop, continued to any number of turns. No torch here.

What a program does for a model of n layers is loops of about n turns between things that it does once. Two runs, of one
period of layers more or less, tell which parts are loops: those that the longer run has once more. An item has a key,
which has to be the same from turn to turn, whole numbers that may grow with the turn or with the number of turns, and
an earlier item that it refers to, such as a release to its allocation. Numbers and references are continued on a
straight line, which every turn that was seen has to lie on, and which in a loop goes up or down by a turn's worth, or
not at all; where one does not, there is no continuation.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

# Turns that a loop has in the longer run at the least. Those at either end may be unlike the others, as many as here,
# tried in this order; between them the shorter run has to have one and the longer two.
_FEWEST = 4
_ENDS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2))
_CHUNK = 256


@dataclass
class LoopItems:
    """keys, numbers, targets: of each item; a target is the index of an earlier item, or -1."""

    keys: list[int] = field(default_factory=list)
    numbers: list[tuple[int, ...]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, key: int, numbers: tuple[int, ...] = (), target: int = -1) -> None:
        """One more item."""
        self.keys.append(key)
        self.numbers.append(numbers)
        self.targets.append(target)


@dataclass(frozen=True)
class Continued:
    """The continued sequence: of each item the index of one of the longer run's that it is like, its numbers and its
    target in the continued sequence."""

    like: list[int]
    numbers: list[tuple[int, ...]]
    targets: list[int]


@dataclass(frozen=True)
class _LoopPart:
    """A loop, or what lies between two of them: one turn. starts, turns: in the shorter, longer and continued run."""

    length: int
    starts: tuple[int, int, int]
    turns: tuple[int, int, int]

    @property
    def is_loop(self) -> bool:
        return self.turns[0] != self.turns[1]


_Place = tuple[int, int, int]  # part, turn, place in the turn
_SHORT, _LONG, _NEW = range(3)


def continue_items(short: LoopItems, long: LoopItems, more: int, step: int = 1) -> Continued | None:
    """What a run does that has `more` turns of each loop beyond the longer one; None where that is not certain.

    step: what numbers differ by from turn to turn of a loop, if they do.
    """
    loops = _loops(short.keys, long.keys)
    if loops is None:
        return None
    parts = _parts(loops, len(short.keys), len(long.keys), more)
    runs = (short, long)
    starts = [[part.starts[which] for part in parts] for which in (_SHORT, _LONG)]
    places = [_places(run.targets, parts, which, starts[which]) for which, run in enumerate(runs)]
    result = Continued([], [], [])
    for part in parts:
        ends = _ENDS if part.is_loop else ((part.turns[_LONG], 0),)
        done = any(_continue_part(part, parts, runs, places, (more, step), ends_of, result) for ends_of in ends)
        if not done:
            return None
    return result


# Which parts are loops


def _loops(short: list[int], long: list[int]) -> list[tuple[int, int, int]] | None:
    """(start in the longer run, items of a turn, turns in the longer run) of every loop that it has one more turn of;
    None where the shorter run is not the longer one with a turn of some loops left out."""
    found: list[tuple[int, int, int]] = []
    where: dict[int, list[int]] = defaultdict(list)
    for index, key in enumerate(long):
        where[key].append(index)
    at = there = ended = 0
    while True:
        same = _common(short, at, long, there)
        at, there = at + same, there + same
        missing = (len(long) - there) - (len(short) - at)
        if not missing:
            return found if at == len(short) else None
        length = _turn_left_out(short, at, long, there, missing, where)
        if not length:
            return None
        start, turns = there, 1
        while start - length >= ended and long[start - length : start] == long[there : there + length]:
            start, turns = start - length, turns + 1
        found.append((start, length, turns))
        there += length
        ended = there


def _turn_left_out(
    short: list[int], at: int, long: list[int], there: int, missing: int, where: dict[int, list[int]]
) -> int:
    """Items of the turn at `there` that the shorter run does not have, and that repeats the one before it; 0: none is.

    Of several that could be, the one after which both runs agree for longest.
    """
    best, longest = 0, 0
    known = where[long[there]]
    for place in reversed(known[: bisect_right(known, there - 1)]):
        length = there - place
        if length > missing:
            break
        if long[place:there] != long[there : there + length]:
            continue
        if at == len(short):
            same = int(there + length == len(long))
        else:
            same = _common(short, at, long, there + length)
        if same > longest:
            best, longest = length, same
    return best


def _common(first: list[int], at: int, second: list[int], there: int) -> int:
    """How many items agree from two places on."""
    limit = min(len(first) - at, len(second) - there)
    done = 0
    while done < limit:
        if first[at + done : at + done + _CHUNK] != second[there + done : there + done + _CHUNK]:
            while done < limit and first[at + done] == second[there + done]:
                done += 1
            return done
        done += _CHUNK
    return limit


def _parts(loops: list[tuple[int, int, int]], short: int, long: int, more: int) -> list[_LoopPart]:
    """Loops and what lies between them. short, long: items of the runs."""
    parts: list[_LoopPart] = []
    at = [0, 0, 0]

    def add(length: int, turns: tuple[int, int, int]) -> None:
        parts.append(_LoopPart(length, (at[0], at[1], at[2]), turns))
        for which in range(3):
            at[which] += length * turns[which]

    for start, length, turns in loops:
        add(start - at[_LONG], (1, 1, 1))
        add(length, (turns - 1, turns, turns + more))
    add(long - at[_LONG], (1, 1, 1))
    assert at[_SHORT] == short
    return parts


def _places(targets: list[int], parts: list[_LoopPart], which: int, starts: list[int]) -> list[_Place | None]:
    """Where in the parts each item's target is."""
    found: list[_Place | None] = []
    for target in targets:
        if target < 0:
            found.append(None)
            continue
        number = bisect_right(starts, target) - 1
        part = parts[number]
        turn, offset = divmod(target - part.starts[which], part.length)
        found.append((number, turn, offset))
    return found


# What a part is in the continued run


@dataclass(frozen=True)
class _Rule:
    """How an item goes on: like the longer run's item `like`; numbers grow by `per_turn` and `per_run`; its target is
    at a place in the continued run, which grows by `step` items with each of its own turns."""

    like: int
    numbers: tuple[int, ...]
    per_turn: tuple[int, ...] | None
    target: int
    step: int


# (run, turn of the part, turns from the first that a rule is of)
_Seen = tuple[int, int, int]


def _continue_part(
    part: _LoopPart,
    parts: list[_LoopPart],
    runs: tuple[LoopItems, LoopItems],
    places: list[list[_Place | None]],
    on: tuple[int, int],
    ends: tuple[int, int],
    result: Continued,
) -> bool:
    """Adds a part to the result; False, and nothing added, where it cannot be continued with such ends. on: turns
    more, and the step of numbers."""
    before, after = ends
    short_turns, long_turns, turns = part.turns
    inner = long_turns - before - after
    if part.is_loop and (inner < 2 or long_turns < _FEWEST):
        return False
    # (turn of the longer run, of the shorter, others that have to be like it, how often it is there)
    kinds: list[tuple[int, int, list[_Seen], int]] = [(turn, turn, [], 1) for turn in range(before)]
    if inner > 0:
        seen = [(_LONG, before + turn, turn) for turn in range(1, inner)]
        seen += [(_SHORT, before + turn, turn) for turn in range(1, inner - 1)]
        kinds.append((before, before, seen, turns - before - after))
    kinds += [(long_turns - left, short_turns - left, [], 1) for left in range(after, 0, -1)]
    rules: list[list[_Rule]] = []
    for long_turn, short_turn, seen, _ in kinds:
        rules.append([])
        for offset in range(part.length):
            at = part.starts[_LONG] + long_turn * part.length + offset
            was = part.starts[_SHORT] + short_turn * part.length + offset
            others = [
                (which, part.starts[which] + turn * part.length + offset, distance) for which, turn, distance in seen
            ]
            rule = _rule(parts, runs, places, on, (at, was, others), is_loop=part.is_loop)
            if rule is None:
                return False
            rules[-1].append(rule)
    for rule_list, (*_, count) in zip(rules, kinds, strict=True):
        for turn in range(count):
            _apply(rule_list, turn, result)
    return True


def _rule(
    parts: list[_LoopPart],
    runs: tuple[LoopItems, LoopItems],
    places: list[list[_Place | None]],
    on: tuple[int, int],
    items: tuple[int, int, list[tuple[int, int, int]]],
    *,
    is_loop: bool,
) -> _Rule | None:
    """Of the longer run's item, the shorter one's, and others in the same place of other turns: (run, item, turns from
    these). None where they are not on a line, which in a loop goes up or down by a turn's worth, or not at all."""
    more, step = on
    at, was, others = items
    place = places[_LONG][at]
    values = _values(runs[_LONG], places[_LONG], at, place)
    before = _values(runs[_SHORT], places[_SHORT], was, place)
    if values is None or before is None:
        return None
    slopes = [0] * len(values)
    for which, item, distance in others:
        seen = _values(runs[which], places[which], item, place)
        base = values if which == _LONG else before
        if seen is None:
            return None
        if which == _LONG and distance == 1:
            slopes = [new - old for new, old in zip(seen, base, strict=True)]
        if any(new != old + slope * distance for new, old, slope in zip(seen, base, slopes, strict=True)):
            return None
    values = [now + more * (now - then) for now, then in zip(values, before, strict=True)]
    target = items_a_turn = turns_a_turn = 0
    if place is not None:
        aim = parts[place[0]]
        target = aim.starts[_NEW] + values.pop() * aim.length + place[2]
        turns_a_turn = slopes.pop()
        items_a_turn = turns_a_turn * aim.length
    if is_loop and not (turns_a_turn in (-1, 0, 1) and all(slope in (-step, 0, step) for slope in slopes)):
        return None
    per_turn = tuple(slopes) if any(slopes) else None
    return _Rule(at, tuple(values), per_turn, -1 if place is None else target, items_a_turn)


def _values(run: LoopItems, places: list[_Place | None], item: int, like: _Place | None) -> list[int] | None:
    """An item's numbers, and the turn of its target; None for one whose target is not in the same place of a turn."""
    place = places[item]
    if place is None or like is None:
        return list(run.numbers[item]) if place is like else None
    return [*run.numbers[item], place[1]] if (place[0], place[2]) == (like[0], like[2]) else None


def _apply(rules: list[_Rule], turn: int, result: Continued) -> None:
    """Adds a turn to the result. turn: from the one that the rules are of."""
    like, numbers, targets = result.like.append, result.numbers.append, result.targets.append
    for rule in rules:
        like(rule.like)
        if rule.per_turn is None or not turn:
            numbers(rule.numbers)
        else:
            numbers(tuple([value + turn * by for value, by in zip(rule.numbers, rule.per_turn, strict=True)]))
        targets(rule.target + turn * rule.step if rule.target >= 0 else -1)

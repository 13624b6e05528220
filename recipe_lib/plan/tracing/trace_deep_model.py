"""Which models are simulated with few of their layers, and which whole; the trace of a deep model
from those of two shallow ones.
"""

import itertools
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import UserError
from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.simulated_world.patches import Patch, apply_patches
from recipe_lib.plan.simulated_world.shape_only_model import (
    count_layers,
    find_layer_pattern,
    limit_layers,
)
from recipe_lib.plan.streams.code_line import format_line, is_of_user
from recipe_lib.plan.tracing.simulated_micro_batches import is_declared_uniform
from recipe_lib.plan.tracing.trace import (
    ALLOC,
    FREE,
    OP,
    RECORD,
    USE,
    WAIT,
    Op,
    Storage,
    Sync,
    Trace,
)
from recipe_lib.plan.tracing.trace_rank import Simulated

# Of the shorter run: three turns of a layer's loop, of which the first and the last may be unlike
# the others, and two layers at the ends of a step for which FSDP gathers ahead of time.
_TURNS, _ENDS = 3, 2
# Two shallow models have to be so much less than the whole one.
_WORTHWHILE = 1.4


def simulate_deep(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    simulated: Callable[[FullFinetuneConfig], Simulated],
) -> Simulated:
    """Return `simulated(cfg)`, by two simulations of few layers where they tell what all of them
    do.

    Not for a recipe that does not say that it treats all layers alike, nor for a pipeline, whose
    stages have few. A recipe that says it and does not is simulated whole, with a note.
    """
    depths = choose_depths(recipe_class, cfg)
    found = None
    unlike: list[str] = []
    if depths is not None:
        lead, period = find_layer_pattern(cfg)
        watched = [] if cfg.compile else _watch_layers(unlike)  # which the compiler would look into
        with (
            apply_patches(watched),
            suppress(UserError, IndexError),
        ):  # the whole model says it of the one asked for
            short, long = (simulated(limit_layers(cfg, depth)) for depth in depths)
            unlike += _find_unlike_layers(
                long.trace, range(max(1, lead), depths[1] - period), period
            )
            found = _extend_simulation(
                short, long, (count_layers(cfg) - depths[1]) // period, period
            )
    if found is None or unlike:
        found = simulated(cfg)
    return replace(
        found,
        notes=[*found.notes, *(f"{fault}: the whole model is simulated" for fault in unlike[:1])],
    )


def _watch_layers(unlike: list[str]) -> list[Patch]:
    """Notes where code of the user's own takes layers out of their list, as one that treats some
    otherwise does.
    """

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            frame = sys._getframe(1)
            if is_of_user(frame.f_code.co_filename):
                unlike.append(
                    f"{format_line((frame.f_code.co_filename, frame.f_lineno))} goes by single layers"
                )
            return original(*args)

        return run

    return [
        (nn.ModuleList, name, watch(vars(nn.ModuleList)[name]))
        for name in ("__getitem__", "__iter__")
    ]


def _find_unlike_layers(trace: Trace, layers: range, period: int) -> Iterator[str]:
    """Compares the matmuls of each of some layers, forward and backward, with those of the layer a
    period later.
    """
    products: dict[int, Counter[Hashable]] = defaultdict(Counter)
    for op in trace.ops:
        pattern, numbers = _split_name(op.module)
        if op.flops and numbers:
            products[numbers[0]][op.phase, op.part, pattern, op.name, op.flops] += op.repeats
    for layer in layers:
        if layer + period in layers and products[layer] != products[layer + period]:
            yield f"layers {layer} and {layer + period} do not compute the same"


def choose_depths(recipe_class: type, cfg: FullFinetuneConfig) -> tuple[int, int] | None:
    """Return the layers of the two simulations; None: the whole model is simulated."""
    adapters = cfg.trained_adapters
    modules = [cfg.parallel.fsdp_wrap_policy, adapters.target_modules if adapters else ""]
    # Of lists; a word such as `layers` names no modules.
    named = any(
        letter.isdigit()
        for value in modules
        if not isinstance(value, str)
        for letter in "".join(value)
    )
    budget = (
        cfg.memory.activation_checkpointing == "budget"
    )  # for all layers together, which then differ
    # Buckets of DDP hold several layers' gradients, and Muon shares all matrices out among the
    # ranks.
    across = cfg.parallel.strategy == "ddp" or cfg.optimizer.name == "muon"
    if (
        cfg.parallel.pipeline > 1
        or budget
        or named
        or across
        or not is_declared_uniform(recipe_class)
    ):
        return None
    layers = count_layers(cfg)
    lead, period = find_layer_pattern(cfg)
    ahead = (
        2 * cfg.memory.activation_offload_prefetch_layers + 1
        if cfg.memory.activation_offload
        else 0
    )
    turns = _TURNS + (
        period > 1
    )  # of several layers one is lost where those at an end are unlike the others
    short = (
        lead + turns * period + _ENDS + ahead + cfg.compile
    )  # what a compiled layer made lives a layer longer
    short += (layers - short) % period
    return (short, short + period) if _WORTHWHILE * (2 * short + period) <= layers else None


def _extend_simulation(
    short: Simulated, long: Simulated, more: int, period: int
) -> Simulated | None:
    """The run of a model with `more` periods of layers beyond the longer one's; None where the two
    do not tell.
    """
    facts = [
        replace(run, trace=Trace(), modules=[], likeness=replace(run.likeness, events=0))
        for run in (short, long)
    ]
    trace = extend_trace(short.trace, long.trace, more, period) if facts[0] == facts[1] else None
    modules = extend_rows(short.modules, long.modules, more, period) if trace is not None else None
    return None if trace is None or modules is None else replace(long, trace=trace, modules=modules)


# The trace of a deep model from those of two shallow ones, event by event. No torch in here.
#
# A recipe does for each middle layer what it does for the one before it. So a model of 80 layers is
# simulated twice with few of them, one period of layers apart; what the longer run has once more (a
# layer's forward, its gradient's reduction, its optimizer states) is found and repeated: every
# allocation and release, operator and mark of a stream, with its own layer's name. Where the two
# runs do not show it beyond doubt, nothing is continued, and the whole model is simulated.


# A size that grows with the number of layers may reach a limit that few layers do not show, such as
# that of a bucket.
_MOST_GROWN = 2**20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class _Event:
    """An event before it is an item. sizes: that are part of its key where both runs have it with
    the same ones; where only one has, as of a sum over all layers, they are numbers that may grow.
    """

    what: Hashable
    sizes: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    target: int = -1


def extend_trace(short: Trace, long: Trace, more: int, period: int = 1) -> Trace | None:
    """The trace of a model that has `more` periods of layers beyond the longer one, which has one
    period more than the shorter; None where the two do not tell. Operators do not say what they
    read and make.
    """
    if short.phases != long.phases or long.actions:
        return None
    continued = continue_items(*_make_items(_list_events(short), _list_events(long)), more, period)
    return _build_trace(continued, long) if continued is not None else None


def extend_rows(
    short: Sequence[LayerRow], long: Sequence[LayerRow], more: int, period: int = 1
) -> list[LayerRow] | None:
    """The table of modules in the same way."""
    both = []
    for rows in (short, long):
        patterns = [_split_name(row.module) for row in rows]
        both.append(
            [
                _Event((pattern, repr(replace(row, module=""))), names=numbers)
                for row, (pattern, numbers) in zip(rows, patterns, strict=True)
            ]
        )
    continued = continue_items(*_make_items(*both), more, period)
    if continued is None:
        return None
    return [
        replace(long[like], module=_join_name(_split_name(long[like].module)[0], numbers))
        for like, numbers in zip(continued.keys, continued.numbers, strict=True)
    ]


def _make_items(short: Sequence[_Event], long: Sequence[_Event]) -> "tuple[LoopItems, LoopItems]":
    """Both runs' events with keys that mean the same."""
    numbered: dict[Hashable, int] = {}
    both = {(event.what, event.sizes) for event in short} & {
        (event.what, event.sizes) for event in long
    }
    runs = LoopItems(), LoopItems()
    for events, items in zip((short, long), runs, strict=True):
        for event in events:
            exact = (event.what, event.sizes)
            key: Hashable = exact if exact in both else event.what
            if event.target >= 0:  # a release is like its allocation
                key = (key, items.keys[event.target])
            items.add(
                numbered.setdefault(key, len(numbered)), event.sizes + event.names, event.target
            )
    return runs


def _list_events(trace: Trace) -> list[_Event]:
    """A trace's events; a release, and the use on another stream, has an allocation as its target,
    and a wait has the mark that it waits for.
    """
    events: list[_Event] = []
    made: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for index, (kind, number) in enumerate(trace.events):
        if kind == ALLOC:
            storage = trace.storages[number]
            module, of_module = _split_name(storage.module)
            label, of_label = _split_name(storage.label)
            kept = (
                storage.device,
                storage.stream,
                storage.kind,
                storage.op,
                storage.part,
                storage.pinned,
            )
            made[number] = index
            event = _Event(
                (ALLOC, module, label, storage.phase, *kept), (storage.bytes,), of_module + of_label
            )
        elif kind == FREE:
            event = _Event((FREE,), target=made[number])
        elif kind == OP:
            op = trace.ops[number]
            module, of_module = _split_name(op.module)
            kinds, sizes = _split_collective(op)
            what = (
                op.name,
                op.stream,
                op.part,
                op.phase,
                op.dtype,
                op.transfer,
                op.shape,
                op.on_host,
                kinds,
            )
            event = _Event((OP, module, *what), (op.bytes, op.flops, op.repeats, *sizes), of_module)
        elif kind in (RECORD, WAIT):
            sync = trace.syncs[number]
            event = _Event((kind, sync.stream), target=recorded.get(sync.event, -1))
            if kind == RECORD:
                recorded[sync.event] = index
        elif kind == USE:
            storage_number, stream = trace.uses[number]
            event = _Event((USE, stream), target=made[storage_number])
        else:
            event = _Event((kind, number))
        events.append(event)
    return events


def _split_collective(op: Op) -> tuple[Hashable, tuple[int, ...]]:
    """What of a collective stays the same, and its sizes."""
    found = op.collective
    if found is None:
        return None, ()
    kinds = (
        found.operation,
        found.dim,
        found.ranks,
        found.dtype,
        found.waits,
        tuple(map(len, found.shapes)),
    )
    return kinds, (found.bytes, *(size for shape in found.shapes for size in shape))


@cache
def _split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """A dotted name without its numbers, and these: `model.layers.3.mlp` is `model.layers.{}.mlp`
    and 3.
    """
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


@cache
def _join_name(pattern: str, numbers: tuple[int, ...]) -> str:
    return pattern.format(*numbers) if numbers else pattern


def _build_trace(continued: "LoopItems", long: Trace) -> Trace | None:
    """The continued events as a trace; None where one of them is released that is not there."""
    trace = Trace(phases=list(long.phases))
    numbered: list[int] = []  # by event the number of its storage or mark; -1: it has none
    marks = 0
    alive: set[int] = set()
    for like, numbers, target in zip(
        continued.keys, continued.numbers, continued.targets, strict=True
    ):
        kind, number = long.events[like]
        own = numbered[target] if 0 <= target < len(numbered) else -1
        if kind == ALLOC:
            trace.storages.append(_copy_storage(long.storages[number], numbers))
            if trace.storages[-1].bytes > max(_MOST_GROWN, long.storages[number].bytes):
                return None
            own = number = len(trace.storages) - 1
            alive.add(own)
        elif kind == FREE:
            if own not in alive:
                return None
            alive.remove(own)
            number = own
        elif kind == OP:
            trace.ops.append(_copy_op(long.ops[number], numbers))
            now, then = trace.ops[-1].collective, long.ops[number].collective
            if now is not None and then is not None and now.bytes > max(_MOST_GROWN, then.bytes):
                return None
            number = len(trace.ops) - 1
        elif kind in (RECORD, WAIT):
            if own < 0:
                own = marks
                marks += 1
            trace.syncs.append(Sync(own, long.syncs[number].stream))
            number = len(trace.syncs) - 1
        elif kind == USE:
            trace.uses.append((own, long.uses[number][1]))
            number = len(trace.uses) - 1
        trace.events.append((kind, number))
        numbered.append(own)
    return trace


def _copy_storage(like: Storage, numbers: tuple[int, ...]) -> Storage:
    """An allocation like another of the longer run."""
    module, of_module = _split_name(like.module)
    label, _ = _split_name(like.label)
    cut = 1 + len(of_module)
    return Storage(
        numbers[0],
        like.device,
        like.stream,
        like.kind,
        _join_name(module, numbers[1:cut]),
        _join_name(label, numbers[cut:]),
        like.op,
        like.part,
        like.phase,
        like.pinned,
    )


def _copy_op(like: Op, numbers: tuple[int, ...]) -> Op:
    """An operator like another of the longer run."""
    size, flops, repeats, *others = numbers
    pattern, of_module = _split_name(like.module)
    cut = len(others) - len(of_module)
    collective = like.collective
    if collective is not None and others[:cut] != [
        collective.bytes,
        *itertools.chain(*collective.shapes),
    ]:
        rest = iter(others[1:cut])
        shapes = tuple(tuple(next(rest) for _ in shape) for shape in collective.shapes)
        collective = replace(collective, bytes=others[0], shapes=shapes)
    module = _join_name(pattern, tuple(others[cut:]))
    return Op(
        like.name,
        like.stream,
        like.part,
        module,
        like.phase,
        flops,
        size,
        like.dtype,
        collective,
        repeats,
        like.transfer,
        like.shape,
        like.on_host,
    )


# Two sequences, of which the longer has one more turn of every loop, continued to any number of
# turns.
#
# What a program does for a model of n layers is loops of about n turns between things that it does
# once. Two runs, of one period of layers more or less, tell which parts are loops: those that the
# longer run has once more. An item has a key, which has to be the same from turn to turn, whole
# numbers that may grow with the turn or with the number of turns, and an earlier item that it
# refers to, such as a release to its allocation. Numbers and references are continued on a straight
# line, which every turn that was seen has to lie on, and which in a loop goes up or down by a
# turn's worth, or not at all; where one does not, there is no continuation.


# Turns that a loop has in the longer run at the least. Those at either end may be unlike the
# others, as many as here, tried in this order; between them the shorter run has to have one and the
# longer two.
_FEWEST = 4
_UNLIKE_ENDS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2))


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
class _LoopPart:
    """A loop, or what lies between two of them: one turn. starts, turns: in the shorter, longer and
    continued run.
    """

    length: int
    starts: tuple[int, int, int]
    turns: tuple[int, int, int]

    def find(self, run: int, turn: int, offset: int) -> int:
        """Return the item of a run at a place of a turn."""
        return self.starts[run] + turn * self.length + offset


# An item with its target as a number: the target's part and place in a turn, or none; its numbers,
# then the target's turn.
_Located = tuple[tuple[int, int] | None, tuple[int, ...]]
# How an item goes on: like this one of the longer run, its target, its numbers in the first turn,
# by what they grow.
_Rule = tuple[int, tuple[int, int] | None, tuple[int, ...], list[int]]
_SHORT, _LONG, _NEW = range(3)


def continue_items(short: LoopItems, long: LoopItems, more: int, step: int = 1) -> LoopItems | None:
    """What a run does that has `more` turns of each loop beyond the longer one; None where that is
    not certain.

    step: what numbers differ by from turn to turn of a loop, if they do. A key of the result is the
    index of the longer run's item that the item is like.
    """
    loops = _find_loops(np.array(short.keys), np.array(long.keys))
    if loops is None:
        return None
    parts = _split_parts(loops, len(long.keys), more)
    located = [_locate(run, parts, which) for which, run in enumerate((short, long))]
    result = LoopItems()
    for part in parts:
        attempts = (_find_rules(part, located, kinds, more, step) for kinds in _list_kinds(part))
        rules = next((attempt for attempt in attempts if attempt is not None), None)
        if rules is None:
            return None
        for rule_list, turns in rules:
            for turn in range(turns):
                _apply_rules(rule_list, turn, parts, result)
    return result


def _find_loops(short: Any, long: Any) -> list[tuple[int, int, int]] | None:
    """(start in the longer run, items of a turn, turns in the longer run) of every loop that it has
    one more turn of; None where the shorter run is not the longer one with a turn of some loops
    left out. short, long: arrays of keys.
    """
    found: list[tuple[int, int, int]] = []
    where: dict[int, list[int]] = defaultdict(list)
    for index, key in enumerate(long.tolist()):
        where[key].append(index)
    at = there = ended = 0
    while True:
        same = _count_common(short[at:], long[there:])
        at, there = at + same, there + same
        missing = (len(long) - there) - (len(short) - at)
        if not missing:
            return found if at == len(short) else None
        if there == len(long):
            return None
        length = _find_missing_iteration(short[at:], long, there, missing, where[int(long[there])])
        if not length:
            return None
        start, turns = there, 1
        while start - length >= ended and np.array_equal(
            long[start - length : start], long[there : there + length]
        ):
            start, turns = start - length, turns + 1
        found.append((start, length, turns))
        there += length
        ended = there


def _find_missing_iteration(
    short: Any, long: Any, there: int, missing: int, known: list[int]
) -> int:
    """Items of the turn at `there` that the shorter run does not have, and that repeats the one
    before it; 0: none is.

    short: what is left of it. known: where the longer run has the key at `there`. Of several that
    could be, the one after which both runs agree for longest.
    """
    best, longest = 0, 0
    for place in reversed(known[: bisect_right(known, there - 1)]):
        length = there - place
        if length > missing:
            break
        if not np.array_equal(long[place:there], long[there : there + length]):
            continue
        same = (
            _count_common(short, long[there + length :])
            if len(short)
            else int(there + length == len(long))
        )
        if same > longest:
            best, longest = length, same
    return best


def _count_common(first: Any, second: Any) -> int:
    """Return how many keys two arrays begin with alike."""
    limit = min(len(first), len(second))
    unlike = np.flatnonzero(first[:limit] != second[:limit])
    return int(unlike[0]) if len(unlike) else limit


def _split_parts(loops: list[tuple[int, int, int]], long: int, more: int) -> list[_LoopPart]:
    """Loops and what lies between them. long: items of the longer run."""
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
    return parts


def _locate(run: LoopItems, parts: list[_LoopPart], which: int) -> list[_Located]:
    """Find each item's target in the parts, in the shorter or the longer run."""
    starts = [part.starts[which] for part in parts]
    located: list[_Located] = []
    for numbers, target in zip(run.numbers, run.targets, strict=True):
        if target < 0:
            located.append((None, numbers))
            continue
        part = bisect_right(starts, target) - 1
        turn, offset = divmod(target - starts[part], parts[part].length)
        located.append(((part, offset), (*numbers, turn)))
    return located


def _list_kinds(part: _LoopPart) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield the ways to take a part's turns: (turn of the longer run, of the shorter, turns from
    there that have to be alike, how often the continued run has it).
    """
    short_turns, long_turns, turns = part.turns
    if short_turns == long_turns:
        yield [(0, 0, 0, 1)]
    elif long_turns >= _FEWEST:
        for before, after in _UNLIKE_ENDS:
            inner = long_turns - before - after
            if inner >= 2:
                first = [(turn, turn, 0, 1) for turn in range(before)]
                last = [
                    (long_turns - left, short_turns - left, 0, 1) for left in range(after, 0, -1)
                ]
                yield [*first, (before, before, inner, turns - before - after), *last]


def _find_rules(
    part: _LoopPart,
    located: list[list[_Located]],
    kinds: list[tuple[int, int, int, int]],
    more: int,
    step: int,
) -> list[tuple[list[_Rule], int]] | None:
    """Return the rules of a part's turns, with how many these are; None where it cannot be
    continued in this way.
    """
    found: list[tuple[list[_Rule], int]] = []
    for long_turn, short_turn, alike, count in kinds:
        seen = [(_LONG, turn) for turn in range(1, alike)] + [
            (_SHORT, turn) for turn in range(1, alike - 1)
        ]
        found.append(([], count))
        for offset in range(part.length):
            at = part.find(_LONG, long_turn, offset)
            was = part.find(_SHORT, short_turn, offset)
            others = [
                (which, part.find(which, long_turn + turn, offset), turn) for which, turn in seen
            ]
            rule = _find_rule(located, (at, was), others, more, step)
            if rule is None:
                return None
            found[-1][0].append(rule)
    return found


def _find_rule(
    located: list[list[_Located]],
    items: tuple[int, int],
    others: list[tuple[int, int, int]],
    more: int,
    step: int,
) -> _Rule | None:
    """Return how the longer run's item goes on, from the shorter one's, and others in the same
    place of other turns: (run, item, turns from these). None where they are not on a line, which in
    a loop goes up or down by a turn's worth, or not at all.
    """
    at, was = items
    target, values = located[_LONG][at]
    target_before, before = located[_SHORT][was]
    if target_before != target:
        return None
    slopes = [0] * len(values)
    for which, item, distance in others:
        seen_target, seen = located[which][item]
        base = values if which == _LONG else before
        if seen_target != target:
            return None
        if which == _LONG and distance == 1:
            slopes = [new - old for new, old in zip(seen, base, strict=True)]
        if any(
            new != old + slope * distance
            for new, old, slope in zip(seen, base, slopes, strict=True)
        ):
            return None
    worths = [step] * (len(values) - (target is not None)) + [1] * (target is not None)
    if any(slope not in (-worth, 0, worth) for slope, worth in zip(slopes, worths, strict=True)):
        return None
    values = tuple(now + more * (now - then) for now, then in zip(values, before, strict=True))
    return at, target, values, slopes if any(slopes) else []


def _apply_rules(rules: list[_Rule], turn: int, parts: list[_LoopPart], result: LoopItems) -> None:
    """Add a turn to the result. turn: from the one that the rules are of."""
    for like, target, values, slopes in rules:
        numbers = values
        if slopes and turn:
            numbers = tuple([value + turn * by for value, by in zip(values, slopes, strict=True)])
        if target is None:
            result.add(like, numbers)
        else:
            result.add(like, numbers[:-1], parts[target[0]].find(_NEW, numbers[-1], target[1]))

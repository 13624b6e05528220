"""Which models are simulated with few of their layers, and which whole."""

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import UserError
from recipe_lib.plan.result import LayerRow
from recipe_lib.plan.trace import ALLOC, FREE, OP, RECORD, USE, WAIT, Op, Storage, Sync, Trace
from recipe_lib.plan.tracing.sequences import Continued, LoopItems, continue_items
from recipe_lib.plan.tracing.simulate import Simulated
from recipe_lib.plan.tracing.simulated_micro_batches import treats_all_alike
from recipe_lib.plan.world.shape_only_model import find_layer_pattern, layer_count, with_layers

# Of the shorter run: three turns of a layer's loop, of which the first and the last may be unlike the others, and two
# layers at the ends of a step for which FSDP gathers ahead of time.
_TURNS, _ENDS = 3, 2
# Two shallow models have to be so much less than the whole one.
_WORTHWHILE = 1.4


def simulate_deep(
    recipe_class: type, cfg: FullFinetuneConfig, simulated: Callable[[FullFinetuneConfig], Simulated]
) -> Simulated:
    """Return `simulated(cfg)`, by two simulations of few layers where they tell what all of them do.

    Not for a recipe that does not say that it treats all layers alike, nor for a pipeline, whose stages have few.
    """
    depths = few_layers(recipe_class, cfg)
    if depths is not None:
        layers, period = layer_count(cfg), depths[1] - depths[0]
        try:
            short, long = (simulated(with_layers(cfg, depth)) for depth in depths)
        except UserError:
            return simulated(cfg)  # which says it of the model that was asked for
        found = _deeper(short, long, (layers - depths[1]) // period, period)
        if found is not None:
            return found
    return simulated(cfg)


def few_layers(recipe_class: type, cfg: FullFinetuneConfig) -> tuple[int, int] | None:
    """Return the layers of the two simulations; None: the whole model is simulated."""
    adapters = cfg.trained_adapters
    patterns = [*_patterns(cfg.parallel.fsdp_wrap_policy), *(_patterns(adapters.target_modules) if adapters else ())]
    named = any(letter.isdigit() for pattern in patterns for letter in pattern)
    budget = cfg.memory.activation_checkpointing == "budget"  # for all layers together, which then differ
    # Buckets of DDP hold several layers' gradients, and Muon shares all matrices out among the ranks.
    across = cfg.parallel.strategy == "ddp" or cfg.optimizer.name == "muon"
    if cfg.parallel.pipeline > 1 or budget or named or across or not treats_all_alike(recipe_class):
        return None
    layers = layer_count(cfg)
    lead, period = find_layer_pattern(cfg)
    ahead = 2 * cfg.memory.activation_offload_prefetch_layers + 1 if cfg.memory.activation_offload else 0
    short = lead + _TURNS * period + _ENDS + ahead + cfg.compile  # what a compiled layer made lives a layer longer
    short += (layers - short) % period
    return (short, short + period) if _WORTHWHILE * (2 * short + period) <= layers else None


def _deeper(short: Simulated, long: Simulated, more: int, period: int) -> Simulated | None:
    """The run of a model with `more` periods of layers beyond the longer one's; None where the two do not tell."""

    def same(one: Simulated) -> tuple[object, ...]:
        left = (one.repeats, one.grows, one.traced, one.untraced, one.likeness.alike, one.likeness.growth)
        return (one.coordinates, one.mesh, one.tokens, one.notes, one.estimate, *left)

    if same(short) != same(long):
        return None
    trace, modules = (
        more_layers(short.trace, long.trace, more, period),
        more_rows(short.modules, long.modules, more, period),
    )
    return None if trace is None or modules is None else replace(long, trace=trace, modules=modules)


def _patterns(value: str | list[str]) -> list[str]:
    """Names of modules that a config has; a word such as `layers` is none."""
    return [] if isinstance(value, str) else value


# The trace of a deep model from those of two shallow ones, event by event. No torch in here.
#
# A recipe does for each middle layer what it does for the one before it. So a model of 80 layers is
# simulated twice with few of them, one period of layers apart; what the longer run has once more (a
# layer's forward, its gradient's reduction, its optimizer states) is found and repeated: every
# allocation and release, operator and mark of a stream, with its own layer's name. Where the two
# runs do not show it beyond doubt, nothing is continued, and the whole model is simulated.


# A size that grows with the number of layers may reach a limit that few layers do not show, such as that of a bucket.
_MOST_GROWN = 2**20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class _Event:
    """An event before it is an item. sizes: that are part of its key where both runs have it with the same ones; where
    only one has, as of a sum over all layers, they are numbers that may grow."""

    what: Hashable
    sizes: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    target: int = -1


def more_layers(short: Trace, long: Trace, more: int, period: int = 1) -> Trace | None:
    """The trace of a model that has `more` periods of layers beyond the longer one, which has one period more than the
    shorter; None where the two do not tell. Operators do not say what they read and make."""
    if short.phases != long.phases or long.actions:
        return None
    continued = continue_items(*_items(_events(short), _events(long)), more, period)
    return _trace(continued, long) if continued is not None else None


def more_rows(short: Sequence[LayerRow], long: Sequence[LayerRow], more: int, period: int = 1) -> list[LayerRow] | None:
    """The table of modules in the same way."""
    both = []
    for rows in (short, long):
        patterns = [_pattern(row.module) for row in rows]
        both.append(
            [
                _Event((pattern, repr(replace(row, module=""))), names=numbers)
                for row, (pattern, numbers) in zip(rows, patterns, strict=True)
            ]
        )
    continued = continue_items(*_items(*both), more, period)
    if continued is None:
        return None
    return [
        replace(long[like], module=_named(_pattern(long[like].module)[0], numbers))
        for like, numbers in zip(continued.like, continued.numbers, strict=True)
    ]


def _items(short: Sequence[_Event], long: Sequence[_Event]) -> tuple[LoopItems, LoopItems]:
    """Both runs' events with keys that mean the same."""
    numbered: dict[Hashable, int] = {}
    both = {(event.what, event.sizes) for event in short} & {(event.what, event.sizes) for event in long}
    runs = LoopItems(), LoopItems()
    for events, items in zip((short, long), runs, strict=True):
        for event in events:
            exact = (event.what, event.sizes)
            key: Hashable = exact if exact in both else event.what
            if event.target >= 0:  # a release is like its allocation
                key = (key, items.keys[event.target])
            items.add(numbered.setdefault(key, len(numbered)), event.sizes + event.names, event.target)
    return runs


def _events(trace: Trace) -> list[_Event]:
    """A trace's events; a release, and the use on another stream, has an allocation as its target, and a wait has the
    mark that it waits for."""
    events: list[_Event] = []
    made: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for index, (kind, number) in enumerate(trace.events):
        if kind == ALLOC:
            storage = trace.storages[number]
            module, of_module = _pattern(storage.module)
            label, of_label = _pattern(storage.label)
            kept = (storage.device, storage.stream, storage.kind, storage.op, storage.part, storage.pinned)
            made[number] = index
            event = _Event((ALLOC, module, label, storage.phase, *kept), (storage.bytes,), of_module + of_label)
        elif kind == FREE:
            event = _Event((FREE,), target=made[number])
        elif kind == OP:
            op = trace.ops[number]
            module, of_module = _pattern(op.module)
            kinds, sizes = _of_collective(op)
            what = (op.name, op.stream, op.part, op.phase, op.dtype, op.transfer, op.shape, op.on_host, kinds)
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


def _of_collective(op: Op) -> tuple[Hashable, tuple[int, ...]]:
    """What of a collective stays the same, and its sizes."""
    found = op.collective
    if found is None:
        return None, ()
    kinds = (found.operation, found.dim, found.ranks, found.dtype, found.waits, tuple(map(len, found.shapes)))
    return kinds, (found.bytes, *(size for shape in found.shapes for size in shape))


@cache
def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """A dotted name without its numbers, and these: `model.layers.3.mlp` is `model.layers.{}.mlp` and 3."""
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


@cache
def _named(pattern: str, numbers: tuple[int, ...]) -> str:
    return pattern.format(*numbers) if numbers else pattern


def _trace(continued: Continued, long: Trace) -> Trace | None:
    """The continued events as a trace; None where one of them is released that is not there."""
    trace = Trace(phases=list(long.phases))
    numbered: list[int] = []  # by event the number of its storage or mark; -1: it has none
    marks = 0
    alive: set[int] = set()
    for like, numbers, target in zip(continued.like, continued.numbers, continued.targets, strict=True):
        kind, number = long.events[like]
        own = numbered[target] if 0 <= target < len(numbered) else -1
        if kind == ALLOC:
            trace.storages.append(_storage(long.storages[number], numbers))
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
            trace.ops.append(_op(long.ops[number], numbers))
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


def _storage(like: Storage, numbers: tuple[int, ...]) -> Storage:
    """An allocation like another of the longer run."""
    module, of_module = _pattern(like.module)
    label, _ = _pattern(like.label)
    cut = 1 + len(of_module)
    return Storage(
        numbers[0],
        like.device,
        like.stream,
        like.kind,
        _named(module, numbers[1:cut]),
        _named(label, numbers[cut:]),
        like.op,
        like.part,
        like.phase,
        like.pinned,
    )


def _op(like: Op, numbers: tuple[int, ...]) -> Op:
    """An operator like another of the longer run."""
    size, flops, repeats, *others = numbers
    pattern, of_module = _pattern(like.module)
    cut = len(others) - len(of_module)
    collective = like.collective
    if collective is not None and others[:cut] != [collective.bytes, *itertools.chain(*collective.shapes)]:
        rest = iter(others[1:cut])
        shapes = tuple(tuple(next(rest) for _ in shape) for shape in collective.shapes)
        collective = replace(collective, bytes=others[0], shapes=shapes)
    module = _named(pattern, tuple(others[cut:]))
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

"""Deep models, simulated with few of their layers.

`simulate_deep` simulates a deep model twice with few layers, one period of layers apart. A recipe
does for each middle layer what it does for the one before it: the events that the longer run has
once more are repeated, each with its own layer's name (`extend_trace`). Where the two runs do not
show it beyond doubt, and where a recipe does not treat all layers alike, the whole model is run.
"""

import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import UserError
from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.simulated_world.shape_only_model import (
    count_layers,
    find_layer_pattern,
    limit_layers,
)
from recipe_lib.plan.simulated_world.simulated_ranks import Patch, apply_patches
from recipe_lib.plan.streams.stream_checker import format_line, is_of_user
from recipe_lib.plan.tracing.loop_continuation import LoopItems, continue_items
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

# Layers of the shorter run: three iterations of a loop over layers, of which the first and the last
# may differ from the others, and two layers at the ends of a step for which FSDP gathers ahead.
_ITERATIONS = 3
_ENDS = 2
# Two shallow models have to be so much less than the whole one.
_WORTHWHILE = 1.4
# A size that grows with the number of layers may reach a limit that few layers do not show, such as
# that of a bucket.
_MOST_GROWN = 2**20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def simulate_deep(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    run: Callable[[FullFinetuneConfig], Simulated],
) -> Simulated:
    """Return `run(cfg)`, from two runs of few layers where they tell what all layers do.

    A recipe that declares that it treats all layers alike and does not is simulated as a whole,
    with a note.
    """
    depths = choose_depths(recipe_class, cfg)
    simulated = None
    faults: list[str] = []
    if depths is not None:
        lead, period = find_layer_pattern(cfg)
        # Dynamo would look into the patched methods.
        watched = [] if cfg.compile else _watch_layers(faults)
        # What is wrong with a shallow model is told of the whole one, which was asked for.
        with apply_patches(watched), suppress(UserError, IndexError):
            short, long = (run(limit_layers(cfg, depth)) for depth in depths)
            middle = range(max(1, lead), depths[1] - period)
            faults += _find_different_layers(long.trace, middle, period)
            more = (count_layers(cfg) - depths[1]) // period
            simulated = _extend_simulation(short, long=long, more=more, period=period)
    if simulated is None or faults:
        simulated = run(cfg)
    simulated.notes += [f"{fault}: the whole model is simulated" for fault in faults[:1]]
    return simulated


def _watch_layers(faults: list[str]) -> list[Patch]:
    """Return patches that note where a user's code takes layers out of their list.

    Code that treats some layers otherwise does so.
    """

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            frame = sys._getframe(1)
            if is_of_user(frame.f_code.co_filename):
                line = format_line((frame.f_code.co_filename, frame.f_lineno))
                faults.append(f"{line} goes by single layers")
            return original(*args)

        return run

    return [
        (nn.ModuleList, name, watch(vars(nn.ModuleList)[name]))
        for name in ("__getitem__", "__iter__")
    ]


def _find_different_layers(trace: Trace, layers: range, period: int) -> Iterator[str]:
    """Yield a fault for each layer whose matmuls are not those of the layer a period later."""
    matmuls: dict[int, Counter[Hashable]] = defaultdict(Counter)
    for op in trace.ops:
        pattern, numbers = _split_name(op.module)
        if op.flops and numbers:
            matmuls[numbers[0]][op.phase, op.part, pattern, op.name, op.flops] += op.repeats
    for layer in layers:
        if layer + period in layers and matmuls[layer] != matmuls[layer + period]:
            yield f"layers {layer} and {layer + period} do not compute the same"


def choose_depths(recipe_class: type, cfg: FullFinetuneConfig) -> tuple[int, int] | None:
    """Return the layers of the two simulations; None: the whole model is simulated."""
    adapters = cfg.trained_adapters
    module_lists = [cfg.parallel.fsdp_wrap_policy, adapters.target_modules if adapters else ""]
    # A list may name single layers; a word such as `layers` does not.
    names_layers = any(
        any(map(str.isdigit, "".join(modules)))
        for modules in module_lists
        if not isinstance(modules, str)
    )
    if (
        names_layers
        or not is_declared_uniform(recipe_class)
        or cfg.parallel.pipeline > 1  # its stages have few layers
        or cfg.parallel.strategy == "ddp"  # its buckets hold several layers' gradients
        or cfg.optimizer.name == "muon"  # it shares all matrices out among the ranks
        # One budget for all layers together, which then differ.
        or cfg.memory.activation_checkpointing == "budget"
    ):
        return None
    num_layers = count_layers(cfg)
    lead, period = find_layer_pattern(cfg)
    # Of periods of several layers one is lost where the layers at an end differ from the others.
    iterations = _ITERATIONS + (period > 1)
    # What a compiled layer made lives a layer longer.
    short = lead + iterations * period + _ENDS + cfg.compile
    if cfg.memory.activation_offload:
        short += 2 * cfg.memory.activation_offload_prefetch_layers + 1
    short += (num_layers - short) % period
    return (short, short + period) if _WORTHWHILE * (2 * short + period) <= num_layers else None


def _extend_simulation(
    short: Simulated, long: Simulated, more: int, period: int
) -> Simulated | None:
    """Return the run of a model with `more` periods of layers beyond the longer run's.

    None where the two runs do not tell.
    """
    # All but the traces, the tables of modules and the number of events has to be the same.
    comparison = replace(short.comparison, events=long.comparison.events)
    if replace(short, trace=long.trace, modules=long.modules, comparison=comparison) != long:
        return None
    trace = extend_trace(short.trace, long=long.trace, more=more, period=period)
    modules = extend_rows(short.modules, long=long.modules, more=more, period=period)
    return None if trace is None or modules is None else replace(long, trace=trace, modules=modules)


@dataclass
class _Event:
    """An event before it is an item of `LoopItems`."""

    # What has to be the same for two events to be alike.
    what: Hashable
    # Part of the key where both runs have the event with the same sizes. Where only one has, as of
    # a sum over all layers, they are numbers that may grow.
    sizes: tuple[int, ...] = ()
    # Numbers in the names of its module and its label.
    name_numbers: tuple[int, ...] = ()
    target: int = -1


def extend_trace(short: Trace, long: Trace, more: int, period: int = 1) -> Trace | None:
    """Return the trace of a model with `more` periods of layers beyond the longer run's.

    The longer run has one period more than the shorter. None where the two do not tell. Operators
    of the result do not say what they read and make.
    """
    if short.phases != long.phases or long.actions:
        return None
    items = _make_items(_list_events(short), _list_events(long))
    continued = continue_items(*items, more, period)
    return _build_trace(continued, long) if continued is not None else None


def extend_rows(
    short: Sequence[LayerRow], long: Sequence[LayerRow], more: int, period: int = 1
) -> list[LayerRow] | None:
    """Return the table of modules of the same model, in the same way."""
    items = _make_items(list(map(_describe_row, short)), list(map(_describe_row, long)))
    continued = continue_items(*items, more, period)
    if continued is None:
        return None
    return [
        replace(long[like], module=_join_name(_split_name(long[like].module)[0], numbers))
        for like, numbers in zip(continued.keys, continued.numbers, strict=True)
    ]


def _describe_row(row: LayerRow) -> _Event:
    pattern, numbers = _split_name(row.module)
    return _Event((pattern, repr(replace(row, module=""))), name_numbers=numbers)


def _make_items(short: Sequence[_Event], long: Sequence[_Event]) -> tuple[LoopItems, LoopItems]:
    """Return both runs' events as items with keys that mean the same in both."""
    key_numbers: dict[Hashable, int] = {}
    in_both = {(event.what, event.sizes) for event in short}
    in_both &= {(event.what, event.sizes) for event in long}
    runs = LoopItems(), LoopItems()
    for events, items in zip((short, long), runs, strict=True):
        for event in events:
            exact_key = (event.what, event.sizes)
            key: Hashable = exact_key if exact_key in in_both else event.what
            if event.target >= 0:  # a release is like another if their allocations are
                key = (key, items.keys[event.target])
            key_number = key_numbers.setdefault(key, len(key_numbers))
            items.add(key_number, event.sizes + event.name_numbers, event.target)
    return runs


def _list_events(trace: Trace) -> list[_Event]:
    """Return a trace's events.

    The target of a release, and of a use on another stream, is the allocation; that of a wait is
    the record that it waits for.
    """
    events: list[_Event] = []
    allocations: dict[int, int] = {}  # number of a storage -> index of its event
    records: dict[int, int] = {}  # number of an event of the device -> index of its record
    for index, (kind, number) in enumerate(trace.events):
        if kind == ALLOC:
            events.append(_describe_allocation(trace.storages[number]))
            allocations[number] = index
        elif kind == FREE:
            events.append(_Event((FREE,), target=allocations[number]))
        elif kind == OP:
            events.append(_describe_op(trace.ops[number]))
        elif kind in (RECORD, WAIT):
            sync = trace.syncs[number]
            events.append(_Event((kind, sync.stream), target=records.get(sync.event, -1)))
            if kind == RECORD:
                records[sync.event] = index
        elif kind == USE:
            storage_number, stream = trace.uses[number]
            events.append(_Event((USE, stream), target=allocations[storage_number]))
        else:
            events.append(_Event((kind, number)))
    return events


def _describe_allocation(storage: Storage) -> _Event:
    module, module_numbers = _split_name(storage.module)
    label, label_numbers = _split_name(storage.label)
    what = (
        ALLOC,
        module,
        label,
        storage.phase,
        storage.device,
        storage.stream,
        storage.kind,
        storage.op,
        storage.part,
        storage.pinned,
    )
    return _Event(what, sizes=(storage.bytes,), name_numbers=module_numbers + label_numbers)


def _describe_op(op: Op) -> _Event:
    module, module_numbers = _split_name(op.module)
    collective = op.collective
    kinds: Hashable = None
    sizes: tuple[int, ...] = (op.bytes, op.flops, op.repeats)
    if collective is not None:
        kinds = (
            collective.operation,
            collective.dim,
            collective.ranks,
            collective.dtype,
            collective.waits,
            tuple(map(len, collective.shapes)),
        )
        sizes = (*sizes, collective.bytes, *itertools.chain(*collective.shapes))
    what = (
        OP,
        module,
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
    return _Event(what, sizes=sizes, name_numbers=module_numbers)


@cache
def _split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Split a dotted name into a pattern and its numbers.

    `model.layers.3.mlp` gives `model.layers.{}.mlp` and 3.
    """
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


@cache
def _join_name(pattern: str, numbers: tuple[int, ...]) -> str:
    return pattern.format(*numbers) if numbers else pattern


def _build_trace(continued: LoopItems, long: Trace) -> Trace | None:
    """Return the continued events as a trace.

    None where one of them releases what is not there, or has grown too much.
    """
    trace = Trace(phases=list(long.phases))
    numbers_of_events: list[int] = []  # by event that of its storage or mark; -1: it has none
    marks = itertools.count()  # numbers of the events of the device
    alive: set[int] = set()
    items = zip(continued.keys, continued.numbers, continued.targets, strict=True)
    for like, numbers, target in items:
        kind, number = long.events[like]
        # The storage or mark that the event refers to, or makes.
        referred = numbers_of_events[target] if 0 <= target < len(numbers_of_events) else -1
        if kind == ALLOC:
            storage = _copy_storage(long.storages[number], numbers)
            if storage.bytes > max(_MOST_GROWN, long.storages[number].bytes):
                return None
            referred = trace.add(ALLOC, storage)
            alive.add(referred)
        elif kind == FREE:
            if referred not in alive:
                return None
            alive.remove(referred)
            trace.events.append((FREE, referred))
        elif kind == OP:
            op = _copy_op(long.ops[number], numbers)
            before = long.ops[number].collective
            most_bytes = max(_MOST_GROWN, before.bytes if before else 0)
            if op.collective is not None and op.collective.bytes > most_bytes:
                return None
            trace.add(OP, op)
        elif kind in (RECORD, WAIT):
            referred = referred if referred >= 0 else next(marks)
            trace.add(kind, Sync(referred, long.syncs[number].stream))
        elif kind == USE:
            trace.add(USE, (referred, long.uses[number][1]))
        else:
            trace.events.append((kind, number))
        numbers_of_events.append(referred)
    return trace


def _copy_storage(like: Storage, numbers: tuple[int, ...]) -> Storage:
    """Return an allocation like another, with its own size and numbers of names."""
    module, module_numbers = _split_name(like.module)
    label, _ = _split_name(like.label)
    size, *name_numbers = numbers
    num_module = len(module_numbers)
    # Not `dataclasses.replace`: it takes several times as long, and a trace has many of them.
    return Storage(
        bytes=size,
        device=like.device,
        stream=like.stream,
        kind=like.kind,
        module=_join_name(module, tuple(name_numbers[:num_module])),
        label=_join_name(label, tuple(name_numbers[num_module:])),
        op=like.op,
        part=like.part,
        phase=like.phase,
        pinned=like.pinned,
    )


def _copy_op(like: Op, numbers: tuple[int, ...]) -> Op:
    """Return an operator like another, with its own sizes and numbers of names."""
    size, flops, repeats, *later_numbers = numbers
    pattern, module_numbers = _split_name(like.module)
    num_sizes = len(later_numbers) - len(module_numbers)
    sizes = later_numbers[:num_sizes]
    collective = like.collective
    # Most are as they were; copying a collective takes time.
    if collective is not None and sizes != [
        collective.bytes,
        *itertools.chain(*collective.shapes),
    ]:
        remaining = iter(sizes[1:])
        shapes = tuple(tuple(itertools.islice(remaining, len(dims))) for dims in collective.shapes)
        collective = replace(collective, bytes=sizes[0], shapes=shapes)
    return Op(
        name=like.name,
        stream=like.stream,
        part=like.part,
        module=_join_name(pattern, tuple(later_numbers[num_sizes:])),
        phase=like.phase,
        flops=flops,
        bytes=size,
        dtype=like.dtype,
        collective=collective,
        repeats=repeats,
        transfer=like.transfer,
        shape=like.shape,
        on_host=like.on_host,
    )

"""Simulate a deep model with few of its layers.

`build_plan` calls `simulate_deep`, which simulates two shallow models. The longer one has one
period more (layers after which a model repeats itself; 1 if all are alike). What it does beyond the
shorter one is repeated for the layers left out, with their names: allocations, operators and waits,
the events of a trace. Where the two do not show this beyond doubt, the whole model is simulated.
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
from recipe_lib.plan.streams.code_lines import format_line, is_of_user
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

# Layers of the shorter model: _ITERATIONS periods, of which the first and the last may differ from
# the others, and _ENDS layers at the ends of a step for which FSDP gathers ahead.
_ITERATIONS = 3
_ENDS = 2
# The whole model is simulated unless it has so many times the layers of both shallow models
# together: else no time is saved.
_WORTHWHILE = 1.4
# Bytes up to which a size may grow with the number of layers. A larger one may reach a limit that
# few layers do not show, such as that of a bucket.
_MOST_GROWN = 2**20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a dotted name that is a number


def simulate_deep(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    run: Callable[[FullFinetuneConfig], Simulated],
) -> Simulated:
    """Return `run(cfg)`, or the same from two runs with few layers where they show all of it.

    run: simulates a config. A recipe class may promise to treat all layers alike. Where they turn
    out to differ nonetheless, the whole model is simulated, with a note in the result.
    """
    depths = choose_depths(recipe_class, cfg)
    simulated = None
    faults: list[str] = []  # signs that layers differ, as sentences
    if depths is not None:
        lead, period = find_layer_pattern(cfg)  # lead: layers at the begin that are never repeated
        # torch.compile would trace into the patched methods.
        watch_patches = [] if cfg.compile else _watch_layers(faults)
        # An error of a shallow model is not reported: the whole model is run then, and raises its
        # own.
        with apply_patches(watch_patches), suppress(UserError, IndexError):
            short, long = (run(limit_layers(cfg, depth)) for depth in depths)
            # The first and the last layers of the model may differ from the others.
            middle_layers = range(max(1, lead), depths[1] - period)
            faults += _find_different_layers(long.trace, middle_layers, period)
            num_periods = (count_layers(cfg) - depths[1]) // period
            simulated = _extend_simulation(short, long=long, more=num_periods, period=period)
    if simulated is None or faults:
        simulated = run(cfg)
    simulated.notes += [f"{fault}: the whole model is simulated" for fault in faults[:1]]
    return simulated


def _watch_layers(faults: list[str]) -> list[Patch]:
    """Return patches that add a fault where a user's code indexes or iterates a ModuleList.

    Code that treats some layers differently has to do so. A patch is (class, name of a method, its
    replacement).
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
    matmuls: dict[int, Counter[Hashable]] = defaultdict(Counter)  # layer -> its matmuls, counted
    for op in trace.ops:
        pattern, numbers = _split_name(op.module)
        if op.flops and numbers:
            matmuls[numbers[0]][op.phase, op.part, pattern, op.name, op.flops] += op.repeats
    for layer in layers:
        if layer + period in layers and matmuls[layer] != matmuls[layer + period]:
            yield f"layers {layer} and {layer + period} do not compute the same"


def choose_depths(recipe_class: type, cfg: FullFinetuneConfig) -> tuple[int, int] | None:
    """Return how many layers the shorter and the longer model have; None: simulate all of them."""
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
    # One period more if it has several layers: one at an end may differ from the others in part.
    iterations = _ITERATIONS + (period > 1)
    # The outputs of a compiled layer live a layer longer: one layer more (`cfg.compile` is True).
    short = lead + iterations * period + _ENDS + cfg.compile
    # Layers whose activations are on their way to or from the host at a time.
    if cfg.memory.activation_offload:
        short += 2 * cfg.memory.activation_offload_prefetch_layers + 1
    short += (num_layers - short) % period  # a whole number of periods is left out
    return (short, short + period) if _WORTHWHILE * (2 * short + period) <= num_layers else None


def _extend_simulation(
    short: Simulated, long: Simulated, more: int, period: int
) -> Simulated | None:
    """Return the run of a model with `more` periods of layers beyond the longer run's.

    Return None where the two runs do not show it. period: number of layers, here and below.
    """
    # All but the traces, the rows of modules and the number of events has to be the same: a note or
    # a growth of memory in one run alone cannot be continued.
    comparison = replace(short.comparison, events=long.comparison.events)
    if replace(short, trace=long.trace, modules=long.modules, comparison=comparison) != long:
        return None
    trace = extend_trace(short.trace, long=long.trace, more=more, period=period)
    modules = extend_rows(short.modules, long=long.modules, more=more, period=period)
    return None if trace is None or modules is None else replace(long, trace=trace, modules=modules)


@dataclass
class _Event:
    """An event of a trace, or a row of the table of modules, as `continue_items` compares them."""

    # All that has to be equal for two events to be alike.
    what: Hashable
    # Bytes, flops and the like. Where both runs have an event with this `what` and these sizes, it
    # is like events of the same sizes only. Else, as for a sum over all layers, sizes may grow with
    # the number of layers.
    sizes: tuple[int, ...] = ()
    # Numbers in the names of its module and its label, such as that of the layer.
    name_numbers: tuple[int, ...] = ()
    # Index of the earlier event that it refers to, such as the allocation of a release; -1: none.
    target: int = -1


def extend_trace(short: Trace, long: Trace, more: int, period: int = 1) -> Trace | None:
    """Return the trace of a model with `more` periods of layers beyond the longer run's.

    The longer run has one period more than the shorter. Return None where the two do not show how
    it goes on. In the result `reads` and `makes` of operators (the storages of their tensors) are
    ().
    """
    if short.phases != long.phases or long.actions:
        return None
    items = _make_items(_list_events(short), _list_events(long))
    continued = continue_items(*items, more, period)
    return _build_trace(continued, long) if continued is not None else None


def extend_rows(
    short: Sequence[LayerRow], long: Sequence[LayerRow], more: int, period: int = 1
) -> list[LayerRow] | None:
    """Return the rows of the modules of a model with `more` periods of layers, as `extend_trace`.

    A row is a module's name, with sizes of its parameters. Return None where the two runs do not
    show them.
    """
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
    """Return both runs' events as items whose keys are equal for events that are alike.

    The numbers of an item are an event's sizes and the numbers in its names.
    """
    key_numbers: dict[Hashable, int] = {}  # what is compared -> a small number for it
    in_both = {(event.what, event.sizes) for event in short} & {
        (event.what, event.sizes) for event in long
    }
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
    allocations: dict[int, int] = {}  # index of a storage -> index of its event
    records: dict[int, int] = {}  # number of an event of the device -> index of its record
    for event_index, (kind, index) in enumerate(trace.events):
        if kind == ALLOC:
            events.append(_describe_allocation(trace.storages[index]))
            allocations[index] = event_index
        elif kind == FREE:
            events.append(_Event((FREE,), target=allocations[index]))
        elif kind == OP:
            events.append(_describe_op(trace.ops[index]))
        elif kind in (RECORD, WAIT):
            sync = trace.syncs[index]
            events.append(_Event((kind, sync.stream), target=records.get(sync.event, -1)))
            if kind == RECORD:
                records[sync.event] = event_index
        elif kind == USE:
            storage_index, stream = trace.uses[index]
            events.append(_Event((USE, stream), target=allocations[storage_index]))
        else:
            events.append(_Event((kind, index)))
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
    collective_kind: Hashable = None
    sizes: tuple[int, ...] = (op.bytes, op.flops, op.repeats)
    if collective is not None:
        collective_kind = (
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
        collective_kind,
    )
    return _Event(what, sizes=sizes, name_numbers=module_numbers)


@cache
def _split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Split a dotted name into a pattern and its numbers.

    `model.layers.3.mlp` gives `("model.layers.{}.mlp", (3,))`.
    """
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


@cache
def _join_name(pattern: str, numbers: tuple[int, ...]) -> str:
    # The inverse of `_split_name`.
    return pattern.format(*numbers) if numbers else pattern


def _build_trace(continued: LoopItems, long: Trace) -> Trace | None:
    """Return the continued events as a trace.

    Return None where one of them releases memory that is not alive, or has grown beyond
    _MOST_GROWN. A key in `continued` is the index of the event in `long` that the continued one is
    like.
    """
    trace = Trace(phases=list(long.phases))
    # For each event of the result, the storage's index or the device event's number; -1: neither.
    referred_by_event: list[int] = []
    device_events = itertools.count()  # numbers of the events of the device
    alive: set[int] = set()  # indices of storages
    items = zip(continued.keys, continued.numbers, continued.targets, strict=True)
    for like, numbers, target in items:
        kind, index = long.events[like]
        # Index of the storage, or number of the device's event, that this event refers to or makes.
        referred = referred_by_event[target] if 0 <= target < len(referred_by_event) else -1
        if kind == ALLOC:
            storage = _copy_storage(long.storages[index], numbers)
            if storage.bytes > max(_MOST_GROWN, long.storages[index].bytes):
                return None
            referred = trace.add(ALLOC, storage)
            alive.add(referred)
        elif kind == FREE:
            if referred not in alive:
                return None
            alive.remove(referred)
            trace.events.append((FREE, referred))
        elif kind == OP:
            op = _copy_op(long.ops[index], numbers)
            collective = long.ops[index].collective
            most_bytes = max(_MOST_GROWN, collective.bytes if collective else 0)
            if op.collective is not None and op.collective.bytes > most_bytes:
                return None
            trace.add(OP, op)
        elif kind in (RECORD, WAIT):
            referred = referred if referred >= 0 else next(device_events)
            trace.add(kind, Sync(referred, long.syncs[index].stream))
        elif kind == USE:
            trace.add(USE, (referred, long.uses[index][1]))
        else:
            trace.events.append((kind, index))
        referred_by_event.append(referred)
    return trace


def _copy_storage(like: Storage, numbers: tuple[int, ...]) -> Storage:
    """Return an allocation like another, with new numbers.

    numbers: (bytes, numbers in the module's name, numbers in the label).
    """
    module, module_numbers = _split_name(like.module)
    label, _ = _split_name(like.label)
    num_bytes, *name_numbers = numbers
    num_module = len(module_numbers)  # how many of the numbers are in the module's name
    # Not `dataclasses.replace`: it takes several times as long, and a trace has many of them.
    return Storage(
        bytes=num_bytes,
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
    """Return an operator like another, with new numbers.

    numbers: (bytes, flops, repeats, bytes and shapes of a collective, numbers in the name of the
    module), as `_describe_op` lists them.
    """
    num_bytes, flops, repeats, *later_numbers = numbers
    pattern, module_numbers = _split_name(like.module)
    num_sizes = len(later_numbers) - len(module_numbers)
    sizes = later_numbers[:num_sizes]
    collective = like.collective
    # Copying a collective takes time, and most have the sizes of the other one.
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
        bytes=num_bytes,
        dtype=like.dtype,
        collective=collective,
        repeats=repeats,
        transfer=like.transfer,
        shape=like.shape,
        on_host=like.on_host,
    )

"""Trace functions that do the same for the same shapes once, then repeat them from notes.

A QLoRA step of a 70B model dequantizes 1700 matrices, each in dozens of pieces: three hundred
thousand operators. `trace_rank.simulate` runs a recipe on fake tensors inside `repeat_shaped_work`.
There, functions with the decorator `register_shaped_work` run once for each kind of arguments;
later calls only add the allocations and operators of that call to the trace.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from recipe_lib.ops.fused_kernels import SHAPED_WORK, Unfinished
from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.plan.simulated_world.cached_fake_mode import (
    CachedCall,
    NotCacheable,
    make_key,
    remember,
)
from recipe_lib.plan.simulated_world.simulated_ranks import Patch, apply_patches
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, RECORD, WAIT, Op, Storage
from recipe_lib.plan.tracing.tracer import Tracer, is_host_wait

_END = "end"  # begins the key of a call that ends the work which another left
_LONGEST_LOOP = 48  # events in one iteration; longer loops are not looked for

# An event of a call: (ALLOC, (order, `Storage`)), (FREE, order of the allocation) or (OP, `Op`).
# The order of an allocation is its index among the allocations of the call. It stands for a storage
# in `reads` and `makes` of an `Op`, and -1 - n for that of the n-th tensor among the arguments.
# (RECORD, None): the host waits for all that the stream has to do, as for a copy to the host.
Note = tuple[int, Any]
# What the functions return. A tuple may end with an `Unfinished`.
Returned: TypeAlias = Tensor | tuple[Any, ...] | None
_Function: TypeAlias = Callable[..., Returned]


@dataclass
class _Notes:
    """Notes of one call of a function."""

    notes: list[Note]  # in the order of the trace, with loops cut to two iterations
    call: CachedCall  # makes new tensors like the results
    outputs: list[int]  # for each result the order of its allocation
    # Orders of allocations that the call leaves to the one that ends it; None: it leaves no
    # `Unfinished`. That other call has them as its first allocations.
    left: list[int] | None


@contextmanager
def repeat_shaped_work(tracer: Tracer) -> Iterator[None]:
    """Run functions marked by `register_shaped_work` once for each kind of arguments, in the block.

    Calls are remembered until its end. tracer: of a simulation, on fake tensors.
    """
    known: dict[Any, _Notes | None] = {}  # None: such a call cannot be repeated

    # decisive: returns those of the arguments that the work depends on; None: it depends on all.
    def repeat(original: _Function, decisive: Callable[..., Sequence[Any]] | None) -> _Function:
        def run(*args: Any) -> Returned:
            if tracer.muted:  # the trace is to show nothing of this call
                return original(*args)
            ended = args[0] if isinstance(args[0], Unfinished) else None
            try:
                decisive_args = decisive(*args) if decisive else args
                key = (_END, ended.key) if ended else (original, make_key(decisive_args, []))
            except NotCacheable:
                return original(*args)
            # A call that is known not to be repeatable runs again.
            notes = known.get(key)
            is_repeated = notes is not None
            if ended is not None:
                is_repeated = ended.value is None
            elif notes is not None and notes.left is not None:
                # What it leaves can be ended from notes alone.
                is_repeated = known.get((_END, key)) is not None
            if notes is not None and is_repeated:
                arguments = _list_argument_storages(tracer, args)
                return _repeat(notes, tracer, arguments=arguments, ended=ended, key=key)
            begin = len(tracer.trace.events)
            # Before the call, which may end a piece of work and its tensors.
            arguments = _list_argument_storages(tracer, args)
            result = original(*args)
            # Of work that is left the storages are noted, too, which are others each time.
            if key not in known or (notes is not None and notes.left is not None):
                known[key] = _take_notes(
                    result, tracer, begin, arguments=arguments, ended=ended, key=key
                )
            return result

        return run

    patches: list[Patch] = []
    # SHAPED_WORK: marked function -> `decisive` above. Callers find a function as an attribute of
    # its module or class, so that is where it is replaced.
    for function, decisive in SHAPED_WORK.items():
        *path, name = function.__qualname__.split(".")
        owner = functools.reduce(getattr, path, sys.modules[function.__module__])
        patches.append((owner, name, repeat(function, decisive)))
    with apply_patches(patches):
        yield


def _list_argument_storages(tracer: Tracer, args: Sequence[Any]) -> list[int]:
    """Return the index of the storage of each tensor among the arguments; -1: it was not noted."""
    # What was left to a call is not there where only notes of it are.
    passed = [value for value in args if not isinstance(value, Unfinished)]
    return [tracer.find_storage_index(tensor) for tensor in list_tensors(passed)]


def _take_notes(
    returned: Returned,
    tracer: Tracer,
    begin: int,
    *,
    arguments: list[int],
    ended: Unfinished | None,
    key: Any,
) -> _Notes | None:
    """Return notes of a call; None if it cannot be repeated.

    returned: the results of the call. begin: number of events in the trace before it. arguments: of
    `_list_argument_storages`. ended: work that the call ended. key: of the call, for the work that
    it leaves.
    """
    trace = tracer.trace
    # Index of a storage -> its order among those of the call, behind those that it ends.
    order = {index: number for number, index in enumerate(ended.storages if ended else [])}
    names = {index: -1 - position for position, index in enumerate(arguments)} | order
    notes: list[Note] = []
    for kind, index in trace.events[begin:]:
        if kind == ALLOC:
            order[index] = names[index] = len(order)
            # A copy: what is allocated may become a gradient, and be labeled as one.
            notes.append((ALLOC, (order[index], replace(trace.storages[index]))))
        elif kind == FREE and index in order:
            notes.append((FREE, order[index]))
        elif kind == OP:
            op = trace.ops[index]
            reads = _rename(op.reads, names)
            notes.append((OP, replace(op, reads=reads, makes=_rename(op.makes, names))))
        elif kind == RECORD and is_host_wait(trace.syncs[index]):
            notes.append((RECORD, None))
        elif not (kind == WAIT and is_host_wait(trace.syncs[index])):
            # It waits for a stream, or frees memory of before the call.
            return None
    unfinished = None
    if isinstance(returned, tuple) and isinstance(returned[-1], Unfinished):
        *results, unfinished = returned
        returned = tuple(results)
    indices = [tracer.find_storage_index(result) for result in list_tensors(returned)]
    freed = {number for kind, number in notes if kind == FREE}
    left = [
        index for index, number in order.items() if number not in freed and index not in indices
    ]
    call = remember(returned, [])
    # All memory that is left has to be the results', each with its own, or be left to a later call.
    # A call that keeps other memory, such as a cache, would not keep it a second time.
    if (
        call is None
        or (left and unfinished is None)
        or len(indices) != len(set(indices))
        or any(order.get(index) in {None, *freed} for index in indices)
    ):
        return None
    outputs = [order[index] for index in indices]
    if unfinished is not None:
        unfinished.key = key
        unfinished.storages = left
        return _Notes(notes, call, outputs, [order[index] for index in left])
    if ended is not None:
        return _Notes(notes, call, outputs, None)
    short, renamed = shorten(notes)
    # A result that a later iteration made is that of the second one.
    return _Notes(short, call, [renamed.get(number, number) for number in outputs], None)


def _rename(storages: tuple[int, ...], names: dict[int, int]) -> tuple[int, ...]:
    """Return what stands for storages in `names`; those that are not in it are left out."""
    return tuple([names[storage] for storage in storages if storage in names])


def shorten(notes: list[Note]) -> tuple[list[Note], dict[int, int]]:
    """Return (the notes with every loop cut to two iterations, the allocations that were cut out).

    The operators of the second iteration count for all later ones. The second result maps the order
    of each allocation that was cut out to that of the allocation of the second iteration like it.
    """
    tokens = _make_tokens(notes)
    short: list[Note] = []
    renamed: dict[int, int] = {}
    position = 0
    while position < len(notes):
        length, iterations = _find_loop(tokens, position)
        if iterations < 3:  # nothing to cut: a single note is copied
            length = iterations = 1
        short += notes[position : position + length]
        # Two iterations are enough: after the second one an allocator has the same free blocks as
        # after all of them.
        second = notes[position + length : position + 2 * length] if iterations > 1 else []
        allocations: list[int] = []  # orders of those of the second iteration
        for kind, entry in second:
            if kind == OP:
                entry = replace(entry, repeats=entry.repeats * (iterations - 1))
            elif kind == ALLOC:
                allocations.append(entry[0])
            short.append((kind, entry))
        for later in range(1, iterations - 1):
            renamed |= {number + later * len(allocations): number for number in allocations}
        position += length * iterations
    for index, (kind, entry) in enumerate(short):
        if kind == FREE:
            short[index] = (FREE, renamed.get(entry, entry))
        elif kind == OP:
            reads = tuple([renamed.get(storage, storage) for storage in entry.reads])
            makes = tuple([renamed.get(storage, storage) for storage in entry.makes])
            short[index] = (OP, replace(entry, reads=reads, makes=makes))
    return short, renamed


def _make_tokens(notes: list[Note]) -> list[tuple[Any, ...]]:
    """Return for each note a tuple that is equal for notes that are alike."""
    tokens: list[tuple[Any, ...]] = []
    num_allocated = 0
    for kind, entry in notes:
        if kind == ALLOC:
            _, storage = entry
            num_allocated += 1
            tokens.append((kind, storage.bytes, storage.device, storage.stream, storage.op))
        elif kind == FREE:
            # How many allocations ago its memory was taken: equal in every iteration of a loop.
            tokens.append((kind, num_allocated - entry))
        elif kind == RECORD:  # in no loop: each iteration waits
            tokens.append((kind, len(tokens)))
        else:
            tokens.append((kind, entry.name, entry.flops, entry.bytes, entry.stream))
    return tokens


def _find_loop(tokens: list[tuple[Any, ...]], start: int) -> tuple[int, int]:
    """Return (events of an iteration, iterations) of the longest loop that begins at `start`.

    Without a loop it is (1, 1). Iterations that leave memory behind are no loop. tokens: of
    `_make_tokens`.
    """
    best = (1, 1)
    for length in range(2, min(_LONGEST_LOOP, (len(tokens) - start) // 3) + 1):
        body = tokens[start : start + length]
        if body != tokens[start + length : start + 2 * length]:
            continue
        if sum(token[0] == ALLOC for token in body) != sum(token[0] == FREE for token in body):
            continue
        iterations = 2
        while tokens[start + iterations * length : start + (iterations + 1) * length] == body:
            iterations += 1
        if length * iterations > best[0] * best[1]:
            best = (length, iterations)
    return best


def _repeat(
    notes: _Notes, tracer: Tracer, *, arguments: list[int], ended: Unfinished | None, key: Any
) -> Returned:
    """Add a call's notes to the trace once more, and return new results.

    The events get the part of the step, module, phase and stream that run now. arguments, ended,
    key: as in `_take_notes`.
    """
    assert tracer.cached_mode is not None
    trace = tracer.trace
    part, module = tracer.locate()
    phase = tracer.phase
    stream = tracer.get_stream()
    # Order of an allocation, or what stands for an argument -> index of its storage in the trace.
    indices = {-1 - position: index for position, index in enumerate(arguments) if index >= 0}
    indices |= enumerate(ended.storages if ended else [])
    traces_tensors = part in ("forward", "recompute")
    for kind, entry in notes.notes:
        if kind == ALLOC:
            order, like = entry
            # Not `dataclasses.replace`, which takes several times as long; neither below.
            storage = Storage(
                bytes=like.bytes,
                device=like.device,
                stream=stream,
                kind=like.kind,
                module=module,
                op=like.op,
                part=part,
                phase=max(phase, 0),
                pinned=like.pinned,
            )
            indices[order] = trace.add(ALLOC, storage)
        elif kind == FREE:
            trace.events.append((FREE, indices[entry]))
        elif kind == RECORD:
            tracer.note_host_wait(stream)
        else:
            op = Op(
                name=entry.name,
                stream=stream,
                part=part,
                module=module,
                phase=phase,
                flops=entry.flops,
                bytes=entry.bytes,
                dtype=entry.dtype,
                collective=entry.collective,
                repeats=entry.repeats,
                transfer=entry.transfer,
                shape=entry.shape,
                on_host=entry.on_host,
            )
            if traces_tensors:
                op.reads = _rename(entry.reads, indices)
                op.makes = _rename(entry.makes, indices)
            trace.add(OP, op)
    result: Returned = notes.call.make([], tracer.cached_mode.mode)
    for tensor, output in zip(list_tensors(result), notes.outputs, strict=True):
        tracer.follow_storage(tensor.untyped_storage(), indices[output])
    if notes.left is None:
        return result
    assert isinstance(result, tuple)
    return *result, Unfinished(key=key, storages=[indices[number] for number in notes.left])

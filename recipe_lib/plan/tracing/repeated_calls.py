"""Functions that do the same for the same shapes: traced once, then repeated from notes.

A QLoRA step of a 70B model dequantizes 1700 matrices, each in dozens of pieces: three hundred
thousand operators. Inside `repeat_shaped_work` the functions that `follows_from_shapes` marks run
once for each kind of arguments; later calls add the noted allocations and operators to the trace.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest import mock

from torch import Tensor

from recipe_lib.ops.fused_kernels import SHAPED_WORK
from recipe_lib.plan.simulated_world.cached_fake_mode import (
    CachedCall,
    NotCacheable,
    make_key,
    remember,
)
from recipe_lib.plan.tracing.operator_costs import list_tensors
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP
from recipe_lib.plan.tracing.tracer import Tracer

_LONGEST_LOOP = 48  # events in one iteration

# Notes: (ALLOC, (its number, storage)), (FREE, the allocation's number), (OP, operator).
Note = tuple[int, Any]
Returned: TypeAlias = Tensor | tuple[Tensor, ...] | None
_Function: TypeAlias = Callable[..., Returned]


@dataclass
class _Notes:
    """Notes of one call of a marked function."""

    notes: list[Note]  # in the order of the trace
    call: CachedCall  # how to make the results
    outputs: list[int]  # numbers of the allocations that are the results', in their order


@contextmanager
def repeat_shaped_work(tracer: Tracer) -> Iterator[None]:
    """Run functions that `follows_from_shapes` marks once for each kind of arguments.

    Holds inside the block, for the arguments of one simulation.
    """
    known: dict[Any, _Notes | None] = {}

    def repeat(original: _Function, decisive: Callable[..., Sequence[Any]] | None) -> _Function:
        def run(*args: Any) -> Returned:
            if tracer.muted:
                return original(*args)
            try:
                key = (original, make_key(decisive(*args) if decisive else args, []))
            except NotCacheable:
                return original(*args)
            notes = known.get(key)
            if notes is not None:
                return _repeat(notes, tracer)
            begin = len(tracer.trace.events)
            result = original(*args)
            if key not in known:
                known[key] = _take_notes(result, tracer, begin)
            return result

        return run

    with ExitStack() as stack:
        for function, decisive in SHAPED_WORK.items():
            *path, name = function.__qualname__.split(".")
            owner = functools.reduce(getattr, path, sys.modules[function.__module__])
            stack.enter_context(mock.patch.object(owner, name, repeat(function, decisive)))
        yield


def _take_notes(returned: Returned, tracer: Tracer, begin: int) -> _Notes | None:
    """Return notes of what happened since event `begin`; None if it cannot be repeated."""
    trace = tracer.trace
    order: dict[int, int] = {}  # number of a storage -> its place among those of the call
    notes: list[Note] = []
    for kind, number in trace.events[begin:]:
        if kind == ALLOC:
            order[number] = len(order)
            notes.append((ALLOC, (order[number], trace.storages[number])))
        elif kind == FREE and number in order:
            notes.append((FREE, order[number]))
        elif kind == OP:
            notes.append((OP, trace.ops[number]))
        else:
            return None
    numbers = [tracer.find_storage_index(result) for result in list_tensors(returned)]
    num_left = len(order) - sum(kind == FREE for kind, _ in notes)
    call = remember(returned, [])
    # All that is left has to be the results', each with memory of its own: what else the call keeps
    # (a cache, say) would not be kept again by a repeated one.
    if (
        call is None
        or num_left != len(set(numbers))
        or num_left != len(numbers)
        or any(number not in order for number in numbers)
    ):
        return None
    short, renamed = shorten(notes)
    return _Notes(short, call, [renamed.get(order[number], order[number]) for number in numbers])


def shorten(notes: list[Note]) -> tuple[list[Note], dict[int, int]]:
    """Return the notes with every loop cut to two iterations, and what became of the others.

    The operators of the second iteration count for all later ones. The second result maps each
    allocation that was cut out to the one of the second iteration that it is like.
    """
    tokens = _make_tokens(notes)
    short: list[Note] = []
    renamed: dict[int, int] = {}
    position = 0
    while position < len(notes):
        length, iterations = _find_loop(tokens, position)
        if iterations < 3:
            length = iterations = 1
        short += notes[position : position + length]
        # Two are enough: after the second iteration an allocator has the same free blocks as after
        # all of them.
        second = notes[position + length : position + 2 * length] if iterations > 1 else []
        allocations: list[int] = []
        for kind, entry in second:
            if kind == OP:
                entry = replace(entry, repeats=entry.repeats * (iterations - 1))
            elif kind == ALLOC:
                allocations.append(entry[0])
            short.append((kind, entry))
        for later in range(1, iterations - 1):
            renamed |= {number + later * len(allocations): number for number in allocations}
        position += length * iterations
    short = [(kind, renamed.get(entry, entry) if kind == FREE else entry) for kind, entry in short]
    return short, renamed


def _make_tokens(notes: list[Note]) -> list[tuple[Any, ...]]:
    """Return for each note what is the same for notes that are alike."""
    tokens: list[tuple[Any, ...]] = []
    num_allocated = 0
    for kind, entry in notes:
        if kind == ALLOC:
            _, storage = entry
            num_allocated += 1
            tokens.append((kind, storage.bytes, storage.device, storage.stream, storage.op))
        elif kind == FREE:
            # How many allocations ago its memory came: the same in every iteration of a loop.
            tokens.append((kind, num_allocated - entry))
        else:
            tokens.append((kind, entry.name, entry.flops, entry.bytes, entry.stream))
    return tokens


def _find_loop(tokens: list[tuple[Any, ...]], start: int) -> tuple[int, int]:
    """Return (events of an iteration, iterations) of the longest loop that begins at `start`.

    An iteration that leaves memory behind makes no loop.
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


def _repeat(notes: _Notes, tracer: Tracer) -> Returned:
    """Add a call's notes to the trace once more, and return new results."""
    assert tracer.cached_mode is not None
    part, module = tracer.locate()
    numbers: dict[int, int] = {}  # in the notes -> of the storage in the trace
    for kind, entry in notes.notes:
        if kind == ALLOC:
            index, storage = entry
            numbers[index] = tracer.note_allocation(
                storage.bytes, device=storage.device, name=storage.op, kind=storage.kind
            )
        elif kind == FREE:
            tracer.trace.events.append((FREE, numbers[entry]))
        else:
            stream = tracer.get_stream()
            tracer.trace.add(
                OP, replace(entry, part=part, module=module, phase=tracer.phase, stream=stream)
            )
    result: Returned = notes.call.make([], tracer.cached_mode.mode)
    for tensor, output in zip(list_tensors(result), notes.outputs, strict=True):
        tracer.follow_storage(tensor.untyped_storage(), numbers[output])
    return result

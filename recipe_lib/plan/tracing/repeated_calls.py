"""A function that does the same for the same shapes, such as dequantizing a weight: run once, then
repeated from notes.

A QLoRA step of a 70B model dequantizes 1700 matrices, each in dozens of pieces: three hundred
thousand operators. The notes hold the first run's allocations and operators; a loop in them is kept
as two turns, since after the second one an allocator has the same free blocks as after all of them,
and the operators say how often they were issued.
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

_LONGEST_LOOP = 48  # events in one turn

# Notes: (ALLOC, (its number, storage)), (FREE, the allocation's number), (OP, operator).
Note = tuple[int, Any]
Returned: TypeAlias = Tensor | tuple[Tensor, ...] | None
_Function: TypeAlias = Callable[..., Returned]


@dataclass
class _Notes:
    """notes: in order. call: how to make the results. outputs: the numbers of the allocations that
    are theirs.
    """

    notes: list[Note]
    call: CachedCall
    outputs: list[int]


@contextmanager
def repeat_shaped_work(tracer: Tracer) -> Iterator[None]:
    """Inside, functions that `follows_from_shapes` marks run once for each kind of arguments of a
    simulation.
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
    """Notes of what happened since event `begin`; None if memory is left that is not the
    results'.
    """
    trace = tracer.trace
    order: dict[int, int] = {}
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
    numbers = [tracer.find_number(result) for result in list_tensors(returned)]
    left = len(order) - sum(kind == FREE for kind, _ in notes)
    call = remember(returned, [])
    if (
        left != len(set(numbers))
        or len(numbers) != left
        or any(number not in order for number in numbers)
    ):
        return None
    short, renamed = shorten(notes)
    outputs = [renamed.get(order[number], order[number]) for number in numbers]
    return None if call is None else _Notes(short, call, outputs)


def shorten(notes: list[Note]) -> tuple[list[Note], dict[int, int]]:
    """The notes with every loop cut to two turns, whose second one's operators stand for all the
    later ones.

    Also by the number of each allocation that was cut out the number of the one in the second turn
    that it is like.
    """
    tokens = _make_tokens(notes)
    kept: list[Note] = []
    renamed: dict[int, int] = {}
    at = 0
    while at < len(notes):
        length, turns = _find_loop(tokens, at)
        if turns < 3:
            length = turns = 1
        second = notes[at + length : at + 2 * length] if turns > 1 else []
        kept += notes[at : at + length]
        for kind, entry in second:
            kept.append(
                (kind, replace(entry, repeats=entry.repeats * (turns - 1)) if kind == OP else entry)
            )
        made = [entry[0] for kind, entry in second if kind == ALLOC]
        for turn in range(2, turns):
            renamed |= {number + (turn - 1) * len(made): number for number in made}
        at += length * turns
    return [
        (kind, renamed.get(entry, entry) if kind == FREE else entry) for kind, entry in kept
    ], renamed


def _make_tokens(notes: list[Note]) -> list[tuple[Any, ...]]:
    """What has to be the same for two notes to be alike; a release tells how many allocations ago
    its memory came.
    """
    tokens: list[tuple[Any, ...]] = []
    allocated = 0
    for kind, entry in notes:
        if kind == ALLOC:
            _, storage = entry
            allocated += 1
            tokens.append((kind, storage.bytes, storage.device, storage.stream, storage.op))
        elif kind == FREE:
            tokens.append((kind, allocated - entry))
        else:
            tokens.append((kind, entry.name, entry.flops, entry.bytes, entry.stream))
    return tokens


def _find_loop(tokens: list[tuple[Any, ...]], at: int) -> tuple[int, int]:
    """(events of a turn, turns) of the longest loop that begins here and leaves no memory behind a
    turn.
    """
    best = (1, 1)
    for length in range(2, min(_LONGEST_LOOP, (len(tokens) - at) // 3) + 1):
        turn = tokens[at : at + length]
        if turn != tokens[at + length : at + 2 * length]:
            continue
        if sum(token[0] == ALLOC for token in turn) != sum(token[0] == FREE for token in turn):
            continue
        turns = 2
        while tokens[at + turns * length : at + (turns + 1) * length] == turn:
            turns += 1
        if length * turns > best[0] * best[1]:
            best = (length, turns)
    return best


def _repeat(notes: _Notes, tracer: Tracer) -> Returned:
    """Does it again, on paper."""
    assert tracer.cached_mode is not None
    part, module = tracer.place()
    trace = tracer.trace
    numbers: dict[int, int] = {}
    for kind, entry in notes.notes:
        if kind == ALLOC:
            index, storage = entry
            numbers[index] = tracer.new(storage.bytes, storage.device, storage.op, storage.kind)
        elif kind == FREE:
            trace.events.append((FREE, numbers[entry]))
        else:
            tracer.add(
                replace(entry, part=part, module=module, phase=tracer.phase, stream=tracer.stream())
            )
    result: Returned = notes.call.make([], tracer.cached_mode.mode)
    for tensor, output in zip(list_tensors(result), notes.outputs, strict=True):
        tracer.hold(tensor.untyped_storage(), numbers[output])
    return result

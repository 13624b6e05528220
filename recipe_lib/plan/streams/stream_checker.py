"""A race detector for the streams of a simulated device: what two streams, or a stream and the
host, do to the same memory without a wait between them.

Happens-before by vector clocks, as torch's own sanitizer for CUDA has it (`torch.cuda._sanitizer`),
and beyond it: memory that the caching allocator hands out again while another stream still uses it,
buffers on the host, collectives with streams of their own, and where the host waits. Each operator
of a simulated step is judged as it is issued.

An allocation belongs to the stream that was current when it was made. When it is freed its memory
can be in the next one of that stream at once, so whoever has that is checked against all that still
uses it. Pinned memory of the host is given out again when the copies that torch issued on it are
done. A collective that runs on the current stream is like any operator; an asynchronous one runs on
its communicator's, holds its tensors until somebody waits for it, and is waited for through its
work or `wait_tensor` (torch 2.8 and later).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recipe_lib.plan.streams.code_line import Line, find_code_line, format_line
from recipe_lib.plan.streams.collective_order import CollectiveCall
from recipe_lib.plan.timing.stream_schedule import is_transfer
from recipe_lib.plan.tracing.operator_costs import is_blocking, list_tensors
from recipe_lib.plan.tracing.trace import HOST, Op, Storage

# What happens before what, on the streams of a device and on the host: vector clocks (Mattern,
# 1989). No torch.
#
# The host issues works on streams, one after the other; a stream does its own in order. An event
# holds what its stream will have done when it comes; who waits for it knows the same. Whatever the
# host has done or waited for comes before all that it issues later.


Clock = dict[int, int]  # by stream the number of the last of its works that is known to be done


class VectorClocks:
    """Streams are numbers; `HOST` is the host. Works are numbered as they are issued, from 1 on.
    last: of each stream its last work.
    """

    def __init__(self) -> None:
        self._issued = 0
        self.last: Clock = {}
        self._known: dict[int, Clock] = defaultdict(dict)

    def issue(self, stream: int) -> int:
        """The number of a work that the host issues on a stream, or does itself."""
        self._issued += 1
        self.last[stream] = self._issued
        return self._issued

    def is_before(self, stream: int, work: int, other: int) -> bool:
        """Whether a work of `stream` is done before what `other` does next."""
        return stream == HOST or self.done(stream, other) >= work

    def done(self, stream: int, other: int) -> int:
        """The number of the last work of `stream` that is done before what `other` does next; 0:
        none is.
        """
        if stream == other:
            return self.last.get(stream, 0)
        return max(self._known[HOST].get(stream, 0), self._known[other].get(stream, 0))

    def snapshot(self, stream: int) -> Clock:
        """What is done when all that a stream has so far is."""
        return {other: self.done(other, stream) for other in self.last if other != HOST}

    def wait(self, stream: int, clock: Clock) -> None:
        """What a stream (or the host) does next comes after what a snapshot holds."""
        known = self._known[stream]
        for other, work in clock.items():
            known[other] = max(work, known.get(other, 0))


_COMMUNICATORS = 10_000  # numbers of their streams begin here
_NUMBER = torch.ops.aten._local_scalar_dense.default
_INDEX_PUTS = ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


@dataclass(frozen=True)
class Access:
    """A use of memory. work: number on its stream. does: `reads`, `writes`, or `has`: it had the
    memory before.
    """

    stream: int
    work: int
    does: str
    op: Op
    place: Line


@dataclass(slots=True)
class _Memory:
    """Of a storage: the last write, the last read of each stream since, and what its bytes may be
    used by still, from owners before it.
    """

    storage: Storage
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)
    before: list[Access] = field(default_factory=list)
    sent: int = 0  # asynchronous collectives that hold it
    recorded: set[int] = field(default_factory=set)
    freed: bool = False


@dataclass
class _Work:
    """An asynchronous collective: what is done when it is, and the storages it holds; its operator,
    and its line. on_host: of tensors there, for which the host waits.
    """

    clock: Clock
    held: list[int]
    operator: str
    place: Line
    on_host: bool


class StreamChecker:
    """A Tracer reports to it, in the order of issue. races: found, in words, one of each kind.
    waits: of the host, in the last `train_step`. unrecorded: lines that wait for an event that
    nothing has recorded, which CUDA lets pass.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.races: dict[Any, str] = {}  # by what is the same for all races of the same two lines
        self.waits: list[tuple[str, Line]] = []  # `.item()`, `a blocking copy to the host`, ...
        self.unrecorded: dict[Line, None] = {}
        self.counts = False  # waits
        self.calls: list[CollectiveCall] = []
        self._issued: dict[
            int, list[tuple[int, int]]
        ] = {}  # by stream, of each call its work and its place in `calls`
        self._clocks = VectorClocks()
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[
            int, dict[int, Access]
        ] = {}  # by pool and stream, what may still use memory free in it
        self._events: dict[int, Clock] = {}  # what their streams will have done when they come
        self._names = {HOST: "on the host"}
        self._communicators: dict[tuple[Any, ...], int] = {}
        self._results: dict[
            int, _Work
        ] = {}  # of functional collectives, by the storage that each made
        self._works: dict[int, _Work] = {}  # by the id of what `wait` is called on
        self._last_work: _Work | None = None
        self._on_device = 0  # operators issued to it
        self._last_wait: tuple[Line, int] = (("", 0), -1)

    def begin_step(self) -> None:
        """From here on waits are counted anew."""
        self.waits = []
        self.counts = True

    def end_step(self) -> None:
        """Read what a step leaves as for a saved state: on the host by the host, on the device by
        the stream that computes, whose copies the host waits for.
        """
        self.counts = False
        for number, memory in list(self._memory.items()):
            if memory.storage.kind in ("parameters", "optimizer") and not memory.freed:
                stream = 0 if memory.storage.device else HOST
                self._use(
                    number,
                    Access(
                        stream,
                        self._clocks.issue(stream),
                        "reads",
                        Op("saving a state"),
                        find_code_line(),
                    ),
                )

    def faults(self) -> list[str]:
        """All that was found but waits of the host, in words."""
        works = dict.fromkeys(
            (work.operator, work.place) for work in (*self._works.values(), *self._results.values())
        )
        never = [f"{name} at {format_line(line)} is never waited for" for name, line in works]
        passed = [
            f"{format_line(line)} waits for an event that nothing has recorded, which CUDA lets pass"
            for line in self.unrecorded
        ]
        return [*self.races.values(), *never, *passed]

    # Memory

    def allocated(self, number: int, storage: Storage) -> None:
        """A storage was made, or has another size."""
        memory = self._memory[number] = _Memory(storage)
        if storage.device:
            pool = storage.stream
            last = self._clocks.last.get(pool, 0)
            memory.before.append(
                Access(
                    pool,
                    last,
                    "has",
                    Op("what was issued before", part=storage.part),
                    find_code_line(),
                )
            )
            waiting = self._freed.get(pool, {}).values()
            still = [
                one for one in waiting if not self._clocks.is_before(one.stream, one.work, pool)
            ]
            self._freed[pool] = {one.stream: one for one in still}
            memory.before += still

    def freed(self, number: int) -> None:
        """A storage is gone."""
        memory = self._memory.get(number)
        if memory is not None:
            memory.freed = True
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        """Whoever is given freed memory next comes after its uses, once no collective holds it."""
        memory = self._memory[number]
        if not memory.freed or memory.sent:
            return
        del self._memory[number]
        if not memory.storage.device:
            return
        waiting = self._freed.setdefault(memory.storage.stream, {})
        for use in filter(None, [memory.written, *memory.read.values(), *memory.before]):
            if use.stream in memory.recorded or use.stream == HOST or use.does == "has":
                continue
            if use.stream not in waiting or waiting[use.stream].work < use.work:
                waiting[use.stream] = use  # a stream's last work ends after its others

    def note_record_stream(self, number: int, stream: int) -> None:
        """`record_stream`: the allocator keeps the memory until a stream is done with it."""
        if number in self._memory:
            self._memory[number].recorded.add(stream)

    # Streams and the host

    def recorded(self, stream: int, event: int) -> None:
        """An event was recorded on a stream."""
        self._events[event] = self._clocks.snapshot(stream)

    def waited(self, stream: int, event: int) -> None:
        """A stream waits for an event; one below 0 was never recorded."""
        self._clocks.wait(stream, self._find_clock(event))

    def _find_clock(self, event: int) -> Clock:
        if event not in self._events:
            self.unrecorded[find_code_line()] = None
        return self._events.get(event, {})

    def note_synchronize(self, what: str, stream: int | None, event: int | None) -> None:
        """The host waits for an event, for a stream, or for all of them."""
        if event is not None:
            clock = self._find_clock(event)
        elif stream is not None:
            clock = self._clocks.snapshot(stream)
        else:
            clock = dict(self._clocks.last)
        # What is behind all that it has waited for already does not hold it.
        holds = any(self._clocks.done(other, HOST) < work for other, work in clock.items())
        if holds or (stream, event) == (None, None):
            self._wait(what, clock)

    def _wait(self, what: str, clock: Clock) -> None:
        """One that follows another of the same line, with nothing issued to the device in between,
        is a part of it.
        """
        self._clocks.wait(HOST, clock)
        line, issued = find_code_line(), self._on_device
        if self.counts and (line, issued) != self._last_wait:
            self.waits.append((what, line))
        self._last_wait = line, issued

    # Operators

    def operator(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        op: Op,
        numbers: Callable[[Any], tuple[int, ...]],
    ) -> None:
        """An operator was issued. numbers: gives those of the storages of a value's tensors that
        are known.
        """
        if op.name.endswith("wait_tensor"):
            self._finish(self._results.pop(next(iter(numbers(args)), -1), None), op.stream)
            return
        read, written = (
            dict.fromkeys(numbers(found)) for found in find_accesses(func, args, kwargs, result)
        )
        on_device = any(
            one.device.type == self.device
            for one in list_tensors((args, tuple(kwargs.values()), result))
        )
        stream = op.stream if on_device else HOST
        self._on_device += on_device
        # It runs on its communicator's stream, as do all exchanges of two ranks, even those waited
        # for at once.
        is_sent = op.collective is not None and (not op.collective.waits or is_transfer(op))
        if is_sent:
            stream = self._find_communicator(op, stream)
        work, line = self._clocks.issue(stream), find_code_line()
        if op.collective is not None and on_device:
            self._note_call(op, stream, work, line)
        for does, found in (("reads", read), ("writes", written)):
            access = Access(stream, work, does, op, line)
            for number in found:
                memory = self._memory.get(number)
                # The host gives a kernel the number of a tensor of its own.
                at_issue = memory and on_device and not op.transfer and not memory.storage.device
                self._use(number, replace(access, stream=HOST) if at_issue else access)
        if is_sent:
            held = [number for number in {**read, **written} if number in self._memory]
            for number in held:
                self._memory[number].sent += 1
            self._last_work = _Work(
                self._clocks.snapshot(stream), held, op.name, line, not on_device
            )
            if op.name.startswith("_c10d_functional"):
                self._results |= dict.fromkeys(numbers(result), self._last_work)
                self._last_work = None
        if func is _NUMBER and on_device:
            self._wait(".item()", self._clocks.snapshot(stream))
        elif op.name in _INDEX_PUTS and self._has_mask(args[1]):
            self._wait("indexing by a mask", self._clocks.snapshot(stream))
        elif op.transfer and (why := self._why_copy_waits(args, kwargs, op, [*read, *written])):
            self._wait(why, self._clocks.snapshot(stream))

    def _has_mask(self, indices: Sequence[Tensor | None]) -> bool:
        """Return whether one of them is a mask on the device, whose elements CUDA counts
        (`nonzero`) for the host.
        """
        masks = [
            index for index in list_tensors(indices) if index.dtype in (torch.bool, torch.uint8)
        ]
        return any(mask.device.type == self.device for mask in masks)

    def _why_copy_waits(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], op: Op, numbers: Sequence[int]
    ) -> str:
        """Why the host waits in a copy between it and the device, in words; "": it does not.

        A copy to memory that is not pinned is done when it returns; one from there waits for its
        stream first (CUDA's documentation, "API synchronization behavior").
        """
        known = [self._memory[number].storage for number in numbers if number in self._memory]
        host = [storage for storage in known if not storage.device]
        way, how = (
            ("to the host", "into") if op.transfer == "to_host" else ("to the device", "from")
        )
        if not host or not all(storage.pinned for storage in host):
            return f"a copy {way} {how} memory that is not pinned"
        return f"a blocking copy {way}" if is_blocking(op.name, args, kwargs) else ""

    def _use(self, number: int, access: Access) -> None:
        memory = self._memory.get(number)
        if memory is None:
            return
        for earlier in memory.before:
            self._compare(memory, earlier, access, reused=True)
        memory.before.clear()
        if memory.written is not None:
            self._compare(memory, memory.written, access)
        if access.does == "reads":
            memory.read[access.stream] = access
            return
        for earlier in memory.read.values():
            self._compare(memory, earlier, access)
        memory.written = access
        memory.read.clear()

    def _compare(
        self, memory: _Memory, earlier: Access, access: Access, *, reused: bool = False
    ) -> None:
        """Two uses of the same memory with no wait between them are a race."""
        if self._clocks.is_before(earlier.stream, earlier.work, access.stream):
            return
        first = self._describe(earlier)
        second = self._describe(access)
        key: tuple[Any, ...] = (
            earlier.op.name,
            earlier.place,
            access.op.name,
            access.place,
            reused,
        )
        words = (
            f"{memory.storage.label or memory.storage.kind}"
            f" ({'device' if memory.storage.device else 'host'}): "
        )
        words += f"{second} {access.does} what {first} {earlier.does}, with no wait between them"
        if reused:
            words = (
                f"memory that {first} still {earlier.does} is given out again: {second}"
                f" {access.does} it"
            )
            if earlier.does != "has":  # whoever is given the memory next
                key = (earlier.op.name, earlier.place, earlier.does)
        self.races.setdefault(key, words)

    def _describe(self, access: Access) -> str:
        """`aten::copy_ on stream 2 (backward, model.layers.0, memory/x.py:12)`."""
        part = "" if access.op.part == "other" else access.op.part
        where = ", ".join(filter(None, [part, access.op.module, format_line(access.place)]))
        return (
            f"{access.op.name} {self._names.get(access.stream, f'on stream {access.stream}')}"
            f" ({where})"
        )

    # Asynchronous collectives

    def _find_communicator(self, op: Op, after: int) -> int:
        """The stream of a collective's communicator; what is issued on it comes after another
        one.
        """
        collective: Any = op.collective
        # Two ranks exchange on a communicator of their own.
        key = (collective.dim, collective.ranks, is_transfer(op), after == HOST)
        stream = self._communicators.setdefault(key, _COMMUNICATORS + len(self._communicators))
        self._names[stream] = (
            f"on the communicator of ranks {', '.join(map(str, collective.ranks))}"
        )
        self._clocks.wait(stream, self._clocks.snapshot(after))
        return stream

    def _note_call(self, op: Op, stream: int, work: int, line: Line) -> None:
        collective: Any = op.collective
        pair = is_transfer(op)
        call = CollectiveCall(
            collective.operation,
            ("" if pair else collective.dim, collective.ranks, pair),
            collective.bytes,
            collective.dtype,
            format_line(line),
            self._done_calls(stream),
            self._done_calls(HOST),
        )
        self._issued.setdefault(stream, []).append((work, len(self.calls)))
        self.calls.append(call)

    def _done_calls(self, stream: int) -> tuple[int, ...]:
        """Of each stream the last call that is done before what `stream` does next."""
        done = []
        for other, calls in self._issued.items():
            count = bisect_right(calls, self._clocks.done(other, stream), key=lambda call: call[0])
            if count:
                done.append(calls[count - 1][1])
        return tuple(done)

    def note_start(self, work: Any) -> None:
        """A call has returned the work of the last asynchronous collective."""
        if self._last_work is not None:
            self._works[id(work)], self._last_work = self._last_work, None

    def note_work_wait(self, work: Any, stream: int) -> None:
        """A stream waits for a collective."""
        self._finish(self._works.pop(id(work), None), stream)

    def _finish(self, work: _Work | None, stream: int) -> None:
        if work is None:
            return
        self._clocks.wait(HOST if work.on_host else stream, work.clock)
        for number in work.held:
            if number in self._memory:
                self._memory[number].sent -= 1
                self._give_back(number)
        work.held.clear()


# Which tensors an operator reads and which it writes, from its schema; of collectives from a table.


# Operators whose schema does not say what they write: the place of that argument.
_WRITES = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::allgather_coalesced_": 0,
    "c10d::_reduce_scatter_base_": 0,
    "c10d::reduce_scatter_": 0,
    "c10d::reduce_scatter_tensor_coalesced_": 0,
    "c10d::allreduce_": 0,
    "c10d::allreduce_coalesced_": 0,
    "c10d::broadcast_": 0,
    "c10d::reduce_": 0,
    "c10d::alltoall_base_": 0,
    "c10d::alltoall_": 0,
    "c10d::gather_": 0,
    "c10d::scatter_": 0,
    "c10d::recv_": 0,
    "c10d::recv_any_source_": 0,
    "fsdp::all_gather_copy_in": 1,
}
# What these write they do not read.
_ONLY_WRITES = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
)


def find_accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors read, tensors written); what is changed in place is among both."""
    given = {
        **dict(zip((one.name for one in func._schema.arguments), args, strict=False)),
        **kwargs,
    }
    names = _find_written(func)
    written = list_tensors([value for name, value in given.items() if name in names])
    kept = names if func._schema.name in _ONLY_WRITES else frozenset()
    return list_tensors([value for name, value in given.items() if name not in kept]), [
        *written,
        *list_tensors(result),
    ]


@cache
def _find_written(func: Any) -> frozenset[str]:
    """Names of the arguments that an operator writes."""
    arguments = func._schema.arguments
    if func._schema.name in _WRITES:
        return frozenset({arguments[_WRITES[func._schema.name]].name})
    return frozenset(
        one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write
    )

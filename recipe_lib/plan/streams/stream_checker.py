"""A race detector for the streams of a simulated device: what two streams, or a stream and the host, do to the same
memory without a wait between them.

Happens-before by vector clocks, as torch's own sanitizer for CUDA has it (`torch.cuda._sanitizer`), and beyond it:
memory that the caching allocator hands out again while another stream still uses it, buffers on the host, collectives
with streams of their own, and where the host waits. Each operator of a simulated step is judged as it is issued.

An allocation belongs to the stream that was current when it was made. When it is freed its memory can be in the next
one of that stream at once, so whoever has that is checked against all that still uses it. Pinned memory of the host is
given out again when the copies that torch issued on it are done. A collective that runs on the current stream is like
any operator; an asynchronous one runs on its communicator's, holds its tensors until somebody waits for it, and is
waited for through its work or `wait_tensor` (torch 2.8 and later).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recipe_lib.plan.streams.code_line import Line, code_line, text_of
from recipe_lib.plan.streams.collective_order import CollectiveCall
from recipe_lib.plan.trace import Collective, Op, Storage
from recipe_lib.plan.tracing.operator_costs import has_memory, is_blocking, tensors_in

# What happens before what, on the streams of a device and on the host: vector clocks (Mattern,
# 1989). No torch.
#
# The host issues works on streams, one after the other; a stream does its own in order. An event
# holds what its stream will have done when it comes; who waits for it knows the same. Whatever the
# host has done or waited for comes before all that it issues later.


HOST = -1

Clock = dict[int, int]  # by stream the number of the last of its works that is known to be done


class VectorClocks:
    """Streams are numbers; `HOST` is the host. Works are numbered as they are issued, from 1 on. last: of each stream
    its last work."""

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
        """The number of the last work of `stream` that is done before what `other` does next; 0: none is."""
        if stream == other:
            return self.last.get(stream, 0)
        return max(self._known[HOST].get(stream, 0), self._known[other].get(stream, 0))

    def snapshot(self, stream: int) -> Clock:
        """What is done when all that a stream has so far is."""
        clock = dict(self._known[stream])
        _merge(clock, self._known[HOST])
        if stream != HOST:
            clock[stream] = self.last.get(stream, 0)
        return clock

    def wait(self, stream: int, clock: Clock) -> None:
        """What a stream (or the host) does next comes after what a snapshot holds."""
        _merge(self._known[stream], clock)

    def host_knows(self, clock: Clock) -> bool:
        """Whether the host would not have to wait for it, as it has waited for later works."""
        return all(self._known[HOST].get(stream, 0) >= work for stream, work in clock.items())


def _merge(into: Clock, other: Clock) -> None:
    for stream, work in other.items():
        into[stream] = max(work, into.get(stream, 0))


_COMMUNICATORS = 10_000  # numbers of their streams begin here


@dataclass(frozen=True)
class Access:
    """A use of memory. work: number on its stream. does: `reads`, `writes`, or `has`: it had the memory before."""

    stream: int
    work: int
    does: str
    operator: str
    module: str
    part: str
    place: Line

    def text(self, streams: Mapping[int, str]) -> str:
        """`aten::copy_ on stream 2 (backward, model.layers.0, memory/x.py:12)`."""
        part = "" if self.part == "other" else self.part
        where = ", ".join(filter(None, [part, self.module, text_of(self.place)]))
        return f"{self.operator} {streams.get(self.stream, f'on stream {self.stream}')} ({where})"


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory with no wait between them. storage: what is in it."""

    storage: str
    first: Access
    second: Access
    reused: bool = False
    names: Mapping[int, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        first, second = self.first.text(self.names), self.second.text(self.names)
        if self.reused:
            return f"memory that {first} still {self.first.does} is given out again: {second} {self.second.does} it"
        return f"{self.storage}: {second} {self.second.does} what {first} {self.first.does}, with no wait between them"

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for all races of the same two lines."""
        one, other = self.first, self.second
        if self.reused and one.does != "has":  # whoever is given the memory next
            return one.operator, one.place, one.does
        return one.operator, one.place, other.operator, other.place, self.reused


@dataclass(slots=True)
class _Memory:
    """Of a storage: the last write, the last read of each stream since, and what its bytes may be used by still, from
    owners before it."""

    storage: Storage
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)
    before: list[Access] = field(default_factory=list)
    sent: int = 0  # asynchronous collectives that hold it
    recorded: set[int] = field(default_factory=set)
    freed: bool = False


@dataclass
class _Work:
    """An asynchronous collective: what is done when it is, and the storages it holds; its operator, and its line.
    on_host: of tensors there, for which the host waits."""

    clock: Clock
    held: list[int]
    operator: str
    place: Line
    on_host: bool


class StreamChecker:
    """A Tracer reports to it, in the order of issue. races: found, one of each kind. waits: of the host, inside
    `train_step`. unrecorded: lines that wait for an event that nothing has recorded, which CUDA lets pass.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.races: list[Race] = []
        self.waits: list[HostWait] = []
        self.unrecorded: list[Line] = []
        self.phase = ""
        self.counts = False  # waits
        self.calls: list[CollectiveCall] = []
        self._issued: dict[int, list[tuple[int, int]]] = {}  # by stream, of each call its work and its place in `calls`
        self._clocks = VectorClocks()
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[int, dict[int, Access]] = {}  # by pool and stream, what may still use memory free in it
        self._known: set[tuple[Any, ...]] = set()
        self._events: dict[int, Clock] = {}  # what their streams will have done when they come
        self._names = {HOST: "on the host"}
        self._communicators: dict[tuple[Any, ...], int] = {}
        self._results: dict[int, _Work] = {}  # of functional collectives, by the storage that each made
        self._works: dict[int, _Work] = {}  # by the id of what `wait` is called on
        self._last_work: _Work | None = None
        self._on_device = 0  # operators issued to it
        self._last_wait: tuple[Line, int] = (("", 0), -1)

    # Memory

    def allocated(self, number: int, storage: Storage) -> None:
        """A storage was made, or has another size."""
        memory = self._memory[number] = _Memory(storage)
        if not storage.device:
            return
        pool = storage.stream
        last = self._clocks.last.get(pool, 0)
        memory.before.append(Access(pool, last, "has", "what was issued before", "", storage.part, code_line()))
        if waiting := self._freed.get(pool):
            still = [one for one in waiting.values() if not self._clocks.is_before(one.stream, one.work, pool)]
            self._freed[pool] = {one.stream: one for one in still}
            memory.before += still

    def freed(self, number: int) -> None:
        """A storage is gone."""
        memory = self._memory.get(number)
        if memory is None:
            return
        memory.freed = True
        if not memory.sent:
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        memory = self._memory.pop(number)
        if not memory.storage.device:
            return
        for use in filter(None, [memory.written, *memory.read.values(), *memory.before]):
            if use.stream in memory.recorded or use.stream == HOST or use.does == "has":
                continue
            if not self._clocks.is_before(use.stream, use.work, memory.storage.stream):
                waiting = self._freed.setdefault(memory.storage.stream, {})
                if use.stream not in waiting or waiting[use.stream].work < use.work:
                    waiting[use.stream] = use  # a stream's last work ends after its others

    def faults(self) -> list[str]:
        """All that was found but waits of the host, in words."""
        works = dict.fromkeys((work.operator, work.place) for work in (*self._works.values(), *self._results.values()))
        never = [f"{name} at {text_of(line)} is never waited for" for name, line in works]
        passed = [
            f"{text_of(line)} waits for an event that nothing has recorded, which CUDA lets pass"
            for line in dict.fromkeys(self.unrecorded)
        ]
        return [*map(str, self.races), *never, *passed]

    def recorded_stream(self, number: int, stream: int) -> None:
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
            self.unrecorded.append(code_line())
        return self._events.get(event, {})

    def synchronized(self, what: str, stream: int | None, event: int | None) -> None:
        """The host waits for an event, for a stream, or for all of them."""
        if event is not None:
            clocks = [self._find_clock(event)]
        else:
            clocks = [self._clocks.snapshot(one) for one in (self._clocks.last if stream is None else [stream])]
        if (event, stream) != (None, None) and self._clocks.host_knows(clocks[0]):
            return
        for clock in clocks:
            self._clocks.wait(HOST, clock)
        self._wait(what)

    def _wait(self, what: str) -> None:
        """One that follows another of the same line, with nothing issued to the device in between, is a part of it."""
        line, issued = code_line(), self._on_device
        if self.counts and (line, issued) != self._last_wait:
            self.waits.append(HostWait(what, line, self.phase))
        self._last_wait = line, issued

    # Operators

    def operator(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, op: Op, numbers: Any
    ) -> None:
        """An operator was issued. numbers: gives the number of a tensor's storage, -1: none is known."""
        if op.name.endswith("wait_tensor"):
            self._finish(self._results.pop(numbers(tensors_in(args)[0]), None), op.stream)
            return
        read, written = (self._numbers(found, numbers) for found in accesses(func, args, kwargs, result))
        on_device = any(one.device.type == self.device for one in tensors_in((args, tuple(kwargs.values()), result)))
        stream = op.stream if on_device else HOST
        self._on_device += on_device
        is_sent = op.collective is not None and _is_asynchronous(op.collective)
        if is_sent:
            stream = self._communicator(op, stream)
        work, line = self._clocks.issue(stream), code_line()
        if op.collective is not None and on_device:
            self._note_call(op.collective, stream, work, line)
        for does, found in (("reads", read), ("writes", written)):
            access = Access(stream, work, does, op.name, op.module, op.part, line)
            for number in found:
                at_issue = on_device and not op.transfer and not self._memory[number].storage.device
                # The host gives a kernel the number of a tensor of its own.
                self._use(number, replace(access, stream=HOST) if at_issue else access)
        if is_sent:
            self._sent(op, stream, {*read, *written}, [numbers(one) for one in tensors_in(result)], not on_device)
        waits = self._host_waits(func, args, kwargs, op, (*read, *written))
        if waits:
            self._clocks.wait(HOST, self._clocks.snapshot(stream))
            self._wait(waits)

    def _host_waits(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], op: Op, numbers: Sequence[int]
    ) -> str:
        if op.transfer:
            host = [memory for number in numbers if not (memory := self._memory[number].storage).device]
            pinned = bool(host) and all(storage.pinned for storage in host)
            return copy_waits(op.name, args, kwargs, op.transfer, pinned)
        return reads_value(op.name, func, args, kwargs, self.device)

    def _numbers(self, tensors: Sequence[Tensor], numbers: Any) -> list[int]:
        found = (numbers(tensor) for tensor in tensors if has_memory(tensor))
        return [number for number in dict.fromkeys(found) if number in self._memory]

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

    def _compare(self, memory: _Memory, earlier: Access, access: Access, *, reused: bool = False) -> None:
        if self._clocks.is_before(earlier.stream, earlier.work, access.stream):
            return
        storage = memory.storage
        words = f"{storage.label or storage.kind} ({'device' if storage.device else 'host'})"
        race = Race(words, earlier, access, reused, self._names)
        if race.key not in self._known:
            self._known.add(race.key)
            self.races.append(race)

    def save(self) -> None:
        """What a step leaves is read as for a saved state: on the host by the host, on the device by the stream that
        computes, whose copies the host waits for."""
        line = code_line()
        for number, memory in list(self._memory.items()):
            storage = memory.storage
            if storage.kind in ("parameters", "optimizer") and not memory.freed:
                stream = 0 if storage.device else HOST
                self._use(number, Access(stream, self._clocks.issue(stream), "reads", "saving a state", "", "", line))

    # Asynchronous collectives

    def _communicator(self, op: Op, after: int) -> int:
        """The stream of a communicator; what is issued on it comes after another one."""
        assert op.collective is not None
        ranks, pair = op.collective.ranks, op.collective.operation in ("send", "recv")
        key = (op.collective.dim, ranks, pair, after == HOST)  # two ranks exchange on a communicator of their own
        if key not in self._communicators:
            self._communicators[key] = number = _COMMUNICATORS + len(self._communicators)
            self._names[number] = f"on the communicator of ranks {', '.join(map(str, ranks))}"
        stream = self._communicators[key]
        self._clocks.wait(stream, self._clocks.snapshot(after))
        return stream

    def _note_call(self, collective: Collective, stream: int, work: int, line: Line) -> None:
        pair = collective.operation in ("send", "recv")
        call = CollectiveCall(
            collective.operation,
            ("" if pair else collective.dim, collective.ranks, pair),
            collective.bytes,
            collective.dtype,
            text_of(line),
            self._done_calls(stream),
            self._done_calls(HOST),
        )
        self._issued.setdefault(stream, []).append((work, len(self.calls)))
        self.calls.append(call)

    def _done_calls(self, stream: int) -> tuple[int, ...]:
        """Of each stream the last call that is done before what `stream` does next."""
        found = []
        for other, made in self._issued.items():
            count = bisect_right(made, self._clocks.done(other, stream), key=lambda entry: entry[0])
            if count:
                found.append(made[count - 1][1])
        return tuple(found)

    def _sent(self, op: Op, stream: int, held: set[int], results: list[int], on_host: bool) -> None:
        for number in held:
            self._memory[number].sent += 1
        self._last_work = _Work(self._clocks.snapshot(stream), list(held), op.name, code_line(), on_host)
        if op.name.startswith("_c10d_functional"):
            self._results |= dict.fromkeys(results, self._last_work)
            self._last_work = None

    def started(self, work: Any) -> None:
        """A call has returned the work of the last asynchronous collective."""
        if self._last_work is not None:
            self._works[id(work)], self._last_work = self._last_work, None

    def waited_for_work(self, work: Any, stream: int) -> None:
        """A stream waits for a collective."""
        self._finish(self._works.pop(id(work), None), stream)

    def _finish(self, work: _Work | None, stream: int) -> None:
        if work is None:
            return
        self._clocks.wait(HOST if work.on_host else stream, work.clock)
        for number in work.held:
            memory = self._memory.get(number)
            if memory is not None:
                memory.sent -= 1
                if memory.freed and not memory.sent:
                    self._give_back(number)
        work.held.clear()


def _is_asynchronous(collective: Collective) -> bool:
    """Whether it runs on its communicator's stream: so do all exchanges of two ranks, even those that are waited for at
    once."""
    return not collective.waits or collective.operation in ("send", "recv")


# Which operators make the host wait for the device, and what for.


# Operators whose result has a size, or is a number, that the host reads from the device.
_READS = {
    "aten::_local_scalar_dense": ".item()",
    "aten::item": ".item()",
    "aten::is_nonzero": "a condition on a tensor",
    "aten::equal": "torch.equal",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique_consecutive",
    "aten::bincount": "bincount",
}


@dataclass(frozen=True)
class HostWait:
    """The host stalls until the device comes to it. what: `.item()`, `a blocking copy to the host`, ... place:
    the line of code. phase: of the trace."""

    what: str
    place: Line
    phase: str


def reads_value(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> str:
    """What of an operator's result the host reads from tensors of the device, in words; "": nothing."""
    if name in _READS:
        on_device = any(tensor.device.type == device for tensor in tensors_in((args, tuple(kwargs.values()))))
        return _READS[name] if on_device else ""
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        indices = [one for one in args[1] if isinstance(one, Tensor)]
        if any(one.dtype in (torch.bool, torch.uint8) and one.device.type == device for one in indices):
            return "indexing by a mask"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        repeats = [one for one in tensors_in(args) if one.device.type == device]
        if repeats and "Tensor" in func._overloadname and len(args) < 3:
            return "repeat_interleave without output_size"
    return ""


def copy_waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], transfer: str, pinned: bool) -> str:
    """Why the host waits in a copy between it and the device, in words; "": it does not.

    pinned: whether the host's side is. One to memory that is not pinned is done when it returns; one from there waits
    for its stream first (CUDA's documentation, "API synchronization behavior").
    """
    way = "to the host" if transfer == "to_host" else "to the device"
    if not pinned:
        return f"a copy {way} {'into' if transfer == 'to_host' else 'from'} memory that is not pinned"
    return f"a blocking copy {way}" if is_blocking(name, args, kwargs) else ""


# Which tensors an operator reads and which it writes, from its schema; of collectives from a table.


# Operators whose schema does not say what they write: the places of those arguments.
_WRITES = {
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::reduce_scatter_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "c10d::allreduce_": (0,),
    "c10d::allreduce_coalesced_": (0,),
    "c10d::broadcast_": (0,),
    "c10d::reduce_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::recv_": (0,),
    "c10d::recv_any_source_": (0,),
    "fsdp::all_gather_copy_in": (1,),
}
# What these write they do not read.
_ONLY_WRITES = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_"})


def accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors read, tensors written); what is changed in place is among both."""
    places, names = _written(func)
    written = [tensor for place in places if place < len(args) for tensor in tensors_in(args[place])]
    written += [tensor for name in names if name in kwargs for tensor in tensors_in(kwargs[name])]
    if func._schema.name in _ONLY_WRITES:
        read = tensors_in([value for place, value in enumerate(args) if place not in places])
    else:
        read = tensors_in((tuple(args), tuple(value for name, value in kwargs.items() if name not in names)))
    return read, [*written, *tensors_in(result)]


@cache
def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places of positional arguments, and names of others, that an operator writes."""
    schema = func._schema
    if schema.name in _WRITES:
        return _WRITES[schema.name], ()
    arguments = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    places = tuple(place for place, argument in arguments if not argument.kwarg_only)
    return places, tuple(argument.name for _, argument in arguments)

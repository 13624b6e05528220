"""A race detector for the streams of a simulated device.

A race is what two streams, or a stream and the host, do to the same memory without a wait between
them. `StreamChecker` is told by a tracer of each operator as it is issued. It goes by vector
clocks, as torch's own sanitizer for CUDA does (`torch.cuda._sanitizer`), and beyond that covers
memory that the caching allocator hands out again while another stream still uses it, buffers on the
host, collectives with streams of their own, and waits of the host.
"""

import sys
import sysconfig
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib.plan.streams.collective_order import CollectiveCall
from recipe_lib.plan.timing.stream_schedule import is_transfer
from recipe_lib.plan.tracing.operator_costs import is_blocking, list_tensors
from recipe_lib.plan.tracing.trace import HOST, Op, Storage

# The line of code that an operator comes from: one of the user's code, of ours but for the planner,
# of a model's class, or of torch's FSDP.

Line = tuple[str, int]  # file, line

_PACKAGE = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_FSDP = str(Path(_TORCH, "distributed", "fsdp"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_PACKAGES = sysconfig.get_paths()["purelib"]
_PLAN = str(_PACKAGE / "plan")


def find_code_line() -> Line:
    """Return the line of the innermost frame that is worth showing; ("", 0): there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_shown(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_shown(file: str) -> bool:
    if file.startswith(_TORCH):
        return file.startswith(_FSDP)
    is_standard = file.startswith(_STANDARD) and not file.startswith(_PACKAGES)
    return not is_standard and not file.startswith((_PLAN, "<"))


def is_of_user(file: str) -> bool:
    """Return whether a file is neither ours nor of an installed package."""
    return not file.startswith((str(_PACKAGE), _TORCH, _STANDARD, _PACKAGES, "<"))


def format_line(line: Line) -> str:
    """Return a line as text, such as `recipe_lib/memory/activation_offload.py:250`."""
    file, number = line
    # Paths are as short as can be: in their package, in this checkout or in the working folder.
    for root in (_PACKAGES, str(_PACKAGE.parent), str(Path.cwd())):
        file = file.removeprefix(f"{root}/")
    return f"{file}:{number}" if file else "unknown line"


Clock = dict[int, int]  # stream -> the number of the last of its works that is known to be done


class VectorClocks:
    """Vector clocks (Mattern, 1989): what happens before what, on streams and on the host.

    The host issues works on streams, one after the other; a stream does its own in order. An event
    holds what its stream will have done when it comes; who waits for it knows the same. Streams are
    numbers, and `HOST` is the host. Works are numbered as they are issued, from 1 on.
    """

    def __init__(self) -> None:
        self._num_issued = 0
        self.last: Clock = {}  # stream -> its last work
        self._known: dict[int, Clock] = defaultdict(dict)  # stream -> what it has waited for

    def issue(self, stream: int) -> int:
        """Return the number of a work that the host issues on a stream, or does itself."""
        self._num_issued += 1
        self.last[stream] = self._num_issued
        return self._num_issued

    def is_before(self, stream: int, work: int, waiter: int) -> bool:
        """Return whether a work of `stream` is done before what `waiter` does next."""
        # The host has done its works before it issues the next one.
        return stream == HOST or self.find_last_done(stream, waiter) >= work

    def find_last_done(self, stream: int, waiter: int) -> int:
        """Return the last work of `stream` that is done before what `waiter` does next; 0: none."""
        if stream == waiter:
            return self.last.get(stream, 0)
        # Whatever the host has waited for comes before all that it issues later.
        return max(self._known[HOST].get(stream, 0), self._known[waiter].get(stream, 0))

    def take_snapshot(self, waiter: int) -> Clock:
        """Return what is done when all that a stream has so far is."""
        return {by: self.find_last_done(by, waiter) for by in self.last if by != HOST}

    def wait(self, waiter: int, clock: Clock) -> None:
        """Let what a stream (or the host) does next come after what a snapshot holds."""
        known = self._known[waiter]
        for stream, work in clock.items():
            known[stream] = max(work, known.get(stream, 0))


_COMMUNICATORS = 10_000  # numbers of their streams begin here
_NUMBER = torch.ops.aten._local_scalar_dense.default
_INDEX_PUTS = ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


@dataclass(frozen=True)
class Access:
    """A use of memory."""

    stream: int
    work: int  # its number among the works of the clocks
    does: str  # `reads`, `writes`, or `has`: its owner had the memory before
    op: Op
    line: Line


@dataclass(slots=True)
class _Memory:
    """The uses of a storage that a later one has to come after."""

    storage: Storage
    written: Access | None = None  # the last write
    read: dict[int, Access] = field(default_factory=dict)  # the last read of each stream since
    before: list[Access] = field(default_factory=list)  # by owners of its bytes before it
    num_sent: int = 0  # asynchronous collectives that hold it
    recorded: set[int] = field(default_factory=set)  # streams that `record_stream` named
    freed: bool = False


@dataclass
class _Work:
    """An asynchronous collective."""

    clock: Clock  # what is done when it is
    storages: list[int]  # numbers of those that it holds until somebody waits for it
    operator: str
    line: Line
    on_host: bool  # its tensors are on the host, which then waits for it


class StreamChecker:
    """Finds races and waits of the host. A Tracer tells it what happens, in the order of issue.

    A collective that runs on the current stream is like any operator. An asynchronous one runs on
    its communicator's stream, holds its tensors until somebody waits for it, and is waited for
    through its work or `wait_tensor` (torch 2.8 and later).
    """

    def __init__(self, device: str) -> None:
        self.device = device
        # One race of each kind, in words, by what is the same for all races of the same two lines.
        self.races: dict[Any, str] = {}
        # Waits of the host in the last `train_step`: (`.item()`, ..., the line).
        self.waits: list[tuple[str, Line]] = []
        # Lines that wait for an event that nothing has recorded, which CUDA lets pass.
        self.unrecorded: dict[Line, None] = {}
        self.counts_waits = False
        self.calls: list[CollectiveCall] = []
        # By stream, (work, index in `calls`) of each call.
        self._issued: dict[int, list[tuple[int, int]]] = {}
        self._clocks = VectorClocks()
        self._memory: dict[int, _Memory] = {}  # by the number of its storage
        # By the stream that allocates, then by stream, what may still use memory that is free.
        self._freed: dict[int, dict[int, Access]] = {}
        self._events: dict[int, Clock] = {}  # what their streams will have done when they come
        self._stream_names = {HOST: "on the host"}
        self._communicators: dict[tuple[Any, ...], int] = {}  # the numbers of their streams
        # Works of functional collectives, by the storage that each made.
        self._results: dict[int, _Work] = {}
        # Works of others, by the id of the object that `wait` is called on.
        self._works: dict[int, _Work] = {}
        self._last_work: _Work | None = None  # whose object has not been returned yet
        self._num_on_device = 0  # operators issued to it
        self._last_wait: tuple[Line, int] = (("", 0), -1)  # its line, operators issued until then

    @contextmanager
    def follow_step(self) -> Iterator[None]:
        """Count a step's waits inside the block, then read what it leaves, as for a saved state."""
        self.waits = []
        self.counts_waits = True
        yield
        self.counts_waits = False
        for number, memory in list(self._memory.items()):
            if memory.storage.kind in ("parameters", "optimizer") and not memory.freed:
                # The host reads its own; the stream that computes copies the device's, and the host
                # waits for these copies.
                stream = 0 if memory.storage.device else HOST
                self._use(
                    number,
                    Access(
                        stream=stream,
                        work=self._clocks.issue(stream),
                        does="reads",
                        op=Op("saving a state"),
                        line=find_code_line(),
                    ),
                )

    def list_faults(self) -> list[str]:
        """Return all that was found but waits of the host, in words."""
        works = dict.fromkeys(
            (work.operator, work.line) for work in (*self._works.values(), *self._results.values())
        )
        never = [f"{name} at {format_line(line)} is never waited for" for name, line in works]
        passed = [
            f"{format_line(line)} waits for an event that nothing has recorded, which CUDA lets"
            " pass"
            for line in self.unrecorded
        ]
        return [*self.races.values(), *never, *passed]

    # Memory

    def note_allocation(self, number: int, storage: Storage) -> None:
        """Note that a storage was made, or has another size."""
        memory = self._memory[number] = _Memory(storage)
        if storage.device:
            # It belongs to the stream that is current. Freed memory can be in the next allocation
            # of that stream at once, so whoever has it is checked against all that still uses it.
            pool = storage.stream
            memory.before.append(
                Access(
                    stream=pool,
                    work=self._clocks.last.get(pool, 0),
                    does="has",
                    op=Op("what was issued before", part=storage.part),
                    line=find_code_line(),
                )
            )
            unfinished = [
                use
                for use in self._freed.get(pool, {}).values()
                if not self._clocks.is_before(use.stream, use.work, pool)
            ]
            self._freed[pool] = {use.stream: use for use in unfinished}
            memory.before += unfinished

    def note_free(self, number: int) -> None:
        """Note that a storage is gone."""
        memory = self._memory.get(number)
        if memory is not None:
            memory.freed = True
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        """Let whoever is given freed memory next come after its uses."""
        memory = self._memory[number]
        if not memory.freed or memory.num_sent:
            return
        del self._memory[number]
        # Pinned memory of the host is given out again when the copies that torch issued on it are
        # done.
        if not memory.storage.device:
            return
        unfinished = self._freed.setdefault(memory.storage.stream, {})
        for use in filter(None, [memory.written, *memory.read.values(), *memory.before]):
            # The allocator waits for recorded streams.
            if use.stream in memory.recorded or use.stream == HOST or use.does == "has":
                continue
            # A stream's last work ends after its others, so it is enough to keep that one.
            if use.stream not in unfinished or unfinished[use.stream].work < use.work:
                unfinished[use.stream] = use

    def note_record_stream(self, number: int, stream: int) -> None:
        """Note that the allocator keeps memory until a stream is done with it (`record_stream`)."""
        if number in self._memory:
            self._memory[number].recorded.add(stream)

    # Streams and the host

    def note_record(self, stream: int, event: int) -> None:
        """Note that an event was recorded on a stream."""
        self._events[event] = self._clocks.take_snapshot(stream)

    def note_wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event; one below 0 was never recorded."""
        self._clocks.wait(stream, self._find_clock(event))

    def _find_clock(self, event: int) -> Clock:
        if event not in self._events:
            self.unrecorded[find_code_line()] = None
        return self._events.get(event, {})

    def note_synchronize(self, call: str, stream: int | None, event: int | None) -> None:
        """Note that the host waits for an event, for a stream, or for all of them (both None)."""
        if event is not None:
            clock = self._find_clock(event)
        elif stream is not None:
            clock = self._clocks.take_snapshot(stream)
        else:
            clock = dict(self._clocks.last)
        # It does not wait for what is behind something that it has waited for already.
        is_held_up = any(
            self._clocks.find_last_done(done_by, HOST) < work for done_by, work in clock.items()
        )
        if is_held_up or (stream, event) == (None, None):
            self._note_host_wait(call, clock)

    def _note_host_wait(self, call: str, clock: Clock) -> None:
        """Note a wait of the host. call: how it waits, in words."""
        self._clocks.wait(HOST, clock)
        line = find_code_line()
        # A wait that follows another of the same line, with nothing issued to the device in
        # between, is a part of it.
        if self.counts_waits and (line, self._num_on_device) != self._last_wait:
            self.waits.append((call, line))
        self._last_wait = (line, self._num_on_device)

    # Operators

    def check_operator(
        self,
        func: Any,
        *,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        op: Op,
        list_numbers: Callable[[Any], tuple[int, ...]],
    ) -> None:
        """Check an operator that was issued.

        list_numbers: returns the numbers of the known storages of a value's tensors.
        """
        if op.name.endswith("wait_tensor"):
            self._finish(self._results.pop(next(iter(list_numbers(args)), -1), None), op.stream)
            return
        tensors_read, tensors_written = find_accesses(func, args=args, kwargs=kwargs, result=result)
        read = dict.fromkeys(list_numbers(tensors_read))
        written = dict.fromkeys(list_numbers(tensors_written))
        on_device = any(
            tensor.device.type == self.device
            for tensor in list_tensors((args, tuple(kwargs.values()), result))
        )
        stream = op.stream if on_device else HOST
        self._num_on_device += on_device
        # All exchanges of two ranks run on their communicator's stream, even those waited for at
        # once.
        is_sent = op.collective is not None and (not op.collective.waits or is_transfer(op))
        if is_sent:
            stream = self._find_communicator(op, stream)
        work = self._clocks.issue(stream)
        line = find_code_line()
        if op.collective is not None and on_device:
            self._note_call(op, stream=stream, work=work, line=line)
        for does, numbers in (("reads", read), ("writes", written)):
            access = Access(stream=stream, work=work, does=does, op=op, line=line)
            for number in numbers:
                memory = self._memory.get(number)
                # The host gives a kernel the value of a tensor of its own when it issues it.
                at_issue = memory and on_device and not op.transfer and not memory.storage.device
                self._use(number, replace(access, stream=HOST) if at_issue else access)
        if is_sent:
            sent = [number for number in {**read, **written} if number in self._memory]
            for number in sent:
                self._memory[number].num_sent += 1
            self._last_work = _Work(
                clock=self._clocks.take_snapshot(stream),
                storages=sent,
                operator=op.name,
                line=line,
                on_host=not on_device,
            )
            if op.name.startswith("_c10d_functional"):
                self._results |= dict.fromkeys(list_numbers(result), self._last_work)
                self._last_work = None
        reason = ""
        if func is _NUMBER and on_device:
            reason = ".item()"
        elif op.name in _INDEX_PUTS and self._has_mask(args[1]):
            reason = "indexing by a mask"
        elif op.transfer:
            reason = self._explain_copy_wait(args, kwargs=kwargs, op=op, numbers=[*read, *written])
        if reason:
            self._note_host_wait(reason, self._clocks.take_snapshot(stream))

    def _has_mask(self, indices: Sequence[Tensor | None]) -> bool:
        # CUDA counts its elements for the host (`nonzero`).
        return any(
            index.dtype in (torch.bool, torch.uint8) and index.device.type == self.device
            for index in list_tensors(indices)
        )

    def _explain_copy_wait(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], op: Op, numbers: Sequence[int]
    ) -> str:
        """Return why the host waits in a copy between it and the device; "": it does not.

        A copy to memory that is not pinned is done when it returns; one from there waits for its
        stream first (CUDA's documentation, "API synchronization behavior").
        """
        known = [self._memory[number].storage for number in numbers if number in self._memory]
        host = [storage for storage in known if not storage.device]
        direction = "to the host" if op.transfer == "to_host" else "to the device"
        if not host or not all(storage.pinned for storage in host):
            preposition = "into" if op.transfer == "to_host" else "from"
            return f"a copy {direction} {preposition} memory that is not pinned"
        return f"a blocking copy {direction}" if is_blocking(op.name, args, kwargs) else ""

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
        """Note a race, if two uses of the same memory have no wait between them."""
        if self._clocks.is_before(earlier.stream, earlier.work, access.stream):
            return
        first = self._describe(earlier)
        second = self._describe(access)
        key: tuple[Any, ...] = (
            earlier.op.name,
            earlier.line,
            access.op.name,
            access.line,
            reused,
        )
        if reused:
            words = (
                f"memory that {first} still {earlier.does} is given out again: {second}"
                f" {access.does} it"
            )
            if earlier.does != "has":  # whoever is given the memory next
                key = (earlier.op.name, earlier.line, earlier.does)
        else:
            words = (
                f"{memory.storage.label or memory.storage.kind}"
                f" ({'device' if memory.storage.device else 'host'}): {second} {access.does} what"
                f" {first} {earlier.does}, with no wait between them"
            )
        self.races.setdefault(key, words)

    def _describe(self, access: Access) -> str:
        """Return `aten::copy_ on stream 2 (backward, model.layers.0, memory/x.py:12)`."""
        part = "" if access.op.part == "other" else access.op.part
        details = ", ".join(filter(None, [part, access.op.module, format_line(access.line)]))
        stream = self._stream_names.get(access.stream, f"on stream {access.stream}")
        return f"{access.op.name} {stream} ({details})"

    # Asynchronous collectives

    def _find_communicator(self, op: Op, after: int) -> int:
        """Return the stream of a collective's communicator.

        What is issued on it comes after all of the stream `after`.
        """
        collective: Any = op.collective
        # Two ranks exchange on a communicator of their own.
        key = (collective.dim, collective.ranks, is_transfer(op), after == HOST)
        stream = self._communicators.setdefault(key, _COMMUNICATORS + len(self._communicators))
        self._stream_names[stream] = (
            f"on the communicator of ranks {', '.join(map(str, collective.ranks))}"
        )
        self._clocks.wait(stream, self._clocks.take_snapshot(after))
        return stream

    def _note_call(self, op: Op, stream: int, work: int, line: Line) -> None:
        collective: Any = op.collective
        is_exchange = is_transfer(op)
        call = CollectiveCall(
            operation=collective.operation,
            group=("" if is_exchange else collective.dim, collective.ranks, is_exchange),
            bytes=collective.bytes,
            dtype=collective.dtype,
            line=format_line(line),
            after=self._list_done_calls(stream),
            host_after=self._list_done_calls(HOST),
        )
        self._issued.setdefault(stream, []).append((work, len(self.calls)))
        self.calls.append(call)

    def _list_done_calls(self, stream: int) -> tuple[int, ...]:
        """Return the last call of each stream that is done before what `stream` does next."""
        last_calls = []
        for issued_on, calls in self._issued.items():
            last_done = self._clocks.find_last_done(issued_on, stream)
            count = bisect_right(calls, last_done, key=lambda call: call[0])
            if count:
                last_calls.append(calls[count - 1][1])
        return tuple(last_calls)

    def note_start(self, work: Any) -> None:
        """Note that a call has returned the work of the last asynchronous collective."""
        if self._last_work is not None:
            self._works[id(work)] = self._last_work
            self._last_work = None

    def note_work_wait(self, work: Any, stream: int) -> None:
        """Note that a stream waits for a collective."""
        self._finish(self._works.pop(id(work), None), stream)

    def _finish(self, work: _Work | None, stream: int) -> None:
        if work is None:
            return
        self._clocks.wait(HOST if work.on_host else stream, work.clock)
        for number in work.storages:
            if number in self._memory:
                self._memory[number].num_sent -= 1
                self._give_back(number)
        work.storages.clear()


# Operators whose schema does not say what they write -> the index of that argument.
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
    """Return (tensors read, tensors written); what is changed in place is among both."""
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    written_names = _find_written(func)
    unread_names = written_names if func._schema.name in _ONLY_WRITES else frozenset()
    read = list_tensors([value for name, value in values.items() if name not in unread_names])
    written = list_tensors([value for name, value in values.items() if name in written_names])
    return read, [*written, *list_tensors(result)]


@cache
def _find_written(func: Any) -> frozenset[str]:
    """Return the names of the arguments that an operator writes."""
    arguments = func._schema.arguments
    if func._schema.name in _WRITES:
        return frozenset({arguments[_WRITES[func._schema.name]].name})
    return frozenset(
        argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )

"""Find races between the streams of a simulated device, and places where the host waits.

For `tune plan --check-streams`, the tracer of a simulated run calls the `note_...` methods of a
`StreamChecker`, and `check_operator` for each operator. A race is a conflicting use of a storage
by two streams, or a stream and the host, without a wait between them. Vector clocks find it, as in
`torch.cuda._sanitizer`, which does not cover reuse by the caching allocator, host memory and waits.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.plan.streams.code_lines import Line, find_code_line, format_line
from recipe_lib.plan.streams.collective_order import CollectiveCall
from recipe_lib.plan.streams.operator_accesses import find_accesses
from recipe_lib.plan.streams.vector_clocks import Clock, VectorClocks
from recipe_lib.plan.timing.stream_schedule import is_transfer
from recipe_lib.plan.tracing.operator_costs import is_blocking
from recipe_lib.plan.tracing.trace import HOST, Op, Storage

_COMMUNICATORS = 10_000  # communicators' streams have numbers from here on, others smaller ones
_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `.item()` calls
# Assignments by index: the host waits in them where an index is a mask.
_INDEX_PUTS = ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


@dataclass(frozen=True)
class Access:
    """A use of memory by an operator."""

    stream: int  # HOST: the host uses it
    op_number: int  # the operator's, as `VectorClocks` counts them
    does: str  # `reads`, `writes`, or `has`: the stream was given the memory by the allocator
    op: Op  # the operator; for `has` and a saved state one that only names what happens
    line: Line  # of the code that called the operator


@dataclass(slots=True)
class _Memory:
    """The uses of a storage that a later use has to come after."""

    storage: Storage
    written: Access | None = None  # the last write
    # Stream -> its last read since the last write.
    read: dict[int, Access] = field(default_factory=dict)
    # Unfinished uses of the same bytes by storages that had them earlier; emptied by the first use.
    before: list[Access] = field(default_factory=list)
    num_sent: int = 0  # number of asynchronous collectives that hold it until waited for
    recorded: set[int] = field(default_factory=set)  # streams that `record_stream` named
    freed: bool = False  # True: no tensor has it any more, though a collective may hold it


@dataclass
class PendingCollective:
    """An asynchronous collective that was not waited for: the `Work` of torch.distributed."""

    clock: Clock  # operators that are done when the collective is
    storages: list[int]  # indices of the storages that it holds until it is waited for
    operator: str  # name of the operator, such as `c10d::allreduce_`
    line: Line  # of the code that called it
    on_host: bool  # True: its tensors are on the host, and the host waits for it, not a stream


class StreamChecker:
    """Finds races and waits of the host in what a tracer tells it, in the order of issue.

    A storage is given as its index in the trace. A collective on the current stream is like any
    operator. An asynchronous one runs on its communicator's stream. It holds its tensors until it
    is waited for, through its `Work` or `wait_tensor` (torch 2.8 and later).
    """

    def __init__(self, device: str) -> None:
        self.device = device  # type of the accelerator, as in `tensor.device.type`
        # Key of `_compare` (both operators and their lines) -> a sentence on the first such race.
        self.races: dict[tuple[Any, ...], str] = {}
        # Waits of the host in the last `train_step`: (how it waits, such as `.item()`; the line).
        self.waits: list[tuple[str, Line]] = []
        # Lines that wait for an event that nothing has recorded, which CUDA lets pass; ordered.
        self.unrecorded: dict[Line, None] = {}
        self.counts_waits = False  # True inside of `follow_step`
        self.calls: list[CollectiveCall] = []  # all collectives on the device, as issued
        # Stream -> (number of the operator, index into `calls`) of each of its collectives.
        self._issued: dict[int, list[tuple[int, int]]] = {}
        self._clocks = VectorClocks()
        self._memory: dict[int, _Memory] = {}  # index of a storage -> its uses
        # Stream whose pool freed memory went back to -> stream -> its last use of such memory.
        self._freed: dict[int, dict[int, Access]] = {}
        self._events: dict[int, Clock] = {}  # event -> operators that are done then
        # Stream -> its name in words; a stream without one is shown by its number.
        self._stream_names = {HOST: "on the host"}
        # (mesh dimension, ranks, is it for send and receive, is it on the host) of a communicator
        # -> number of the stream that it runs on.
        self._communicators: dict[tuple[Any, ...], int] = {}
        # Functional collectives (`_c10d_functional`) that were not waited for, by the index of the
        # storage of their result.
        self._results: dict[int, PendingCollective] = {}
        # Other collectives that were not waited for, by the id of torch's `Work` object, which the
        # simulation keeps alive.
        self._by_work_object: dict[int, PendingCollective] = {}
        # A collective that was issued and whose object has not been returned to its caller yet.
        self._last_collective: PendingCollective | None = None
        self._num_on_device = 0  # operators that were issued to the device
        # (line of the host's last wait, `_num_on_device` at that time).
        self._last_wait: tuple[Line, int] = (("", 0), -1)

    @contextmanager
    def follow_step(self) -> Iterator[None]:
        """Count the host's waits inside the block, then read the state as a checkpoint would.

        A write of parameters or optimizer states that such a read does not wait for is a race.
        """
        self.waits = []
        self.counts_waits = True
        yield
        self.counts_waits = False
        for index, memory in list(self._memory.items()):
            if memory.storage.kind in ("parameters", "optimizer") and not memory.freed:
                # Device memory is copied on stream 0, which computes; the host reads its own.
                stream = 0 if memory.storage.device else HOST
                self._use(
                    index,
                    Access(
                        stream=stream,
                        op_number=self._clocks.issue(stream),
                        does="reads",
                        op=Op("saving a state"),
                        line=find_code_line(),
                    ),
                )

    def list_faults(self) -> list[str]:
        """Return a sentence for each race, collective never waited for and wait for no event."""
        unfinished_collectives = dict.fromkeys(
            (collective.operator, collective.line)
            for collective in (*self._by_work_object.values(), *self._results.values())
        )
        never_waited_for = [
            f"{name} at {format_line(line)} is never waited for"
            for name, line in unfinished_collectives
        ]
        passed_waits = [
            f"{format_line(line)} waits for an event that nothing has recorded, which CUDA lets"
            " pass"
            for line in self.unrecorded
        ]
        return [*self.races.values(), *never_waited_for, *passed_waits]

    # Memory

    def note_allocation(self, index: int, storage: Storage) -> None:
        """Note that a storage was made, or has another size. index: in the trace's storages."""
        memory = self._memory[index] = _Memory(storage)
        if storage.device:
            # The allocator may give memory that was freed to a stream to the stream's next
            # allocation at once. Which bytes it gives is not simulated here: the new storage's
            # first use is checked against all unfinished uses of memory freed to that stream.
            pool = storage.stream
            memory.before.append(
                Access(
                    stream=pool,
                    op_number=self._clocks.last.get(pool, 0),
                    does="has",
                    op=Op("what was issued before", part=storage.part),
                    line=find_code_line(),
                )
            )
            unfinished = [
                use
                for use in self._freed.get(pool, {}).values()
                if not self._clocks.is_before(use.stream, use.op_number, pool)
            ]
            self._freed[pool] = {use.stream: use for use in unfinished}
            memory.before += unfinished

    def note_free(self, index: int) -> None:
        memory = self._memory.get(index)
        if memory is not None:
            memory.freed = True
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        """Note the last uses of freed memory under its stream, once no collective holds it."""
        memory = self._memory[index]
        if not memory.freed or memory.num_sent:
            return
        del self._memory[index]
        # Torch gives out pinned host memory again only when its copies of it are done: no race.
        if not memory.storage.device:
            return
        unfinished = self._freed.setdefault(memory.storage.stream, {})
        for use in filter(None, [memory.written, *memory.read.values(), *memory.before]):
            # The allocator waits for recorded streams before it gives the memory out again.
            if use.stream in memory.recorded or use.stream == HOST or use.does == "has":
                continue
            # A stream's last operator ends after its others, so it is enough to keep that one.
            if use.stream not in unfinished or unfinished[use.stream].op_number < use.op_number:
                unfinished[use.stream] = use

    def note_record_stream(self, index: int, stream: int) -> None:
        """Note that the allocator keeps memory until a stream is done with it (`record_stream`)."""
        if index in self._memory:
            self._memory[index].recorded.add(stream)

    # Streams and the host

    def note_record(self, stream: int, event: int) -> None:
        self._events[event] = self._clocks.take_snapshot(stream)

    def note_wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event; below 0: the event was never recorded."""
        self._clocks.wait(stream, self._find_clock(event))

    def _find_clock(self, event: int) -> Clock:
        """Return the operators that are done at an event; {} for one that was not recorded."""
        if event not in self._events:
            self.unrecorded[find_code_line()] = None
        return self._events.get(event, {})

    def note_synchronize(self, call: str, stream: int | None, event: int | None) -> None:
        """Note that the host waits for an event, for a stream, or for the device (both None).

        call: what waits, such as `Stream.synchronize`.
        """
        if event is not None:
            clock = self._find_clock(event)
        elif stream is not None:
            clock = self._clocks.take_snapshot(stream)
        else:
            clock = dict(self._clocks.last)
        # A wait for work that was all waited for before takes no time and does not count. One for
        # the whole device always counts.
        is_held_up = any(
            self._clocks.find_last_done(done_by, HOST) < op_number
            for done_by, op_number in clock.items()
        )
        if is_held_up or (stream, event) == (None, None):
            self._note_host_wait(call, clock)

    def _note_host_wait(self, call: str, clock: Clock) -> None:
        """Note that the host waits for the operators of `clock`. call: how it waits, in words."""
        self._clocks.wait(HOST, clock)
        line = find_code_line()
        # Waits of one line with nothing issued to the device between them count as one.
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
        list_storage_indices: Callable[[Any], tuple[int, ...]],
    ) -> None:
        """Check an operator that was issued: its uses of memory, its waits, its collective.

        Args:
            func: the `OpOverload`.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
            op: its entry in the trace.
            list_storage_indices: returns the storages of all tensors in a value, as indices into
                the trace's.
        """
        # A wait for a functional collective, which computes nothing. -1 stands for no storage.
        if op.name.endswith("wait_tensor"):
            self._finish(
                self._results.pop(next(iter(list_storage_indices(args)), -1), None), op.stream
            )
            return
        tensors_read, tensors_written = find_accesses(func, args=args, kwargs=kwargs, result=result)
        read = dict.fromkeys(list_storage_indices(tensors_read))
        written = dict.fromkeys(list_storage_indices(tensors_written))
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
        op_number = self._clocks.issue(stream)
        line = find_code_line()
        if op.collective is not None and on_device:
            self._note_call(op, stream=stream, op_number=op_number, line=line)
        for does, indices in (("reads", read), ("writes", written)):
            access = Access(stream=stream, op_number=op_number, does=does, op=op, line=line)
            for index in indices:
                memory = self._memory.get(index)
                # A kernel gets a host tensor's value as it is issued: the host reads it then.
                at_issue = memory and on_device and not op.transfer and not memory.storage.device
                self._use(index, replace(access, stream=HOST) if at_issue else access)
        if is_sent:
            held_storages = [index for index in {**read, **written} if index in self._memory]
            for index in held_storages:
                self._memory[index].num_sent += 1
            self._last_collective = PendingCollective(
                clock=self._clocks.take_snapshot(stream),
                storages=held_storages,
                operator=op.name,
                line=line,
                on_host=not on_device,
            )
            if op.name.startswith("_c10d_functional"):
                self._results |= dict.fromkeys(list_storage_indices(result), self._last_collective)
                self._last_collective = None
        reason = ""
        if func is _NUMBER and on_device:
            reason = ".item()"
        elif op.name in _INDEX_PUTS and self._has_device_mask(args[1]):
            reason = "indexing by a mask"
        elif op.transfer:
            reason = self._explain_copy_wait(args, kwargs=kwargs, op=op, indices=[*read, *written])
        if reason:
            self._note_host_wait(reason, self._clocks.take_snapshot(stream))

    def _has_device_mask(self, indices: Sequence[Tensor | None]) -> bool:
        # The host counts the True elements of a mask. uint8 is torch's older type of one.
        return any(
            index.dtype in (torch.bool, torch.uint8) and index.device.type == self.device
            for index in list_tensors(indices)
        )

    def _explain_copy_wait(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], op: Op, indices: Sequence[int]
    ) -> str:
        """Return why the host waits in a copy between it and the device; "": it does not.

        indices: of the copy's storages. A copy to memory that is not pinned is done when the call
        returns; one from such memory waits for its stream first (CUDA's documentation, "API
        synchronization behavior").
        """
        storages = [self._memory[index].storage for index in indices if index in self._memory]
        host_storages = [storage for storage in storages if not storage.device]
        direction = "to the host" if op.transfer == "to_host" else "to the device"
        if not host_storages or not all(storage.pinned for storage in host_storages):
            preposition = "into" if op.transfer == "to_host" else "from"
            return f"a copy {direction} {preposition} memory that is not pinned"
        return f"a blocking copy {direction}" if is_blocking(op.name, args, kwargs) else ""

    def _use(self, index: int, access: Access) -> None:
        """Compare a use of a storage with the earlier ones, and note it for later ones."""
        memory = self._memory.get(index)
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
        """Note a race if two uses have no wait between them.

        reused: they are of two storages that have the same memory one after the other.
        """
        if self._clocks.is_before(earlier.stream, earlier.op_number, access.stream):
            return
        first = self._describe(earlier)
        second = self._describe(access)
        # Races of the same operators at the same lines are one, whichever storages they are on.
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
            if earlier.does != "has":  # one race for all storages that get the memory next
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
        """Return the number of the stream that a collective's communicator runs on.

        Lets that stream wait for all that was issued so far on stream `after`, the current one.
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

    def _note_call(self, op: Op, stream: int, op_number: int, line: Line) -> None:
        """Add a collective to `calls`, which `collective_order.py` compares among ranks.

        stream: that it runs on. op_number: as `VectorClocks` counts operators.
        """
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
        self._issued.setdefault(stream, []).append((op_number, len(self.calls)))
        self.calls.append(call)

    def _list_done_calls(self, stream: int) -> tuple[int, ...]:
        """Return the last collective of each stream that is done before `stream` goes on.

        A collective is an index into `calls`. A stream without such a collective has no entry.
        """
        last_calls = []
        for issued_on, calls in self._issued.items():
            last_done = self._clocks.find_last_done(issued_on, stream)
            # A stream's operators are in ascending order: `count` of them are done.
            count = bisect_right(calls, last_done, key=lambda call: call[0])
            if count:
                last_calls.append(calls[count - 1][1])
        return tuple(last_calls)

    def note_start(self, work: Any) -> None:
        """Note the `Work` object that the call of the last asynchronous collective returns."""
        if self._last_collective is not None:
            self._by_work_object[id(work)] = self._last_collective
            self._last_collective = None

    def note_work_wait(self, work: Any, stream: int) -> None:
        """Note that a stream waits for a collective. work: the one given to `note_start`."""
        self._finish(self._by_work_object.pop(id(work), None), stream)

    def _finish(self, collective: PendingCollective | None, stream: int) -> None:
        """Let a stream go on after a collective, and release the storages that it held.

        collective: None for one that was waited for before, or that ran at once.
        """
        if collective is None:
            return
        self._clocks.wait(HOST if collective.on_host else stream, collective.clock)
        for index in collective.storages:
            if index in self._memory:
                self._memory[index].num_sent -= 1
                self._give_back(index)
        collective.storages.clear()

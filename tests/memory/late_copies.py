"""Simulate on a CPU a device whose copies come as late as its streams and events allow.

`LateCopies()` stands in for `torch.cuda` and is entered around the tested code; it notices copies
whose order no event secures. Operators run at once, on the computing stream. A copy on another
stream waits in that stream's queue until the computing stream waits for an event behind it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class LateEvent:
    """An event like torch.cuda.Event, with the methods that the library uses."""

    stream: Any = None  # that has recorded it
    behind = 0  # number of its stream's works (copies, operators) that come before it

    def record(self, stream: "LateStream") -> None:
        """Put the event behind the works that the stream has so far."""
        self.stream = stream
        self.behind = stream.issued


class LateStream:
    """A stream like torch.cuda.Stream: a queue of works that run as late as they may.

    The computing stream has no queue: its works, the operators, run at once and are only counted.
    """

    def __init__(self, device: "LateCopies") -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()  # works that have not run yet
        self.issued = 0  # works that were ever put in the queue
        self.done = 0  # works that have run
        # Number of the computing stream's works that surely precede this stream's next one.
        self.seen = 0

    def wait_event(self, event: LateEvent) -> None:
        """Let this stream's next work come after the event."""
        # The computing stream cannot put it off: what it waits for runs now.
        if self is self.device.computing:
            event.stream.finish(event.behind)
        elif event.stream is self.device.computing:
            self.seen = max(self.seen, event.behind)
        else:
            self.issue(lambda: event.stream.finish(event.behind))

    def issue(self, work: Callable[[], None]) -> None:
        """Put a work at the end of the queue."""
        self.queue.append(work)
        self.issued += 1

    def finish(self, count: int) -> None:
        """Run those of the first `count` works that have not run yet."""
        while self.done < count:
            self.done += 1
            self.queue.popleft()()


class LateCopies(TorchDispatchMode):
    """Stands in for `torch.get_device_module(device)`; entered around the tested code.

    Then a test reads `too_early`, `too_late` and `copied`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computing = LateStream(self)
        self.now = self.computing  # the current stream
        self.copied = 0  # bytes, by copies on other streams than the computing one
        # A copy could have begun before the computing stream had allocated its memory, which may
        # have been another tensor's until then.
        self.too_early = False
        # A copy came when its memory was gone.
        self.too_late = False
        # Memory that the computing stream has allocated: address of the storage -> (the storage,
        # number of the stream's work that allocated it). `_cdata`, the address, is all that two
        # wrappers of one storage have in common.
        self._allocations: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def Stream(self) -> LateStream:  # noqa: N802 (as torch calls it)
        return LateStream(self)

    def Event(self) -> LateEvent:  # noqa: N802
        return LateEvent()

    def current_stream(self) -> LateStream:
        return self.now

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        """Make this the current stream inside."""
        previous = self.now
        self.now = stream
        try:
            yield
        finally:
            self.now = previous

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = self.now is not self.computing
        if late and func is torch.ops.aten.copy_.default:
            self._copy_later(*args[:2])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if late:
            # Memory of the host, which is not given to others before its copies are done.
            return result
        self.computing.issued += 1
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor) and self._find_allocation(value) is None:
                storage = value.untyped_storage()
                self._allocations[storage._cdata] = (weakref.ref(storage), self.computing.issued)
        # Who reads it before a copy has filled it computes NaN.
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            result.fill_(float("nan"))
        return result

    def _find_allocation(self, tensor: Tensor) -> int | None:
        """Return the number of the computing stream's work that allocated the tensor's memory.

        Return None if that stream did not allocate it, or allocated a dead storage of this address.
        """
        reference, work = self._allocations.get(tensor.untyped_storage()._cdata, (lambda: None, 0))
        return work if reference() is not None else None

    def _copy_later(self, target: Tensor, source: Tensor) -> None:
        """Queue `target.copy_(source)` on the current stream."""
        get_target = self._build_getter(target)
        get_source = self._build_getter(source)
        self.copied += target.nbytes

        def copy() -> None:
            with _disable_current_modes():
                live_target = get_target()
                live_source = get_source()
                self.too_late |= live_target is None or live_source is None
                if not self.too_late:
                    live_target.copy_(live_source)

        self.now.issue(copy)

    def _build_getter(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """Return a function that gives the tensor when the copy runs, None if its memory is gone.

        Memory that the computing stream has not allocated is the host's and stays.
        """
        allocated_by = self._find_allocation(tensor)
        if allocated_by is None:
            return lambda: tensor
        self.too_early |= allocated_by > self.now.seen
        # A reference to the tensor would keep its memory alive.
        storage_reference = weakref.ref(tensor.untyped_storage())
        shape = tensor.shape
        dtype = tensor.dtype

        def get_tensor() -> Tensor | None:
            storage = storage_reference()
            return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, 0, shape)

        return get_tensor

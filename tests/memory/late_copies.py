"""A device on a CPU whose copies are as late as its streams and events allow, and that notices what
comes too early.

Operators run at once, on the stream that computes. A copy on another stream waits in that stream's
queue until somebody waits for an event behind it; the computing stream's memory must be there until
then. What it takes without giving it values is filled with NaN, so that whoever reads it before the
copy has come finds no numbers.
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
    """behind: how many of its stream's works come before it."""

    stream: Any = None
    behind = 0

    def record(self, stream: "LateStream") -> None:
        self.stream, self.behind = stream, stream.issued


class LateStream:
    """A queue of works. seen: so many works of the computing stream are done before the next one
    here.
    """

    def __init__(self, device: "LateCopies") -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()
        self.issued = self.done = self.seen = 0

    def wait_event(self, event: LateEvent) -> None:
        if self is self.device.computing:
            event.stream.finish(event.behind)
        elif event.stream is self.device.computing:
            self.seen = max(self.seen, event.behind)
        else:
            self.issue(lambda: event.stream.finish(event.behind))

    def issue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.issued += 1

    def finish(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.queue.popleft()()


class LateCopies(TorchDispatchMode):
    """In place of `torch.get_device_module(device)`, entered around what is tested. copied: bytes,
    by late copies. too_early: one could have begun before the computing stream was done with its
    memory. too_late: one came when its memory was gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computing = self.now = LateStream(self)
        self.copied = 0
        self.too_early = self.too_late = False
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def Stream(self) -> LateStream:  # noqa: N802 (as torch calls it)
        return LateStream(self)

    def Event(self) -> LateEvent:  # noqa: N802
        return LateEvent()

    def current_stream(self) -> LateStream:
        return self.now

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = self.now is not self.computing
        if late and func is torch.ops.aten.copy_.default:
            self._copy_later(*args[:2])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if late:
            # Memory of the host, which is not given to others before its copies are done
            return result
        self.computing.issued += 1
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor) and self._made_at(value) is None:
                storage = value.untyped_storage()
                self._made[storage._cdata] = (weakref.ref(storage), self.computing.issued)
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            result.fill_(float("nan"))
        return result

    def _made_at(self, tensor: Tensor) -> int | None:
        """Which work of the computing stream made the memory; None: it is not that stream's."""
        reference, work = self._made.get(tensor.untyped_storage()._cdata, (lambda: None, 0))
        return work if reference() is not None else None

    def _copy_later(self, target: Tensor, source: Tensor) -> None:
        places = [self._place(tensor) for tensor in (target, source)]
        self.copied += target.nbytes

        def copy() -> None:
            with _disable_current_modes():
                there, here = (place() for place in places)
                self.too_late |= there is None or here is None
                if not self.too_late:
                    there.copy_(here)

        self.now.issue(copy)

    def _place(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """Gives the tensor when its turn comes, None if its memory is gone; the host's stays."""
        made = self._made_at(tensor)
        if made is None:
            return lambda: tensor
        self.too_early |= made > self.now.seen
        storage, shape, dtype = weakref.ref(tensor.untyped_storage()), tensor.shape, tensor.dtype

        def found() -> Tensor | None:
            alive = storage()
            return None if alive is None else torch.empty(0, dtype=dtype).set_(alive, 0, shape)

        return found

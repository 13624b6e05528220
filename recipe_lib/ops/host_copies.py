"""Copy between a device and pinned host memory, on other streams than the computing one.

Offloaded activations, streamed weights, offloaded optimizer states and gradients that FSDP sends to
the host move by `HostCopies`; `Prefetch` copies a unit (some tensors that are used together) one
ahead of its use. Callers say what is copied and when it is needed; the order of work on CUDA's
streams is kept here.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# The rules of the streams:
#
# - The device's memory is allocated on the computing stream. A copy begins when all work that this
#   stream was given before is done: that which made the values, and the last use of the memory.
# - The memory is freed when the computing stream has waited for the copy, so that work that gets it
#   next runs after the copy. So the allocator need not be told of the copy (`record_stream`).
# - The host waits only for copies of numbers that it computes with itself (`wait_on_host`).
# - torch does not reuse pinned memory before the copies that it issued on it are done.

Pair = tuple[Tensor, Tensor]  # (tensor that is written, tensor that is read)

_TO_DEVICE, _TO_HOST = range(2)  # indices in `HostCopies._streams`


class Copy:
    """Copies that were begun together, and that a stream or the host can wait for."""

    __slots__ = ("_event", "_module")

    def __init__(self, event: Any, module: Any) -> None:
        """Hold an event, recorded after the copies. module: of the device, such as `torch.cuda`."""
        self._event = event
        self._module = module

    def wait(self, stream: Any = None) -> None:
        """Let a stream's work from here on run after the copies; None: the current stream's.

        Call it for one stream only: later calls do nothing.
        """
        if self._event is not None:
            waiting_stream = self._module.current_stream() if stream is None else stream
            waiting_stream.wait_event(self._event)
            self._event = None

    def wait_on_host(self) -> None:
        """Block the host until the copies are done. Not to be called after `wait`."""
        self._event.synchronize()


def wait_on_host(copies: Iterable[Copy], device: torch.device) -> None:
    """Block the host until all work of the device's current stream and these copies are done."""
    for copy in copies:
        copy.wait()
    torch.get_device_module(device).current_stream().record_event().synchronize()


class HostCopies:
    """A stream for copies to the host and one for copies to the device, made at the first copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._streams: tuple[Any, Any] | None = None  # (to the device, to the host)
        # (copy to the host, frees the device's tensors), in the order in which they were begun
        self._sent: deque[tuple[Copy, Callable[[], Any]]] = deque()

    def current_stream(self) -> Any:
        return self._module.current_stream()

    def allocate_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.device.type != "cpu")

    def copy_to_device(self, pairs: Sequence[Pair]) -> Copy:
        """Begin copies to the device; pairs: (tensor to write, tensor to read)."""
        # Autograd may have saved the tensors that are written. Their values are the same as before,
        # so the versions that it checks must not change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(target for target, _ in pairs)):
            return self._begin(_TO_DEVICE, pairs)

    def copy_to_host(self, pairs: Iterable[Pair], free: Callable[[], Any] | None = None) -> Copy:
        """Begin copies to the host.

        pairs: (tensor to write, tensor to read); an iterator runs with the copying stream as the
        current one. free: frees the tensors that are read, called by `free_sent`; None: the caller
        frees them.
        """
        copy = self._begin(_TO_HOST, pairs)
        if free is not None:
            self._sent.append((copy, free))
        return copy

    def free_sent(self, keep: int = 0) -> None:
        """Free the device's memory of what was sent to the host, but for the last `keep` copies.

        The current stream waits for the copies, the host does not.
        """
        while len(self._sent) > keep:
            copy, free = self._sent.popleft()
            # Work that gets the memory next then runs after the copy. Not by `record_stream`: when
            # the memory would be free again could not be planned (`tune plan`).
            copy.wait()
            free()

    @torch.no_grad()
    def _begin(self, direction: int, pairs: Iterable[Pair]) -> Copy:
        if self._streams is None:
            self._streams = (self._module.Stream(), self._module.Stream())
        stream = self._streams[direction]
        # After all work of the computing stream so far, by the first of the rules above.
        computed = self._module.Event()
        computed.record(self.current_stream())
        stream.wait_event(computed)
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        copied = self._module.Event()
        copied.record(stream)
        return Copy(copied, self._module)


class Prefetch:
    """Units of tensors on the device: the one in use, and the next one, whose copies have begun.

    A unit is any hashable object that stands for its tensors in the callers' functions, such as a
    parameter.
    """

    def __init__(
        self,
        copies: HostCopies,
        allocate: Callable[[Any], Sequence[Pair]],
        free: Callable[[Any], Any],
    ) -> None:
        """Prefetch by `copies`.

        allocate: `fn(unit)` allocates a unit on the device, and returns the pairs to be copied;
        none for a unit that has nothing on the host. free: `fn(unit)` frees that memory.
        """
        # Unit with memory on the device -> the copies of its values.
        self.on_device: dict[Hashable, Copy] = {}
        self._copies = copies
        self._allocate = allocate
        self._free = free

    def use(self, unit: Hashable, following: Hashable | None) -> None:
        """Bring a unit to the device, for the current stream's work from here on.

        following: the unit whose copies are begun; None: it is not known, or there is none. All
        other units are freed.
        """
        for unused in self.on_device.keys() - {unit, following}:
            self.drop(unused)
        self._fetch(unit)
        if unit in self.on_device:
            self.on_device[unit].wait()
        if following is not None:
            self._fetch(following)

    def drop(self, unit: Hashable) -> None:
        if unit in self.on_device:
            # Perhaps nothing has waited for its copies yet, and parts of it are still being sent.
            self._copies.free_sent()
            self.on_device.pop(unit).wait()
            self._free(unit)

    def drop_all(self, keep: Hashable | None = None) -> None:
        """Free all units but `keep`, and the device's memory of all that was sent to the host.

        keep: None: no unit is kept.
        """
        self._copies.free_sent()
        for unit in [unit for unit in self.on_device if unit != keep]:
            self.drop(unit)

    def _fetch(self, unit: Hashable) -> None:
        """Begin to copy a unit to the device, if it is not there and has tensors on the host."""
        if unit not in self.on_device and (pairs := self._allocate(unit)):
            self.on_device[unit] = self._copies.copy_to_device(pairs)

"""Copies between a device and pinned host memory, made next to what the device computes.

All that waits on the host for its use moves by `HostCopies`: what layers keep for backward,
weights, optimizer states, and the gradients that FSDP sends. `Prefetch` brings it one unit ahead.
Callers say what is copied and when it is needed. CUDA's rules for it are kept here:

- The device's memory is the computing stream's. A copy begins when all that this stream was given
  before is done: what made the values, and whatever used that memory last.
- That memory goes back when the computing stream has waited for the copy, so that whoever has it
  next is behind the copy. The allocator needs to know no more.
- The host waits for no copy but those of numbers that it computes with itself (`wait_on_host`).
- torch's pinned memory is not given to others before the copies that it issued on it are done.

Streams and events are torch's documented ones. The order of copies and waits is checked on the
simulated device, values on a CPU and a GPU; bytes and times of copies have not been measured on one
(docs/measurements/on_a_gpu.md).
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # the tensor that is written, and the one that is read

_TO_DEVICE, _TO_HOST = range(2)  # the indices of the streams


class Copy:
    """Copies that were begun together, until a stream has waited for them."""

    __slots__ = ("_event", "_module")

    def __init__(self, event: Any, module: Any) -> None:
        """event: recorded behind them. module: of the device, such as `torch.cuda`."""
        self._event = event
        self._module = module

    def wait(self, stream: Any = None) -> None:
        """Let all that a stream is given from here on come behind them; None: the current one."""
        if self._event is not None:
            waiting_stream = self._module.current_stream() if stream is None else stream
            waiting_stream.wait_event(self._event)
            self._event = None

    def wait_on_host(self) -> None:
        """Hold the host until they are done."""
        self._event.synchronize()


def wait_on_host(copies: Iterable[Copy], device: torch.device) -> None:
    """Hold the host until copies are done, and all that the current stream was given."""
    for copy in copies:
        copy.wait()
    torch.get_device_module(device).current_stream().record_event().synchronize()


class HostCopies:
    """Copies of one kind, on a stream of their own each way, made when the first is needed."""

    def __init__(self, device: torch.device) -> None:
        """device: the one that computes."""
        self.device = device
        self._module = torch.get_device_module(device)
        self._streams: tuple[Any, Any] | None = None
        self._sent: deque[tuple[Copy, Callable[[], Any]]] = deque()

    def current_stream(self) -> Any:
        """Return the stream that computes."""
        return self._module.current_stream()

    def allocate_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory without values, pinned where there is a device besides the host."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.device.type != "cpu")

    def copy_to_device(self, pairs: Sequence[Pair]) -> Copy:
        """Begin copies to the device."""
        # To autograd, which may have saved what is written, nothing changes: its values come again.
        with torch.autograd._unsafe_preserve_version_counter(tuple(target for target, _ in pairs)):
            return self._begin(_TO_DEVICE, pairs)

    def copy_to_host(self, pairs: Iterable[Pair], free: Callable[[], Any] | None = None) -> Copy:
        """Begin copies to the host.

        pairs: taken while the stream that copies is the current one. free: gives back what is read,
        when `free_sent` finds it copied.
        """
        copy = self._begin(_TO_HOST, pairs)
        if free is not None:
            self._sent.append((copy, free))
        return copy

    def free_sent(self, keep: int = 0) -> None:
        """Give back what was sent to the host, but for the last `keep` times.

        The stream waits for the copies, the host does not.
        """
        while len(self._sent) > keep:
            copy, free = self._sent.popleft()
            # Whoever has the memory next is then behind the copy. Not `record_stream`, whose memory
            # comes back at times that nobody can foretell.
            copy.wait()
            free()

    @torch.no_grad()
    def _begin(self, direction: int, pairs: Iterable[Pair]) -> Copy:
        if self._streams is None:
            self._streams = (self._module.Stream(), self._module.Stream())
        stream = self._streams[direction]
        # Behind all that the computing stream was given before: what made the values, and whatever
        # used the memory last.
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
    """Units of values on the device, one ahead: the one in use is there, the next on its way."""

    def __init__(
        self,
        copies: HostCopies,
        allocate: Callable[[Any], Sequence[Pair]],
        free: Callable[[Any], Any],
    ) -> None:
        """allocate: gives a unit memory on the device, and returns what is to be copied there;
        nothing where the unit has nothing on the host. free: gives that memory back."""
        # The units that have memory there, with the copies that bring their values.
        self.on_device: dict[Hashable, Copy] = {}
        self._copies = copies
        self._allocate = allocate
        self._free = free

    def use(self, unit: Hashable, following: Hashable | None) -> None:
        """Let what is issued from here on find a unit on the device.

        The following one is on its way afterwards, and all others are freed. following: None:
        nobody knows which it is, or none comes.
        """
        for unused in self.on_device.keys() - {unit, following}:
            self.drop(unused)
        self._fetch(unit)
        if unit in self.on_device:
            self.on_device[unit].wait()
        if following is not None:
            self._fetch(following)

    def drop(self, unit: Hashable) -> None:
        """Free a unit's memory, if it has any."""
        if unit in self.on_device:
            # Nobody may have waited for its copies yet, and parts of it may be on their way back.
            self._copies.free_sent()
            self.on_device.pop(unit).wait()
            self._free(unit)

    def drop_all(self, keep: Hashable | None = None) -> None:
        """Free all that was sent to the host, and all units but the one that is kept, if any."""
        self._copies.free_sent()
        for unit in [unit for unit in self.on_device if unit != keep]:
            self.drop(unit)

    def _fetch(self, unit: Hashable) -> None:
        if unit not in self.on_device and (pairs := self._allocate(unit)):
            self.on_device[unit] = self._copies.copy_to_device(pairs)

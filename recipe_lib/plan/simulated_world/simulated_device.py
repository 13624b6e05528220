"""A device without memory or kernels, registered with torch from Python as `sim`.

A fake `cuda` device aborts the process on a CPU build of torch and raises in backward on a CUDA
build without a driver; a backend behind the PrivateUse1 key (torch.utils.backend_registration)
works on both. Its streams and events are ours, so a tracer sees on which stream memory was taken
and which stream waits for which. torch knows one such device a process and does not forget it: a
plan is made in a separate process.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "sim"
_PRIVATE_USE_1 = 20  # c10/core/DeviceType.h


class Stream:
    """A queue of the device; number 0 is the one that computes."""

    # From torch 2.15 on FSDP reads these two, to hand on which stream reads a gradient.
    device_index = 0
    device_type = _PRIVATE_USE_1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device(NAME, 0)
        self.number = self.stream_id = next(MODULE.streams)

    def wait_event(self, event: "Event") -> None:
        """Let what is issued on this stream later wait for the event."""
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        """Let it wait for all that was issued on another stream."""
        other.record_event().wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that comes when all that was issued here is done."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        MODULE.listener.synchronize("Stream.synchronize", self.number, None)

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph of kernels is recorded; from 2.15 on torch's optimizers ask."""
        return False

    def __enter__(self) -> "Stream":
        self._before = MODULE.stream_now
        MODULE.stream_now = self
        return self

    def __exit__(self, *exception: Any) -> None:
        MODULE.stream_now = self._before


class Event:
    """An event on a stream, as `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        # Of its last record, -1 before the first. An event that is recorded again has another
        # number, so that those who wait for it wait for the right record.
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        """Record the event behind what was issued on the stream."""
        self.number = next(MODULE.events)
        MODULE.listener.record((stream or MODULE.stream_now).number, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        MODULE.listener.wait((stream or MODULE.stream_now).number, self.number)

    def synchronize(self) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        MODULE.listener.synchronize("Event.synchronize", None, self.number)

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return 0: no time passes."""
        return 0.0


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: there is no device."""


class SimulatedModule(_DummyBackendModule):  # type: ignore[misc]
    """The part of torch.cuda's interface that recipes and FSDP use.

    `torch.get_device_module("sim")` returns it. torch's own class says that there is one device,
    which is ready.
    """

    __name__ = NAME  # by which torch.compile speaks of a device's module

    def __init__(self) -> None:
        # torch looks these two up as attributes of the module.
        self.Stream = Stream
        self.Event = Event
        self.streams = itertools.count()  # numbers of streams
        self.events = itertools.count()  # numbers of records of events
        self.holds_values = False
        self.kernels = "cuda"  # whose kernels it has, for code that goes by the device; or "cpu"
        self.capability = (8, 0)  # compute capability of the GPU that it stands for
        self.stream_now: Any = None  # the stream that operators are issued on
        # A tracer. It hears of every event that a stream records or waits for, each use of a tensor
        # on another stream that `record_stream` names, and each time that the host waits.
        self.listener: Any = SimpleNamespace(
            **dict.fromkeys(("record", "wait", "use_on", "synchronize"), _do_nothing)
        )

    def reset(self) -> None:
        """Begin anew: one stream, no events, nobody who listens."""
        self.__init__()  # type: ignore[misc]
        self.stream_now = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream that operators are issued on."""
        return self.stream_now

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Issue operators on another stream inside the block."""
        previous = self.stream_now
        self.stream_now = stream or previous
        try:
            yield
        finally:
            self.stream_now = previous

    def device(self, device: Any) -> Any:
        """Return a context that does nothing: there is one device."""
        return nullcontext()

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability of the GPU that it stands for."""
        return self.capability

    def synchronize(self, device: Any = None) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        self.listener.synchronize("synchronize", None, None)

    # There is one device; nothing is cached, nothing is random, and the trace has the peaks.
    set_device = empty_cache = manual_seed = set_rng_state = reset_peak_memory_stats = _do_nothing

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state of the size that CUDA's generator has."""
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that CUDA supports."""
        return [torch.float16, torch.bfloat16]


MODULE = SimulatedModule()


def register_device() -> torch.device:
    """Register the device with torch, once a process, and return it with nothing issued on it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, MODULE, hook=_Hook())
    MODULE.reset()
    return torch.device(NAME, 0)


class _Hook(_DummyPrivateUse1Hook):  # type: ignore[misc]
    def get_default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def get_new_generator(self, index: int) -> torch.Generator:
        return torch.Generator()

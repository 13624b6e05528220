"""A device that exists in name only, registered with torch from Python: tensors on it have sizes
but no bytes.

A fake `cuda` device aborts the process on a CPU build of torch and raises in backward on a CUDA
build without a driver; a backend behind the PrivateUse1 key (torch.utils.backend_registration)
works on both. Its streams and events are objects of ours, so that a tracer sees on which stream
memory was taken and which stream waits for which.

torch knows one such device per process and does not forget it: a plan is made in a separate
process.
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

    # FSDP of torch 2.15 hands on which stream reads a gradient.
    device_index = 0
    device_type = _PRIVATE_USE_1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device(NAME, 0)
        self.number = self.stream_id = next(MODULE.streams)

    def wait_event(self, event: "Event") -> None:
        """What is issued on this stream later starts when the event has come."""
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        """The same for all that was issued on another stream."""
        other.record_event().wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event that comes when all that was issued here is done."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing runs; that the host would wait is said."""
        MODULE.listener.synchronize("Stream.synchronize", self.number, None)

    def query(self) -> bool:
        """True: all is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph of kernels is recorded; from 2.15 on torch's optimizers ask."""
        return False

    def __enter__(self) -> "Stream":
        self._before, MODULE.stream_now = MODULE.stream_now, self
        return self

    def __exit__(self, *exception: Any) -> None:
        MODULE.stream_now = self._before


class Event:
    """A mark on a stream; `number` counts records, so that a reused event is a new mark."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        """Sets the mark behind what was issued on the stream."""
        self.number = next(MODULE.events)
        MODULE.listener.record((stream or MODULE.stream_now).number, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream wait for the mark."""
        MODULE.listener.wait((stream or MODULE.stream_now).number, self.number)

    def synchronize(self) -> None:
        """Nothing runs; that the host would wait is said."""
        MODULE.listener.synchronize("Event.synchronize", None, self.number)

    def query(self) -> bool:
        """True: all is done."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """No time passes."""
        return 0.0


def _do_nothing(*_: Any, **__: Any) -> None:
    """On paper there is nothing to do."""


class SimulatedModule(_DummyBackendModule):  # type: ignore[misc]
    """What `torch.get_device_module("sim")` returns: the part of torch.cuda's interface that
    recipes and FSDP use.

    That there is one device, which is ready, torch's own class says.
    """

    __name__ = NAME  # by which torch.compile speaks of a device's module

    def __init__(self) -> None:
        # torch looks these two up as attributes of the module
        self.Stream, self.Event = Stream, Event
        self.streams = itertools.count()  # numbers of streams, and of records of events
        self.events = itertools.count()
        self.holds_values = False
        self.kernels = "cuda"  # whose kernels it has, for code that goes by the device; or "cpu"
        self.capability = (8, 0)
        self.stream_now: Any = None
        # Who hears of every mark that a stream sets or waits for, each use of a tensor on another
        # stream that `record_stream` names, and each time that the host waits for a stream or a
        # mark: a tracer.
        self.listener: Any = SimpleNamespace(
            **dict.fromkeys(("record", "wait", "use_on", "synchronize"), _do_nothing)
        )

    def reset(self) -> None:
        """Begins anew: one stream, no events, nobody who listens."""
        self.__init__()  # type: ignore[misc]
        self.stream_now = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators are issued on."""
        return self.stream_now

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Issues on another stream inside the block."""
        before, self.stream_now = self.stream_now, stream or self.stream_now
        try:
            yield
        finally:
            self.stream_now = before

    def device(self, device: Any) -> Any:
        """There is one device."""
        return nullcontext()

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Of the card that it stands for."""
        return self.capability

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs; that the host would wait is said."""
        self.listener.synchronize("synchronize", None, None)

    # There is one device; nothing is cached, nothing is random, and the trace has the peaks.
    set_device = empty_cache = manual_seed = set_rng_state = reset_peak_memory_stats = _do_nothing

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """A state of the size that CUDA's generator has."""
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """As CUDA."""
        return [torch.float16, torch.bfloat16]


MODULE = SimulatedModule()


def register_device() -> torch.device:
    """Makes torch know the device, once in a process, and returns it with nothing issued on it
    yet.
    """
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, MODULE, hook=_Hook())
    MODULE.reset()
    return torch.device(NAME, 0)


class _Hook(_DummyPrivateUse1Hook):  # type: ignore[misc]
    def get_default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def get_new_generator(self, index: int) -> torch.Generator:
        return torch.Generator()

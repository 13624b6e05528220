"""What happens before what, on the streams of a device and on the host: vector clocks (Mattern, 1989). No torch.

The host issues works on streams, one after the other; a stream does its own in order. An event holds what its stream
will have done when it comes; who waits for it knows the same. Whatever the host has done or waited for comes before all
that it issues later.
"""

HOST = -1

Clock = dict[int, int]  # by stream the number of the last of its works that is known to be done


class VectorClocks:
    """Streams are numbers; `HOST` is the host. Works are numbered as they are issued, from 1 on."""

    def __init__(self) -> None:
        self._issued = 0
        self._host: Clock = {}
        self._last: Clock = {}
        self._known: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}

    def issue(self, stream: int) -> int:
        """The number of a work that the host issues on a stream, or does itself."""
        self._issued += 1
        self._last[stream] = self._issued
        return self._issued

    def last(self, stream: int) -> int:
        """The number of the last work of a stream; 0: it has none."""
        return self._last.get(stream, 0)

    def is_before(self, stream: int, work: int, other: int) -> bool:
        """Whether a work of `stream` is done before what `other` does next."""
        return stream == HOST or self.done(stream, other) >= work

    def done(self, stream: int, other: int) -> int:
        """The number of the last work of `stream` that is done before what `other` does next; 0: none is."""
        if stream == other:
            return self.last(stream)
        return max(self._host.get(stream, 0), self._known.get(other, {}).get(stream, 0))

    def record(self, stream: int, event: int) -> None:
        """An event is set after all that a stream has so far."""
        self._events[event] = self._done_after(stream)

    def wait(self, stream: int, event: int) -> None:
        """What a stream (or the host) does next comes after an event; one that was never recorded lets it pass."""
        self._join(stream, self._events.get(event, {}))

    def wait_stream(self, stream: int, other: int) -> None:
        """The same after all that another stream has so far."""
        self._join(stream, self._done_after(other))

    def wait_all(self) -> None:
        """The host waits for all streams."""
        for stream in list(self._last):
            self._join(HOST, self._done_after(stream))

    def host_knows(self, event: int) -> bool:
        """Whether the host would not have to wait for an event, as it has waited for later works."""
        return self._is_known(self._events.get(event, {}))

    def host_knows_stream(self, stream: int) -> bool:
        """The same for all that a stream has so far."""
        return self._is_known(self._done_after(stream))

    def _is_known(self, clock: Clock) -> bool:
        return all(self._host.get(stream, 0) >= work for stream, work in clock.items())

    def snapshot(self, stream: int) -> Clock:
        """What is done when all that a stream has so far is; for `join`."""
        return self._done_after(stream)

    def join(self, stream: int, clock: Clock) -> None:
        """What a stream (or the host) does next comes after what a snapshot holds."""
        self._join(stream, clock)

    def _done_after(self, stream: int) -> Clock:
        clock = dict(self._known.get(stream, {}))
        _merge(clock, self._host)
        if stream != HOST:
            clock[stream] = self._last.get(stream, 0)
        return clock

    def _join(self, stream: int, clock: Clock) -> None:
        _merge(self._host if stream == HOST else self._known.setdefault(stream, {}), clock)


def _merge(into: Clock, other: Clock) -> None:
    for stream, work in other.items():
        if work > into.get(stream, 0):
            into[stream] = work

"""Tell which operators are done before which, on the streams of a device and on the host.

`StreamChecker` issues every operator of a simulated run on `VectorClocks`, and lets streams wait.
"""

from collections import Counter, defaultdict

from recipe_lib.plan.tracing.trace import HOST

Clock = dict[int, int]  # stream -> number of its last operator that is known to be done


class VectorClocks:
    """Vector clocks (Mattern, 1989): which operators are done before which, on streams and host.

    An operator is known by its number: they count up from 1 in the order in which the host issues
    them. A stream runs its operators in order. Streams are numbers, `HOST` is the host. Who waits
    for a snapshot of a stream comes after all that the stream had issued or waited for.
    """

    def __init__(self) -> None:
        self._num_issued = 0
        self.last: Clock = {}  # stream -> number of its last issued operator
        self._known: dict[int, Counter[int]] = defaultdict(Counter)  # what a stream has waited for

    def issue(self, stream: int) -> int:
        """Issue an operator on a stream (`HOST`: on the host) and return its number."""
        self._num_issued += 1
        self.last[stream] = self._num_issued
        return self._num_issued

    def is_before(self, stream: int, op_number: int, waiter: int) -> bool:
        """Return True if an operator of `stream` is done before what `waiter` does next."""
        # The host has done its operators before it issues the next one.
        return stream == HOST or self.find_last_done(stream, waiter) >= op_number

    def find_last_done(self, stream: int, waiter: int) -> int:
        """Return the last operator of `stream` done before what `waiter` does next; 0: none."""
        if stream == waiter:
            return self.last.get(stream, 0)
        # Whatever the host has waited for comes before all that it issues later.
        return max(self._known[HOST][stream], self._known[waiter][stream])

    def take_snapshot(self, waiter: int) -> Clock:
        """Return the operators that are done when all issued on `waiter` so far are done."""
        # Without the host: its operators are done before it issues the next one.
        return {
            source: self.find_last_done(source, waiter) for source in self.last if source != HOST
        }

    def wait(self, waiter: int, clock: Clock) -> None:
        """Let what a stream (or the host) does next come after the operators of a snapshot."""
        self._known[waiter] |= Counter(clock)  # the later operator of each stream

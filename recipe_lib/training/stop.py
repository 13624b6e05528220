"""Stopping at a step boundary when SIGTERM or SIGINT comes."""

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


class StopSignal:
    """Turns SIGTERM and SIGINT into a flag that all ranks agree on between two steps; a second SIGINT aborts at once.

    with StopSignal() as stop:
        for step in ...:
            train(step)
            if stop.agreed(world):
                save, and raise StoppedAndSaved

    The handler does nothing but set the flag, whatever the main thread is in the middle of. Leaving the block puts the
    former handlers back. To be entered in the main thread: Python delivers signals there only.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            return
        self.received = signal.Signals(number).name

    def agreed(self, world: "World") -> bool:
        """True on every rank once a signal has reached any of them. A collective: all ranks call it after each step.

        One number goes over the host's process group, so the device's queue is not waited for.
        """
        return world.any(self.received is not None)

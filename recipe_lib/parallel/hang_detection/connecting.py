"""Limits how long a rank waits for the store at which the ranks meet, before its heartbeat can begin."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from recipe_lib.parallel.hang_detection.heartbeat import Heartbeat


@contextmanager
def limit_connecting(rank: int, size: int, timeout: float, is_made: bool) -> Iterator[None]:
    """End this process with a line where the block, which connects to the store, takes too long.

    torch waits half an hour for a store that is not there, and for ever for one that takes a connection and is silent.
    is_made: the store is older than this rank, and has one timeout. Otherwise rank 0 makes it, and may still import.
    """
    connected = threading.Event()
    watching = Heartbeat(None, rank, size, timeout)
    threading.Thread(target=watching.wait_for_store, args=(connected, is_made), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        connected.set()

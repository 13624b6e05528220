"""A call in a fork of the test process, where the disk is full or where the user may do less."""

import json
import os
import resource
import traceback
from collections.abc import Callable
from typing import Any

NOBODY = 65534


def call_forked(function: Callable[[], Any], *, disk_bytes: int | None = None, as_nobody: bool = False) -> Any:
    """Return what `function` returns, as JSON has it, from a fork.

    disk_bytes: a file may have no more bytes, as on a disk that is full from there on. as_nobody: without the rights of
    root. Raises AssertionError with the traceback of what the function raises.
    """
    reading, writing = os.pipe()  # the limit holds for files, not for pipes
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            if disk_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, disk_bytes))
            if as_nobody and os.getuid() == 0:
                os.seteuid(NOBODY)
            answer = [True, function()]
        except BaseException:  # noqa: BLE001  (the parent raises it)
            answer = [False, traceback.format_exc()]
        with open(writing, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text, "the fork ended without an answer"
    succeeded, value = json.loads(text)
    assert succeeded, value
    return value

"""Call a function in a fork of the test process, with a full disk or without root's rights.

call_forked(lambda: save(folder), disk_bytes=1000)
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_CAPABILITIES_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: sets of 64 bits
_MAY_WRITE_ANYWHERE = 0b110  # bits of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_SECONDS = 300  # after which the fork is ended


def call_forked(
    function: Callable[[], Any], *, disk_bytes: int | None = None, as_plain_user: bool = False
) -> Any:
    """Return what `function` returns in a fork, after a round trip through JSON.

    disk_bytes: most bytes of a file, as on a disk that is full from there on; None: no limit.
    as_plain_user: permissions of files hold for root too.
    Raises AssertionError with the fork's traceback, or if the fork dies or does not end in time.
    """
    reading, writing = os.pipe()  # the limit on bytes holds for files, not for pipes
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        try:
            os.close(reading)
            if disk_bytes is not None:
                # Half of a module's bytecode would stay in the checkout, and be imported later.
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of the processes that it starts
                resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, disk_bytes))
            if as_plain_user:
                drop_capabilities()
            answer = [True, function()]
        except BaseException:  # noqa: BLE001  (the parent raises it)
            answer = [False, traceback.format_exc()]
        with open(writing, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert text, f"the fork ended without an answer: {os.waitstatus_to_exitcode(status)}"
    succeeded, value = json.loads(text)
    assert succeeded, value
    return value


def drop_capabilities() -> None:
    """Take from root the right to write where permissions forbid it.

    Raises OSError where the system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)  # 0: this process
    # Effective, permitted and inheritable sets: first of capabilities 0 to 31, then of the others.
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for number in range(3):
        sets[number] &= ~_MAY_WRITE_ANYWHERE
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")

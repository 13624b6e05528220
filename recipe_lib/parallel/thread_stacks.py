"""Read the stack of a thread from another thread, as faulthandler does.

The heartbeat, which ends a run that hangs, calls `get_current_thread` in the main thread, and
`read_stack` in a thread of its own.
"""

import ctypes
import faulthandler
import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import torch

# Parts of the names of files of torch and Triton that run while something is compiled, and not in a
# step after that.
_COMPILERS = (
    "/_dynamo/convert_frame.py",
    "/_dynamo/symbolic_convert.py",
    "/_dynamo/output_graph.py",
    "/_inductor/compile_fx.py",
    "/_inductor/async_compile.py",
    "/_inductor/graph.py",
    "/_inductor/scheduler.py",
    "/_inductor/codegen/",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py",
)
# torch's folder, as faulthandler writes it.
_TORCH = (
    os.path.join(os.path.dirname(torch.__file__), "").encode("ascii", "backslashreplace").decode()
)
# A line that faulthandler writes for a call: file, line and function.
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackLine(NamedTuple):
    """A call of a stack."""

    file: str  # its path
    line: int
    function: str


class WatchedThread(NamedTuple):
    """A thread whose stack is read. It has to live for as long."""

    ident: int  # its `threading.get_ident()`
    state: int | None  # the address of its PyThreadState, where one thread's stack can be had


def get_current_thread() -> WatchedThread:
    """Return the calling thread, for `read_stack` in another one."""
    # Python 3.11 adds a thread's state to its list before it has filled it. To go through the list
    # while a thread of C++ first calls Python, as those of autograd do in each backward, ends the
    # process with a segmentation fault now and then. So there the interpreter's own function is
    # asked for the one thread's stack. Later versions do not have the race.
    if sys.version_info >= (3, 12) or not hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):
        return WatchedThread(threading.get_ident(), None)
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    return WatchedThread(threading.get_ident(), current())


def read_stack(thread: WatchedThread) -> list[StackLine]:
    """Return the innermost 100 calls of a thread, innermost first; [] if it is not found."""
    # faulthandler reads the interpreter's frames and makes no objects of them. While the thread is
    # in torch.compile, which runs frames of its own, the objects that `sys._current_frames` makes
    # end the process with a segmentation fault now and then.
    # The file is in memory where Linux has such files, since disks fill up. OSError: there is no
    # file descriptor left, or no room.
    with (
        suppress(OSError),
        open(os.memfd_create("stacks"), "w+b", buffering=0)
        if hasattr(os, "memfd_create")
        else TemporaryFile(buffering=0) as file,
    ):
        if thread.state is None:
            faulthandler.dump_traceback(file, all_threads=True)
            heading = f"Thread 0x{thread.ident:016x} (most recent call first):\n"
        else:  # called with the interpreter's lock, so that the thread's frames stay as they are
            dump = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(
                ("_Py_DumpTraceback", ctypes.pythonapi)
            )
            dump(file.fileno(), thread.state)
            heading = "Stack (most recent call first):\n"
        file.seek(0)
        after_heading = file.read().decode("utf-8", "replace").partition(heading)[2]
        # Up to the heading of the next thread, or an empty line.
        calls = _CALL.findall(re.split(r"^\S|^$", after_heading, maxsplit=1, flags=re.MULTILINE)[0])
        return [StackLine(name, int(line), function) for name, line, function in calls]
    return []


def describe_place(stack: list[StackLine]) -> str:
    """Return `at training/loop.py:120 (finish)`: the innermost call that is not torch's.

    Return "" if there is none.
    """
    for call in stack:
        if not call.file.startswith(_TORCH):
            return f"at {'/'.join(Path(call.file).parts[-2:])}:{call.line} ({call.function})"
    return ""


def is_compiling(stack: list[StackLine]) -> bool:
    """Return True if a call of the stack is torch.compile's or Triton's compiler."""
    return any(place in call.file for call in stack for place in _COMPILERS)

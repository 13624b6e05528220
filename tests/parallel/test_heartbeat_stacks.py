"""What a thread is at, seen from another one, also while torch.compile runs in it."""

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import recipe_lib
from recipe_lib.parallel.thread_stacks import (
    StackLine,
    WatchedThread,
    describe_place,
    get_current_thread,
    is_compiling,
    read_stack,
)


def seen_during(work: Callable[[], None]) -> list[list[StackLine]]:
    """This thread's stacks, from another one, while it does the work."""
    main, over, found = get_current_thread(), threading.Event(), []

    def look() -> None:
        while not over.is_set():
            found.append(read_stack(main))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return found


def test_the_stack_of_another_thread() -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    found = seen_during(lambda: time.sleep(0.2))
    inner = next(stack for stack in found if stack and stack[0].function == "<lambda>")
    assert inner[0] == (__file__, line, "<lambda>") and inner[1].function == "seen_during"
    assert [call for call in inner if call.function == "test_the_stack_of_another_thread"][
        0
    ].line == line
    assert describe_place(inner) == f"at parallel/test_heartbeat_stacks.py:{line} (<lambda>)"
    assert not is_compiling(inner)
    assert read_stack(WatchedThread(12345, None)) == []


def test_a_users_folder_with_torchs_name_hides_no_place() -> None:
    torch_file = str(Path(torch.__file__).parent / "nn/modules/module.py")
    stack = [StackLine(torch_file, 9, "_call"), StackLine("/home/me/torch/mine.py", 3, "train")]
    assert describe_place(stack) == "at torch/mine.py:3 (train)"
    assert describe_place(stack[:1]) == ""


def test_stacks_are_read_where_no_file_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")  # as on a Mac
    test_the_stack_of_another_thread()


def test_deep_stacks_are_cut_at_their_outer_end() -> None:
    def deep(levels: int) -> None:
        time.sleep(0.2) if levels == 0 else deep(levels - 1)

    longest = max(seen_during(lambda: deep(300)), key=len)
    assert len(longest) == 100 and {call.function for call in longest} == {"deep"}


@pytest.mark.slow
def test_it_is_known_when_something_is_compiled_and_when_no_more() -> None:
    layer = torch.nn.Linear(8, 8)

    def forward(values: torch.Tensor) -> torch.Tensor:
        for factor in range(20):
            values = torch.nn.functional.gelu(layer(values)) * factor + values
        return values

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="aot_eager")

    def step() -> None:
        compiled(torch.ones(4, 8)).sum().backward()

    during = [is_compiling(stack) for stack in seen_during(step) if stack]
    assert sum(during) > len(during) / 2 > 5
    afterwards = [
        is_compiling(stack)
        for stack in seen_during(lambda: [step() for _ in range(50)] and None)
        if stack
    ]
    assert afterwards and not any(afterwards)


# Threads of C++ that call Python once and end, as fast as they can be made, while another thread
# looks at this one.
CALLING_THREADS = """
import ctypes, os, threading, time
from recipe_lib.parallel.thread_stacks import get_current_thread, read_stack

libc, called = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def call():
    thread = ctypes.c_ulong()
    while libc.pthread_create(ctypes.byref(thread), None, called, None) == 0:
        libc.pthread_join(thread, None)

def look(thread, until):
    looks = 0
    while time.monotonic() < until:
        assert read_stack(thread)[-1].function == "<module>"
        looks += 1
    print(looks)

for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
watcher = threading.Thread(target=look, args=(get_current_thread(), time.monotonic() + SECONDS))
watcher.start()
watcher.join()
os._exit(0)
"""


@pytest.mark.slow
def test_threads_that_begin_meanwhile_end_nothing() -> None:
    """By `faulthandler.dump_traceback(all_threads=True)` on Python 3.11: a segmentation fault,
    within a second here.
    """
    found = subprocess.run(
        [sys.executable, "-c", CALLING_THREADS.replace("SECONDS", "1")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 100


def test_no_frame_objects_are_made_of_another_threads_frames() -> None:
    """Such objects of a thread that is within torch.compile end the process with a segmentation
    fault now and then.
    """
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in Path(recipe_lib.__file__).parent.rglob("*.py")
    }
    assert [path for path, text in texts.items() if "_current_frames(" in text] == []

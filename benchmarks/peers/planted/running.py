"""Run a command to its end, and keep every line of its output with the second in which it came.

Benchmarks call `run` for each run of a tool.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 300.0  # seconds that a command may take


@dataclass
class Result:
    """Hold what a command did."""

    command: list[str]
    code: int | None  # None if it was killed, for time or by us
    lines: list[tuple[float, str]] = field(default_factory=list)  # (seconds after the start, text)
    seconds: float = 0.0  # from start to end
    timed_out: bool = False  # it was killed at its time limit

    @property
    def text(self) -> str:
        """Return all output, standard output and errors in the order in which they came."""
        return "\n".join(line for _, line in self.lines)


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limit: float = LIMIT,
    stop_when: Callable[[], bool] | None = None,
) -> Result:
    """Run a command in a folder, to its end.

    environment: variables, over this process's. limit: seconds, after which it is killed.
    stop_when: called again and again; once it returns True, the command is killed.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a process group, to kill what it starts too
    )
    assert process.stdout
    result = Result(list(command), None)
    rest = b""  # of a line that has not ended yet
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    # Seconds between two looks. Short with `stop_when`, which is to hit a moment, such as a save.
    pause = 0.0005 if stop_when else 0.2
    killed = False
    while True:
        now = time.monotonic() - started
        if stop_when is not None and not killed and stop_when():
            killed = _kill(process)
        if now > limit and not killed and process.poll() is None:
            killed = result.timed_out = _kill(process)
        if not selector.select(pause):
            # A process that outlived the group would hold the pipe open.
            if process.poll() is not None and killed:
                break
            continue
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            break
        # Progress bars return to the line's beginning: each state counts as a line.
        *ended_lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
        now = time.monotonic() - started
        for line in ended_lines:
            if line.strip():
                result.lines.append((now, line.decode(errors="replace")))
    if rest.strip():
        result.lines.append((time.monotonic() - started, rest.decode(errors="replace")))
    code = process.wait()
    process.stdout.close()
    result.code = None if killed else code
    result.seconds = time.monotonic() - started
    return result


def _kill(process: "subprocess.Popen[bytes]") -> bool:
    """Kill a process and all that it has started; return False if it had ended."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True

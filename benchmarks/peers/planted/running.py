"""A command run to its end, every line of its output with the second in which it came."""

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
    """What a command did."""

    command: list[str]
    code: int | None  # None if it was killed, for time or by us
    lines: list[tuple[float, str]] = field(default_factory=list)  # (seconds after the start, text)
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def text(self) -> str:
        """Return everything that was written, both streams as they came."""
        return "\n".join(line for _, line in self.lines)


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limit: float = LIMIT,
    stop_when: Callable[[], bool] | None = None,
) -> Result:
    """Run the command in the folder, to its end.

    stop_when: asked all the time; once true, all its processes get SIGKILL.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout
    result = Result(list(command), None)
    rest = b""  # of a line that has not ended yet
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    pause = 0.0005 if stop_when else 0.2
    killed = False
    while True:
        now = time.monotonic() - started
        if stop_when is not None and not killed and stop_when():
            killed = _kill(process)
        if now > limit and not killed and process.poll() is None:
            killed = result.timed_out = _kill(process)
        if not selector.select(pause):
            if process.poll() is not None and killed:
                break
            continue
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            break
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
    """End the process and what it has started, which are a group of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True

"""How long this process has been running, by the clock on the wall, from its very beginning: before Python had started.

So what a verb says it took is what `time tune ...` shows.
"""

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_START_FIELD = 19  # of /proc/self/stat, counted from the one after the program's name


def process_seconds() -> float:
    """Seconds since the process was started; where the system does not say, since this module was imported."""
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        started = int(after_name.split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED
    return max(0.0, seconds)

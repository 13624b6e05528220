"""What an error says of the other ranks, and what machine this one is on."""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from recipe_lib.errors import UserError

_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|ncclRemoteError|Socket Timeout|Timed out waiting"
)


_RUN = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")  # variables that the ranks of a run on one machine share


class PeerFailedError(RuntimeError):
    """Raised by a rank that is well because another one has failed by a defect, which tells it itself."""


def node_name() -> str:
    """This machine, as torchrun counts them, or else by its name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def stopped_ranks() -> set[int]:
    """Return the ranks of this run on this machine whose process is stopped, as by SIGSTOP, from before they import.

    Only Linux shows it. A process that is busy in a call which lets no thread of Python run is not among them, nor one
    that a debugger holds.
    """
    stopped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended, or is another user's
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
                variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                if all(variables.get(name) == os.environ.get(name) for name in _RUN):
                    stopped.add(int(variables.get("RANK", "")))
    return stopped


def says_gone(error: BaseException) -> bool:
    """Whether an error is that another process is not there any more: gloo's are known by their text."""
    return isinstance(error, RuntimeError) and bool(_GONE.search(str(error)))


def first_line(error: BaseException) -> str:
    """What it says; of gloo's without the place in its source, and what it goes on to suppose."""
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    if text.startswith("[") and "/gloo/" in text:
        return text.partition("] ")[2].partition(". ")[0]
    return text if says_gone(error) or isinstance(error, UserError) else f"{type(error).__name__}: {text}"

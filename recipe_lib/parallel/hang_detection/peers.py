"""What an error says of the other ranks, and what machine this one is on."""

import os
import re
import socket

from recipe_lib.errors import UserError

_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|ncclRemoteError|Socket Timeout|Timed out waiting"
)


class PeerFailedError(RuntimeError):
    """Raised by a rank that is well because another one has failed by a defect, which tells it itself."""


def node_name() -> str:
    """This machine, as torchrun counts them, or else by its name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


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

"""What a thread is at, seen from another one: its frames, and the collectives that this process has entered."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_COMPILERS = (
    "/_dynamo/convert_frame.py", "/_inductor/compile_fx.py", "/_inductor/async_compile.py", "/triton/compiler/",
    "/triton/runtime/autotuner.py",
)  # fmt: skip
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


def collectives() -> dict[str, int]:
    """By process group, how many collectives this rank has entered."""
    found = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError):  # of a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            found[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return found


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def where(frame: FrameType | None) -> str:
    """`training/loop.py:120 (finish)`: the innermost place that is not torch's."""
    for outer in frames(frame):
        path = Path(outer.f_code.co_filename)
        if "/torch/" not in str(path):
            return f"{'/'.join(path.parts[-2:])}:{outer.f_lineno} ({outer.f_code.co_name})"
    return ""


def busy(frame: FrameType | None) -> str:
    """A key of `beats.PATIENCE`, or ""."""
    files = [outer.f_code.co_filename for outer in frames(frame)]
    for what, places in (("in a debugger", _DEBUGGERS), ("compiling", _COMPILERS)):
        if any(place in file for file in files for place in places):
            return what
    return ""

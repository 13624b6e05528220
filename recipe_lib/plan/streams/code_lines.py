"""Find the line of code that an operator comes from.

`StreamChecker` reports races and waits by `find_code_line`, and `format_line` writes a line for
people. Frames of torch (but for its FSDP), of Python's standard library and of the planner, which
runs the simulation, are passed over.
"""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

Line = tuple[str, int]  # (path of the file, number of the line from 1 on)

# Folders, by which files are told apart.
_PACKAGE = Path(__file__).parents[2]  # recipe_lib
_TORCH = str(Path(torch.__file__).parent)
_FSDP = str(Path(_TORCH, "distributed", "fsdp"))
_STANDARD = sysconfig.get_paths()["stdlib"]  # Python's standard library
_PACKAGES = sysconfig.get_paths()["purelib"]  # site-packages, which may lie inside of it
_PLAN = str(_PACKAGE / "plan")


def find_code_line() -> Line:
    """Return the line of the innermost frame that is not passed over; ("", 0): there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_reported(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_reported(file: str) -> bool:
    if file.startswith(_TORCH):
        return file.startswith(_FSDP)
    is_standard = file.startswith(_STANDARD) and not file.startswith(_PACKAGES)
    return not is_standard and not file.startswith((_PLAN, "<"))  # `<string>`: generated code


def is_of_user(file: str) -> bool:
    """Return True if a file is neither recipe_lib's nor of an installed package or Python."""
    return not file.startswith((str(_PACKAGE), _TORCH, _STANDARD, _PACKAGES, "<"))


def format_line(line: Line) -> str:
    """Return a line as text: `recipe_lib/memory/activation_offload.py:250` or `unknown line`."""
    file, number = line
    # Relative to site-packages, to this checkout or to the working folder, for a short path.
    for root in (_PACKAGES, str(_PACKAGE.parent), str(Path.cwd())):
        file = file.removeprefix(f"{root}/")
    return f"{file}:{number}" if file else "unknown line"

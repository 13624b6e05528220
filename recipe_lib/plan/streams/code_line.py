"""The line of code that an operator comes from: of the user's, of ours, of a model's class, or of
torch's FSDP.
"""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

Line = tuple[str, int]  # file, line

_PACKAGE = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_FSDP = str(Path(_TORCH, "distributed", "fsdp"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_PACKAGES = sysconfig.get_paths()["purelib"]
_PLAN = str(_PACKAGE / "plan")


def find_code_line() -> Line:
    """Of the innermost frame that is worth showing; ("", 0): there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_shown(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_shown(file: str) -> bool:
    if file.startswith(_TORCH):
        return file.startswith(_FSDP)
    if file.startswith((_PLAN, "<")):
        return False
    return not file.startswith(_STANDARD) or file.startswith(_PACKAGES)


def is_of_user(file: str) -> bool:
    """Return whether a file is neither ours nor of an installed package."""
    return not file.startswith((str(_PACKAGE), _TORCH, _STANDARD, _PACKAGES, "<"))


def format_line(line: Line) -> str:
    """`recipe_lib/memory/activation_offload.py:250`; of a package its path in it, of other files as
    short as can be.
    """
    file, number = line
    for root in (_PACKAGES, str(_PACKAGE.parent), str(Path.cwd())):
        file = file.removeprefix(f"{root}/")
    return f"{file}:{number}" if file else "unknown line"

"""The GPUs of this machine, as nvidia-smi lists them: asked without a CUDA context, and where none is to be made."""

import csv
import dataclasses
import os
import subprocess
from functools import cache
from typing import TYPE_CHECKING

from recipe_lib.errors import ConfigError
from recipe_lib.units import GIB, MIB

if TYPE_CHECKING:
    from recipe_lib.plan.hardware import Hardware

VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS = 10  # a driver that hangs must not hold anything up
SHARE_OF_TOTAL = 0.98  # of what nvidia-smi shows, CUDA reports this much or a little more: the driver keeps some
QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


@cache
def own_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of each GPU that a process started here would see; empty without a driver."""
    try:
        listed = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        rows = [
            (row[0], row[1], row[2], int(row[3]) * MIB)
            for row in csv.reader(listed.splitlines(), skipinitialspace=True)
        ]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [(name, size) for _, _, name, size in rows]
    chosen = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return [
        (name, size)
        for entry in chosen
        for index, uuid, name, size in rows
        if entry == index or (len(entry) > 4 and uuid.startswith(entry))
    ]


def own_device() -> "Hardware | None":
    """The first of them as a device to plan for; None without one.

    A card that is not in the table is planned with its own memory and the rates of a common card of that size.
    """
    from recipe_lib.plan.hardware import find_hardware

    gpus = own_gpus()
    if not gpus:
        return None
    name, size = gpus[0]
    usable = int(size * SHARE_OF_TOTAL)
    try:
        known = find_hardware(name)
    except ConfigError:
        return dataclasses.replace(find_hardware(f"{usable / GIB:.2f}GiB"), name=name, memory=usable)
    # A slice of a card, or another size of it than the table's, has the memory that it says.
    return known if 0.9 < known.memory / size <= 1 else dataclasses.replace(known, memory=usable)

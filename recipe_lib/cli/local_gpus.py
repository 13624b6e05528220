"""The GPUs of this machine, as nvidia-smi lists them: asked without a CUDA context, and where none
is to be made.
"""

import csv
import os
import subprocess
from functools import cache

from recipe_lib.plan.hardware import HARDWARE, Hardware, find_reported_hardware
from recipe_lib.units import MIB

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VISIBLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT_SECONDS = 10  # a driver that hangs must not hold anything up
SHARE_OF_TOTAL = (
    0.98  # of what nvidia-smi shows, CUDA reports this much or a little more: the driver keeps some
)
QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


@cache
def own_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of each GPU that a process started here would see; empty without a driver."""
    try:
        listed = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        ).stdout
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


def own_device() -> Hardware | None:
    """The first of them as a device to plan for; None without one.

    A card that is not in the table is planned with its own memory and the rates of a common card of
    that size.
    """
    gpus = own_gpus()
    if not gpus:
        return None
    name, size = gpus[0]
    reported = find_reported_hardware(name, int(size * SHARE_OF_TOTAL))
    known = HARDWARE.get(reported.name)
    # A slice of a card, or another size of it than the table's, has the memory that it says.
    return known if known and 0.9 < known.memory / size <= 1 else reported


def is_expandable() -> bool:
    """Whether the run's allocator has expandable segments."""
    configured = (
        "".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES).lower().replace(" ", "")
    )
    return "expandable_segments:true" in configured

"""List the GPUs of this machine by nvidia-smi, and choose one as the device of a plan.

torch is not asked: it would make a CUDA context, and a launcher or a planner must have none.
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
# Of the memory that nvidia-smi shows, CUDA reports this share or a little more: the driver keeps
# some.
SHARE_OF_TOTAL = 0.98
QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


@cache
def list_local_gpus() -> list[tuple[str, int]]:
    """Return (name, bytes) of each GPU that a process started here would see.

    Empty without a driver.
    """
    try:
        output = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        ).stdout
        rows = [
            (row[0], row[1], row[2], int(row[3]) * MIB)
            for row in csv.reader(output.splitlines(), skipinitialspace=True)
        ]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [(name, size) for _, _, name, size in rows]
    gpus = []
    # In the order of the variable. An entry is an index, or the beginning of a UUID: `GPU-1a2b`.
    for entry in filter(None, map(str.strip, visible.split(","))):
        for index, uuid, name, size in rows:
            if entry == index or (len(entry) > 4 and uuid.startswith(entry)):
                gpus.append((name, size))
    return gpus


def find_local_device() -> Hardware | None:
    """Return the first GPU as a device to plan for; None without one.

    A card that is not in the table is planned with its own memory and the rates of a common card of
    that size.
    """
    gpus = list_local_gpus()
    if not gpus:
        return None
    name, size = gpus[0]
    reported = find_reported_hardware(name, int(size * SHARE_OF_TOTAL))
    known = HARDWARE.get(reported.name)
    # A slice of a card, or another size of it than the table's, has the memory that it says.
    return known if known and 0.9 < known.memory / size <= 1 else reported


def is_expandable() -> bool:
    """Return True if the run's allocator has expandable segments."""
    settings = "".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    return "expandable_segments:true" in settings.lower().replace(" ", "")

"""Read the figures of a run's memory plan, which another process makes.

`tune run` plans beside the run and writes the figures into a JSON file, whose path the run has in
an environment variable. The run's summary, page and receipt (planned and measured peaks, kept for
later plans) show them.
"""

import os
from pathlib import Path
from typing import Any

from recipe_lib.reading import find_object

FIGURES_VARIABLE = "TUNE_PLAN_FIGURES"  # environment variable with the path of the file
# Bytes of torch's allocator, whose peaks are planned.
MEMORY_KINDS = ("active", "allocated", "reserved")


def read_planned_figures(output_dir: Path) -> dict[str, Any] | None:
    """Return the figures of the plan of the run in `output_dir`; None: there are none by now."""
    figures = find_object(os.environ.get(FIGURES_VARIABLE, ""))
    is_of_this_run = figures.get("output_dir") == os.path.abspath(output_dir)
    return figures if is_of_this_run else None

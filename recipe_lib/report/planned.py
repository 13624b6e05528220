"""The figures of a run's plan, on their way from the process that makes it to the run.

`tune run` writes them into the file that FIGURES names; the run's summary, page and receipt show
them.
"""

import os
from pathlib import Path
from typing import Any

from recipe_lib.reading import find_object

FIGURES = "TUNE_PLAN_FIGURES"  # the file where `tune run` has the figures of its plan written
KINDS = ("active", "allocated", "reserved")


def read_planned_figures(output_dir: Path) -> dict[str, Any] | None:
    """Return the figures of the plan of the run in `output_dir`; None: `tune run` has not made
    it by now.
    """
    figures = find_object(os.environ.get(FIGURES, ""))
    is_of_this_run = figures.get("output_dir") == os.path.abspath(output_dir)
    return figures if is_of_this_run else None

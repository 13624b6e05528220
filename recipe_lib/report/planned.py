"""The figures of a run's plan, from the process that makes it to the run's summary, page and
receipt.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe_lib.reading import read_object

FIGURES = "TUNE_PLAN_FIGURES"  # the file where `tune run` has the figures of its plan written
KINDS = ("active", "allocated", "reserved")


def read_planned_figures(output_dir: Path) -> dict[str, Any] | None:
    """The figures of the plan of the run in `output_dir`, if `tune run` has made it by now."""
    with suppress(KeyError, OSError, ValueError):
        figures = read_object(os.environ[FIGURES])
        if figures.get("output_dir") == os.path.abspath(output_dir):
            return figures
    return None

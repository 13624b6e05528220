"""What `tune plan` writes: files that are checked before the work and written at its end, and a device's rates."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_lib.cli.calibration_runs import small_steps

if TYPE_CHECKING:
    from recipe_lib.plan.result import Plan
    from recipe_lib.plan.trace import Trace


def calibrate(path: Path) -> str:
    """Measures this machine's device and writes its rates; says so in a line."""
    from recipe_lib.files import replace_text
    from recipe_lib.plan.timing.calibrate import calibrate as measure

    found = measure()
    if found["dry_run"]:
        from recipe_lib.plan.timing.measure_operators import measure_operators

        with small_steps() as steps:
            found |= measure_operators(steps)
    replace_text(path, json.dumps(found, indent=2) + "\n")
    if found["dry_run"]:
        return f"{path}: rates of this CPU, for `--device cpu` alone; measure on a machine with the GPU to plan for one"
    return f"{path}: rates of {found['device']}; `tune plan --calibration {path}` uses the file"


def write(plan: "Plan", trace: "Trace", arguments: argparse.Namespace) -> None:
    """The files that were asked for, each whole or not at all."""
    from recipe_lib.files import replace_text

    if arguments.json:
        text = json.dumps(plan.to_json(), indent=2) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            replace_text(Path(arguments.json), text)
    if arguments.html:
        from recipe_lib.plan.report import render_html

        replace_text(Path(arguments.html), render_html(plan, trace))
    if arguments.snapshot:
        from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
        from recipe_lib.plan.allocation.snapshot import write_snapshot

        write_snapshot(trace, Path(arguments.snapshot), AllocatorSettings())

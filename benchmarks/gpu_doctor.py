"""Write a report of what `tune doctor` measures and finds wrong on this machine.

`python benchmarks/gpu_check.py doctor` calls `main`. The report is the text that `tune doctor`
prints. Beside it are all figures as JSON, and the rates that `tune plan --calibration` reads.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from recipe_lib.cli import doctor
from recipe_lib.cli.doctor_report import find_faults, format_report
from recipe_lib.cli.launch import list_local_gpus

REPOSITORY = Path(__file__).resolve().parents[1]
DRY_RUN = "dry-run-cpu"  # in place of the GPU in files' names


def main(words: list[str]) -> int:
    """Look at the machine and write three files. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py doctor",
        description="Write a report of what `tune doctor` finds on this machine.",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    options = parser.parse_args(words)
    # A dry run without a GPU: two ranks over gloo.
    doctor_arguments = [] if list_local_gpus() else ["--nproc_per_node", "2"]
    facts = doctor.gather_facts(doctor.read_arguments(doctor_arguments))
    findings = find_faults(facts)
    gpus = facts["steps"].get("torch", {}).get("gpus", [])
    name = f"{len(gpus)}x-{'-'.join(gpus[0]['name'].lower().split())}" if gpus else DRY_RUN
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / f"gpu-doctor-{name}"
    text = format_report(facts, findings)
    note = (
        "" if gpus else "\nNothing was measured on a GPU: this checks the program, not a machine.\n"
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = f"# tune doctor\n\n`python benchmarks/gpu_check.py doctor`, {date}\n{note}"
    base.with_suffix(".md").write_text(f"{head}\n```\n{text}```\n", encoding="utf-8")
    figures = {"date": date, "findings": findings, **facts}
    base.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(text)
    print(doctor.write_rates(f"{base}-rates.json", facts))
    return doctor.HAS_FINDINGS if findings else 0

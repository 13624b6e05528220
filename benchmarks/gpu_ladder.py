"""Measure what each memory lever saves and costs on Llama 3 8B, beside what is planned.

    python benchmarks/gpu_check.py ladder    on this machine's GPU; a dry run without one
    python -m benchmarks.gpu_ladder --planned --output docs/measurements/ladder.md    plans alone

For full fine-tuning, QLoRA and LoRA, on one card: the config without any lever, and each lever
added to it; the config as it is shipped, and the one with all levers that save, and each of their
levers removed. A line is compared with the one that it differs from by that lever alone. Each is
measured in a process of its own under a time limit, the most telling first; planning goes on beside
it on the CPU's cores.

Without a GPU tiny configs are planned for the CPU and compared with a trace of a real run there:
nothing is measured.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_plan
from benchmarks.gpu_check import REPOSITORY, describe_device, parse_minutes, run_apart
from benchmarks.gpu_ladder_cases import METHODS, ConfigCase, Rung, list_rungs
from benchmarks.gpu_ladder_report import build_key, describe_line, format_page, summarize
from benchmarks.gpu_plan_report import name_device, write_pair
from recipe_lib.errors import UserError, run_for_exit_code
from recipe_lib.memory.peaks import find_free_host_memory
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY
from recipe_lib.units import format_bytes

MINUTES = 25.0  # default limit of all lines together
CASE_SECONDS = 150  # offloaded models are copied, compiled ones compiled
STEADY_STEPS = 4  # after the first one
COMMAND = "python -m benchmarks.gpu_ladder --planned --output docs/measurements/ladder.md"
DEVICE = "rtx4090"  # that plans are for where nothing is measured


def main(words: list[str] | None = None) -> int:
    """Plan and measure all lines and write the report after each; 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = REPOSITORY / "docs" / "measurements"
    parser.add_argument(
        "--output", type=Path, default=folder, help="folder of the report; with --planned its file"
    )
    parser.add_argument("--planned", action="store_true", help="plan only, and measure nothing")
    parser.add_argument(
        "--device", default=DEVICE, help=f"with --planned: the card to plan for; default: {DEVICE}"
    )
    parser.add_argument("--only", choices=METHODS, help="one method's lines")
    parser.add_argument("--minutes", type=parse_minutes, default=MINUTES, help="time for all of it")
    options = parser.parse_args(words)
    folder = options.output.parent if options.planned else options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {options.output}: {folder} cannot be made ({error.strerror})")
    return run_for_exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Plan and measure the lines that the options name and return the exit code."""
    methods = (options.only,) if options.only else METHODS
    if options.planned:
        return write_plans(options.output, find_hardware(options.device), methods)
    started = time.monotonic()
    device = run_apart(describe_device, CASE_SECONDS)
    gpu = device.get("type") == "cuda"
    hardware = gpu_plan.look_up_hardware(device)
    only = ["--only", options.only] if options.only else []
    report = gpu_plan.begin_report("ladder", only, device=device, hardware=hardware)
    rungs = list_rungs(gpu, methods)
    cases = [rung.case for rung in rungs]
    name = f"gpu-ladder-{name_device(device)}"
    if options.only:
        name += f"-{options.only}"
    paths: list[Path] = []
    with gpu_plan.plan_in_processes(cases, hardware, plan_line) as wait_for_plan:
        for rung in rungs:
            seconds_left = options.minutes * 60 - (time.monotonic() - started)
            row = build_row(rung)
            if seconds_left < 5:
                row["skipped"] = "no time left"
            else:
                row["planned"] = wait_for_plan(rung.case, seconds_left)
                row |= measure_line(
                    rung.case,
                    planned=row["planned"],
                    gpu=gpu,
                    seconds=min(CASE_SECONDS, seconds_left),
                )
            report["rows"].append(row)
            report["seconds"] = round(time.monotonic() - started)
            print(f"{report['seconds']:5d} s  {describe_line(row)}", flush=True)
            paths = write_pair(options.output / name, report, format_page(report))
    print("\n".join([*summarize(report), *map(str, paths)]))
    return 1 if any(is_wrong(row, gpu) for row in report["rows"]) else 0


def is_wrong(row: dict[str, Any], gpu: bool) -> bool:
    """Return True if a line failed, or a CPU run's bytes are not the planned ones.

    Bytes are compared where the plan of a run on the CPU is exact.
    """
    planned = row.get("planned", {})
    measured_peaks = row.get("measured", {}).get("peaks", {})
    if "failed" in row or "failed" in planned:
        return True
    if gpu or "requested" not in planned or not row.get("exact", True):
        return False
    return any(
        planned[phase]["requested"] != peaks["requested"] for phase, peaks in measured_peaks.items()
    )


def write_plans(output: Path, hardware: Hardware, methods: Sequence[str]) -> int:
    """Write the planned columns of the real configs as a report of their own.

    Lines of other methods are kept as they are in the file. Returns 1 if a line could not be
    planned.
    """
    file = output.with_suffix(".json")
    earlier_rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rows_by_key = {build_key(row): row for row in earlier_rows if row["method"] not in methods}
    report = {
        "command": COMMAND,
        "torch": torch.__version__,
        "device": {"type": "planned", "name": hardware.name, "memory": hardware.memory},
        "rows": [],
    }
    row_order = [rung.key for rung in list_rungs(True)]
    rungs = list_rungs(True, methods)
    cases = [rung.case for rung in rungs]
    with gpu_plan.plan_in_processes(cases, hardware, plan_line) as wait_for_plan:
        for rung in rungs:
            row = build_row(rung)
            row["planned"] = wait_for_plan(rung.case, float("inf"))
            rows_by_key[rung.key] = row
            report["rows"] = [rows_by_key[key] for key in row_order if key in rows_by_key]
            print(describe_line(row), flush=True)
            write_pair(output.with_suffix(""), report, format_page(report))
    return 1 if any(is_wrong(row, True) for row in report["rows"]) else 0


def build_row(rung: Rung) -> dict[str, Any]:
    """Build a row of the report, without figures."""
    cfg = rung.case.read()
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    return {
        "method": rung.method,
        "config": rung.case.config,
        "overrides": list(rung.case.overrides),
        "basis": rung.basis,
        "words": list(rung.words),
        "removed": rung.removed,
        "rounds": rung.rounds,
        "exact": rung.exact,
        "against": [rung.against[0], rung.against[1], list(rung.against[2])],
        "rows": rows,
        "row_tokens": cfg.max_seq_len,
    }


def plan_line(case: ConfigCase, hardware: Hardware) -> dict[str, Any]:
    """Plan a line: the peaks of a step by phase, as `plan_peaks` gives them, and more figures.

    `requested`, `active` and `reserved`: the most of any phase, bytes. `host`: bytes there.
    `tokens_per_second`: None where no time is planned. `verdict`. Or {"refused": the line} where
    the config or the device does not have it.
    """
    try:
        recipe_class, cfg = case.load()
        plan, _ = make_plan(
            recipe_class, cfg, PlanSettings(hardware, case.rows, case.ranks, phases=())
        )
    except UserError as error:
        return {"refused": str(error)}
    rank = plan.heaviest
    steps = [peak for peak in rank.peaks if peak.phase in (FIRST, STEADY)]
    return gpu_plan.read_peaks(rank) | {
        "requested": max(peak.requested for peak in steps),
        "active": max(peak.active for peak in steps),
        "reserved": max(peak.reserved for peak in steps),
        "host": rank.host,
        "tokens_per_second": plan.time.tokens_per_second if plan.time else None,
        "verdict": plan.verdict,
    }


def measure_line(
    case: ConfigCase, *, planned: dict[str, Any], gpu: bool, seconds: float
) -> dict[str, Any]:
    """Measure a line; return {"measured": ...}, {"failed": why} or {"skipped": why}.

    Or nothing for what is refused, or compiled where there is no GPU.
    """
    if "refused" in planned or (not gpu and case.read().compile):
        return {}
    if not gpu:
        result = run_apart(functools.partial(run_or_tell, gpu_plan.trace_on_cpu, case), seconds)
        return result if "failed" in result else {"measured": result}
    free, _ = find_free_host_memory()
    if planned.get("host", 0) > free:
        return {
            "skipped": (
                f"host memory: found {format_bytes(free)}, expected {format_bytes(planned['host'])}"
            )
        }
    result = run_apart(
        functools.partial(run_or_tell, gpu_plan.measure, case, steady=STEADY_STEPS), seconds
    )
    if "failed" in result:
        return result
    if "out_of_memory" not in result:
        cfg = case.read()
        tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.max_seq_len
        result["tokens_per_second"] = tokens / statistics.median(result["seconds"][1:])
    return {"measured": result}


def run_or_tell(
    work: Callable[..., dict[str, Any]], *arguments: Any, **keywords: Any
) -> dict[str, Any]:
    """Return `work(...)`, or {"failed": the line} for an error that a user would be told."""
    try:
        return work(*arguments, **keywords)
    except UserError as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    raise SystemExit(main())

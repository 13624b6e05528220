"""Measure what each memory lever saves and costs on Llama 3 8B, beside what is planned.

`python benchmarks/gpu_check.py ladder` calls `main`; with `--planned` nothing is measured. A lever
is a config key that trades memory for time or precision. A rung is a config that differs from a
basis (no lever, as shipped, or all levers that save) by one lever; a row is its entry in the
report, a line of a table. Without a GPU, tiny configs are compared with traces on the CPU.
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

MINUTES = 25.0  # default limit of all rungs together
CASE_SECONDS = 150  # long, since offloaded models are copied and others compiled
STEADY_STEPS = 4  # after the first one
COMMAND = "python -m benchmarks.gpu_ladder --planned --output docs/measurements/ladder.md"
DEVICE = "rtx4090"  # default of `--planned`


def main(words: list[str] | None = None) -> int:
    """Plan and measure all rungs and write the report after each.

    Return 1 if one failed, or if a dry run's bytes are not the planned ones.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py ladder",
        description="Measure what each memory lever saves and costs, beside what is planned.",
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
    """Plan and measure the rungs that the options name and return the exit code."""
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
            if seconds_left < 5:  # a process cannot start and measure in less
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
    return 1 if any(has_failed_or_differs(row, gpu) for row in report["rows"]) else 0


def has_failed_or_differs(row: dict[str, Any], gpu: bool) -> bool:
    """Return True if a row failed, or if a CPU run's bytes are not the planned ones.

    gpu: the row was measured on a GPU, where plans are not expected to be exact. Bytes of a row
    with `exact` False are not compared on a CPU either.
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
    """Plan all rungs of Llama 3 8B and write a report without measurements.

    output: its .md file; the .json is beside it. Rows of other methods are kept from there. Returns
    1 if a rung could not be planned.
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
    row_order = [rung.key for rung in list_rungs(True)]  # of all methods, with those kept
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
    return 1 if any(has_failed_or_differs(row, True) for row in report["rows"]) else 0


def build_row(rung: Rung) -> dict[str, Any]:
    """Build a rung's row of the report, without what is planned and measured.

    Its `rows` are the sequences of a step, `row_tokens` the tokens of each.
    """
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
    """Plan a case, as `plan_in_processes` takes it; return `row["planned"]`.

    Has the peaks by phase of `gpu_plan.read_peaks`; of all steps the largest `requested`, `active`
    and `reserved`, and `host`, bytes; `tokens_per_second`, None if no time is planned; and the
    plan's `verdict`. Or {"refused": message} if the config or the device does not allow it.
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
    """Measure a case; return {"measured": ...}, {"failed": why} or {"skipped": why}.

    Empty for a refused case, and on a CPU for a compiled one. planned: as `plan_line` returns it.
    """
    if "refused" in planned or (not gpu and case.read().compile):
        return {}
    if not gpu:
        result = run_apart(
            functools.partial(run_or_return_error, gpu_plan.trace_on_cpu, case), seconds
        )
        return result if "failed" in result else {"measured": result}
    free, _ = find_free_host_memory()
    if planned.get("host", 0) > free:
        return {
            "skipped": (
                f"host memory: found {format_bytes(free)}, expected {format_bytes(planned['host'])}"
            )
        }
    result = run_apart(
        functools.partial(run_or_return_error, gpu_plan.measure, case, steady=STEADY_STEPS), seconds
    )
    if "failed" in result:
        return result
    if "out_of_memory" not in result:
        # Of one rank, which is all there are. The first step makes the optimizer's states.
        cfg = case.read()
        tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.max_seq_len
        result["tokens_per_second"] = tokens / statistics.median(result["seconds"][1:])
    return {"measured": result}


def run_or_return_error(
    work: Callable[..., dict[str, Any]], *arguments: Any, **keywords: Any
) -> dict[str, Any]:
    """Return `work(...)`, or {"failed": message} if it raises UserError."""
    try:
        return work(*arguments, **keywords)
    except UserError as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    raise SystemExit(main())

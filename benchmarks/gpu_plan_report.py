"""Write the report of `gpu_check.py plan`, and what the reports of its other parts share.

`gpu_plan.py` calls `write_plan_report` after each job with a dict whose `rows` have a job's
settings (`kind`, `case`, `expandable`), what was `planned`, and by phase the `peaks` that were
`measured`. The JSON file has all of it, the Markdown file every row. An error is planned over
measured, less one.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import ComparedRow, PlanRow
from recipe_lib.units import GIB, MIB

# By metric: the 95th percentile of errors, as absolute values, should be at most this.
GOALS = {"allocated": 0.01, "reserved": 0.03}
# Figures of the allocator, bytes, as `torch.cuda.memory_stats` names them.
METRICS = ("requested", "active", "allocated", "reserved")
HOW = """The recipe's model, optimizer and training step as one rank of N through torch's fake \
process group, random weights, against `make_plan` for the same config and this device. Peaks in \
GiB (2^30) of the first step and, of the second and third, the larger. Requested: from the \
allocator by tensors and kernels that are alive; allocated: in its blocks; active: those and freed \
ones that a stream still uses; reserved: taken from the device. Error: planned over measured, less \
one. What NCCL takes is in neither."""
DRY_HOW = """Nothing was measured on a GPU. Tiny configs are planned for a CPU, and compared with \
what the planner's own tracer sees of a real run on the CPU: bytes of tensors that are alive. \
Blocks and reserved memory are planned only: a CPU has no caching allocator. This checks the \
program; its numbers say nothing about any GPU."""


def write_plan_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write gpu-plan-DEVICE.json and .md into the folder and return their paths."""
    stem = folder / f"gpu-plan-{name_device(report['device'])}"
    return write_pair(stem, report, format_page(report))


def name_device(device: dict[str, Any]) -> str:
    """Return a device's name for file names: `nvidia-h200`, or `dry-run-cpu`.

    device: as `gpu_check.describe_device` returns it.
    """
    if device.get("type") != "cuda":
        return "dry-run-cpu"
    return "-".join(str(device["name"]).lower().split())


def write_pair(stem: Path, report: Any, text: str) -> list[Path]:
    """Write STEM.json with the report and STEM.md with the text; return both paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        stem.with_name(f"{stem.name}.json"): json.dumps(report, indent=1) + "\n",
        stem.with_name(f"{stem.name}.md"): text,
    }
    for path, content in contents.items():
        # Written beside and renamed, so that an interrupted run leaves the report before it whole.
        part = path.with_name(path.name + ".part")
        part.write_text(content)
        part.replace(path)
    return list(contents)


def compute_errors(row: ComparedRow) -> list[tuple[str, str, float]]:
    """Compute (phase, metric, signed error) of each peak that a row has measured.

    Empty for a row without measurements.
    """
    errors = []
    for phase, peaks in row.get("measured", {}).get("peaks", {}).items():
        for metric in METRICS:
            if metric in peaks:
                planned = get_planned_figure(row, phase, metric)
                errors.append((phase, metric, planned / peaks[metric] - 1))
    return errors


def get_planned_figure(row: ComparedRow, phase: str, metric: str) -> int:
    """Return the planned bytes of a metric, with the row's kind of segments."""
    # Segments change nothing but what is reserved.
    expandable = metric == "reserved" and row["expandable"]
    return int(row["planned"][phase]["reserved_expandable" if expandable else metric])


def compute_quantile(errors: Iterable[float], share: float) -> float:
    """Compute the absolute value that this share (0 to 1) of the errors does not exceed."""
    ordered = sorted(map(abs, errors))
    # In whole hundredths, so that the ceiling is exact.
    rank = -(-int(share * 100) * len(ordered) // 100)
    return ordered[max(0, rank - 1)]


def summarize(report: dict[str, Any]) -> list[str]:
    """Summarize errors, goals, thresholds and replays, a line each."""
    rows = report["rows"]
    lines = [*_summarize_errors(rows), *_summarize_thresholds(rows), *_summarize_pinned(rows)]
    replays = [row for row in rows if row["kind"] == "events" and "events" in row]
    if replays:
        num_exact = sum(row["first_difference"] is None and not row["different"] for row in replays)
        lines.append(f"replays of recorded events: {num_exact} of {len(replays)} exact")
    outside_gib = [
        row["measured"]["outside"] / GIB for row in rows if "outside" in row.get("measured", {})
    ]
    if outside_gib:
        lines.append(
            f"on the device outside of torch's allocator: {min(outside_gib):.2f} to"
            f" {max(outside_gib):.2f} GiB"
        )
    for word in ("failed", "skipped"):
        count = sum(word in row for row in rows)
        if count:
            lines.append(f"{word}: {count} of {len(rows)} rows")
    return lines


def _summarize_errors(rows: list[PlanRow]) -> list[str]:
    """Return a line for each metric: quantiles of its errors, and whether its goal is met."""
    errors_by_metric: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for row in rows:
        for _, metric, error in compute_errors(row):
            errors_by_metric[metric].append(error)
    lines = []
    for metric, errors in errors_by_metric.items():
        if not errors:
            if metric != "requested":  # old reports do not have it
                lines.append(f"{metric}: not measured")
            continue
        median_error = compute_quantile(errors, 0.5)
        error_95 = compute_quantile(errors, 0.95)
        line = (
            f"{metric}: {len(errors)} figures, half within {median_error:.2%}, 95 % within"
            f" {error_95:.2%}, "
        )
        line += f"worst {max(errors, key=abs):+.2%}"
        if metric in GOALS:
            verdict = "met" if error_95 <= GOALS[metric] else "MISSED"
            line += f"; goal: 95 % within {GOALS[metric]:.0%}: {verdict}"
        lines.append(line)
    return lines


def _summarize_thresholds(rows: list[PlanRow]) -> list[str]:
    """Return the confusion matrix of runs just below and above the least memory planned to do.

    `said` is the plan's verdict, `found` the run's outcome.
    """
    counts = Counter((row["said"], row["found"]) for row in rows if "found" in row)
    if not counts:
        return []
    num_wrong = counts["fits", "ran out"]
    return [
        f"thresholds: said fits: {counts['fits', 'ran']} ran, {num_wrong} ran out (goal 0:"
        f" {'MISSED' if num_wrong else 'met'}); said does not fit:"
        f" {counts['does not fit', 'ran out']} ran out, {counts['does not fit', 'ran']} ran"
    ]


def _summarize_pinned(rows: list[PlanRow]) -> list[str]:
    """Return a line on the pinned host memory of the runs that are planned to take some."""
    errors = [
        row["planned"]["pinned"] / row["measured"]["pinned"] - 1
        for row in rows
        # Below a MiB are the small copies of any run.
        if "measured" in row and row["planned"].get("pinned", 0) > MIB
    ]
    if not errors:
        return []
    return [f"pinned host memory: {len(errors)} runs, worst {max(errors, key=abs):+.2%}"]


def format_page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report of `gpu_plan.py`.

    Optional key of the report: `notes`, paragraphs on its rows.
    """
    rows = report["rows"]
    dry = report["device"].get("type") != "cuda"
    lines = [f"# Planner: {report['kind']}", "", *format_head(report), ""]
    lines += [DRY_HOW if dry else HOW, "", *(f"- {line}" for line in summarize(report))]
    for note in report.get("notes", ()):
        lines += ["", note]
    peaks = [row for row in rows if row["kind"] == "peaks"]
    lines += ["", "## Peaks", "", *_format_peaks(peaks)]
    thresholds = [row for row in rows if row["kind"] == "threshold"]
    if thresholds:
        lines += ["", "## Thresholds", "", *_format_thresholds(thresholds)]
    events = [row for row in rows if row["kind"] == "events"]
    if events:
        lines += ["", "## Recorded events", "", *_format_events(events)]
    return "\n".join(lines) + "\n"


def format_head(report: dict[str, Any]) -> list[str]:
    """Return a Markdown list of the report's date, command, versions and device.

    Optional keys of the report: `seconds` that it took, `commit`.
    """
    device = report["device"]
    versions = report["versions"]
    seconds = f", {report['seconds']} s" if "seconds" in report else ""
    commit = f", commit {report['commit']}" if "commit" in report else ""
    packages = f", {versions['packages']}" if "packages" in versions else ""
    lines = [
        f"- {report['date']}{commit}, `{report['command']}`{seconds}",
        f"- torch {versions['torch']}{packages}, Python {versions['python']}, {versions['system']}",
    ]
    if device.get("type") == "cuda":
        power = f", power limit {device['power_limit']}" if "power_limit" in device else ""
        lines.append(
            f"- {device['name']}, {device['memory_gib']} GiB, driver {device['driver']}{power},"
            f" planned as {report['hardware']}"
        )
    return lines


def _describe_settings(row: PlanRow) -> str:
    """Return the first cells of a row, which all tables have, without the closing bar."""
    case = row["case"]
    packed = f" in {case['documents']} documents" if case["documents"] else ""
    # Older reports have neither `rank` nor `schedule` nor `levers`.
    ranks = f"{case.get('rank', 0)} of {case['ranks']} {case.get('schedule', '')}".strip()
    levers = "".join(f", {word}" for word in case.get("levers", ()))
    return (
        f"| {case['method']} {case['model']} | {ranks} | {case['batch_size']} x"
        f" {case['sequence']}{packed} | {case['checkpointing']}, {case['wrapping']},"
        f" {case['optimizer']}, {case['chunks']} chunks{levers} |"
        f" {'expandable' if row['expandable'] else 'default'} "
    )


def _format_peaks(rows: list[PlanRow]) -> list[str]:
    """Return a table with a line for each row and phase, of GiB and errors of each metric."""
    heads = []
    for metric in METRICS:
        heads += [f"{metric}: measured", f"{metric}: planned", f"{metric}: error"]
    names = ["config", "ranks", "tokens", "settings", "allocator", "phase", *heads]
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in rows:
        why = row.get("failed") or row.get("skipped")
        if why:
            lines.append(f"{_describe_settings(row)}| {why} {'| ' * len(heads)}|")
            continue
        errors = {(phase, metric): error for phase, metric, error in compute_errors(row)}
        for phase, peaks in row["measured"]["peaks"].items():
            cells = []
            for metric in METRICS:
                planned = f"{get_planned_figure(row, phase, metric) / GIB:.3f}"
                if metric in peaks:
                    error = errors[phase, metric]
                    cells += [f"{peaks[metric] / GIB:.3f}", planned, f"{error:+.2%}"]
                else:
                    cells += ["not measured", planned, ""]
            lines.append(f"{_describe_settings(row)}| {phase} | {' | '.join(cells)} |")
        if "out_of_memory" in row["measured"]:
            lines.append(
                f"{_describe_settings(row)}| out of memory, {row['measured']['out_of_memory']}"
                f" {'| ' * len(heads)}|"
            )
    return lines


def _format_thresholds(rows: list[PlanRow]) -> list[str]:
    """Return a table with a line for each run under a cap: plan's verdict and outcome."""
    lines = [
        "| config | ranks | tokens | settings | allocator | cap, GiB | said | found | retries |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "found" in row:
            retries = row["result"]["retries"]
            cells = [f"{row['cap'] / GIB:.2f}", row["said"], row["found"], str(retries)]
        else:
            cells = ["", "", row.get("failed") or row.get("skipped") or "", ""]
        lines.append(f"{_describe_settings(row)}| {' | '.join(cells)} |")
    return lines


def _format_events(rows: list[PlanRow]) -> list[str]:
    """Return a table with a line for each recording: whether its replay is exact."""
    lines = [
        "| config | ranks | tokens | settings | allocator | cap, MiB | file | events | replay |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "events" in row:
            differences = []
            if row["first_difference"] is not None:
                differences.append(f"segment {row['first_difference']}")
            differences += [f"{name} {figure}" for name, figure in row["different"].items()]
            replay = f"differs: {', '.join(differences)}" if differences else "exact"
            cap = f"{row['cap'] / MIB:.0f}" if row["cap"] else "none"
            cells = [cap, row["file"], str(row["events"]), replay]
        else:
            cells = ["", "", "", row.get("failed") or row.get("skipped") or ""]
        lines.append(f"{_describe_settings(row)}| {' | '.join(cells)} |")
    return lines

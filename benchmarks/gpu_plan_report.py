"""The report of `gpu_check.py plan`: a JSON file with everything, a Markdown file with every row,
misses included.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipe_lib.units import GIB

# The 95th percentile of the errors' sizes should be at most this.
GOALS = {"allocated": 0.01, "reserved": 0.03}
METRICS = ("requested", "active", "allocated", "reserved")
HOW = """The recipe's model, optimizer and training step as one rank of N through torch's fake process group, random \
weights, against `make_plan` for the same config and this device. Peaks in GiB (2^30) of the first step and, of the \
second and third, the larger. Requested: from the allocator by tensors and kernels that are alive; \
allocated: in its blocks; active: those and freed ones that a stream still uses; reserved: taken from the \
device. Error: planned over measured, less one. What NCCL takes is in neither."""
DRY_HOW = """Nothing was measured on a GPU. Tiny configs are planned for a CPU, and compared with what the planner's \
own tracer sees of a real run on the CPU: bytes of tensors that are alive. Blocks and reserved memory are planned \
only: a CPU has no caching allocator. This checks the program; its numbers say nothing about any GPU."""


def write_plan_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes both files, named after the device; a dry run has names of its own. Returns their
    paths.
    """
    return write_pair(
        folder / f"gpu-plan-{name_device(report['device'])}", report, plan_markdown(report)
    )


def name_device(device: dict[str, Any]) -> str:
    """What a report's files are named after: the device, or `dry-run-cpu`."""
    return (
        "-".join(str(device["name"]).lower().split())
        if device.get("type") == "cuda"
        else "dry-run-cpu"
    )


def write_pair(stem: Path, report: Any, text: str) -> list[Path]:
    """Writes STEM.json and STEM.md, each at once; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".json", ".md")]
    for path, content in zip(paths, (json.dumps(report, indent=1) + "\n", text), strict=True):
        part = path.with_name(path.name + ".part")
        part.write_text(content)
        part.replace(path)
    return paths


def compute_errors(row: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(phase, metric, signed error) of what a row has measured."""
    found = []
    for phase, peaks in row.get("measured", {}).get("peaks", {}).items():
        for metric in METRICS:
            if metric in peaks:
                found.append(
                    (phase, metric, get_planned_figure(row, phase, metric) / peaks[metric] - 1)
                )
    return found


def get_planned_figure(row: dict[str, Any], phase: str, metric: str) -> int:
    """What was planned for a figure of a row, bytes."""
    expandable = metric == "reserved" and row["expandable"]
    return int(row["planned"][phase]["reserved_expandable" if expandable else metric])


def share_below(errors: Iterable[float], share: float) -> float:
    """The size that this share of the errors does not exceed."""
    ordered = sorted(map(abs, errors))
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def summarize(report: dict[str, Any]) -> list[str]:
    """Errors, goals, the confusion matrix and the replays, a line each."""
    rows = report["rows"]
    errors = [error for row in rows for error in compute_errors(row)]
    lines = []
    for metric in METRICS:
        found = [error for _, name, error in errors if name == metric]
        if not found:
            lines += (
                [f"{metric}: not measured"] if metric != "requested" else []
            )  # of old reports it is not known
            continue
        half, most = share_below(found, 0.5), share_below(found, 0.95)
        text = f"{metric}: {len(found)} figures, half within {half:.2%}, 95 % within {most:.2%}, "
        text += f"worst {max(found, key=abs):+.2%}"
        if metric in GOALS:
            text += (
                f"; goal: 95 % within {GOALS[metric]:.0%}:"
                f" {'met' if most <= GOALS[metric] else 'MISSED'}"
            )
        lines.append(text)
    counts = Counter((row["said"], row["found"]) for row in rows if "found" in row)
    if counts:
        wrong = counts["fits", "ran out"]
        lines.append(
            f"thresholds: said fits: {counts['fits', 'ran']} ran, {wrong} ran out (goal 0:"
            f" {'MISSED' if wrong else 'met'}); said does not fit:"
            f" {counts['does not fit', 'ran out']} ran out, {counts['does not fit', 'ran']} ran"
        )
    events = [row for row in rows if row["kind"] == "events" and "events" in row]
    if events:
        exact = sum(row["first_difference"] is None and not row["different"] for row in events)
        lines.append(f"replays of recorded events: {exact} of {len(events)} exact")
    outside = [
        row["measured"]["outside"] / GIB for row in rows if "outside" in row.get("measured", {})
    ]
    if outside:
        lines.append(
            f"on the device outside of torch's allocator: {min(outside):.2f} to"
            f" {max(outside):.2f} GiB"
        )
    for word in ("failed", "skipped"):
        count = sum(word in row for row in rows)
        if count:
            lines.append(f"{word}: {count} of {len(rows)} rows")
    return lines


def plan_markdown(report: dict[str, Any]) -> str:
    """The report's tables."""
    rows, dry = report["rows"], report["device"].get("type") != "cuda"
    lines = [f"# Planner: {report['kind']}", "", *format_head(report), ""]
    lines += [DRY_HOW if dry else HOW, "", *(f"- {line}" for line in summarize(report))]
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
    """When, with which command, with what and on which device, as a list."""
    device, versions = report["device"], report["versions"]
    seconds = f", {report['seconds']} s" if "seconds" in report else ""
    commit = f", commit {report['commit']}" if "commit" in report else ""
    packages = f", {versions['packages']}" if "packages" in versions else ""
    lines = [
        f"- {report['date']}{commit}, `{report['command']}`{seconds}",
        f"- torch {versions['torch']}{packages}, Python {versions['python']}, {versions['system']}",
    ]
    if device.get("type") == "cuda":
        power = f", power limit {device['power_limit']}" if "power_limit" in device else ""
        lines.append(f"- {device['name']}, {device['memory_gib']} GiB, driver {device['driver']}{power}, planned as "
                     f"{report['hardware']}")  # fmt: skip
    return lines


def _describe_settings(row: dict[str, Any]) -> str:
    case = row["case"]
    packed = f" in {case['documents']} documents" if case["documents"] else ""
    ranks = f"{case.get('rank', 0)} of {case['ranks']} {case.get('schedule', '')}".strip()
    levers = "".join(f", {word}" for word in case.get("levers", ()))
    return (
        f"| {case['method']} {case['model']} | {ranks} | {case['batch_size']} x"
        f" {case['sequence']}{packed} | {case['checkpointing']}, {case['wrapping']},"
        f" {case['optimizer']}, {case['chunks']} chunks{levers} |"
        f" {'expandable' if row['expandable'] else 'default'} "
    )


def _format_peaks(rows: list[dict[str, Any]]) -> list[str]:
    """One line a config and phase: measured, planned and error of each figure."""
    heads = [f"{metric}: {what}" for metric in METRICS for what in ("measured", "planned", "error")]
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
                found = f"{peaks[metric] / GIB:.3f}" if metric in peaks else "not measured"
                error = f"{errors[phase, metric]:+.2%}" if metric in peaks else ""
                cells += [found, f"{get_planned_figure(row, phase, metric) / GIB:.3f}", error]
            lines.append(f"{_describe_settings(row)}| {phase} | {' | '.join(cells)} |")
        if "out_of_memory" in row["measured"]:
            lines.append(
                f"{_describe_settings(row)}| out of memory, {row['measured']['out_of_memory']}"
                f" {'| ' * len(heads)}|"
            )
    return lines


def _format_thresholds(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| config | ranks | tokens | settings | allocator | cap, GiB | said | found | retries |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "found" in row:
            figures = [
                f"{row['cap'] / GIB:.2f}",
                row["said"],
                row["found"],
                str(row["result"]["retries"]),
            ]
        else:
            figures = ["", "", row.get("failed") or row.get("skipped") or "", ""]
        lines.append(f"{_describe_settings(row)}| {' | '.join(figures)} |")
    return lines


def _format_events(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| config | ranks | tokens | settings | allocator | cap, MiB | file | events | replay |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "events" in row:
            wrong = [f"segment {row['first_difference']}"] * (row["first_difference"] is not None)
            wrong += [f"{name} {figure}" for name, figure in row["different"].items()]
            cap = f"{row['cap'] / 2**20:.0f}" if row["cap"] else "none"
            figures = [
                cap,
                row["file"],
                str(row["events"]),
                f"differs: {', '.join(wrong)}" if wrong else "exact",
            ]
        else:
            figures = ["", "", "", row.get("failed") or row.get("skipped") or ""]
        lines.append(f"{_describe_settings(row)}| {' | '.join(figures)} |")
    return lines

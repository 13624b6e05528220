"""report.html: what a run did, on one page that needs neither network nor script."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_lib.files import replace_text
from recipe_lib.redaction import redact
from recipe_lib.report.page import Figure, Section, render_page
from recipe_lib.report.svg import Curve, draw_chart
from recipe_lib.training.records.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics
from recipe_lib.units import format_count, format_seconds

REPORT_FILE = "report.html"


def write_report(output_dir: Path) -> Path:
    """Writes `output_dir/report.html` from the run's metrics.jsonl, summary.json and config.yaml; returns its path.

    The summary must be there; missing metrics or config leave their part empty. StorageError if the disk refuses.
    """
    output_dir = Path(output_dir)
    summary = json.loads((output_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    metrics, config = output_dir / METRICS_FILE, output_dir / "config.yaml"
    lines = read_metrics(metrics) if metrics.exists() else []
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    path = output_dir / REPORT_FILE
    replace_text(path, redact(render_report(output_dir.name, summary, lines, text)))
    return path


def render_report(name: str, summary: Mapping[str, Any], lines: list[dict[str, Any]], config: str) -> str:
    """The page. name: of the run. summary: as in summary.json. lines: of metrics.jsonl. config: YAML text."""
    headline = _headline(summary)
    versions = summary.get("versions")
    sections = [
        Section("Curves", figures=_charts(lines)),
        Section("Summary", facts=_summary_rows(summary)),
        Section("Software", facts=sorted(versions.items()) if isinstance(versions, dict) else []),
        Section("Config", text=config),
    ]
    status = str(summary.get("status", "unknown"))
    return render_page("run", f"{name}: {headline}", name, headline, sections, status=status)


def _charts(lines: list[dict[str, Any]]) -> list[Figure]:
    """One chart for each kind of number; those that the run never recorded are left out."""
    kind = next((line["memory_kind"] for line in lines if line.get("memory_kind")), "device")
    memory = "Peak device memory" if kind == "device" else f"Peak memory ({kind})"
    shown = [
        ("Loss", "", [("training", "loss"), ("validation", "validation_loss")], False),
        ("Gradient norm, before clipping", "", [("gradient norm", "grad_norm")], True),
        ("Learning rate", "", [("learning rate", "lr")], True),
        ("Tokens per second", "", [("all devices", "tokens_per_second")], True),
        ("Label tokens, share of all", "", [("share", "label_token_fraction")], True),
        (
            memory,
            "GiB",
            [(name, f"peak_memory_{name}_gib") for name in ("reserved", "allocated", "active")],
            True,
        ),
    ]
    charts = []
    for title, unit, series, from_zero in shown:
        curves = [Curve(name, [(line["step"], line[key]) for line in lines if key in line]) for name, key in series]
        curves = [curve for curve in curves if any(value is not None for _, value in curve.points)]
        if curves:
            charts.append(Figure(draw_chart(title, unit, _without_copies(curves), from_zero=from_zero)))
    return charts


def _without_copies(curves: list[Curve]) -> list[Curve]:
    """The curves, of several that are equal (on a CPU all kinds of memory are) only the last."""
    return [curve for at, curve in enumerate(curves) if all(curve.points != later.points for later in curves[at + 1 :])]


def _headline(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary.get('steps', 0)} of {summary.get('total_steps', '?')} steps"]
    if summary.get("first_loss") is not None and summary.get("final_loss") is not None:
        parts.append(f"loss {summary['first_loss']:.4f} → {summary['final_loss']:.4f}")
    if summary.get("final_validation_loss") is not None:
        parts.append(f"validation loss {summary['final_validation_loss']:.4f}")
    return ", ".join(parts)


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of every plain number of the summary, with its unit."""
    rows = []
    for key, value in summary.items():
        if isinstance(value, (dict, list)):
            continue
        name = key.replace("_gib", "").replace("_seconds", " time").replace("_", " ")
        if value is None:
            text = "–"
        elif key.endswith("_gib"):
            text = f"{value:.2f} GiB"
        elif key.endswith("_seconds"):
            text = format_seconds(value)
        elif key.endswith("tokens"):
            text = f"{format_count(value)} ({value:,})"
        else:
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
        rows.append((name, text))
    return rows

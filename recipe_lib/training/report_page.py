"""report.html: what a run did, on one page that needs neither network nor script.

Curves are SVG drawn here; colors follow the reader's light or dark setting.
"""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from recipe_lib.files import replace_text
from recipe_lib.redaction import redact
from recipe_lib.training.curves import Curve, draw_chart
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
    return _PAGE.substitute(
        name=html.escape(name),
        status=html.escape(str(summary.get("status", "unknown"))),
        headline=html.escape(_headline(summary)),
        charts="\n".join(f"<figure>{chart}</figure>" for chart in _charts(lines)),
        summary=_table(_summary_rows(summary)),
        versions=_table(sorted(_section(summary, "versions").items())),
        config=html.escape(config),
    )


def _charts(lines: list[dict[str, Any]]) -> list[str]:
    """One chart for each kind of number; those that the run never recorded are left out."""
    kind = next((line["memory_kind"] for line in lines if line.get("memory_kind")), "device")
    memory = "Peak device memory" if kind == "device" else f"Peak memory ({kind})"
    shown = [
        ("Loss", "", [("training", "loss"), ("validation", "validation_loss")], False),
        ("Gradient norm, before clipping", "", [("gradient norm", "grad_norm")], True),
        ("Learning rate", "", [("learning rate", "lr")], True),
        ("Tokens per second", "", [("all devices", "tokens_per_second")], True),
        ("Trained tokens, share of all", "", [("share", "trained_token_share")], True),
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
            charts.append(draw_chart(title, unit, _without_copies(curves), from_zero=from_zero))
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


def _section(summary: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = summary.get(name)
    return value if isinstance(value, dict) else {}


def _table(rows: list[tuple[str, Any]]) -> str:
    cells = (f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$name: $headline</title>
<style>
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #e3e6ea; --card: #f7f8fa;
  --c0: #1f6feb; --c1: #c2570c; --c2: #2da44e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e6e9ed; --soft: #98a2ae; --line: #2c323a; --card: #1b1f25;
    --c0: #6cb0ff; --c1: #ffa657; --c2: #56d364;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .75rem; }
.status {
  font-size: .8rem; border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .6rem; color: var(--soft);
}
.headline { color: var(--soft); margin: .25rem 0 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 2rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .title { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
svg .curve.c0 { stroke: var(--c0); } svg .curve.c1 { stroke: var(--c1); } svg .curve.c2 { stroke: var(--c2); }
svg .band { opacity: .18; }
svg .dot.c0, svg .key.c0, svg .band.c0 { fill: var(--c0); } svg .dot.c1, svg .key.c1, svg .band.c1 { fill: var(--c1); }
svg .dot.c2, svg .key.c2, svg .band.c2 { fill: var(--c2); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 400; color: var(--soft); padding-right: 1rem; }
td { overflow-wrap: anywhere; }
pre {
  margin: 0; padding: .75rem 1rem; overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, monospace;
}
</style>
</head>
<body>
<h1>$name <span class="status">$status</span></h1>
<p class="headline">$headline</p>
<h2>Curves</h2>
<div class="charts">
$charts
</div>
<div class="tables">
<section><h2>Summary</h2>$summary</section>
<section><h2>Software</h2>$versions</section>
</div>
<h2>Config</h2>
<pre>$config</pre>
</body>
</html>
"""
)

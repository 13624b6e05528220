"""report.html: what a run did, on one page that needs neither network nor script."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from recipe_lib.files import replace_text
from recipe_lib.reading import read_object, read_text
from recipe_lib.redaction import redact
from recipe_lib.report.chart import Curve, draw_line_figure, render_page
from recipe_lib.report.planned import KINDS
from recipe_lib.report.view import Figure, Section, Table
from recipe_lib.training.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics
from recipe_lib.units import GIB, Bytes, format_count, format_seconds

REPORT_FILE = "report.html"
# Keys of a metrics line that a run itself writes; every other number is of the recipe's own.
_ONCE = ("communication_share", "communication_exposed_share", "scaling_efficiency")
_OF_THE_RUN = {
    "step", "epoch", "loss", "grad_norm", "lr", "tokens_per_second", "tokens_per_second_per_device", "label_tokens",
    "label_token_fraction", "seconds", "tokens", "memory_kind", "validation_loss", "validation_tokens", *_ONCE,
}  # fmt: skip
_PEAK, _PLACE = "peak_memory_", "peak_memory_allocated_gib_pipeline_"
_VALIDATION = "validation_"
_NO_PLAN = (
    "This run has no plan, or ended before its plan was made; `tune plan` with the same arguments"
    " makes it, and `tune run` does unless --no-plan or TUNE_PLAN=off says otherwise."
)
_LARGEST = 1e300  # what is beyond cannot be drawn beside other numbers


def write_report(output_dir: Path) -> Path:
    """Write `output_dir/report.html` from the run's metrics.jsonl, summary.json and config.yaml;
    return its path.

    The summary must be there; missing metrics or config leave their part empty. StorageError if the
    disk refuses.
    """
    output_dir = Path(output_dir)
    summary = read_object(output_dir / SUMMARY_FILE)
    metrics, config = output_dir / METRICS_FILE, output_dir / "config.yaml"
    lines = read_metrics(metrics) if metrics.exists() else []
    text = read_text(config) if config.exists() else ""
    path = output_dir / REPORT_FILE
    replace_text(path, redact(render_report(output_dir.name, summary, lines, text)))
    return path


def render_report(
    name: str, summary: Mapping[str, Any], lines: list[dict[str, Any]], config: str
) -> str:
    """Return the page. name: of the run. summary: as in summary.json. lines: of metrics.jsonl.
    config: YAML text.
    """
    headline = _headline(summary)
    versions = summary.get("versions")
    sections = [
        Section("Curves", figures=_charts(lines)),
        Section("Metrics of the recipe", figures=_own_charts(lines)),
        _planned(summary, lines),
        Section("Data", table=_data_table(summary.get("data"))),
        Section(
            "Settings that differ from the defaults",
            table=_settings_table(summary.get("changed_settings")),
        ),
        Section("Summary", facts=[*_summary_rows(summary), *_measured_once(lines)]),
        Section("Software", facts=sorted(versions.items()) if isinstance(versions, dict) else []),
        Section("All settings", listing=config, closed=True),
    ]
    status = str(summary.get("status", "unknown"))
    return render_page("run", f"{name}: {headline}", name, headline, sections, status=status)


def _charts(lines: list[dict[str, Any]]) -> list[Figure]:
    """One chart for each kind of number; those that the run never recorded are left out."""
    kind = next((line["memory_kind"] for line in lines if line.get("memory_kind")), "device")
    memory = "Peak device memory" if kind == "device" else f"Peak memory ({kind})"
    places = sorted(
        {key for line in lines for key in line if key.startswith(_PLACE)},
        key=lambda key: (len(key), key),
    )
    shown: list[tuple[str, str, list[tuple[str, str]], dict[str, Any]]] = [
        ("Loss", "", [("training", "loss"), ("validation", "validation_loss")], {"prefers_log": True}),
        ("Gradient norm, before clipping", "norm", [("gradient norm", "grad_norm")], {"prefers_log": True}),
        ("Learning rate", "", [("learning rate", "lr")], {"from_zero": True}),
        ("Throughput", "tokens per second", [("all devices", "tokens_per_second")], {"from_zero": True}),
        ("Label tokens", "share of all tokens", [("share", "label_token_fraction")], {"from_zero": True}),
        (memory, "GiB", [(name, f"{_PEAK}{name}_gib") for name in ("reserved", "allocated", "active")],
         {"from_zero": True}),
        ("Peak allocated memory, by place in the pipeline", "GiB",
         [(f"place {key.removeprefix(_PLACE)}", key) for key in places], {"from_zero": True}),
    ]  # fmt: skip
    charts = []
    for title, unit, series, how in shown:
        curves = _curves(lines, series)
        # Of several that are equal (on a CPU all kinds of memory are) only the last.
        last = {tuple(curve.points): curve for curve in curves}
        unlike = [curve for curve in curves if last[tuple(curve.points)] is curve]
        if unlike:
            charts.append(draw_line_figure(title, unit, unlike, **how))
    return charts


def _own_charts(lines: list[dict[str, Any]]) -> list[Figure]:
    """Return a chart for each number that the recipe returned with its steps or validations; `x`
    and `validation_x` share one.
    """
    own = dict.fromkeys(
        key for line in lines for key, value in line.items()
        if key not in _OF_THE_RUN and not key.startswith(_PEAK) and _is_number(value)
    )  # fmt: skip
    charts = []
    for key in own:
        checked = f"{_VALIDATION}{key}"
        if key.startswith(_VALIDATION) and key.removeprefix(_VALIDATION) in own:
            continue
        series = [("training", key), ("validation", checked)] if checked in own else [(key, key)]
        if curves := _curves(lines, series):
            charts.append(draw_line_figure(key, "", curves))
    return charts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _curves(lines: list[dict[str, Any]], series: Iterable[tuple[str, str]]) -> list[Curve]:
    """Return the series that have at least one number that can be drawn."""
    curves = [Curve(name, [(line["step"], _drawable(line[key])) for line in lines if key in line])
              for name, key in series]  # fmt: skip
    return [curve for curve in curves if any(value is not None for _, value in curve.points)]


def _drawable(value: Any) -> float | None:
    if not _is_number(value) or not abs(value) < _LARGEST or not math.isfinite(value):
        return None
    return float(value) if abs(value) > 1 / _LARGEST else 0.0


def _planned(summary: Mapping[str, Any], lines: list[dict[str, Any]]) -> Section:
    """Return planned beside measured; nothing for a run whose summary says nothing of plans.

    What a CPU run measures is another quantity than what is planned for a GPU: there, no difference
    is given.
    """
    title, figures = "Planned and measured", summary.get("planned")
    if not isinstance(figures, dict):
        return Section(title, items=[_NO_PLAN] if "planned" in summary else [])
    on_gpu = summary.get("memory_kind") == "device"
    planned = (
        {**figures, **(figures.get("first") or {})} if on_gpu else figures
    )  # of the first rank, which records
    rows = []
    for kind in KINDS:
        gib = summary.get(f"peak_memory_{kind}_gib")
        sizes = [Bytes(size) if size else None for size in (planned.get(kind), gib and gib * GIB)]
        rows.append(_compare(f"peak {kind} memory", *sizes, is_alike=on_gpu))
    seconds = [line["seconds"] for line in lines if _is_number(line.get("seconds"))]
    typical = median(seconds[1:] or seconds) if seconds else None
    if figures.get("seconds") is not None or typical is not None:
        same_device = on_gpu and bool(figures.get("own_device", True))
        times = (value and float(value) for value in (figures.get("seconds"), typical))
        rows.append(_compare("step", *times, is_alike=same_device))
    notes = [_describe_plan(figures)]
    if not on_gpu:
        notes.append(
            f"Measured memory is the {summary.get('memory_kind') or 'memory'} of a CPU process,"
            " which is another quantity than a GPU's memory, so there is no difference."
        )
    notes.append(
        "A planned step has the longest sequences of the data and rates of the data sheet; a"
        " measured one is the median of the run's steps after the first."
    )
    header = ["", "planned", "measured", "planned / measured"]
    return Section(title, table=Table(title, header, rows, ("",), notes=tuple(notes)))


def _compare(name: str, planned: Any, measured: Any, *, is_alike: bool) -> list[Any]:
    """Return a row of both, and how far the planned one is off, if they are the same quantity."""
    cells = [
        _step_text(value) if isinstance(value, float) else value or "–"
        for value in (planned, measured)
    ]
    return [
        name,
        *cells,
        f"{planned / measured - 1:+.1%}" if planned and measured and is_alike else "–",
    ]


def _step_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_seconds(seconds)


def _describe_plan(figures: Mapping[str, Any]) -> str:
    """Return what the plan was made for, and what it said."""
    device = figures.get("device")
    text = f"Planned for {figures.get('ranks', 1)} x {device}" if device else "Planned"
    if device and not figures.get("own_device", True):
        text += ", as there is no GPU here"
    estimate = figures.get("estimate")
    return (
        f"{text}: {figures.get('verdict', '')}{f', an estimate: {estimate}' if estimate else ''}."
    )


def _data_table(data: Any) -> Table | None:
    """Return what became of the samples, a column for training and one for validation; None if it
    was not counted.
    """
    if not isinstance(data, dict) or not data:
        return None
    names = [name for name in ("training", "validation") if name in data]
    rows = [[what, *(_data_text(data[name], key) for name in names)] for what, key in _DATA_ROWS]
    rows = [row for row in rows if any(text not in ("", "0") for text in row[1:])]
    return Table("Data", ["", *names], rows, ("", *names))


_DATA_ROWS = (
    ("source", "source"),
    ("format", "format"),
    ("template", "template"),
    ("samples read", "samples"),
    ("bad samples, left out", "bad"),
    ("sequences", "sequences"),
    ("pairs", "pairs"),
    ("truncated at max_seq_len", "truncated"),
    ("too long or empty, left out", "left_out"),
    ("the same as an earlier one", "duplicates"),
    ("tokens", "tokens"),
    ("label tokens", "label_tokens"),
    ("packed sequences an epoch", "packs"),
    ("tokens in packed sequences", "packed_share"),
)


def _data_text(counts: Mapping[str, Any], key: str) -> str:
    value = counts.get(key)
    if value is None:
        return ""
    if key == "packed_share":
        return f"{value:.1%}, the rest is padding"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _settings_table(changed: Any) -> Table | None:
    if not isinstance(changed, dict) or not changed:
        return None
    rows = [[name, *texts] for name, texts in changed.items()]
    return Table("Settings", ["key", "value", "default"], rows, ("key", "value", "default"))


def _headline(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary.get('steps', 0)} of {summary.get('total_steps', '?')} steps"]
    if summary.get("first_loss") is not None and summary.get("final_loss") is not None:
        parts.append(f"loss {summary['first_loss']:.4f} → {summary['final_loss']:.4f}")
    if summary.get("final_validation_loss") is not None:
        parts.append(f"validation loss {summary['final_validation_loss']:.4f}")
    if summary.get("outcome"):
        parts.append(str(summary["outcome"]))
    return ", ".join(parts)


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of every plain number of the summary, with its unit."""
    rows = []
    for key, value in summary.items():
        if isinstance(value, (dict, list)) or key in ("planned", "data", "changed_settings"):
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


def _measured_once(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what `log.communication_step` measured."""
    return [
        (f"{key.replace('_', ' ')}, step {line['step']}", f"{line[key]:.1%}")
        for line in lines
        for key in _ONCE
        if _is_number(line.get(key))
    ]

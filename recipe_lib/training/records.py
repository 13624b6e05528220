"""Write the records of a run: metrics.jsonl, one JSON object a line, summary.json and report.html.

`TrainingLoop` calls `build_step_metrics` and `compute_expert_load` for the numbers of a step, and
`RunLog` appends them to a `MetricsFile`. At the end of a run it calls `write_summary` and
`write_report`, which draws curves and settings on one page without scripts.
"""

import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recipe_lib
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.files import LineFile, replace_text, report_storage_faults
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.mixture import Routers
from recipe_lib.parallel.world import World
from recipe_lib.reading import parse_json, read_bytes, read_object, read_text
from recipe_lib.redaction import redact
from recipe_lib.report.chart import Curve, draw_line_figure
from recipe_lib.report.page import render_page
from recipe_lib.report.planned import MEMORY_KINDS
from recipe_lib.report.view import Figure, Section, Table
from recipe_lib.units import GIB, Bytes, convert_to_gib, format_count, format_seconds

METRICS_FILE = "metrics.jsonl"
METRICS_LIMIT = 2**31  # bytes that are read of metrics.jsonl at most; a step's line has some 500
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
# Keys that only the line of step `log.communication_step` has, shares of that step's time
_COMMUNICATION_KEYS = ("communication_share", "communication_exposed_share", "scaling_efficiency")
# Keys of metrics lines that the runs of all recipes write. Any other number is one that the recipe
# itself has added.
_RUN_KEYS = {
    "step", "epoch", "loss", "grad_norm", "lr", "tokens_per_second",
    "tokens_per_second_per_device", "label_tokens", "label_token_fraction", "seconds", "tokens",
    "memory_kind", "validation_loss", "validation_tokens", *_COMMUNICATION_KEYS,
}  # fmt: skip
# Beginnings of keys of metrics lines
_PEAK = "peak_memory_"
_STAGE_PEAK = "peak_memory_allocated_gib_pipeline_"  # then a rank's place in the pipeline
_VALIDATION = "validation_"
_NO_PLAN = (
    "This run has no plan, or ended before its plan was made; `tune plan` with the same arguments"
    " makes it, and `tune run` does unless --no-plan or TUNE_PLAN=off says otherwise."
)
_LARGEST = 1e300  # larger numbers cannot be drawn beside others


def build_step_metrics(
    *,
    step: int,
    epoch: float,
    loss: float,
    grad_norm: float,
    lr: float,
    seconds: float,
    label_tokens: int,
    total_tokens: int,
    devices: int,
    peak: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the line of one optimizer step in metrics.jsonl.

    step: number of steps done, this one included. epoch: passes over the data done, with fraction.
    seconds: wall time of the step. label_tokens, total_tokens: targets that the loss counts, and
    tokens without padding, both of all ranks. devices: number of ranks. peak: `active`,
    `allocated`, `reserved` in bytes and `kind` ("device", or what a CPU run measures), as
    `PeakMemory.read()` returns them.
    """
    rate = total_tokens / seconds if seconds > 0 else 0.0
    return {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / devices,
        "label_tokens": label_tokens,
        "label_token_fraction": label_tokens / total_tokens if total_tokens else 0.0,
        **{
            f"peak_memory_{name}_gib": convert_to_gib(peak[name])
            for name in ("active", "allocated", "reserved")
        },
        "memory_kind": peak["kind"],
        "seconds": seconds,
        "tokens": total_tokens,
    }


def compute_expert_load(
    model: nn.Module, world: World, cfg: FullFinetuneConfig
) -> dict[str, Tensor]:
    """Return the step's numbers on experts, on the device, and reset their counters. Collective.

    Empty for a model without routers that count, as compiled layers do not. All ranks get
    the same numbers, in a pipeline too.

    `expert_load_max_over_mean`: tokens of the busiest expert over those of the average one, the
    maximum over layers. `dropped_tokens`: choices of the router that no expert computed.
    `router_aux_loss`: mean over layers and micro-batches, if `router_aux_loss_coef` is set.
    """
    routers = model.routers if isinstance(model, LanguageModel) else Routers()
    if not routers.sizes:
        return {}
    # Tokens that each expert computed, of all layers one after the other.
    rows = torch.zeros(sum(routers.sizes.values()), dtype=torch.int64, device=world.device)
    rows_by_name = dict(zip(routers.sizes, rows.split(list(routers.sizes.values())), strict=True))
    # [sum of the balance losses, choices of the router, forwards that these losses are of]
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)
    for name, counter in routers.counters.items():
        load = counter.load
        if load is None:
            continue
        rows_by_name[name].copy_(load.rows)
        loss = load.loss.clone()  # the sum below must not change the counter
        if world.tensor is not None and counter.shares_tokens:
            # Each tensor-parallel rank has computed a part of the loss.
            dist.all_reduce(loss, group=world.mesh["tensor"].get_group())
        totals += torch.stack([loss, *loss.new_tensor([load.expected, load.calls])])
        load.clear()
    world.sum_over_sequence(rows)
    world.sum_over_sequence(totals[:2])  # each rank of a sequence has as many calls
    world.all_reduce_sum(rows)
    world.all_reduce_sum(totals)
    load_ratios = [
        layer_rows.max() / layer_rows.double().mean().clamp(min=1e-9)
        for layer_rows in rows_by_name.values()
    ]
    metrics = {
        "expert_load_max_over_mean": torch.stack(load_ratios).max(),
        "dropped_tokens": totals[1] - rows.sum(),
    }
    if cfg.router_aux_loss_coef:
        metrics["router_aux_loss"] = totals[0] / totals[2].clamp(min=1)
    return metrics


class MetricsFile:
    """`metrics.jsonl` of a run: appended line by line, cut back to a step when a run resumes."""

    def __init__(self, output_dir: Path) -> None:
        """Write nothing until the first `append`. output_dir: an existing folder."""
        self.path = Path(output_dir) / METRICS_FILE
        self._file: LineFile | None = None  # None while it is closed

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line. Raise StorageError when the disk refuses it."""
        with report_storage_faults():
            if self._file is None:
                self._file = LineFile(self.path)
            # LineFile flushes to the operating system: a killed process loses no recorded step.
            self._file.append((_encode_line(line) + "\n").encode())

    def truncate(self, step: int) -> None:
        """Drop the lines after `step`, and a last line that is incomplete; 0 empties the file.

        A run calls this when it resumes from the state of `step`.
        """
        self.close()
        if self.path.exists():
            lines = [line for line in read_metrics(self.path) if line["step"] <= step]
            # Atomic: if the process is killed here, no line that stays is lost.
            replace_text(self.path, "".join(_encode_line(line) + "\n" for line in lines))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, in order. path: the file, or its folder.

    A line that is incomplete, no object or without a step is left out.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    lines = map(parse_object, read_bytes(path, METRICS_LIMIT).split(b"\n"))
    return [line for line in lines if isinstance(line.get("step"), int)]


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the object of a JSON text; an empty one for any other text."""
    try:
        value = parse_json(text)
    except ValueError:  # of JSON or of UTF-8: torn
        return {}
    return value if isinstance(value, dict) else {}


def read_run_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; an empty list if it has written none."""
    path = output_dir / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def write_summary(
    output_dir: Path,
    status: str,
    settings: Mapping[str, Any],
    *,
    wall_seconds: float,
    total_steps: int,
    world_size: int,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write summary.json from the run's metrics.jsonl and return what it wrote.

    status: `done`, `stopped early`, `stopped`, `diverged` or `failed`. settings: the resolved
    config as a dict. wall_seconds: of this process, set-up included. (`training_seconds` is summed
    from the metrics, steps before a resume included.) facts: further keys, if they are known:
    `data`, `planned`, `changed_settings` and those of `BestStep.list_facts`.
    """
    lines = read_run_metrics(Path(output_dir))
    steps = [line for line in lines if "loss" in line]
    validations = [
        line["validation_loss"] for line in lines if line.get("validation_loss") is not None
    ]
    memory = {
        name: max((line[name] for line in steps if line.get(name) is not None), default=None)
        for name in (f"peak_memory_{kind}_gib" for kind in ("active", "allocated", "reserved"))
    }
    summary = {
        "status": status,
        "steps": steps[-1]["step"] if steps else 0,
        "total_steps": total_steps,
        "first_loss": steps[0]["loss"] if steps else None,
        "final_loss": steps[-1]["loss"] if steps else None,
        "final_validation_loss": validations[-1] if validations else None,
        "best_validation_loss": min(validations, default=None),
        "tokens": sum(line.get("tokens") or 0 for line in steps),
        "label_tokens": sum(line.get("label_tokens") or 0 for line in steps),
        "training_seconds": sum(line.get("seconds") or 0 for line in steps),
        "wall_seconds": wall_seconds,
        **memory,
        "memory_kind": steps[-1].get("memory_kind") if steps else None,
        "world_size": world_size,
        "versions": list_versions(),
        **(facts or {}),
        "settings": settings,
    }
    text = redact(
        json.dumps(_replace_non_finite(summary), indent=2, allow_nan=False, ensure_ascii=False)
    )
    replace_text(Path(output_dir) / SUMMARY_FILE, text + "\n")
    return json.loads(text)


def list_versions() -> dict[str, str]:
    """Return name -> version of the software that a result depends on."""
    versions = {
        "tune-recipes": recipe_lib.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _encode_line(line: Mapping[str, Any]) -> str:
    return redact(json.dumps(_replace_non_finite(line), allow_nan=False, ensure_ascii=False))


def _replace_non_finite(value: Any) -> Any:
    """Return a value with None for numbers that are not finite and text for paths, at any depth.

    JSON has neither.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _replace_non_finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def write_report(output_dir: Path) -> Path:
    """Write report.html from metrics.jsonl, summary.json and config.yaml; return its path.

    The summary must exist; without metrics or config their sections are empty. Raise StorageError
    if the disk refuses the page.
    """
    output_dir = Path(output_dir)
    summary = read_object(output_dir / SUMMARY_FILE)
    lines = read_run_metrics(output_dir)
    config = output_dir / "config.yaml"
    config_text = read_text(config) if config.exists() else ""
    path = output_dir / REPORT_FILE
    replace_text(
        path,
        redact(render_report(output_dir.name, summary=summary, lines=lines, config=config_text)),
    )
    return path


def render_report(
    name: str, summary: Mapping[str, Any], lines: list[dict[str, Any]], config: str
) -> str:
    """Return the page as HTML.

    name: of the run. summary: as in summary.json. lines: of metrics.jsonl. config: YAML text.
    """
    headline = _format_headline(summary)
    changed = summary.get("changed_settings") or {}  # key -> [value, default], as text
    settings = Table(
        "Settings",
        header=["key", "value", "default"],
        rows=[[key, *texts] for key, texts in changed.items()],
        left=("key", "value", "default"),
    )
    sections = [
        Section("Curves", figures=_draw_run_charts(lines)),
        Section("Metrics of the recipe", figures=_draw_recipe_charts(lines)),
        _build_planned_section(summary, lines),
        Section("Data", table=_build_data_table(summary.get("data"))),
        Section(
            "Settings that differ from the defaults",
            table=settings if changed else None,
        ),
        Section("Summary", facts=_list_summary_rows(summary, lines)),
        Section("Software", facts=sorted(summary["versions"].items())),
        Section("All settings", listing=config, is_collapsed=True),
    ]
    return render_page(
        "run",
        title=f"{name}: {headline}",
        name=name,
        headline=headline,
        sections=sections,
        status=summary["status"],
    )


def _draw_run_charts(lines: list[dict[str, Any]]) -> list[Figure]:
    kind = next((line["memory_kind"] for line in lines if line.get("memory_kind")), "device")
    memory = "Peak device memory" if kind == "device" else f"Peak memory ({kind})"
    stage_peaks = sorted(
        {key for line in lines for key in line if key.startswith(_STAGE_PEAK)},
        key=lambda key: (len(key), key),  # 10 after 9
    )
    # (title, unit, (name, key) of each curve, arguments of `draw_line_figure` for the axis)
    log_axis = {"prefers_log": True}
    from_zero = {"from_zero": True}
    charts: list[tuple[str, str, list[tuple[str, str]], dict[str, Any]]] = [
        ("Loss", "", [("training", "loss"), ("validation", "validation_loss")], log_axis),
        ("Gradient norm, before clipping", "norm", [("gradient norm", "grad_norm")], log_axis),
        ("Learning rate", "", [("learning rate", "lr")], from_zero),
        ("Throughput", "tokens per second", [("all devices", "tokens_per_second")], from_zero),
        ("Label tokens", "share of all tokens", [("share", "label_token_fraction")], from_zero),
        (
            memory,
            "GiB",
            [(name, f"{_PEAK}{name}_gib") for name in ("reserved", "allocated", "active")],
            from_zero,
        ),
        (
            "Peak allocated memory, by place in the pipeline",
            "GiB",
            [(f"place {key.removeprefix(_STAGE_PEAK)}", key) for key in stage_peaks],
            from_zero,
        ),
    ]
    figures = []
    for title, unit, series, axis in charts:
        curves = _build_curves(lines, series)
        # Of equal curves only the last is drawn: on a CPU all kinds of memory are equal.
        last_curve_by_points = {tuple(curve.points): curve for curve in curves}
        distinct_curves = [
            curve for curve in curves if last_curve_by_points[tuple(curve.points)] is curve
        ]
        if distinct_curves:
            figures.append(draw_line_figure(title, unit, distinct_curves, **axis))
    return figures


def _draw_recipe_charts(lines: list[dict[str, Any]]) -> list[Figure]:
    """Return a chart for each number that the recipe itself has added to steps or validations.

    A number `x` of steps and the number `validation_x` share a chart.
    """
    keys = dict.fromkeys(
        key for line in lines for key, value in line.items()
        if key not in _RUN_KEYS and not key.startswith(_PEAK) and _is_number(value)
    )  # fmt: skip
    figures = []
    for key in keys:
        if key.startswith(_VALIDATION) and key.removeprefix(_VALIDATION) in keys:
            continue
        series = [(key, key)]
        if f"{_VALIDATION}{key}" in keys:
            series = [("training", key), ("validation", f"{_VALIDATION}{key}")]
        if curves := _build_curves(lines, series):
            figures.append(draw_line_figure(key, "", curves))
    return figures


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _build_curves(lines: list[dict[str, Any]], series: Iterable[tuple[str, str]]) -> list[Curve]:
    """Return the curves that have at least one number. series: (name, key in a line) of each."""
    curves = [
        Curve(
            name, [(line["step"], _limit_to_drawable(line[key])) for line in lines if key in line]
        )
        for name, key in series
    ]
    return [curve for curve in curves if any(value is not None for _, value in curve.points)]


def _limit_to_drawable(value: Any) -> float | None:
    """Return a value as a number that can be drawn: 0 for a tiny one.

    None for a huge one, and for a value that is no number.
    """
    if not _is_number(value) or not abs(value) < _LARGEST or not math.isfinite(value):
        return None
    return float(value) if abs(value) > 1 / _LARGEST else 0.0


def _build_planned_section(summary: Mapping[str, Any], lines: list[dict[str, Any]]) -> Section:
    """Return the section of planned and measured memory and time.

    It is empty if the summary has no key `planned`.
    """
    title = "Planned and measured"
    # Numbers of the plan that `tune run` made beside the run; None if it made none in time. The
    # peaks of the rank that needs most, in bytes, have the names of KINDS, and `first` has those of
    # rank 0. `seconds` is the planned time of a step. `own_device`: the plan is for the GPUs here.
    figures = summary.get("planned")
    if not isinstance(figures, dict):
        return Section(title, items=[_NO_PLAN] if "planned" in summary else [])
    # A CPU run measures another quantity than what is planned for a GPU: no ratio is shown then.
    on_gpu = summary.get("memory_kind") == "device"
    # Rank 0 records what is measured, so that its planned peaks are the ones to compare.
    planned = {**figures, **(figures.get("first") or {})} if on_gpu else figures
    rows = []
    for kind in MEMORY_KINDS:
        gib = summary.get(f"peak_memory_{kind}_gib")
        sizes = [Bytes(size) if size else None for size in (planned.get(kind), gib and gib * GIB)]
        rows.append(_build_comparison_row(f"peak {kind} memory", *sizes, is_alike=on_gpu))
    seconds = [line["seconds"] for line in lines if _is_number(line.get("seconds"))]
    typical = median(seconds[1:] or seconds) if seconds else None  # the first step takes longer
    if figures.get("seconds") is not None or typical is not None:
        is_same_device = on_gpu and bool(figures.get("own_device", True))
        times = (value and float(value) for value in (figures.get("seconds"), typical))
        rows.append(_build_comparison_row("step", *times, is_alike=is_same_device))
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
    return Section(
        title, table=Table(title, header=header, rows=rows, left=("",), notes=tuple(notes))
    )


def _build_comparison_row(name: str, planned: Any, measured: Any, *, is_alike: bool) -> list[Any]:
    """Return the row [name, planned, measured, relative difference of planned from measured].

    planned, measured: Bytes, seconds (float) or None. is_alike: they are the same quantity; else no
    difference is shown.
    """
    cells = [
        _format_step_seconds(value) if isinstance(value, float) else value or "–"
        for value in (planned, measured)
    ]
    return [
        name,
        *cells,
        f"{planned / measured - 1:+.1%}" if planned and measured and is_alike else "–",
    ]


def _format_step_seconds(seconds: float) -> str:
    """Return seconds with three digits, from a minute on as `1m15s`."""
    return f"{seconds:.3g} s" if seconds < 60 else format_seconds(seconds)


def _describe_plan(figures: Mapping[str, Any]) -> str:
    """Return a note on the devices that the plan is for, and on whether the run fits them.

    figures: see `_build_planned_section`.
    """
    device = figures.get("device")
    text = f"Planned for {figures.get('ranks', 1)} x {device}" if device else "Planned"
    if device and not figures.get("own_device", True):
        text += ", as there is no GPU here"
    estimate = figures.get("estimate")
    return (
        f"{text}: {figures.get('verdict', '')}{f', an estimate: {estimate}' if estimate else ''}."
    )


def _build_data_table(data: Mapping[str, Any] | None) -> Table | None:
    """Return a table of counts of samples, with columns for training and validation.

    data: `training` or `validation` -> counts by name. None or empty: nothing was counted, so that
    there is no table.
    """
    if not data:
        return None
    names = [name for name in ("training", "validation") if name in data]
    rows = [
        [title, *(_format_data_count(data[name], key) for name in names)]
        for title, key in _DATA_ROWS
    ]
    rows = [row for row in rows if any(text not in ("", "0") for text in row[1:])]
    return Table("Data", header=["", *names], rows=rows, left=("", *names))


# (title of the row, key of the count) of the table of data
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


def _format_data_count(counts: Mapping[str, Any], key: str) -> str:
    value = counts.get(key)
    if value is None:
        return ""
    if key == "packed_share":
        return f"{value:.1%}, the rest is padding"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_headline(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary['steps']} of {summary['total_steps']} steps"]
    if summary["first_loss"] is not None and summary["final_loss"] is not None:
        parts.append(f"loss {summary['first_loss']:.4f} → {summary['final_loss']:.4f}")
    if summary["final_validation_loss"] is not None:
        parts.append(f"validation loss {summary['final_validation_loss']:.4f}")
    if summary.get("outcome"):
        parts.append(str(summary["outcome"]))
    return ", ".join(parts)


def _list_summary_rows(
    summary: Mapping[str, Any], lines: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Return (name, text with unit) of the summary's scalars and of the communication shares."""
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
    for line in lines:
        rows += [
            (f"{key.replace('_', ' ')}, step {line['step']}", f"{line[key]:.1%}")
            for key in _COMMUNICATION_KEYS
            if _is_number(line.get(key))
        ]
    return rows

"""What a run was planned to take, beside what it took: from the process that plans it to its summary and its page."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe_lib.reading import read_object
from recipe_lib.report.terminal import Table
from recipe_lib.units import GIB, format_bytes, format_seconds

FIGURES = "TUNE_PLAN_FIGURES"  # the file where `tune run` has the figures of its plan written
KINDS = ("active", "allocated", "reserved")
NO_PLAN = (
    "This run has no plan, or ended before its plan was made; `tune plan` with the same arguments makes it, and "
    "`tune run` does unless --no-plan or TUNE_PLAN=off says otherwise."
)


def planned_figures(output_dir: Path) -> dict[str, Any] | None:
    """The figures of the plan of the run in `output_dir`, if `tune run` has made it by now."""
    with suppress(KeyError, OSError, ValueError):
        figures = read_object(os.environ[FIGURES])
        if figures.get("output_dir") == os.path.abspath(output_dir):
            return figures
    return None


def planned_table(figures: Mapping[str, Any], summary: Mapping[str, Any], step_seconds: float | None) -> Table:
    """Rows on memory and on the time of a step. figures: of the plan. summary: of the run, of whose first rank its
    memory is. step_seconds: as measured.

    What a CPU run measures is another quantity than what is planned for a GPU: there, no difference is given.
    """
    on_gpu = summary.get("memory_kind") == "device"
    planned = {**figures, **(figures.get("first") or {})} if on_gpu else figures
    rows = [_memory_row(kind, planned.get(kind), summary, on_gpu) for kind in KINDS]
    rows.append(_time_row(figures.get("seconds"), step_seconds, on_gpu and bool(figures.get("own_device", True))))
    notes = [_where(figures)]
    if not on_gpu:
        notes.append(
            f"Measured memory is the {summary.get('memory_kind') or 'memory'} of a CPU process, which is another "
            "quantity than a GPU's memory, so there is no difference."
        )
    notes.append(
        "A planned step has the longest sequences of the data and rates of the data sheet; a measured one is the "
        "median of the run's steps after the first."
    )
    header = ["", "planned", "measured", "planned / measured"]
    return Table("Planned and measured", header, [row for row in rows if row], ("",), notes=tuple(notes))


def _memory_row(kind: str, planned: Any, summary: Mapping[str, Any], on_gpu: bool) -> list[str]:
    found = summary.get(f"peak_memory_{kind}_gib")
    real = found * GIB if found else None
    texts = [format_bytes(int(size)) if size else "–" for size in (planned, real)]
    return [f"peak {kind} memory", *texts, _difference(planned, real) if on_gpu else "–"]


def _time_row(planned: Any, real: float | None, same_device: bool) -> list[str]:
    if planned is None and real is None:
        return []
    texts = [f"{seconds:.3g} s" if seconds and seconds < 60 else format_seconds(seconds) if seconds else "–"
             for seconds in (planned, real)]  # fmt: skip
    return ["step", *texts, _difference(planned, real) if same_device else "–"]


def _difference(planned: Any, real: float | None) -> str:
    return f"{planned / real - 1:+.1%}" if planned and real else "–"


def _where(figures: Mapping[str, Any]) -> str:
    """What the plan was made for, and what it said."""
    device = figures.get("device")
    text = f"Planned for {figures.get('ranks', 1)} x {device}" if device else "Planned"
    if device and not figures.get("own_device", True):
        text += ", as there is no GPU here"
    estimate = figures.get("estimate")
    return f"{text}: {figures.get('verdict', '')}{f', an estimate: {estimate}' if estimate else ''}."

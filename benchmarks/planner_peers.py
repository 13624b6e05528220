"""Plan the runs that other memory planners have published with measurements, and write a page.

    python -m benchmarks.planner_peers --output docs/measurements/planner_peers.md

A row is one such run: measured bytes, the other planner's, and its settings. A group is the rows of
one source, in `peer_rows.json` or by `planner_megatron.py` and `planner_simumax.py`. The programs
that ran are imitated in `peer_stacks.py`. A quarter of an hour of a CPU; no GPU, no weights.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import planner_simumax
from benchmarks.megatron_stack import Gpt
from benchmarks.peer_stacks import PeerRun
from benchmarks.peer_traces import STEP, trace_run
from benchmarks.planner_megatron import PUBLISHED, build_rows
from benchmarks.planner_rows import GB, plan_run
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.units import GIB, MIB

ROWS = Path(__file__).with_name("peer_rows.json")
UNITS = {"GB": GB, "GiB": GIB, "MiB": MIB}
DIGITS = {"GB": 3, "GiB": 2, "MiB": 1}  # that the page shows, by unit
# Metric of a row -> its name on the page.
METRICS = {"allocated": "allocated", "reserved": "reserved", "process": "whole process"}
# A group of peer_rows.json: `title`, `tool`, `source`, `stack`, `notes` (text of the page), `unit`,
# `settings` (fields of `PeerRun`), `rows`; and where there are any `choices` (other fields to try),
# `context` (bytes of CUDA's context), `more` (lines of the page).
Group = Mapping[str, Any]
# A row of a group: `name`, `measured` and `theirs` (bytes by metric), `run` (fields of `PeerRun`
# over the group's). Rows of our own modules have `ours` (planned bytes) in place of `run`.
Row = Mapping[str, Any]
INTRODUCTION = [
    (
        "Imitated is what their code allocates, and nothing was fitted to a measured figure:"
        " transformers' own model and loss run on the simulated device; NF4 as bitsandbytes"
        " quantizes and dequantizes it, LoRA as PEFT adds it, the training loop and the loading of"
        " weights are written out in `benchmarks/peer_stacks.py` and `peer_traces.py`. transformers"
        " and torch are those of this page, not those of each run. What was seen to differ is set"
        " per group and said there. All figures were known when the imitations were written, as"
        " they were to those who fitted formulas to them; where rows were held out of that, it is"
        " said."
    ),
]
# (published figures, why they are not planned).
NOT_PLANNED = [
    (
        "Loggetta's rows of experts (OLMoE, Qwen3-30B-A3B, granite, Mixtral)",
        "kernels of its own for grouped NF4",
    ),
    (
        "Loggetta's streamed ladders of Qwen3-32B",
        "no plan was published for single rungs; streamed rows are above",
    ),
    (
        "Soup: DPO rows, rows of 24 layers of width 1024",
        "sizes or targets of the runs are not stated",
    ),
    (
        "SimuMax: experts and long contexts on 8 B200",
        "experts, and sequences divided over ranks, which are not imitated",
    ),
    ("LLMem, xMem", "their tables are plots or are not public as text"),
]


def read_rows() -> dict[str, Any]:
    """Return the content of peer_rows.json: `models`, their sizes by name, and `groups` of rows."""
    return dict(json.loads(ROWS.read_text(encoding="utf-8")))


def build_run(group: Group, row: Row) -> PeerRun:
    """Return a row's run: its settings over those of its group."""
    settings: dict[str, Any] = {**group["settings"], **row["run"]}
    for name in ("targets", "capability"):
        settings[name] = tuple(settings[name])  # a run has to be hashable, see `plan_figures`
    return PeerRun(**settings)


@lru_cache(maxsize=1)  # a trace is large
def _trace_run(run: PeerRun) -> Trace:
    """Trace a run, printing it to stderr."""
    print(run, file=sys.stderr, flush=True)
    return trace_run(run, read_rows()["models"][run.model])


@cache
def plan_figures(run: PeerRun) -> dict[str, float]:
    """Return the planned bytes, allocated and reserved, of the phase that the row is about."""
    # Fields that the trace does not depend on are set alike, so that it is made once.
    trace = _trace_run(replace(run, expandable=False, phase=STEP))
    peaks = replay(trace, AllocatorSettings(expandable=run.expandable)).phases[run.phase]
    return {"allocated": peaks.allocated, "reserved": peaks.reserved}


def plan_row(group: Group, row: Row) -> dict[str, float]:
    """Return the planned bytes of a row, by metric.

    A whole process takes its reserved bytes and those of the group's CUDA context.
    """
    planned = dict(row["ours"]) if "ours" in row else dict(plan_figures(build_run(group, row)))
    if "context" in group:
        planned["process"] = planned["reserved"] + group["context"]
    return planned


def compute_errors(group: Group, metric: str) -> tuple[list[float], list[float]]:
    """Return the errors (theirs, ours) of the rows with the metric: planned over measured, less 1.

    Theirs are fewer where they published no plan of a row.
    """
    rows = [row for row in group["rows"] if metric in row["measured"]]
    theirs = [
        row["theirs"][metric] / row["measured"][metric] - 1
        for row in rows
        if metric in row["theirs"]
    ]
    ours = [plan_row(group, row)[metric] / row["measured"][metric] - 1 for row in rows]
    return theirs, ours


def list_metrics(group: Group) -> list[str]:
    """Return the metrics that rows of a group have, in the order of `METRICS`."""
    return [metric for metric in METRICS if any(metric in row["measured"] for row in group["rows"])]


def format_table(group: Group) -> list[str]:
    """Return a table with a line for each measured figure."""
    unit, digits = UNITS[group["unit"]], DIGITS[group["unit"]]
    lines = [
        (
            f"| row | metric | measured, {group['unit']} | their plan | their error | our plan |"
            " our error |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in group["rows"]:
        for metric, measured in row["measured"].items():
            cells = [f"{measured / unit:.{digits}f}"]
            for planned in (row["theirs"].get(metric), plan_row(group, row)[metric]):
                if planned is None:
                    cells += ["", ""]
                else:
                    cells += [f"{planned / unit:.{digits}f}", f"{planned / measured - 1:+.2%}"]
            lines.append(f"| {row['name']} | {METRICS[metric]} | {' | '.join(cells)} |")
    return lines


def format_choices(group: Group) -> list[str]:
    """Return a table of what other choices of the imitation would give; [] without `choices`."""
    if "choices" not in group:
        return []
    unit, digits = UNITS[group["unit"]], DIGITS[group["unit"]]
    lines = [
        "",
        "Other choices, allocated memory:",
        "",
        f"| choice | row | measured, {group['unit']} | our plan | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for choice in group["choices"]:
        # A choice names one row, and the fields of its run that are changed.
        row = next(row for row in group["rows"] if row["name"] == choice["row"])
        measured = row["measured"]["allocated"]
        run = build_run(group, {"run": {**row["run"], **choice["run"]}})
        planned = plan_figures(run)["allocated"]
        cells = (
            f"{measured / unit:.{digits}f} | {planned / unit:.{digits}f} |"
            f" {planned / measured - 1:+.2%}"
        )
        lines.append(f"| {choice['choice']} | {choice['row']} | {cells} |")
    return lines


def format_errors(errors: list[float]) -> str:
    """Return the mean of the errors' sizes and the worst error as two cells; empty for []."""
    if not errors:
        return " | "
    return f"{sum(map(abs, errors)) / len(errors):.2%} | {max(errors, key=abs):+.2%}"


def summarize(groups: list[Group]) -> list[str]:
    """Return a table with a line for each group and metric."""
    lines = [
        "| group | metric | rows | their mean | their worst | our mean | our worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for group in groups:
        for metric in list_metrics(group):
            theirs, ours = compute_errors(group, metric)
            cells = f"{format_errors(theirs)} | {format_errors(ours)}"
            lines.append(f"| {group['title']} | {METRICS[metric]} | {len(ours)} | {cells} |")
    return lines


def build_megatron_group() -> Group:
    """Return the group of the four rows that Megatron's own tool was published with."""
    rows = []
    for (_, _, measured, predicted), row in zip(PUBLISHED, build_rows(Gpt()), strict=True):
        rows.append(
            {
                "name": row.name,
                "measured": {"allocated": measured * GIB},
                "theirs": {"allocated": predicted * GIB},
                "ours": {"allocated": plan_run(row.run, row.stack).peak.allocated},
            }
        )
    return {
        "title": "Megatron-LM: Llama 2 7B on 8 H800",
        "tool": "Megatron's analysis tool",
        "unit": "GiB",
        "source": "github.com/NVIDIA/Megatron-LM/pull/482",
        "stack": "micro-batch / global batch / data / pipeline / tensor",
        "rows": rows,
        "notes": [
            "From [planner.md](planner.md), which has the imitated stack, what it assumes and other"
            " choices."
        ],
    }


def format_page(groups: list[Group]) -> str:
    """Return the text of docs/measurements/planner_peers.md."""
    num_rows = sum(len(group["rows"]) for group in groups)
    lines = [
        "# Rows of other planners",
        "",
        (
            "`python -m benchmarks.planner_peers --output docs/measurements/planner_peers.md`"
            " writes this page. Other memory planners publish what they plan next to what they"
            f" measured; here are {num_rows} of their rows, and what our planner says of the same"
            " run."
            " Nothing was measured by us. Error: planned over measured, less one; mean: of the"
            " errors' sizes. GB is 10^9, GiB 2^30, MiB 2^20 bytes. torch"
            f" {torch.__version__.partition('+')[0]} and transformers {transformers.__version__} on"
            " a simulated device."
        ),
        "",
        *INTRODUCTION,
        "",
        *summarize(groups),
    ]
    for group in groups:
        lines += [
            "",
            f"## {group['title']}",
            "",
            f"Planned by {group['tool']}. Source: {group['source']}.",
            "",
        ]
        lines += [f"Stack: {group['stack']}.", "", *format_table(group), ""]
        lines += [f"- {note}" for note in group["notes"]]
        lines += [*format_choices(group), *group.get("more", [])]
    lines += ["", "## Not planned", "", "| what | why |", "| --- | --- |"]
    lines += [f"| {figures} | {reason} |" for figures, reason in NOT_PLANNED]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description="Plan the runs that other memory planners have published."
    )
    parser.add_argument("--output", type=Path, help="file to write; default: standard output")
    options = parser.parse_args(argv)
    text = format_page(
        [*read_rows()["groups"], build_megatron_group(), planner_simumax.build_group()]
    )
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

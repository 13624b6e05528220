"""Other memory planners' own rows, planned and measured, and what our planner says of the same runs.

    python -m benchmarks.planner_peers --output docs/measurements/planner_peers.md

Twenty minutes of a CPU; no GPU, no weights. The rows, with what was measured, what the other planner said and every
setting, are in `peer_rows.json`; the stacks that they ran on are imitated in `peer_stacks.py` and `megatron_stack.py`.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_stacks import PeerRun
from benchmarks.peer_traces import SETUP, trace_run
from benchmarks.planner_megatron import PUBLISHED, name_of, rows_of
from benchmarks.planner_rows import GB, planned
from benchmarks.megatron_stack import Gpt
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.units import GIB, MIB

ROWS = Path(__file__).with_name("peer_rows.json")
UNITS = {"GB": GB, "GiB": GIB, "MiB": MIB}
DIGITS = {"GB": 3, "GiB": 2, "MiB": 1}
METRICS = {"allocated": "allocated", "reserved": "reserved", "process": "whole process"}
Figures = Mapping[str, float]  # bytes, by metric


def read_rows() -> dict[str, Any]:
    """`models`, sizes by name, and `groups` of rows."""
    return dict(json.loads(ROWS.read_text(encoding="utf-8")))


def run_of(group: Mapping[str, Any], row: Mapping[str, Any]) -> PeerRun:
    """A row's settings, over those of its group."""
    settings = {**group["settings"], **row["run"]}
    return PeerRun(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})


@cache
def figures_of(run: PeerRun) -> dict[str, int]:
    """Planned bytes, allocated and reserved, of the phase that the row is about, and allocated before the first step."""
    print(run, file=sys.stderr, flush=True)
    trace = trace_run(replace(run, expandable=False), read_rows()["models"][run.model])
    phases = replay(trace, AllocatorSettings(expandable=run.expandable)).phases
    found = phases[run.phase]
    return {"allocated": found.allocated, "reserved": found.reserved}


def ours(group: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """What we plan of a row's metrics. A whole process is what is reserved and the context that the group states."""
    if "layout" in row:
        return {"allocated": row["planned"]}
    found: dict[str, float] = dict(figures_of(run_of(group, row)))
    found["process"] = found["reserved"] + group["context"]
    return {metric: found[metric] for metric in row["measured"] if metric not in row.get("not_planned", ())}


def errors(group: Mapping[str, Any], metric: str) -> list[tuple[float | None, float | None]]:
    """(theirs, ours) of each row that has the metric: planned over measured, less one; None where nothing is said."""
    found = []
    for row in group["rows"]:
        if metric in row["measured"]:
            measured = row["measured"][metric]
            sides = (row["theirs"].get(metric), ours(group, row).get(metric))
            found.append(tuple(None if side is None else side / measured - 1 for side in sides))
    return found  # type: ignore[return-value]


def size_of(found: list[float]) -> str:
    """Mean of the errors' sizes, and the worst error."""
    if not found:
        return "- | -"
    return f"{sum(map(abs, found)) / len(found):.2%} | {max(found, key=abs):+.2%}"

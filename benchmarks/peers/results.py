"""Define the report of `gpu_check.py peers`: cases, the runs of their sides, what follows of them.

`gpu_peers.py` fills a `PeersReport`, `report.py` judges and formats it. The JSON file beside the
page has one object for each dataclass: `to_json` and `from_json` convert them. A key whose value
there is none of is left out of the file where the field says so.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import PeerCase


@dataclass
class RunRecord:
    """Hold one run of a side. All but `failed` is None or empty for a run that failed.

    What is None or empty is left out of the file.
    """

    losses: list[float] = field(default_factory=list)  # of each step
    grad_norms: list[float] = field(default_factory=list)  # of each step, before clipping
    # Seconds of a clock at the end of each step; empty in the file of a run without a GPU.
    marks: list[float] = field(default_factory=list)
    allocated: int | None = None  # peak bytes of the GPU's allocator; None without a GPU
    reserved: int | None = None  # likewise
    resident: int | None = None  # largest bytes of the process in memory; None with a GPU
    failed: str | None = None  # why it did not come to its end; None if it did

    def to_json(self) -> dict[str, Any]:
        """Return the run's object in the file."""
        return {name: value for name, value in vars(self).items() if value not in (None, [])}


@dataclass
class SideResult:
    """Hold what a side did in a case."""

    runs: list[RunRecord] = field(default_factory=list)  # in the order they were made
    absent: str | None = None  # why it took no part; None (not in the file) if it did

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SideResult":
        """Return the result that the file has."""
        runs = [RunRecord(**run) for run in content["runs"]]
        return cls(runs, content.get("absent"))

    def to_json(self) -> dict[str, Any]:
        """Return the result's object in the file."""
        content: dict[str, Any] = {"runs": [run.to_json() for run in self.runs]}
        if self.absent is not None:
            content["absent"] = self.absent
        return content

    def list_good_runs(self) -> list[RunRecord]:
        """Return the runs that came to their end; [] if the side took no part."""
        return [run for run in self.runs if run.failed is None]


@dataclass
class SideComparison:
    """Hold how far the runs of a side are from our first run, at the worst step of all."""

    loss: float | None  # largest relative difference; None: infinite, or no run of ours
    grad_norm: float | None  # likewise
    equal: bool | None  # both are within the case's tolerances; None: no run of ours


@dataclass
class SideFigures:
    """Hold how fast a side was on a GPU, and in how much memory."""

    seconds: float  # of a step
    tokens_per_second: float
    flop_per_second: float  # of the model, without recomputation
    share: float | None  # of the matmul rate; None (not in the file): that was not measured
    allocated: int  # peak bytes of the GPU's allocator
    reserved: int  # likewise

    def to_json(self) -> dict[str, Any]:
        """Return the figures' object in the file."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class CaseEntry:
    """Hold a case with what its sides did; the mappings are by side."""

    case: PeerCase
    model: str  # that all sides start from, in words
    results: dict[str, SideResult] = field(default_factory=dict)
    comparison: dict[str, SideComparison] = field(default_factory=dict)  # of sides with a good run
    # None ({} in the file): no step of the side was timed. Empty without a GPU.
    figures: dict[str, SideFigures | None] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "CaseEntry":
        """Return the entry that the file has."""
        entry = cls(PeerCase(**content["case"]), content["model"])
        for side, result in content["results"].items():
            entry.results[side] = SideResult.from_json(result)
        for side, comparison in content["comparison"].items():
            entry.comparison[side] = SideComparison(**comparison)
        for side, figures in content["figures"].items():
            entry.figures[side] = SideFigures(**{"share": None} | figures) if figures else None
        return entry

    def to_json(self) -> dict[str, Any]:
        """Return the entry's object in the file."""
        figures = {}
        for side, side_figures in self.figures.items():
            figures[side] = {} if side_figures is None else side_figures.to_json()
        return {
            "case": dataclasses.asdict(self.case),
            "model": self.model,
            "results": {side: result.to_json() for side, result in self.results.items()},
            "comparison": {side: vars(compared) for side, compared in self.comparison.items()},
            "figures": figures,
        }


@dataclass
class PeersReport:
    """Hold the whole report."""

    kind: str  # in words: measured, or a dry run
    date: str  # in ISO 8601, UTC
    command: str  # that wrote it
    device: Mapping[str, Any]  # as `gpu_check.describe_device` returns it
    dtype: str  # `bf16` or `fp32`
    repeats: int  # runs of each side
    cases: list[CaseEntry]
    matmul: float | None  # measured rate of bf16 matmuls, FLOP a second; None: not measured
    versions: dict[str, dict[str, str]]  # side -> package -> version; {} without its environment
    model: str = ""  # that cases without one of their own train: a folder or a preset
    seconds: int = 0  # that all of it took
    commit: str | None = None  # that was run; None (not in the file): not noted

    @property
    def on_gpu(self) -> bool:
        """Return True if the runs were on a GPU."""
        return self.device.get("type") == "cuda"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PeersReport":
        """Return the report that the file has."""
        cases = [CaseEntry.from_json(entry) for entry in content["cases"]]
        return cls(**dict(content) | {"cases": cases})

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file. Without a GPU it has no step's time."""
        content = vars(self) | {"cases": [entry.to_json() for entry in self.cases]}
        if self.commit is None:
            del content["commit"]
        if not self.on_gpu:
            for entry in content["cases"]:
                for result in entry["results"].values():
                    for run in result["runs"]:
                        run.pop("marks", None)
        return content


def read_peers_report(path: Path) -> PeersReport:
    """Read a report from its JSON file."""
    return PeersReport.from_json(json.loads(path.read_text(encoding="utf-8")))
